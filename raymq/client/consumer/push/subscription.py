"""PushSubscription is a running push consumer, with methods for status, suspend and resume, pause, and stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Any, Final

import ray

from raymq.client.consumer.push.hosting import Instance
from raymq.client.consumer.push.output import OutputPrinter
from raymq.common import identity
from raymq.common.closing import OfProcess
from raymq.common.errors import (
    InvalidArgumentError,
    ListenerError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
)
from raymq.common.message import MessageQueue
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.parallel import map_parallel
from raymq.common.protocol.request_reply import ReplyStatistics
from raymq.common.retry import persist_until
from raymq.remoting.actor_ref import DEFAULT_TIMEOUT_S, ActorNotSetUpError, ActorRef, HandleRef

CONSUMER_STOP_TIMEOUT_S: Final = 40.0
STOP_CALL_S: Final = 2.0
"""Maximum time in s for which one call to a Pull actor waits for a push-consumer instance to stop. The call is repeated
until the instance has stopped."""
STOP_THREADS: Final = 8
LOOK_WAIT_S: Final = 2.0
LISTENER_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Status of one queue at an instance. `state` is "pulling" while messages of the queue are fetched. Otherwise it is
    the reason why they are not fetched: "suspended", "paused", "too many messages" or similar, or "forbidden" while the
    group may not read the queue. Messages before `commit_offset` are consumed; messages before `committed_offset` are
    committed. The instance holds `buffered` messages; the listener is processing `in_flight` of them. `trouble`: why
    the last failed message failed, or why the group may not read the queue."""

    queue: MessageQueue
    state: str
    fetch_offset: int
    commit_offset: int
    committed_offset: int
    buffered: int
    buffered_bytes: int
    in_flight: int
    trouble: str


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """Status of one instance: its name, its queues, and the state of its listener.

    `consumed` and `failures` count messages since the Pull actor's process began to host the instance. `last_error` is
    the traceback or reason of the last failure if no message has succeeded since, or the reason why the group may not
    read a queue now. `skipped`: number of messages of its queues that were skipped because their records are damaged;
    `last_skipped` is the error of one of them. `listener_away` is the reason why nothing is delivered now, or empty.
    `listener_silent_s` is the time since the last report of the listener's process, which should be at most a second.
    `stuck_threads` counts listener calls that have exceeded `consume_timeout_s`. If this is twice `threads`, nothing is
    consumed until one call returns. `stats` has, per topic, over the last minute: PULL_TPS, CONSUME_OK_TPS,
    CONSUME_FAILED_TPS, and CONSUME_RT in ms.
    """

    instance: str
    holding: tuple[str, ...]
    buffered: int
    consumed: int
    failures: int
    last_error: str
    skipped: int
    last_skipped: str
    suspended: bool
    listener_deaths: int
    listener_away: str
    listener_silent_s: float
    stuck_threads: int
    queues: tuple[QueueStatus, ...]
    stats: Mapping[str, Mapping[str, float]]


