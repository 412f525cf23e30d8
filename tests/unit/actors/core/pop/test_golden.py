"""Tests of RocketMQ's golden facts about POP receives (spec/features.md §12.5), or of raymq's replacement for a fact
(docs/simple-consumer.md)."""

from __future__ import annotations

import pytest

from actors.core.broker.state import BrokerState
from actors.core.pop.leases import Lease
from actors.core.pop.receive import LeaseGrant, available, check_receive, decide_receive, next_due_ms
from actors.core.pop.settle import SettleDecision, decide_ack, decide_extend, decide_invisible
from actors.core.pop.waiting import FULL_PAUSE_S, WAITING_OF_KEY_MAX, WaitingReceive, WaitingReceives
from raymq.common.errors import InvalidArgumentError, SystemBusyError
from raymq.common.protocol.pop import LeasedRange, LeasePart, ReceiveRequest
from raymq.common.protocol.store import QueueEnds

NOW_MS = 1_700_000_000_000
QUEUE = ("orders", 0)


class Queue:
    """One queue with 100 messages, from which a consumer group receives."""

    def __init__(self, ordered: bool = False) -> None:
        self.state = BrokerState()
        self.ordered = ordered
        self.ends = {QUEUE: QueueEnds(0, 100)}
        for change in (*self.state.decide_group("g"), self.state.decide_topic("orders", 1, 1)):
            assert change is not None
            self.state.apply(change, NOW_MS)

    def committed(self, topic: str, queue_id: int) -> int:
        return self.state.committed("g", topic, queue_id)

    def request(self, most: int, invisible_ms: int = 60_000, attempt_id: str = "") -> ReceiveRequest:
        return ReceiveRequest("g", ("orders",), most, invisible_ms, ordered=self.ordered, attempt_id=attempt_id)

    def receive(self, most: int, now_ms: int = NOW_MS, invisible_ms: int = 60_000, attempt_id: str = "") -> LeaseGrant:
        request = self.request(most, invisible_ms, attempt_id)
        handout = decide_receive(self.state.pop, self.committed, [QUEUE], self.ends, request, now_ms)
        if handout.change is not None:
            self.state.apply(handout.change, now_ms)
        return handout

    def ack(self, given: LeasedRange, *offsets: int) -> SettleDecision:
        settled = decide_ack(self.state.pop, self.committed, "g", [part(given, *offsets)])
        if settled.change is not None:
            self.state.apply(settled.change, NOW_MS)
        return settled

    def change(self, given: LeasedRange, *offsets: int, ms: int, now_ms: int = NOW_MS) -> Lease | None:
        settled = decide_invisible(self.state.pop, self.committed, "g", [part(given, *offsets)], ms, now_ms)
        if settled.change is not None:
            self.state.apply(settled.change, now_ms)
        return settled.leases[0]

    def extend(self, given: LeasedRange, *offsets: int, ms: int, now_ms: int = NOW_MS) -> SettleDecision:
        settled = decide_extend(self.state.pop, self.committed, "g", [part(given, *offsets)], ms, now_ms)
        if settled.change is not None:
            self.state.apply(settled.change, now_ms)
        return settled


def part(given: LeasedRange, *offsets: int) -> LeasePart:
    bits = sum(1 << offset - given.start for offset in offsets)
    return LeasePart(given.topic, given.queue_id, given.start, given.pop_ms, f"{bits:x}" if offsets else "")


@pytest.mark.parametrize("most", [pytest.param(33, id="golden-109"), pytest.param(4096, id="golden-109-most")])
def test_a_receive_may_want_more_than_32_messages(most: int) -> None:
    check_receive(Queue().request(most))


@pytest.mark.parametrize("most", [pytest.param(0, id="none"), pytest.param(4097, id="golden-109-too-many")])
def test_a_receive_for_too_many_messages_is_refused(most: int) -> None:
    with pytest.raises(InvalidArgumentError, match="4096") as refused:
        check_receive(Queue().request(most))
    assert refused.value.code == 29


@pytest.mark.parametrize("invisible_ms", [99, 12 * 3600 * 1000 + 1])
def test_an_invisible_time_out_of_bounds_is_refused(invisible_ms: int) -> None:
    with pytest.raises(InvalidArgumentError, match="43200"):
        check_receive(Queue().request(1, invisible_ms))


