"""Tests of a write that can be repeated: despite failures and repeated attempts, each row is stored once and in
order."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from raymq.client.producer.repeatable import placement
from raymq.client.producer.repeatable.writer import RepeatableWriter, WriteResult
from raymq.common.delay import TIMER_ROLL_QUEUE, TIMER_TOPIC
from raymq.common.errors import (
    ClientStateError,
    InvalidArgumentError,
    MessageIllegalError,
    NotMasterError,
    RequestTimeoutError,
    SendUnknownError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.common.message import MessageQueue
from raymq.records.format.hashing import java_hash
from tests.support.clients.dedup_store import DedupStore, Writers
from tests.support.clients.fakes import WAIT_S, topic_route
from tests.support.clients.producers import Clock, Gate

LOST = ("lost", RequestTimeoutError("append", 1.0))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(placement, "BLOCK_ROWS", 4)
    monkeypatch.setattr(placement, "PART_MAX_ROWS", 3)


@pytest.fixture
def store() -> DedupStore:
    return DedupStore()


@pytest.fixture
def writers(store) -> Iterator[Writers]:
    made = Writers(topic_route(a=2), store)
    yield made
    made.close()


def rows(count: int, first: int = 0, **columns) -> pa.Table:
    return pa.table({"body": [b"%d" % n for n in range(first, first + count)], **columns})


def numbers(store: DedupStore, topic: str = "orders") -> dict[int, list[int]]:
    return {queue: [int(body) for body in bodies] for queue, bodies in store.bodies(topic).items()}


def write_one_by_one(writer: RepeatableWriter, count: int) -> None:
    for n in range(count):
        writer.write(rows(1, n))
    writer.finish()


EXPECTED = {0: [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], 1: [4, 5, 6, 7, 12, 13, 14, 15]}


def test_rows_go_to_their_queues_in_blocks_by_their_numbers(store, writers):
    writer = writers.make()
    writer.write(rows(13))
    writer.write(rows(7, 13))
    result = writer.finish()
    assert (result.count, result.stored_before) == (20, 0)
    assert sum(piece.count for piece in result.ranges) == 20
    assert numbers(store) == EXPECTED


def test_a_repeat_adds_nothing_however_it_is_divided(store, writers):
    for sizes in ([20], [1] * 20, [19, 1], [6, 6, 6, 2]):
        writer, first = writers.make(), 0
        for size in sizes:
            writer.write(rows(size, first))
            first += size
        result = writer.finish()
    assert (result.count, result.stored_before, result.ranges) == (20, 20, ())
    assert numbers(store) == EXPECTED


def test_a_repeat_continues_after_a_dead_attempt(store, writers):
    writers.make().write(rows(9))
    writers.close()
    writer = writers.make()
    writer.write(rows(20))
    assert writer.finish().stored_before == 9
    assert numbers(store) == EXPECTED


def test_another_epoch_or_producer_id_is_another_write(store, writers):
    for producer_id, epoch in (("load/0", 0), ("load/0", 1), ("load/1", 1)):
        writer = writers.make(producer_id, epoch)
        writer.write(rows(2))
        writer.finish()
    assert numbers(store) == {0: [0, 1] * 3}


def test_a_smaller_epoch_is_fenced(writers):
    old, new = writers.make(epoch=1), writers.make(epoch=2)
    new.write(rows(2))
    new.finish()
    old.write(rows(2))
    with pytest.raises(ClientStateError, match="is fenced"):
        old.finish()
    with pytest.raises(ClientStateError, match="is fenced"):
        writers.make(epoch=1)


def test_a_lost_answer_stores_nothing_twice(store, writers):
    store.script = [LOST] * 5
    writer = writers.make()
    writer.write(rows(20))
    assert writer.finish().count == 20
    assert numbers(store) == EXPECTED


def test_a_refusal_leaves_no_gap_in_the_sequences(store, writers):
    store.script = [SystemBusyError("full", 0.0), LOST, ServiceNotAvailableError("away"), None] * 3
    writer = writers.make()
    writer.write(rows(20))
    writer.finish()
    assert numbers(store) == EXPECTED
    assert {store.table.next_sequence("load/0", 0, "orders", queue, 100) for queue in (0, 1)} == {12, 8}


def test_no_row_after_a_failure_is_stored_in_its_queue(store, writers):
    refused = [0]

    def refuse_row_8(batches):
        bad = [b for b in batches if b.queue_id == 0 and b.producer.first_sequence + len(b) > 4]
        refused[0] += bool(bad)
        return MessageIllegalError("not this one") if bad else None

    store.script = [refuse_row_8] * 50
    writer = writers.make()
    with pytest.raises(MessageIllegalError, match="not this one"):
        write_one_by_one(writer, 20)
    with pytest.raises(ClientStateError, match="has failed"):
        writer.finish()
    assert refused[0]
    stored = numbers(store).get(0, [])
    assert stored == EXPECTED[0][: len(stored)]
    store.script.clear()
    writer = writers.make()
    writer.write(rows(20))
    writer.finish()
    assert numbers(store) == EXPECTED


def test_a_timeout_ends_all_later_rows(store):
    clock = Clock()
    writers = Writers(topic_route(a=1), store, clock=clock)
    gate = Gate(SystemBusyError("full", 0.0))
    store.script = [gate]
    writer = writers.make(send_timeout_s=30.0)
    writer.write(rows(3))
    assert gate.entered.wait(WAIT_S)
    clock.now_s += 20.0
    writer.write(rows(3, 3))
    clock.now_s += 20.0  # the first three rows exceed their send timeout, but the later rows do not
    gate.opened.set()
    with pytest.raises(SystemBusyError, match="not sent within"):
        writer.finish()
    assert numbers(store) == {}
    writers.close()


def test_an_overtaken_attempt_continues_after_the_other_attempt(store, writers):
    """A slow attempt of a write continues after another attempt has stored many rows. The store can then no longer
    return the offsets of the slow attempt's rows."""
    slow = writers.make()
    fast, other = writers.make(), writers.make("load/1")
    # rows of another producer lie between the rows of this write, so the rows of this write form many offset ranges
    for first in range(20):
        fast.write(rows(1, first))
        fast._in_flight.settle()
        other.write(rows(1, first))
        other._in_flight.settle()
    slow.write(rows(30))
    result = slow.finish()
    assert result.count == 30
    mine = [n for n in numbers(store)[0] + numbers(store)[1] if n >= 20]
    assert sorted(mine) == list(range(20, 30))


