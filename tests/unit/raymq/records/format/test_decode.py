"""Tests of records: encoding a batch, setting its offsets and timestamps, checking and decoding the batch, and damaged
records."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from msgspec.structs import force_setattr

from raymq.common.errors import IllegalNameError, InvalidArgumentError, MessageIllegalError
from raymq.common.message import Message, MessageExt
from raymq.records.format.check import check_record, find_starts, record_starts
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.decode import decode_record, decode_records
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.layout import (
    BLANK_MAGIC,
    RecordError,
    decode_properties,
    encode_blank,
    encode_host,
    encode_properties,
)
from raymq.records.kernels.check import validate_batch
from raymq.records.kernels.stamp import stamp

PRODUCER = ProducerSequence("p-17", 3, 1000)
STORE_HOST = encode_host("10.0.0.9", 10911)


def encode(
    *messages: Message,
    born_ip: str = "10.0.0.1",
    producer: ProducerSequence | None = None,
    compression: Compression | None = None,
    extra_properties: dict[str, str] | None = None,
    append_prop_crc: bool = False,
    reconsume_times: int = 0,
    store_host_ipv6: bool = False,
) -> EncodedBatch:
    return encode_batch(
        messages,
        5,
        born_host=(born_ip, 4711),
        born_timestamp_ms=1700000000000,
        message_ids=[f"{index:032X}" for index in range(len(messages))],
        producer=producer,
        compression=compression or Compression(),
        extra_properties=extra_properties,
        append_prop_crc=append_prop_crc,
        reconsume_times=reconsume_times,
        store_host_ipv6=store_host_ipv6,
    )


def stamped(batch: EncodedBatch, store_host: bytes = STORE_HOST) -> bytes:
    records = bytearray(batch.records)
    stamp(
        records,
        batch.sizes,
        first_queue_offset=40,
        first_physical_offset=1 << 33,
        store_timestamp_ms=1700000000123,
        store_host=store_host,
    )
    return bytes(records)


def some_messages(count: int = 5) -> list[Message]:
    return [
        Message(
            "orders", b"x" * (index * 7 + 1), tags=f"t{index}", keys=(f"k{index}", "k"), properties={"n": str(index)}
        )
        for index in range(count)
    ]


def one_record() -> bytes:
    return stamped(encode(Message("orders", b"a body", tags="paid", keys=("o-17",)), producer=PRODUCER))


# Tests of decoding records


def test_a_message_comes_back_with_all_its_parts() -> None:
    message = Message("orders", b"body", tags="paid", keys=("a", "b"), properties={"region": "eu"}, flag=-9)
    extra = {"RETRY_TOPIC": "orders"}
    records = stamped(encode(message, producer=PRODUCER, extra_properties=extra, reconsume_times=2))
    assert decode_records(records, broker_name="broker-a") == [
        MessageExt(
            topic="orders",
            body=b"body",
            tags="paid",
            keys=("a", "b"),
            properties={"region": "eu"},
            flag=-9,
            broker_name="broker-a",
            queue_id=5,
            queue_offset=40,
            physical_offset=1 << 33,
            born_timestamp_ms=1700000000000,
            store_timestamp_ms=1700000000123,
            born_host="10.0.0.1:4711",
            store_host="10.0.0.9:10911",
            message_id="0" * 32,
            offset_message_id="0A00000900002A9F0000000200000000",
            reconsume_times=2,
            sys_flag=0,
            system_properties={
                "TAGS": "paid",
                "KEYS": "a b",
                "RETRY_TOPIC": "orders",
                "UNIQ_KEY": "0" * 32,
                "RMQ_PID": "p-17",
                "RMQ_EPOCH": "3",
                "RMQ_SEQ": "1000",
            },
        )
    ]


def test_a_decoded_message_is_a_frozen_message_ext_like_any_other() -> None:
    message = decode_record(one_record())
    assert type(message) is MessageExt
    assert pickle.loads(pickle.dumps(message)) == message
    assert replace(message, queue_id=6).queue_id == 6
    with pytest.raises(FrozenInstanceError):
        message.queue_id = 6  # type: ignore[misc]


def test_each_message_of_a_batch_has_its_own_sequence() -> None:
    records = stamped(encode(*some_messages(), producer=PRODUCER))
    views = [dispatch_view(records, start) for start in record_starts(records).tolist()]
    assert [view.producer for view in views] == [ProducerSequence("p-17", 3, 1000 + index) for index in range(5)]


def test_a_message_without_a_unique_id_is_known_by_its_place() -> None:
    batch = encode_batch([Message("orders", b"x")], 0, born_host=("10.0.0.1", 1), born_timestamp_ms=0, message_ids=[""])
    message = decode_record(stamped(batch))
    assert message.message_id == message.offset_message_id
    assert "UNIQ_KEY" not in message.system_properties


@pytest.mark.parametrize("born_ip", ["10.0.0.1", "2001:db8::1"])
@pytest.mark.parametrize("store_host", [STORE_HOST, encode_host("::1", 10911)])
@pytest.mark.parametrize("append_prop_crc", [False, True])
def test_hosts_of_both_families_are_stamped_and_read(born_ip: str, store_host: bytes, append_prop_crc: bool) -> None:
    batch = encode(
        *some_messages(), born_ip=born_ip, append_prop_crc=append_prop_crc, store_host_ipv6=len(store_host) == 20
    )
    validate_batch(batch)
    records = stamped(batch, store_host)
    messages = decode_records(records)
    assert [message.queue_offset for message in messages] == [40, 41, 42, 43, 44]
    assert [message.physical_offset - (1 << 33) for message in messages] == record_starts(records).tolist()
    assert {message.store_timestamp_ms for message in messages} == {1700000000123}
    assert {message.store_host for message in messages} == {"10.0.0.9:10911" if len(store_host) == 8 else "[::1]:10911"}
    assert {message.born_host.rpartition(":")[0].strip("[]") for message in messages} == {born_ip}
    for start in record_starts(records).tolist():
        assert check_record(records, start, check_property_crc=append_prop_crc).ok


@pytest.mark.parametrize("type", list(CompressionType))
def test_bodies_are_compressed_and_come_back(type: CompressionType) -> None:
    messages = [Message("orders", b"long " * 2000), Message("orders", b"short")]
    batch = encode(*messages, compression=Compression(type))
    decoded = decode_records(stamped(batch))
    assert [message.body for message in decoded] == [message.body for message in messages]
    assert [message.sys_flag for message in decoded] == [type | 1 if type else 0, 0]
    assert (len(batch.records) < 10_000) == bool(type)


def test_records_in_any_buffer_and_at_any_position_are_read() -> None:
    record = one_record()
    buffer = b"before" + record + b"after"
    for kind in (bytes, bytearray, memoryview):
        assert decode_record(kind(buffer), 6) == decode_record(record)
        assert dispatch_view(kind(buffer), 6) == dispatch_view(record)
        assert check_record(kind(buffer), 6) == (len(record), True)


def test_importing_the_record_format_imports_neither_arrow_nor_ray() -> None:
    code = (
        "import sys, raymq.records.format.decode; print([name for name in ('pyarrow', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Tests of encoding records


def test_an_encoded_batch_has_sizes_tag_codes_and_ids() -> None:
    batch = encode(*some_messages(3), producer=PRODUCER)
    assert batch.sizes.sum() == len(batch.records)
    assert record_starts(batch.records).tolist() == [0, batch.sizes[0], batch.sizes[0] + batch.sizes[1]]
    assert batch.tag_codes.tolist() == [ord("t") * 31 + ord("0") + index for index in range(3)]
    assert len(batch) == len(batch.message_ids) == 3
    shipped = pickle.loads(pickle.dumps(batch.without_ids()))
    assert shipped.message_ids == ()
    assert (shipped.records, shipped.producer) == (batch.records, PRODUCER)


def test_a_batch_of_no_messages_or_too_few_ids_is_refused() -> None:
    with pytest.raises(MessageIllegalError, match="0 messages"):
        encode()
    with pytest.raises(MessageIllegalError, match="1 messages with 2 ids"):
        encode_batch([Message("t", b"x")], 0, born_host=("10.0.0.1", 1), born_timestamp_ms=0, message_ids=["a", "b"])


def test_only_a_message_that_does_not_wait_has_the_wait_property() -> None:
    for waits, properties in ((True, {}), (False, {"WAIT": "false"})):
        batch = encode(Message("orders", b"x", wait_store_msg_ok=waits))
        assert batch.wait_store_msg_ok is waits
        assert decode_record(batch.records).system_properties == {"UNIQ_KEY": f"{0:032X}", **properties}


def test_a_batch_of_messages_that_wait_and_that_do_not_is_refused() -> None:
    with pytest.raises(MessageIllegalError, match="wait_store_msg_ok"):
        encode(Message("orders", b"x"), Message("orders", b"x", wait_store_msg_ok=False))


def test_a_batch_of_two_topics_is_refused() -> None:
    with pytest.raises(MessageIllegalError, match="one topic"):
        encode(Message("orders", b"x"), Message("refunds", b"x"))


def test_properties_longer_than_their_length_field_are_refused() -> None:
    fits = 32767 - len("n\x01\x02UNIQ_KEY\x01\x02") - 32
    batch = encode(Message("orders", b"x", properties={"n": "v" * fits}))
    assert decode_record(stamped(batch)).properties == {"n": "v" * fits}
    with pytest.raises(MessageIllegalError, match="32768 bytes"):
        encode(Message("orders", b"x", properties={"n": "v" * (fits + 1)}))


def test_a_born_host_that_is_not_an_address_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="localhost"):
        encode(Message("orders", b"x"), born_ip="localhost")


def test_the_largest_message_can_be_encoded() -> None:
    message = Message("orders", b"x" * (4 * 1024 * 1024))
    assert decode_record(stamped(encode(message))).body == message.body


@pytest.mark.parametrize("properties", [{"": "v"}, {"n": ""}, {"n": "\x01"}, {"a\x02": "v"}, {"n": "\ud800"}])
def test_properties_that_could_not_be_read_back_are_refused(properties: dict[str, str]) -> None:
    with pytest.raises(MessageIllegalError):
        encode_properties(properties)


def test_properties_over_the_limit_are_refused() -> None:
    assert len(encode_properties({"n": "v" * 32764})) == 32767
    with pytest.raises(MessageIllegalError, match="32768"):
        encode_properties({"n": "v" * 32765})


def test_the_last_of_equal_property_names_wins() -> None:
    assert decode_properties(b"n\x01a\x02m\x01b\x02n\x01c\x02") == {"n": "c", "m": "b"}


# Tests of checking a batch, and of setting its offsets and timestamps


def test_stamp_refuses_a_host_there_is_no_room_for() -> None:
    batch = encode(Message("orders", b"x"))
    records = bytearray(batch.records)
    with pytest.raises(MessageIllegalError, match="20 bytes"):
        stamp(
            records,
            batch.sizes,
            first_queue_offset=0,
            first_physical_offset=0,
            store_timestamp_ms=0,
            store_host=encode_host("::1", 1),
        )
    assert records == batch.records


def test_stamp_changes_only_fields_of_the_store() -> None:
    batch = encode(*some_messages(), producer=PRODUCER)
    before, after = np.frombuffer(batch.records, np.uint8), np.frombuffer(stamped(batch), np.uint8)
    changed = np.flatnonzero(before != after)
    starts = record_starts(batch.records)
    relative = changed - starts[np.searchsorted(starts, changed, side="right") - 1]
    assert set(relative.tolist()) <= {*range(20, 36), *range(56, 72)}


def damage_size(batch: EncodedBatch) -> EncodedBatch:
    return replace(batch, sizes=batch.sizes + np.array([1, -1, 0, 0, 0], dtype=np.int32))


def damage(position: int, value: bytes) -> Callable[[EncodedBatch], EncodedBatch]:
    """Return a function that overwrites bytes of the third record in a batch."""

    def change(batch: EncodedBatch) -> EncodedBatch:
        records = bytearray(batch.records)
        start = int(batch.sizes[:2].sum()) + position
        records[start : start + len(value)] = value
        return replace(batch, records=bytes(records))

    return change


@pytest.mark.parametrize(
    "change",
    [
        damage_size,
        lambda batch: replace(batch, sizes=batch.sizes[:4], tag_codes=batch.tag_codes[:4]),
        lambda batch: replace(batch, sizes=batch.sizes[:0], tag_codes=batch.tag_codes[:0]),
        lambda batch: replace(batch, tag_codes=batch.tag_codes[:4]),
        lambda batch: replace(batch, records=bytes(batch.records) + b"\0"),
        lambda batch: replace(batch, topic="orderz"),
        lambda batch: replace(batch, topic="../orders"),
        lambda batch: replace(batch, topic="o"),
        lambda batch: replace(batch, queue_id=6),
        lambda batch: replace(batch, queue_id=2**31),
        lambda batch: replace(batch, records=batch.records[:80], sizes=np.full(5, 16, np.int32)),
        lambda batch: replace(batch, sizes=batch.sizes * np.array([1, 1, 1, -1, 1], np.int32)),
        damage(3, b"\xff"),
        damage(4, BLANK_MAGIC.to_bytes(4, signed=True)),
        damage(15, b"\x09"),
        damage(39, b"\x10"),
        damage(39, b"\x20"),
        damage(84, b"\x7f\xff\xff\xff"),
        damage(84, b"\xff\xff\xff\xff"),
        damage(87, b"\x01"),
        damage(103, b"\x07"),
        damage(104, b"x"),
        damage(111, b"\x01"),
    ],
)
def test_a_batch_with_inconsistent_fields_is_refused(change: Callable[[EncodedBatch], EncodedBatch]) -> None:
    batch = encode(*some_messages(), producer=PRODUCER)
    validate_batch(batch)
    with pytest.raises(MessageIllegalError):
        validate_batch(change(batch))


def test_sizes_that_overflow_are_refused() -> None:
    batch = encode(*some_messages())
    sizes = np.full(5, 2**31 - 1, dtype=np.int32)
    with pytest.raises(MessageIllegalError):
        validate_batch(replace(batch, sizes=sizes))


def test_a_v2_batch_is_valid() -> None:
    batch = encode(Message("%RETRY%" + "g" * 200, b"x"), Message("%RETRY%" + "g" * 200, b"yy"))
    validate_batch(batch)
    assert [message.topic for message in decode_records(stamped(batch))] == ["%RETRY%" + "g" * 200] * 2


def test_a_batch_in_a_memoryview_is_valid() -> None:
    batch = encode(*some_messages())
    validate_batch(replace(batch, records=memoryview(bytearray(batch.records))))


# Tests of the record parser


def test_check_record_passes_over_whole_files() -> None:
    records = stamped(encode(*some_messages()))
    file = records + encode_blank(92) + bytes(84)
    sizes = []
    position = 0
    while not (check := check_record(file, position)).is_blank:
        assert check.ok
        sizes.append(check.size)
        position += check.size
    assert position == len(records)
    assert len(sizes) == 5


def test_a_blank_may_be_the_last_eight_bytes_of_a_file() -> None:
    assert check_record(one_record() + encode_blank(8), len(one_record())).is_blank


@pytest.mark.parametrize("length", [0, 1, 4, 7])
def test_a_tail_too_short_for_a_blank_is_no_record(length: int) -> None:
    assert check_record(encode_blank(length)[:length]) == (-1, False)


@pytest.mark.parametrize("length", [8, 90, 91, 500])
def test_zeros_are_no_record(length: int) -> None:
    assert check_record(bytes(length)) == (-1, False)


def test_a_blank_longer_than_its_file_is_no_record() -> None:
    assert check_record(encode_blank(101) + bytes(92)) == (-1, False)
    assert check_record(encode_blank(9)) == (-1, False)


def test_every_cut_is_no_record() -> None:
    record = one_record()
    for length in range(len(record)):
        assert check_record(record[:length]) == (-1, False)


def test_a_damaged_body_fails_only_when_its_crc_is_checked() -> None:
    record = bytearray(one_record())
    record[90] ^= 1
    assert check_record(record) == (-1, False)
    assert check_record(record, check_crc=False) == (len(record), True)
    with pytest.raises(RecordError, match="CRC"):
        decode_record(record)
    assert decode_record(record, check_crc=False).body == b"a cody"


def test_inconsistent_lengths_keep_the_size_of_the_record() -> None:
    record = bytearray(one_record())
    size = len(record)
    record[size - 8 : size] = b"12345678"
    properties_size_at = 88 + 6 + 1 + 6
    value = int.from_bytes(record[properties_size_at : properties_size_at + 2]) - 1
    record[properties_size_at : properties_size_at + 2] = value.to_bytes(2)
    assert check_record(record) == (size, False)
    with pytest.raises(RecordError):
        decode_record(record)
    with pytest.raises(RecordError):
        dispatch_view(record)


@pytest.mark.parametrize(
    ("position", "value"),
    [(84, b"\xff\xff\xff\xff"), (84, b"\x7f\xff\xff\xff"), (94, b"\xff"), (101, b"\xff\xff"), (101, b"\x7f\xff")],
)
def test_lengths_outside_the_buffer_are_no_record(position: int, value: bytes) -> None:
    record = bytearray(one_record())
    record[position : position + len(value)] = value
    assert check_record(record, check_crc=False) == (-1, False)
    with pytest.raises(RecordError):
        decode_record(record, check_crc=False)


def test_a_record_without_a_property_crc_fails_when_one_is_asked_for() -> None:
    assert check_record(one_record(), check_property_crc=True) == (-1, False)


def test_the_property_crc_finds_damage_anywhere() -> None:
    record = stamped(encode(Message("orders", b"x" * 10), append_prop_crc=True))
    assert check_record(record, check_property_crc=True).ok
    for position in range(len(record)):
        damaged = bytearray(record)
        damaged[position] ^= 0x04
        assert not check_record(damaged, check_crc=False, check_property_crc=True).ok, position


@pytest.mark.parametrize("position", [-1, -200, 1, 10_000])
def test_positions_without_a_record_are_refused(position: int) -> None:
    with pytest.raises(RecordError):
        decode_record(one_record(), position)
    with pytest.raises(RecordError):
        dispatch_view(one_record(), position)
    assert not check_record(one_record(), position).ok


def test_record_starts_refuses_a_cut_and_a_size_that_leads_nowhere() -> None:
    records = stamped(encode(*some_messages()))
    for buffer in (records[:-1], records + b"\0" * 50, records + bytes(100), bytes(91)):
        with pytest.raises(RecordError):
            record_starts(buffer)
    assert record_starts(b"").tolist() == []


def test_decode_records_refuses_a_cut_batch() -> None:
    records = stamped(encode(*some_messages()))
    with pytest.raises(RecordError):
        decode_records(records[:-1])
    assert decode_records(b"") == []


# Tests of dispatching records to consume queues and the index


def test_dispatch_view_has_the_fields_for_unit_and_index() -> None:
    record = one_record()
    view = dispatch_view(record)
    assert (view.size, view.topic, view.queue_id, view.queue_offset) == (len(record), "orders", 5, 40)
    assert (view.physical_offset, view.store_timestamp_ms, view.sys_flag) == (1 << 33, 1700000000123, 0)
    assert view.tags_code == 3433164  # 3433164 is the tag code of "paid"
    assert view.keys == ["0" * 32, "o-17"]
    assert view.producer == PRODUCER


@pytest.mark.parametrize(("level", "delay_ms"), [("1", 1000), ("3", 10_000), ("18", 7_200_000), ("99", 7_200_000)])
def test_a_delayed_message_s_unit_holds_when_it_is_due(level: str, delay_ms: int) -> None:
    extra = {"DELAY": level}
    record = stamped(encode(Message("SCHEDULE_TOPIC_XXXX", b"x", tags="paid"), extra_properties=extra))
    assert dispatch_view(record).tags_code == 1700000000123 + delay_ms


@pytest.mark.parametrize("level", ["0", "-1", "soon", "²", "9" * 5000])
def test_an_invalid_delay_level_leaves_the_tag_code(level: str) -> None:
    extra = {"DELAY": level}
    record = stamped(encode(Message("SCHEDULE_TOPIC_XXXX", b"x", tags="paid"), extra_properties=extra))
    assert dispatch_view(record).tags_code == 3433164


@pytest.mark.parametrize("extra", [{"RMQ_PID": "p"}, {"RMQ_PID": "p", "RMQ_EPOCH": "x", "RMQ_SEQ": "1"}])
def test_an_incomplete_dedup_identity_is_ignored(extra: dict[str, str]) -> None:
    assert dispatch_view(stamped(encode(Message("orders", b"x"), extra_properties=extra))).producer is None


def test_a_record_without_keys_has_only_its_unique_id_as_key() -> None:
    assert dispatch_view(stamped(encode(Message("orders", b"x")))).keys == ["0" * 32]


def test_an_illegal_topic_cannot_be_encoded() -> None:
    message = Message("orders", b"x")
    force_setattr(message, "topic", "a/b")
    with pytest.raises(IllegalNameError):
        encode(message)


@pytest.mark.parametrize("field", [0, 2, 4, 5, 85])
@pytest.mark.parametrize("row", [0, 3, 6])
def test_records_after_a_damaged_record_are_found(row: int, field: int) -> None:
    """All records after a damaged record are found. The test flips one bit in the damaged record's size, magic code or
    body size."""
    bodies = [b"%d" % number * (number + 1) for number in range(7)]
    batch = encode_batch([Message("orders", body) for body in bodies], 0, born_host=("127.0.0.1", 1),
                         born_timestamp_ms=1, message_ids=["A"] * 7)  # fmt: skip
    starts = record_starts(batch.records).tolist()
    for bit in range(8):
        data = bytearray(batch.records)
        data[starts[row] + field] ^= 1 << bit
        assert find_starts(data).tolist() == starts, bit


def test_damage_side_by_side_counts_as_one_record() -> None:
    batch = encode_batch([Message("orders", b"x")] * 5, 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1,
                         message_ids=["A"] * 5)  # fmt: skip
    starts = record_starts(batch.records).tolist()
    data = bytearray(batch.records)
    for row in (1, 2):
        data[starts[row] : starts[row] + 8] = bytes(8)
    assert find_starts(data).tolist() == [starts[0], starts[1], starts[3], starts[4]]
    assert find_starts(b"").tolist() == []
    assert find_starts(b"no record at all").tolist() == [0]
