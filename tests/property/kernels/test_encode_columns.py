"""Tests of the function that encodes messages from columns: it writes the same bytes as the encoder of single
messages."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.common.message import Message
from raymq.records.format.check import check_record, record_starts
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.message_id import IdRange
from raymq.records.kernels.byte_column import ByteColumn
from raymq.records.kernels.check import validate_batch
from raymq.records.kernels.encode import encode_columns
from tests.support.cases import examples
from tests.support.clients.legal_messages import HOSTS, INT32, KEYS, NAMES, TAGS, TEXT, TOPICS

SIZES = st.integers(1, 40) | st.sampled_from([127, 128, 1024, 4095, 4096, 64 * 1024])
EDGES = st.sampled_from([0, 7, 9, 10, 95, 99, 990, 999, 9_990, 9_999, 10_000, 19_998, 99_999, 10**9 - 1, 2**62])
STEMS = st.text("0123456789ABCDEF", min_size=1, max_size=52)
ODD_IDS = st.text("0123456789ABCDEFé", max_size=5)
COMPRESSIONS = st.builds(Compression, st.sampled_from(CompressionType), threshold_bytes=st.sampled_from([0, 64, 5000]))


@dataclass(frozen=True)
class Rows:
    """Messages to encode. `options`: further arguments that the column encoder and the encoder of single
    messages get."""

    messages: list[Message]
    ids: Sequence[str]
    queue_id: int
    options: dict[str, Any]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    topic, waits = draw(TOPICS), draw(st.booleans())
    plain, alike, size = draw(st.booleans()), draw(st.booleans()), draw(SIZES)
    count = draw(st.integers(1, 12))
    messages = []
    for index in range(count):
        body = bytes([index + 1, 7]) * (size if alike else draw(SIZES))
        named: dict[str, Any] = {}
        if not plain:
            named["tags"] = draw(st.none() | TAGS)
            named["keys"] = draw(st.lists(KEYS, max_size=3).map(tuple))
            named["properties"] = draw(st.dictionaries(NAMES, TEXT, max_size=3))
            named["flag"] = draw(INT32)
        messages.append(Message(topic, body, wait_store_msg_ok=waits, **named))
    ids = draw(
        st.builds(IdRange, STEMS, st.sampled_from([0, 5, 0xFFF8, 0xFFFF]), st.just(count))
        | st.lists(ODD_IDS, min_size=count, max_size=count)
        | st.just([""] * count)
        | st.just([f"{index:032X}" for index in range(count)])
    )
    options = {
        "born_host": draw(HOSTS),
        "born_timestamp_ms": draw(st.integers(0, 2**42)),
        "producer": draw(st.none() | st.builds(ProducerSequence, TEXT, INT32, EDGES)),
        "compression": draw(COMPRESSIONS),
        "extra_properties": draw(st.none() | st.just({"RETRY_TOPIC": "Tö", "ORIGIN_MESSAGE_ID": "X"})),
        "append_prop_crc": draw(st.booleans()),
        "reconsume_times": draw(INT32),
        "store_host_ipv6": draw(st.booleans()),
    }
    return Rows(messages, ids, draw(st.integers(0, 2**31 - 1)), options)


def text_of(message: Message) -> bytes:
    """Encode a message's own properties (user properties, tags and keys) as bytes, as a record stores them."""
    pairs = list(message.properties.items())
    pairs += [("TAGS", message.tags)] if message.tags else []
    pairs += [("KEYS", " ".join(message.keys))] if message.keys else []
    return "".join(f"{name}\x01{value}\x02" for name, value in pairs).encode()


def columns_of(made: Rows, kind: pa.DataType | None, expected: EncodedBatch) -> EncodedBatch:
    """Encode the messages of `made` from columns: Arrow arrays of type `kind`, or Python lists if `kind` is
    None."""
    bodies: Any = [message.body for message in made.messages]
    texts: Any = [text_of(message) for message in made.messages]
    if kind is not None:
        # Take slices of longer Arrow columns, so that the encoder also gets columns whose offsets do not start at 0.
        bodies = pa.array([b"before", *bodies, b"behind"], kind).slice(1, len(bodies))
        texts = pa.array([b"before", *texts, b""], kind).slice(1, len(texts))
    flags = np.array([message.flag for message in made.messages], np.int32)
    return encode_columns(
        made.messages[0].topic,
        made.queue_id,
        bodies,
        message_ids=made.ids,
        properties=texts if any(map(text_of, made.messages)) else None,
        tag_codes=expected.tag_codes,
        flags=flags if flags.any() else 0,
        wait_store_msg_ok=made.messages[0].wait_store_msg_ok,
        **made.options,
    )


