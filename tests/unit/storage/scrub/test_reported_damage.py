"""Tests of reports about damaged records: the store checks each reported record itself, and records its damage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from raymq.common.protocol.store import QueuePosition
from storage.message_store import MessageStore
from storage.read.unit_repair import UnitRepair
from storage.scrub import reported_damage
from storage.scrub.inspector import LogInspector
from storage.scrub.reported_damage import Reported, Verdict
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.stores import make_batch, open_store, placed_bodies

pytestmark = pytest.mark.usefixtures("no_flushes")

COUNT = 60
BODIES = [b"%06d" % number + b"x" * 100 for number in range(COUNT)]
SETTLE_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[MessageStore]:
    """Yield an open store with the messages BODIES in queue 0."""
    with closing(open_store(root)) as opened:
        for body in BODIES:
            opened.append([make_batch([body])])
        yield opened


def report(store: MessageStore, *offsets: int) -> list[Reported]:
    return store.reported.report([QueuePosition("orders", 0, offset) for offset in offsets])


def place(store: MessageStore, offset: int) -> int:
    """Return the physical offset of a record of queue 0."""
    queue = store._parts.queues.get_plain("orders", 0)
    assert queue is not None
    return int(queue.units(offset, 1)[0]["physical_offset"])


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "size"])
def test_a_reported_record_is_checked_and_becomes_a_hole(store, root, field):
    flip(root, place(store, 20), field)
    [first] = report(store, 20)
    assert first.verdict is Verdict.CHECKING
    assert store.reported.settle(SETTLE_S)
    [second] = report(store, 20)
    assert second.verdict is Verdict.DAMAGED
    assert second.hole is not None
    assert second.hole.offset == place(store, 20)
    assert store.status().damage_reports == 1
    assert store.status().found_holes == 1
    # After the repair the reader may read the record again.
    flip(root, place(store, 20), field)
    store.mender.mend(
        second.hole.offset, bytes(store._parts.reader.log_bytes(second.hole.offset, second.hole.end_offset))
    )
    assert report(store, 20) == [Reported(Verdict.INTACT)]
    assert placed_bodies(store) == BODIES


def test_a_false_report_changes_nothing(store):
    assert [one.verdict for one in report(store, *range(COUNT))] == [Verdict.INTACT] * COUNT
    store.reported.note(place(store, 5) + 3, 1 << 40)
    assert store.reported.settle(SETTLE_S)
    assert store.status().holes == ()
    assert placed_bodies(store) == BODIES


def test_a_position_without_a_record_is_answered(store):
    assert [one.verdict for one in report(store, -1, COUNT, 1 << 62)] == [Verdict.NONE] * 3
    assert store.reported.report([QueuePosition("unknown", 0, 0)]) == [Reported(Verdict.NONE)]


def test_the_wrong_unit_of_a_reported_record_is_rewritten(store, root):
    [path] = (root / "consumequeue" / "orders" / "0").iterdir()
    data = bytearray(path.read_bytes())
    data[20 * 30 + 3] ^= 0x40
    data[20 * 31 + 7] ^= 0x02
    path.write_bytes(data)
    assert {one.verdict for one in report(store, 30, 31)} == {Verdict.CHECKING}
    assert store.reported.settle(SETTLE_S)
    assert [one.verdict for one in report(store, 30, 31)] == [Verdict.INTACT] * 2
    assert store.status().holes == ()
    assert placed_bodies(store) == BODIES


def test_reports_of_one_record_count_once_and_are_not_checked_again_at_once(store, root, monkeypatch):
    checked: list[int] = []
    may_go_on = threading.Event()
    inspect = LogInspector.inspect

    def note(self, begin, end):
        may_go_on.wait(SETTLE_S)
        checked.append(begin)
        return inspect(self, begin, end)

    monkeypatch.setattr(LogInspector, "inspect", note)
    flip(root, place(store, 20), "body")
    for _ in range(50):
        assert [one.verdict for one in report(store, 20)] == [Verdict.CHECKING]
    may_go_on.set()
    assert store.reported.settle(SETTLE_S)
    for _ in range(50):
        store.reported.note(place(store, 20), 1)
    assert store.reported.settle(SETTLE_S)
    assert checked == [place(store, 20)]
    assert store.reported.count == 1


def test_the_number_of_waiting_reports_is_bounded(store, monkeypatch):
    monkeypatch.setattr(reported_damage, "REPORTS_MAX", 5)
    may_go_on = threading.Event()
    monkeypatch.setattr(LogInspector, "inspect", lambda self, begin, end: may_go_on.wait(SETTLE_S))
    for offset in range(COUNT):
        store.reported.note(place(store, offset), 1)
    assert store.reported.count == 5
    may_go_on.set()


def test_a_failing_check_does_not_end_the_checks(store, root, monkeypatch):
    inspect = LogInspector.inspect

    def fail_once(self, begin, end):
        monkeypatch.setattr(LogInspector, "inspect", inspect)
        raise ZeroDivisionError

    monkeypatch.setattr(LogInspector, "inspect", fail_once)
    flip(root, place(store, 20), "body")
    flip(root, place(store, 40), "body")
    report(store, 20)
    assert store.reported.settle(SETTLE_S)
    report(store, 40)
    assert store.reported.settle(SETTLE_S)
    assert [hole.offset for hole in store.status().holes] == [place(store, 40)]


def test_a_record_that_is_damaged_again_after_its_repair_is_checked_again(store, root):
    for count in (1, 2):
        flip(root, place(store, 20), "body")
        report(store, 20)
        assert store.reported.settle(SETTLE_S)
        [(verdict, hole)] = report(store, 20)
        assert verdict is Verdict.DAMAGED
        flip(root, place(store, 20), "body")
        store.mender.mend(hole.offset, bytes(store._parts.reader.log_bytes(hole.offset, hole.end_offset)))
        assert store.reported.count == count


def test_queries_report_the_damage_that_they_find(store, root):
    physical_offset = store.append([make_batch([b"keyed"], extra_properties={"KEYS": "k1"})])[0].physical_offset
    store.append([make_batch([b"last"])])
    assert store.queries.by_key("orders", "k1").count == 1
    flip(root, physical_offset, "body")
    assert store.queries.by_key("orders", "k1").count == 1
    assert store.reported.settle(SETTLE_S)
    assert [hole.offset for hole in store.status().holes] == [physical_offset]


def test_a_closed_store_takes_no_report(root):
    store = open_store(root)
    store.append([make_batch([b"one"])])
    store.close()
    store.reported.note(0, 1)
    assert store.reported.count == 0


def test_a_record_with_a_changed_offset_does_not_get_the_place_of_a_damaged_neighbour(store, root):
    places = [place(store, offset) for offset in (40, 41)]
    flip(root, places[0], "queue id")
    flip(root, places[1], "queue offset")  # 41 becomes 40
    queue = store._parts.queues.get_plain("orders", 0)
    UnitRepair(store._parts, lambda error: None).mend(queue, 40, 42)
    assert [place(store, offset) for offset in (40, 41)] == places
    report(store, 40, 41)
    assert store.reported.settle(SETTLE_S)
    assert [place(store, offset) for offset in (40, 41)] == places
    assert placed_bodies(store) == [*BODIES[:40], None, None, *BODIES[42:]]
