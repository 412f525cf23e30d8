"""Tests of flipped bits: one bit is flipped in every file of a closed store. No intact message is lost, no changed
message is returned to a reader, and all damage is reported.

RocketMQ's CRC covers only the body of a record. With the property CRC (enabled_append_prop_crc) a flipped bit of any
field is reported. Without the property CRC, the tests cover only fields that readers compare with other data. Flipped
bits of all other fields are then not detected: the flag, the sys flag of a record that seems to be uncompressed, born
and store times, hosts, reconsume times, the prepared transaction offset, and properties. Recovery also detects a
changed queue id, queue offset or topic in the part of the log that it scans. This part is the end of the log after a
crash, and also the newest file if it has changed (tests/property/store/test_changed_places.py).
"""

from __future__ import annotations

import random
import shutil
from itertools import count
from pathlib import Path

import pytest

from raymq.client.consumer.pull_once import read_fetched
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.crc import PROPERTY_CRC_LENGTH
from raymq.records.format.decode import decode_records
from raymq.records.format.layout import (
    BODY_CRC_OFFSET,
    BODY_OFFSET,
    BODY_SIZE_OFFSET,
    BORN_HOST_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    FLAG_OFFSET,
    MAGIC_OFFSET,
    PHYSICAL_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    RECONSUME_TIMES_OFFSET,
    STORE_HOST_OFFSET,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_OFFSET,
    TOTAL_SIZE_OFFSET,
)
from storage.files.damage import DamageNotes
from storage.message_store import MessageStore
from storage.recovery.snapshot import read_snapshot
from tests.chaos.store.test_store_damage import (
    BODIES,
    COUNT,
    LAST_SIZE,
    LAYOUT,
    last_log_file,
    overwrite,
    written_store,
)
from tests.support.stores.stores import bodies_of, closed_copy, intact_bodies, killed_copy, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

FIELDS = {
    **{field: position for field, (position, passes) in LAYOUT.items() if not passes},
    "physical_offset": PHYSICAL_OFFSET_OFFSET + 7,
    "queue_offset": QUEUE_OFFSET_OFFSET,
}
TOPIC_AT = BODY_OFFSET + len(BODIES[0]) + 1
PROPERTIES_AT = TOPIC_AT + len("orders") + 2
ENDS = pytest.mark.parametrize("stopped", [True, False], ids=["after a clean stop", "after a crash"])


def flip(path: Path, position: int, bit: int = 4) -> None:
    overwrite(path, position, bytes([path.read_bytes()[position] ^ 1 << bit]))


