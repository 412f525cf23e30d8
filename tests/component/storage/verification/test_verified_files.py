"""Tests that the verification of an open store finds flipped bits in its index files, its compacted logs, its snapshot
and its checkpoint, and repairs what can be made from the log."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest

from raymq.common.message import Message
from raymq.common.protocol.store import ScrubStatus
from raymq.records.format.encode import encode_batch
from storage.files import disk
from storage.files.damage import DamageNotes
from storage.message_store import MessageStore
from storage.queue.topic_attributes import SETTLED_MS, TOPICS_FILE
from storage.recovery.checkpoint import read_checkpoint
from storage.recovery.snapshot import SNAPSHOT_FILE, read_snapshot
from storage.scrub.scrubber import Scrubber
from tests.support.history.waiting import eventually
from tests.support.stores.stores import open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

NOW_MS = 1_700_000_000_000
COUNT = 700
TOPICS = json.dumps({"topicConfigTable": {"orders": {"attributes": {"cleanup.policy": "COMPACTION"}}}})


@contextmanager
def filled(root: Path, **changes: Any) -> Iterator[MessageStore]:
    """Yield an open store whose messages fill several index files. Message n has the key k-n."""
    store = open_store(root, clock_ms=lambda: NOW_MS, **changes)
    try:
        for number in range(0, COUNT, 10):
            numbers = range(number, number + 10)
            batch = encode_batch(
                [Message("orders", b"body %d" % n + b"x" * 100, keys=f"k-{n}") for n in numbers],
                0,
                born_host=("127.0.0.1", 5000),
                born_timestamp_ms=NOW_MS,
                message_ids=[f"{n:032X}" for n in numbers],
            )
            store.append([batch])
        index = store._index
        if index is not None:
            assert index.wait_for(store.log.end_offset, 60)
        yield store
    finally:
        store.close()


def verify(store: MessageStore) -> ScrubStatus:
    """Verify all files of an open store once, in this thread."""
    sections = list(store.scrubber._sections.values())
    scrubber = Scrubber(store._parts, store.gate, sections, clock_ms=lambda: NOW_MS)
    number = scrubber.verify_now()
    while scrubber.status().completed < number:
        assert scrubber.tick() == 0, scrubber.status().error
    return scrubber.status()


def flip(path: Path, position: int, bit: int = 2) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        [value] = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ (1 << bit)]))


def index_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "index").iterdir() if path.name.isdecimal())


def all_are_found(store: MessageStore) -> bool:
    results = (store.queries.by_key("orders", f"k-{number}", 64, 0, 1 << 60) for number in range(COUNT))
    return all(result.records for result in results)


PLACES = {"header": 12, "slot": 40 + 4 * 7 + 3, "first entry": 40 + 400 + 20 + 5, "last entry": 40 + 400 + 399 * 20 + 9}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_flipped_bit_in_an_index_file_is_found_and_the_file_is_rebuilt(tmp_path, place, number):
    with filled(tmp_path) as store:
        sealed = [path for path, _, _ in store._index.sealed()]
        assert len(sealed) >= 3
        flip(sealed[number], PLACES[place])
        status = verify(store)
        assert (status.found, status.repaired, status.unrepaired) == (1, 1, ())
        assert store._index.wait_for(store.log.end_offset, 60)
        eventually(lambda: all_are_found(store), "every message by its key")
        assert verify(store).found == 0
        assert len(index_files(tmp_path)) == len(store._index)


def test_index_files_that_take_entries_are_not_checked(tmp_path):
    with filled(tmp_path) as store:
        newest = index_files(tmp_path)[-1]
        assert newest not in [path for path, _, _ in store._index.sealed()]
        assert verify(store).found == 0


def test_an_index_file_that_cannot_be_read_is_reported(tmp_path, monkeypatch):
    with filled(tmp_path) as store:
        inode, pread = store._index.sealed()[0][0].stat().st_ino, disk.pread

        def reading(descriptor: int, size: int, position: int) -> bytes:
            if os.fstat(descriptor).st_ino == inode:
                raise OSError(errno.EIO, "Input/output error")
            return pread(descriptor, size, position)

        monkeypatch.setattr(disk, "pread", reading)
        [text] = verify(store).unrepaired
        assert text.startswith("index file")
        assert index_files(tmp_path)


@pytest.mark.parametrize("name", [SNAPSHOT_FILE, "checkpoint"])
def test_a_flipped_bit_in_a_recovery_file_is_found_and_the_file_is_written_again(tmp_path, name):
    random = Random(seed := SystemRandom().randrange(1 << 32))
    print(f"seed {seed}")
    with filled(tmp_path) as store:
        store._checkpoints.flush_queues()
        used = 72 if name == "checkpoint" else (tmp_path / name).stat().st_size
        positions = list(range(used))
        if name == "checkpoint":
            # These bytes are zeros, and the name of the checksum. Without the name the values count all the same.
            positions = [at for at in positions if not 40 <= at < 68]
        for position in random.sample(positions, 12):
            flip(tmp_path / name, position, random.randrange(8))
            status = verify(store)
            assert (status.found, status.repaired, status.unrepaired) == (1, 1, ()), position
            notes = DamageNotes(logs=False)
            assert read_snapshot(tmp_path / SNAPSHOT_FILE, notes) is not None
            assert read_checkpoint(tmp_path / "checkpoint", notes).physic_msg_timestamp > 0
            assert notes.texts == ()
        assert verify(store).found == 0


@pytest.fixture
def compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageStore]:
    """Yield a store with a compacted log of all messages."""
    monkeypatch.setattr("storage.compaction.compaction_service.PAUSE_MAX_S", 0.0)
    with filled(tmp_path) as store:
        store.write_config(TOPICS_FILE, TOPICS)
        assert store.compaction.run_once(NOW_MS + SETTLED_MS + 1)
        yield store


@pytest.mark.parametrize("at", [2, 5, 13, 25, 33, 95], ids=["size", "magic", "queue id", "offset", "position", "body"])
def test_a_damaged_record_of_a_compacted_log_is_overwritten_from_the_commit_log(compacted, at):
    log = compacted._parts.queues.get_plain("orders", 0).compacted
    before = log.log_path.read_bytes()
    chosen = [0, len(log.units) // 2, len(log.units) - 1]
    for row in chosen:
        flip(log.log_path, int(log.units[row]["position"]) + at)
    status = verify(compacted)
    detectable = at != 13
    assert (status.found, status.repaired) == ((3, 3) if detectable else (0, 0))
    assert status.unrepaired == ()
    assert not detectable or log.log_path.read_bytes() == before
    assert compacted.mender.holes == ()


def test_a_damaged_record_that_only_a_compacted_log_has_is_reported_and_its_bytes_stay(compacted):
    log = compacted._parts.queues.get_plain("orders", 0).compacted
    row = 3
    flip(log.log_path, int(log.units[row]["position"]) + 95)
    flip(compacted.log.path(0), int(log.units[row]["physical_offset"]) + 95)
    before = log.log_path.read_bytes()
    status = verify(compacted)
    [text] = status.unrepaired
    assert "the record of queue orders:0 at offset 3 is damaged" in text
    assert (status.found, status.repaired) == (2, 0)
    assert log.log_path.read_bytes() == before
