"""Tests of a message that a consumer sends back several times: golden fact 13 of spec/messaging.md, and the fields that
must not change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.core.broker.send_back import ReturnWriter, read_replayed, read_returned, reason_line
from raymq.common.delay import DELAY_LEVELS_MS, TIMER_TOPIC, timer_queue
from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.common.message import MAX_PROPERTIES_BYTES, PROPERTY_DLQ_ORIGIN_ERROR, Message, MessageExt, MessageQueue
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.protocol.group import GroupConfig, SendBackAnswer
from raymq.records.format.check import check_record
from raymq.records.format.decode import decode_records, read_record
from raymq.records.format.encode import ProducerSequence, encode_batch
from raymq.records.format.hashing import tags_code
from raymq.records.format.layout import BODY_OFFSET, SYS_FLAG_OFFSET, encode_host
from raymq.records.format.places import RecordPlace
from raymq.records.format.rewrite import move_record, read_waiting
from raymq.records.kernels.check import validate_batch
from raymq.records.kernels.stamp import stamp

GROUP = GroupConfig("billing", retry_queue_nums=3)
HOST = ("127.0.0.1", 10911)
NOW_MS = 1_772_366_400_000


def stored(records: bytes | bytearray, sizes, offset: int = 0, place: int = 4096) -> bytes:
    data = bytearray(records)
    stamp(data, sizes, first_queue_offset=offset, first_physical_offset=place, store_timestamp_ms=5000,
          store_host=encode_host(*HOST))  # fmt: skip
    return bytes(data)


def consumed(*bodies: bytes, times: int = 0, message_id: str = "A" * 32, **arguments) -> bytes:
    """Return records of topic `orders` as a consumer receives them."""
    messages = [Message("orders", body, "paid", ("k1", "k2"), {"a": "b"}, 7) for body in bodies]
    batch = encode_batch(
        messages,
        2,
        born_host=("10.0.0.1", 77),
        born_timestamp_ms=1000,
        message_ids=[message_id] * len(bodies),
        producer=ProducerSequence("p", 4, 5),
        reconsume_times=times,
        **arguments,
    )
    return stored(batch.records, batch.sizes)


def writer(**arguments) -> ReturnWriter:
    return ReturnWriter("back", lambda count: count - 1, **arguments)


def give_back(
    records: bytes, at: ReturnWriter | None = None, *, delay_level: int = 0, max_times: int = -1, group=GROUP
):
    returned, answer = read_returned(
        records, group, delay_level=delay_level, max_reconsume_times=max_times, now_ms=NOW_MS
    )
    return (at or writer()).batches("billing", returned, GROUP.retry_queue_nums), answer


def delivered(batch) -> bytes:
    """Return the record that the store's scheduler writes to the retry topic when the retry delay is over."""
    waiting = read_waiting(stored(batch.records, batch.sizes))
    moved = move_record(
        waiting, waiting.real_topic, waiting.real_queue_id, producer=ProducerSequence("d", 0, 0), store_host_ipv6=False
    )
    return stored(moved, [len(moved)], place=8192)


def one(records: bytes) -> MessageExt:
    [message] = decode_records(records)
    return message


def returned_of(records: bytes, **arguments):
    return read_returned(records, GROUP, max_reconsume_times=-1, now_ms=NOW_MS, **arguments)


