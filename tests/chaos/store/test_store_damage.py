"""Tests of damage to a store directory, as a table of cases. Each case writes a store, damages it, opens it, and counts
the surviving messages. Then it appends more messages, reads all messages, and opens the store again."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_record, decode_records
from raymq.records.format.layout import (
    BODY_CRC_OFFSET,
    BODY_OFFSET,
    BODY_SIZE_OFFSET,
    BORN_HOST_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    FLAG_OFFSET,
    MAGIC_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    STORE_HOST_OFFSET,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_OFFSET,
    TOTAL_SIZE_OFFSET,
)
from storage.message_store import MessageStore
from storage.recovery.checkpoint import Checkpoint, write_checkpoint
from storage.recovery.snapshot import Snapshot, write_snapshot
from tests.support.stores.stores import LOG_FILE_BYTES, bodies_of, intact_bodies, killed_copy, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

COUNT = 400
BODIES = [b"%04d" % index + b"x" * 300 for index in range(COUNT)]
LAST_SIZE = len(make_batch(BODIES[-1:]).records)
MORE = [b"more %d" % index for index in range(250)]


def last_log_file(root: Path) -> Path:
    """Return the path of the log file that contains the last record."""
    return [path for path in sorted((root / "commitlog").iterdir()) if any(path.read_bytes())][-1]


def used_bytes(path: Path) -> int:
    return len(path.read_bytes().rstrip(b"\0"))


def overwrite(path: Path, position: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[position : position + len(data)] = data
    path.write_bytes(content)


def zero_tail(length: int) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = last_log_file(root)
        overwrite(path, used_bytes(path) - length, bytes(length))

    return damage


def flip(back: int) -> Callable[[Path], None]:
    """Return a function that flips a bit of the byte that is `back` bytes before the end of the log."""

    def damage(root: Path) -> None:
        path = last_log_file(root)
        position = used_bytes(path) - back
        overwrite(path, position, bytes([path.read_bytes()[position] ^ 0x10]))

    return damage


def delete(name: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    return damage


def truncate(name: str, size: int) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        with (root / name).open("ab") as file:
            file.truncate(size)

    return damage


def write_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_text(text) and None


def zero_units(name: str, first: int, count: int) -> Callable[[Path], None]:
    return lambda root: overwrite(root / "consumequeue" / name, first * 20, bytes(count * 20))


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        for one in damages:
            one(root)

    return damage


def swap(one: str, other: str) -> Callable[[Path], None]:
    """Return a function that swaps the names of two files or directories."""

    def damage(root: Path) -> None:
        (root / one).rename(root / "swapping")
        (root / other).rename(root / one)
        (root / "swapping").rename(root / other)

    return damage


def checkpoint(data: bytes) -> Callable[[Path], None]:
    """Return a function that overwrites the checkpoint file with `data`, followed by zeros."""
    return lambda root: (root / "checkpoint").write_bytes(data.ljust(4096, b"\0")) and None


def put_into(directory: str, name: str, data: bytes) -> Callable[[Path], None]:
    """Return a function that replaces a directory by a new directory, which has one file `name` with the content
    `data`."""

    def damage(root: Path) -> None:
        shutil.rmtree(root / directory, ignore_errors=True)
        (root / directory).mkdir()
        (root / directory / name).write_bytes(data)

    return damage


QUEUE = "consumequeue/orders/0"
NO_SNAPSHOT = delete("dedup")

DAMAGES = {
    "nothing": (lambda root: None, COUNT),
    "the last record is zero": (zero_tail(LAST_SIZE), COUNT - 1),
    "the last record and half of the one before are zero": (zero_tail(LAST_SIZE * 3 // 2), COUNT - 2),
    "a bit of the last body is flipped": (flip(120), COUNT - 1),
    "a bit of the last record's magic is flipped": (flip(LAST_SIZE - 4), COUNT - 1),
    "a bit of the last record's size is flipped": (flip(LAST_SIZE), COUNT - 1),
    "the queue's directory is deleted": (delete(QUEUE), COUNT),
    "the queue's directory is deleted, and there is no snapshot": (both(delete(QUEUE), NO_SNAPSHOT), COUNT),
    "one of two queues is deleted": (delete("consumequeue/orders/1"), COUNT),
    "all queues are deleted": (delete("consumequeue"), COUNT),
    "the queue's last file is deleted": (delete(QUEUE + "/00000000000000006000"), COUNT),
    "the other queue's only file is deleted": (delete("consumequeue/orders/1/00000000000000000000"), COUNT),
    "the other queue's last unit is zero": (zero_units("orders/1/00000000000000000000", 2, 1), COUNT),
    "the queue's last file is empty": (truncate(QUEUE + "/00000000000000006000", 0), COUNT),
    "the queue's first two files are swapped": (
        swap(QUEUE + "/00000000000000000000", QUEUE + "/00000000000000002000"),
        COUNT,
    ),
    "the queue's last two files are swapped": (
        swap(QUEUE + "/00000000000000004000", QUEUE + "/00000000000000006000"),
        COUNT,
    ),
    "the queue's first and last files are swapped, and there is no snapshot": (
        both(swap(QUEUE + "/00000000000000000000", QUEUE + "/00000000000000006000"), NO_SNAPSHOT),
        COUNT,
    ),
    "two queues' first files are swapped": (
        swap(QUEUE + "/00000000000000000000", "consumequeue/orders/1/00000000000000000000"),
        COUNT,
    ),
    "two queues' last files are swapped, and there is no snapshot": (
        both(swap(QUEUE + "/00000000000000006000", "consumequeue/orders/1/00000000000000000000"), NO_SNAPSHOT),
        COUNT,
    ),
    "the queue's first two files are swapped, and an abort file was left": (
        both(swap(QUEUE + "/00000000000000000000", QUEUE + "/00000000000000002000"), write_text("abort", "1")),
        COUNT,
    ),
    "the queue's last two files are swapped, and an abort file was left": (
        both(swap(QUEUE + "/00000000000000004000", QUEUE + "/00000000000000006000"), write_text("abort", "1")),
        COUNT,
    ),
    "two queues are swapped, and an abort file was left": (
        both(swap(QUEUE, "consumequeue/orders/1"), write_text("abort", "1")),
        COUNT,
    ),
    "two queues are swapped": (swap(QUEUE, "consumequeue/orders/1"), COUNT),
    "some of the queue's last units are zero": (zero_units("orders/0/00000000000000006000", 60, 30), COUNT),
    "the checkpoint is cut short": (truncate("checkpoint", 17), COUNT),
    "there is no checkpoint and no snapshot": (both(delete("checkpoint"), NO_SNAPSHOT), COUNT),
    "there is no snapshot": (NO_SNAPSHOT, COUNT),
    "the snapshot is empty": (write_text("dedup", ""), COUNT),
    "the snapshot's CRC is wrong": (write_text("dedup", '00000000\n{"end": 12, "producers": []}'), COUNT),
    "the snapshot is another log's": (
        lambda root: write_snapshot(root / "dedup", Snapshot(9000, 8000, 5000, 1, [], [], {})),
        COUNT,
    ),
    "the snapshot is of a log that was longer": (
        lambda root: write_snapshot(root / "dedup", Snapshot(10**9, 10**9 - 500, 10**9 - 500, 1, [], [], {})),
        COUNT,
    ),
    "a record's queue offset is absurd": (
        lambda root: overwrite(last_log_file(root), used_bytes(last_log_file(root)) - LAST_SIZE + 20, b"\x10"),
        COUNT - 1,
    ),
    "a record's queue id is negative": (
        lambda root: overwrite(last_log_file(root), used_bytes(last_log_file(root)) - LAST_SIZE + 12, b"\x80"),
        COUNT - 1,
    ),
    "a record's topic leads out of the directory": (
        lambda root: (
            last_log_file(root).write_bytes(b"../../".join(last_log_file(root).read_bytes().rpartition(b"orders")[::2]))
            and None
        ),
        COUNT - 1,
    ),
    "an abort file was left": (write_text("abort", "1"), COUNT),
    "an allocation was left half done": (write_text("commitlog.new", "x"), COUNT),
    "the checkpoint is stale": (checkpoint(b""), COUNT),
    "the checkpoint is stale, and there is no snapshot": (
        both(checkpoint(b""), NO_SNAPSHOT),
        COUNT,
    ),
    "the checkpoint is in the future": (checkpoint(b"\x7f" * 24), COUNT),
    "the checkpoint is garbage, and there is no snapshot": (
        both(checkpoint(b"\xff" * 4096), NO_SNAPSHOT),
        COUNT,
    ),
    "the snapshot is garbage": (write_text("dedup", "\0garbage\n" * 9), COUNT),
    "the snapshot's CRC is right and it holds something else": (
        write_text("dedup", f"{crc32(b'[]'):08x}\n[]"),
        COUNT,
    ),
    "temporary files were left": (
        both(
            write_text("consumequeue.new", "x" * 500),
            write_text("dedup.new", "{"),
            write_text("config/topics.json.new", "{"),
        ),
        COUNT,
    ),
    "the index is deleted": (delete("index"), COUNT),
    "an index file is garbage": (put_into("index", "20260101000000000", b"garbage"), COUNT),
    "an index file has a name that is no time": (put_into("index", "notes.txt", b"garbage"), COUNT),
    "a preallocated log file was left": (
        lambda root: (
            (root / "commitlog" / f"{len(list((root / 'commitlog').iterdir())) * LOG_FILE_BYTES:020d}").write_bytes(
                bytes(LOG_FILE_BYTES)
            )
            and None
        ),
        COUNT,
    ),
    "the log goes on behind a hole": (
        lambda root: (
            (root / "commitlog" / f"{len(list((root / 'commitlog').iterdir())) * LOG_FILE_BYTES:020d}").write_bytes(
                (root / "commitlog" / "00000000000000000000").read_bytes()
            )
            and None
        ),
        COUNT,
    ),
}


def written_store(tmp_path: Path, *, stopped: bool, **settings: Any) -> Path:
    """Write a store with 400 messages in queue 0, in three log files and four queue files, and a few messages in queue
    1. `stopped`: close the store cleanly, otherwise copy it as after a crash. Returns the store's directory."""
    store = open_store(tmp_path / "original", clock_ms=count(1_700_000_000_000).__next__, **settings)
    store.append([make_batch([b"other"] * 3, queue_id=1)])
    for first in range(0, COUNT, 20):
        store.append([make_batch(BODIES[first : first + 20])])
    root = tmp_path / "store"
    if stopped:
        store.close()
        return (tmp_path / "original").rename(root)
    killed_copy(tmp_path / "original", root)
    store.close()
    return root


