"""PopCalls makes the calls of RocketMQ's POP consumption for one consumer group: receive, acknowledge, change the
invisible time, extend leases, forward to the dead letters.

The caller names the topics and the broker of each receive, so one PopCalls serves consumers with different
subscriptions. Nothing that settles a message is kept here: a receipt, or its handle as text, says all that a broker
needs. So a message that one process received can be settled in another process, and after this process has died.
raymq.client.consumer.simple.engine adds a simple consumer's subscriptions, and its turns through the brokers.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any, Final

from raymq.client.consumer.simple.lease_reader import LeaseReader
from raymq.client.consumer.simple.received_message import (
    Receipt,
    ReceivedMessage,
    holds,
    offsets_text,
    parse_handle,
    parts_of,
    received,
    require_received,
)
from raymq.client.consumer.simple.taken_messages import MessageTaker
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import GroupNotExistError, InvalidArgumentError, RaymqError
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.protocol.group import StartOffsetQuery, retry_interval_s
from raymq.common.protocol.pop import (
    ALL_OFFSETS,
    INVISIBLE_MAX_MS,
    LeasedRange,
    LeasePart,
    ReceiveAnswer,
    ReceiveRequest,
)
from raymq.common.retry import persist_until
from raymq.remoting.broker_client import BrokerClient
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

SETTLE_TIMEOUT_S: Final = 20.0
"""Timeout in s of a repeatable call to a broker, including retries while the broker restarts."""
BROKER_ATTEMPT_TIMEOUT_S: Final = 10.0
FROM_LAST_OFFSET: Final = StartOffsetQuery()
DEAD_LETTER_LEASE_MS: Final = 60_000
"""Invisible time in ms of a message while it is stored as a dead letter. If the process dies before the letter is
stored, the message is delivered again after this time."""

logger = logging.getLogger(__name__)


class PopCalls:
    """The POP calls of one consumer group. Thread-safe.

    Group and topics are full names, with their namespace; received messages show the topics without it (`names`).
    `start`: where the group starts in a queue in which it has committed nothing. Each PopCalls has its own connections
    to brokers, because receives that wait keep them busy; `close` closes them.
    """

    def __init__(
        self,
        group: str,
        *,
        routes: RouteCache,
        storages: StorageClients,
        names: Namespace = NO_NAMESPACE,
        start: StartOffsetQuery = FROM_LAST_OFFSET,
    ) -> None:
        self.group = group
        self._routes, self._start_query = routes, start
        self._taker = MessageTaker(group, LeaseReader(routes, storages), names, self._call)
        self._lock = threading.Lock()
        self._brokers: dict[str, BrokerClient] = {}
        self._started: set[tuple[str, str]] = set()
        """The brokers at which the group's start position is registered, as pairs of broker and topic."""
        self._id = secrets.token_hex(4)
        self._attempts = count()

    # Methods that receive messages

    def brokers_of(self, topics: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of the brokers from which these topics can be received, each with its topics. Blocks until
        the topics' routes are known. Raises TopicNotExistError if a topic does not exist."""
        brokers: dict[str, list[str]] = {}
        for topic in topics:
            for queue in self._routes.wait(topic, SETTLE_TIMEOUT_S).subscribe_queues:
                known = brokers.setdefault(queue.broker_name, [])
                if topic not in known:
                    known.append(topic)
        return brokers

    def receive(
        self,
        broker_name: str,
        subscriptions: Mapping[str, Subscription],
        max_messages: int,
        invisible_ms: int,
        wait_s: float = 0.0,
        *,
        ordered: bool | None = None,
        attempt_id: str = "",
    ) -> list[ReceivedMessage]:
        """Receive up to `max_messages` messages of some topics from one broker: `lease` and `read` in one call.
        `subscriptions`: the wanted messages, by topic. Messages that they exclude are acknowledged, so the list may be
        empty before `wait_s` has passed. After an error, messages may have been leased; they are delivered again."""
        places = (broker_name, subscriptions, max_messages, invisible_ms, wait_s)
        answer = self.lease(*places, ordered=ordered, attempt_id=attempt_id)
        return self.read(broker_name, answer, subscriptions)

    def lease(
        self,
        broker_name: str,
        topics: Iterable[str],
        max_messages: int,
        invisible_ms: int,
        wait_s: float = 0.0,
        *,
        ordered: bool | None = None,
        attempt_id: str = "",
    ) -> ReceiveAnswer:
        """Lease up to `max_messages` messages of some topics at one broker, which waits up to `wait_s` for the first
        message. Returns the leased ranges; `read` reads their messages. `ordered`: whether in order mode; None for the
        group's mode (raymq.common.protocol.group.is_ordered).

        A call that repeats another call's `attempt_id` gets the same leases; without an id, each call is a new one.
        """
        request = ReceiveRequest(
            *(self.group, tuple(sorted(topics)), max_messages, invisible_ms, wait_s, ordered),
            attempt_id or f"{self._id}-{next(self._attempts)}",
        )
        self._start(broker_name, request.topics)
        try:
            return self._receive(broker_name, request)
        # The group was deleted, and with it the start position that it had registered at the broker. Register the start
        # position again.
        except GroupNotExistError:
            with self._lock:
                self._started = {known for known in self._started if known[0] != broker_name}
            self._start(broker_name, request.topics)
            return self._receive(broker_name, request)

    def read(
        self, broker_name: str, answer: ReceiveAnswer, subscriptions: Mapping[str, Subscription]
    ) -> list[ReceivedMessage]:
        """Read the leased messages that the subscriptions want. Acknowledges the excluded messages, and forwards those
        with too many attempts to the dead letters."""
        return self._taker.take(broker_name, answer, subscriptions) if answer.ranges else []

    def _receive(self, name: str, request: ReceiveRequest) -> ReceiveAnswer:
        answer: ReceiveAnswer = self._broker(name).call(
            "receive_messages", request, timeout_s=request.wait_s + BROKER_ATTEMPT_TIMEOUT_S
        )
        return answer

    def _start(self, name: str, topics: Sequence[str]) -> None:
        """Register at a broker the position at which the group starts to receive messages of these topics. Does nothing
        for topics whose start position was already registered there."""
        with self._lock:
            new = [topic for topic in topics if (name, topic) not in self._started]
        if new:
            arguments = (self.group, new, self._start_query)
            self._broker(name).call("start_receiving", *arguments, timeout_s=BROKER_ATTEMPT_TIMEOUT_S)
            with self._lock:
                self._started.update((name, topic) for topic in new)

    def report_reads(self) -> None:
        """Report to the stores how many messages were read from their mapped files. Blocks for a short call to each
        store."""
        self._taker.report_reads()

    # Methods that settle messages: acknowledge them, change their invisible time, forward them to the dead letters

    def ack(self, messages: Iterable[ReceivedMessage]) -> int:
        """Acknowledge messages. Returns the number of messages that this call acknowledged. Durable on return."""
        return self._ack(parts_of(messages))

    def ack_handles(self, topic: str, handles: Iterable[str]) -> int:
        """Acknowledge messages of a topic by their handles, as `ack` does. Raises InvalidArgumentError if a text is not
        a handle, or names a broker that does not have the topic."""
        return self._ack(_by_lease(self._places(topic, handles)))

    def _ack(self, parts: Iterable[tuple[Receipt, str]]) -> int:
        by_broker: dict[str, list[LeasePart]] = {}
        for receipt, offsets in parts:
            by_broker.setdefault(receipt.broker_name, []).append(receipt.part(offsets))
        return sum(self._call(name, "ack_messages", self.group, part) for name, part in by_broker.items())

    def change_invisible(
        self, messages: Iterable[ReceivedMessage], invisible_ms: int | None, *, counted: bool = True
    ) -> list[ReceivedMessage]:
        """Make messages visible again `invisible_ms` from now; None: after the group's retry interval for the number of
        a message's attempts, at most INVISIBLE_MAX_MS. Returns the messages that were neither acknowledged nor
        delivered again, with their new receipts. `counted`: False if no consumer has processed the messages; their
        attempt does not count then. Durable on return."""
        if invisible_ms is not None:
            return self._change_messages(messages, invisible_ms, counted)
        by_interval: dict[int, list[ReceivedMessage]] = {}
        for message in messages:
            interval_s = retry_interval_s(require_received(message)._receipt.retry_intervals_s, message.attempt)
            by_interval.setdefault(min(round(interval_s * 1000), INVISIBLE_MAX_MS), []).append(message)
        changed = [self._change_messages(own, interval_ms, counted) for interval_ms, own in by_interval.items()]
        return list(chain.from_iterable(changed))

    def _change_messages(
        self, messages: Iterable[ReceivedMessage], invisible_ms: int, counted: bool
    ) -> list[ReceivedMessage]:
        groups: dict[Receipt, list[ReceivedMessage]] = {}
        for message in messages:
            groups.setdefault(require_received(message)._receipt, []).append(message)
        parts = [(receipt, offsets_text(receipt, own)) for receipt, own in groups.items()]
        leases = self._change(parts, invisible_ms, counted)
        renewed: list[ReceivedMessage] = []
        for receipt, own in groups.items():
            new = leases[receipt]
            if new is not None:
                held = [message for message in own if holds(new, message.queue_offset)]
                renewed += received(held, receipt.moved(new))
        return renewed

    def change_invisible_handles(
        self, topic: str, handles: Iterable[str], invisible_ms: int, *, counted: bool = True
    ) -> list[str | None]:
        """Change the invisible time of a topic's messages by their handles, as `change_invisible` does. Returns the new
        handle for each handle; None for a message that was acknowledged or delivered again. Raises InvalidArgumentError
        as `ack_handles` does."""
        places = self._places(topic, handles)
        leases = self._change(_by_lease(places), invisible_ms, counted)
        renewed: list[str | None] = []
        for receipt, offset in places:
            new = leases[receipt]
            held = new is not None and holds(new, offset)
            renewed.append(receipt.moved(new).handle(offset) if new is not None and held else None)
        return renewed

    def _change(
        self, parts: Iterable[tuple[Receipt, str]], invisible_ms: int, counted: bool
    ) -> dict[Receipt, LeasedRange | None]:
        """Change the invisible time of parts of leases. Returns the new lease for each receipt; None for a receipt
        whose lease has ended."""
        by_broker: dict[str, list[tuple[Receipt, LeasePart]]] = {}
        for receipt, offsets in parts:
            by_broker.setdefault(receipt.broker_name, []).append((receipt, receipt.part(offsets)))
        leases: dict[Receipt, LeasedRange | None] = {}
        for name, own in by_broker.items():
            arguments = (self.group, [part for _, part in own], invisible_ms, counted)
            ranges = self._call(name, "change_invisible", *arguments)
            leases.update(zip([receipt for receipt, _ in own], ranges, strict=True))
        return leases

    def extend_invisible(self, messages: Iterable[ReceivedMessage], invisible_ms: int) -> list[bool]:
        """Keep messages invisible until `invisible_ms` from now, with their receipts. Returns for each message whether
        it was still leased and not acknowledged. Extends whole leases: all unacknowledged messages of a queue that came
        with one receive. Durable on return."""
        places = [(require_received(message)._receipt, message.queue_offset) for message in messages]
        return self._extend(places, invisible_ms)

    def extend_invisible_handles(self, topic: str, handles: Iterable[str], invisible_ms: int) -> list[bool]:
        """Extend the leases of a topic's messages by their handles, as `extend_invisible` does. Raises
        InvalidArgumentError as `ack_handles` does."""
        return self._extend(self._places(topic, handles), invisible_ms)

    def _extend(self, places: Sequence[tuple[Receipt, int]], invisible_ms: int) -> list[bool]:
        by_broker: dict[str, list[int]] = {}
        for index, (receipt, _) in enumerate(places):
            by_broker.setdefault(receipt.broker_name, []).append(index)
        extended = [False] * len(places)
        for name, indices in by_broker.items():
            own = [places[index] for index in indices]
            parts = [receipt.part(f"{1 << offset - receipt.start:x}") for receipt, offset in own]
            results = self._call(name, "extend_invisible", self.group, parts, invisible_ms)
            for index, result in zip(indices, results, strict=True):
                extended[index] = result
        return extended

    def extend_once(
        self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int, timeout_s: float
    ) -> list[bool]:
        """Extend leases at one broker, without retries. Returns False for each lease that has ended. Raises RaymqError
        if the broker does not answer within `timeout_s`."""
        arguments = (self.group, list(parts), invisible_ms)
        results: list[bool] = self._broker(broker_name).call("extend_invisible", *arguments, timeout_s=timeout_s)
        return results

    def return_parts(self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int) -> None:
        """Make parts of leases at one broker visible again `invisible_ms` from now, as failed attempts. Parts that were
        acknowledged or delivered again stay so. Durable on return."""
        self._call(broker_name, "change_invisible", self.group, list(parts), invisible_ms, True)

    def dead_letter(self, topic: str, handle: str, attempts: int = 0, failure: str = "") -> bool:
        """Forward a received message to the group's dead letters, `%DLQ%group`, and acknowledge it. Durable on return.

        `attempts`: the number of failed deliveries, for the dead letter; 0: as the broker counts them. `failure`: why
        the message failed, as text. Returns False without storing a letter if the message was acknowledged, forwarded
        or delivered again: the call first moves the message to a new lease, which only one call can do.

        Raises InvalidArgumentError as `ack_handles` does, BodyUnreadableError if the message's record is damaged, and
        RaymqError if no letter could be stored in time. After an error the message is delivered again, as soon as
        possible. If the call that stores the letter timed out, that letter may have been stored all the same.
        """
        [(receipt, _)] = places = self._places(topic, [handle])
        given = self._change(_by_lease(places), DEAD_LETTER_LEASE_MS, True)[receipt]
        if given is None:
            return False
        claimed = receipt.moved(given)
        try:
            stored = self._taker.give_up_one(receipt.broker_name, given, attempts, failure)
        except BaseException:
            self._give_back(claimed)
            raise
        self._ack([(claimed, ALL_OFFSETS)])
        return stored

    def _give_back(self, receipt: Receipt) -> None:
        try:
            self._change([(receipt, ALL_OFFSETS)], 0, True)
        except RaymqError as error:
            logger.info("the message of receipt %r is delivered again after its lease: %s", receipt, error)

    def _places(self, topic: str, handles: Iterable[str]) -> list[tuple[Receipt, int]]:
        """Parse handles: each is a receipt and a queue offset. Raises InvalidArgumentError if a text is not a handle,
        or names a broker that does not have the topic."""
        places = [parse_handle(self.group, topic, handle) for handle in handles]
        named = {receipt.broker_name for receipt, _ in places}
        if named and not named <= self._having(topic):
            # The cached route may be older than the topic's newest broker.
            self._routes.invalidate(topic)
            unknown = sorted(named - self._having(topic))
            if unknown:
                raise InvalidArgumentError(
                    f"topic {topic!r} is not on broker {unknown[0]!r}, which a receipt handle names"
                )
        return places

    def _having(self, topic: str) -> set[str]:
        """Return the names of the brokers that have the topic, unreachable ones included."""
        route = self._routes.wait(topic, SETTLE_TIMEOUT_S)
        return {data.broker_name for data in route.queues} | {queue.broker_name for queue in route.all_queues}

    # Calls to brokers

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a broker, with retries while the broker restarts. The method must be safe to repeat."""
        return persist_until(
            time.monotonic() + SETTLE_TIMEOUT_S,
            lambda left_s: self._broker(name).call(method, *arguments, timeout_s=min(left_s, BROKER_ATTEMPT_TIMEOUT_S)),
        )

    def _broker(self, name: str) -> BrokerClient:
        with self._lock:
            client = self._brokers.get(name)
            if client is None:
                client = self._brokers[name] = BrokerClient(name)
            return client

    def close(self) -> None:
        """Close the connections to brokers, and report the reads. A receive that waits ends within a few seconds.
        Idempotent."""
        with self._lock:
            brokers = list(self._brokers.values())
        for broker in brokers:
            broker.drop_lanes()
        self.report_reads()


def _by_lease(places: Iterable[tuple[Receipt, int]]) -> list[tuple[Receipt, str]]:
    """Group messages by their leases. Returns each receipt with the offsets of its messages, encoded as a text."""
    offsets: dict[Receipt, int] = {}
    for receipt, offset in places:
        offsets[receipt] = offsets.get(receipt, 0) | 1 << offset - receipt.start
    return [(receipt, f"{bits:x}") for receipt, bits in offsets.items()]
