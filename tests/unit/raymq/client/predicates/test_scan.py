"""Tests of PredicateScan: which messages it keeps, from which offset a fetch continues, and what a failing predicate
causes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import raymq
from raymq.client.predicates import scan
from raymq.client.predicates.evaluation import Evaluated, FunctionHere, call_each
from raymq.client.predicates.matching_records import keep
from raymq.client.predicates.scan import FetchFailed, PredicateScan
from raymq.common.errors import PredicateFailedError
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.memory_records import LocatedRecords
from tests.support.clients.records import records_of
from tests.support.clients.watches import MappedStorage
from tests.support.stores.stores import make_batch, open_store


class Clock:
    """Fake clock that advances by `step_s` at each reading."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self.step_s = 100.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def storage(tmp_path, no_flushes):
    store = open_store(tmp_path / "store")
    for queue_id in range(2):
        store.append([make_batch([b"%d" % number for number in range(100)], queue_id=queue_id)])
    yield MappedStorage(store)
    store.close()


@pytest.fixture(autouse=True)
def an_hour_for_each_fetch(monkeypatch):
    """Let one fetch call the function for an hour. So a pause of the machine does not end a fetch early."""
    monkeypatch.setattr(scan, "SCAN_S", 3600.0)


def scan_of(storage, function, *, on_error="raise", clock=None) -> PredicateScan:
    here = FunctionHere(raymq.predicate(function, on_error=on_error))
    evaluate = partial(here.evaluate, "a")
    options = {"name": "predicate p", "broker_name": "a", "in_place": True}
    if clock is not None:
        options["clock"] = clock
    return PredicateScan(storage, lambda records, until_s, log: evaluate(records, until_s), **options)


def fetch(of: PredicateScan, *requests: FetchRequest, max_bytes: int = 1 << 20):
    return of.fetch(requests or [FetchRequest("orders", 0, 0, 500)], max_bytes, 0.0, 1.0)


def offsets(result) -> list[int]:
    return LocatedRecords.read(result.records).offsets.tolist()


def test_a_fetch_returns_matches_and_continues_after_all_scanned_messages(storage):
    [result] = fetch(scan_of(storage, lambda message: message.body.endswith(b"7")))
    assert result.status is PullStatus.FOUND
    assert offsets(result) == list(range(7, 100, 10))
    assert (result.next_offset, result.count) == (100, 10)


def test_nothing_matches(storage):
    [result] = fetch(scan_of(storage, lambda message: False))
    assert (result.status, result.next_offset, result.count) == (PullStatus.NO_MATCHED_MESSAGE, 100, 0)
    [result] = fetch(scan_of(storage, lambda message: False), FetchRequest("orders", 0, 100, 5))
    assert result.status is PullStatus.NO_NEW_MESSAGE


@pytest.mark.parametrize(("max_messages", "max_bytes"), [(3, 1 << 20), (500, 400), (1, 1)])
def test_messages_beyond_a_fetchs_limit_come_with_the_next_fetch(storage, max_messages, max_bytes):
    of = scan_of(storage, lambda message: int(message.body) % 3 == 0)
    found, offset = [], 0
    while offset < 100:
        [result] = fetch(of, FetchRequest("orders", 0, offset, max_messages), max_bytes=max_bytes)
        assert result.count <= max_messages
        assert result.next_offset > offset
        found, offset = found + offsets(result), result.next_offset
    assert found == list(range(0, 100, 3))


def test_several_queues_are_looked_at_together(storage):
    requests = [FetchRequest("orders", 0, 90, 500), FetchRequest("orders", 1, 0, 500)]
    results = fetch(scan_of(storage, lambda message: message.body == b"95"), *requests)
    assert [offsets(result) for result in results] == [[95], [95]]


def test_a_slow_function_gets_to_every_queue_in_its_turn(storage):
    of = scan_of(storage, lambda message: False, clock=Clock(scan.SCAN_S))
    ends = [0, 0]
    for _ in range(400):
        requests = [FetchRequest("orders", queue_id, ends[queue_id], 500) for queue_id in range(2)]
        ends = [result.next_offset for result in fetch(of, *requests)]
    assert ends == [100, 100]


def test_a_failure_is_reported_after_earlier_matches(storage):
    def function(message):
        return 1 / (int(message.body) - 5) > -1

    of = scan_of(storage, function)
    [result] = fetch(of)
    assert (offsets(result), result.next_offset) == ([0, 1, 2, 3], 5)
    [result] = fetch(of, FetchRequest("orders", 0, 5, 500))
    assert isinstance(result, FetchFailed)
    assert isinstance(result.error, PredicateFailedError)
    assert (result.error.queue_offset, result.error.reason) == (5, "ZeroDivisionError: division by zero")
    [result] = fetch(of, FetchRequest("orders", 0, 6, 500))
    assert offsets(result) == list(range(6, 100))


