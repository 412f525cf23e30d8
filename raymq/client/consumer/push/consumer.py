"""PushConsumer runs a program's listener in the cluster, for as long as the program runs.

`start` creates one Listener actor per instance, in the user's environment. The Pull actor of the Listener's node sends
messages to the Listener. The instances share the group's queues with all other members of the group. In BROADCASTING
mode, each instance reads all queues.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypedDict

from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.consumer.push.answers import Replier
from raymq.client.consumer.push.hook import ConsumeHook
from raymq.client.consumer.push.hosting import Instance
from raymq.client.consumer.push.listener import (
    CONCURRENCY,
    BatchHandler,
    ListenerActor,
    MessageHandler,
    RequestAnswers,
    SharedInstance,
    ShippedListener,
    ship,
    ship_hook,
)
from raymq.client.consumer.push.modes import check_modes
from raymq.client.consumer.push.settings import BATCH_MAX_MOST, ConsumeMode, PushSettings
from raymq.client.consumer.push.subscription import (
    PushSubscription,
    RunningInstance,
    RunningSharedInstance,
)
from raymq.client.consumer.rebalance_client import check_expressions
from raymq.client.consumer.subscription import Expression, Subscription
from raymq.common import identity
from raymq.common.closing import OfProcess, closed_on_error
from raymq.common.errors import ClientStateError, check_option_names
from raymq.common.message import MessageModel
from raymq.common.names import INSTANCES, InstanceName, check_group
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.numbers import NumberRange, bounded
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.protocol.membership import Allocation
from raymq.remoting.access.stand_in import ActorOwner
from raymq.remoting.route_cache import ROUTE_TIMEOUT_S, RouteCache
from raymq.telemetry.trace.deliveries import DeliveryTrace

CONSUMER_START_TIMEOUT_S: Final = 60.0
INSTANCES_MAX: Final = 256
BATCH_MAX: Final = 512
CALL_KEY_BYTES: Final = 32


class PushOptions(TypedDict, total=False):
    """The keyword arguments of `Client.push_consumer` that are settings of the consumer. The class
    raymq.client.consumer.push.settings.PushSettings explains them."""

    orderly: bool
    message_model: MessageModel
    allocation: Allocation
    threads: int
    pull_batch_size: int
    pull_interval_ms: int
    pull_threshold_for_queue: int
    pull_threshold_for_topic: int
    pull_threshold_size_for_queue_mib: int
    pull_threshold_size_for_topic_mib: int
    consume_concurrently_max_span: int
    consume_timeout_s: float
    max_reconsume_times: int
    suspend_current_queue_time_ms: int
    offsets_dir: str | None
    instance_name: str | None
    consume_mode: ConsumeMode
    invisible_s: float
    prefetch_messages: int
    prefetch_mib: int
    request_threads: int


class PushConsumer(OfProcess):
    """Builder of a push consumer, created by `Client.push_consumer`. Nothing runs before `start`."""

    def __init__(
        self,
        group: str,
        *,
        routes: RouteCache,
        names: Namespace = NO_NAMESPACE,
        start: StartOffsetQuery,
        options: PushOptions,
        track: Callable[[PushSubscription], PushSubscription],
        on_close: Callable[[PushSubscription], None],
        make_replier: Callable[[], Replier] | None = None,
        make_trace: Callable[[], DeliveryTrace] | None = None,
        make_shared: Callable[..., SharedInstance] | None = None,
        make_requests: Callable[..., RequestAnswers] | None = None,
        may_print: bool = False,
    ) -> None:
        """`may_print`: True if Ray does not print in this program what the listeners print, so that raymq may.
        `make_shared`: creates an instance of the consume mode "share" in a Listener's process. `make_requests`: creates
        there what answers requests that are not stored."""
        self._names = names
        check_option_names("a push consumer", options, PushOptions.__annotations__)
        self._settings = PushSettings(names.wrap(check_group(group)), (), start, namespace=names.name, **options)
        self._routes = routes
        self._track = track
        self._on_close = on_close
        self._make_replier = make_replier
        self._make_trace = make_trace
        self._make_shared = make_shared if self._settings.is_shared else None
        self._make_requests = make_requests if self._settings.request_threads else None
        self._may_print = may_print
        self._subscriptions: dict[str, Subscription] = {}
        self._leveled: set[str] = set()
        """The subscribed topics of the type PRIORITY."""
        self._listener: ShippedListener | None = None
        self._hooks: list[ShippedListener] = []

    def subscribe(self, topic: str, expression: Expression = "*") -> PushConsumer:
        """Consume messages of a topic. `expression` chooses messages by tag, for example ``"paid || refunded"``; by
        properties, ``raymq.sql("price > 5")``; or by a predicate (`raymq.predicate`). Messages that are delivered again
        from the retry topic pass every expression. A second call for a topic replaces its expression.

        Raises TopicNotExistError if the topic does not exist, and IllegalNameError or InvalidArgumentError if an
        argument is invalid. Raises ServiceNotAvailableError or RequestTimeoutError if no NameServer answers within 10
        s.
        """
        stored = self._names.wrap(topic)
        subscription = Subscription.parse(stored, expression)
        if self._routes.wait(stored, ROUTE_TIMEOUT_S).attributes.has_levels:
            self._leveled.add(stored)
        self._subscriptions[stored] = subscription
        return self

    def on_message(self, listener: MessageHandler) -> PushConsumer:
        """Call `listener(message)` for each message, in threads of one process per instance.

        A message is consumed if the listener returns None or ConsumeStatus.CONSUME_SUCCESS. After
        ConsumeStatus.RECONSUME_LATER, a `ConsumeLater` or an exception the message is delivered again from the group's
        retry topic, after 10 s, 30 s, 1 min … 2 h. After the last attempt the message moves to the dead letters. An
        orderly consumer's queue instead waits a second, and continues with the same message. ``return
        raymq.reply(b"…")`` answers a message that was sent with `Producer.request`. The message counts as consumed,
        even if it is no request. Any other return value (True, False, 1) is a failure; its reason names the value.

        `listener` may be a coroutine function: its calls are awaited on one event loop per instance, at most `threads`
        at a time. A call that takes longer than `consume_timeout_s` is cancelled. Raises ListenerError if the listener
        is a generator function or cannot be pickled.
        """
        self._listener = ship(listener, takes_batch=False)
        self._settings = replace(self._settings, consume_message_batch_max_size=1)
        return self

    @bounded(batch_max=NumberRange(1, BATCH_MAX_MOST))
    def on_messages(self, listener: BatchHandler, *, batch_max: int = BATCH_MAX) -> PushConsumer:
        """Call `listener(messages)` as `on_message` does, with lists of up to `batch_max` (1 to 1024) messages of one
        queue. A return value or an exception applies to all messages of a list, unless a `ConsumeLater` names the first
        failed message. To answer requests, return a list that has a `raymq.reply(…)` or None for each message. If the
        listener returns a single Reply for several messages, all of them fail."""
        self._listener = ship(listener, takes_batch=True)
        self._settings = replace(self._settings, consume_message_batch_max_size=batch_max)
        return self

    def hook(self, hook: ConsumeHook) -> PushConsumer:
        """Register a hook: `hook.before(context)` and `hook.after(context)` are called around each listener call, in
        the listener's process."""
        self._hooks.append(ship_hook(hook))
        return self

    @bounded(instances=NumberRange(1, INSTANCES_MAX), num_cpus=NumberRange(0.0, 1e6))
    def start(
        self,
        instances: int = 1,
        *,
        runtime_env: Mapping[str, Any] | None = None,
        num_cpus: float = 0,
        print_output: bool = True,
    ) -> PushSubscription:
        """Start `instances` instances. Returns when all instances have loaded the listener and are served: by Pull
        actors, or in the consume mode "share" by the brokers.

        On success the group and its retry topic exist at the brokers. `runtime_env` and `num_cpus` are Ray's options
        for the listeners' processes. After an error nothing runs, and no group was created at the brokers.

        `print_output`: print in this program what the listeners print, each line as ``(GROUP/INSTANCE pid=…) line``
        (raymq.client.consumer.push.output). False leaves it only in Ray's log files. If the program itself connected
        to Ray, raymq does not print: Ray does, unless the program passed ``log_to_driver=False`` to `ray.init`.

        Raises ClientStateError if the consumer has no subscription or no listener, or if members of the group consume
        in the other mode (consume_mode). Raises ListenerError if an instance cannot load the listener. Raises
        SubscriptionConflictError if members of the group subscribe to a topic with another expression. Raises
        NoPermissionError if the group may not consume in BROADCASTING mode (consume_broadcast_enable).
        """
        if not self._subscriptions:
            raise ClientStateError("this push consumer has no subscription; call subscribe(topic) before start()")
        if self._listener is None:
            raise ClientStateError("this push consumer has no listener; call on_message(function) before start()")
        subscriptions = tuple(one.in_environment(runtime_env) for one in self._subscriptions.values())
        settings = replace(self._settings, subscriptions=subscriptions, leveled=frozenset(self._leveled))
        options: dict[str, Any] = {"max_concurrency": CONCURRENCY, "num_cpus": num_cpus, "namespace": INSTANCES}
        if runtime_env is not None:
            options["runtime_env"] = dict(runtime_env)
        brokers = tuple(sorted(self._routes.brokers()))
        check_modes(settings.group, settings.consume_mode, brokers)
        if settings.clustering and not settings.is_shared:
            check_expressions(settings.group, "", settings.expressions)
        copy_output = print_output and self._may_print
        subscription = PushSubscription(settings.group, self._on_close, self._names)
        with closed_on_error(subscription.close, f"the instances of group {settings.group!r}"):
            for index in range(instances):
                instance = self._start_listener(_named(settings, index), options, brokers, copy_output=copy_output)
                subscription.instances.append(instance)
            if copy_output:
                subscription.print_output()
            subscription.wait_loaded(self._listener.name, CONSUMER_START_TIMEOUT_S)
            offsets = GroupOffsets(settings.group)
            for broker_name in brokers:
                # Create the group after the listeners were started. If a listener cannot be loaded, no group is then
                # left at the brokers.
                if settings.clustering:
                    offsets.ensure_group(broker_name)
                else:
                    offsets.check_broadcast(broker_name)
            subscription.wait_running(CONSUMER_START_TIMEOUT_S)
        return self._track(subscription)

    def _start_listener(
        self, settings: PushSettings, options: Mapping[str, Any], brokers: tuple[str, ...], *, copy_output: bool
    ) -> RunningInstance:
        """Start the Listener actor of an instance, under the first free actor name."""
        user = identity.present()
        call_key = b"" if user is None else secrets.token_bytes(CALL_KEY_BYTES)
        for index in itertools.count():
            name = str(InstanceName(settings.group, index))
            instance = Instance(name, secrets.token_hex(8), brokers, call_key)
            try:
                listener = ListenerActor.options(**options, name=name).remote(
                    self._listener,
                    settings,
                    tuple(self._hooks),
                    instance,
                    self._make_replier,
                    user,
                    self._make_trace,
                    copy_output,
                    self._make_shared,
                    self._make_requests,
                    access=None if user is None else ActorOwner(name, user, call_key),
                )
            except ValueError:  # another actor has this name: try the next name
                continue
            kind = RunningSharedInstance if settings.is_shared else RunningInstance
            traced, answers = self._make_trace is not None, self._make_requests is not None
            return kind(instance, listener, traced=traced, answers_requests=answers)
        raise AssertionError("this code cannot be reached")


def _named(settings: PushSettings, index: int) -> PushSettings:
    """Return the settings of the push-consumer instance with the number `index`. If `settings` has an instance name,
    the result has this name with `-INDEX` at its end, so that each instance has its own name."""
    name = settings.instance_name
    return settings if name is None else replace(settings, instance_name=f"{name}-{index}")
