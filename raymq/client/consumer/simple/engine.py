"""SimpleEngine is the engine that the blocking and asyncio simple consumers share. It receives messages from brokers,
reads them, and acknowledges them.

    receive → one broker after another → leased ranges → the messages, from the storage actors
                                            └ excluded, damaged, over the retry limit: acknowledged here

The engine itself acknowledges messages that the subscription excludes and messages with damaged records. It sends
messages over the retry limit to the dead letters and acknowledges them.

A simple consumer holds no queue and no position, and has no thread of its own. So its group may have any number of
members. The messages of a member that dies are delivered again after their invisible time.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final

from raymq.client.consumer.repair_wait import READ_REPAIR_WAIT_S, WAITS_MAX, is_damage
from raymq.client.consumer.simple.lease_reader import LeasedMessages, LeaseReader
from raymq.client.consumer.simple.received_message import Receipt, ReceivedMessage, parse_handle, received
from raymq.client.consumer.simple.settings import SimpleSettings
from raymq.client.consumer.subscription import Subscription
from raymq.client.consumer.unreadable import UnreadableLog
from raymq.common.errors import ClientStateError, GroupNotExistError, InvalidArgumentError, RaymqError
from raymq.common.members.questions import DirectConsumption, RunningInfo, thread_stacks
from raymq.common.message import MessageModel, MessageQueue
from raymq.common.names import retry_topic
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.protocol.clients import ConsumerData
from raymq.common.protocol.pop import ALL_OFFSETS, LeasedRange, LeasePart, ReceiveAnswer, ReceiveRequest
from raymq.common.protocol.store import RepairState
from raymq.common.retry import Backoff, persist_until
from raymq.records.filters.sql import SqlFilter
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.broker_client import BrokerClient
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES

SETTLE_TIMEOUT_S: Final = 20.0
"""Timeout in s of a repeatable call to a broker, including retries while the broker restarts."""
BROKER_ATTEMPT_TIMEOUT_S: Final = 10.0
WAIT_OF_ONE_S: Final = 5.0
"""Maximum time in s that one request waits at the broker (long poll), if the topics have one broker."""
WAIT_OF_SEVERAL_S: Final = 0.25
"""Maximum time in s that one request waits at a broker (long poll), if the topics have several brokers. It is short,
because a message may arrive at another broker."""
REPAIR_AGAIN_MS: Final = 5_000
"""Time in ms after which a damaged message is received again, if a replica may repair it."""
MENDING_KEPT_S: Final = 600.0
"""Time in s for which a consumer knows since when a damaged message waits for its repair."""
RECEIVE_MAX_BYTES: Final = 64 << 20
"""Maximum bytes of records that one receive reads; further leased messages are returned to the broker."""

logger = logging.getLogger(__name__)


class SimpleEngine:
    """Engine of one simple consumer. Thread-safe: several threads may receive. `announce` is called with the consumer's
    description for administrators."""

    def __init__(
        self,
        settings: SimpleSettings,
        *,
        routes: RouteCache,
        storages: StorageClients,
        names: Namespace = NO_NAMESPACE,
        announce: Callable[[SimpleEngine, ConsumerData], None],
        on_close: Callable[[SimpleEngine], None],
    ) -> None:
        self.settings, self.names = settings, names
        self._routes, self._announce, self._on_close = routes, announce, on_close
        self._reader = LeaseReader(routes, storages)
        self._unreadable = UnreadableLog(settings.group)
        self._lock = threading.Lock()
        self._subscriptions: dict[str, Subscription] = {}
        self._brokers: dict[str, BrokerClient] = {}
        self._mending_since_s: dict[tuple[str, str, int, int], float] = {}
        """For each damaged message (broker, topic, queue id, offset) that may be repaired: the time at which this
        consumer first received it."""
        self._started: set[tuple[str, str]] = set()
        """The brokers at which the group's start position is registered, as pairs of broker and topic."""
        self._turn = secrets.randbelow(1024)
        self._attempts = count()
        self._id = secrets.token_hex(4)
        self._name = f"{os.uname().nodename}-{os.getpid()}-{self._id}"
        self.closed = False

    # Methods that choose the topics to consume

    def subscribe(self, topic: str, expression: str | SqlFilter) -> None:
        """Subscribe to a topic. Blocks until the topic's route is known."""
        self.check_open()
        topic = self.names.wrap(topic)
        subscription = Subscription.parse(topic, expression)
        if subscription.predicate is not None:
            raise InvalidArgumentError(
                f"a simple consumer cannot filter topic {topic!r} by a predicate: subscribe by tags or to all "
                "messages, and acknowledge the unwanted messages"
            )
        self._routes.wait(topic, SETTLE_TIMEOUT_S)
        with self._lock:
            self._subscriptions[topic] = subscription
        self._announce_subscriptions()

    def unsubscribe(self, topic: str) -> None:
        """Stop receiving messages of a topic."""
        self.check_open()
        with self._lock:
            if self._subscriptions.pop(self.names.wrap(topic), None) is None:
                raise ClientStateError(f"this consumer does not subscribe to topic {topic!r}")
        self._announce_subscriptions()

    def _announce_subscriptions(self) -> None:
        with self._lock:
            expressions = {topic: one.description for topic, one in self._subscriptions.items()}
        where = self.settings.start.where
        data = ConsumerData(self.settings.group, "POP", expressions, consume_from=where, member=self._name)
        self._announce(self, data)

    # Methods that answer administrators' queries

    def running_info(self, client_id: str, host: str, *, stacks: bool) -> RunningInfo:
        """Return the consumer's state, for an administrator's query (raymq.common.members.questions.Answers). The state
        lists no queues, because a simple consumer has no queues of its own."""
        with self._lock:
            subscriptions = {topic: one.description for topic, one in self._subscriptions.items()}
        return RunningInfo(
            *(client_id, host, os.getpid(), self._name, self.settings.group),
            *("POP", MessageModel.CLUSTERING.value, subscriptions),
            stacks=thread_stacks() if stacks else (),
        )

    def consume_directly(self, client_id: str, record: bytes, broker_name: str) -> DirectConsumption:
        """Raise InvalidArgumentError, because a simple consumer has no listener."""
        raise InvalidArgumentError(
            f"a member of group {self.settings.group!r} is a simple consumer, which has no listener; `raymq "
            "replay` delivers the message to the group again"
        )

    # Methods that receive messages

    def receive(self, max_messages: int, invisible_s: float, wait_s: float) -> list[ReceivedMessage]:
        """Receive up to `max_messages` messages. Blocks up to `wait_s` for the first message."""
        self.check_open()
        with self._lock:
            subscriptions = dict(self._subscriptions)
        if not subscriptions:
            raise ClientStateError("this consumer has no subscription; call subscribe(topic) before receive()")
        wish = ReceiveRequest(
            self.settings.group,
            tuple(sorted(subscriptions)),
            max_messages,
            round(invisible_s * 1000),
            ordered=self.settings.ordered,
        )
        deadline_s = time.monotonic() + wait_s
        backoff, first = Backoff(), True
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            messages, failure = self._ask_brokers(wish, subscriptions, left_s, look=first)
            if messages or self.closed:
                return messages
            self._reader.report_reads()
            if time.monotonic() >= deadline_s:
                if failure is not None:
                    raise failure
                return messages
            if failure is not None:
                time.sleep(min(backoff.next(), left_s))
            first = False

    def _ask_brokers(
        self, wish: ReceiveRequest, subscriptions: Mapping[str, Subscription], wait_s: float, *, look: bool
    ) -> tuple[list[ReceivedMessage], RaymqError | None]:
        """Request messages from the topics' brokers in turn, until one broker returns messages. If no broker returns
        any, also returns the error of a broker that could not be called. `look`: True to try several brokers without
        waiting at each."""
        brokers: dict[str, list[str]] = {}
        for topic in wish.topics:
            for queue in self._routes.wait(topic, SETTLE_TIMEOUT_S).subscribe_queues:
                topics = brokers.setdefault(queue.broker_name, [])
                if topic not in topics:
                    topics.append(topic)
        names = sorted(brokers)
        with self._lock:
            self._turn += 1
            first = self._turn % max(1, len(names))
        failure: RaymqError | None = None
        each_s = min(wait_s, WAIT_OF_ONE_S if len(names) == 1 else 0.0 if look else WAIT_OF_SEVERAL_S)
        for name in names[first:] + names[:first]:
            try:
                answer = self._ask(name, brokers[name], wish, each_s)
            except RaymqError as error:
                if not error.retryable:
                    raise
                failure = error
                for topic in brokers[name]:
                    self._routes.invalidate(topic)
                continue
            messages = self._read(name, answer, subscriptions) if answer.ranges else []
            if messages:
                return messages, None
        return [], failure

    def _ask(self, name: str, topics: Sequence[str], wish: ReceiveRequest, wait_s: float) -> ReceiveAnswer:
        """Request messages from one broker, which waits up to `wait_s` for messages."""
        attempt_id = f"{self._id}-{next(self._attempts)}"
        request = ReceiveRequest(
            *(wish.group, tuple(topics), wish.max_messages, wish.invisible_ms, wait_s, wish.ordered, attempt_id)
        )
        self._start(name, topics)
        try:
            return self._receive(name, request)
        # The group was deleted, and with it the start position that it had registered at the broker. Register the start
        # position again.
        except GroupNotExistError:
            with self._lock:
                self._started = {known for known in self._started if known[0] != name}
            self._start(name, topics)
            return self._receive(name, request)

    def _receive(self, name: str, request: ReceiveRequest) -> ReceiveAnswer:
        answer: ReceiveAnswer = self._broker(name).call(
            "receive_messages", request, timeout_s=request.wait_s + BROKER_ATTEMPT_TIMEOUT_S
        )
        return answer

    def _start(self, name: str, topics: Sequence[str]) -> None:
        """Register at a broker the position at which the group starts to receive messages of these topics. Does nothing
        for topics whose start position this consumer has already registered there."""
        with self._lock:
            new = [topic for topic in topics if (name, topic) not in self._started]
        if new:
            arguments = (self.settings.group, new, self.settings.start)
            self._broker(name).call("start_receiving", *arguments, timeout_s=BROKER_ATTEMPT_TIMEOUT_S)
            with self._lock:
                self._started.update((name, topic) for topic in new)

    def _read(
        self, name: str, answer: ReceiveAnswer, subscriptions: Mapping[str, Subscription]
    ) -> list[ReceivedMessage]:
        """Read the messages of leased ranges. In order mode, the messages of a queue are sorted by offset."""
        retries = Subscription.parse(retry_topic(self.settings.group))
        messages: list[ReceivedMessage] = []
        unread: list[LeasePart] = []
        left_bytes = RECEIVE_MAX_BYTES
        for given in answer.ranges:
            if left_bytes <= 0:
                unread.append(_part(given, given.start))
                continue
            found = self._reader.read(name, given, subscriptions.get(given.topic, retries), left_bytes)
            left_bytes -= found.size_bytes
            if found.messages:
                stored_ms = found.messages[0].store_timestamp_ms
                CLIENT_FIGURES.delivered(
                    given.topic, self.settings.group, stored_ms, len(found.messages), found.size_bytes
                )
            if found.end < given.start + given.count:
                unread.append(_part(given, found.end))
            messages += self._take(name, given, found, answer.retry_max_times)
        if unread:
            self._call(name, "change_invisible", self.settings.group, unread, 0, False)
        if self.settings.ordered and len(answer.ranges) > 1:
            messages.sort(key=lambda message: (message.topic, message.queue_id, message.queue_offset))
        return messages

    def _take(
        self, name: str, given: LeasedRange, found: LeasedMessages, retry_max_times: int
    ) -> list[ReceivedMessage]:
        """From one leased range, return the messages that the program receives. All other messages of the range are
        acknowledged, sent to the dead letters, or left for redelivery."""
        messages = found.messages
        places = (given.topic, name, given.queue_id, given.start, given.pop_ms, given.invisible_ms, given.attempts)
        handed_out = given.count - int(given.without, 16).bit_count()
        whole = len(messages) if len(messages) == handed_out else 0
        receipt = Receipt(*places, self.settings.ordered, whole)
        result = received(self.names.shown_messages(messages), receipt)
        # If the lease is of the retry topic, a message may have had too many attempts although the lease counts only a
        # few. The message's record also counts the attempts before the message was sent to the retry topic.
        if given.attempts > retry_max_times or given.topic == retry_topic(self.settings.group):
            dead = [index for index, message in enumerate(result) if message.attempt > retry_max_times + 1]
            for index in dead:
                self._give_up(name, found.record(index), result[index].attempt - 1)
            if dead:
                self.ack([result[index] for index in dead])
                gone = set(dead)
                result = [message for index, message in enumerate(result) if index not in gone]
        if len(messages) < handed_out:
            self._settle_unreadable(name, given, found, retry_max_times)
            self._settle_excluded(name, given, found)
        return result

    def _settle_unreadable(self, name: str, given: LeasedRange, found: LeasedMessages, retry_max_times: int) -> None:
        """Handle the unreadable messages of a leased range, so that the caller can acknowledge them. Sends messages
        over the retry limit to the dead letters. Removes these messages, and messages with damaged records, from
        `found.unreadable`. A message that a replica may still repair stays, and is received again soon."""
        mending = self._mending(name, given, found)
        for offset, (message, error, record) in list(found.unreadable.items()):
            if offset in mending:
                continue
            self._unreadable.note(error)
            if error.record_damaged:
                logger.error("group %s skips a message that cannot be read: %s", self.settings.group, error)
                del found.unreadable[offset]
            elif message.reconsume_times + given.attempts > retry_max_times:
                self._give_up(name, record, message.reconsume_times + given.attempts, error.reason)
                del found.unreadable[offset]

    def _mending(self, name: str, given: LeasedRange, found: LeasedMessages) -> Collection[int]:
        """Report the damaged messages of a leased range to the store. Returns the offsets of the messages that were or
        may be repaired. These messages become visible again after REPAIR_AGAIN_MS, and the attempt does not count."""
        damaged = sorted(offset for offset, one in found.unreadable.items() if is_damage(one.error))
        if not damaged:
            return ()
        queue = MessageQueue(given.topic, name, given.queue_id)
        try:
            states = self._reader.report_damage(queue, damaged)
        except RaymqError as error:
            logger.info("cannot report damaged messages of queue %s now: %s", queue, error)
            states = [RepairState.PENDING] * len(damaged)
        mending = [
            offset
            for offset, state in zip(damaged, states, strict=True)
            if state is not RepairState.LOST and self._waits_still((name, given.topic, given.queue_id, offset))
        ]
        if mending:
            bits = sum(1 << offset - given.start for offset in mending)
            part = LeasePart(given.topic, given.queue_id, given.start, given.pop_ms, f"{bits:x}")
            self._call(name, "change_invisible", self.settings.group, [part], REPAIR_AGAIN_MS, False)
        return mending

    def _waits_still(self, place: tuple[str, str, int, int]) -> bool:
        """Return False if the repair of the damaged message at a place takes longer than READ_REPAIR_WAIT_S."""
        now_s = time.monotonic()
        with self._lock:
            self._mending_since_s = {
                one: at_s for one, at_s in self._mending_since_s.items() if now_s < at_s + MENDING_KEPT_S
            }
            if len(self._mending_since_s) >= WAITS_MAX:
                return False
            return now_s < self._mending_since_s.setdefault(place, now_s) + READ_REPAIR_WAIT_S

    def _settle_excluded(self, name: str, given: LeasedRange, found: LeasedMessages) -> None:
        """Acknowledge the messages that the subscription excludes, and the messages that retention has deleted."""
        offsets = [*found.unreadable, *(message.queue_offset for message in found.messages)]
        kept = sum([1 << offset - given.start for offset in offsets])
        looked_at = (1 << found.end - given.start) - 1
        excluded = looked_at & ~kept & ~int(given.without, 16)
        if excluded:
            part = LeasePart(given.topic, given.queue_id, given.start, given.pop_ms, f"{excluded:x}")
            self._call(name, "ack_messages", self.settings.group, [part])

    def _give_up(self, name: str, record: bytes, attempts: int, reason: str = "") -> None:
        """Send a message to the dead letters of its group, because `attempts` deliveries failed. `reason`: why the
        message cannot be read; empty if the message can be read."""
        ActorRef(name).call(
            "send_back",
            self.settings.group,
            record,
            delay_level=-1,
            reason=reason,
            failure=f"not acknowledged in {attempts} attempts",
            attempts=attempts,
            timeout_s=SETTLE_TIMEOUT_S,
        )

    # Methods that acknowledge messages or change their invisible time

    def ack(self, messages: Iterable[ReceivedMessage]) -> int:
        """Acknowledge messages. Returns the number of messages that this call acknowledged. Blocks until the brokers
        have answered."""
        self.check_open()
        return self._ack(_parts_of(messages))

    def ack_handles(self, topic: str, handles: Iterable[str]) -> int:
        """Acknowledge messages by their handles (receipts as text). Blocks until the brokers have answered."""
        self.check_open()
        offsets: dict[Receipt, int] = {}
        for handle in handles:
            receipt, offset = parse_handle(self.settings.group, self.names.wrap(topic), handle)
            offsets[receipt] = offsets.get(receipt, 0) | 1 << offset - receipt.start
        return self._ack([(receipt, f"{bits:x}") for receipt, bits in offsets.items()])

    def _ack(self, parts: Sequence[tuple[Receipt, str]]) -> int:
        by_broker: dict[str, list[LeasePart]] = {}
        for receipt, bits in parts:
            part = LeasePart(receipt.topic, receipt.queue_id, receipt.start, receipt.pop_ms, bits)
            by_broker.setdefault(receipt.broker_name, []).append(part)
        return sum(self._call(name, "ack_messages", self.settings.group, part) for name, part in by_broker.items())

    def change_invisible(
        self, messages: Iterable[ReceivedMessage], invisible_s: float, *, counted: bool = True
    ) -> list[ReceivedMessage]:
        """Set the time after which messages are delivered again. Blocks until the brokers have answered. Returns the
        messages whose leases were renewed, with new receipts."""
        self.check_open()
        groups: dict[Receipt, list[ReceivedMessage]] = {}
        for message in messages:
            groups.setdefault(_require_received(message)._receipt, []).append(message)
        renewed: list[ReceivedMessage] = []
        by_broker: dict[str, list[tuple[Receipt, list[ReceivedMessage]]]] = {}
        for receipt, own in groups.items():
            by_broker.setdefault(receipt.broker_name, []).append((receipt, own))
        for name, receipts in by_broker.items():
            parts = [
                LeasePart(receipt.topic, receipt.queue_id, receipt.start, receipt.pop_ms, _bits(receipt, own))
                for receipt, own in receipts
            ]
            arguments = (self.settings.group, parts, round(invisible_s * 1000), counted)
            ranges: list[LeasedRange | None] = self._call(name, "change_invisible", *arguments)
            for (receipt, own), new in zip(receipts, ranges, strict=True):
                if new is not None:
                    renewed += _renewed(receipt, own, new)
        return renewed

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a broker, with retries while the broker restarts. The method must be safe to repeat."""
        return persist_until(
            time.monotonic() + SETTLE_TIMEOUT_S,
            lambda left_s: self._broker(name).call(method, *arguments, timeout_s=min(left_s, BROKER_ATTEMPT_TIMEOUT_S)),
        )

    def _broker(self, name: str) -> BrokerClient:
        """Return this consumer's own client of a broker. The client is not shared, because waiting receives keep its
        lanes (direct socket connections) busy."""
        with self._lock:
            client = self._brokers.get(name)
            if client is None:
                client = self._brokers[name] = BrokerClient(name)
            return client

    # Methods that close the consumer

    def check_open(self) -> None:
        """Raise ClientStateError if the consumer was closed."""
        if self.closed:
            raise ClientStateError("this consumer is closed; create a new consumer with client.simple_consumer(...)")

    def close(self) -> None:
        """Close the consumer. A waiting receive ends within a few seconds. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            brokers = list(self._brokers.values())
        for broker in brokers:
            broker.drop_lanes()
        self._reader.report_reads()
        self._on_close(self)