def check_survivors(root: Path, survivors: int) -> None:
    """Open the damaged store. Check that it has `survivors` messages, that more messages can be appended, and that all
    messages survive when the store is opened again."""
    store = open_store(root)
    assert bodies_of(store) == BODIES[:survivors]
    assert bodies_of(store, queue_id=1) == [b"other"] * 3
    [result] = store.append([make_batch(MORE)])
    assert result.queue_offset == survivors
    assert bodies_of(store) == BODIES[:survivors] + MORE
    killed_copy(root, root.with_name("killed"))
    store.close()
    for again in (root, root.with_name("killed")):
        store = open_store(again)
        assert bodies_of(store) == BODIES[:survivors] + MORE
        assert bodies_of(store, queue_id=1) == [b"other"] * 3
        assert store.status().cut_bytes == 0
        store.close()


@pytest.mark.parametrize("stopped", [True, False], ids=["after a clean stop", "after a crash"])
@pytest.mark.parametrize("name", DAMAGES)
def test_intact_records_survive_damage(tmp_path, name, stopped):
    damage, survivors = DAMAGES[name]
    root = written_store(tmp_path, stopped=stopped)
    damage(root)
    check_survivors(root, survivors)


@pytest.mark.parametrize("stopped", [True, False], ids=["after a clean stop", "after a crash"])
def test_a_tail_torn_at_any_byte_of_the_last_record_loses_that_record_at_most(tmp_path, stopped):
    """The last record is truncated at any byte. The next opening loses at most this record. A record that is truncated
    within its properties may be valid for RocketMQ: it accepts NUL at the end of a record's last property.

    No power cut truncates a record in the middle of a sector. After a clean stop no record can be truncated.
    """
    original = open_store(tmp_path / "original")
    kept = [b"kept" * 55] * 3
    original.append([make_batch(kept)])
    record = make_batch([b"torn away"], tags="T")
    start = original.log.end_offset
    original.append([record])
    assert start // 512 == (original.log.end_offset - 1) // 512
    killed_copy(tmp_path / "original", tmp_path / "killed")
    original.close()
    source = tmp_path / ("original" if stopped else "killed")
    properties = record.records[BODY_OFFSET + len(b"torn away") + 1 + len("orders") + 2 :]
    for missing in range(1, len(record.records) + 1):
        left = properties[:-missing].rpartition(b"\x02")[2]
        whole = missing <= len(properties) and (stopped or b"\x01" in left)
        survivors = [*kept, b"torn away"] if whole else kept
        root = Path(shutil.copytree(source, tmp_path / "store"))
        zero_tail(missing)(root)
        store = open_store(root)
        assert bodies_of(store) == survivors, f"{missing} bytes missing"
        assert store.status().cut_bytes <= len(record.records) - missing
        store.append([make_batch([b"next"])])
        assert bodies_of(store) == [*survivors, b"next"], f"{missing} bytes missing"
        store.close()
        shutil.rmtree(root)


