"""Tests of the golden facts of spec/storage.md §13 about records, hashes and ids. The tests use the numbers of the
spec."""

from __future__ import annotations

import numpy as np
import pytest

from raymq.common.config.values import BATCH_UNIT_BYTES, CONSUME_QUEUE_UNIT_BYTES
from raymq.common.message import Message
from raymq.records.format.check import check_record
from raymq.records.format.crc import body_crc
from raymq.records.format.decode import decode_record
from raymq.records.format.encode import encode_batch
from raymq.records.format.hashing import index_key_hash, java_hash, tags_code
from raymq.records.format.inner_batch import BatchItem, decode_batch_items, encode_batch_item
from raymq.records.format.layout import (
    BATCH_UNIT_DTYPE,
    MAGIC_V2,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_BORN_HOST_IPV6,
    UNIT_DTYPE,
    decode_properties,
    encode_blank,
    encode_host,
    header_size,
)
from raymq.records.format.message_id import UniqueIdGenerator, offset_message_id
from raymq.records.kernels.stamp import stamp

RECORD_8 = bytes.fromhex(
    "00000065daa320a758932aac0000000000000000000000000000000000000000000000000000000000000"
    "18bcfe568007f000001000030390000018bcfe568017f00000100002a9f00000000000000000000000000"
    "00000268690154000754414753014102"
)


def stored(*, born_ip: str = "127.0.0.1", append_prop_crc: bool = False) -> bytes:
    """Return the encoded record of golden fact 8 of spec/storage.md, with offset and timestamp set. `born_ip`: the
    producer's address. `append_prop_crc`: True if the record has a property CRC."""
    batch = encode_batch(
        [Message("T", b"hi", tags="A")],
        0,
        born_host=(born_ip, 12345),
        born_timestamp_ms=1700000000000,
        message_ids=[""],
        append_prop_crc=append_prop_crc,
    )
    record = bytearray(batch.records)
    stamp(
        record,
        batch.sizes,
        first_queue_offset=0,
        first_physical_offset=0,
        store_timestamp_ms=1700000000001,
        store_host=encode_host("127.0.0.1", 10911),
    )
    return bytes(record)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("TagA", 2598919),
        ("TagB", 2598920),
        ("order", 106006350),
        ("A", 65),
        ("", 0),
        ("消息", 893927),
        ("😀", 1772899),
        ("TagA || TagB", 1359775119),
        ("zzzzzzzz", -1910022912),
        ("polygenelubricants", -2147483648),
        ("TopicTest#KEY1", -1656969516),
    ],
)
def test_facts_1_to_5_hash_codes(text: str, value: int) -> None:
    assert java_hash(text) == value


def test_fact_3_a_negative_tag_code_is_sign_extended() -> None:
    assert tags_code("zzzzzzzz").to_bytes(8, signed=True).hex() == "ffffffff8e275d00"


@pytest.mark.parametrize(
    ("key", "key_hash", "slot", "position"),
    [("KEY1", 1656969516, 1969516, 7878104), ("ORDERID_100", 1918410297, 3410297, 13641228)],
)
def test_facts_5_and_6_index_hashes(key: str, key_hash: int, slot: int, position: int) -> None:
    assert index_key_hash("TopicTest", key) == key_hash
    assert key_hash % 5_000_000 == slot
    assert 40 + 4 * slot == position


@pytest.mark.parametrize(
    ("body", "crc"), [(b"hi", 1486039724), (b"a", 1756872259), (b"Hello RocketMQ", 1774740973), (b"", 0)]
)
def test_fact_7_masked_crc(body: bytes, crc: int) -> None:
    assert body_crc(body) == crc


def test_fact_8_a_v1_record() -> None:
    assert stored() == RECORD_8
    assert len(RECORD_8) == 101
    message = decode_record(RECORD_8)
    assert (message.topic, message.body, message.tags, message.queue_id) == ("T", b"hi", "A", 0)
    assert (message.born_timestamp_ms, message.store_timestamp_ms) == (1700000000000, 1700000000001)
    assert (message.born_host, message.store_host) == ("127.0.0.1:12345", "127.0.0.1:10911")