@pytest.mark.parametrize("offset", [pytest.param(100, id="golden-110")])
def test_an_offset_outside_its_lease_is_neither_acknowledged_nor_changed(offset: int) -> None:
    queue = Queue()
    [given] = queue.receive(100).ranges
    with pytest.raises(InvalidArgumentError, match="has 100 messages"):
        queue.ack(given, offset)
    with pytest.raises(InvalidArgumentError, match="has 100 messages"):
        queue.change(given, offset, ms=1000)


@pytest.mark.parametrize(
    ("offset", "place"),
    [pytest.param(102, 1, id="golden-111"), pytest.param(101, -1, id="golden-111-none")],
)
def test_a_lease_with_gaps_lists_its_offsets(offset: int, place: int) -> None:
    """A raymq lease stores which offsets of its range it does not contain. RocketMQ instead stores the differences of
    the contained offsets (0, 2, 5)."""
    queue = Queue()
    queue.ends = {QUEUE: QueueEnds(100, 106)}
    [first] = queue.receive(6).ranges
    queue.ack(first, 101, 103, 104)
    [again] = queue.receive(6, NOW_MS + 60_000).ranges
    held = [again.start + bit for bit in range(again.count) if not int(again.without, 16) >> bit & 1]
    assert held == [100, 102, 105]
    assert (held.index(offset) if offset in held else -1) == place
    assert queue.ack(again, offset).count == (place >= 0)


@pytest.mark.parametrize(("offset", "counts"), [pytest.param(102, 1, id="golden-112")])
def test_a_lease_of_a_whole_range_derives_its_offsets_from_its_size(offset: int, counts: int) -> None:
    queue = Queue()
    queue.ends = {QUEUE: QueueEnds(100, 103)}
    [given] = queue.receive(3).ranges
    assert queue.ack(given, offset).count == counts
    with pytest.raises(InvalidArgumentError):
        queue.ack(given, 103)


@pytest.mark.parametrize("wait_ms", [pytest.param(10_000, id="golden-113")])
def test_messages_are_redelivered_when_their_invisible_time_ends(wait_ms: int) -> None:
    """A message is delivered again exactly at the end of its invisible time. RocketMQ checks leases 1 s before that
    end, and then waits for its revive queue."""
    queue = Queue()
    [given] = queue.receive(1, invisible_ms=wait_ms).ranges
    assert next_due_ms(queue.state.pop, "g", [QUEUE], NOW_MS) == NOW_MS + wait_ms
    before = queue.receive(100, NOW_MS + wait_ms - 1)
    assert [one.start for one in before.ranges] == [1]
    [again] = queue.receive(1, NOW_MS + wait_ms).ranges
    assert (again.start, again.count, again.attempts) == (given.start, 1, 2)


@pytest.mark.parametrize("attempts", [pytest.param(17, id="golden-114")])
def test_attempts_continue_to_count_when_the_lease_changes(attempts: int) -> None:
    queue = Queue()
    [given] = queue.receive(1).ranges
    assert given.attempts == 1
    for number in range(2, attempts + 1):
        assert queue.change(given, ms=0, now_ms=NOW_MS + number) is not None
        [given] = queue.receive(1, NOW_MS + number).ranges
        assert (given.start, given.attempts) == (0, number)


@pytest.mark.parametrize("already", [pytest.param(WAITING_OF_KEY_MAX, id="golden-115-full")])
def test_a_waiter_beyond_the_limit_must_retry_later(already: int) -> None:
    waiting = WaitingReceives()

    def receive() -> WaitingReceive:
        return WaitingReceive(Queue().request(1), 0.0, lambda answer: None, lambda error: None)

    for _ in range(already):
        waiting.add(receive())
    with pytest.raises(SystemBusyError) as refused:
        waiting.add(receive())
    assert refused.value.retry_after_s == FULL_PAUSE_S
    assert len(waiting) == already
    waiting.take(waiting.firsts()[0])
    waiting.add(receive())


@pytest.mark.parametrize("acked", [pytest.param((0, 2), id="golden-116")])
def test_only_unacknowledged_messages_are_redelivered(acked: tuple[int, ...]) -> None:
    queue = Queue()
    queue.ends = {QUEUE: QueueEnds(0, 3)}
    [given] = queue.receive(3).ranges
    assert queue.ack(given, *acked).count == 2
    assert queue.committed(*QUEUE) == 1
    [again] = queue.receive(3, NOW_MS + 60_000).ranges
    assert (again.start, again.count, again.attempts, again.without) == (1, 1, 2, "0")
    assert queue.ack(given).count == 0, "the old receipt has ended"
    assert queue.ack(again).count == 1
    assert queue.committed(*QUEUE) == 3
    assert queue.state.pop.tables == {}, "nothing is kept of what is settled"