LAYOUT = {
    "total_size": (TOTAL_SIZE_OFFSET, False),
    "magic": (MAGIC_OFFSET, False),
    "body_crc": (BODY_CRC_OFFSET, False),
    "flag": (FLAG_OFFSET + 3, True),
    "born_timestamp": (BORN_TIMESTAMP_OFFSET + 7, True),
    "born_host": (BORN_HOST_OFFSET, True),
    "store_timestamp": (STORE_TIMESTAMP_OFFSET + 7, True),
    "store_host": (STORE_HOST_OFFSET, True),
    "reconsume_times": (STORE_HOST_OFFSET + 8 + 3, True),
    "prepared_transaction_offset": (BODY_SIZE_OFFSET - 1, True),
    "body_size": (BODY_SIZE_OFFSET + 3, False),
    "body": (BODY_OFFSET, False),
    "topic_size": (BODY_OFFSET + len(BODIES[-1]), False),
    "properties_size": (BODY_OFFSET + len(BODIES[-1]) + 1 + len("orders") + 1, False),
    "properties": (LAST_SIZE - 2, True),
}
"""The test flips a bit in a header field of the last record. For each field: the position of the changed byte, and True
if RocketMQ's checks accept the changed record.

An accepted change affects only the header field, neither the record's position nor its body. A property CRC would
detect it.
"""


