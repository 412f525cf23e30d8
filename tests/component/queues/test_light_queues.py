"""Tests of light queues in one process. A producer's message appears in several light queues, can be read from each of
them, and expires."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from actors.core.broker.send_back import ReturnWriter, read_returned
from raymq.common.errors import DataLossError, MessageIllegalError
from raymq.common.message import Message, MessageExt, MessageQueue, PullStatus
from raymq.common.names import SCHEDULE_TOPIC, light_queue
from raymq.common.protocol.group import GroupConfig, GroupQueueProgress
from raymq.common.protocol.store import FetchRequest, LightQueue
from raymq.records.format.check import record_starts
from raymq.records.format.decode import decode_records
from raymq.records.format.layout import BODY_OFFSET
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.columns import decode_columns
from raymq.records.kernels.messages import read_messages
from raymq.records.logfiles.log_reader import LogReader
from storage.message_store import MessageStore
from storage.retention import cleaner
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.store_client import StoreClient, producer_of
from tests.support.stores.clocks import let_pass
from tests.support.stores.stores import LOG_FILE_BYTES, bodies_of, killed_copy, make_batch, open_store, read_queue
from tests.support.stores.transactions import Transaction, half_batch

pytestmark = pytest.mark.usefixtures("no_flushes")

ON = {"enable_lmq": True, "enable_multi_dispatch": True}
ALICE, BOB = light_queue("alice"), light_queue("bob")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    opened = open_store(tmp_path / "store", **ON)
    yield opened
    opened.close()


def test_one_message_is_read_from_each_of_its_queues(store):
    with producer_of(StoreClient(store)) as producer:
        producer.send(Message("orders", b"to nobody else"), timeout_s=WAIT_S)
        producer.send(Message("orders", b"hello", tags="t", light_queues="alice"), timeout_s=WAIT_S)
        both = Message("orders", b"both", keys="k", properties={"a": "b"}, light_queues=["alice", "bob"])
        result = producer.send(both, timeout_s=WAIT_S)
        producer.send_batch([Message("orders", b"%d" % n, light_queues=["bob"]) for n in range(3)], timeout_s=WAIT_S)
    assert bodies_of(store) == [b"to nobody else", b"hello", b"both", b"0", b"1", b"2"]
    alice, bob = read_queue(store, ALICE), read_queue(store, BOB)
    assert [message.body for message in alice] == [b"hello", b"both"]
    assert [(message.body, message.queue_offset) for message in bob] == [(b"both", 0), (b"0", 1), (b"1", 2), (b"2", 3)]
    found = alice[1]
    assert (found.topic, found.queue_id, found.queue_offset, found.sent_to) == (ALICE, 0, 1, "orders")
    assert (found.light_queues, found.properties, found.keys) == (("alice", "bob"), {"a": "b"}, ("k",))
    assert (found.message_id, found.offset_message_id) == (result.message_id, result.offset_message_id)
    own = read_queue(store)[2]
    assert (own.topic, own.sent_to, own.light_queues) == ("orders", "orders", ("alice", "bob"))
    assert store.topics.light_queues() == [LightQueue(ALICE, 0, 2), LightQueue(BOB, 0, 4)]


def test_a_part_of_a_queue_its_tags_and_its_columns_are_read(store):
    for n in range(10):
        tags, names = "red" if n % 2 else "blue", {"INNER_MULTI_DISPATCH": ALICE}
        store.append([make_batch([b"%d" % n], tags=tags, extra_properties=names)])
    [part] = store.fetch([FetchRequest(ALICE, 0, 3, 4)], max_bytes=1 << 20, wait_s=0)
    assert [message.queue_offset for message in decode_records(part.records)] == [3, 4, 5, 6]
    assert part.next_offset == 7
    [red] = store.fetch([FetchRequest(ALICE, 0, 0, 10, frozenset({112785}))], max_bytes=1 << 20, wait_s=0)
    assert [message.body for message in decode_records(red.records)] == [b"1", b"3", b"5", b"7", b"9"]
    batch = decode_columns(part.records, record_starts(part.records), broker_name="a")
    assert batch.column("queue_offset").to_pylist() == [3, 4, 5, 6]
    assert set(batch.column("topic").to_pylist()) == {ALICE}


def test_a_reader_beside_the_store_reads_the_same_light_queue_messages(tmp_path, store):
    store.append([make_batch([b"one", b"two"], extra_properties={"INNER_MULTI_DISPATCH": ALICE})])
    reader = LogReader(tmp_path / "store", commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=2000)
    request = FetchRequest(ALICE, 0, 0, 10)
    [expected] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
    assert reader.fetch(request, 0, 2, 1 << 20) == expected
    assert reader.makes_records(ALICE, 0)
    with pytest.raises(DataLossError):
        reader.find(request, 2, 1 << 20)
    reader.close()


@pytest.mark.parametrize("where", ["magic", "name", "offset"])
def test_a_damaged_record_does_not_hold_up_a_light_queue(tmp_path, store, where):
    """A damaged record is skipped, and the other messages of its light queue can be read. `where`: the field that the
    test damages. It is the record's magic, or one of two values in the record's properties: the name of the light
    queue, or the record's offset in it."""
    names = {"INNER_MULTI_DISPATCH": ALICE}
    store.append([make_batch([b"one", b"the damaged two", b"three"], extra_properties=names)])
    log = tmp_path / "store" / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        data = log.read_bytes()
        body = data.index(b"the damaged two")
        name, offset = data.index(ALICE.encode(), body), data.index(b"INNER_MULTI_QUEUE_OFFSET", body)
        file.seek({"magic": body - BODY_OFFSET + 5, "name": name + len(ALICE) - 1, "offset": offset + 25}[where])
        file.write(b"7")
    [part] = store.fetch([FetchRequest(ALICE, 0, 0, 10)], max_bytes=1 << 20, wait_s=0)
    found = LocatedRecords.of_fetch(part.records, part.count, 0, part.next_offset)
    places = RecordPlaces.of(MessageQueue(ALICE, "a", 0), found)
    messages = read_messages(found.data, found.starts, broker_name="a", places=places)
    assert [(message.topic, message.queue_offset) for message in messages] == [(ALICE, 0), (ALICE, 1), (ALICE, 2)]
    assert [message.body_error is None for message in messages] == [True, False, True]
    assert (messages[0].body, messages[2].body) == (b"one", b"three")


