"""Tests of the record format: decoding returns the encoded values, readers report damage, and reading by columns equals
reading by rows."""

from __future__ import annotations

import copy
import pickle
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given, settings, strategies as st

import raymq.records.kernels.messages
import raymq.records.kernels.templates
from raymq.common.message import Message, MessageExt
from raymq.records.format.check import check_record, record_starts
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.crc import seal_holds
from raymq.records.format.decode import decode_record, decode_records
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.hashing import index_key_hash, index_key_hashes, java_hash, tags_code
from raymq.records.format.layout import RecordError, decode_properties, encode_host, encode_properties
from raymq.records.kernels.check import validate_batch
from raymq.records.kernels.columns import decode_columns
from raymq.records.kernels.messages import read_messages
from raymq.records.kernels.stamp import stamp
from tests.support.cases import examples
from tests.support.clients.legal_messages import HOSTS, INT32, KEYS, NAMES, TAGS, TEXT, TOPICS

INT64 = st.integers(-(2**63), 2**63 - 1)
MILLISECONDS = st.integers(0, 2**42)
BODIES = st.binary(min_size=1, max_size=40) | st.binary(min_size=1, max_size=9).map(lambda part: part * 99)
COMPRESSIONS = st.builds(Compression, st.sampled_from(CompressionType), threshold_bytes=st.sampled_from([0, 64]))


@dataclass(frozen=True)
class Stored:
    """A batch with the records that a store keeps of it, and the messages and ids from which it was encoded."""

    messages: list[Message]
    ids: list[str]
    batch: EncodedBatch
    records: bytes
    first_queue_offset: int
    first_physical_offset: int


@st.composite
def stored_batches(draw: st.DrawFn) -> Stored:
    topic = draw(TOPICS)
    messages = draw(
        st.lists(
            st.builds(
                Message,
                st.just(topic),
                BODIES,
                tags=st.none() | TAGS,
                keys=st.lists(KEYS, max_size=3).map(tuple),
                properties=st.dictionaries(NAMES, TEXT, max_size=4),
                flag=INT32,
            ),
            min_size=1,
            max_size=5,
        )
    )
    ids = [f"{draw(st.integers(0, 2**128 - 1)):032X}" for _ in messages]
    store_host = draw(HOSTS)
    batch = encode_batch(
        messages,
        draw(st.integers(0, 2**31 - 1)),
        born_host=draw(HOSTS),
        born_timestamp_ms=draw(MILLISECONDS),
        message_ids=ids,
        producer=draw(st.none() | st.builds(ProducerSequence, TEXT, INT32, st.integers(0, 2**62))),
        compression=draw(COMPRESSIONS),
        extra_properties=draw(st.none() | st.just({"WAIT": "true", "RETRY_TOPIC": "T"})),
        append_prop_crc=draw(st.booleans()),
        reconsume_times=draw(INT32),
        store_host_ipv6=":" in store_host[0],
    )
    validate_batch(batch)
    records = bytearray(batch.records)
    queue_offset, physical_offset = draw(st.integers(0, 2**62)), draw(st.integers(0, 2**62))
    stamp(
        records,
        batch.sizes,
        first_queue_offset=queue_offset,
        first_physical_offset=physical_offset,
        store_timestamp_ms=draw(MILLISECONDS),
        store_host=encode_host(*store_host),
    )
    return Stored(messages, ids, batch, bytes(records), queue_offset, physical_offset)


@given(stored_batches())
def test_decoding_returns_the_encoded_messages(stored: Stored) -> None:
    starts = record_starts(stored.records).tolist()
    decoded = decode_records(stored.records, broker_name="broker-a")
    assert decoded == [decode_record(stored.records, start, broker_name="broker-a") for start in starts]
    for index, (message, sent) in enumerate(zip(decoded, stored.messages, strict=True)):
        assert (message.topic, message.body, message.tags) == (sent.topic, sent.body, sent.tags)
        assert (message.keys, message.properties, message.flag) == (sent.keys, sent.properties, sent.flag)
        assert (message.message_id, message.queue_id) == (stored.ids[index], stored.batch.queue_id)
        assert message.queue_offset == stored.first_queue_offset + index
        assert message.physical_offset == stored.first_physical_offset + starts[index]