@pytest.mark.parametrize("stopped", [True, False], ids=["after a clean stop", "after a crash"])
@pytest.mark.parametrize("field", LAYOUT)
def test_a_flipped_bit_loses_the_last_record_or_nothing(tmp_path, field, stopped):
    position, passes = LAYOUT[field]
    root = written_store(tmp_path, stopped=stopped)
    flip(LAST_SIZE - position)(root)
    check_survivors(root, COUNT if passes else COUNT - 1)


@pytest.mark.parametrize("stopped", [True, False], ids=["after a clean stop", "after a crash"])
@pytest.mark.parametrize("position", [QUEUE_ID_OFFSET + 3, QUEUE_OFFSET_OFFSET + 7, SYS_FLAG_OFFSET + 3])
def test_a_flipped_bit_in_a_records_place_loses_no_other_record(tmp_path, position, stopped):
    root = written_store(tmp_path, stopped=stopped)
    flip(LAST_SIZE - position)(root)
    for _ in range(2):
        store = open_store(root)
        records = [unit_record(store, index) for index in range(COUNT - 1)]
        assert [decode_record(record).body for record in records] == BODIES[:-1]
        store.append([make_batch(MORE[:1], queue_id=2)])
        store.close()


def unit_record(store: MessageStore, queue_offset: int) -> bytes:
    [result] = store.fetch([FetchRequest("orders", 0, queue_offset, 1)], max_bytes=1, wait_s=0)
    return result.records


