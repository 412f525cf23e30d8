"""Tests of the inspection of an open store's log: damage that appears while the store runs becomes a hole, every intact
record stays readable, and another replica's bytes repair the hole."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.protocol.store import Hole
from raymq.records.format.layout import (
    BLANK_LENGTH,
    BODY_OFFSET,
    BODY_SIZE_OFFSET,
    FLAG_OFFSET,
    QUEUE_OFFSET_OFFSET,
    SYS_FLAG_OFFSET,
    read_header,
)
from raymq.records.format.walk import is_blank, walk_records
from storage.message_store import MessageStore
from storage.scrub import inspector
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.stores import (
    LOG_FILE_BYTES,
    closed_copy,
    make_batch,
    open_store,
    placed_bodies,
)

pytestmark = pytest.mark.usefixtures("no_flushes")

COUNT = 700
BODIES = [b"%06d" % number + b"x" * (number % 300) for number in range(COUNT)]
QUEUES = 3
WHOLE = 1 << 60
ROUNDS = 12


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[MessageStore]:
    """Yield an open store with the messages BODIES in several queues and log files."""
    opened = open_store(root)
    try:
        fill(opened)
        yield opened
    finally:
        opened.close()


def fill(store: MessageStore) -> None:
    """Append the messages BODIES, one after another to each queue."""
    for number in range(0, COUNT, QUEUES):
        store.append(
            [make_batch([body], queue_id=index) for index, body in enumerate(BODIES[number : number + QUEUES])]
        )


def log_of(store: MessageStore, root: Path) -> bytes:
    files = sorted((root / "commitlog").iterdir())
    return b"".join(path.read_bytes() for path in files)[: store.log.end_offset]


def records_of(log: bytes) -> list[tuple[int, int]]:
    """Return the physical offset and the size of each record of a log that begins at offset 0."""
    found = []
    for start in range(0, len(log), LOG_FILE_BYTES):
        walked = walk_records(log[start : start + LOG_FILE_BYTES])
        edges = [*walked.starts.tolist(), walked.end]
        found += [(start + at, end - at) for at, end in pairwise(edges)]
    return found


def served(store: MessageStore) -> list[list[bytes | None]]:
    """Return the bodies of each queue as a consumer reads them; None for a damaged message."""
    return [placed_bodies(store, queue_id=queue_id) for queue_id in range(QUEUES)]


EXPECTED = [BODIES[queue_id::QUEUES] for queue_id in range(QUEUES)]


def mend_all(store: MessageStore, log: bytes) -> None:
    """Repair all holes with the intact bytes `log`, as a Replicator does with another replica's bytes."""
    for hole in store.mender.holes:
        store.mender.mend(hole.offset, log[hole.offset : hole.end_offset])


def check_damage(store: MessageStore, root: Path, log: bytes, damaged: list[tuple[int, int]]) -> None:
    """Check that the holes are exactly the `damaged` records, that only these are unreadable, and that intact bytes
    repair the store."""
    assert [(hole.offset, hole.size) for hole in merged(store.mender.holes)] == merged_places(damaged)
    lost = {
        index
        for index, record in enumerate(records_of(log))
        if any(at <= record[0] < at + size for at, size in damaged)
    }
    for queue_id, bodies in enumerate(served(store)):
        for at, body in enumerate(bodies):
            number = queue_id + QUEUES * at
            # If only the size of a record is damaged, it stays readable, because its unit has the size, too.
            assert body == BODIES[number] or (body is None and number in lost)
    mend_all(store, log)
    assert store.mender.holes == ()
    assert log_of(store, root) == log
    assert served(store) == EXPECTED
    assert store.inspector.inspect(0, WHOLE).holes == ()


def merged(holes: tuple[Hole, ...]) -> list[Hole]:
    return [Hole(offset, size, "") for offset, size in merged_places([(one.offset, one.size) for one in holes])]


