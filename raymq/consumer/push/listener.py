"""Listener is the actor that runs a user's listener.

It is a part of raymq and not of the server's actors, because it runs in the user's environment: the user's
`runtime_env`, the user's import path, which may hold packages of any name. The listener comes as bytes of cloudpickle,
pickled by value, so a function of the user's own module needs no installation on the workers.

The Pull actor of its node hosts its instance (raymq.consumer.push.hosting), sends it tasks, and asks about each until
it has ended: a report says which messages are finished. The listener is called in threads of a ConsumePool, so that a
call that blocks holds up neither the answers nor other calls.

Nothing survives its death. Ray starts it again with the same listener; the Pull actor delivers the messages it was
working on again. A listener is therefore called at least once per message.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import cloudpickle
import ray

from raymq.consumer.push.consume_pool import ConsumePool, ConsumeRequest
from raymq.consumer.push.hook import ConsumeHook
from raymq.consumer.push.hosting import Hosted, Hosting, Instance
from raymq.consumer.push.settings import PushSettings
from raymq.consumer.subscription import Subscription
from raymq.errors import ListenerError
from raymq.kernels.messages import read_messages
from raymq.message import PROPERTY_RETRY_TOPIC, ConsumeStatus, MessageExt, MessageQueue
from raymq.names import RETRY_PREFIX
from raymq.protocol.consume_result import ConsumeLater, ConsumeReport
from raymq.record.check import record_starts
from raymq.record.decode import decode_record
from raymq.record.layout import RecordError

MessageHandler = Callable[[MessageExt], ConsumeStatus | ConsumeLater | None]
BatchHandler = Callable[[list[MessageExt]], ConsumeStatus | ConsumeLater | None]

REPORT_S: Final = 0.5
"""A task that takes longer is reported several times, each time with the messages finished since."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShippedListener:
    """A pickled listener for its actors. `payload` is cloudpickle's; `takes_batch`: it is called with lists of messages
    and not with single ones."""

    payload: bytes
    takes_batch: bool
    name: str


@dataclass(frozen=True, slots=True)
class ShippedTask:
    """Messages of one queue for the listener, whole records back to back. `epoch` grows from one life of the instance
    at its Pull actor to the next; `number` is the number of the task in that life."""

    epoch: int
    number: int
    queue: MessageQueue
    records: bytes


def ship(handler: Callable[[Any], Any], *, takes_batch: bool) -> ShippedListener:
    """Pickle a listener by value. ListenerError when it is not callable or cannot be pickled."""
    name = getattr(handler, "__qualname__", type(handler).__qualname__)
    if not callable(handler):
        raise ListenerError(f"a listener must be callable with one argument, {name} object is not")
    return ShippedListener(_dumps(handler, f"listener {name}"), takes_batch, name)


def ship_hook(hook: ConsumeHook) -> ShippedListener:
    """Pickle a consume hook by value, like a listener. ListenerError when it lacks a method, or cannot be pickled."""
    name = type(hook).__qualname__
    if not all(callable(getattr(hook, method, None)) for method in ("before", "after")):
        raise ListenerError(f"a consume hook must have the methods before(context) and after(context), {name} has not")
    return ShippedListener(_dumps(hook, f"consume hook {name}"), False, name)


def _dumps(thing: Any, what: str) -> bytes:
    module = _user_module(thing)
    if module is not None and module.__name__ in cloudpickle.list_registry_pickle_by_value():
        module = None  # the user's own registration, which stays
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(thing)  # type: ignore[no-any-return]  # cloudpickle has no types
    except Exception as error:  # whatever a user's object does when it is pickled
        raise ListenerError(
            f"{what} cannot be shipped to its actor: {error}. It must not hold locks, open files, connections "
            "or a raymq client; make those in the listener's first call"
        ) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)


