"""Tests of the wait for repairs: which damaged records a reader waits for, how long, and what the storage actor's
answers change. No test waits for real time: the clock is a number, and each call of the reporting thread is a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from raymq.client.consumer import repair_wait
from raymq.client.consumer.repair_wait import READ_REPAIR_WAIT_S, REPAIR_PAUSE_S, RepairWait, is_damage
from raymq.common.errors import BodyUnreadableError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueuePosition, RepairState
from raymq.records.format.decode import CRC_WRONG
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually

Q0, Q1 = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)


class Store:
    """A storage actor that knows the state of each record. `reports` are the offsets of all calls, by queue id."""

    def __init__(self) -> None:
        self.states: dict[int, RepairState] = {}
        self.reports: list[tuple[int, list[int]]] = []
        self.failure: Exception | None = None

    def report(self, queue: MessageQueue, positions: Sequence[QueuePosition]) -> list[RepairState]:
        assert {(one.topic, one.queue_id) for one in positions} == {(queue.topic, queue.queue_id)}
        offsets = [one.queue_offset for one in positions]
        self.reports.append((queue.queue_id, offsets))
        if self.failure is not None:
            raise self.failure
        return [self.states.get(offset, RepairState.PENDING) for offset in offsets]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_wait, "ASK_FIRST_S", 0.001)
    monkeypatch.setattr(repair_wait, "ASK_AGAIN_S", 0.001)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def released() -> list[MessageQueue]:
    return []


@pytest.fixture
def wait(store: Store, clock: Clock, released: list[MessageQueue]) -> Iterator[RepairWait]:
    wait = RepairWait(store.report, released.append, clock_s=clock)
    yield wait
    wait.close()


def until(condition: Callable[[], object]) -> None:
    eventually(condition, "the reporting thread", WAIT_S)


def test_a_reader_waits_until_the_record_is_repaired(wait, store, released):
    assert wait.meet(Q0, [7, 5]) == 5
    until(lambda: len(store.reports) > 3)
    assert store.reports[0] == (0, [5, 7])
    assert wait.is_waiting(Q0, 5)
    assert released == []
    store.states[5] = RepairState.INTACT
    until(lambda: released == [Q0])
    assert not wait.is_waiting(Q0, 5)
    assert wait.is_waiting(Q0, 7)


def test_a_record_that_no_replica_has_is_delivered_at_once(wait, store, released):
    store.states[5] = RepairState.LOST
    assert wait.meet(Q0, [5]) == 5
    until(lambda: released == [Q0])
    assert wait.meet(Q0, [5]) is None
    assert wait.meet(Q0, [5, 6]) == 6


def test_a_repaired_record_that_is_still_damaged_for_the_reader_is_given_up_at_the_deadline(
    wait, store, clock, released
):
    store.states[5] = RepairState.INTACT
    assert wait.meet(Q0, [5]) == 5
    until(lambda: released)
    assert wait.meet(Q0, [5]) == 5
    clock.now_s += READ_REPAIR_WAIT_S
    assert wait.meet(Q0, [5]) is None


def test_the_wait_ends_and_the_queue_does_not_wait_again_soon(wait, store, clock, released):
    assert wait.meet(Q0, [5]) == 5
    until(lambda: store.reports)
    assert released == []
    clock.now_s += READ_REPAIR_WAIT_S
    until(lambda: released == [Q0])
    assert wait.meet(Q0, [5]) is None
    # The next damaged records are reported, but the queue does not wait for them. Other queues do.
    assert wait.meet(Q0, [6]) is None
    until(lambda: (0, [6]) in store.reports)
    assert wait.meet(Q1, [6]) == 6
    clock.now_s += REPAIR_PAUSE_S
    assert wait.meet(Q0, [8]) == 8


def test_a_storage_actor_that_does_not_answer_is_asked_again(wait, store, released):
    store.failure = ServiceNotAvailableError("away")
    assert wait.meet(Q0, [5]) == 5
    until(lambda: len(store.reports) > 3)
    assert wait.is_waiting(Q0, 5)
    store.failure, store.states = None, {5: RepairState.INTACT}
    until(lambda: released == [Q0])


def test_a_bug_in_a_report_ends_the_wait(wait, store, released):
    store.failure = ZeroDivisionError()
    assert wait.meet(Q0, [5]) == 5
    until(lambda: released == [Q0])
    assert wait.meet(Q0, [5]) is None


def test_the_number_of_records_is_bounded(wait, store, monkeypatch):
    monkeypatch.setattr(repair_wait, "WAITS_MAX", 3)
    assert wait.meet(Q0, range(100)) == 0
    until(lambda: store.reports)
    assert store.reports[0] == (0, [0, 1, 2])
    assert wait.meet(Q0, [50]) is None


def test_old_waits_are_forgotten(wait, store, clock):
    store.states = dict.fromkeys(range(100), RepairState.LOST)
    wait.meet(Q0, range(100))
    until(lambda: not wait.is_waiting(Q0, 99))
    clock.now_s += READ_REPAIR_WAIT_S + REPAIR_PAUSE_S + 1
    assert wait.meet(Q0, [100]) == 100
    assert len(wait._waits) == 1


def test_the_thread_ends_when_nothing_waits(wait, store):
    store.states[5] = RepairState.LOST
    wait.meet(Q0, [5])
    until(lambda: wait._thread is None)
    assert "report-damage" not in [thread.name for thread in threading.enumerate() if thread is wait._thread]


def test_nothing_waits_after_close(wait, store):
    wait.meet(Q0, [5])
    wait.close()
    assert not wait.is_waiting(Q0, 5)
    assert wait.meet(Q0, [6]) is None


def test_a_blocking_reader_returns_after_the_repair(wait):
    answers = iter([RepairState.PENDING, RepairState.PENDING, RepairState.INTACT])
    wait._report = lambda queue, positions: [next(answers)]
    assert wait.wait(Q0, [5])
    assert next(answers, None) is None
    assert wait._thread is None


def test_a_blocking_reader_does_not_wait_for_what_no_replica_has(wait, store):
    store.states[5] = RepairState.LOST
    assert not wait.wait(Q0, [5, -1])
    assert store.reports == [(0, [5])]
    assert not wait.wait(Q0, [-1])
    assert not wait.wait(Q0, [])
    assert len(store.reports) == 1


def test_a_blocking_reader_waits_until_its_timeout(wait, store, clock):
    def report(queue, positions):
        clock.now_s += 1.0
        return [RepairState.PENDING]

    wait._report = report
    assert not wait.wait(Q0, [5], 3.0)
    assert clock.now_s == 1003.0
    assert wait.is_waiting(Q0, 5), "a later call may wait on"


def test_a_blocking_reader_gives_a_record_up_that_stays_damaged_for_it(wait, store, clock):
    store.states[5] = RepairState.INTACT
    assert wait.wait(Q0, [5])
    assert wait.wait(Q0, [5])
    clock.now_s += READ_REPAIR_WAIT_S
    assert not wait.wait(Q0, [5])
    assert not wait.wait(Q0, [5])


def test_a_blocking_reader_does_not_wait_again_soon(wait, store, clock):
    def report(queue, positions):
        clock.now_s += READ_REPAIR_WAIT_S
        return [RepairState.PENDING] * len(positions)

    wait._report = report
    assert not wait.wait(Q0, [5])
    before_s = clock.now_s
    assert not wait.wait(Q0, [6], 1000.0)
    assert clock.now_s == before_s + READ_REPAIR_WAIT_S, "one report, without a wait"


def test_a_badly_compressed_body_is_no_damage():
    assert not is_damage(BodyUnreadableError("orders@a:0", 5, -1, "the body does not decompress"))
    assert is_damage(BodyUnreadableError("orders@a:0", 5, -1, CRC_WRONG))
    assert is_damage(BodyUnreadableError("orders@a:0", 5, -1, "any reason", True))