@pytest.mark.parametrize("page", range(0, 16, 3))
def test_a_zero_page_truncates_the_log_there_and_keeps_every_byte_before_it(tmp_path, page):
    root = written_store(tmp_path, stopped=False)
    path = last_log_file(root)
    before = path.read_bytes()
    if page * 4096 >= used_bytes(path):
        return
    overwrite(path, page * 4096, bytes(4096))
    store = open_store(root)
    survivors = len(bodies_of(store))
    assert bodies_of(store) == BODIES[:survivors]
    assert store.status().max_physical_offset <= int(path.name) + page * 4096
    end = store.status().max_physical_offset - int(path.name)
    store.append([make_batch(MORE)])
    store.close()
    assert path.read_bytes()[:end] == before[:end]
    store = open_store(root)
    assert bodies_of(store) == BODIES[:survivors] + MORE
    store.close()


def test_swapped_log_files_serve_no_message_twice_and_the_store_takes_more(tmp_path):
    root = written_store(tmp_path, stopped=False)
    first, second = sorted((root / "commitlog").iterdir())[:2]
    first.rename(root / "swapping")
    second.rename(first)
    (root / "swapping").rename(second)
    for name in ("consumequeue", "dedup", "checkpoint"):
        delete(name)(root)
    store = open_store(root)
    assert [hole.offset for hole in store.mender.holes] == [0, LOG_FILE_BYTES]
    bodies = intact_bodies(store)
    found = [body for body in bodies if body is not None]
    assert len(set(found)) == len(found) > 100
    assert set(found) <= set(BODIES)
    store.append([make_batch(MORE)])
    store.close()
    store = open_store(root)
    assert intact_bodies(store) == bodies + MORE
    store.close()


@pytest.mark.parametrize("damage", ["a middle file is missing", "a file has the wrong size"])
def test_after_a_crash_a_queue_with_a_gap_is_rebuilt_from_the_log(tmp_path, damage):
    root = written_store(tmp_path, stopped=False)
    path = QUEUE + "/00000000000000002000"
    (delete(path) if "missing" in damage else truncate(path, 40))(root)
    check_survivors(root, COUNT)


def test_after_a_crash_a_queue_without_its_first_file_is_rebuilt_from_the_log(tmp_path):
    root = written_store(tmp_path, stopped=False)
    delete(QUEUE + "/00000000000000000000")(root)
    check_survivors(root, COUNT)


@pytest.mark.parametrize("stopped", [True, False], ids=["after a clean stop", "after a crash"])
def test_a_topic_whose_deletion_was_cut_short_is_deleted_by_the_next_open(tmp_path, stopped):
    """A crash interrupts the deletion of a topic: the record of the deletion is on disk, but the topic's queues still
    exist. The next opening deletes all these queues."""
    root = written_store(tmp_path, stopped=stopped)
    (root / "config").mkdir(exist_ok=True)
    write_text("config/deletedTopics.json", '{"orders": 1000000}')(root)
    for _ in range(2):
        store = open_store(root)
        assert store.topics.queue_ids() == {}
        store.close()
    store = open_store(root)
    [result] = store.append([make_batch([b"anew"])])
    assert result.queue_offset == 0
    store.close()
    store = open_store(root)
    assert bodies_of(store) == [b"anew"]
    store.close()