def merged_places(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join places that touch within one log file."""
    joined: list[tuple[int, int]] = []
    for offset, size in sorted(places):
        if joined and sum(joined[-1]) == offset and offset % LOG_FILE_BYTES:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((offset, size))
    return joined


def chosen_record(log: bytes, where: str) -> tuple[int, int]:
    records = records_of(log)
    middle = records[len(records) // 2][0] // LOG_FILE_BYTES
    return {
        "first": records[0],
        "first file": records[7],
        "middle file": next(one for one in records if one[0] // LOG_FILE_BYTES == middle),
        "last of a file": max(one for one in records if one[0] < LOG_FILE_BYTES),
        "last file": records[-9],
        "last": records[-1],
    }[where]


@pytest.mark.parametrize("where", ["first", "first file", "middle file", "last of a file", "last file", "last"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_in_a_running_store_is_found_recorded_and_mended(store, root, field, where):
    log = log_of(store, root)
    assert store.inspector.inspect(0, WHOLE)[2:] == (COUNT, (), 0, 0)
    offset, size = chosen_record(log, where)
    flip(root, offset, field)
    # the report of a reader names just this record
    found = store.inspector.inspect(offset, offset + size)
    assert [(hole.offset, hole.size) for hole in found.holes] == [(offset, size)]
    assert found.begin_offset <= offset < offset + size <= found.end_offset
    assert store.inspector.inspect(offset, offset + 1).holes == ()
    assert store.status().holes == found.holes
    check_damage(store, root, log, [(offset, size)])


@pytest.mark.parametrize("field", FIELDS)
def test_a_range_that_begins_inside_a_damaged_record_is_widened(store, root, field):
    log = log_of(store, root)
    offset, size = records_of(log)[COUNT // 2]
    flip(root, offset, field)
    found = store.inspector.inspect(offset + size // 2, offset + size // 2 + 1)
    assert [(hole.offset, hole.size) for hole in found.holes] == [(offset, size)]
    assert offset - found.begin_offset < LOG_FILE_BYTES
    check_damage(store, root, log, [(offset, size)])


def write_bit(root: Path, at: int, bit: int) -> None:
    """Flip a bit of the log's byte at physical offset `at`, as a failing disk does under an open store."""
    with (root / "commitlog" / f"{at - at % LOG_FILE_BYTES:020}").open("r+b", buffering=0) as file:
        file.seek(at % LOG_FILE_BYTES)
        byte = file.read(1)[0]
        file.seek(at % LOG_FILE_BYTES)
        file.write(bytes([byte ^ 1 << bit]))


def has_no_checksum(log: bytes, offset: int, at: int) -> bool:
    """True if no checksum covers the byte `at` of the record at `offset`, and no redundant data shows a change."""
    header = read_header(log, offset)
    topic_at = offset + BODY_OFFSET + header.body_size
    properties_at = topic_at + 1 + log[topic_at] + 2
    within = at - offset
    in_header = FLAG_OFFSET <= within < QUEUE_OFFSET_OFFSET or SYS_FLAG_OFFSET <= within < BODY_SIZE_OFFSET
    return in_header or at >= properties_at


@pytest.mark.parametrize("sealed", [False, True])
def test_random_flips_in_a_running_store_are_found_and_mended(root, sealed):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    store = open_store(root, enabled_append_prop_crc=sealed)
    try:
        fill(store)
        log = log_of(store, root)
        records = records_of(log)
        assert len(records) == COUNT
        for _ in range(ROUNDS):
            bits = {}
            for offset, size in rng.sample(records, rng.randrange(1, 6)):
                bits[offset] = offset + rng.randrange(size)
                write_bit(root, bits[offset], rng.randrange(8))
            if rng.random() < 0.5:
                for offset in bits:
                    store.inspector.inspect(offset, offset + 1)
            store.inspector.inspect(0, WHOLE)
            for queue_id, bodies in enumerate(served(store)):
                assert all(body in (None, want) for body, want in zip(bodies, EXPECTED[queue_id], strict=True))
            mend_all(store, log)
            for offset, at in bits.items():
                left = log_of(store, root)[at] ^ log[at]
                assert not left or (not sealed and has_no_checksum(log, offset, at)), (offset, at)
                if left:
                    write_bit(root, at, left.bit_length() - 1)
            assert log_of(store, root) == log
            assert served(store) == EXPECTED
            assert store.inspector.inspect(0, WHOLE).records == COUNT
    finally:
        store.close()


@pytest.mark.parametrize("byte", range(BLANK_LENGTH))
def test_a_damaged_end_of_file_marker_is_rewritten(store, root, byte):
    log = log_of(store, root)
    last, size = chosen_record(log, "last of a file")
    assert is_blank(log, last + size)
    write_bit(root, last + size + byte, 3)
    found = store.inspector.inspect(last, LOG_FILE_BYTES + 1)
    assert (found.holes, found.rewritten_blanks) == ((), 1)
    assert log_of(store, root) == log


def test_a_wholly_damaged_end_of_a_file_becomes_one_hole_and_is_mended(store, root):
    log = log_of(store, root)
    last, size = chosen_record(log, "last of a file")
    for at in (last + 90, last + size + 1, last + size + 5):
        write_bit(root, at, 2)
    found = store.inspector.inspect(last, last + 1)
    assert [(hole.offset, hole.end_offset) for hole in found.holes] == [(last, LOG_FILE_BYTES)]
    check_damage(store, root, log, [(last, LOG_FILE_BYTES - last)])


@pytest.mark.parametrize("name", ["physical_offset", "size"])
def test_a_damaged_queue_unit_is_rewritten_from_its_record(store, root, name):
    log = log_of(store, root)
    offset, size = records_of(log)[30]
    path = root / "consumequeue" / "orders" / "0" / f"{0:020}"
    with path.open("r+b", buffering=0) as file:
        position = 30 // QUEUES * 20 + {"physical_offset": 6, "size": 10}[name]
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))
    found = store.inspector.inspect(offset, offset + size)
    assert (found.holes, found.mended_units) == ((), 1)
    assert store.inspector.inspect(0, WHOLE)[2:] == (COUNT, (), 0, 0)
    assert served(store) == EXPECTED