@ENDS
@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_of_a_record_is_reported_or_the_sent_message_is_read(tmp_path, field, stopped):
    root = written_store(tmp_path, stopped=stopped)
    damaged = []
    for path in sorted((root / "commitlog").iterdir()):
        data = path.read_bytes()
        held = [index for index in range(COUNT) if BODIES[index] in data]
        if held:
            damaged.append(held[len(held) // 2])
            flip(path, data.find(BODIES[damaged[-1]]) - BODY_OFFSET + FIELDS[field])
    assert len(damaged) == 3
    for _ in range(2):
        store = open_store(root)
        found = intact_bodies(store)
        assert [found[index] for index in range(COUNT) if index not in damaged] == [
            body for index, body in enumerate(BODIES) if index not in damaged
        ]
        # A reader of a damaged record gets an error or the original message. It gets the original message only if the
        # damage is in the record's size or magic, because the consume-queue entry (unit) also contains both values.
        assert all(found[index] in (None, BODIES[index]) for index in damaged)
        assert field in ("total_size", "magic") or [found[index] for index in damaged] == [None] * 3
        assert bodies_of(store, queue_id=1) == [b"other"] * 3
        assert store.status().cut_bytes == 0
        store.close()


SPANS = {
    "total_size": (TOTAL_SIZE_OFFSET, 4),
    "magic": (MAGIC_OFFSET, 4),
    "body_crc": (BODY_CRC_OFFSET, 4),
    "queue_id": (QUEUE_ID_OFFSET, 4),
    "flag": (FLAG_OFFSET, 4),
    "queue_offset": (QUEUE_OFFSET_OFFSET, 8),
    "physical_offset": (PHYSICAL_OFFSET_OFFSET, 8),
    "sys_flag": (SYS_FLAG_OFFSET, 4),
    "born_timestamp": (BORN_TIMESTAMP_OFFSET, 8),
    "born_host": (BORN_HOST_OFFSET, 8),
    "store_timestamp": (STORE_TIMESTAMP_OFFSET, 8),
    "store_host": (STORE_HOST_OFFSET, 8),
    "reconsume_times": (RECONSUME_TIMES_OFFSET, 4),
    "prepared_transaction_offset": (BODY_SIZE_OFFSET - 8, 8),
    "body_size": (BODY_SIZE_OFFSET, 4),
    "body": (BODY_OFFSET, len(BODIES[0])),
    "topic_size": (TOPIC_AT - 1, 1),
    "topic": (TOPIC_AT, len("orders")),
    "properties_size": (PROPERTIES_AT - 2, 2),
    "property": (PROPERTIES_AT, LAST_SIZE - PROPERTIES_AT),
    "property_crc": (LAST_SIZE, PROPERTY_CRC_LENGTH),
}
"""By field of a record with a property CRC, the field's position and length in bytes."""


def messages_of(store: MessageStore) -> list[MessageExt]:
    """Return every message of queue 0, as a consumer reads it."""
    messages: list[MessageExt] = []
    while len(messages) < COUNT:
        request = FetchRequest("orders", 0, len(messages), COUNT)
        [result] = store.fetch([request], max_bytes=1 << 24, wait_s=0)
        found = read_fetched(result.records, MessageQueue("orders", "a", 0), len(messages), result.next_offset)
        messages += [one.message for one in found]
    return messages


def all_of(message: MessageExt) -> list[object]:
    """Return the values of all fields of a message, for comparison."""
    names = "queue body tags keys properties flag born_timestamp_ms store_timestamp_ms born_host store_host message_id"
    rest = "queue_offset physical_offset offset_message_id reconsume_times sys_flag system_properties"
    return [getattr(message, name) for name in f"{names} {rest}".split()]


@ENDS
@pytest.mark.parametrize("field", SPANS)
def test_with_a_property_crc_a_flipped_bit_of_any_field_is_reported(tmp_path, field, stopped):
    """One bit is flipped in the first log file, a middle file and the last file. No intact message is lost, and a
    reader gets an error instead of a changed message."""
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    root = written_store(tmp_path, stopped=stopped, enabled_append_prop_crc=True)
    store = open_store(Path(shutil.copytree(root, tmp_path / "before")))
    before = [all_of(message) for message in messages_of(store)]
    store.close()
    damaged = []
    paths = [path for path in sorted((root / "commitlog").iterdir()) if BODIES[0][4:] in path.read_bytes()]
    for path in (paths[0], paths[1], paths[-1]):
        data = path.read_bytes()
        damaged.append(dice.choice([index for index in range(COUNT - 1) if BODIES[index] in data]))
        position, length = SPANS[field]
        at = data.find(BODIES[damaged[-1]]) - BODY_OFFSET + position + dice.randrange(length)
        flip(path, at, dice.randrange(8))
    assert len(set(damaged)) == 3
    for _ in range(2):
        store = open_store(root)
        found = messages_of(store)
        for index, message in enumerate(found):
            if message.body_error is None:
                assert all_of(message) == before[index], index
                # A message without an error is undamaged, unless the damage is in its record's size or magic. These two
                # values are also in the consume-queue entry (unit), so the message can be read.
                assert index not in damaged or field in ("total_size", "magic")
            else:
                assert (index in damaged, message.queue_offset) == (True, index)
        assert bodies_of(store, queue_id=1) == [b"other"] * 3
        assert store.status().cut_bytes == 0
        store.close()


@ENDS
@pytest.mark.parametrize("field", ["queue_id", "queue_offset", "physical_offset", "topic"])
def test_without_a_property_crc_a_misplaced_record_is_reported(tmp_path, field, stopped):
    """One bit is flipped in each log file, in a field whose value is also known from the queue or from the record's
    place in the log.

    The record keeps its offset in its own queue, and no other queue gets the record. After a crash, recovery reads the
    whole log. After a clean stop, recovery reads only the last log file, because the snapshot is missing.
    """
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    root = written_store(tmp_path, stopped=stopped)
    (root / "dedup").unlink(missing_ok=True)
    damaged, offsets = [], []
    paths = [path for path in sorted((root / "commitlog").iterdir()) if BODIES[0][4:] in path.read_bytes()]
    for path in paths:
        data = path.read_bytes()
        damaged.append(dice.choice([index for index in range(COUNT - 1) if BODIES[index] in data]))
        position, length = SPANS[field]
        begin = data.find(BODIES[damaged[-1]]) - BODY_OFFSET
        offsets.append(int(path.name) + begin)
        flip(path, begin + position + dice.randrange(length), dice.randrange(8))
    assert len(damaged) == 3
    for turn in range(2):
        store = open_store(root)
        found = messages_of(store)
        assert [index for index, message in enumerate(found) if message.body_error is not None] == damaged
        assert [message.queue_offset for message in found] == list(range(COUNT))
        assert all(message.body == BODIES[index] for index, message in enumerate(found) if index not in damaged)
        assert bodies_of(store, queue_id=1) == [b"other"] * 3
        assert store.topics.queue_ids() == {"orders": [0, 1, 2][: 2 + turn]}
        # Only records in the part of the log that recovery scans become holes (known damaged ranges). If only the
        # physical offset of a record is changed, recovery accepts the record at its place in the log, and only a reader
        # reports the change. The second opening scans nothing new, because the stop after the first opening wrote a
        # snapshot.
        walked = offsets[-1:] if stopped else offsets
        assert [hole.offset for hole in store.mender.holes] == (walked if field != "physical_offset" else [])
        assert store.append([make_batch([b"next"], queue_id=2)])[0].queue_offset == turn
        store.close()


@ENDS
@pytest.mark.parametrize(("field", "bit"), [(QUEUE_ID_OFFSET + 3, 0), (QUEUE_OFFSET_OFFSET + 7, 1), (TOPIC_AT, 0)])
def test_a_misplaced_record_is_mended_with_the_bytes_of_another_replica(tmp_path, field, bit, stopped):
    root = written_store(tmp_path, stopped=stopped)
    (root / "dedup").unlink(missing_ok=True)
    path = max((path for path in (root / "commitlog").iterdir() if any(path.read_bytes())), key=lambda path: path.name)
    good = path.read_bytes()
    begin = good.find(BODIES[COUNT - 30]) - BODY_OFFSET
    flip(path, begin + field, bit)
    store = open_store(root)
    [hole] = store.mender.holes
    assert (hole.offset, hole.size) == (int(path.name) + begin, LAST_SIZE)
    store.mender.mend(hole.offset, good[begin : begin + hole.size])
    assert (store.mender.holes, bodies_of(store)) == ((), BODIES)
    killed_copy(root, root.with_name("killed"))
    store.close()
    for again in (root, root.with_name("killed")):
        store = open_store(again)
        assert (store.mender.holes, bodies_of(store)) == ((), BODIES)
        store.close()


@ENDS
def test_a_flipped_bit_that_the_snapshot_covers_is_found_although_newer_files_follow(tmp_path, stopped):
    """The snapshot is older than the newest log file. This happens after a clean stop on a full disk, or after a crash
    that follows retention's flush.

    The snapshot contains a checksum of the log's last bytes before the snapshot was taken (its tail). Recovery checks
    these bytes, so recovery reports the damage before any reader does.
    """
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    original = open_store(tmp_path / "original", clock_ms=count(1_700_000_000_000, 100).__next__)
    places = [original.append([make_batch([body])])[0].physical_offset for body in BODIES[:240]]
    original._checkpoints.flush_queues()
    snapshot = (tmp_path / "original/dedup").read_bytes()
    for body in BODIES[240:]:
        original.append([make_batch([body])])
    original._checkpoints.flush_queues()
    root = closed_copy(original, tmp_path / "original", tmp_path / "store", clean=stopped)
    (root / "dedup").write_bytes(snapshot)
    tail = read_snapshot(root / "dedup", DamageNotes()).tail
    assert 0 < tail < int(last_log_file(root).name)
    damaged = random.Random(seed).choice([index for index, place in enumerate(places) if place >= tail])
    path, begin = root / f"commitlog/{tail:020}", places[damaged] - tail
    good = path.read_bytes()
    flip(path, begin + BODY_OFFSET + 3)
    store = open_store(root)
    [hole] = store.mender.holes
    assert (hole.offset, hole.size) == (places[damaged], LAST_SIZE)
    assert intact_bodies(store) == [*BODIES[:damaged], None, *BODIES[damaged + 1 :]]
    store.mender.mend(hole.offset, good[begin : begin + hole.size])
    assert (store.mender.holes, bodies_of(store)) == ((), BODIES)
    store.close()


def keyed_store(tmp_path: Path, *, stopped: bool) -> Path:
    store = open_store(tmp_path / "original", max_index_num=60)
    for index in range(150):
        store.append([make_batch([BODIES[index]], extra_properties={"KEYS": f"k{index}"})])
    assert store.queries.by_key("orders", "none").complete
    store.write_config("topics.json", '{"orders": {"queues": 8}}')
    if stopped:
        store.close()
        return (tmp_path / "original").rename(tmp_path / "source")
    store._checkpoints.flush_queues()
    killed_copy(tmp_path / "original", tmp_path / "source")
    store.close()
    return tmp_path / "source"


@ENDS
def test_a_flipped_bit_of_an_index_file_hides_no_message(tmp_path, stopped):
    """Bits of the header, of slots and of entries are flipped in the first index file, a middle one and the last one.
    Queries by key still find every message."""
    source = keyed_store(tmp_path, stopped=stopped)
    names = sorted(path.name for path in (source / "index").iterdir())
    assert len(names) >= 4
    for name in (names[0], names[1], names[-1]):
        for position in (7, 15, 23, 31, 35, 39, 40 + 4 * 50 + 3, 440 + 20 * 5, 440 + 20 * 7 + 9, 440 + 20 * 3 + 19):
            root = Path(shutil.copytree(source, tmp_path / "store"))
            used = any((root / "index" / name).read_bytes()[position & ~3 : (position & ~3) + 4])
            flip(root / "index" / name, position)
            store = open_store(root, max_index_num=60)
            for index in range(0, 150, 3):
                found = store.queries.by_key("orders", f"k{index}")
                assert found.complete
                bodies = [message.body for message in decode_records(found.records)]
                assert bodies == [BODIES[index]], (name, position, index)
            # After a crash, recovery need not report the damage of the last index files, because it rebuilds these
            # files even if they are intact.
            assert store.status().damaged_files or not stopped or not used
            store.close()
            shutil.rmtree(root)


@ENDS
def test_a_flipped_bit_of_a_file_beside_the_log_is_reported_and_loses_no_message(tmp_path, stopped):
    source = keyed_store(tmp_path, stopped=stopped)
    files = [source / name for name in ("checkpoint", "dedup", "index.sums")]
    files += [path for path in (source / "config").iterdir() if path.suffix == ".json"]
    files = [path.relative_to(source) for path in files if path.exists()]
    assert len(files) >= 3 + stopped
    for name in files:
        for position in (7, 15, 30):
            root = Path(shutil.copytree(source, tmp_path / "store"))
            flip(root / name, position % (root / name).stat().st_size)
            store = open_store(root, max_index_num=60)
            assert store.read_config("topics.json") == '{"orders": {"queues": 8}}'
            assert bodies_of(store) == BODIES[:150]
            assert [len(decode_records(store.queries.by_key("orders", f"k{index}").records)) for index in (0, 149)] == [
                1
            ] * 2
            assert any(str(root / name) in text for text in store.status().damaged_files), (name, position)
            assert store.append([make_batch([b"next"])])[0].queue_offset == 150
            store.close()
            store = open_store(root, max_index_num=60)
            assert bodies_of(store) == [*BODIES[:150], b"next"]
            assert store.status().damaged_files == ()
            store.close()
            shutil.rmtree(root)


def test_damage_of_the_list_of_holes_is_reported(tmp_path):
    root = written_store(tmp_path, stopped=True)
    path = max((path for path in (root / "commitlog").iterdir() if any(path.read_bytes())), key=lambda path: path.name)
    flip(path, path.read_bytes().find(BODIES[350]))
    store = open_store(root)
    assert len(store.mender.holes) == 1
    store.close()
    flip(root / "holes", 12)
    store = open_store(root)
    assert any(str(root / "holes") in text for text in store.status().damaged_files)
    assert intact_bodies(store) == [*BODIES[:350], None, *BODIES[351:]]
    store.close()


def test_truncated_bytes_are_kept_beside_the_log(tmp_path):
    root = written_store(tmp_path, stopped=True)
    path = max((path for path in (root / "commitlog").iterdir() if any(path.read_bytes())), key=lambda path: path.name)
    flip(path, path.read_bytes().find(BODIES[COUNT - 1]))
    before = path.read_bytes()
    store = open_store(root)
    end, status = store.log.end_offset, store.status()
    assert bodies_of(store) == BODIES[:-1]
    store.close()
    kept = (root / "lost+cut" / f"{end:020d}").read_bytes()
    position = end - int(path.name)
    assert kept == before[position : position + status.cut_bytes]
