"""Tests of reads, appends and truncations of the log as bytes. With them, a replica copies the master's log byte for
byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from raymq.common.errors import DataLossError, InvalidArgumentError, StoreCorruptError, StoreLockedError
from raymq.records.format.check import record_starts
from raymq.records.logfiles.log_reader import LogReader
from storage.message_store import MessageStore
from storage.replication.log_chunks import read_chunk, truncate_log
from tests.support.stores.stores import LOG_FILE_BYTES, bodies_of, killed_copy, make_batch, open_store, small_settings

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%04d" % index + b"x" * (index * 37 % 400) for index in range(500)]


def filled(root: Path) -> MessageStore:
    store = open_store(root)
    for first in range(0, len(BODIES), 25):
        store.append([make_batch(BODIES[first : first + 25], producer=("p", 0, first))])
        store.append([make_batch([b"other"], queue_id=1)])
    return store


def copy_log(source: MessageStore, target: MessageStore, max_bytes: int) -> None:
    while data := source.chunks.read_chunk(target.status().max_physical_offset, max_bytes):
        assert target.chunks.append_chunk(target.status().max_physical_offset, data)


def log_bytes(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir())).rstrip(b"\0")


@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 20])
def test_a_copied_log_is_the_same_store(tmp_path, max_bytes):
    source, target = filled(tmp_path / "a"), open_store(tmp_path / "b")
    copy_log(source, target, max_bytes)
    assert bodies_of(target) == BODIES
    assert target.status().max_physical_offset == source.status().max_physical_offset
    [repeat] = target.append([make_batch(BODIES[475:], producer=("p", 0, 475))])
    assert repeat.duplicate
    assert target.append([make_batch([b"new"])])[0].queue_offset == len(BODIES)
    found = target.queries.by_unique_id("orders", f"{24:032X}")
    assert found.complete
    assert found.count > 0
    source.append([make_batch([b"new"])])
    source.close()
    target.close()
    again = open_store(tmp_path / "b")
    assert bodies_of(again) == [*BODIES, b"new"]
    assert again.status().cut_bytes == 0
    again.close()
    assert len(log_bytes(tmp_path / "a")) == len(log_bytes(tmp_path / "b"))


def test_files_are_the_same_byte_for_byte(tmp_path):
    source, target = filled(tmp_path / "a"), open_store(tmp_path / "b")
    copy_log(source, target, 10_000)
    source.close()
    target.close()
    assert log_bytes(tmp_path / "a") == log_bytes(tmp_path / "b")
    for path in (tmp_path / "a" / "consumequeue").rglob("0*"):
        if path.is_file():
            assert (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes() == path.read_bytes()


def test_a_chunk_that_does_not_continue_the_log_is_refused_and_nothing_is_written(tmp_path):
    source, target = filled(tmp_path / "a"), open_store(tmp_path / "b")
    chunk = source.chunks.read_chunk(0, 2000)
    first = int(record_starts(chunk)[1])
    flipped = bytearray(chunk)
    flipped[100] ^= 1
    for offset, data in ((first, chunk[first:]), (0, chunk[first:]), (0, chunk[:-1]), (0, flipped), (0, b"x" * 200)):
        with pytest.raises(InvalidArgumentError):
            target.chunks.append_chunk(offset, bytes(data))
    assert target.status().max_physical_offset == 0
    assert target.topics.queue_ids() == {}
    assert target.chunks.append_chunk(0, chunk)
    with pytest.raises(InvalidArgumentError):
        target.chunks.append_chunk(0, chunk)
    source.close()
    target.close()


def test_reading_outside_the_log_is_an_error(tmp_path):
    store = filled(tmp_path / "a")
    end = store.status().max_physical_offset
    assert store.chunks.read_chunk(end, 1000) == b""
    with pytest.raises(InvalidArgumentError):
        store.chunks.read_chunk(end + 1, 1000)
    with store._parts.append_lock:
        store.log.drop_files_before(LOG_FILE_BYTES)
    with pytest.raises(DataLossError):
        store.chunks.read_chunk(0, 1000)
    store.close()


@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 20])
def test_the_copy_also_deletes_and_creates_a_topic_again(tmp_path, max_bytes):
    source, target = filled(tmp_path / "a"), open_store(tmp_path / "b")
    source.topics.delete("orders")
    source.append([make_batch([b"new one"])])
    source.append([make_batch([b"new other"], queue_id=1)])
    source.append([make_batch([b"new two"])])
    source.append([make_batch([b"kept"], topic="payments")])
    source.topics.delete("orders")
    source.append([make_batch([b"newest"], queue_id=1)])
    copy_log(source, target, max_bytes)
    for store in (source, target):
        assert bodies_of(store) == []
        assert bodies_of(store, queue_id=1) == [b"newest"]
        assert bodies_of(store, "payments") == [b"kept"]
    target.close()
    again = open_store(tmp_path / "b")
    assert bodies_of(again, queue_id=1) == [b"newest"]
    again.close()
    source.close()


@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 20])
def test_a_copy_keeps_a_queue_that_only_the_topic_created_again_has(tmp_path, max_bytes):
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    for queue_id in (2, 0, 0, 2):
        source.append([make_batch([b"old"], queue_id=queue_id)])
    copy_log(source, target, max_bytes)
    # Closing the store writes a snapshot. The snapshot contains the ends that the topic's queues had before the topic
    # was deleted.
    target.close()
    target = open_store(tmp_path / "b")
    source.topics.delete("orders")
    first = make_batch([b"new one"], queue_id=1, producer=("p", 0, 0))
    source.append([first])
    source.append([make_batch([b"new zero"])])
    copy_log(source, target, max_bytes)
    killed = open_store(killed_copy(tmp_path / "b", tmp_path / "c"))
    for store in (source, target, killed):
        assert [bodies_of(store, queue_id=number) for number in range(3)] == [[b"new zero"], [b"new one"], []]
        [repeat] = store.append([first])
        assert repeat.duplicate
        store.close()
    again = open_store(tmp_path / "b")
    assert [bodies_of(again, queue_id=number) for number in range(3)] == [[b"new zero"], [b"new one"], []]
    again.close()


def test_copies_have_all_messages_of_topics_that_were_deleted_and_created_again(tmp_path):
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for number in range(20):
        root = tmp_path / str(number)
        copy = root / "b"
        source, target = open_store(root / "a"), open_store(copy)
        sent = 0
        for _ in range(dice.randint(5, 40)):
            kind = dice.choices(("append", "delete", "copy", "kill"), (8, 1, 3, 1))[0]
            if kind == "append":
                topic, queue_id = dice.choice(("orders", "payments")), dice.randrange(3)
                source.append([make_batch([b"%d" % sent], topic=topic, queue_id=queue_id)])
                sent += 1
            elif kind == "delete":
                source.topics.delete(dice.choice(("orders", "payments")))
            elif kind == "copy":
                copy_log(source, target, dice.choice((1, 300, 1 << 20)))
            else:
                killed = killed_copy(copy, copy.with_name(copy.name + "b"))
                target.close()
                target, copy = open_store(killed), killed
        copy_log(source, target, 1 << 20)
        for topic, queue_ids in source.topics.queue_ids().items():
            for queue_id in queue_ids:
                assert bodies_of(target, topic, queue_id) == bodies_of(source, topic, queue_id), (topic, queue_id)
        source.close()
        target.close()


@pytest.mark.parametrize("keep", [0, 1, 100, 250, 499])
def test_a_log_is_cut_at_a_record_and_everything_follows(tmp_path, keep):
    root = tmp_path / "a"
    store = filled(root)
    unit = store._parts.reader.units("orders", 0, keep, 1)
    place = int(unit[0]["physical_offset"])
    settings = small_settings(root)
    with pytest.raises(StoreLockedError):
        truncate_log(settings, place)
    end = store.status().max_physical_offset
    store.close()
    for wrong in (place + 1, end + 1000):
        with pytest.raises(InvalidArgumentError):
            truncate_log(settings, wrong)
    assert truncate_log(settings, place) == end - place
    store = open_store(root)
    assert bodies_of(store) == BODIES[:keep]
    assert store.status().max_physical_offset == place
    [result] = store.append([make_batch(BODIES[keep:], producer=("p", 0, keep))])
    assert not result.duplicate
    assert bodies_of(store) == BODIES
    assert store.queries.by_key("orders", "none").complete
    assert store.queries.by_unique_id("orders", f"{0:032X}").count > 0
    store.close()


def test_store_times_never_precede_the_times_of_another_replica(tmp_path):
    source, target = (
        open_store(tmp_path / "a", clock_ms=lambda: 5000),
        open_store(tmp_path / "b", clock_ms=lambda: 1000),
    )
    source.append([make_batch([b"one"])])
    copy_log(source, target, 1 << 20)
    [result] = target.append([make_batch([b"two"])])
    assert result.store_timestamp_ms == 5000
    source.close()
    target.close()


def test_a_chunk_ends_before_damage_and_the_damage_is_reported(tmp_path):
    store = filled(tmp_path / "a")
    end = store.status().max_physical_offset
    whole = store.chunks.read_chunk(0, 5000)
    store.close()
    path = tmp_path / "a" / "commitlog" / f"{0:020d}"
    second = int(record_starts(whole)[1])
    with path.open("r+b") as file:
        file.seek(second + 4)
        file.write(b"xxxx")
    reader = LogReader(tmp_path / "a", commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=2000)
    assert read_chunk(reader, 0, 0, end, 5000) == whole[:second]
    with pytest.raises(StoreCorruptError, match="has no record at"):
        read_chunk(reader, 0, second, end, 5000)
    reader.close()
