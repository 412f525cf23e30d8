"""Tests of a producer for a topic of queue type "batch". Messages that are sent together become one record of a real
store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from raymq.common.errors import MessageIllegalError
from raymq.common.message import Message
from raymq.records.format.compression import Compression, CompressionType
from storage.message_store import MessageStore
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.store_client import StoreClient, producer_of
from tests.support.stores.stores import open_store, read_queue

pytestmark = pytest.mark.usefixtures("no_flushes")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


def messages(count: int, first: int = 0, **fields) -> list[Message]:
    return [Message("batched", b"%d" % n, keys=f"k-{n}", **fields) for n in range(first, first + count)]


def records_of(store: MessageStore) -> int:
    return len({message.physical_offset for message in read_queue(store, "batched")})


def test_messages_that_are_sent_together_are_one_record(store):
    client = StoreClient(store)
    with producer_of(client) as producer:
        first = producer.send_batch(messages(10, tags="red", properties={"a": "b"}), timeout_s=WAIT_S)
        lone = producer.send(Message("batched", b"lone"), timeout_s=WAIT_S)
        many = producer.send_batch([Message("batched", b"m%d" % n) for n in range(1000)], timeout_s=WAIT_S)
    assert [result.queue_offset for result in first] == list(range(10))
    assert lone.queue_offset == 10
    assert [result.queue_offset for result in many] == list(range(11, 1011))
    assert len({result.offset_message_id for result in many}) == 1
    found = read_queue(store, "batched")
    assert records_of(store) == 3
    assert [message.message_id for message in found] == [result.message_id for result in [*first, lone, *many]]
    assert (found[3].tags, found[3].keys, found[3].properties) == ("red", ("k-3",), {"a": "b"})


def test_messages_that_gather_are_one_record_too(store):
    with producer_of(StoreClient(store)) as producer:
        futures = [producer.send_async(message) for message in messages(500)]
        offsets = sorted(future.result(WAIT_S).queue_offset for future in futures)
    assert offsets == list(range(500))
    assert records_of(store) < 500


def test_a_table_is_stored_as_an_inner_batch(store):
    table = pa.table({"body": [b"%d" % n for n in range(3000)], "keys": [f"k-{n}" for n in range(3000)]})
    with producer_of(StoreClient(store)) as producer:
        result = producer.send_table("batched", table)
    assert result.count == 3000
    assert [message.body for message in read_queue(store, "batched")] == [b"%d" % n for n in range(3000)]
    assert store.queries.by_key("batched", "k-2999").count == 1


def test_an_answer_that_is_lost_stores_nothing_twice(store):
    client = StoreClient(store, lost=2)
    with producer_of(client) as producer:
        results = producer.send_batch(messages(10), timeout_s=WAIT_S)
    assert client.calls == 3
    assert [result.queue_offset for result in results] == list(range(10))
    assert len(read_queue(store, "batched")) == 10


def test_the_body_is_compressed_as_a_whole(store):
    compression = Compression(CompressionType.ZSTD, threshold_bytes=64)
    with producer_of(StoreClient(store), compression=compression) as producer:
        producer.send_batch([Message("batched", b"the same again")] * 100, timeout_s=WAIT_S)
    assert store.log.end_offset < 3000
    assert {message.body for message in read_queue(store, "batched")} == {b"the same again"}


def test_a_batch_that_exceeds_the_record_limit_is_divided(tmp_path):
    store = open_store(tmp_path, max_message_size_bytes=5000)
    with producer_of(StoreClient(store, max_message_size_bytes=5000), compression=Compression()) as producer:
        body = Random(7).randbytes(1000)
        results = producer.send_batch([Message("batched", body)] * 20, timeout_s=WAIT_S)
    assert [result.queue_offset for result in results] == list(range(20))
    assert 4 < records_of(store) <= 20
    store.close()


def test_a_body_of_the_greatest_size_is_stored_with_all_its_properties(tmp_path):
    store = open_store(tmp_path, max_message_size_bytes=5000)
    properties = {"a": "b" * 32_000}
    with producer_of(StoreClient(store, max_message_size_bytes=5000), compression=Compression()) as producer:
        body = Random(7).randbytes(5000)
        for fields in ({}, {"tags": "red", "properties": properties}):
            producer.send(Message("batched", body, **fields), timeout_s=WAIT_S)
            producer.send_async(Message("batched", body, **fields)).result(WAIT_S)
        with pytest.raises(MessageIllegalError, match="5001 bytes"):
            producer.send(Message("batched", body + b"x"), timeout_s=WAIT_S)
    found = read_queue(store, "batched")
    assert [message.body for message in found] == [body] * 4
    assert found[3].properties == properties
    store.close()


@pytest.mark.parametrize("delay", [{"delay_level": 3}, {"deliver_at_ms": 2**40}])
def test_messages_that_would_come_one_at_a_time_are_refused(store, delay):
    with producer_of(StoreClient(store)) as producer:
        for send in (producer.send, producer.send_async, producer.send_oneway):
            with pytest.raises(MessageIllegalError, match="inner batches"):
                send(Message("batched", b"later", **delay))
        with pytest.raises(MessageIllegalError, match="inner batches"):
            producer.send_batch([*messages(2), *messages(1, **delay)])
    assert store.log.end_offset == 0