def test_a_queue_that_does_not_exist_yet_is_empty(store):
    [nothing] = store.fetch([FetchRequest(ALICE, 0, 0, 10)], max_bytes=1 << 20, wait_s=0)
    assert (nothing.status, nothing.next_offset) == (PullStatus.NO_NEW_MESSAGE, 0)


def test_a_store_without_light_queues_refuses_such_a_message(tmp_path):
    store = open_store(tmp_path)
    with producer_of(StoreClient(store, light_queues=False)) as producer:
        producer.send(Message("orders", b"first"), timeout_s=WAIT_S)
        message = Message("orders", b"x", light_queues=["alice"])
        with pytest.raises(MessageIllegalError, match="enable_lmq"):
            producer.send(message, timeout_s=WAIT_S)
        with pytest.raises(MessageIllegalError, match="enable_lmq"):
            producer.send_batch([message, Message("orders", b"y")], timeout_s=WAIT_S)
    assert b"x" not in bodies_of(store)
    store.close()


def test_messages_of_inner_batches_are_in_no_light_queue(store):
    with producer_of(StoreClient(store)) as producer:
        with pytest.raises(MessageIllegalError, match="inner batches"):
            producer.send(Message("batched", b"x", light_queues=["alice"]), timeout_s=WAIT_S)
        producer.send(Message("batched", b"y"), timeout_s=WAIT_S)
    assert bodies_of(store, "batched") == [b"y"]


def test_thousands_of_queues_take_little_space(tmp_path):
    store = open_store(tmp_path, **ON, mapped_file_size_consume_queue_bytes=6_000_000)
    for first in range(0, 2000, 400):
        names = ",".join(f"%LMQ%{number}" for number in range(first, first + 400))
        store.append([make_batch([b"to 400"], extra_properties={"INNER_MULTI_DISPATCH": names})])
    assert len(store.topics.light_queues()) == 2000
    used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "consumequeue").rglob("0*") if path.is_file())
    assert used < 50_000_000
    assert bodies_of(store, "%LMQ%1999") == [b"to 400"]
    store.close()


def expire(store: MessageStore, root: Path) -> None:
    """Make retention delete the old files of the log."""
    now = datetime(2023, 11, 15, 3)
    for path in sorted((root / "commitlog").iterdir())[:-2]:
        os.utime(path, (now.timestamp() - 360_000,) * 2)
    store.cleaner._by_hand = 1
    let_pass(store)
    assert store.cleaner.run_once(now)