class RunningInstance:
    """One running instance of a push consumer: its Listener's actor handle, and the Pull actor that hosts the
    instance."""

    def __init__(
        self, instance: Instance, listener: Any, *, traced: bool = False, answers_requests: bool = False
    ) -> None:
        """`answers_requests`: True if the listener takes requests that are not stored."""
        self.listener = listener
        self._calls = HandleRef(instance.name, listener, identity.present())
        self._traced, self._answers_requests = traced, answers_requests
        self._instance = instance
        self._pull: ActorRef | None = None
        self._begun = False

    @property
    def name(self) -> str:
        return self._instance.name

    def wait_running(self, timeout_s: float) -> None:
        """Wait until a Pull actor hosts the push consumer's instance. Raises RequestTimeoutError if no Pull actor hosts
        it within `timeout_s`."""
        self._begun = True
        deadline_s = time.monotonic() + timeout_s
        while self._pull is None:
            if time.monotonic() > deadline_s:
                raise RequestTimeoutError(f"the start of a Pull actor for instance {self.name}", timeout_s)
            self._look()

    def wait_requests(self, timeout_s: float) -> None:
        """Wait until the listener takes requests that are not stored, if it does so. Raises RequestTimeoutError if it
        is not registered at all brokers of its topics within `timeout_s`, and a broker's refusal."""
        deadline_s = time.monotonic() + timeout_s
        while self._answers_requests and (reason := self.ask_listener("begin_requests", LOOK_WAIT_S)):
            if time.monotonic() > deadline_s:
                raise RequestTimeoutError(f"the start of the request threads of {self.name} ({reason})", timeout_s)

    def suspend_requests(self, suspended: bool) -> None:
        """Stop or resume to take requests that are not stored, if the listener does so."""
        if self._answers_requests:
            self.ask_listener("suspend_requests", suspended)

    def call(self, method: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Call a method of the Pull actor that hosts this push-consumer instance. The Pull actor may be restarting, or
        another Pull actor may host the instance now. So the call is retried for `timeout_s`, and must be safe to
        repeat."""

        def attempt(left_s: float) -> Any:
            pull = self._pull or self._look()
            if pull is None:
                raise ServiceNotAvailableError(f"no Pull actor hosts instance {self.name} now; retry later")
            try:
                return pull.call(method, self.name, *args, timeout_s=left_s)
            except RaymqError:
                self._pull = None
                raise

        return persist_until(time.monotonic() + timeout_s, attempt)

    def ask_listener(self, method: str, *args: Any, timeout_s: float = LISTENER_TIMEOUT_S) -> Any:
        """Call a method of the instance's Listener. Raises RequestTimeoutError or ServiceNotAvailableError if the
        Listener does not answer."""
        return self._calls.call(method, *args, what=f"the listener of instance {self.name}", timeout_s=timeout_s)

    def start_output(self, life: str, next_line: int, wait_s: float) -> Any:
        """Start a call for lines that the Listener's process has printed (Listener.output). Returns Ray's
        reference."""
        return self._calls.start("output", life, next_line, wait_s)

    def stop(self, timeout_s: float, printer: OutputPrinter | None = None) -> str:
        """Stop the push-consumer instance at its Pull actor. `printer` prints the last lines of the instance's output.
        Returns why the instance could not finish its messages, or an empty string if it finished them."""
        try:
            if self._begun and not (self._end_requests(timeout_s) and self._end(timeout_s)):
                return f"instance {self.name} did not finish within {timeout_s:g} s"
            if self._traced:
                self.ask_listener("close_trace")
        except RaymqError as error:
            return str(error)
        finally:
            try:
                if printer is not None:
                    printer.finish(self.name)
            finally:
                if ray.is_initialized():  # otherwise Ray would start a new cluster for the call
                    ray.kill(self.listener, no_restart=True)
        return ""

    def _end_requests(self, timeout_s: float) -> bool:
        """Let the listener end the requests that are not stored. Returns False if that takes longer than
        `timeout_s`."""
        return not self._answers_requests or self._ends("stop_requests", timeout_s)

    def _ends(self, method: str, timeout_s: float) -> bool:
        """Call a method of the Listener that ends its work, until the method returns True. Returns False if that takes
        longer than `timeout_s`. Ray may be restarting the Listener, so the call is repeated after errors."""
        deadline_s = time.monotonic() + timeout_s

        def is_over(left_s: float) -> bool:
            return bool(self.ask_listener(method, STOP_CALL_S, timeout_s=STOP_CALL_S + DEFAULT_TIMEOUT_S))

        while not persist_until(deadline_s, is_over):
            if time.monotonic() > deadline_s:
                return False
        return True

    def _end(self, timeout_s: float) -> bool:
        """Let the instance finish its messages. Returns False if it does not finish within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.call("stop", self._instance.key, STOP_CALL_S, timeout_s=STOP_CALL_S + DEFAULT_TIMEOUT_S):
            if time.monotonic() > deadline_s:
                return False
        return True

    def _look(self) -> ActorRef | None:
        name = self.ask_listener("hosted_by", LOOK_WAIT_S)
        self._pull = ActorRef(name) if name else None
        return self._pull


class RunningSharedInstance(RunningInstance):
    """One running instance in the consume mode "share". The Listener's process receives messages itself, so all calls
    go to the Listener."""

    def wait_running(self, timeout_s: float) -> None:
        """Wait until the instance is connected to the brokers. Raises RequestTimeoutError if it is not connected within
        `timeout_s`."""
        self._begun = True
        deadline_s = time.monotonic() + timeout_s
        while not self.ask_listener("begin_shared", LOOK_WAIT_S):
            if time.monotonic() > deadline_s:
                reason = self.ask_listener("shared_status")["listener_away"]
                raise RequestTimeoutError(f"the start of instance {self.name} ({reason})", timeout_s)

    def call(self, method: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Call a method of a push-consumer instance. The Listener may be restarting, so the call is retried for
        `timeout_s`. Raises InvalidArgumentError for a method that is about single queues."""
        calls: dict[str, tuple[str, *tuple[bool, ...]]] = {
            "instance_status": ("shared_status",),
            "suspend": ("suspend_shared", True),
            "resume": ("suspend_shared", False),
        }
        known = calls.get(method)
        if known is None:
            raise InvalidArgumentError(
                f"an instance with consume_mode='share' has no queues of its own to pause or resume ({self.name}): "
                "suspend or resume the whole consumer"
            )
        return persist_until(
            time.monotonic() + timeout_s, lambda left_s: self.ask_listener(known[0], *known[1:], timeout_s=left_s)
        )

    def _end(self, timeout_s: float) -> bool:
        return self._ends("stop_shared", timeout_s)


class PushSubscription(OfProcess):
    """A running push consumer. `stop` first finishes and commits the messages in flight, then ends the
    consumer."""

    def __init__(
        self, group: str, on_close: Callable[[PushSubscription], None], names: Namespace = NO_NAMESPACE
    ) -> None:
        """Create the subscription. `group` is the stored name of the group (with its namespace), as in all calls to
        Pull actors."""
        self.group = names.unwrap(group)
        self._names = names
        self._on_close = on_close
        self.instances: list[RunningInstance] = []
        self._closed = False
        self._printer: OutputPrinter | None = None

    def print_output(self) -> None:
        """Print in this program what the listeners of all instances print. A second call changes nothing."""
        if self._printer is None:
            self._printer = OutputPrinter(self.group, self.instances)
            self._printer.start()

    def wait_loaded(self, name: str, timeout_s: float) -> None:
        """Wait until the listener processes have loaded the listener. Raises ListenerError if a process cannot load it:
        with the traceback, or with Ray's report if the runtime_env of the process cannot be set up."""
        deadline_s = time.monotonic() + timeout_s
        for instance in self.instances:
            try:
                failure = instance.ask_listener("ready", timeout_s=max(0.1, deadline_s - time.monotonic()))
            except ActorNotSetUpError as error:
                raise ListenerError(f"the Listener actor cannot load listener {name}: {error.__cause__}") from error
            if failure:
                raise ListenerError(f"the Listener actor cannot load listener {name}:\n{failure}")

    def wait_running(self, timeout_s: float) -> None:
        """Wait until Pull actors serve all instances of this push consumer. Raises RequestTimeoutError or
        ServiceNotAvailableError if an instance is not served within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for instance in self.instances:
            instance.wait_running(max(0.1, deadline_s - time.monotonic()))
        for instance in self.instances:
            instance.wait_requests(max(0.1, deadline_s - time.monotonic()))

    def status(self) -> list[InstanceStatus]:
        """Return the status of each push-consumer instance of this subscription."""
        return [_status_of(instance.call("instance_status"), self._names) for instance in self.instances]

    def reply_statistics(self) -> ReplyStatistics:
        """Return how many of the listeners' replies to requests were sent, and how many could not be sent. The counts
        are sums over all instances, since each listener process began."""
        replies = [instance.ask_listener("reply_statistics") for instance in self.instances]
        return ReplyStatistics(*(sum(counts) for counts in zip(*map(astuple, replies), strict=True)))

    def queues(self) -> list[MessageQueue]:
        """Return the queues that the consumer's instances hold."""
        return sorted({entry.queue for status in self.status() for entry in status.queues})

    def suspend(self) -> None:
        """Stop fetching and delivering messages until `resume`. The instances keep their queues, and the listeners
        finish their messages. An instance stays suspended if its Pull actor restarts. No requests are taken either; an
        instance whose listener's process restarts takes requests with ``durable=False`` again."""
        self._call_all("suspend")
        for instance in self.instances:
            instance.suspend_requests(True)

    def resume(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Undo `suspend`: continue fetching and delivering messages. With `queues`, instead undo `pause` for these
        queues."""
        if queues is None:
            self._call_all("resume")
            for instance in self.instances:
                instance.suspend_requests(False)
        else:
            self._call_all("resume_queues", [self._names.queue(queue) for queue in queues])

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Stop fetching and delivering messages of these queues until they are resumed, whichever instance
        holds them."""
        self._call_all("pause_queues", [self._names.queue(queue) for queue in queues])

    def raise_listener_error(self) -> None:
        """Raise ListenerError with the listener's traceback if the listener has failed and has not succeeded again
        since then."""
        for status in self.status():
            if status.last_error:
                raise ListenerError(
                    f"the listener of group {self.group!r} failed {status.failures} time(s) in instance "
                    f"{status.instance}; the failed messages are delivered again. The last "
                    f"failure:\n{status.last_error}"
                )

    def stop(self, timeout_s: float = CONSUMER_STOP_TIMEOUT_S) -> None:
        """Finish and commit the messages in flight, leave the group, and stop the actors. Idempotent.

        If an instance did not finish within `timeout_s`, raises ServiceNotAvailableError after everything is stopped.
        """
        if self._closed:
            return
        self._closed = True
        try:
            ends = map_parallel(
                lambda instance: instance.stop(timeout_s, self._printer),
                self.instances,
                threads_max=STOP_THREADS,
                name="stop",
            )
        finally:
            if self._printer is not None:
                self._printer.close()
        failures = [why for why in ends if why]
        self._on_close(self)
        if failures:
            raise ServiceNotAvailableError(
                f"group {self.group!r} was stopped, but {'; '.join(failures)}: the last messages of the group "
                "may be delivered again"
            )

    def close(self) -> None:
        """Stop the consumer (the same as `stop`)."""
        self.stop()

    def __enter__(self) -> PushSubscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _call_all(self, method: str, *args: Any) -> None:
        """Call a method for each push-consumer instance. A failed call does not prevent the other calls; at the end,
        the error of the first failed call is raised."""
        failures = []
        for instance in self.instances:
            try:
                instance.call(method, *args)
            except RaymqError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def _status_of(answer: dict[str, Any], names: Namespace) -> InstanceStatus:
    queues = tuple(QueueStatus(**{**row, "queue": names.shown_queue(row["queue"])}) for row in answer["queues"])
    stats = {names.unwrap(topic): figures for topic, figures in answer["stats"].items()}
    return InstanceStatus(**{**answer, "holding": tuple(answer["holding"]), "queues": queues, "stats": stats})
