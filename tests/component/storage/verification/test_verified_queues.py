"""Tests that the verification of an open store finds flipped bits in every field of queue entries, in the first, a
middle and the last file, and rewrites the entries: of queues of messages, light queues, extensions, and inner
batches."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raymq.common.message import Message
from raymq.common.protocol.store import ScrubStatus
from raymq.records.format.compression import Compression
from raymq.records.format.encode import EncodedBatch, ProducerSequence
from raymq.records.format.inner_batch_encode import encode_inner_batch
from storage.files import disk
from storage.message_store import MessageStore
from storage.scrub.scrubber import Scrubber
from tests.support.stores.stores import make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

SETTINGS = {
    "enable_lmq": True,
    "enable_multi_dispatch": True,
    "enable_consume_queue_ext": False,
    "mapper_file_size_batch_consume_queue_bytes": 460,
}
UNIT_FIELDS = {"physical offset": 6, "physical offset, high": 1, "size": 10, "tags code": 19}
BATCH_FIELDS = {
    "physical offset": 6,
    "size": 10,
    "tags code": 19,
    "store time": 26,
    "base offset": 35,
    "count": 37,
}
"""The byte of a queue entry in which a bit is flipped, by field."""


def inner(first: int, count: int) -> EncodedBatch:
    numbers = range(first, first + count)
    return encode_inner_batch(
        [Message("batched", b"%d" % n + b"x" * 300) for n in numbers],
        0,
        born_host=("127.0.0.1", 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=[f"{n:032X}" for n in numbers],
        producer=ProducerSequence("p", 0, first),
        compression=Compression(),
    )


@contextmanager
def filled(root: Path, **changes: Any) -> Iterator[MessageStore]:
    """Yield an open store with three or more files of each kind of queue."""
    store = open_store(root, **{**SETTINGS, **changes})
    try:
        sequence = 0
        for number in range(30):
            bodies = [b"%d %d" % (number, n) + b"x" * 100 for n in range(10)]
            light = make_batch(bodies, tags="red", extra_properties={"INNER_MULTI_DISPATCH": "%LMQ%a"})
            store.append([make_batch(bodies, tags="green", queue_id=1), light])
            store.append([inner(sequence, 1 + number % 4)])
            sequence += 1 + number % 4
        yield store
    finally:
        store.close()


def verify(store: MessageStore) -> ScrubStatus:
    """Verify all files of an open store once, in this thread."""
    parts = store._parts
    sections = list(store.scrubber._sections.values())
    scrubber = Scrubber(parts, store.gate, sections, clock_ms=lambda: 1_800_000_000_000)
    number = scrubber.verify_now()
    while scrubber.status().completed < number:
        scrubber.tick()
    return scrubber.status()


def files_of(root: Path, kind: str) -> list[Path]:
    return sorted(path for path in (root / kind).iterdir() if path.name.isdecimal())


def content(root: Path) -> dict[str, bytes]:
    """Return the bytes of all files of queues, by path."""
    kinds = ("consumequeue", "batchconsumequeue", "consumequeue_ext")
    paths = [path for kind in kinds for path in (root / kind).rglob("0*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def flip(path: Path, position: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        [value] = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ 0x04]))


def places(root: Path, kind: str, unit_bytes: int) -> list[tuple[Path, int]]:
    """Return entries in the first, a middle and the last file of a queue: the file, and the position of the entry."""
    files = files_of(root, kind)
    assert len(files) >= 3
    return [(files[0], 0), (files[0], 3 * unit_bytes), (files[len(files) // 2], 5 * unit_bytes), (files[-1], 0)]


@pytest.mark.parametrize("queue", ["orders/0", "orders/1", "%LMQ%a/0"])
@pytest.mark.parametrize("field", UNIT_FIELDS)
def test_each_field_of_an_entry_of_a_queue_is_checked_and_rewritten(tmp_path, queue, field):
    with filled(tmp_path) as store:
        before = content(tmp_path)
        chosen = places(tmp_path, f"consumequeue/{queue}", 20)
        for path, at in chosen:
            flip(path, at + UNIT_FIELDS[field])
        assert content(tmp_path) != before
        status = verify(store)
        assert (status.found, status.repaired, status.unrepaired) == (len(chosen), len(chosen), ())
        assert content(tmp_path) == before
        assert store.mender.holes == ()
        assert verify(store).found == 0


@pytest.mark.parametrize("field", BATCH_FIELDS)
def test_each_field_of_an_entry_of_an_inner_batch_is_checked_and_rewritten(tmp_path, field):
    with filled(tmp_path) as store:
        before = content(tmp_path)
        chosen = places(tmp_path, "batchconsumequeue/batched/0", 46)
        for path, at in chosen:
            flip(path, at + BATCH_FIELDS[field])
        status = verify(store)
        assert (status.found, status.repaired, status.unrepaired) == (len(chosen), len(chosen), ())
        assert content(tmp_path) == before
        assert verify(store).found == 0


@pytest.mark.parametrize("at", [9, 17], ids=["tags code", "store time"])
def test_the_values_in_an_extension_are_checked_and_rewritten(tmp_path, at):
    with filled(tmp_path, enable_consume_queue_ext=True, mapped_file_size_consume_queue_ext_bytes=1000) as store:
        before = content(tmp_path)
        chosen = places(tmp_path, "consumequeue_ext/orders/0", 20)
        for path, start in chosen:
            flip(path, start + at)
        status = verify(store)
        assert (status.found, status.repaired) == (len(chosen), len(chosen))
        assert content(tmp_path) == before


def test_intact_queues_are_read_once_and_not_changed(tmp_path):
    with filled(tmp_path) as store:
        before = content(tmp_path)
        status = verify(store)
        assert (status.found, status.unrepaired) == (0, ())
        units = sum(queue.used_bytes()[1] for queue in store._parts.queues)
        assert status.read_bytes >= store.log.end_offset + units
        assert content(tmp_path) == before


def test_an_entry_of_a_damaged_record_stays(tmp_path):
    with filled(tmp_path) as store:
        before = content(tmp_path)
        [unit] = store._parts.queues.get_plain("orders", 0).units(150, 1)
        begin = int(unit["physical_offset"])
        start = begin - begin % store.log.file_size
        flip(store.log.path(start), begin - start + 100)
        status = verify(store)
        assert [hole.offset for hole in store.mender.holes] == [begin]
        assert (status.found, status.unrepaired) == (1, ())
        assert content(tmp_path) == before


def test_a_queue_file_that_cannot_be_read_is_reported_and_the_others_are_checked(tmp_path, monkeypatch):
    with filled(tmp_path) as store:
        bad, *_ = files_of(tmp_path, "consumequeue/%LMQ%a/0")
        inode, pread = bad.stat().st_ino, disk.pread

        def reading(descriptor: int, size: int, position: int) -> bytes:
            if os.fstat(descriptor).st_ino == inode:
                raise OSError(errno.EIO, "Input/output error")
            return pread(descriptor, size, position)

        monkeypatch.setattr(disk, "pread", reading)
        flip(files_of(tmp_path, "batchconsumequeue/batched/0")[0], BATCH_FIELDS["size"])
        status = verify(store)
        assert status.found == 2
        assert status.repaired == 1
        [text] = status.unrepaired
        assert "cannot be read from byte 0" in text
        assert not store.gate.failure


def test_a_topic_that_is_deleted_during_the_check_is_skipped(tmp_path):
    with filled(tmp_path) as store:
        sections = list(store.scrubber._sections.values())
        scrubber = Scrubber(store._parts, store.gate, sections, clock_ms=lambda: 1_800_000_000_000)
        scrubber.verify_now()
        while scrubber.status().section != "queues":
            scrubber.tick()
        store.topics.delete("orders")
        while scrubber.status().running:
            scrubber.tick()
        assert scrubber.status().unrepaired == ()