def test_a_forgotten_producer_is_stored_again(writers):
    store = DedupStore(producers_max=2)
    writers.stores[store.name] = store
    for producer_id in ("load/0", "load/1", "load/2", "load/0"):
        writer = writers.make(producer_id)
        writer.write(rows(2))
        writer.finish()
    assert numbers(store) == {0: [0, 1] * 4}


def test_rows_that_consumers_cannot_see_yet_are_sent_again(store, writers):
    writer = writers.make()
    writer.write(rows(4))
    writer.finish()
    store.invisible = 3
    writer = writers.make()
    writer.write(rows(4))
    assert writer.finish().stored_before == 1
    assert store.appends >= 2
    assert numbers(store) == {0: [0, 1, 2, 3]}


def test_a_key_chooses_among_the_queues_that_were_fixed(store, writers):
    fixed = writers.route.all_queues
    keys = [f"user-{n % 5}" if n % 3 else None for n in range(40)]
    table = rows(40, sharding_key=keys)
    for route in (topic_route(a=2), topic_route(a=7)):  # the topic gains queues between the first write and its repeat
        writers.route = route
        writer = writers.make(queues=fixed)
        writer.write(table)
        writer.finish()
    stored = numbers(store)
    assert sorted(n for ones in stored.values() for n in ones) == list(range(40))
    assert set(stored) == {0, 1}
    for key in set(keys) - {None}:
        mine = [n for n in stored[abs(java_hash(key)) % 2] if keys[n] == key]
        assert mine == [n for n in range(40) if keys[n] == key]


def test_queues_that_are_gone_are_an_error(writers):
    with pytest.raises(InvalidArgumentError, match="does not exist"):
        writers.make(queues=topic_route(a=3).all_queues).write(rows(1))
    with pytest.raises(InvalidArgumentError, match="list of the topic's queues"):
        writers.make(queues=[])
    with pytest.raises(InvalidArgumentError, match="list of the topic's queues"):
        writers.make(queues=[MessageQueue("others", "a", 0)])