def _user_module(handler: Any) -> ModuleType | None:
    """The user's own module or package that defines a listener; None for the standard library and installed ones."""
    owner: Any = handler
    while isinstance(owner, functools.partial):
        owner = owner.func
    owner = owner if hasattr(owner, "__qualname__") else type(owner)
    module = sys.modules.get(getattr(inspect.unwrap(owner), "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return None  # __main__ goes by value anyway
    installed = [Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib")]
    if any(Path(file).is_relative_to(root) for root in installed):
        return None
    # All of the package, because its modules import each other.
    return sys.modules.get(module.__name__.partition(".")[0], module)


class Listener:
    """The shell around the user's function."""

    def __init__(
        self,
        shipped: ShippedListener,
        settings: PushSettings,
        hooks: tuple[ShippedListener, ...] = (),
        instance: Instance | None = None,
    ) -> None:
        self._instance = instance
        self._hosted: Hosted | None = None
        self._takes_batch = shipped.takes_batch
        self._settings = settings
        self._lock = threading.Lock()
        """Guards `_epoch` and `_requests`."""
        self._epoch = 0
        """The latest life of the Pull actor that has sent a task."""
        self._requests: dict[int, ConsumeRequest] = {}
        """Tasks of that life that have not ended, by number."""
        self._state: object = None
        """The value of the last `keep`."""
        self._failure = ""
        """The traceback if the listener could not be loaded."""
        try:
            handler = cloudpickle.loads(shipped.payload)
            made = [cloudpickle.loads(hook.payload) for hook in hooks]
        except Exception:  # a user's module may fail in any way when it is imported here
            self._failure = traceback.format_exc()
            return
        self._pool = ConsumePool(
            handler,
            threads=settings.threads,
            timeout_s=settings.consume_timeout_s,
            group=settings.group,
            hooks=made,
        )
        if instance is not None and ray.get_runtime_context().was_current_actor_reconstructed:
            self._begin_hosting()

    def _begin_hosting(self) -> Hosted:
        """Have the instance hosted from now on, by the Pull actor of this node."""
        with self._lock:
            if self._hosted is None:
                assert self._instance is not None
                context, instance = ray.get_runtime_context(), self._instance
                me = context.current_actor

                def make_call(life: str) -> Hosting:
                    return Hosting(instance, self._settings, me, life, self._failure, self._state)

                self._hosted = Hosted(instance, context.get_node_id(), make_call, self.keep)
            hosted = self._hosted
        hosted.start()
        return hosted

    def hosted_by(self, wait_s: float) -> str:
        """Have the instance hosted, and return the name of the Pull actor that does it now; empty if none does within
        `wait_s`."""
        return self._begin_hosting().where(wait_s)

    def ready(self) -> str:
        """The traceback if the listener could not be loaded here; empty if it is loaded."""
        return self._failure

    def keep(self, state: object) -> None:
        """Remember a value for the Pull actor, in case it dies."""
        self._state = state

    def kept(self) -> object:
        """The value of the last `keep`; None if there was none."""
        return self._state

    def consume_all(self, tasks: Sequence[ShippedTask]) -> list[ConsumeReport]:
        """Begin tasks, of one life of the instance at its Pull actor, and report about each: when all have ended, or
        some have and the others take long, or after REPORT_S.

        Tasks of a later life cancel all those of earlier lives: nobody asks about them any more.
        """
        requests = [self._consume_request(task) for task in tasks]
        with self._lock:
            epoch = tasks[0].epoch
            if epoch > self._epoch:
                left, self._requests, self._epoch = self._requests, {}, epoch
                for other in left.values():
                    self._pool.cancel(other)
            for task, request in zip(tasks, requests, strict=True):
                self._requests[task.number] = request
        for request in requests:
            self._pool.submit(request)
        return self._report(dict(zip([task.number for task in tasks], requests, strict=True)))

    def progress_all(self, epoch: int, numbers: Sequence[int]) -> list[ConsumeReport | None]:
        """Report about tasks that had not ended at their last report; None for one that this process does not know."""
        with self._lock:
            known = {n: self._requests[n] for n in numbers if n in self._requests} if epoch == self._epoch else {}
        reports = dict(zip(known, self._report(known), strict=True))
        return [reports.get(number) for number in numbers]

    def _report(self, requests: Mapping[int, ConsumeRequest]) -> list[ConsumeReport]:
        reports = self._pool.wait_all(list(requests.values()), REPORT_S)
        with self._lock:
            for (number, request), report in zip(requests.items(), reports, strict=True):
                if report.ended and self._requests.get(number) is request:
                    del self._requests[number]
        return reports

    def _consume_request(self, task: ShippedTask) -> ConsumeRequest:
        """The listener calls of a task; none for a message whose tag only shares its code with a subscribed tag."""
        messages, damaged = _decode(task)
        settings, retry = self._settings, task.queue.topic.startswith(RETRY_PREFIX)
        subscription = settings.subscription(task.queue.topic)
        key = str(task.queue) if settings.orderly else None
        firsts: Sequence[int] = range(len(messages))
        if subscription.tags:
            firsts = [i for i in firsts if _is_wanted(messages[i], subscription)]
            messages = [messages[i] for i in firsts]
        if retry:
            messages = [m if isinstance(m, RecordError) else with_original_topic(m) for m in messages]
        if not self._takes_batch:
            return ConsumeRequest(messages, firsts, key, damaged=damaged)
        return ConsumeRequest(*_lists(messages, firsts, settings.consume_message_batch_max_size), key, damaged=damaged)


def _decode(task: ShippedTask) -> tuple[list[Any], bool]:
    """The messages of a task, with the error in place of each one that is damaged; and True if there is one."""
    broker_name = task.queue.broker_name
    try:
        return read_messages(task.records, record_starts(task.records), broker_name=broker_name), False
    except RecordError:
        logger.exception("a task of %s has a damaged record", task.queue)
    messages: list[MessageExt | RecordError] = []
    for start in record_starts(task.records):
        try:
            messages.append(decode_record(task.records, int(start), broker_name=broker_name))
        except RecordError as error:
            messages.append(error)
    return messages, True


def _lists(messages: Sequence[Any], firsts: Sequence[int], size: int) -> tuple[list[Any], list[int]]:
    """Lists of up to `size` messages that follow each other in the task, and the index of the first of each."""
    lists: list[Any] = []
    starts: list[int] = []
    for message, index in zip(messages, firsts, strict=True):
        last = lists[-1] if lists else None
        if isinstance(message, RecordError):
            lists.append(message)
        elif isinstance(last, list) and len(last) < size and index == starts[-1] + len(last):
            last.append(message)
            continue
        else:
            lists.append([message])
        starts.append(index)
    return lists, starts


def _is_wanted(message: MessageExt | RecordError, subscription: Subscription) -> bool:
    return isinstance(message, RecordError) or subscription.matches(message.tags)


def with_original_topic(message: MessageExt) -> MessageExt:
    """A message from a retry topic with the topic it was sent to (spec/messaging.md §5.8)."""
    topic = message.system_properties.get(PROPERTY_RETRY_TOPIC)
    return message if topic is None else replace(message, topic=topic)


LISTENER_OPTIONS: Final[dict[str, Any]] = {"max_restarts": -1, "max_task_retries": 0, "num_cpus": 0}
CONCURRENCY: Final = 64 + 8
"""The tasks that a Pull actor has at its listener at a time, and some threads for the other methods."""
ListenerActor = ray.remote(**LISTENER_OPTIONS)(Listener)