@settings(max_examples=examples(150))
@given(rows(), st.sampled_from([None, pa.binary(), pa.large_binary(), pa.binary_view()]))
def test_columns_and_messages_are_encoded_alike(made: Rows, kind: pa.DataType | None) -> None:
    expected = encode_batch(made.messages, made.queue_id, message_ids=made.ids, **made.options)
    batch = columns_of(made, kind, expected)
    assert bytes(batch.records) == expected.records
    assert (batch.topic, batch.queue_id, batch.producer) == (expected.topic, expected.queue_id, expected.producer)
    assert (batch.sizes.dtype, batch.sizes.tolist()) == (np.int32, expected.sizes.tolist())
    assert (batch.tag_codes.dtype, batch.tag_codes.tolist()) == (np.int64, expected.tag_codes.tolist())
    assert batch.message_ids == expected.message_ids
    assert batch.wait_store_msg_ok is expected.wait_store_msg_ok
    validate_batch(batch)
    for start, size in zip(record_starts(batch.records).tolist(), batch.sizes.tolist(), strict=True):
        # With `append_prop_crc`, the property CRC is missing from the encoded record, because the store fills it in
        # later. So the test does not check the record's CRCs in this case.
        sealed = made.options["append_prop_crc"]
        assert check_record(batch.records, start, check_crc=not sealed) == (size, True)


@pytest.mark.parametrize("count", [1, 2, 100, 4096])
@pytest.mark.parametrize("first", [0, 995, 9_999, 123_456_789_995])
@pytest.mark.parametrize("alike", [True, False])
def test_many_rows_over_the_ends_of_counters_and_sequences(count: int, first: int, alike: bool) -> None:
    bodies = [b"%04d" % index * (1 if alike else index % 7 + 1) for index in range(count)]
    common: dict[str, Any] = {
        "born_host": ("127.0.0.1", 9), "born_timestamp_ms": 1_763_000_000_000,
        "message_ids": IdRange("7F0000010000", 0xF800, count), "producer": ProducerSequence("p", 3, first),
    }  # fmt: skip
    expected = encode_batch([Message("orders", body) for body in bodies], 3, **common)
    assert bytes(encode_columns("orders", 3, bodies, **common).records) == expected.records


def encode(bodies: Any, **named: Any) -> EncodedBatch:
    ids = IdRange("A", 0, named.pop("ids", len(bodies)))
    return encode_columns("t", 0, bodies, born_host=("::1", 1), born_timestamp_ms=1, message_ids=ids, **named)


def test_illegal_columns_are_refused() -> None:
    with pytest.raises(MessageIllegalError, match="0 messages with 0 ids"):
        encode([])
    with pytest.raises(MessageIllegalError, match="2 messages with 1 ids"):
        encode([b"a", b"b"], ids=1)
    with pytest.raises(MessageIllegalError, match=r"take 33\d\d\d bytes; at most 32767 are allowed"):
        encode([b"a", b"b"], properties=[b"", b"n\x01" + b"v" * 33_000 + b"\x02"])
    with pytest.raises(InvalidArgumentError, match="1 nulls"):
        encode(pa.array([b"a", None]))
    with pytest.raises(InvalidArgumentError, match="int64 does not contain byte strings"):
        encode(pa.array([1]))


def test_a_pickled_batch_keeps_its_records() -> None:
    batch = encode(pa.array(["é", "bb"]))
    copy = pickle.loads(pickle.dumps(batch))
    assert copy.records == bytes(batch.records)
    assert copy.message_ids == batch.message_ids
    assert copy.sizes.tolist() == batch.sizes.tolist()


@given(st.lists(st.binary(max_size=20)), st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()]))
def test_a_byte_column_has_the_strings_that_it_is_made_of(values: list[bytes], kind: pa.DataType) -> None:
    sliced = pa.array([b"x", *values], kind).slice(1)
    for column in (ByteColumn.of(values), ByteColumn.of(sliced), ByteColumn.of(ByteColumn.of(sliced).array())):
        assert (len(column), list(column.tolist())) == (len(values), values)
        assert column.sizes.tolist() == [len(value) for value in values]
        assert column.array().to_pylist() == values