def test_fact_9_the_same_record_as_v2() -> None:
    record = bytes.fromhex("00000066daa320ab") + RECORD_8[8:90] + bytes.fromhex("000154") + RECORD_8[92:]
    assert len(record) == 102
    assert check_record(record) == (102, True)
    message = decode_record(record)
    assert (message.topic, message.body, message.tags) == ("T", b"hi", "A")


def test_fact_9_long_topics_are_written_as_v2() -> None:
    batch = encode_batch(
        [Message("%RETRY%" + "g" * 121, b"hi")], 0, born_host=("127.0.0.1", 1), born_timestamp_ms=0, message_ids=[""]
    )
    assert batch.records[4:8] == MAGIC_V2.to_bytes(4, signed=True)
    assert batch.records[90:92] == b"\x00\x80"


def test_fact_10_the_same_record_with_a_property_crc() -> None:
    record = stored(append_prop_crc=True)
    assert len(record) == 121
    assert record.hex().startswith("00000079")
    assert record[92:94].hex() == "001b"
    assert record[-20:].hex() == "5f5f435243333223013333353739393930383102"
    assert check_record(record, check_property_crc=True) == (121, True)


def test_fact_11_the_same_record_from_an_ipv6_producer() -> None:
    record = stored(born_ip="::1")
    assert len(record) == 113
    assert record[36:40].hex() == "00000010"
    moved = STORE_TIMESTAMP_OFFSET + header_size(SYS_FLAG_BORN_HOST_IPV6) - header_size(0)
    assert moved == 68
    assert record[68:76] == (1700000000001).to_bytes(8)
    assert decode_record(record).born_host == "[::1]:12345"


def test_fact_12_a_blank() -> None:
    assert encode_blank(100).hex() == "00000064cbd43194"
    assert check_record(encode_blank(100) + bytes(92)) == (0, True)


def test_fact_14_offset_message_ids() -> None:
    assert offset_message_id("127.0.0.1", 10911, 101) == "7F00000100002A9F0000000000000065"
    assert offset_message_id("192.168.1.2", 10911, 1 << 30) == "C0A8010200002A9F0000000040000000"
    identifier = offset_message_id("::1", 10911, 101)
    assert len(identifier) == 56
    assert identifier.endswith("00002A9F0000000000000065")


def test_fact_15_a_unique_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymq.records.format.message_id._month_bounds_ms", lambda now_ms: (1_000_000, 1 << 62))
    generator = UniqueIdGenerator(
        "192.168.1.2", pid=0x1234, loader_hash=0x18B4AAC2, clock_ms=lambda: 1_000_000 + 86_400_000
    )
    assert generator.next_batch(6)[5] == "C0A80102123418B4AAC205265C000005"


def test_fact_16_consume_queue_units() -> None:
    units = np.array([(0, 101, tags_code("A")), (101, 101, tags_code("TagA"))], dtype=UNIT_DTYPE)
    assert units[0].tobytes().hex() == "0000000000000000000000650000000000000041"
    assert units[1].tobytes().hex() == "000000000000006500000065000000000027a807"


def test_unit_sizes_in_the_settings_match_their_layouts() -> None:
    assert UNIT_DTYPE.itemsize == CONSUME_QUEUE_UNIT_BYTES
    assert BATCH_UNIT_DTYPE.itemsize == BATCH_UNIT_BYTES


def test_fact_27_a_batch_item() -> None:
    item = BatchItem(b"hi", {"TAGS": "A"})
    data = encode_batch_item(item)
    assert data.hex() == "0000001f000000000000000000000000000000026869000754414753014102"
    assert decode_batch_items(data) == [item]


def test_fact_31_parsing_properties() -> None:
    data = b"a\x02b\x01c\x02\x01x\x02k\x01v\x01w\x02last\x01z"
    assert decode_properties(data) == {"b": "c", "k": "v\x01w", "last": "z"}
