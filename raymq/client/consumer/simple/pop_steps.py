"""PopSteps decides the steps of each POP call of one consumer group, for the blocking and the asyncio variant. It makes
no call itself.

Each method is a generator: it yields the calls to make, one after the other, gets their results, and returns the result
of the whole. raymq.client.consumer.simple.pop_calls makes the calls in the caller's thread;
raymq.client.consumer.simple.async_pop_calls makes them in an event loop.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any, Final, NamedTuple, TypeVar

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
from raymq.common.protocol.group import StartOffsetQuery, retry_interval_s
from raymq.common.protocol.pop import (
    ALL_OFFSETS,
    INVISIBLE_MAX_MS,
    LeasedRange,
    LeasePart,
    ReceiveAnswer,
    ReceiveRequest,
)
from raymq.remoting.route_cache import RouteCache

SETTLE_TIMEOUT_S: Final = 20.0
"""Timeout in s of a repeatable call to a broker, including retries while the broker restarts."""
BROKER_ATTEMPT_TIMEOUT_S: Final = 10.0
DEAD_LETTER_LEASE_MS: Final = 60_000
"""Invisible time in ms of a message while it is stored as a dead letter. If the process dies before the letter is
stored, the message is delivered again after this time."""

logger = logging.getLogger(__name__)


class BrokerCall(NamedTuple):
    """A call of a broker's method. `once_s`: the timeout in seconds of a call that is not repeated. None: the call is
    safe to repeat, and is repeated while the broker restarts, for up to SETTLE_TIMEOUT_S."""

    broker_name: str
    method: str
    arguments: tuple[Any, ...]
    once_s: float | None = None


class BlockingCall(NamedTuple):
    """A call that may block, for example to read messages."""

    run: Callable[[], Any]


T = TypeVar("T")
Steps = Generator[BrokerCall | BlockingCall, Any, T]
"""The steps of a call with a result of type T."""
Place = tuple[Receipt, int]
"""One leased message: its receipt and its queue offset."""


class PopSteps:
    """The POP calls of one consumer group, as steps. Thread-safe. PopCalls and AsyncPopCalls have methods of the same
    names, with the same arguments, results and errors. `taker`: reads leased messages; its calls block."""

    def __init__(self, group: str, routes: RouteCache, taker: MessageTaker, start: StartOffsetQuery) -> None:
        self.group = group
        self._routes, self._taker, self._start_query = routes, taker, start
        self._lock = threading.Lock()
        self._started: set[tuple[str, str]] = set()
        """The brokers at which the group's start position is registered, as pairs of broker and topic."""
        self._id = secrets.token_hex(4)
        self._attempts = count()

    # Steps that receive messages

    def receive(
        self,
        broker_name: str,
        subscriptions: Mapping[str, Subscription],
        max_messages: int,
        invisible_ms: int,
        wait_s: float,
        ordered: bool | None,
        attempt_id: str,
    ) -> Steps[list[ReceivedMessage]]:
        places = (broker_name, subscriptions, max_messages, invisible_ms, wait_s, ordered, attempt_id)
        answer = yield from self.lease(*places)
        if not answer.ranges:
            return []
        messages: list[ReceivedMessage] = yield BlockingCall(
            partial(self._taker.take, broker_name, answer, subscriptions)
        )
        return messages

    def lease(
        self,
        broker_name: str,
        topics: Iterable[str],
        max_messages: int,
        invisible_ms: int,
        wait_s: float,
        ordered: bool | None,
        attempt_id: str,
    ) -> Steps[ReceiveAnswer]:
        request = yield from self.begin(broker_name, topics, max_messages, invisible_ms, wait_s, ordered, attempt_id)
        call = BrokerCall(broker_name, "receive_messages", (request,), wait_s + BROKER_ATTEMPT_TIMEOUT_S)
        answer: ReceiveAnswer
        try:
            answer = yield call
        # The group was deleted, and with it the start position that it had registered at the broker. Register the start
        # position again.
        except GroupNotExistError:
            self.forget_start(broker_name)
            yield from self._start(broker_name, request.topics)
            answer = yield call
        return answer

    def begin(
        self,
        broker_name: str,
        topics: Iterable[str],
        max_messages: int,
        invisible_ms: int,
        wait_s: float,
        ordered: bool | None,
        attempt_id: str = "",
    ) -> Steps[ReceiveRequest]:
        """Register the group's start position at a broker, and return the request of a receive there."""
        request = ReceiveRequest(
            *(self.group, tuple(sorted(topics)), max_messages, invisible_ms, wait_s, ordered),
            attempt_id or f"{self._id}-{next(self._attempts)}",
        )
        yield from self._start(broker_name, request.topics)
        return request

    def forget_start(self, name: str) -> None:
        """Note that the group was deleted at a broker: the next receive registers the start position there again."""
        with self._lock:
            self._started = {known for known in self._started if known[0] != name}

    def _start(self, name: str, topics: Sequence[str]) -> Steps[None]:
        """Register at a broker the position at which the group starts to receive messages of these topics. Does nothing
        for topics whose start position was already registered there."""
        with self._lock:
            new = [topic for topic in topics if (name, topic) not in self._started]
        if new:
            arguments = (self.group, new, self._start_query)
            yield BrokerCall(name, "start_receiving", arguments, BROKER_ATTEMPT_TIMEOUT_S)
            with self._lock:
                self._started.update((name, topic) for topic in new)

    # Steps that acknowledge messages

    def ack(self, messages: Iterable[ReceivedMessage]) -> Steps[int]:
        return self._ack(parts_of(messages))

    def ack_handles(self, topic: str, handles: Iterable[str]) -> Steps[int]:
        return (yield from self.ack_places((yield from self.places(topic, handles))))

    def ack_places(self, places: Iterable[Place]) -> Steps[int]:
        return self._ack(_by_lease(places))

    def _ack(self, parts: Iterable[tuple[Receipt, str]]) -> Steps[int]:
        by_broker: dict[str, list[LeasePart]] = {}
        for receipt, offsets in parts:
            by_broker.setdefault(receipt.broker_name, []).append(receipt.part(offsets))
        acknowledged = 0
        for name, own in by_broker.items():
            acknowledged += yield BrokerCall(name, "ack_messages", (self.group, own))
        return acknowledged

    # Steps that change the invisible time

    def change_invisible(
        self, messages: Iterable[ReceivedMessage], invisible_ms: int | None, counted: bool
    ) -> Steps[list[ReceivedMessage]]:
        if invisible_ms is not None:
            return (yield from self._change_messages(messages, invisible_ms, counted))
        by_interval: dict[int, list[ReceivedMessage]] = {}
        for message in messages:
            interval_s = retry_interval_s(require_received(message)._receipt.retry_intervals_s, message.attempt)
            by_interval.setdefault(min(round(interval_s * 1000), INVISIBLE_MAX_MS), []).append(message)
        changed = []
        for interval_ms, own in by_interval.items():
            changed.append((yield from self._change_messages(own, interval_ms, counted)))
        return list(chain.from_iterable(changed))

    def _change_messages(
        self, messages: Iterable[ReceivedMessage], invisible_ms: int, counted: bool
    ) -> Steps[list[ReceivedMessage]]:
        groups: dict[Receipt, list[ReceivedMessage]] = {}
        for message in messages:
            groups.setdefault(require_received(message)._receipt, []).append(message)
        parts = [(receipt, offsets_text(receipt, own)) for receipt, own in groups.items()]
        leases = yield from self._change(parts, invisible_ms, counted)
        renewed: list[ReceivedMessage] = []
        for receipt, own in groups.items():
            new = leases[receipt]
            if new is not None:
                held = [message for message in own if holds(new, message.queue_offset)]
                renewed += received(held, receipt.moved(new))
        return renewed

    def change_invisible_handles(
        self, topic: str, handles: Iterable[str], invisible_ms: int, counted: bool
    ) -> Steps[list[str | None]]:
        places = yield from self.places(topic, handles)
        leases = yield from self._change(_by_lease(places), invisible_ms, counted)
        renewed: list[str | None] = []
        for receipt, offset in places:
            new = leases[receipt]
            held = new is not None and holds(new, offset)
            renewed.append(receipt.moved(new).handle(offset) if new is not None and held else None)
        return renewed

    def _change(
        self, parts: Iterable[tuple[Receipt, str]], invisible_ms: int, counted: bool
    ) -> Steps[dict[Receipt, LeasedRange | None]]:
        """Change the invisible time of parts of leases. Returns the new lease for each receipt; None for a receipt
        whose lease has ended."""
        by_broker: dict[str, list[tuple[Receipt, LeasePart]]] = {}
        for receipt, offsets in parts:
            by_broker.setdefault(receipt.broker_name, []).append((receipt, receipt.part(offsets)))
        leases: dict[Receipt, LeasedRange | None] = {}
        for name, own in by_broker.items():
            arguments = (self.group, [part for _, part in own], invisible_ms, counted)
            ranges = yield BrokerCall(name, "change_invisible", arguments)
            leases.update(zip([receipt for receipt, _ in own], ranges, strict=True))
        return leases

    def return_parts(self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int) -> Steps[None]:
        yield BrokerCall(broker_name, "change_invisible", (self.group, list(parts), invisible_ms, True))

    # Steps that extend leases

    def extend_invisible(self, messages: Iterable[ReceivedMessage], invisible_ms: int) -> Steps[list[bool]]:
        places = [(require_received(message)._receipt, message.queue_offset) for message in messages]
        return self._extend(places, invisible_ms)

    def extend_invisible_handles(self, topic: str, handles: Iterable[str], invisible_ms: int) -> Steps[list[bool]]:
        return (yield from self._extend((yield from self.places(topic, handles)), invisible_ms))

    def _extend(self, places: Sequence[Place], invisible_ms: int) -> Steps[list[bool]]:
        by_broker: dict[str, list[int]] = {}
        for index, (receipt, _) in enumerate(places):
            by_broker.setdefault(receipt.broker_name, []).append(index)
        extended = [False] * len(places)
        for name, indices in by_broker.items():
            own = [places[index] for index in indices]
            parts = [receipt.part(f"{1 << offset - receipt.start:x}") for receipt, offset in own]
            results = yield BrokerCall(name, "extend_invisible", (self.group, parts, invisible_ms))
            for index, result in zip(indices, results, strict=True):
                extended[index] = result
        return extended

    def extend_once(
        self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int, timeout_s: float
    ) -> Steps[list[bool]]:
        arguments = (self.group, list(parts), invisible_ms)
        results: list[bool] = yield BrokerCall(broker_name, "extend_invisible", arguments, timeout_s)
        return results

    # Steps that store a dead letter

    def dead_letter(self, topic: str, handle: str, attempts: int, failure: str) -> Steps[bool]:
        [(receipt, _)] = places = yield from self.places(topic, [handle])
        given = (yield from self._change(_by_lease(places), DEAD_LETTER_LEASE_MS, True))[receipt]
        if given is None:
            return False
        claimed = receipt.moved(given)
        try:
            stored: bool = yield BlockingCall(
                partial(self._taker.give_up_one, receipt.broker_name, given, attempts, failure)
            )
        except GeneratorExit:
            raise  # nobody makes a further call
        except BaseException:
            yield from self._give_back(claimed)
            raise
        yield from self._ack([(claimed, ALL_OFFSETS)])
        return stored

    def _give_back(self, receipt: Receipt) -> Steps[None]:
        try:
            yield from self._change([(receipt, ALL_OFFSETS)], 0, True)
        except RaymqError as error:
            logger.info("the message of receipt %r is delivered again after its lease: %s", receipt, error)

    # Steps that parse handles

    def places(self, topic: str, handles: Iterable[str]) -> Steps[list[Place]]:
        """Parse handles: each is a receipt and a queue offset. Raises InvalidArgumentError if a text is not a handle,
        or names a broker that does not have the topic."""
        places = [parse_handle(self.group, topic, handle) for handle in handles]
        named = {receipt.broker_name for receipt, _ in places}
        if named and not named <= (yield from self._having(topic)):
            # The cached route may be older than the topic's newest broker.
            self._routes.invalidate(topic)
            unknown = sorted(named - (yield from self._having(topic)))
            if unknown:
                raise InvalidArgumentError(
                    f"topic {topic!r} is not on broker {unknown[0]!r}, which a receipt handle names"
                )
        return places

    def _having(self, topic: str) -> Steps[set[str]]:
        """Return the names of the brokers that have the topic, unreachable ones included."""
        route = self._routes.cached(topic)
        if route is None:
            route = yield BlockingCall(partial(self._routes.wait, topic, SETTLE_TIMEOUT_S))
        return {data.broker_name for data in route.queues} | {queue.broker_name for queue in route.all_queues}


def _by_lease(places: Iterable[Place]) -> list[tuple[Receipt, str]]:
    """Group messages by their leases. Returns each receipt with the offsets of its messages, encoded as a text."""
    offsets: dict[Receipt, int] = {}
    for receipt, offset in places:
        offsets[receipt] = offsets.get(receipt, 0) | 1 << offset - receipt.start
    return [(receipt, f"{bits:x}") for receipt, bits in offsets.items()]
