"""Tests of POP calls by receipt handle: a process settles messages that it never received, with nothing but the
texts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from actors.core.pop.leases import PopTable
from actors.core.pop.receive import decide_receive, lease_range
from actors.core.pop.settle import SettleDecision, decide_ack, decide_extend, decide_invisible
from raymq.client.consumer.simple import taken_messages
from raymq.client.consumer.simple.async_pop_calls import AsyncPopCalls
from raymq.client.consumer.simple.lease_reader import LeasedMessages, LeaseReader, UnreadableMessage
from raymq.client.consumer.simple.pop_calls import PopCalls
from raymq.client.consumer.simple.received_message import Receipt, parse_handle, received
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import (
    BodyUnreadableError,
    GroupNotExistError,
    InvalidArgumentError,
    ServiceNotAvailableError,
)
from raymq.common.message import MessageQueue
from raymq.common.protocol.pop import INVISIBLE_MAX_MS, LeasedRange, LeasePart, ReceiveAnswer, ReceiveRequest
from raymq.common.protocol.store import QueueEnds
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.messages import read_messages
from tests.support.clients.fakes import WAIT_S
from tests.unit.raymq.records.kernels.test_unreadable import stored

T = TypeVar("T")
GROUP, TOPIC, BROKER = "billing", "orders", "broker-a"
QUEUE = (TOPIC, 5)
ENDS = {QUEUE: QueueEnds(40, 50)}


class FakeBroker:
    """A broker group's leases, with the decisions of a real broker, and a record of its dead letters."""

    def __init__(self) -> None:
        self.table, self.now_ms = PopTable(), 1_700_000_000_000
        self.letters: list[dict[str, Any]] = []
        self.fails: Exception | None = None

    def ranges(self, count: int) -> tuple[LeasedRange, ...]:
        """Lease messages."""
        request = ReceiveRequest(GROUP, (TOPIC,), count, 60_000)
        grant = decide_receive(self.table, lambda *_: 40, [QUEUE], ENDS, request, self.now_ms)
        self.apply(grant.change)
        return tuple(grant.ranges)

    def lease(self, count: int) -> list[str]:
        """Lease messages, and return their handles."""
        return [
            Receipt(TOPIC, BROKER, one.queue_id, one.start, one.pop_ms, one.invisible_ms).handle(one.start + place)
            for one in self.ranges(count)
            for place in range(one.count)
        ]

    def apply(self, change: Any) -> None:
        if change is not None:
            self.table.apply(change)

    def call(self, name: str, method: str, *args: Any) -> Any:
        assert name == BROKER
        settle: Callable[..., Any] = getattr(self, method)
        return settle(*args)

    def ack_messages(self, group: str, parts: list[LeasePart]) -> int:
        settled = decide_ack(self.table, lambda *_: 40, group, parts)
        self.apply(settled.change)
        return settled.count

    def change_invisible(
        self, group: str, parts: list[LeasePart], invisible_ms: int, counted: bool
    ) -> list[LeasedRange | None]:
        self.now_ms += 1
        settled: SettleDecision = decide_invisible(
            self.table, lambda *_: 40, group, parts, invisible_ms, self.now_ms, counted=counted
        )
        self.apply(settled.change)
        return [None if lease is None else lease_range(*QUEUE, lease) for lease in settled.leases]

    def extend_invisible(self, group: str, parts: list[LeasePart], invisible_ms: int) -> list[bool]:
        settled = decide_extend(self.table, lambda *_: 40, group, parts, invisible_ms, self.now_ms)
        self.apply(settled.change)
        return [lease is not None for lease in settled.leases]

    def send_back(self, method: str, group: str, record: bytes, **how: Any) -> None:
        assert (method, group) == ("send_back", GROUP)
        if self.fails is not None:
            raise self.fails
        self.letters.append({"record": record, **how})

    def visible_now(self) -> int:
        queue = self.table.get(GROUP, *QUEUE)
        return 0 if queue is None else queue.due(self.now_ms)


