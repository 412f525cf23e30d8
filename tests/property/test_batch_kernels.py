"""Tests that the functions that process many records at once give the same results as the functions for a single
record."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
from hypothesis import given, strategies as st

from raymq.common.errors import MessageIllegalError
from raymq.common.message import Message
from raymq.records.format.crc import is_sealed
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch, topic_part
from raymq.records.format.layout import RecordError, encode_host, find_sections, header_size, record_ends, unpack_header
from raymq.records.kernels.check import BatchFacts, validate_batch
from raymq.records.kernels.stamp import begins_of, stamp, stamp_alike, stamp_many, stamp_mixed, stamp_one, units_of

OFFSETS = st.integers(0, 2**62)
HOSTS = {False: encode_host("10.0.0.7", 10911), True: encode_host("2001:db8::7", 10911)}


@st.composite
def batches(draw: st.DrawFn) -> EncodedBatch:
    """Hypothesis strategy for batches. The bodies of about half of the batches have equal lengths."""
    count, alike = draw(st.integers(1, 20)), draw(st.booleans())
    length = draw(st.integers(1, 200))
    bodies = [draw(st.binary(min_size=length if alike else 1, max_size=length)) for _ in range(count)]
    return encode_batch(
        [Message(draw(st.just("orders")), body, tags=draw(st.sampled_from([None, "red"]))) for body in bodies],
        draw(st.integers(0, 3)),
        born_host=(draw(st.sampled_from(["127.0.0.1", "::1"])), 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=[f"{index:032X}" for index in range(count)],
        producer=draw(st.none() | st.just(ProducerSequence("p", 0, 95))),
        append_prop_crc=draw(st.booleans()),
        store_host_ipv6=draw(st.booleans()),
    )


def is_ipv6_stored(batch: EncodedBatch) -> bool:
    return bool(unpack_header(batch.records, 0)[7] & 0x20)


@given(st.lists(st.tuples(batches(), OFFSETS), min_size=1, max_size=5), OFFSETS, st.booleans())
def test_records_of_all_kinds_are_stamped_together_as_one_by_one(
    drawn: list[tuple[EncodedBatch, int]], physical_offset: int, ipv6_store: bool
) -> None:
    # The test compares one record of each batch, the first. It skips batches whose records have a host field of another
    # size than this store's address (IPv4 or IPv6).
    records = [
        (bytes(batch.records[: batch.sizes[0]]), offset)
        for batch, offset in drawn
        if is_ipv6_stored(batch) == ipv6_store
    ]
    if not records:
        return
    expected, position = b"", physical_offset
    for record, queue_offset in records:
        one = bytearray(record)
        stamp_one(queue_offset, position, 12_345, HOSTS[ipv6_store], one)
        expected, position = expected + one, position + len(one)
    together = bytearray().join([record for record, _ in records])
    ends = record_ends(np.array([len(record) for record, _ in records], np.int32))
    offsets = np.array([offset for _, offset in records], np.int64)
    stamp_mixed(ends, offsets, physical_offset, 12_345, HOSTS[ipv6_store], together)
    assert together == expected


@given(batches(), OFFSETS, OFFSETS, st.integers(0, 2**42))
def test_a_batch_is_stamped_as_its_records_are_one_by_one(
    batch: EncodedBatch, queue_offset: int, physical_offset: int, store_ms: int
) -> None:
    host = HOSTS[is_ipv6_stored(batch)]
    expected, end = bytearray(batch.records), 0
    for index, size in enumerate(batch.sizes.tolist()):
        record = memoryview(expected)[end : end + size]
        stamp_one(queue_offset + index, physical_offset + end, store_ms, host, record)
        end += size
    values = (queue_offset, physical_offset, store_ms, host)
    many = bytearray(batch.records)
    stamp_many(record_ends(batch.sizes), *values, memoryview(many))
    assert many == expected
    whole = bytearray(batch.records)
    stamp(
        whole,
        batch.sizes,
        first_queue_offset=queue_offset,
        first_physical_offset=physical_offset,
        store_timestamp_ms=store_ms,
        store_host=host,
    )
    assert whole == expected
    stride = validate_batch(batch).stride
    assert stride in (0, *batch.sizes[:1].tolist())
    if stride and not is_sealed(batch.records):
        alike = bytearray(batch.records)
        stamp_alike(stride, *values, memoryview(alike))
        assert alike == expected


def facts_one_by_one(batch: EncodedBatch) -> BatchFacts | None:
    """Compute the BatchFacts (facts about a checked batch) of `batch` record by record, as the expected result of the
    fast function. Returns None if the batch is not valid."""
    magic, topic_text = topic_part(batch.topic)
    data, end, rows, flags = bytes(batch.records), 0, [], []
    for size in batch.sizes.tolist():
        record = data[end : end + size]
        end += size
        if len(record) < 91 or header_size(record[39]) > len(record):
            return None
        header = unpack_header(record, 0)
        try:
            body_at, body_end, _, properties_at, record_end = find_sections(record, 0, header)
        except RecordError:
            return None
        named = record[body_end : properties_at - 2] == topic_text
        if header[:2] != (size, magic) or header[3] != batch.queue_id or not named or record_end != size:
            return None
        rows.append((size, body_end - body_at, size - properties_at))
        flags.append(header[7])
    if end != len(data) or len({flag & 0x30 for flag in flags}) > 1:
        return None
    longest = [max(column) for column in zip(*rows, strict=True)]
    first_properties = data[rows[0][0] - rows[0][2] : rows[0][0]]
    return BatchFacts(len(rows), *longest, int(np.bitwise_or.reduce(flags)), first_properties)


@given(batches(), st.data())
def test_a_batch_is_legal_if_each_of_its_records_is(batch: EncodedBatch, draw: st.DataObject) -> None:
    data = bytearray(batch.records)
    for _ in range(draw.draw(st.integers(0, 2))):
        at = draw.draw(st.integers(0, len(data) - 1))
        data[at] = draw.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    changed = EncodedBatch(batch.topic, batch.queue_id, bytes(data), batch.sizes, batch.tag_codes, None, ())
    found = None
    with suppress(MessageIllegalError):
        found = validate_batch(changed)._replace(stride=0)
    assert found == facts_one_by_one(changed)


@given(batches(), OFFSETS)
def test_units_of_a_batch_equal_the_units_of_each_record(batch: EncodedBatch, physical_offset: int) -> None:
    begins = begins_of(physical_offset, batch.sizes, record_ends(batch.sizes))
    assert begins.tolist() == begins_of(physical_offset, batch.sizes, None).tolist()
    expected, at = b"", physical_offset
    for size, code in zip(batch.sizes.tolist(), batch.tag_codes.tolist(), strict=True):
        expected += struct.pack(">qiq", at, size, code)
        at += size
    assert units_of(begins, batch.sizes, batch.tag_codes).tobytes() == expected