@given(stored_batches())
def test_the_parser_and_dispatch_agree_with_the_batch(stored: Stored) -> None:
    batch = stored.batch
    for index, start in enumerate(record_starts(stored.records).tolist()):
        assert check_record(stored.records, start) == (batch.sizes[index], True)
        view = dispatch_view(stored.records, start)
        assert (view.topic, view.queue_id, view.size) == (batch.topic, batch.queue_id, batch.sizes[index])
        assert view.tags_code == batch.tag_codes[index] == tags_code(stored.messages[index].tags)
        assert view.keys == [stored.ids[index], *stored.messages[index].keys]
        if batch.producer is None:
            assert view.producer is None
        else:
            expected = batch.producer.first_sequence + index
            assert view.producer == ProducerSequence(batch.producer.producer_id, batch.producer.epoch, expected)


def as_row(message: MessageExt) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "broker_name": message.broker_name,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "tags": message.tags,
        "keys": list(message.keys),
        "body": message.body,
        "properties": dict(message.properties),
        "born_timestamp": message.born_timestamp_ms,
        "store_timestamp": message.store_timestamp_ms,
        "message_id": message.message_id,
    }


def column_rows(data: bytes, starts: list[int], body_type: Any) -> list[dict[str, Any]]:
    batch = decode_columns(data, np.array(starts, dtype=np.int64), broker_name="broker-a", body_type=body_type)
    batch.validate(full=True)
    columns = {name: batch.column(name) for name in batch.schema.names}
    for name in ("born_timestamp", "store_timestamp"):
        columns[name] = columns[name].view("int64")
    values = {name: column.to_pylist() for name, column in columns.items()}
    values["properties"] = [dict(pairs) for pairs in values["properties"]]
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


@settings(deadline=None)
@given(
    st.lists(stored_batches(), min_size=1, max_size=3),
    st.sampled_from(["binary", "binary_view"]),
    st.sampled_from([1, 1 << 40]),
)
def test_columns_and_rows_agree(batches: list[Stored], body_type: str, rows_per_template: int) -> None:
    data = b"".join(stored.records for stored in batches)
    rows = [as_row(message) for message in decode_records(data, broker_name="broker-a")]
    with mock.patch.object(raymq.records.kernels.templates, "_ROWS_PER_TEMPLATE", rows_per_template):
        assert column_rows(data, record_starts(data).tolist(), body_type) == rows


@given(st.lists(stored_batches(), min_size=1, max_size=3))
def test_decoding_many_records_equals_decoding_each(batches: list[Stored]) -> None:
    data = b"".join(stored.records for stored in batches)
    with mock.patch.object(raymq.records.kernels.messages, "FEW_RECORDS", 0):
        messages = read_messages(data, record_starts(data), broker_name="broker-a")
    slow = decode_records(data, broker_name="broker-a")
    assert messages == slow
    assert [repr(message) for message in messages] == [repr(message) for message in slow]
    for message in (*copy.deepcopy(messages), *pickle.loads(pickle.dumps(messages))):
        assert message == slow[messages.index(message)]