@pytest.mark.parametrize("from_ms", [None, 0])
def test_delayed_rows_wait_in_the_queue_of_their_time(store, writers, from_ms):
    now_ms = time.time_ns() // 1_000_000
    times = [now_ms + 7_200_000 if n % 2 else None for n in range(20)]
    table = rows(20, deliver_time=pa.array(times, pa.timestamp("ms", "UTC")), tags=["t"] * 20)
    for _ in range(2):
        writer = writers.make(now_ms=None if from_ms is None else now_ms)
        writer.write(table)
        result = writer.finish()
    assert (result.count, result.stored_before) == (20, 20)
    assert sorted(n for ones in numbers(store).values() for n in ones) == list(range(0, 20, 2))
    [(queue, waiting)] = numbers(store, TIMER_TOPIC).items()
    assert waiting == list(range(1, 20, 2))
    assert queue == (now_ms + 7_200_000) // 3_600_000 % 32
    [messages] = [messages for (topic, _), messages in store.queues.items() if topic == TIMER_TOPIC]
    real = [int(message.system_properties["REAL_QID"]) for message in messages]
    assert real == [n // 4 % 2 for n in range(1, 20, 2)]
    assert {message.tags for message in messages} == {"t"}


def test_a_time_in_seconds_is_refused_before_any_row_is_sent(store, writers):
    seconds = int(time.time())
    table = rows(3, deliver_time=pa.array([None, 0, seconds], pa.timestamp("ms")))
    with pytest.raises(
        MessageIllegalError, match=rf"row 2: its deliver_time is {seconds} ms .*is it in milliseconds\?"
    ):
        writers.make().write(table)
    assert numbers(store) == {}


def test_a_time_far_ahead_waits_in_the_roll_queue_if_it_counts_from_a_fixed_time(store, writers):
    now_ms = time.time_ns() // 1_000_000
    table = rows(2, deliver_time=pa.array([now_ms + 10 * 86_400_000] * 2, pa.timestamp("ms")))
    with pytest.raises(InvalidArgumentError, match="more than a day ahead"):
        writers.make().write(table)
    writer = writers.make(now_ms=now_ms)
    writer.write(table)
    writer.finish()
    assert set(numbers(store, TIMER_TOPIC)) == {TIMER_ROLL_QUEUE}


def test_a_broker_that_is_away_is_waited_for_and_then_one_error(store, writers):
    store.asks = [ServiceNotAvailableError("away")] * 3
    writer = writers.make()
    assert store.asks == []
    store.script = [NotMasterError("a", 2)] * 100_000
    writer = writers.make("load/9", send_timeout_s=0.2)
    writer.write(rows(5))
    with pytest.raises(ServiceNotAvailableError, match="not sent within"):
        writer.finish()
    store.script.clear()
    assert numbers(store) == {}
    store.asks = [ServiceNotAvailableError("away")] * 100_000
    with pytest.raises(ServiceNotAvailableError, match="away"):
        writers.make(send_timeout_s=0.2)


def test_rows_without_an_answer_are_found_in_the_store(store, writers):
    store.script = [LOST] * 100_000
    writer = writers.make(send_timeout_s=0.2)
    writer.write(rows(4))
    assert writer.finish() == WriteResult(4, 4, ())
    store.script.clear()
    writer = writers.make()
    writer.write(rows(20))
    assert writer.finish().stored_before == 4
    assert numbers(store) == EXPECTED


def test_rows_without_an_answer_that_are_not_in_the_store_are_an_error(store, writers):
    store.script = [RequestTimeoutError("append", 1.0)] * 100_000
    writer = writers.make(send_timeout_s=2.0)
    writer.write(rows(4))
    with pytest.raises(SendUnknownError):
        writer.finish()
    assert numbers(store) == {}


def test_fewer_rows_than_an_earlier_attempt_stored_are_an_error(writers):
    writer = writers.make()
    writer.write(rows(20))
    writer.finish()
    writer = writers.make()
    writer.write(rows(19))
    with pytest.raises(ClientStateError, match="same rows in the same order"):
        writer.finish()


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (pa.table({"tags": ["x"]}), "column 'body' is missing"),
        (pa.table({"body": [b"x"], "deliver_time": [3]}), "column 'deliver_time' is int64, not timestamp"),
        (pa.table({"body": [b"x"], "colour": ["red"]}), "column 'colour' is unknown"),
    ],
)
def test_columns_that_do_not_fit_are_refused(store, writers, table, error):
    with pytest.raises(InvalidArgumentError, match=error):
        writers.make().write(table)
    assert numbers(store) == {}


def test_a_row_that_is_too_large_is_refused_before_the_table_is_sent(store, writers):
    table = pa.table({"body": [b"x"] * 10 + [b"x" * 5_000_000]})
    with pytest.raises(MessageIllegalError, match="row 10: "):
        writers.make().write(table)
    assert numbers(store) == {}


def test_more_rows_than_the_buffer_holds_pass_through_it(store, writers):
    writer = writers.make(max_buffered_messages=7)
    writer.write(rows(1000))
    assert writer.finish().count == 1000
    assert sorted(n for ones in numbers(store).values() for n in ones) == list(range(1000))
