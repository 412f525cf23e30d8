"""Queue selection: chooses the queue of a message. The functions take the current time as an argument.

Without a destination, messages go to a topic's queues in turn (`QueueTurns`). A program that needs an order, or a
certain queue, gives a `Destination`: a sharding key that is hashed, a selector function, or the queue itself. Such a
message goes to the chosen queue only. While the queue's broker is unreachable, the message waits, up to the send
timeout. Keys and selectors choose among all queues of the topic, reachable or not, so no fault moves a key to another
queue. Messages keep their order only within a queue. If the topic gets more queues, keys may map to other queues.

In a topic of the type PRIORITY, the id of a message's queue is its priority, as in RocketMQ: its level (level_queues).
Each broker group has each level, so the message may go to any broker group, but never to another level.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from raymq.client.producer.senders.latency_fault import BrokerFaults
from raymq.common.errors import InvalidArgumentError, NoPermissionError, ServiceNotAvailableError, check_option_names
from raymq.common.message import Message, MessageQueue, checked_queue
from raymq.common.numbers import whole_number
from raymq.common.protocol.route import PERM_WRITE, TopicRoute
from raymq.records.format.hashing import java_hash

TURN_MAX_MESSAGES: Final = 256
"""Number of consecutive messages to one queue after which the producer switches to the topic's next queue."""
TURN_MAX_S: Final = 0.002
"""Time, in seconds, after which the producer switches to the topic's next queue, even if it has sent fewer than
TURN_MAX_MESSAGES messages to the present queue."""
KEY_QUEUES_VALID_S: Final = 0.1
"""Time in seconds for which a producer reuses a topic's known queues before it reads the topic's route again. Applies
to messages with a sharding key, and to messages for a given queue."""

NO_ROWS: Final[Mapping[MessageQueue, int]] = {}

QueueSelector = Callable[[Sequence[MessageQueue], Message, Any], MessageQueue]
"""Function that chooses one of a topic's queues for a message. The arguments are the queues in their order, the
message, and the `argument` of the send.

The queues include the queues of unreachable brokers. If the number of queues changed with the reachable brokers, a
selector that uses this number would move keys to other queues.
"""


class DestinationOptions(TypedDict, total=False):
    """The keyword arguments of a send that choose its queue: at most one of `sharding_key`, `queue`, `selector`.

    `sharding_key`: messages with the same key go to the same queue, in the order of the sends. A text is hashed as a
    Java String, a number as a Java Integer or Long. `queue`: the queue itself. `selector`: a function; its result
    `selector(queues, message, argument)` is the queue. Keys and selectors choose among all queues of the topic. If the
    queue's broker is unreachable, the send waits for the broker up to the send timeout.
    """

    sharding_key: str | int | None
    queue: MessageQueue | None
    selector: QueueSelector | None
    argument: Any


@dataclass(frozen=True, slots=True)
class Destination:
    """The DestinationOptions of one send. Raises InvalidArgumentError if more than one option chooses the
    queue."""

    sharding_key: str | int | None = None
    queue: MessageQueue | None = None
    selector: QueueSelector | None = None
    argument: Any = None

    def __post_init__(self) -> None:
        if self.queue is not None:
            object.__setattr__(self, "queue", checked_queue("queue", self.queue))
        if self.sharding_key is not None and type(self.sharding_key) is not str:
            object.__setattr__(self, "sharding_key", checked_key(self.sharding_key))
        if sum(value is not None for value in (self.sharding_key, self.queue, self.selector)) > 1:
            raise InvalidArgumentError(
                "a message's queue is chosen by one of sharding_key, queue and selector: pass only one of them"
            )
        if self.argument is not None and self.selector is None:
            raise InvalidArgumentError("argument= is passed to a selector: pass selector=, too, or leave argument= out")

    @property
    def fixed(self) -> bool:
        """True if the destination chooses a queue, so that the message must not go to another queue."""
        return self.sharding_key is not None or self.queue is not None or self.selector is not None

    def select(self, route: TopicRoute, message: Message) -> MessageQueue:
        """Return the queue of a message whose destination chooses a queue (`fixed`). The queue's broker may be
        unreachable.

        Raises NoPermissionError if the topic or the queue is not writable; InvalidArgumentError if the queue, or the
        selector's choice, does not belong to the topic; ServiceNotAvailableError while some of the topic's queues are
        unknown.
        """
        if self.queue is not None:
            return named_queue(route, self.queue)
        queues = route.require_all_queues()
        if self.sharding_key is not None:
            return named_queue(route, select_queue_by_hash(queues, message, self.sharding_key))
        assert self.selector is not None
        chosen = self.selector(queues, message, self.argument)
        if chosen not in queues:
            raise InvalidArgumentError(
                f"the selector returned {chosen!r}, which is not one of the queues that were passed to it"
            )
        return named_queue(route, chosen)