@pytest.mark.parametrize(("on_error", "with_it"), [("match", [5]), ("skip", [])])
def test_a_failure_may_match_or_be_left_out(storage, on_error, with_it):
    [result] = fetch(scan_of(storage, lambda message: 1 / (int(message.body) - 5) > 1e9, on_error=on_error))
    assert (offsets(result), result.next_offset) == (with_it, 100)


def test_one_queues_failure_stops_no_other_queue(storage):
    of = scan_of(storage, lambda message: message.queue_id / (1 - message.queue_id or 1) if message.queue_id else 1 / 0)
    failed, result = fetch(of, FetchRequest("orders", 0, 0, 500), FetchRequest("orders", 1, 0, 500))
    assert isinstance(failed, FetchFailed)
    assert len(offsets(result)) == 100


def test_a_message_that_ended_the_process_is_not_tried_again_for_a_while(storage):
    clock, asked = Clock(), []

    def evaluate(records, until_s, log):
        asked.append(records.offsets.tolist())
        if 3 in records.offsets:
            row = records.offsets.tolist().index(3)
            return Evaluated(np.zeros(row, np.bool_), "it ended", ended=True)
        return Evaluated(np.ones(len(records.offsets), np.bool_))

    of = PredicateScan(storage, evaluate, name="p", broker_name="a", in_place=True, clock=clock)
    [result] = fetch(of)
    assert result.next_offset == 3
    [result] = fetch(of, FetchRequest("orders", 0, 3, 500))
    assert isinstance(result, FetchFailed)
    [result] = fetch(of)
    assert (offsets(result), result.next_offset) == ([0, 1, 2], 3)
    assert asked == [list(range(100)), [0, 1, 2]]
    clock.now_s += scan.FAILURE_KEPT_S
    fetch(of, FetchRequest("orders", 0, 3, 500))
    assert asked[-1] == list(range(3, 100)), "it is tried again then"


def test_the_function_reads_messages_whose_body_is_damaged(storage):
    """A predicate is called for a message with a damaged body. A predicate that does not read the body works, and the
    consumer reports the damage."""
    [result] = storage.find([FetchRequest("orders", 0, 0, 20)], 1 << 20, 0.0, 1.0)
    data = bytearray(result.mapped[0].data)
    data[data.index(b"\x00\x00\x00\x019", 60) + 4] ^= 1
    records = LocatedRecords.read(bytes(data[: int(result.mapped[0].sizes.sum())]))
    here = FunctionHere(raymq.predicate(lambda message: message.queue_offset == 9))
    assert np.flatnonzero(here.evaluate("a", records, 1e12).matches).tolist() == [9]


def test_a_predicate_does_not_decide_by_a_damaged_body(storage):
    """A message with a damaged body matches if the predicate reads the body. The consumer then reports the damage."""
    [result] = storage.find([FetchRequest("orders", 0, 0, 20)], 1 << 20, 0.0, 1.0)
    data = bytearray(result.mapped[0].data)
    data[data.index(b"\x00\x00\x00\x019", 60) + 4] ^= 1
    records = LocatedRecords.read(bytes(data[: int(result.mapped[0].sizes.sum())]))
    here = FunctionHere(raymq.predicate(lambda message: message.body == b"7"))
    assert np.flatnonzero(here.evaluate("a", records, 1e12).matches).tolist() == [7, 9]


def test_a_damaged_record_matches_so_that_the_consumer_finds_out():
    records = LocatedRecords.read(records_of(range(3)).data)
    here = FunctionHere(raymq.predicate(lambda message: False))
    assert here.evaluate("a", records, 1e12).matches.tolist() == [True, True, True]


def test_no_call_begins_when_the_time_is_over_but_the_first():
    matches = bytearray(10)
    calls = call_each(lambda message: True, list(range(10)), matches, on_error="raise", until_s=103, clock=Clock(1.0))
    assert calls.decided == 3
    assert bytes(matches) == b"\1\1\1" + bytes(7)
    assert call_each(lambda message: True, [1, 2], matches, on_error="raise", until_s=0).decided == 1


def test_an_exception_that_cannot_be_printed_is_a_failure():
    class MuteError(Exception):
        def __str__(self):
            raise ValueError

    def function(message):
        raise MuteError

    assert call_each(function, [1], bytearray(1), on_error="raise").failure == "MuteError: the exception has no text"


def test_records_are_kept_in_pieces_where_the_time_is_short():
    records = [LocatedRecords.read(records_of(range(first, first + 5)).data) for first in (0, 5)]

    def decide_two(records, until_s):
        return Evaluated(records.offsets[:2] % 2 == 0)

    kept = keep(records, 12, decide_two, max_messages=100, max_bytes=1 << 20, until_s=1e12)
    assert [part.offsets.tolist() for part in kept.records] == [[0], [2], [4], [6], [8]]
    assert (kept.next_offset, kept.count, kept.looked) == (12, 5, 10)
    kept = keep(records, 12, decide_two, max_messages=100, max_bytes=1 << 20, until_s=0)
    assert (kept.next_offset, kept.looked) == (2, 2)
