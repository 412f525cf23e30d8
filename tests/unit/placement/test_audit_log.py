"""Tests of the audit log: it is written to the first store that accepts the record, and a damaged entry hides no
other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from placement.console.audit_log import AUDIT_TOPIC, AuditLog
from raymq.client.consumer import repair_wait
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.store import RepairState
from raymq.records.format.check import record_starts
from raymq.tools.console.cluster import AuditEntry
from tests.support.clients.fakes import WAIT_S
from tests.support.stores.damage import flip
from tests.support.stores.damaged_topic import ReportedStore
from tests.support.stores.stores import open_store


class Store:
    """Fake store that keeps the encoded records of one queue."""

    def __init__(self, *, dead: bool = False) -> None:
        self.dead, self.records = dead, list[bytes]()

    def append(self, batches: list[Any], timeout_s: float) -> None:
        if self.dead:
            raise ServiceNotAvailableError("the actor is dead")
        [batch] = batches
        assert (batch.topic, batch.queue_id) == (AUDIT_TOPIC, 0)
        whole = bytes(batch.records)
        starts = [*record_starts(whole).tolist(), len(whole)]
        self.records += [whole[start:end] for start, end in pairwise(starts)]


def log_of(**stores: Store) -> AuditLog:
    brokers = {name: SimpleNamespace(storages={0: name}) for name in stores}
    client: Any = SimpleNamespace(
        admin=SimpleNamespace(brokers=lambda: brokers), storages=SimpleNamespace(get=lambda name: stores[name])
    )
    return AuditLog(client)


def entry(number: int) -> AuditEntry:
    return AuditEntry(number, "admin", "admin", "10.0.0.1", "topic create", {"topic": f"t{number}"}, "done")


def test_an_entry_goes_to_the_first_store_that_takes_it() -> None:
    stores = {"a": Store(dead=True), "b": Store(), "c": Store()}
    log_of(**stores).write(entry(1))
    assert [len(one.records) for one in stores.values()] == [0, 1, 0]


def test_a_change_that_no_store_accepts_gets_an_error() -> None:
    with pytest.raises(ServiceNotAvailableError, match="the actor is dead"):
        log_of(a=Store(dead=True)).write(entry(1))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[tuple[AuditLog, ReportedStore]]:
    """Yield an audit log with three entries, and the reports of damage to its store. A bit of the second entry is
    flipped."""
    store = open_store(tmp_path, clock_ms=iter(range(1_700_000_000_000, 1_700_001_000_000, 1000)).__next__)
    reported = ReportedStore(store, tmp_path, [])
    storage = SimpleNamespace(
        append=lambda batches, timeout_s: store.append(batches),
        queue_bounds=lambda topic, queue_id, timeout_s: store.queues.bounds(topic, queue_id),
        fetch=lambda requests, max_bytes, wait_s, timeout_s: store.fetch(requests, max_bytes=max_bytes, wait_s=0),
        report_damage=reported.report_damage,
    )
    log = log_of(a=storage)  # type: ignore[arg-type]  # a stand-in
    for number in range(3):
        log.write(entry(number))
    queue = store._parts.queues.get_plain(AUDIT_TOPIC, 0)
    assert queue is not None
    reported.flips.append((int(queue.units(1, 1)[0]["physical_offset"]), "body"))
    flip(tmp_path, *reported.flips[0])
    yield log, reported
    store.close()


def test_a_damaged_entry_is_read_after_its_repair(
    kept: tuple[AuditLog, ReportedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_wait, "ADMIN_REPAIR_WAIT_S", WAIT_S)
    log, reported = kept
    assert log.read(10, None).entries == (entry(2), entry(1), entry(0))
    assert reported.positions[0] == [(AUDIT_TOPIC, 0, 1)]


def test_an_entry_that_stays_damaged_has_the_reason_as_its_outcome(kept: tuple[AuditLog, ReportedStore]) -> None:
    log, reported = kept
    reported.replica = SimpleNamespace(report_damage=lambda positions: [RepairState.LOST])  # type: ignore[assignment]
    first, damaged, last = log.read(10, None).entries
    assert (first, last) == (entry(2), entry(0))
    assert (damaged.who, damaged.action) == ("", "")
    assert damaged.at_ms > 1_700_000_000_000
    assert "offset 1 of queue" in damaged.outcome
