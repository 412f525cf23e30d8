"""Tests of queries on a store with one damaged record: they find all other messages, and report the damage."""

from __future__ import annotations

from contextlib import closing

import pytest

from raymq.common.errors import BodyUnreadableError, InvalidArgumentError
from raymq.common.message import Message
from raymq.common.protocol.store import Boundary, QueuePosition
from raymq.records.format.check import record_starts
from raymq.records.format.encode import encode_batch
from raymq.records.format.layout import read_header
from storage.message_store import MessageStore
from tests.support.stores.damage import flip
from tests.support.stores.stores import open_store

FIRST_MS = 1_700_000_000_000
FIELDS = ("size", "magic", "queue id", "queue offset", "physical offset", "body size", "topic size", "topic", "body")


@pytest.fixture
def store(tmp_path):
    """Yield a store with nine messages that have the key "all". The messages are one second apart."""
    times = iter(range(FIRST_MS, FIRST_MS + 1_000_000, 1000))
    with closing(open_store(tmp_path / "store", clock_ms=lambda: next(times))) as store:
        for number in range(9):
            message = Message("orders", b"body of %d" % number, keys=("all",))
            batch = encode_batch([message], 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1,
                                 message_ids=[f"ID{number}"])  # fmt: skip
            store.append([batch])
        yield store


def places(store: MessageStore) -> list[int]:
    data = bytes(store.queries.by_key("orders", "all").records)
    return [read_header(data, start).physical_offset for start in record_starts(data).tolist()]


@pytest.mark.parametrize("number", [0, 4, 8])
@pytest.mark.parametrize("field", FIELDS)
def test_all_intact_records_are_found_and_the_damaged_one_is_reported(store, tmp_path, field, number):
    before = places(store)
    flip(tmp_path / "store", before[number], field)
    found = store.queries.by_key("orders", "all")
    starts = record_starts(found.records).tolist()
    kept = [read_header(found.records, start).physical_offset for start in starts]
    # The store returns a record with a damaged body as it is: the store does not check the body's CRC, the reader does.
    if field == "body":
        assert (kept, found.damaged) == (before, ())
    else:
        assert (sorted([*kept, *found.damaged]), found.damaged) == (before, (before[number],))
    assert found.count == len(kept)
    one = store.queries.by_unique_id("orders", f"ID{number}")
    assert (one.count, one.damaged) == ((1, ()) if field == "body" else (0, (before[number],)))
    assert store.queries.by_key("orders", "all", 2).count == (1 if number == 8 and field != "body" else 2)


@pytest.mark.parametrize("field", FIELDS)
def test_a_damaged_record_is_named_by_its_place(store, tmp_path, field):
    before = places(store)
    flip(tmp_path / "store", before[4], field)
    if field == "body":
        assert store.queries.by_physical_offset(before[4])
    else:
        with pytest.raises(BodyUnreadableError) as caught:
            store.queries.by_physical_offset(before[4])
        assert (caught.value.physical_offset, caught.value.record_damaged) == (before[4], True)
    assert store.queries.by_physical_offset(before[5])
    for within in (before[4] + 1, before[4] + 90, before[5] - 1):
        with pytest.raises(InvalidArgumentError):
            store.queries.by_physical_offset(within)


@pytest.mark.parametrize("field", FIELDS)
def test_times_are_found_beside_damaged_records(store, tmp_path, field):
    before = places(store)
    for number in (0, 4, 5, 8):
        flip(tmp_path / "store", before[number], field)
    for number in (1, 2, 3, 6, 7):
        [stored_ms] = store.queues.stored_times([QueuePosition("orders", 0, number)])
        assert store.queues.offset_by_time("orders", 0, stored_ms, Boundary.UPPER) == number
        assert store.queues.offset_by_time("orders", 0, stored_ms, Boundary.LOWER) in (number, number - 1, number - 2)
    assert store.queries.earliest_store_time_ms() > 0


def test_the_earliest_time_is_of_the_first_intact_record(store, tmp_path):
    before = places(store)
    [second_ms] = store.queues.stored_times([QueuePosition("orders", 0, 1)])
    with (tmp_path / "store" / "commitlog" / ("0" * 20)).open("r+b", buffering=0) as file:
        file.write(b"\xa5" * (before[1] - before[0]))
    assert store.queries.earliest_store_time_ms() == second_ms


@pytest.mark.parametrize("shift", [1 << 40, -(1 << 40), 1])
def test_times_are_found_beside_a_unit_that_leads_nowhere(store, shift):
    times = store.queues.stored_times([QueuePosition("orders", 0, number) for number in range(9)])
    [queue] = store._parts.queues.plain
    [unit] = queue.units(4, 1)
    with store._parts.append_lock:
        queue.put_unit_at(4, int(unit["physical_offset"]) + shift, int(unit["size"]), 0)
    assert store.queues.stored_times([QueuePosition("orders", 0, 4)]) == [times[5]]
    for number in (0, 3, 5, 8):
        assert store.queues.offset_by_time("orders", 0, times[number], Boundary.UPPER) == number
        assert store.queues.offset_by_time("orders", 0, times[number]) in (number, number - 1)


@pytest.mark.parametrize("name", ["KEYS", "UNIQ_KEY"])
def test_a_record_that_lost_the_key_for_which_the_index_names_it_is_reported(store, tmp_path, name):
    before = places(store)
    with (tmp_path / "store" / "commitlog" / f"{0:020}").open("r+b", buffering=0) as file:
        data = file.read()
        file.seek(data.find(f"{name}\x01".encode(), before[4]) + len(name) + 1)
        file.write(b"?")
    all_found, one = store.queries.by_key("orders", "all"), store.queries.by_unique_id("orders", "ID4")
    lost, kept = (all_found, one) if name == "KEYS" else (one, all_found)
    assert (lost.damaged, kept.damaged) == ((before[4],), ())
    assert kept.count == (1 if kept is one else 9)


def test_a_damaged_unit_does_not_make_its_record_a_damaged_one(store, tmp_path):
    before = places(store)
    with (tmp_path / "store" / "consumequeue" / "orders" / "0" / f"{0:020}").open("r+b", buffering=0) as file:
        file.seek(20 * 4 + 7)
        file.write(b"\xff")
    assert places(store) == before
    assert store.queries.by_physical_offset(before[4])