class FakeRoutes:
    """Routes that know one broker; a newer route also has the brokers in `new`."""

    def __init__(self, *new: str) -> None:
        self.brokers, self.new = [BROKER], list(new)

    def cached(self, topic: str) -> Any:
        return None

    def wait(self, topic: str, timeout_s: float) -> Any:
        queues = [MessageQueue(topic, name, 0) for name in self.brokers]
        return SimpleNamespace(queues=queues, all_queues=queues, subscribe_queues=queues)

    def invalidate(self, topic: str) -> None:
        self.brokers += self.new


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    broker = FakeBroker()
    monkeypatch.setattr(PopCalls, "_call", lambda _, name, method, *args: broker.call(name, method, *args))
    monkeypatch.setattr(taken_messages, "ActorRef", lambda name: SimpleNamespace(call=broker.send_back))
    monkeypatch.setattr(LeaseReader, "read", lambda _, name, given, wanted, max_bytes: read(given))
    return broker


def read(given: LeasedRange) -> LeasedMessages:
    """Return the one message of a lease. The message at offset 48 has a damaged record; retention deleted offset 49."""
    located = stored([b"body of %d" % given.start], {})
    [message] = read_messages(
        located.data,
        located.starts,
        broker_name=BROKER,
        places=RecordPlaces.of(MessageQueue(TOPIC, BROKER, 5), located),
    )
    if given.start == 48:
        error = BodyUnreadableError("orders@broker-a:5", 48, -1, "the checksum differs", record_damaged=True)
        return LeasedMessages(end=49, unreadable={48: UnreadableMessage(message, error, b"")})
    if given.start == 49:
        return LeasedMessages(end=50)
    return LeasedMessages([message], [(located, [0])], given.start + 1, 44)


class FakeClient:
    """The client of the fake broker in an event loop. `now`: an event after which the broker answers a receive."""

    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker
        self.now = asyncio.Event()
        self.now.set()
        self.leave: asyncio.Future[None] | None = None
        """Done when nobody waits for the answer to the last receive any more."""
        self.calls: list[str] = []
        self.answers: list[Any] = []
        """The answers to receives; an exception is raised."""

    async def call(self, method: str, *args: Any, timeout_s: float, leave: asyncio.Future[None] | None = None) -> Any:
        self.calls.append(method)
        if method == "start_receiving":
            return None
        if method != "receive_messages":
            return self._broker.call(BROKER, method, *args)
        assert leave is not None
        self.leave = leave
        await self.now.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def async_calls(client: FakeClient, threads: Executor) -> AsyncPopCalls:
    places: Any = {"routes": FakeRoutes(), "storages": None, "broker": lambda name: client}
    return AsyncPopCalls(GROUP, threads=threads, **places)


def run_async(broker: FakeBroker, call: Callable[[AsyncPopCalls, FakeClient], Awaitable[T]]) -> T:
    """Await a call of a process that has received nothing. Fails if asyncio logged an error that nobody read."""
    unread: list[Any] = []

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))
        client = FakeClient(broker)
        with ThreadPoolExecutor(2, "reads") as threads:
            return await call(async_calls(client, threads), client)

    result = asyncio.run(main())
    assert unread == []
    return result


def dead_letter(broker: FakeBroker, handle: str, attempts: int = 0, failure: str = "") -> bool:
    return run_async(broker, lambda pop, _: pop.dead_letter(TOPIC, handle, attempts, failure))


def calls(routes: FakeRoutes | None = None) -> PopCalls:
    """Return POP calls of a process that has received nothing."""
    return PopCalls(GROUP, routes=routes or FakeRoutes(), storages=None)  # type: ignore[arg-type]  # fakes


def test_handles_that_another_process_received_are_acknowledged_once(broker: FakeBroker) -> None:
    handles = broker.lease(4)
    assert calls().ack_handles(TOPIC, [handles[0], handles[2], handles[2]]) == 2
    assert calls().ack_handles(TOPIC, handles) == 2
    assert calls().ack_handles(TOPIC, handles) == 0
    assert broker.table.get(GROUP, *QUEUE) is None


def test_a_changed_handle_replaces_the_old_one_and_each_caller_gets_its_own(broker: FakeBroker) -> None:
    handles = broker.lease(3)
    assert calls().ack_handles(TOPIC, handles[1:2]) == 1
    first, second, third, again = calls().change_invisible_handles(TOPIC, [*handles, handles[0]], 5_000)
    assert second is None, "it is acknowledged"
    assert first is not None
    assert third is not None
    assert first == again
    assert (first.split(" ")[-1], third.split(" ")[-1]) == ("40", "42")
    assert calls().change_invisible_handles(TOPIC, handles, 5_000) == [None, None, None]
    assert calls().ack_handles(TOPIC, handles) == 0, "the old receipts ended"
    assert calls().ack_handles(TOPIC, [first, third]) == 2