def test_opening_changes_no_byte_of_an_intact_store(tmp_path):
    root = written_store(tmp_path, stopped=False)
    log = {path: path.read_bytes() for path in (root / "commitlog").iterdir()}
    units = {path: path.read_bytes() for path in (root / QUEUE).iterdir()}
    open_store(root).close()
    for path, data in {**log, **units}.items():
        if any(data):
            assert path.read_bytes() == data


REFUSED = {
    "a log file has the wrong size": (truncate("commitlog/00000000000000065536", 1000), "has 1000 bytes"),
    "the last log file was cut": (truncate("commitlog/00000000000000131072", 50_000), "has 50000 bytes"),
    "a middle log file is missing": (delete("commitlog/00000000000000065536"), "00000000000000065536 is missing"),
    "a stranger is in the log": (write_text("commitlog/notes.txt", "x"), "does not belong"),
    "a queue file has the wrong size": (
        truncate(QUEUE + "/00000000000000002000", 40),
        "rebuilt from the commit log",
    ),
    "a middle queue file is missing": (delete(QUEUE + "/00000000000000002000"), "rebuilt from the commit log"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_opening_refuses_ambiguous_damage_and_changes_nothing(tmp_path, name):
    damage, text = REFUSED[name]
    root = written_store(tmp_path, stopped=True)
    damage(root)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(StoreCorruptError, match=text):
        open_store(root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "lock"} == before


@pytest.mark.parametrize("stopped", [True, False], ids=["after a clean stop", "after a crash"])
@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (0, -1), (-2, -1)])
def test_swapped_index_files_are_rebuilt_and_every_key_finds_its_message(tmp_path, one, other, stopped):
    store = open_store(tmp_path / "original", max_index_num=100)
    for index in range(COUNT):
        store.append([make_batch([BODIES[index]], extra_properties={"KEYS": f"k{index}"})])
    assert store.queries.by_key("orders", "none").complete
    root = killed_copy(tmp_path / "original", tmp_path / "killed")
    store.close()
    root = tmp_path / "original" if stopped else root
    names = [f"index/{path.name}" for path in sorted((root / "index").iterdir())]
    assert len(names) > 5
    swap(names[one], names[other])(root)
    for _ in range(2):
        store = open_store(root, max_index_num=100)
        for index in range(0, COUNT, 7):
            found = store.queries.by_key("orders", f"k{index}")
            assert found.complete
            assert [message.body for message in decode_records(found.records)] == [BODIES[index]], index
        store.close()


def test_an_empty_last_log_file_is_dropped(tmp_path):
    root = written_store(tmp_path, stopped=True)
    (root / "commitlog" / f"{len(list((root / 'commitlog').iterdir())) * LOG_FILE_BYTES:020d}").write_bytes(b"")
    check_survivors(root, COUNT)


def test_queues_without_a_log_are_deleted(tmp_path):
    """Source: spec §5. Without commit-log files, the entries (units) of the consume queues point to no record, so the
    queues are deleted."""
    root = written_store(tmp_path, stopped=True)
    shutil.rmtree(root / "commitlog")
    store = open_store(root)
    assert store.topics.queue_ids() == {}
    [result] = store.append([make_batch([b"first"])])
    assert (result.queue_offset, result.physical_offset) == (0, 0)
    store.close()


