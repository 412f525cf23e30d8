"""Tests of inner batches that producers send. Each is stored once as one record, is found by offset, key and id, and is
copied to slaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from raymq.common.errors import MessageIllegalError
from raymq.common.message import Message
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.decode import decode_records
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import EncodedBatch, ProducerSequence
from raymq.records.format.inner_batch_encode import encode_inner_batch
from raymq.records.format.layout import SYS_FLAG_COMPRESSED
from storage.message_store import MessageStore
from tests.support.stores.stores import (
    LOG_FILE_BYTES,
    bodies_of,
    closed_copy,
    killed_copy,
    make_batch,
    open_store,
    read_queue,
)

pytestmark = pytest.mark.usefixtures("no_flushes")

TOPIC = "batched"
SMALL_QUEUE_FILES = {"mapper_file_size_batch_consume_queue_bytes": 460}
ZLIB = Compression(CompressionType.ZLIB, threshold_bytes=1)


def inner(
    *bodies: bytes,
    sequence: int = 0,
    queue_id: int = 0,
    compression: Compression | None = None,
    epoch: int = 0,
    **fields: Any,
) -> EncodedBatch:
    """Return an inner batch with these bodies, as producer "p" sends it. The message with sequence number n has the key
    k-n, and n as its unique id."""
    numbers = range(sequence, sequence + len(bodies))
    return encode_inner_batch(
        [Message(TOPIC, body, keys=f"k-{n}", **fields) for n, body in zip(numbers, bodies, strict=True)],
        queue_id,
        born_host=("127.0.0.1", 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=[f"{n:032X}" for n in numbers],
        producer=ProducerSequence("p", epoch, sequence),
        compression=compression or Compression(),
    )


def filled(root: Path, **changes: Any) -> MessageStore:
    """Fill a store so that it has several log files and batch queue files. It has 60 inner batches of 1 to 5 messages,
    and a plain message before each batch."""
    store = open_store(root, **SMALL_QUEUE_FILES, **changes)
    sequence = 0
    for number in range(60):
        bodies = [b"%d" % n + b"x" * 700 for n in range(sequence, sequence + 1 + number % 5)]
        compression = ZLIB if number % 2 else None
        plain = make_batch([b"plain"], producer=("q", 0, number))
        store.append([plain, inner(*bodies, sequence=sequence, compression=compression)])
        sequence += len(bodies)
    return store


def expected_bodies() -> list[bytes]:
    return [b"%d" % n + b"x" * 700 for n in range(sum(1 + number % 5 for number in range(60)))]


def test_a_batch_is_one_record_and_one_unit(tmp_path):
    store = open_store(tmp_path)
    [first] = store.append([inner(b"one", b"two", tags="red")])
    [second] = store.append([inner(b"three", b"four", b"five", sequence=2, tags="red")])
    assert (first.queue_offset, second.queue_offset) == (0, 2)
    record = store.queries.by_physical_offset(second.physical_offset)
    view = dispatch_view(record)
    assert (view.queue_offset, view.properties["INNER_NUM"], int(view.properties["INNER_BASE"])) == (2, "3", 2)
    assert view.sys_flag & 0xC0 == 0xC0
    assert "TAGS" not in view.properties
    messages = read_queue(store, TOPIC)
    assert [message.body for message in messages] == [b"one", b"two", b"three", b"four", b"five"]
    assert [message.message_id for message in messages] == [f"{n:032X}" for n in range(5)]
    assert {message.tags for message in messages} == {"red"}
    units = (tmp_path / "batchconsumequeue" / TOPIC / "0" / f"{0:020d}").read_bytes()
    assert int.from_bytes(units[46 + 28 : 46 + 36]) == 2
    assert units[46 + 36 : 92].hex() == "0003ffffffff00000000"
    store.close()


def test_the_body_is_compressed_as_a_whole(tmp_path):
    store = open_store(tmp_path)
    [result] = store.append([inner(*[b"same" * 50] * 20, compression=ZLIB)])
    view = dispatch_view(store.queries.by_physical_offset(result.physical_offset))
    assert view.sys_flag & SYS_FLAG_COMPRESSED
    assert view.size < 1000
    assert bodies_of(store, TOPIC) == [b"same" * 50] * 20
    store.close()


def test_a_repeated_inner_batch_is_stored_once(tmp_path):
    store = open_store(tmp_path)
    [first] = store.append([inner(b"one", b"two")])
    [again] = store.append([inner(b"one", b"two")])
    assert again.duplicate
    assert (again.queue_offset, again.physical_offset) == (0, first.physical_offset)
    with pytest.raises(MessageIllegalError, match="1 of the 2 messages"):
        store.append([inner(b"two", b"three", sequence=1)])
    store.append([inner(b"three", sequence=2)])
    assert bodies_of(store, TOPIC) == [b"one", b"two", b"three"]
    assert store.status().messages_appended == 3
    store.close()


def test_a_queue_is_of_one_kind(tmp_path):
    store = open_store(tmp_path)
    store.append([inner(b"one")])
    end = store.log.end_offset
    with pytest.raises(MessageIllegalError, match="inner batches"):
        store.append([make_batch([b"x"], topic=TOPIC)])
    store.append([make_batch([b"x"], topic=TOPIC, queue_id=1)])
    with pytest.raises(MessageIllegalError, match="single messages"):
        store.append([make_batch([b"fine"]), inner(b"two", queue_id=1)])
    assert bodies_of(store, TOPIC) == [b"one"]
    assert store.log.end_offset > end
    assert "orders" not in store.topics.queue_ids()
    store.append([inner(b"other", queue_id=2)])
    store.close()


@pytest.mark.parametrize("tail", ["INNER_NUM\x010\x02", "INNER_NUM\x0132768\x02", "INNER_NUM\x01two\x02", ""])
def test_an_inner_batch_without_a_valid_count_is_refused(tmp_path, tail):
    store = open_store(tmp_path)
    good = inner(b"one")
    records = bytes(good.records).replace(b"INNER_NUM\x011\x02", tail.encode())
    shorter = len(good.records) - len(records)
    at = good.records.index(b"UNIQ_KEY") - 2
    body_end = bytes(good.records).rindex(b"UNIQ_KEY") - 2
    assert at <= body_end
    size = int.from_bytes(records[body_end : body_end + 2]) - shorter
    records = len(records).to_bytes(4) + records[4:body_end] + size.to_bytes(2) + records[body_end + 2 :]
    good.sizes[0] = len(records)
    good.records = records
    with pytest.raises(MessageIllegalError, match="with its number of messages"):
        store.append([good])
    assert store.log.end_offset == 0
    store.close()


def test_messages_are_found_by_key_and_id_alone(tmp_path):
    store = filled(tmp_path)
    for number in (0, 7, 100):
        for result in (store.queries.by_key(TOPIC, f"k-{number}"), store.queries.by_unique_id(TOPIC, f"{number:032X}")):
            [found] = decode_records(result.records)
            assert (found.queue_offset, found.body) == (number, expected_bodies()[number])
    assert store.queries.by_key(TOPIC, "k-9999").count == 0
    store.close()
    # Delete the index. The store must rebuild it from the log when it opens.
    shutil.rmtree(tmp_path / "index")
    store = open_store(tmp_path, **SMALL_QUEUE_FILES)
    [found] = decode_records(store.queries.by_key(TOPIC, "k-100").records)
    assert found.queue_offset == 100
    store.close()


@pytest.mark.parametrize("lost", [(), ("dedup",), ("dedup", "checkpoint"), ("batchconsumequeue",)])
@pytest.mark.parametrize("clean", [False, True])
def test_recovery_makes_queue_and_dedup_table_again(tmp_path, lost, clean):
    store = filled(tmp_path / "a")
    count = len(expected_bodies())
    killed = closed_copy(store, tmp_path / "a", tmp_path / "b", clean=clean, lost=lost)
    again = open_store(killed, **SMALL_QUEUE_FILES)
    assert bodies_of(again, TOPIC) == expected_bodies()
    [repeat] = again.append([inner(*expected_bodies()[-5:], sequence=count - 5)])
    assert repeat.duplicate
    assert repeat.queue_offset == count - 5
    [new] = again.append([inner(b"new", sequence=count)])
    assert new.queue_offset == count
    again.close()


@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 20])
def test_slaves_have_the_same_queue_and_take_over(tmp_path, max_bytes):
    master, slave = filled(tmp_path / "a"), open_store(tmp_path / "b", **SMALL_QUEUE_FILES)
    while data := master.chunks.read_chunk(slave.log.end_offset, max_bytes):
        slave.chunks.append_chunk(slave.log.end_offset, data)
    assert bodies_of(slave, TOPIC) == expected_bodies()
    count = len(expected_bodies())
    [repeat] = slave.append([inner(*expected_bodies()[-5:], sequence=count - 5)])
    assert repeat.duplicate
    [new] = slave.append([inner(b"new", b"newer", sequence=count)])
    assert new.queue_offset == count
    master.close()
    slave.close()


def test_a_pool_holds_units_back_and_a_repeat_finds_them(tmp_path):
    changes = {"transient_store_pool_enable": True, "flush_disk_type": "ASYNC_FLUSH", "transient_store_pool_size": 3}
    store = open_store(tmp_path, **changes)
    store.append([inner(b"one", b"two")])
    [again] = store.append([inner(b"one", b"two")])
    assert again.duplicate
    assert again.physical_offset == 0
    store.close()


@pytest.mark.parametrize("sent_crc", [False, True])
def test_with_a_property_crc_it_covers_the_offset_too(tmp_path, sent_crc):
    changes = {"enabled_append_prop_crc": True, "force_verify_prop_crc": True}
    store = open_store(tmp_path / "a", **(changes if sent_crc else {"enabled_append_prop_crc": True}))
    for number in range(3):
        store.append([inner(b"one", b"two", sequence=2 * number)])
    killed = killed_copy(tmp_path / "a", tmp_path / "b")
    store.close()
    again = open_store(killed, **changes)
    assert again.status().cut_bytes == 0
    assert bodies_of(again, TOPIC) == [b"one", b"two"] * 3
    again.close()


def test_light_queues_do_not_change_how_inner_batches_are_stored(tmp_path):
    store = open_store(tmp_path, enable_lmq=True, enable_multi_dispatch=True)
    light = make_batch([b"both"], extra_properties={"INNER_MULTI_DISPATCH": "%LMQ%a"})
    store.append([inner(b"one", b"two"), light])
    assert bodies_of(store, TOPIC) == [b"one", b"two"]
    [found] = store.fetch([FetchRequest("%LMQ%a", 0, 0, 10)], max_bytes=1 << 20, wait_s=0)
    assert found.count == 1
    store.close()


def test_a_batch_longer_than_the_rest_of_the_file_goes_to_the_next_file(tmp_path):
    store = open_store(tmp_path)
    for number in range(5):
        store.append([inner(*[b"x" * 7000] * 4, sequence=4 * number)])
    assert store.log.end_offset > 2 * LOG_FILE_BYTES
    assert bodies_of(store, TOPIC) == [b"x" * 7000] * 20
    with pytest.raises(MessageIllegalError, match="exceeds this store's limit"):
        store.append([inner(*[b"x" * 7000] * 10, sequence=20)])
    store.close()
