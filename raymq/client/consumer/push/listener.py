"""Listener is the actor that runs a user's listener.

This module belongs to the client package, not to the servers, because the actor runs in the user's environment. It has
the user's `runtime_env` and the user's import path, which may hold packages with any name. The listener is sent as
bytes of cloudpickle, pickled by value, so a function of the user's own module needs no installation on the workers.

In the consume mode "share" the process receives messages itself (raymq.client.consumer.share.feed). In the mode "queue"
the Pull actor of the Listener's node hosts the instance (raymq.client.consumer.push.hosting). The Listener requests
tasks from the Pull actor, and reports finished messages (raymq.client.consumer.push.task_feed). Threads of a
ConsumePool call the user's listener, so a call that blocks delays neither the reports nor other calls.

If access control is on, the Listener accepts the signed calls of its user's program and of its Pull actor
(raymq.remoting.access.stand_in).

All state of the Listener is lost when the actor dies. Ray restarts the actor with the same listener, and the Pull actor
delivers its unfinished messages again. So the listener is called at least once per message.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, Protocol

import cloudpickle
import ray

from raymq.client.consumer.push.answers import Replier, check_listener
from raymq.client.consumer.push.feed_client import FeedClient
from raymq.client.consumer.push.hook import ConsumeHook
from raymq.client.consumer.push.hosting import Hosted, Hosting, Instance
from raymq.client.consumer.push.output import OutputBuffer, OutputPart
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.push.task_feed import TaskFeed
from raymq.common import identity
from raymq.common.errors import ListenerError, SystemBusyError
from raymq.common.identity import Identity
from raymq.common.members.questions import ThreadStack, thread_stacks
from raymq.common.message import ConsumeStatus, MessageExt
from raymq.common.protocol.consume_result import ConsumeLater
from raymq.common.protocol.request_reply import Reply, ReplyStatistics
from raymq.common.shipping import deferred_kind, dumps_by_value
from raymq.remoting.access.stand_in import owned_actor
from raymq.remoting.actor_ref import was_restarted
from raymq.telemetry.trace.deliveries import DeliveryTrace
from raymq.telemetry.trace.spans import SpanHook, spans_if_set

DIRECT_CALLS_MAX: Final = 2
"""Maximum number of concurrent listener calls for administrators, in addition to the calls with the group's
messages."""

Answer = ConsumeStatus | ConsumeLater | Reply | None
BatchAnswer = ConsumeStatus | ConsumeLater | Sequence[Reply | None] | None
MessageHandler = Callable[[MessageExt], Answer | Awaitable[Answer]]
BatchHandler = Callable[[list[MessageExt]], BatchAnswer | Awaitable[BatchAnswer]]


@dataclass(frozen=True, slots=True)
class ShippedListener:
    """A pickled listener that is sent to Listener actors. `payload`: the bytes of cloudpickle. `takes_batch`: True if
    the listener is called with lists of messages, False if it is called with single messages."""

    payload: bytes
    takes_batch: bool
    name: str


def ship(handler: Callable[[Any], Any], *, takes_batch: bool) -> ShippedListener:
    """Pickle a listener by value. Raises ListenerError if the listener is not callable, is a generator function, or
    cannot be pickled."""
    name = getattr(handler, "__qualname__", type(handler).__qualname__)
    check_listener(handler, name)
    return ShippedListener(_dumps(handler, f"listener {name}"), takes_batch, name)


def ship_hook(hook: ConsumeHook) -> ShippedListener:
    """Pickle a consume hook by value, like a listener. Raises ListenerError if the hook lacks a method, if a method is
    a coroutine or generator function, or if the hook cannot be pickled."""
    name = type(hook).__qualname__
    if not all(callable(getattr(hook, method, None)) for method in ("before", "after")):
        raise ListenerError(
            f"a consume hook must have the methods before(context) and after(context), but {name} lacks at least "
            "one of them"
        )
    for method in ("before", "after"):
        if kind := deferred_kind(getattr(hook, method)):
            raise ListenerError(f"method {name}.{method} of the consume hook is {kind}: make it a plain function")
    return ShippedListener(_dumps(hook, f"consume hook {name}"), False, name)


def _dumps(thing: Any, what: str) -> bytes:
    return dumps_by_value(
        thing,
        lambda error: ListenerError(
            f"{what} cannot be pickled for its actor: {error}. Do not store locks, open files, connections or a "
            "raymq client in it; create them in the listener's first call"
        ),
    )


class SharedInstance(Protocol):
    """The part of ShareFeed (raymq.client.consumer.share.feed) that a Listener calls."""

    def begin(self, wait_s: float) -> bool: ...
    def status(self) -> dict[str, Any]: ...
    def suspend(self, *, suspended: bool) -> None: ...
    def stop(self, wait_s: float) -> bool: ...
    def call_for_request(self, message: MessageExt, replier: Replier) -> tuple[str, str, float]: ...


class RequestAnswers(Protocol):
    """The part of RequestThreads (raymq.client.request.request_threads) that a Listener calls."""

    def begin(self, wait_s: float) -> str: ...
    def suspend(self, *, suspended: bool) -> None: ...
    def stop(self, wait_s: float) -> bool: ...
    def statistics(self) -> ReplyStatistics: ...


class Listener:
    """The actor that runs the user's listener."""

    def __init__(
        self,
        shipped: ShippedListener,
        settings: PushSettings,
        hooks: tuple[ShippedListener, ...] = (),
        instance: Instance | None = None,
        make_replier: Callable[[], Replier] | None = None,
        user: Identity | None = None,
        make_trace: Callable[[], DeliveryTrace] | None = None,
        copy_output: bool = False,
        make_shared: Callable[..., SharedInstance] | None = None,
        make_requests: Callable[..., RequestAnswers] | None = None,
    ) -> None:
        """Load the listener and start its threads. `user`: the identity as which this process acts until it ends.
        `make_trace`: creates the trace of deliveries. `copy_output`: copy what this process prints, for `output`.
        `make_shared`: creates the instance in the consume mode "share"; None in the mode "queue". `make_requests`:
        creates what answers requests that are not stored; None if the instance takes no such requests."""
        if user is not None:
            identity.take(user)
        self._output = OutputBuffer()
        if copy_output:
            self._output.copy_streams()  # before the listener's modules are imported, which may print or log
        self._instance = instance
        self._hosted: Hosted | None = None
        self._settings = settings
        self._lock = threading.Lock()
        """Lock that guards `_hosted`."""
        self._direct = threading.Semaphore(DIRECT_CALLS_MAX)
        self._state: object = None
        """The pause state of the push-consumer instance: True if the user has suspended the instance, and the queues
        that the user has paused. The Pull actor stores it in the Listener's process by calls of `keep`."""
        self._failure = ""
        """Traceback if the listener could not be loaded; empty otherwise."""
        self._replier: Replier | None = None
        self._trace: DeliveryTrace | None = None
        self._tasks: TaskFeed | None = None
        """The feed that receives tasks from the Pull actor; None if the listener could not be loaded, and in the mode
        "share"."""
        self._shared: SharedInstance | None = None
        """The instance in the mode "share"; None if the listener could not be loaded, and in the mode "queue"."""
        self._requests: RequestAnswers | None = None
        """Answers requests that are not stored; None if the listener could not be loaded, or takes no such
        requests."""
        try:
            handler = cloudpickle.loads(shipped.payload)
            made = [cloudpickle.loads(hook.payload) for hook in hooks]
            # Look for the OpenTelemetry provider after loading the listener, because the listener's modules may have
            # set it.
            spans = spans_if_set()
            if spans is not None:
                made.insert(0, SpanHook(spans))
        except Exception:  # importing a user's module may raise any exception
            self._failure = traceback.format_exc()
        else:
            self._replier = None if make_replier is None else make_replier()
            self._trace = None if make_trace is None else make_trace()
            how: dict[str, Any] = {
                "takes_batch": shipped.takes_batch,
                "hooks": made,
                "replier": self._replier,
                "trace": self._trace,
            }
            if make_shared is not None and instance is not None:
                self._shared = make_shared(handler, settings, instance.name, **how)
            else:
                self._tasks = TaskFeed(handler, settings, **how)
            feed = self._shared or self._tasks
            if make_requests is not None and instance is not None and feed is not None:
                self._requests = make_requests(settings, instance.name, feed.call_for_request)
        if instance is not None and was_restarted():
            if make_shared is None:
                self._begin_hosting()
            elif self._shared is not None:
                self._shared.begin(0.0)
            if self._requests is not None:
                self._requests.begin(0.0)

    def _begin_hosting(self) -> Hosted:
        """Start the thread that keeps the instance hosted by the Pull actor of this node."""
        with self._lock:
            if self._hosted is None:
                assert self._instance is not None
                context, instance = ray.get_runtime_context(), self._instance
                me = context.current_actor

                def make_call(life: str) -> Hosting:
                    return Hosting(instance, self._settings, me, life, self._failure, self._state)

                self._hosted = Hosted(instance, context.get_node_id(), make_call, self.keep)
                if self._tasks is not None:
                    feed = FeedClient(self._hosted.pull_name, instance.name, self._hosted.life)
                    self._tasks.start(feed, self._hosted.where)
            hosted = self._hosted
        hosted.start()
        return hosted

    def hosted_by(self, wait_s: float) -> str:
        """Make a Pull actor host the instance, and return the actor's name. Returns an empty string if no Pull actor
        hosts the instance within `wait_s`."""
        return self._begin_hosting().where(wait_s)

    def begin_shared(self, wait_s: float) -> bool:
        """Start the instance in the mode "share", unless it has started. Returns True if it is connected within
        `wait_s`. Raises ListenerError if the listener could not be loaded."""
        return self._instance_of_share().begin(wait_s)

    def shared_status(self) -> dict[str, Any]:
        """Return the status of the instance in the mode "share" (raymq.client.consumer.push.subscription)."""
        return self._instance_of_share().status()

    def suspend_shared(self, suspended: bool) -> None:
        """Stop or resume to receive messages in the mode "share"."""
        self._instance_of_share().suspend(suspended=suspended)

    def stop_shared(self, wait_s: float) -> bool:
        """Stop the instance in the mode "share". Returns False if that takes longer than `wait_s`."""
        return self._shared is None or self._shared.stop(wait_s)

    def begin_requests(self, wait_s: float) -> str:
        """Start to take requests that are not stored, unless that has begun (RequestAnswers.begin). Raises
        ListenerError if the listener could not be loaded."""
        if self._requests is None:
            raise ListenerError(f"the listener could not be loaded: {self._failure}")
        return self._requests.begin(wait_s)

    def suspend_requests(self, suspended: bool) -> None:
        """Stop or resume to take requests that are not stored."""
        if self._requests is not None:
            self._requests.suspend(suspended=suspended)

    def stop_requests(self, wait_s: float) -> bool:
        """Take no further requests that are not stored. Returns False if running calls have not ended within
        `wait_s`."""
        return self._requests is None or self._requests.stop(wait_s)

    def _instance_of_share(self) -> SharedInstance:
        if self._shared is None:
            raise ListenerError(f"the listener could not be loaded: {self._failure}")
        return self._shared

    def ready(self) -> str:
        """Return the traceback if this process could not load the listener; an empty string if the listener is
        loaded."""
        return self._failure

    def reply_statistics(self) -> ReplyStatistics:
        """Return how many of the listener's replies to requests were sent, and how many could not be sent, since this
        process began."""
        parts = [one.statistics() for one in (self._replier, self._requests) if one is not None]
        return ReplyStatistics(*map(sum, zip(*map(astuple, parts), strict=True))) if parts else ReplyStatistics()

    def output(self, life: str, next_line: int, wait_s: float) -> OutputPart:
        """Return lines that this process has printed, if its output is copied (OutputBuffer.take)."""
        return self._output.take(life, next_line, wait_s)

    def close_trace(self) -> None:
        """Send the buffered trace records, waiting for a limited time, and stop tracing."""
        if self._trace is not None:
            self._trace.close()

    def stacks(self) -> tuple[int, tuple[ThreadStack, ...]]:
        """Return the id of this process, and the stacks of its threads."""
        return os.getpid(), thread_stacks()

    def consume_directly(self, message: MessageExt) -> tuple[str, str, float]:
        """Call the listener with a message, for an administrator (see ConsumePool.call_directly). Raises ListenerError
        if the listener could not be loaded, and SystemBusyError while DIRECT_CALLS_MAX such calls are running."""
        if self._tasks is None:
            raise ListenerError(f"the listener could not be loaded: {self._failure}")
        if not self._direct.acquire(blocking=False):
            raise SystemBusyError(
                f"the listener is already consuming {DIRECT_CALLS_MAX} messages for administrators; try again later"
            )
        try:
            return self._tasks.consume_directly(message)
        finally:
            self._direct.release()

    def keep(self, state: object) -> None:
        """Store the Pull actor's state for this instance in the Listener's process. A restarted Pull actor gets the
        state back."""
        self._state = state

    def kept(self) -> object:
        """Return the Pull actor's state from the last `keep` call; None before the first call."""
        return self._state


LISTENER_OPTIONS: Final[dict[str, Any]] = {"max_restarts": -1, "max_task_retries": 0, "num_cpus": 0}
CONCURRENCY: Final = 8
"""Number of threads for the actor's methods. Only `hosted_by`, `output` and the methods that begin or stop something
block such a thread, one call each; other threads call the listener."""
ListenerActor = ray.remote(**LISTENER_OPTIONS)(owned_actor(Listener))