MIDDLE = 25
"""Number of records that follow the damaged record. It is chosen so that the damaged record belongs to the last append
but one."""
IN_THE_MIDDLE = {
    **{
        field: flip(MIDDLE * LAST_SIZE + LAST_SIZE - position)
        for field, (position, passes) in LAYOUT.items()
        if not passes
    },
    "a zero head": lambda root: overwrite(
        last_log_file(root), used_bytes(last_log_file(root)) - (MIDDLE + 1) * LAST_SIZE, bytes(8)
    ),
    "a zero record": lambda root: overwrite(
        last_log_file(root), used_bytes(last_log_file(root)) - (MIDDLE + 1) * LAST_SIZE, bytes(LAST_SIZE)
    ),
    "garbage": lambda root: overwrite(
        last_log_file(root), used_bytes(last_log_file(root)) - (MIDDLE + 1) * LAST_SIZE, b"\xaa" * LAST_SIZE
    ),
}
"""Maps each kind of damage to a function that damages a record in the middle of the log."""


@pytest.mark.parametrize("end", ["a clean stop", "a crash", "a crash that lost the queue"])
@pytest.mark.parametrize("name", IN_THE_MIDDLE)
def test_a_damaged_record_in_the_middle_loses_no_other_record(tmp_path, name, end):
    """A record in the middle of the log is damaged. It keeps its queue offset, its bytes and its place in the log. The
    next opening of the store and all later openings report the damage."""
    root = written_store(tmp_path, stopped=end == "a clean stop")
    if end != "a clean stop":
        # Write a checkpoint which states that the whole log was flushed, but no queue.
        write_checkpoint(root / "checkpoint", Checkpoint(2**62, 0))
    if end == "a crash that lost the queue":
        both(delete(QUEUE), NO_SNAPSHOT)(root)
    IN_THE_MIDDLE[name](root)
    offset = int(last_log_file(root).name) + used_bytes(last_log_file(root)) - (MIDDLE + 1) * LAST_SIZE
    before = last_log_file(root).read_bytes()
    damaged = COUNT - 1 - MIDDLE
    # The consume-queue entry (unit) also has the record's size. So a record whose own size field is damaged can still
    # be read, and its checksum is correct.
    left = BODIES[damaged] if name in ("total_size", "a zero head") else None
    expected: list[bytes | None] = [*BODIES[:damaged], left, *BODIES[damaged + 1 :]]
    for _ in range(2):
        store = open_store(root)
        assert intact_bodies(store) == expected
        assert bodies_of(store, queue_id=1) == [b"other"] * 3
        status = store.status()
        assert [(hole.offset, hole.size) for hole in status.holes] == [(offset, LAST_SIZE)]
        assert status.cut_bytes == 0
        assert store.append([make_batch(MORE[:1])])[0].queue_offset == len(expected)
        expected += MORE[:1]
        killed_copy(root, root.with_name("killed"))
        store.close()
        again = open_store(root.with_name("killed"))
        assert intact_bodies(again) == expected
        assert [(hole.offset, hole.size) for hole in again.mender.holes] == [(offset, LAST_SIZE)]
        again.close()
        shutil.rmtree(root.with_name("killed"))
    path = next(path for path in (root / "commitlog").iterdir() if int(path.name) == offset - offset % LOG_FILE_BYTES)
    assert path.read_bytes()[: len(before.rstrip(b"\0"))] == before.rstrip(b"\0")


UNIT_BYTES = 20


@pytest.mark.parametrize("stopped", [True, False], ids=["after a clean stop", "after a crash"])
def test_a_bit_flipped_in_a_queue_unit_hides_no_message(tmp_path, stopped):
    """One bit is flipped in each byte of a consume-queue entry (unit), in the first file, a middle file and the last
    file. All messages remain readable."""
    written_store(tmp_path, stopped=stopped).rename(tmp_path / "source")
    seed = random.randrange(1000)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for byte in range(UNIT_BYTES):
        root = Path(shutil.copytree(tmp_path / "source", tmp_path / "store"))
        for file in (0, 1, 3):
            path = root / QUEUE / f"{file * 2000:020d}"
            position = dice.randrange(100) * UNIT_BYTES + byte
            overwrite(path, position, bytes([path.read_bytes()[position] ^ 1 << dice.randrange(8)]))
        for _ in range(2):
            store = open_store(root)
            assert intact_bodies(store) == BODIES, byte
            assert bodies_of(store, queue_id=1) == [b"other"] * 3
            assert store.mender.holes == ()
            store.close()
        shutil.rmtree(root)