@pytest.mark.parametrize("ordered", [pytest.param(True, id="golden-117"), False])
def test_a_request_that_is_repeated_under_its_attempt_id_gets_the_same_leases(ordered: bool) -> None:
    queue = Queue(ordered)
    [first] = queue.receive(3, attempt_id="a").ranges
    again = queue.receive(3, NOW_MS + 5, attempt_id="a")
    assert again.ranges == (first,)
    assert again.change is None
    other = queue.receive(3, NOW_MS + 5, attempt_id="b").ranges
    assert [one.start for one in other] == ([] if ordered else [3])


def test_in_order_mode_messages_that_were_changed_one_by_one_come_in_order() -> None:
    queue = Queue(ordered=True)
    [given] = queue.receive(10).ranges
    queue.change(given, 5, ms=0)
    assert queue.receive(10).ranges == ()
    assert available(queue.state.pop, queue.committed, [QUEUE], queue.ends, queue.request(1), NOW_MS) == 0
    later = queue.receive(8, NOW_MS + 60_000).ranges
    offsets = sorted(
        one.start + bit for one in later for bit in range(one.count) if not int(one.without, 16) >> bit & 1
    )
    assert offsets == list(range(8))


def test_a_reset_restarts_at_its_offset_and_ends_all_receipts() -> None:
    queue = Queue()
    [given] = queue.receive(10).ranges
    change = queue.state.decide_reset("g", "orders", {0: 4})
    assert change is not None
    queue.state.apply(change, NOW_MS)
    assert queue.ack(given).count == 0
    [anew] = queue.receive(3).ranges
    assert (anew.start, anew.attempts) == (4, 1)


def test_messages_that_retention_took_are_counted_and_passed() -> None:
    queue = Queue()
    queue.receive(10)
    queue.ends = {QUEUE: QueueEnds(7, 100)}
    handout = queue.receive(5, NOW_MS + 60_000)
    assert handout.gone == 7
    assert [(one.start, one.count, one.attempts) for one in handout.ranges] == [(7, 3, 2), (10, 2, 1)]


def test_an_extended_lease_keeps_its_receipt_and_ends_later() -> None:
    queue = Queue()
    [given] = queue.receive(10).ranges
    queue.ack(given, 0, 1)
    settled = queue.extend(given, 5, ms=60_000, now_ms=NOW_MS + 40_000)
    [lease] = settled.leases
    assert lease is not None
    assert (lease.key, lease.visible_ms, lease.attempts) == ((0, NOW_MS), NOW_MS + 100_000, 1)
    again = queue.receive(4, NOW_MS + 99_999).ranges
    assert [one.start for one in again] == [10], "the whole lease is extended"
    assert queue.ack(given, 2, 5).count == 2, "the receipt is valid"
    [again_] = queue.receive(20, NOW_MS + 100_000).ranges[:1]
    assert (again_.start, again_.attempts) == (3, 2)
    assert queue.extend(given, 3, ms=60_000, now_ms=NOW_MS + 100_001).leases == [None]
    assert queue.ack(given, 3).count == 0


def test_an_extension_never_shortens_and_changes_nothing_that_ended() -> None:
    queue = Queue()
    [given] = queue.receive(10).ranges
    shorter = queue.extend(given, ms=1_000, now_ms=NOW_MS + 5_000)
    assert shorter.change is None, "no record"
    assert [lease is not None for lease in shorter.leases] == [True]
    assert queue.receive(3, NOW_MS + 59_999).ranges[0].start == 10
    # A lease whose time has passed, but whose messages nobody has received again, is extended.
    late = queue.extend(given, 9, ms=1_000, now_ms=NOW_MS + 61_000)
    assert late.change is not None
    moved = queue.change(given, 4, ms=5_000, now_ms=NOW_MS + 61_500)
    assert moved is not None
    assert queue.extend(given, 4, ms=9_000, now_ms=NOW_MS + 61_500).leases == [None], "another lease has it"
    queue.ack(given)
    assert queue.extend(given, 9, ms=9_000, now_ms=NOW_MS + 61_500).leases == [None]
    [other] = Queue().receive(3).ranges
    fresh = Queue()
    fresh.receive(3)
    with pytest.raises(InvalidArgumentError, match="outside of the lease"):
        fresh.extend(other, 3, ms=1_000)
    with pytest.raises(InvalidArgumentError, match="invisible_s must be"):
        fresh.extend(other, 1, ms=12 * 3_600_000 + 1)
