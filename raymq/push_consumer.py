"""The push consumer: a listener, run in the cluster, for as long as this program runs.

`start` makes, per instance, a Listener actor in the user's environment and asks a broker for a Pull actor that feeds
it. The instances share the group's queues with all other members of the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import ray

from raymq.errors import ClientStateError, ListenerError, RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.group_info import StartOffsetQuery
from raymq.listener import BatchHandler, ListenerActor, MessageHandler, ShippedListener, ship
from raymq.names import NAMESPACE, check_group
from raymq.push_settings import PushSettings
from raymq.ray_calls import ActorRef, resolve
from raymq.routes import Routes
from raymq.subscription import Subscription

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 40.0
INSTANCES_MAX: Final = 256


class PushConsumer:
    """Describes a push consumer step by step; nothing runs before `start`. Made by `Client.push_consumer`."""

    def __init__(
        self,
        group: str,
        *,
        routes: Routes,
        start: StartOffsetQuery,
        threads: int,
        track: Callable[[PushSubscription], PushSubscription],
        on_close: Callable[[PushSubscription], None],
    ) -> None:
        self._group = check_group(group)
        self._routes = routes
        self._start = start
        self._threads = threads
        self._track = track
        self._on_close = on_close
        self._subscriptions: dict[str, Subscription] = {}
        self._listener: ShippedListener | None = None
        self._batch_max = 1

    def subscribe(self, topic: str, expression: str = "*") -> PushConsumer:
        """Consume a topic's messages whose tag is in `expression`, for example ``"paid || refunded"``.

        TopicNotExistError, IllegalNameError or InvalidArgumentError. A second call for a topic replaces the first.
        """
        subscription = Subscription.parse(topic, expression)
        self._routes.get(topic)
        self._subscriptions[topic] = subscription
        return self

    def on_message(self, listener: MessageHandler) -> PushConsumer:
        """Call `listener(message)` for each message, in the order of its queue.

        It may return None or ConsumeStatus.CONSUME_SUCCESS; RECONSUME_LATER or an exception has the messages delivered
        again after a pause. Calls for different queues run at the same time in threads of one process. ListenerError
        when it cannot be pickled.
        """
        self._listener = ship(listener, takes_batch=False)
        return self

    def on_messages(self, listener: BatchHandler, *, batch_max: int = 512) -> PushConsumer:
        """As `on_message`, with lists of up to `batch_max` messages of one queue."""
        self._listener = ship(listener, takes_batch=True)
        self._batch_max = batch_max
        return self

    def start(
        self, instances: int = 1, *, runtime_env: Mapping[str, Any] | None = None, num_cpus: float = 0
    ) -> PushSubscription:
        """Start `instances` instances; returns when their listeners are loaded and their Pull actors run.

        `runtime_env` and `num_cpus` are Ray's, for the listeners' processes. Raises ClientStateError without a
        subscription or a listener, ListenerError when the listener cannot be loaded there; nothing runs then.
        """
        if not self._subscriptions:
            raise ClientStateError("this push consumer has no subscription; call subscribe(topic) before start()")
        if self._listener is None:
            raise ClientStateError("this push consumer has no listener; call on_message(function) before start()")
        if not 1 <= instances <= INSTANCES_MAX:
            raise ClientStateError(f"instances must be 1 to {INSTANCES_MAX}, not {instances}")
        settings = PushSettings(
            self._group, tuple(self._subscriptions.values()), self._start, self._batch_max, self._threads
        )
        options: dict[str, Any] = {"max_concurrency": self._threads, "num_cpus": num_cpus}
        if runtime_env is not None:
            options["runtime_env"] = dict(runtime_env)
        subscription = PushSubscription(self._group, self._on_close)
        try:
            for _ in range(instances):
                subscription.add(ListenerActor.options(**options).remote(self._listener, settings))
            subscription.wait_loaded(self._listener.name)
            for listener in subscription.listeners:
                subscription.pulls.append(ActorRef(self._start_pull(settings, listener)))
        except BaseException:
            subscription.close()
            raise
        return self._track(subscription)

    def _start_pull(self, settings: PushSettings, listener: Any) -> str:
        failure: RaymqError = ServiceNotAvailableError("no broker is registered; see `raymq status`")
        for broker_name in sorted(self._routes.brokers()):
            try:
                return str(ActorRef(broker_name).call("start_pull", settings, listener, timeout_s=START_TIMEOUT_S))
            except RaymqError as error:
                failure = error
        raise failure


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One instance: its name, the queues it holds, and how its listener is doing."""

    instance: str
    holding: tuple[str, ...]
    buffered: int
    consumed: int
    failures: int
    last_error: str


class PushSubscription:
    """A push consumer that runs. `stop` ends it: batches in flight are finished and committed."""

    def __init__(self, group: str, on_close: Callable[[PushSubscription], None]) -> None:
        self.group = group
        self._on_close = on_close
        self.listeners: list[Any] = []
        self.pulls: list[ActorRef] = []
        self._closed = False

    def add(self, listener: Any) -> None:
        self.listeners.append(listener)

    def wait_loaded(self, name: str) -> None:
        """Wait for the listeners' processes; ListenerError with the traceback when one cannot load its listener."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for listener in self.listeners:
            failure = resolve(listener.ready.remote(), f"listener {name}", max(0.1, deadline_s - time.monotonic()))
            if failure:
                raise ListenerError(f"listener {name} cannot be loaded in its actor:\n{failure}")

    def status(self) -> list[InstanceStatus]:
        """What each instance holds and has done, and its listener's last traceback."""
        statuses = []
        for pull in self.pulls:
            answer = pull.call("status")
            statuses.append(InstanceStatus(**{**answer, "holding": tuple(answer["holding"])}))
        return statuses

    def raise_listener_error(self) -> None:
        """Raise ListenerError with the listener's traceback if a delivery failed and has not succeeded since."""
        for status in self.status():
            if status.last_error:
                raise ListenerError(
                    f"the listener of group {self.group!r} failed {status.failures} time(s) in {status.instance}; its "
                    f"messages are delivered again. The last failure:\n{status.last_error}"
                )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Finish and commit what is in flight, leave the group, end the actors. Idempotent."""
        if self._closed:
            return
        self._closed = True
        failures = []
        for pull in self.pulls:
            try:
                if not pull.call("stop", timeout_s, timeout_s=timeout_s + 5.0):
                    failures.append(f"{pull.name} did not finish within {timeout_s:g} s")
            except (ServiceNotAvailableError, RequestTimeoutError) as error:
                failures.append(str(error))
            self._kill(pull)
        for listener in self.listeners:
            ray.kill(listener, no_restart=True)
        self._on_close(self)
        if failures:
            raise ServiceNotAvailableError(
                f"group {self.group!r} was stopped, but {'; '.join(failures)}: its last messages may be delivered again"
            )

    def close(self) -> None:
        """The same as `stop`."""
        self.stop()

    def __enter__(self) -> PushSubscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _kill(self, pull: ActorRef) -> None:
        try:
            ray.kill(ray.get_actor(pull.name, namespace=NAMESPACE), no_restart=True)
        except ValueError:
            return  # it has ended by itself