def test_a_hole_is_mended_with_the_bytes_of_another_replica(tmp_path):
    root = written_store(tmp_path, stopped=True)
    good = last_log_file(root).read_bytes()
    flip(MIDDLE * LAST_SIZE + 120)(root)
    store = open_store(root)
    [hole] = store.mender.holes
    position = hole.offset % LOG_FILE_BYTES
    record = good[position : position + hole.size]
    for wrong in (record[:-1], record + bytes(1), bytes(hole.size), record[:100] + b"?" + record[101:]):
        with pytest.raises(InvalidArgumentError):
            store.mender.mend(hole.offset, wrong)
    with pytest.raises(InvalidArgumentError, match="no damaged range"):
        store.mender.mend(hole.offset + 1, record)
    assert store.mender.holes == (hole,)
    store.mender.mend(hole.offset, record)
    assert (store.mender.holes, bodies_of(store)) == ((), BODIES)
    killed_copy(root, root.with_name("killed"))
    store.close()
    for again in (root, root.with_name("killed")):
        store = open_store(again)
        assert (store.mender.holes, bodies_of(store)) == ((), BODIES)
        store.close()


def test_the_log_reports_truncated_records(tmp_path, caplog):
    root = written_store(tmp_path, stopped=True)
    flip(120)(root)
    with caplog.at_level(logging.INFO):
        store = open_store(root)
    [record] = [record for record in caplog.records if "bytes cut" in record.message]
    assert record.levelno == logging.WARNING
    assert f"{store.status().cut_bytes} bytes cut after physical offset" in record.message
    assert "1 consume-queue entries after the log's end removed" in record.message
    store.close()


def test_truncated_records_do_not_return(tmp_path):
    """If recovery truncates the last record, a later append does not make the truncated record valid again. Therefore
    recovery also erases its bytes. RocketMQ leaves them in the file, where they would follow a new record of equal
    length."""
    root = written_store(tmp_path, stopped=True)
    zero_tail(LAST_SIZE - 50)(root)
    store = open_store(root)
    assert 0 < store.status().cut_bytes <= 50
    store.append([make_batch([b"y"])])
    killed_copy(root, tmp_path / "killed")
    store.close()
    for path in (root, tmp_path / "killed"):
        store = open_store(path)
        assert bodies_of(store) == [*BODIES[: COUNT - 1], b"y"]
        store.close()


def test_truncated_queue_units_do_not_return(tmp_path):
    """Recovery truncates entries (units) of a consume queue. New records of another queue then fill the part of the log
    to which the truncated entries pointed. The truncated entries must stay deleted."""
    root = written_store(tmp_path, stopped=True)
    zero_tail(5 * LAST_SIZE)(root)
    store = open_store(root)
    store.append([make_batch([b"other"] * 50, queue_id=1)])
    killed_copy(root, tmp_path / "killed")
    store.close()
    for path in (root, tmp_path / "killed"):
        store = open_store(path)
        assert bodies_of(store) == BODIES[: COUNT - 5]
        assert bodies_of(store, queue_id=1) == [b"other"] * 53
        store.close()


def test_lost_records_in_the_middle_do_not_change_later_offsets(tmp_path, caplog):
    """If all consume queues and the log's first file are lost, the remaining messages still have their old queue
    offsets after recovery."""
    root = written_store(tmp_path, stopped=True)
    shutil.rmtree(root / "consumequeue")
    (root / "commitlog" / "00000000000000000000").unlink()
    store = open_store(root)
    bounds = store.queues.bounds("orders", 0)
    assert bounds.max_offset == COUNT
    assert 100 < bounds.min_offset < 200
    assert bodies_of(store) == BODIES[bounds.min_offset :]
    store.close()