def test_bytes_of_a_replica_with_the_same_changed_place_do_not_mend_a_hole(store, root):
    log = log_of(store, root)
    offset, size = records_of(log)[300]
    flip(root, offset, "queue offset")
    assert len(store.inspector.inspect(offset, offset + 1).holes) == 1
    copied = log_of(store, root)[offset : offset + size]
    with pytest.raises(InvalidArgumentError, match="belongs"):
        store.mender.mend(offset, copied)
    assert len(store.mender.holes) == 1
    mend_all(store, log)
    assert log_of(store, root) == log
    assert served(store) == EXPECTED


def test_a_hole_that_was_found_while_the_store_ran_survives_a_crash_and_a_restart(store, root, tmp_path):
    log = log_of(store, root)
    damaged = [chosen_record(log, "first file"), chosen_record(log, "middle file"), chosen_record(log, "last")]
    for offset, _ in damaged:
        flip(root, offset, "body")
    store.inspector.inspect(0, WHOLE)
    places = [(hole.offset, hole.size) for hole in store.mender.holes]
    for clean in (False, True):
        copy = closed_copy(store, root, tmp_path / f"copy {clean}", clean=clean)
        with closing(open_store(copy)) as opened:
            assert [(hole.offset, hole.size) for hole in opened.mender.holes] == places
            check_damage(opened, copy, log, damaged)


def test_damage_beyond_the_limit_of_the_table_is_not_recorded(store, root, monkeypatch):
    monkeypatch.setattr(inspector, "RECORDED_HOLES_MAX", 2)
    log = log_of(store, root)
    damaged = [records_of(log)[index][0] for index in (10, 20, 30, 40)]
    for offset in damaged:
        flip(root, offset, "body")
    assert len(store.inspector.inspect(0, WHOLE).holes) == 2
    mend_all(store, log)
    assert [hole.offset for hole in store.inspector.inspect(0, WHOLE).holes] == damaged[2:]


def test_inspections_during_appends_and_retention_find_no_damage_in_intact_records(root):
    store = open_store(root, flush_disk_type="ASYNC_FLUSH")
    wrong: list[object] = []
    done = threading.Event()

    def inspect() -> None:
        while not done.is_set():
            found = store.inspector.inspect(store.log.min_offset, WHOLE)
            if found.holes or found.mended_units or found.rewritten_blanks:
                wrong.append(found)

    threads = [threading.Thread(target=inspect) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for number in range(300):
            store.append([make_batch(BODIES[number : number + 9], queue_id=number % QUEUES)])
            if number % 60 == 59:
                with store._parts.append_lock:
                    store.log.drop_files_before(store.log.end_offset - 2 * LOG_FILE_BYTES)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        store.close()
    assert not wrong


def test_a_closed_store_is_not_inspected(store):
    store.close()
    with pytest.raises(ServiceNotAvailableError):
        store.inspector.inspect(0, WHOLE)


def test_a_range_beyond_the_log_is_empty(store):
    end = store.log.end_offset
    assert store.inspector.inspect(end + 5, WHOLE)[:3] == (end + 5, end + 5, 0)