def test_a_message_waits_longer_each_time_and_is_dead_after_sixteen():
    waits = []
    for times in range(16):
        [batch], answer = give_back(consumed(b"x", times=times))
        assert answer == SendBackAnswer(1, 0)
        assert batch.topic == SCHEDULE_TOPIC
        waits.append(DELAY_LEVELS_MS[batch.queue_id] // 1000)
        assert one(batch.records).system_properties["DELAY"] == str(batch.queue_id + 1)
    assert waits == [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]
    assert sum(waits) == 17140
    [batch], answer = give_back(consumed(b"x", times=16))
    assert (batch.topic, batch.queue_id, answer) == ("%DLQ%billing", 0, SendBackAnswer(0, 1))
    assert one(batch.records).reconsume_times == 17


def test_a_groups_own_intervals_count_by_attempt_and_the_last_one_repeats():
    group = replace(GROUP, retry_intervals_s=(0.25, 90, 2 * 86_400), retry_max_times=4)
    waits = []
    for times in range(4):
        [batch], answer = give_back(consumed(b"x", times=times), group=group)
        assert answer == SendBackAnswer(1, 0)
        validate_batch(batch)
        deliver_at_ms = int(one(batch.records).system_properties["TIMER_DELIVER_MS"])
        assert batch.tag_codes.tolist() == [deliver_at_ms]
        assert (batch.topic, batch.queue_id) == (TIMER_TOPIC, timer_queue(deliver_at_ms, NOW_MS))
        waits.append((deliver_at_ms - NOW_MS) / 1000)
    assert waits == [0.25, 90, 172_800, 172_800]
    [batch], answer = give_back(consumed(b"x", times=4), group=group)
    assert (batch.topic, answer) == ("%DLQ%billing", SendBackAnswer(0, 1))


def test_a_message_stays_itself_over_returns_with_a_groups_own_intervals():
    group = replace(GROUP, retry_intervals_s=(5,))
    record = consumed(b"body")
    first, at = one(record), writer()
    for times in range(1, 3):
        [batch], _ = give_back(record, at, group=group)
        record = delivered(batch)
        message = one(record)
        assert (message.topic, message.queue_id, message.reconsume_times) == ("%RETRY%billing", 2, times)
    for name in ("body", "tags", "keys", "properties", "flag", "born_timestamp_ms", "message_id"):
        assert getattr(message, name) == getattr(first, name)
    [batch], _ = give_back(record, at, max_times=0, group=group)
    dead = one(stored(batch.records, batch.sizes))
    assert dead.topic == "%DLQ%billing"
    assert not {"TIMER_DELIVER_MS", "REAL_TOPIC", "REAL_QID"} & dead.system_properties.keys()


def test_a_level_that_is_asked_for_counts_more_than_the_groups_intervals():
    [batch], _ = give_back(consumed(b"x"), delay_level=5, group=replace(GROUP, retry_intervals_s=(5,)))
    assert (batch.topic, batch.queue_id) == (SCHEDULE_TOPIC, 4)


@pytest.mark.parametrize(("level", "queue"), [(1, 0), (5, 4), (18, 17), (99, 17)])
def test_a_level_may_be_asked_for(level, queue):
    [batch], _ = give_back(consumed(b"x", times=4), delay_level=level)
    assert batch.queue_id == queue


@pytest.mark.parametrize(("times", "most", "dead"), [(1, 2, False), (2, 2, True), (0, 0, True), (15, -1, False)])
def test_the_caller_sets_the_maximum_number_of_retries(times, most, dead):
    assert give_back(consumed(b"x", times=times), max_times=most)[1] == SendBackAnswer(not dead, dead)


def test_a_negative_level_means_dead_at_once():
    [batch], _ = give_back(consumed(b"x"), delay_level=-1)
    assert batch.topic == "%DLQ%billing"


def test_a_message_stays_itself_over_all_its_returns():
    record = consumed(b"body")
    first = one(record)
    at = writer()
    for times in range(1, 4):
        [batch], _ = give_back(record, at, max_times=3)
        record = delivered(batch)
        message = one(record)
        assert (message.topic, message.queue_id) == ("%RETRY%billing", 2)
        assert message.reconsume_times == times
    [batch], _ = give_back(record, at, max_times=3)
    dead = one(stored(batch.records, batch.sizes))
    assert (dead.topic, dead.reconsume_times) == ("%DLQ%billing", 4)
    for name in ("body", "tags", "keys", "properties", "flag", "born_timestamp_ms", "born_host", "message_id"):
        assert getattr(dead, name) == getattr(first, name) == getattr(message, name)
    assert dead.system_properties["RETRY_TOPIC"] == "orders"
    assert dead.system_properties["ORIGIN_MESSAGE_ID"] == first.offset_message_id
    assert not {"DELAY", "REAL_TOPIC", "REAL_QID"} & dead.system_properties.keys()
    assert batch.tag_codes.tolist() == [tags_code("paid")]


def test_a_message_without_a_unique_id_keeps_the_id_it_was_first_consumed_with():
    record = consumed(b"x", message_id="")
    [batch], _ = give_back(record)
    assert one(delivered(batch)).message_id == one(record).message_id


@pytest.mark.parametrize("arguments", [{}, {"append_prop_crc": True}])
@pytest.mark.parametrize("ipv6", [False, True])
def test_the_batches_are_such_as_a_store_takes(arguments, ipv6):
    records = consumed(b"one", b"two", **arguments)
    batches, _ = give_back(records, writer(store_host_ipv6=ipv6))
    for batch in batches:
        validate_batch(batch)
    [batch] = batches
    data = bytearray(batch.records)
    stamp(data, batch.sizes, first_queue_offset=0, first_physical_offset=0, store_timestamp_ms=1,
          store_host=encode_host("::1" if ipv6 else "127.0.0.1", 1))  # fmt: skip
    assert check_record(data, check_property_crc=bool(arguments)).ok
    assert [message.body for message in decode_records(data)] == [b"one", b"two"]


def test_one_call_makes_one_batch_for_each_queue_and_sequences_grow_over_calls():
    at = writer()
    records = consumed(b"a", times=0) + consumed(b"b", times=1) + consumed(b"c", times=0) + consumed(b"d", times=16)
    batches, answer = give_back(records, at)
    assert [(batch.topic, batch.queue_id, len(batch)) for batch in batches] == [
        (SCHEDULE_TOPIC, 2, 2),
        (SCHEDULE_TOPIC, 3, 1),
        ("%DLQ%billing", 0, 1),
    ]
    assert answer == SendBackAnswer(3, 1)
    [again], _ = give_back(consumed(b"e"), at)
    assert again.producer == ProducerSequence("back", 0, 2)
    assert one(again.records).system_properties["RMQ_SEQ"] == "2"


@pytest.mark.parametrize("damage", [lambda r: r[:-1], lambda r: r + b"x", lambda r: b"x" * len(r)])
def test_damaged_records_cannot_be_sent_back(damage):
    record = consumed(b"a body that is long enough to be damaged in its middle")
    with pytest.raises(InvalidArgumentError):
        give_back(damage(record))


def test_nothing_given_back_is_nothing_to_do():
    assert give_back(b"") == ([], SendBackAnswer(0, 0))


def test_properties_that_leave_no_room_are_refused():
    with pytest.raises(MessageIllegalError):
        give_back(consumed(b"x", extra_properties={"x": "y" * 32600}))


def with_a_damaged_body(record: bytes) -> bytes:
    return record[:BODY_OFFSET] + bytes([record[BODY_OFFSET] ^ 1]) + record[BODY_OFFSET + 1 :]


@pytest.mark.parametrize("flag", [0, 0x201])
def test_a_message_with_a_damaged_body_is_a_dead_letter_that_nobody_takes_for_intact(flag):
    record = bytearray(with_a_damaged_body(consumed(b"body of the message")))
    record[SYS_FLAG_OFFSET : SYS_FLAG_OFFSET + 4] = flag.to_bytes(4)
    [batch], answer = give_back(bytes(record))
    assert (batch.topic, answer) == ("%DLQ%billing", SendBackAnswer(0, 1))
    validate_batch(batch)
    letter = stored(batch.records, batch.sizes)
    assert check_record(letter).ok, "the log can hold it"
    message = read_record(letter, 0, RecordPlace(MessageQueue("%DLQ%billing", "a", 0)))
    assert "unknown compression type" in message.body_error.reason
    assert message.system_properties[PROPERTY_DLQ_ORIGIN_ERROR] == "the body's CRC is wrong"
    assert message.properties == {"a": "b"}
    body_at = BODY_OFFSET
    assert letter[body_at : body_at + 19] == bytes(record[body_at : body_at + 19]), "the bytes are kept"


def test_a_message_that_cannot_be_read_is_dead_at_once_with_the_reason_and_nothing_is_decompressed(monkeypatch):
    monkeypatch.setattr("raymq.records.format.compression.decompress", None)
    record = bytearray(consumed(b"no frame"))
    record[SYS_FLAG_OFFSET : SYS_FLAG_OFFSET + 4] = (0x201).to_bytes(4)
    returned, answer = returned_of(bytes(record), delay_level=0, reason="no \x01 frame\x02" + "." * 1000)
    [batch] = writer().batches("billing", returned, 3)
    assert (batch.topic, answer) == ("%DLQ%billing", SendBackAnswer(0, 1))
    message = read_record(stored(batch.records, batch.sizes), 0, RecordPlace(MessageQueue("%DLQ%billing", "a", 0)))
    assert message.system_properties[PROPERTY_DLQ_ORIGIN_ERROR].startswith("no   frame ..")
    assert len(message.system_properties[PROPERTY_DLQ_ORIGIN_ERROR]) == 500
    assert message.sys_flag == 0x201


@pytest.mark.parametrize("offset", [3, 5, 87])
def test_a_damaged_record_cannot_be_given_back(offset):
    record = bytearray(consumed(b"body"))
    record[offset] ^= 1
    with pytest.raises(InvalidArgumentError, match="not whole, unchanged records"):
        give_back(bytes(record))


def test_a_dead_letter_has_its_origin_its_attempts_and_the_reason_of_its_failure():
    returned, _ = returned_of(consumed(b"x"), delay_level=-1, attempts=3, failure="not\nacknowledged\x01")
    [batch] = writer().batches("billing", returned, 3)
    letter = one(batch.records)
    assert letter.reconsume_times == 3
    assert letter.system_properties["DLQ_ORIGIN_TOPIC"] == "orders"
    assert letter.system_properties["DLQ_ORIGIN_MESSAGE_ID"] == letter.message_id == "A" * 32
    assert letter.system_properties["DLQ_ORIGIN_ERROR"] == "not acknowledged "


def test_a_message_that_is_to_be_tried_again_has_no_reason_and_a_replayed_one_loses_it():
    returned, _ = returned_of(consumed(b"x"), delay_level=0, failure="no")
    [batch] = writer().batches("billing", returned, 3)
    assert not any(name.startswith("DLQ_") for name in one(batch.records).system_properties)
    returned, _ = returned_of(consumed(b"x"), delay_level=-1, failure="no")
    [dead] = writer().batches("billing", returned, 3)
    [again] = writer().batches("billing", read_replayed(stored(dead.records, dead.sizes)), 3)
    assert not any(name.startswith("DLQ_") for name in one(again.records).system_properties)


def test_a_dead_letter_without_place_for_its_origin_is_kept_all_the_same():
    record = consumed_with_properties(MAX_PROPERTIES_BYTES - 450)
    returned, answer = returned_of(record, delay_level=-1, failure="x" * 1000)
    [batch] = writer().batches("billing", returned, 3)
    assert (answer.dead, one(batch.records).body) == (1, b"x")
    assert "DLQ_ORIGIN_ERROR" not in one(batch.records).system_properties


def consumed_with_properties(size: int) -> bytes:
    """Return a record of topic `orders` whose properties take about `size` bytes."""
    batch = encode_batch(
        [Message("orders", b"x", properties={"a": "b" * size})],
        2,
        born_host=("10.0.0.1", 77),
        born_timestamp_ms=1000,
        message_ids=["A" * 32],
        producer=ProducerSequence("p", 4, 5),
    )
    return stored(batch.records, batch.sizes)


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("", ""),
        ("the listener answered RECONSUME_LATER", "the listener answered RECONSUME_LATER"),
        ('Traceback (most recent call last):\n  File "x"\nValueError: never\n', "ValueError: never"),
        ("y" * 1000, "y" * 499 + "…"),
    ],
)
def test_a_reason_is_one_line(reason, line):
    assert reason_line(reason) == line