@pytest.mark.parametrize(
    ("attempts", "intervals_s", "expected_ms"),
    [
        *((1, (1.5, 30, 86_400), 1500), (2, (1.5, 30, 86_400), 30_000), (9, (1.5, 30), 30_000)),
        *((3, (1.5, 30, 86_400), INVISIBLE_MAX_MS), (1, (), 10_000), (16, (), 7_200_000)),
    ],
)
def test_a_message_without_a_time_waits_for_the_interval_of_its_attempt(
    broker: FakeBroker, attempts: int, intervals_s: tuple[float, ...], expected_ms: int
) -> None:
    [handle, _] = broker.lease(2)
    leased, _ = parse_handle(GROUP, TOPIC, handle)
    located = stored([b"one", b"two"], {})
    places = RecordPlaces.of(MessageQueue(TOPIC, BROKER, 5), located)
    messages = read_messages(located.data, located.starts, broker_name=BROKER, places=places)
    receipt = replace(leased, attempts=attempts, retry_intervals_s=intervals_s)
    changed = calls().change_invisible(received(messages, receipt), None)
    assert [message._receipt.invisible_ms for message in changed] == [expected_ms] * 2
    assert {message._receipt.retry_intervals_s for message in changed} == {intervals_s}


def test_an_extension_says_which_messages_are_still_leased_and_keeps_their_handles(broker: FakeBroker) -> None:
    handles = broker.lease(3)
    assert calls().ack_handles(TOPIC, handles[1:2]) == 1
    broker.now_ms += 50_000
    assert calls().extend_invisible_handles(TOPIC, handles, 60_000) == [True, False, True]
    broker.now_ms += 59_999
    assert broker.visible_now() == 0
    assert calls().ack_handles(TOPIC, handles) == 2
    assert calls().extend_invisible_handles(TOPIC, handles, 60_000) == [False, False, False]


def test_returned_parts_are_visible_again_and_acknowledged_messages_stay_so(broker: FakeBroker) -> None:
    handles, pop = broker.lease(3), calls()
    receipt, _ = parse_handle(GROUP, TOPIC, handles[0])
    pop.ack_handles(TOPIC, handles[1:2])
    run_async(broker, lambda other, _: other.return_parts(BROKER, [receipt.part("7")], 1_000))
    assert broker.visible_now() == 0
    broker.now_ms += 1_000
    assert broker.visible_now() == 2
    # the client's own handles have ended
    assert pop.ack_handles(TOPIC, handles) == 0


def test_a_handle_of_a_broker_without_the_topic_is_refused(broker: FakeBroker) -> None:
    [handle] = broker.lease(1)
    other = handle.replace(BROKER, "broker-b")
    with pytest.raises(InvalidArgumentError, match="not on broker 'broker-b'"):
        calls().ack_handles(TOPIC, [handle, other])
    with pytest.raises(InvalidArgumentError, match="not on broker 'broker-b'"):
        calls().change_invisible_handles(TOPIC, [other], 1_000)
    with pytest.raises(AssertionError):
        calls(FakeRoutes("broker-b")).ack_handles(TOPIC, [other])  # the newer route has the broker, so it is called


def test_a_message_is_forwarded_to_the_dead_letters_once(broker: FakeBroker) -> None:
    first, second = broker.lease(2)
    assert dead_letter(broker, first, 7, "the listener failed") is True
    assert dead_letter(broker, first, 7, "the listener failed") is False
    [letter] = broker.letters
    assert b"body of 40" in letter["record"]
    assert (letter["attempts"], letter["failure"], letter["delay_level"]) == (7, "the listener failed", -1)
    assert calls().ack_handles(TOPIC, [first]) == 0
    assert dead_letter(broker, second) is True
    assert broker.letters[1]["failure"] == "not acknowledged in 1 attempts"
    assert broker.table.get(GROUP, *QUEUE) is None