ANYWHERE: Final = Destination()
"""The destination of a message that may go to any queue of its topic."""


def destination_of(options: DestinationOptions) -> Destination:
    """Return the destination that the keyword arguments of a send choose. Raises TypeError for an unknown argument, and
    InvalidArgumentError if more than one argument chooses the queue."""
    if not options:
        return ANYWHERE
    try:
        return Destination(**options)
    except TypeError:
        check_option_names("a send", options, ("timeout_s", *DestinationOptions.__annotations__))
        raise


def select_queue_by_hash(queues: Sequence[MessageQueue], message: Message, argument: str | int) -> MessageQueue:
    """Select a queue by a hash of the argument: the hash's absolute value, modulo the number of queues. The hash is
    Java's hash of a String, Integer or Long."""
    return queues[abs(_java_hash_code(argument)) % len(queues)]


def select_queue_by_random(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    """Select a random queue of a topic, even if the queue's broker is unreachable. A send without a selector, in
    contrast, skips the queues of unreachable brokers."""
    return secrets.choice(queues)


def checked_key(key: object) -> str | int:
    """Return a valid sharding key unchanged. Raises InvalidArgumentError unless the key is a text or an integer of 64
    bits."""
    return key if isinstance(key, str) else whole_number("sharding_key", key, -(2**63), 2**63 - 1)


def _java_hash_code(value: str | int) -> int:
    if isinstance(value, str):
        return java_hash(value)
    value = whole_number("sharding_key", value, -(2**63), 2**63 - 1)
    if -(2**31) <= value < 2**31:
        return value
    # This is Java's Long.hashCode: (int) (value ^ (value >>> 32)).
    folded = (value ^ (value & 0xFFFF_FFFF_FFFF_FFFF) >> 32) & 0xFFFF_FFFF
    return folded - 0x1_0000_0000 if folded & 0x8000_0000 else folded


def named_queue(route: TopicRoute, queue: MessageQueue) -> MessageQueue:
    """Check that `queue` belongs to the topic of `route`, and return it. The queue's broker may be unreachable. Raises
    the errors of `Destination.select`."""
    if queue.topic != route.topic:
        raise InvalidArgumentError(
            f"a message for topic {route.topic!r} cannot be sent to queue {queue}, which belongs to another topic"
        )
    if queue in route.publish_queues:
        return queue
    held = [data for data in route.queues if data.broker_name == queue.broker_name]
    if held and not held[0].perm & PERM_WRITE:
        raise NoPermissionError(
            f"queue {queue} is not writable: the topic's permission in this broker group has no W; see `raymq "
            f"topic describe {queue.topic}`, or admin.update_topic"
        )
    if queue in route.all_queues:
        return queue
    if not held:
        raise ServiceNotAvailableError(
            f"no running broker is known for queue {queue}; see `raymq topic describe {queue.topic}`"
        )
    raise InvalidArgumentError(
        f"queue {queue} does not exist: the topic has {held[0].write_queue_nums} writable queues in this broker group"
    )


def own_queue(message: Message, where: DestinationOptions) -> MessageQueue | None:
    """Return the queue that a destination names, if the queue belongs to the message's topic. Returns None for any
    other destination; the class Destination then checks the destination."""
    queue = where.get("queue")
    if len(where) != 1 or queue.__class__ is not MessageQueue or queue.queue_id.__class__ is not int:
        return None
    return queue if queue.topic == message.topic else None


def level_queues(queues: Iterable[MessageQueue], priority: int) -> list[MessageQueue]:
    """Return the queue of a priority in each broker group of a topic with `queues`: the queue whose id is the priority,
    or the group's last queue if the priority is greater."""
    levels: dict[str, MessageQueue] = {}
    for queue in queues:
        known = levels.get(queue.broker_name)
        if known is None or known.queue_id < queue.queue_id <= priority:
            levels[queue.broker_name] = queue
    return list(levels.values())


@dataclass(slots=True)
class _Turn:
    """A turn of `queue`: during the turn, a producer sends its messages to this queue, one of a topic's `queues`. The
    turn began at `since_s`; `used` messages were sent in it."""

    queues: tuple[MessageQueue, ...]
    queue: MessageQueue
    used: int
    since_s: float


class QueueTurns:
    """Selects a topic's queues in turn, from a random start. Thread-safe.

    A turn lasts for TURN_MAX_MESSAGES messages or TURN_MAX_S, because many messages in one queue cost the store less
    than messages scattered over queues. Queues of unavailable brokers are skipped. If no broker is available, only
    queues of unreachable brokers are skipped. If no broker is reachable, no queue is skipped.
    """

    def __init__(self, faults: BrokerFaults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._next: dict[str, int] = {}
        """For each topic, the index of the next queue: messages without a destination go to it after the
        current queue."""
        self._current: dict[str, _Turn] = {}

    def next(self, route: TopicRoute, count: int, now_s: float) -> MessageQueue:
        """Return the queue for the next `count` messages. Raises the errors of `TopicRoute.require_writable`."""
        queues = route.require_writable().publish_queues
        with self._lock:
            turn = self._current.get(route.topic)
            if (
                turn is None
                or turn.queues is not queues
                or turn.used >= TURN_MAX_MESSAGES
                or now_s - turn.since_s >= TURN_MAX_S
                or not self._faults.available(turn.queue.broker_name, now_s)
            ):
                queue = self._next_queue(route.topic, queues, now_s)
                turn = self._current[route.topic] = _Turn(queues, queue, 0, now_s)
            turn.used += count
            return turn.queue

    def used(self, topic: str, count: int) -> None:
        """Add `count` to the messages that were sent to a topic's current queue. The producer changes the queue after a
        maximum number of messages."""
        with self._lock:
            turn = self._current.get(topic)
            if turn is not None:
                turn.used += count

    def of_priority(self, route: TopicRoute, priority: int, now_s: float) -> MessageQueue:
        """Return the queue of a priority at a random broker that is available; if no broker is available, at a
        reachable broker; if no broker is reachable, at any broker. Raises the errors of `TopicRoute.require_writable`.
        """
        queues = level_queues(route.require_writable().publish_queues, priority)
        for good in (self._faults.available, self._faults.reachable):
            chosen = [queue for queue in queues if good(queue.broker_name, now_s)]
            if chosen:
                return secrets.choice(chosen)
        return secrets.choice(queues)

    def next_at_another_broker(
        self, route: TopicRoute, broker_name: str, now_s: float, priority: int | None = None
    ) -> MessageQueue | None:
        """Return a queue of a broker other than `broker_name`, which failed. Returns None if no other broker is
        reachable. `priority`: the priority whose queue to return; None for any queue."""
        queues = route.publish_queues if priority is None else level_queues(route.publish_queues, priority)
        others = [queue for queue in queues if queue.broker_name != broker_name]
        for good in (self._faults.available, self._faults.reachable):
            chosen = [queue for queue in others if good(queue.broker_name, now_s)]
            if chosen:
                return secrets.choice(chosen)
        return None

    def fewest(self, route: TopicRoute, rows: Mapping[MessageQueue, int], now_s: float) -> MessageQueue:
        """Return the queue with the fewest `rows`, for the next rows of a table. Queues with equally many rows are
        taken in turn. Queues of unavailable brokers are skipped as in `next`. Raises the errors of
        `TopicRoute.require_writable`."""
        queues = route.require_writable().publish_queues
        with self._lock:
            return self._next_queue(route.topic, queues, now_s, rows)

    def _next_queue(
        self,
        topic: str,
        queues: tuple[MessageQueue, ...],
        now_s: float,
        rows: Mapping[MessageQueue, int] = NO_ROWS,
    ) -> MessageQueue:
        """Return the next queue of an available broker; with `rows`, the queue with the fewest rows. If no broker is
        available, return a queue of a reachable broker; if no broker is reachable, any queue. The caller holds the
        lock."""
        first = self._next.get(topic, -1)
        if first < 0:
            first = secrets.randbelow(len(queues))
        if not rows and first < len(queues) and self._faults.available(queues[first].broker_name, now_s):
            self._next[topic] = (first + 1) % len(queues)
            return queues[first]
        in_order = [(first + step) % len(queues) for step in range(len(queues))]
        for good in (self._faults.available, self._faults.reachable):
            found = [index for index in in_order if good(queues[index].broker_name, now_s)]
            if found:
                in_order = found
                break
        chosen = min(in_order, key=lambda index: rows.get(queues[index], 0))
        self._next[topic] = (chosen + 1) % len(queues)
        return queues[chosen]
