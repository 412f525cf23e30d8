"""Tests that consume-queue entries (units) that recovery removes do not reappear. They could contradict later
records."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.stores.stores import PowerCuts, bodies_of, killed_copy, make_batch, open_store


def test_a_unit_that_recovery_removed_does_not_come_back_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consume-queue entry (unit) that recovery removed does not reappear after a power cut. Recovery removed the
    entry because its record is lost. The store then writes a record of another queue at the lost record's position, so
    the old entry would point to a wrong record."""
    store = open_store(tmp_path / "first", flush_interval_consume_queue_ms=60_000)
    for queue_id in (0, 1):
        store.append([make_batch([b"0", b"1", b"2"], queue_id=queue_id)])
    [lost] = store.append([make_batch([b"3"], queue_id=0)])
    root = killed_copy(tmp_path / "first", tmp_path / "store")
    store.close()
    with (root / "commitlog" / f"{0:020}").open("r+b") as log:
        log.seek(lost.physical_offset)
        log.write(bytes(1000))
    cuts = PowerCuts(root)
    monkeypatch.setattr(os, "fdatasync", cuts.fdatasync)
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.close(descriptor)
    store = open_store(root, flush_interval_consume_queue_ms=60_000, flush_disk_type="SYNC_FLUSH")
    [next_one] = store.append([make_batch([b"3"], queue_id=1)])
    assert next_one.physical_offset == lost.physical_offset
    after = cuts.copy_after_cut(tmp_path / "after")
    store.close()
    store = open_store(after)
    assert store.mender.holes == ()
    assert [bodies_of(store, queue_id=queue_id) for queue_id in (0, 1)] == [
        [b"0", b"1", b"2"],
        [b"0", b"1", b"2", b"3"],
    ]
    store.close()
