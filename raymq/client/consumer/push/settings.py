"""PushSettings are the settings of a push consumer. Its Pull and Listener actors receive them
(spec/messaging.md §5.1)."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Final, Literal

from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageModel
from raymq.common.names import RETRY_PREFIX
from raymq.common.numbers import INT32_MAX, NumberRange, check_fields, shown
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.protocol.membership import Allocation
from raymq.common.protocol.pop import INVISIBLE_MAX_MS

BATCH_MAX_MOST: Final = 1024
_UNLIMITED: Final = -1
RANGES: Final = {
    "threads": NumberRange(1, 1000),
    "consume_message_batch_max_size": NumberRange(1, BATCH_MAX_MOST),
    "pull_batch_size": NumberRange(1, 1024),
    "pull_interval_ms": NumberRange(0, 65_535),
    "pull_threshold_for_queue": NumberRange(1, 65_535),
    "pull_threshold_for_topic": NumberRange(1, 6_553_500, otherwise=_UNLIMITED),
    "pull_threshold_size_for_queue_mib": NumberRange(1, 1024),
    "pull_threshold_size_for_topic_mib": NumberRange(1, 102_400, otherwise=_UNLIMITED),
    "consume_concurrently_max_span": NumberRange(1, 65_535),
    "consume_timeout_s": NumberRange(0.1, 7.0 * 86_400),
    "max_reconsume_times": NumberRange(0, INT32_MAX, otherwise=_UNLIMITED),
    "suspend_current_queue_time_ms": NumberRange(-INT32_MAX, INT32_MAX),
    "invisible_s": NumberRange(2.0, INVISIBLE_MAX_MS / 1000),
    "prefetch_messages": NumberRange(1, 65_535),
    "prefetch_mib": NumberRange(1, 1024),
    "request_threads": NumberRange(0, 1000),
}
"""Allowed range of each numeric setting of a push consumer."""
CONSUME_MODES: Final = ("queue", "share")
ConsumeMode = Literal["queue", "share"]
_OF_QUEUE_MODE: Final = (
    "message_model",
    "allocation",
    "pull_batch_size",
    "pull_interval_ms",
    "pull_threshold_for_queue",
    "pull_threshold_for_topic",
    "pull_threshold_size_for_queue_mib",
    "pull_threshold_size_for_topic_mib",
    "consume_concurrently_max_span",
    "max_reconsume_times",
    "suspend_current_queue_time_ms",
    "offsets_dir",
    "instance_name",
)
_OF_SHARE_MODE: Final = ("invisible_s", "prefetch_messages", "prefetch_mib")
"""The settings that have an effect in one mode only. The other mode refuses them."""


@dataclass(frozen=True, slots=True)
class PushSettings:
    """The settings of one push consumer. Names, defaults and bounds are RocketMQ's, except for `pull_batch_size`.

    `orderly`: a queue's messages are consumed one after another. `threads`: maximum number of concurrent listener calls
    per instance. `consume_message_batch_max_size`: maximum number of messages per listener call. `pull_batch_size`:
    number of messages per read of a queue. For an orderly consumer it is also the number of messages that may be
    delivered again after a crash. RocketMQ reads 32 messages at a time.

    Fetching from a queue pauses while the instance holds more of its messages than these thresholds allow:
    `pull_threshold_for_queue` messages, `pull_threshold_size_for_queue_mib`, and for a concurrent consumer
    `consume_concurrently_max_span` offsets. A topic's thresholds `pull_threshold_for_topic` and
    `pull_threshold_size_for_topic_mib`, if set (not -1), replace the queue's thresholds: each is divided by the number
    of the topic's queues at the instance. `pull_interval_ms`: a pause after each read. `allocation`: how the group
    shares its queues.

    `consume_timeout_s`: a concurrent listener call that takes longer is given up. `max_reconsume_times`: the number of
    deliveries after the first. -1 means the group's setting at the broker (16) for a concurrent consumer, and no limit
    for an orderly consumer. `suspend_current_queue_time_ms`: how long an orderly queue waits after a failure; limited
    to 10 to 30000.

    BROADCASTING only: `offsets_dir` holds each instance's offsets in GROUP/INSTANCE (default `~/.raymq/offsets`).
    `instance_name` names the instances; without it, the names of their actors are used.

    `namespace`: the namespace of the group and the topics; the listener gets names without the namespace. `leveled`:
    the subscribed topics of the type PRIORITY.

    `consume_mode`: in the mode "queue" the instances share the group's queues. In the mode "share" every instance gets
    messages of every queue, each under a lease (RocketMQ's POP). Only there: `invisible_s`, the time in s after which
    the messages of an instance that died are delivered again; `prefetch_messages` and `prefetch_mib`, the most messages
    and MiB of records that an instance leases. With `orderly` the mode "share" keeps the order of each message group.
    Its retries follow the group's settings, with and without order.

    `request_threads`: maximum number of concurrent listener calls per instance for requests with ``durable=False``, in
    addition to the calls of `threads`. 0: the consumer takes no such requests.
    """

    group: str
    subscriptions: tuple[Subscription, ...]
    start: StartOffsetQuery = field(default_factory=StartOffsetQuery)
    orderly: bool = False
    message_model: MessageModel = MessageModel.CLUSTERING
    allocation: Allocation = field(default_factory=Allocation)
    threads: int = 20
    consume_message_batch_max_size: int = 1
    pull_batch_size: int = 1024
    pull_interval_ms: int = 0
    pull_threshold_for_queue: int = 1000
    pull_threshold_for_topic: int = _UNLIMITED
    pull_threshold_size_for_queue_mib: int = 100
    pull_threshold_size_for_topic_mib: int = _UNLIMITED
    consume_concurrently_max_span: int = 2000
    consume_timeout_s: float = 900.0
    max_reconsume_times: int = _UNLIMITED
    suspend_current_queue_time_ms: int = 1000
    offsets_dir: str | None = None
    instance_name: str | None = None
    namespace: str = ""
    leveled: frozenset[str] = frozenset()
    consume_mode: ConsumeMode = "queue"
    invisible_s: float = 30.0
    prefetch_messages: int = 4096
    prefetch_mib: int = 64
    request_threads: int = 0

    def __post_init__(self) -> None:
        check_fields(self, RANGES)
        if not isinstance(self.message_model, MessageModel):
            raise InvalidArgumentError(f"message_model must be a MessageModel, not {self.message_model!r}")
        if self.group == "DEFAULT_CONSUMER":
            raise InvalidArgumentError("DEFAULT_CONSUMER cannot be used as a consumer group: choose another name")
        self._check_mode()
        self._check_requests()

    def _check_mode(self) -> None:
        """Raise InvalidArgumentError if a setting or a subscription is impossible in the consume mode."""
        if self.consume_mode not in CONSUME_MODES:
            raise InvalidArgumentError(f"consume_mode must be 'queue' or 'share', not {shown(self.consume_mode)}")
        idle = _OF_QUEUE_MODE if self.is_shared else _OF_SHARE_MODE
        for one in fields(self):
            if one.name in idle:
                default = one.default if one.default_factory is MISSING else one.default_factory()
                if getattr(self, one.name) != default:
                    raise InvalidArgumentError(
                        f"{one.name} has no effect with consume_mode={self.consume_mode!r}: leave it out"
                    )
        for subscription in self.subscriptions if self.is_shared else ():
            if subscription.predicate is not None:
                raise InvalidArgumentError(
                    f"a consumer with consume_mode='share' cannot filter topic {subscription.topic!r} by a predicate: "
                    "subscribe by tags or raymq.sql(...), or let the listener ignore messages"
                )

    def _check_requests(self) -> None:
        """Raise InvalidArgumentError if requests that are not stored are impossible: with BROADCASTING, and if a
        broker would have to evaluate a filter expression or a predicate."""
        if not self.request_threads:
            return
        if not self.clustering:
            raise InvalidArgumentError(
                "a request with durable=False goes to one listener, so request_threads has no effect with "
                "BROADCASTING: leave it out"
            )
        for subscription in self.subscriptions:
            if subscription.sql is not None or subscription.predicate is not None:
                raise InvalidArgumentError(
                    f"a consumer with request_threads can filter topic {subscription.topic!r} by tags only: subscribe "
                    "by tags, or let the listener look at the properties"
                )

    @property
    def retry_topic(self) -> str:
        """The retry topic, from which the group's failed messages are delivered again."""
        return RETRY_PREFIX + self.group

    @property
    def is_shared(self) -> bool:
        """True if the instances share all messages (consume mode "share"); False if they share the queues."""
        return self.consume_mode == "share"

    @property
    def clustering(self) -> bool:
        """True if the instances share the queues; False in BROADCASTING mode, in which each instance reads all
        queues."""
        return self.message_model is MessageModel.CLUSTERING

    @property
    def topics(self) -> frozenset[str]:
        """The topics that the consumer reads; in CLUSTERING they include the group's retry topic."""
        topics = {subscription.topic for subscription in self.subscriptions}
        return frozenset(topics | {self.retry_topic} if self.clustering else topics)

    @property
    def expressions(self) -> dict[str, str]:
        """Subscription expression of each topic, for administrators."""
        return {subscription.topic: subscription.description for subscription in self.subscriptions}

    def subscription(self, topic: str) -> Subscription:
        """Return the subscription of a topic. The subscription of the retry topic selects all messages."""
        for subscription in self.subscriptions:
            if subscription.topic == topic:
                return subscription
        return Subscription.parse(topic)