def test_a_thread_forwards_a_message_to_the_dead_letters_once_too(broker: FakeBroker) -> None:
    [handle] = broker.lease(1)
    assert calls().dead_letter("orders", handle, 5, "no money")
    assert not calls().dead_letter("orders", handle, 5, "no money")
    [letter] = broker.letters
    assert (letter["attempts"], letter["failure"]) == (5, "no money")


def test_an_acknowledged_message_is_not_forwarded(broker: FakeBroker) -> None:
    [handle] = broker.lease(1)
    assert calls().ack_handles(TOPIC, [handle]) == 1
    assert dead_letter(broker, handle, 3) is False
    assert broker.letters == []


def test_a_message_that_cannot_be_forwarded_is_delivered_again(broker: FakeBroker) -> None:
    [handle] = broker.lease(1)
    broker.fails = ServiceNotAvailableError("the store does not answer")
    with pytest.raises(ServiceNotAvailableError):
        dead_letter(broker, handle, 3)
    assert broker.visible_now() == 1
    assert dead_letter(broker, handle, 3) is False, "its lease has ended"


def test_a_damaged_message_is_left_and_a_deleted_one_is_acknowledged(broker: FakeBroker) -> None:
    handles = broker.lease(10)
    with pytest.raises(BodyUnreadableError):
        dead_letter(broker, handles[8], 3)
    assert broker.visible_now() == 1, "a replica may mend it"
    assert dead_letter(broker, handles[9], 3) is False
    assert broker.letters == []
    assert calls().ack_handles(TOPIC, handles) == 8


def receive(pop: AsyncPopCalls) -> Awaitable[list[Any]]:
    return pop.receive(BROKER, {TOPIC: Subscription.parse(TOPIC)}, 1, 60_000, 20.0)


def test_a_receive_in_an_event_loop_reads_in_a_thread_and_registers_its_start_again(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []

    def read_here(given: LeasedRange) -> LeasedMessages:
        readers.append(threading.current_thread().name)
        return read(given)

    monkeypatch.setattr(LeaseReader, "read", lambda _, name, given, wanted, max_bytes: read_here(given))

    async def scenario(pop: AsyncPopCalls, client: FakeClient) -> None:
        client.answers = [GroupNotExistError(GROUP), ReceiveAnswer(broker.ranges(1), 16), ReceiveAnswer((), 16)]
        [message] = await receive(pop)
        assert message.body == b"body of 40"
        assert client.calls == ["start_receiving", "receive_messages"] * 2
        assert readers[0].startswith("reads")
        assert await receive(pop) == []
        assert len(readers) == 1, "an empty answer needs no thread"
        assert await pop.ack_places(await pop.places(TOPIC, [message.handle])) == 1

    run_async(broker, scenario)
    assert broker.table.get(GROUP, *QUEUE) is None


@pytest.mark.parametrize("answers", [True, False])
def test_a_cancelled_receive_gives_its_messages_back_without_counting_the_attempt(
    broker: FakeBroker, answers: bool
) -> None:
    async def scenario(pop: AsyncPopCalls, client: FakeClient) -> None:
        client.now.clear()
        client.answers = [ReceiveAnswer(broker.ranges(1), 16) if answers else ServiceNotAvailableError("away")]
        waiting = asyncio.ensure_future(receive(pop))
        while "receive_messages" not in client.calls:
            await asyncio.sleep(0)
        assert client.leave is not None
        assert not client.leave.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert client.leave.done(), "the broker is asked to answer at once"
        assert broker.visible_now() == 0
        client.now.set()
        async with asyncio.timeout(WAIT_S):
            await pop.finish()
        assert broker.visible_now() == answers

    run_async(broker, scenario)
    if answers:
        assert broker.visible_now() == 1
        [again] = broker.ranges(1)
        assert again.attempts == 1


def test_a_dead_letter_is_stored_although_its_caller_was_cancelled(broker: FakeBroker) -> None:
    [handle] = broker.lease(1)

    async def scenario(pop: AsyncPopCalls, client: FakeClient) -> None:
        storing = asyncio.ensure_future(pop.dead_letter(TOPIC, handle, 3))
        await asyncio.sleep(0)
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        async with asyncio.timeout(WAIT_S):
            await pop.finish()

    run_async(broker, scenario)
    assert len(broker.letters) == 1
    assert broker.table.get(GROUP, *QUEUE) is None
