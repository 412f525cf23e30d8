"""Tests of delayed messages: the records that a producer sends, and the records that the scheduler delivers after the
delay."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest

from raymq.client.producer.producer import Producer
from raymq.common.delay import DELAY_LEVELS_MS, TIMER_ROLL_QUEUE, TIMER_TOPIC, timer_queue
from raymq.common.errors import IllegalNameError, MessageIllegalError
from raymq.common.message import Message, MessageQueue, SendStatus
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.common.protocol.store import AppendResult
from raymq.records.format.check import check_record
from raymq.records.format.decode import decode_record
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import ProducerSequence, WaitingBatch, encode_batch
from raymq.records.format.layout import RecordError, encode_host
from raymq.records.format.rewrite import move_record, read_waiting
from raymq.records.kernels.stamp import stamp
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.storage_client import StorageDescription

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class FakeStorage:
    """Fake storage actor that accepts batches and counts the offsets in each queue."""

    name = "storage-broker-a-0"

    def __init__(self) -> None:
        self.batches = []
        self._ends: dict[tuple[str, int], int] = {}

    def describe(self, timeout_s):
        return StorageDescription(self.name, "broker-a", "n", 1, "/", 1, 1, ("127.0.0.1", 1), LaneAddress("", b""))

    def append(self, batches, timeout_s):
        results = []
        for batch in batches:
            offset = self._ends.get((batch.topic, batch.queue_id), 0)
            self._ends[batch.topic, batch.queue_id] = offset + len(batch)
            results.append(AppendResult(SendStatus.SEND_OK, offset, 0, 0))
        self.batches += batches
        return results


class Routes:
    def get(self, topic):
        broker = BrokerData("c", "broker-a", {0: FakeStorage.name})
        return TopicRoute(topic, {"broker-a": broker}, (QueueData("broker-a", 4, 4, 6),))

    def get_or_create(self, topic, default_topic_queue_nums):
        return self.get(topic)

    def invalidate(self, topic):
        pass


@pytest.fixture
def storage():
    return FakeStorage()


@pytest.fixture
def producer(storage):
    with Producer("g", routes=Routes(), storage=lambda name: storage, born_host=("127.0.0.1", 1)) as producer:
        yield producer


@pytest.mark.parametrize(("level", "queue_id"), [(1, 0), (5, 4), (18, 17)])
def test_a_level_goes_to_its_queue_of_the_schedule_topic(producer, storage, level, queue_id):
    """Golden fact 14 of spec/messaging.md, and golden fact 19 of spec/storage.md: each delay level has its own queue in
    the schedule topic."""
    result = producer.send(Message("orders", b"x", delay_level=level), sharding_key="k")
    assert result.queue == MessageQueue(SCHEDULE_TOPIC, "broker-a", queue_id)
    [batch] = storage.batches
    view = dispatch_view(batch.records)
    assert (view.topic, view.queue_id) == (SCHEDULE_TOPIC, queue_id)
    assert view.properties["DELAY"] == str(min(level, 18))
    assert view.properties["REAL_TOPIC"] == "orders"
    assert 0 <= int(view.properties["REAL_QID"]) < 4
    assert view.producer == ProducerSequence(view.producer.producer_id, 0, 0)


def test_a_time_goes_to_a_queue_of_the_timer_topic(producer, storage):
    due = now_ms() + HOUR_MS
    far = now_ms() + 39 * DAY_MS
    assert producer.send(Message("orders", b"x", deliver_at_ms=due)).queue.queue_id == timer_queue(due, due)
    assert producer.send(Message("orders", b"x", deliver_at_ms=far)).queue.queue_id == TIMER_ROLL_QUEUE
    assert [batch.topic for batch in storage.batches] == [TIMER_TOPIC, TIMER_TOPIC]
    assert dispatch_view(storage.batches[0].records).properties["TIMER_DELIVER_MS"] == str(due)
    assert storage.batches[0].tag_codes.tolist() == [due]


def test_a_time_that_is_past_is_delivered_at_once(producer, storage):
    result = producer.send(Message("orders", b"x", deliver_at_ms=now_ms() - 1))
    assert result.queue.topic == "orders"
    assert "REAL_TOPIC" not in dispatch_view(storage.batches[0].records).properties


def test_a_batch_may_mix_delayed_and_plain_messages_and_the_plain_ones_keep_their_order(producer, storage):
    messages = [Message("orders", b"%d" % n, delay_level=n % 3) for n in range(30)]
    results = producer.send_batch(messages)
    assert [result.queue.topic == "orders" for result in results] == [n % 3 == 0 for n in range(30)]
    plain = [result.queue_offset for result in results[::3]]
    assert plain == list(range(10))
    assert [result.queue_offset for result in results[1::3]] == list(range(10))


def test_sequences_grow_in_the_queue_where_messages_wait_whatever_they_are_for(producer, storage):
    for topic in ("orders", "bills", "orders"):
        producer.send(Message(topic, b"x", delay_level=2))
    assert [batch.producer.first_sequence for batch in storage.batches] == [0, 1, 2]
    assert [dispatch_view(batch.records).properties["REAL_TOPIC"] for batch in storage.batches] == [
        "orders", "bills", "orders",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"delay_level": -1}, "delay_level must be 0 to .*, not -1"),
        ({"delay_level": 1.5}, "delay_level must be a whole number, .* not 1.5"),
        ({"delay_level": True}, "delay_level must be a whole number, .* not True"),
        ({"delay_level": "3"}, "delay_level must be a whole number, .* not '3'"),
        ({"delay_level": 19}, "delay_level must be 0 to 18, not 19"),
        ({"delay_level": 99}, "delay_level must be 0 to 18, not 99"),
        ({"delay_level": 1, "deliver_at_ms": 0}, "pass only one"),
        ({"deliver_at_ms": -1}, "deliver_at_ms must be .*, not -1"),
        ({"deliver_at_ms": 1}, r"deliver_at_ms must be .*, or 0, not 1 \(is it in milliseconds\?\)"),
        ({"deliver_at_ms": 1_764_000_000}, r"not 1764000000 \(is it in milliseconds\?\)"),
        ({"delay": 30}, r"delay must be a timedelta, such as timedelta\(seconds=30\), not 30"),
        ({"delay": timedelta(seconds=-1)}, "delay must not be negative"),
        ({"delay": timedelta(days=41)}, r"delay 41 days, 0:00:00 is 41\.0 days ahead; at most 40 days are allowed"),
        ({"delay": timedelta.max}, "at most 40"),
        ({"deliver_at": 1_764_000_000}, "deliver_at must be a datetime with a time zone, not 1764000000"),
        ({"deliver_at": datetime(2026, 3, 1)}, r"deliver_at 2026-03-01 00:00:00 has no time zone: .*astimezone"),
        ({"deliver_at": datetime.max.replace(tzinfo=UTC)}, "at most 40"),
        ({"delay": timedelta(1), "deliver_at": datetime(2026, 3, 1, tzinfo=UTC)}, "not delay and deliver_at together"),
        ({"delay": timedelta(1), "delay_level": 3}, "not delay_level and delay together"),
        ({"deliver_at_ms": 1_764_000_000_000, "delay": timedelta(1)}, "not deliver_at_ms and delay together"),
        ({"deliver_at_ms": 1.5}, "deliver_at_ms must be a whole number, .* not 1.5"),
        ({"deliver_at_ms": 2**60}, "at most 40"),
    ],
)
def test_an_illegal_delay_is_refused_when_the_message_is_made(arguments, what):
    with pytest.raises(MessageIllegalError, match=what):
        Message("orders", b"x", **arguments)


def test_a_delay_and_a_datetime_become_a_delivery_time():
    before_ms = now_ms()
    delayed = Message("orders", b"x", delay=timedelta(minutes=5))
    assert before_ms + 300_000 <= delayed.deliver_at_ms <= now_ms() + 300_000
    due = datetime.now(timezone(timedelta(hours=9))) + timedelta(days=1)
    timed = Message("orders", b"x", deliver_at=due)
    assert 0 <= timed.deliver_at_ms - due.timestamp() * 1000 <= 1.01
    assert (delayed.delay, timed.deliver_at) == (None, None)
    assert Message("orders", b"x", deliver_at=datetime(1960, 1, 1, tzinfo=UTC)).deliver_at_ms == 0
    assert msgspec.structs.replace(delayed, body=b"y").deliver_at_ms == delayed.deliver_at_ms


def test_forty_days_are_allowed_and_a_day_more_is_not():
    Message("orders", b"x", deliver_at_ms=now_ms() + 40 * DAY_MS)
    with pytest.raises(MessageIllegalError, match=r"41\.0 days ahead"):
        Message("orders", b"x", deliver_at_ms=now_ms() + 41 * DAY_MS + 1000)


def waiting_record(message: Message, **arguments) -> bytes:
    batch = encode_batch(
        [message],
        2,
        born_host=("10.0.0.1", 77),
        born_timestamp_ms=1000,
        message_ids=["A" * 32],
        producer=ProducerSequence("p", 4, 5),
        waiting=WaitingBatch(SCHEDULE_TOPIC, [3]),
        **arguments,
    )
    return bytes(batch.records)


MESSAGE = Message("orders", b"body", "paid", ("k1", "k2"), {"a": "b"}, 7, delay_level=3)
MOVER = ProducerSequence("rmq_sys_delivery/x/1", 9, 10)


@pytest.mark.parametrize("ipv6", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_moved_record_is_the_same_message_in_another_queue(ipv6, sealed):
    record = read_waiting(waiting_record(MESSAGE, append_prop_crc=sealed, reconsume_times=2))
    moved = bytearray(move_record(record, "orders", 3, producer=MOVER, store_host_ipv6=ipv6))
    host = encode_host("::1" if ipv6 else "127.0.0.1", 10911)
    stamp(moved, [len(moved)], first_queue_offset=5, first_physical_offset=0, store_timestamp_ms=2000, store_host=host)
    assert check_record(moved, check_property_crc=sealed) == (len(moved), True)
    message = decode_record(moved)
    assert (message.topic, message.queue_id, message.queue_offset) == ("orders", 3, 5)
    assert (message.body, message.tags, message.keys, message.properties) == (b"body", "paid", ("k1", "k2"), {"a": "b"})
    assert (message.flag, message.born_timestamp_ms, message.born_host) == (7, 1000, "10.0.0.1:77")
    assert (message.message_id, message.reconsume_times, message.store_timestamp_ms) == ("A" * 32, 2, 2000)
    view = dispatch_view(moved)
    assert view.producer == MOVER
    assert [view.properties[name] for name in ("DELAY", "REAL_TOPIC", "REAL_QID")] == ["3", "orders", "3"]


def test_a_record_that_moves_to_a_long_topic_gets_the_other_magic():
    topic = "%RETRY%" + "g" * 130
    moved = move_record(read_waiting(waiting_record(MESSAGE)), topic, 0, producer=MOVER, store_host_ipv6=False)
    assert decode_record(moved).topic == topic


def test_a_record_cannot_move_to_a_topic_that_is_no_name():
    with pytest.raises(IllegalNameError):
        move_record(read_waiting(waiting_record(MESSAGE)), "../x", 0, producer=MOVER, store_host_ipv6=False)


def test_a_damaged_record_raises_record_error_wherever_it_is_cut():
    record = waiting_record(MESSAGE)
    for end in range(len(record)):
        with pytest.raises(RecordError):
            read_waiting(record[:end])


def test_a_record_without_a_target_raises_record_error():
    record = waiting_record(MESSAGE).replace(b"REAL_QID", b"REAL_XXX")
    with pytest.raises(RecordError, match="REAL_QID"):
        read_waiting(record)


def test_the_unit_of_a_delayed_record_is_made_again_from_the_record_alone():
    """Golden fact 18 of spec/storage.md: the consume-queue entry (unit) of a delayed record can be computed from the
    record alone. The test's record has delay level 3 (10 s) and was stored at 1700000000001 ms."""
    record = bytearray(waiting_record(MESSAGE))
    host = encode_host("127.0.0.1", 1)
    stamp(record, [len(record)], first_queue_offset=0, first_physical_offset=0, store_timestamp_ms=1_700_000_000_001,
          store_host=host)  # fmt: skip
    assert dispatch_view(record).tags_code == 1_700_000_010_001
    assert dispatch_view(record, delay_levels_ms=(1, 2)).tags_code == 1_700_000_000_003
    assert DELAY_LEVELS_MS[2] == 10_000