def all_of(store: MessageStore, topic: str, offset: int) -> list[MessageExt]:
    """Return the messages that a consumer gets from a queue if the consumer's next offset is `offset`. If the queue
    does not contain `offset`, the consumer continues at the nearest end of the queue."""
    [result] = store.fetch([FetchRequest(topic, 0, offset, 100)], max_bytes=1 << 20, wait_s=0)
    if result.status is PullStatus.OFFSET_ILLEGAL:
        [result] = store.fetch([FetchRequest(topic, 0, result.next_offset, 100)], max_bytes=1 << 20, wait_s=0)
    return decode_records(result.records)


def test_a_queue_without_messages_is_swept_and_its_consumer_misses_nothing_later(tmp_path, monkeypatch):
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    root = tmp_path / "store"
    store = open_store(root, **ON)
    store.append([make_batch([b"early"] * 30, extra_properties={"INNER_MULTI_DISPATCH": f"{ALICE},{BOB}"})])
    for _ in range(6):
        store.append([make_batch([b"x" * 10_000] * 6)])
    store.append([make_batch([b"late"], extra_properties={"INNER_MULTI_DISPATCH": BOB})])
    expire(store, root)
    assert [queue.topic for queue in store.topics.light_queues()] == [BOB]
    assert not (root / "consumequeue" / ALICE).exists()
    # A consumer that has read all 30 messages is at offset 30, and gets the next message.
    store.append([make_batch([b"again"], extra_properties={"INNER_MULTI_DISPATCH": ALICE})])
    assert [message.body for message in all_of(store, ALICE, 30)] == [b"again"]
    [queue] = [queue for queue in store.topics.light_queues() if queue.topic == ALICE]
    assert queue.min_offset >= 30
    assert queue.max_offset == queue.min_offset + 1
    killed = killed_copy(root, tmp_path / "killed")
    store.close()
    for path in (root, killed):
        again = open_store(path, **ON)
        assert queue in again.topics.light_queues()
        assert [message.body for message in all_of(again, ALICE, 30)] == [b"again"]
        again.append([make_batch([b"more"], extra_properties={"INNER_MULTI_DISPATCH": ALICE})])
        assert [message.body for message in all_of(again, ALICE, queue.max_offset)] == [b"more"]
        again.close()


def test_a_group_with_an_offset_after_the_end_of_a_swept_queue_has_no_lag():
    assert GroupQueueProgress("g", MessageQueue(ALICE, "a", 0), 30, 0, 0, 0).lag == 0


@pytest.mark.parametrize("level", [0, 2, -1], ids=["later and later", "a level", "dead"])
def test_a_message_of_a_light_queue_that_is_given_back_is_stored_once_and_in_no_light_queue_again(store, level):
    store.append([make_batch([b"one"], extra_properties={"INNER_MULTI_DISPATCH": f"{ALICE},{BOB}"})])
    [found] = store.fetch([FetchRequest(ALICE, 0, 0, 10)], max_bytes=1 << 20, wait_s=0)
    returned, _ = read_returned(
        found.records, GroupConfig("g"), delay_level=level, max_reconsume_times=-1, now_ms=1_772_366_400_000
    )
    store.append(ReturnWriter("returns", lambda count: 0).batches("g", returned, 1))
    assert [queue.max_offset for queue in store.topics.light_queues()] == [1, 1]
    [topic] = store.topics.queue_ids().keys() - {"orders", ALICE, BOB}
    waits = {2: SCHEDULE_TOPIC, 0: SCHEDULE_TOPIC, -1: "%DLQ%g"}
    assert topic == waits[level]
    [queue_id] = store.topics.queue_ids()[topic]
    [again] = read_queue(store, topic, queue_id)
    assert (again.body, again.system_properties["RETRY_TOPIC"]) == (b"one", ALICE)
    assert (again.sent_to, again.reconsume_times) == (topic, 1)


def test_a_message_of_a_transaction_comes_into_its_light_queues_when_it_is_committed(store):
    message = Message("orders", b"paid", light_queues=["alice"])
    [result] = store.append([half_batch([message], ids=["T-1"])])
    [other] = store.append([half_batch([Message("orders", b"no", light_queues=["bob"])], ids=["T-2"])])
    assert store.topics.light_queues() == []
    half = Transaction(store, "T-1", result.queue_offset, result.physical_offset)
    half.commit()
    half.commit()
    Transaction(store, "T-2", other.queue_offset, other.physical_offset).rollback()
    assert store.topics.light_queues() == [LightQueue(ALICE, 0, 1)]
    [found] = read_queue(store, ALICE)
    assert (found.body, found.sent_to) == (b"paid", "orders")