def outcome(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function. Returns its result, or the class RecordError if the call raises RecordError. Other exceptions
    pass through."""
    try:
        return call(*args, **kwargs)
    except RecordError:
        return RecordError


def check_every_reader(data: bytes, position: int) -> None:
    """Check that all record readers raise nothing but RecordError, and agree on which bytes are records with readable
    bodies."""
    check = check_record(data, position, check_crc=False)
    checked = check_record(data, position)
    assert checked in (check, (-1, False))
    whole = check.ok and not check.is_blank
    assert (outcome(dispatch_view, data, position) is not RecordError) == whole
    message = outcome(decode_record, data, position, check_crc=False, broker_name="broker-a")
    assert whole or message is RecordError
    starts = np.array([position], np.int64)
    batch = decode_columns(data, starts, broker_name="broker-a", columns=["body", "error"])
    assert (batch.column("error").null_count == 0) == (batch.column("body").null_count == 1) == (message is RecordError)
    if message is not RecordError:
        assert column_rows(data, [position], "binary") == [as_row(message)]
    with mock.patch.object(raymq.records.kernels.messages, "FEW_RECORDS", 0):
        for check_crc in (False, True):
            strict = outcome(decode_record, data, position, broker_name="broker-a", check_crc=check_crc)
            [found] = read_messages(data, starts, broker_name="broker-a", check_crc=check_crc)
            assert (found.body_error is not None) == (strict is RecordError)
            # The property CRC may show that a complete record is damaged, even if all other checks pass.
            changed = whole and check_crc and not seal_holds(data[position : position + check.size])
            assert found.record_damaged == (not whole) or (changed and found.record_damaged)
            assert strict in (RecordError, found)
    outcome(decode_records, data)
    outcome(record_starts, data)


@given(st.binary(max_size=300), st.integers(0, 310))
def test_any_bytes_are_refused_with_a_record_error(data: bytes, position: int) -> None:
    check_every_reader(data, position)


@given(stored_batches(), st.integers(0, 2**64))
@settings(max_examples=examples(300))
def test_damaged_records_are_refused_with_a_record_error_or_read_alike(stored: Stored, seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    data = bytearray(stored.records)
    for _ in range(chance.randint(1, 3)):
        where = chance.randrange(len(data)) if chance.random() < 0.5 else chance.randrange(min(len(data), 120))
        kind = chance.randrange(5)
        if kind == 0:
            del data[chance.randrange(len(data)) + 1 :]
        elif kind == 1:
            data[where:where] = chance.randbytes(chance.randint(1, 4))
        elif where < len(data):
            data[where] = chance.choice([0, 1, 2, 0x7F, 0x80, 0xFF, chance.randrange(256)])
    check_every_reader(bytes(data), 0)
    check_every_reader(bytes(data), chance.randrange(len(data) + 1))


@given(stored_batches(), INT64)
def test_a_damaged_batch_is_refused_or_can_still_be_stamped(stored: Stored, seed: int) -> None:
    """`validate_batch` raises nothing but MessageIllegalError (a ValueError). Readers can read every batch that
    `validate_batch` accepts."""
    print("seed", seed)
    chance = random.Random(seed)
    data = bytearray(stored.batch.records)
    data[chance.randrange(len(data))] = chance.randrange(256)
    batch = EncodedBatch(
        stored.batch.topic, stored.batch.queue_id, bytes(data), stored.batch.sizes, stored.batch.tag_codes, None, ()
    )
    with suppress(ValueError):
        validate_batch(batch)
        starts = record_starts(batch.records).tolist()
        assert [check_record(data, start, check_crc=False).size for start in starts] == batch.sizes.tolist()


@given(st.dictionaries(TEXT, TEXT, max_size=6))
def test_properties_come_back_with_and_without_their_last_separator(properties: dict[str, str]) -> None:
    data = encode_properties(properties)
    assert decode_properties(data) == properties
    assert decode_properties(data[:-1]) == properties


@given(st.text(max_size=600))
def test_java_hash_is_its_definition(text: str) -> None:
    value = 0
    data = text.encode("utf-16-be", "surrogatepass")
    for index in range(0, len(data), 2):
        value = (value * 31 + int.from_bytes(data[index : index + 2])) & 0xFFFFFFFF
    assert java_hash(text) & 0xFFFFFFFF == value


@given(TOPICS, st.lists(st.text(max_size=40), max_size=20))
def test_hashes_of_many_index_keys_equal_the_hash_of_each(topic: str, keys: list[str]) -> None:
    assert index_key_hashes(topic, keys).tolist() == [index_key_hash(topic, key) for key in keys]
