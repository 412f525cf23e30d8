"""Tests of inner batches: single records that hold many messages."""

from __future__ import annotations

import pytest

from raymq.records.format.decode import decode_record
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.inner_batch import BatchItem, InnerBatch, inner_batch, split_inner_batch
from raymq.records.format.layout import RecordError
from tests.support.stores.inner_batches import inner_batch_record

ITEMS = [
    BatchItem(b"one", {"TAGS": "red", "UNIQ_KEY": "A" * 32, "mine": "1"}, flag=7),
    BatchItem(b"", {}),
    BatchItem(b"three" * 100, {"TAGS": "blue", "KEYS": "k1 k2"}),
]


@pytest.mark.parametrize("born_ip", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("topic", ["batched", "%RETRY%" + "g" * 150])
@pytest.mark.parametrize("compressed", [False, True])
def test_each_message_becomes_the_record_that_it_would_have_on_its_own(compressed, topic, born_ip):
    record = inner_batch_record(
        ITEMS, base_offset=40, physical_offset=1234, topic=topic, queue_id=3, compressed=compressed, born_ip=born_ip
    )
    batch = decode_record(record)
    messages = [decode_record(one) for one in split_inner_batch(record)]
    assert [message.body for message in messages] == [b"one", b"", b"three" * 100]
    assert [message.tags for message in messages] == ["red", None, "blue"]
    assert [message.keys for message in messages] == [(), (), ("k1", "k2")]
    assert [message.queue_offset for message in messages] == [40, 41, 42]
    assert (messages[0].properties, messages[0].flag, messages[0].message_id) == ({"mine": "1"}, 7, "A" * 32)
    for message in messages:
        assert (message.topic, message.queue_id, message.physical_offset) == (topic, 3, 1234)
        assert (message.born_host, message.store_host) == (batch.born_host, batch.store_host)
        assert message.store_timestamp_ms == batch.store_timestamp_ms
        assert message.sys_flag == (0x10 if born_ip == "::1" else 0)


def test_an_inner_batch_has_its_range_of_offsets():
    view = dispatch_view(inner_batch_record(ITEMS, base_offset=40, physical_offset=0))
    assert inner_batch(view) == InnerBatch(40, 3)


@pytest.mark.parametrize("num", [0, -1, 2, 4, 40_000])
def test_an_inner_batch_with_a_wrong_count_is_damaged(num):
    with pytest.raises(RecordError):
        split_inner_batch(inner_batch_record(ITEMS, base_offset=0, physical_offset=0, num=num))


def test_no_byte_of_the_body_may_change():
    record = bytearray(inner_batch_record(ITEMS, base_offset=0, physical_offset=0))
    record[120] ^= 1
    with pytest.raises(RecordError):
        split_inner_batch(record)
    with pytest.raises(RecordError):
        split_inner_batch(record[:-1])