def _part(given: LeasedRange, offset: int) -> LeasePart:
    """Return the part of a leased range that begins at `offset`, without the messages that the lease excludes."""
    first = offset - given.start
    handed_out = ~int(given.without, 16) & ((1 << given.count) - 1)
    return LeasePart(given.topic, given.queue_id, given.start, given.pop_ms, f"{handed_out >> first << first:x}")


def _parts_of(messages: Iterable[ReceivedMessage]) -> list[tuple[Receipt, str]]:
    """Group messages by their receipts (leases). Returns each receipt with the offsets of its messages, encoded as a
    text."""
    groups: dict[int, list[ReceivedMessage]] = {}
    for message in messages:
        groups.setdefault(id(_require_received(message)._receipt), []).append(message)
    parts = []
    for own in groups.values():
        receipt = own[0]._receipt
        # `is_all`: True if the program has passed every message of the lease. `own` then has as many messages as the
        # lease, and none of them twice.
        is_all = len(own) == receipt.whole == len({id(message) for message in own})
        parts.append((receipt, ALL_OFFSETS if is_all else _bits(receipt, own)))
    return parts


def _bits(receipt: Receipt, messages: Iterable[ReceivedMessage]) -> str:
    bits = 0
    for message in messages:
        bits |= 1 << message.queue_offset - receipt.start
    return f"{bits:x}"


def _renewed(receipt: Receipt, messages: Sequence[ReceivedMessage], new: LeasedRange) -> list[ReceivedMessage]:
    """Return the messages that the renewed lease `new` still includes. Each returned message has the receipt of that
    lease."""
    without = int(new.without, 16)
    places = (receipt.topic, receipt.broker_name, receipt.queue_id)
    renewed = Receipt(*places, new.start, new.pop_ms, new.invisible_ms, new.attempts, receipt.ordered)
    held = [
        message
        for message in messages
        if 0 <= message.queue_offset - new.start < new.count and not without >> message.queue_offset - new.start & 1
    ]
    return received(held, renewed)


def _require_received(message: ReceivedMessage) -> ReceivedMessage:
    if not isinstance(message, ReceivedMessage):
        raise InvalidArgumentError(
            f"expected a message that receive() returned, not {type(message).__name__}; for receipt handles "
            "as text call ack_handles"
        )
    return message
