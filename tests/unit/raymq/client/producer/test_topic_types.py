"""Tests of topic types: each send method sends each kind of message to a topic of each type. A refused send stores
nothing.

Golden facts: RocketMQ's TopicMessageType.parseFromMessageProperty and DefaultTopicMessageTypeValidator.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from raymq.client.transactions.checks import half_message
from raymq.common.errors import MessageIllegalError, SystemBusyError
from raymq.common.message import Message, MessageQueue
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.attributes import QUEUE_TYPE, CleanupPolicy, TopicAttributes, TopicMessageType
from raymq.records.format.decode import decode_records
from tests.support.clients.dedup_store import DedupStore, Writers
from tests.support.clients.fakes import WAIT_S, FakeStore, topic_route

TYPES = list(TopicMessageType)
EVERYTHING = {TopicMessageType.UNSPECIFIED, TopicMessageType.MIXED}

SENDS = {
    "plain": ({}, {}, {TopicMessageType.NORMAL}),
    "sharding key": ({}, {"sharding_key": "user-9"}, {TopicMessageType.FIFO}),
    "queue": ({}, {"queue": MessageQueue("orders", "a", 0)}, {TopicMessageType.NORMAL, TopicMessageType.FIFO}),
    "selector": (
        {},
        {"selector": lambda queues, message, argument: queues[0]},
        {TopicMessageType.NORMAL, TopicMessageType.FIFO},
    ),
    "delay level": ({"delay_level": 2}, {}, {TopicMessageType.DELAY}),
    "deliver time": ({"deliver_at_ms": 1_700_000_000_000}, {}, {TopicMessageType.DELAY}),
    "priority": ({"priority": 9}, {}, {TopicMessageType.PRIORITY}),
    "priority and sharding key": ({"priority": 9}, {"sharding_key": 7}, {TopicMessageType.FIFO}),
    "delay and sharding key": ({"delay_level": 2}, {"sharding_key": 7}, {TopicMessageType.DELAY}),
}


def route(kind: TopicMessageType, *, compacted: bool = False):
    policy = CleanupPolicy.COMPACTION if compacted else CleanupPolicy.DELETE
    return replace(topic_route(a=2), attributes=TopicAttributes(kind, policy))


def producer_of(make, kind: TopicMessageType, *, compacted: bool = False):
    store = FakeStore()
    return make(store, route=route(kind, compacted=compacted)), store


@pytest.mark.parametrize("name", SENDS)
@pytest.mark.parametrize("kind", TYPES)
def test_a_topic_takes_its_own_messages_and_no_others(make, kind, name):
    more, where, takers = SENDS[name]
    producer, store = producer_of(make, kind)
    message = Message("orders", b"x", **more)
    if kind in takers | EVERYTHING:
        producer.send(message, timeout_s=WAIT_S, **where)
        producer.send_async(message, **where).result(WAIT_S)
        assert len(store.everything()) == 2
    else:
        for send in (producer.send, producer.send_async, producer.send_oneway):
            with pytest.raises(
                MessageIllegalError, match=f"topic 'orders' accepts {kind} messages, and this message is"
            ):
                send(message, **where)
        assert store.everything() == []
        producer.flush(WAIT_S)


@pytest.mark.parametrize("kind", TYPES)
def test_a_half_message_is_a_transaction_whatever_else_it_has(make, kind):
    producer, store = producer_of(make, kind)
    half = half_message(Message("orders", b"x", keys=["k"]), "payments", None)
    if kind in EVERYTHING | {TopicMessageType.TRANSACTION}:
        producer.send(half, sharding_key="k", timeout_s=WAIT_S)
        assert store.bodies(MessageQueue(HALF_TOPIC, "a", 0)) == [b"x"]
    else:
        with pytest.raises(MessageIllegalError, match="this message is TRANSACTION"):
            producer.send(half, sharding_key="k")


def test_nothing_of_a_batch_is_sent_when_one_message_is_of_another_type(make):
    producer, store = producer_of(make, TopicMessageType.DELAY)
    with pytest.raises(MessageIllegalError):
        producer.send_batch([Message("orders", b"1", delay_level=1), Message("orders", b"2")])
    assert store.everything() == []


def test_the_many_ways_of_a_message_all_look_at_a_type_that_came_later(make):
    """If a topic's type changes, all send methods check the new type. Single messages, and messages that join an open
    batch, do not read the route each time, but must check the type nevertheless."""
    producer = make(FakeStore(), route=route(TopicMessageType.UNSPECIFIED))
    producer.send(Message("orders", b"1"))
    producer.send(Message("orders", b"2"))
    producer.test_routes.routes["orders"] = route(TopicMessageType.FIFO)
    # For a few milliseconds, single messages go to the queue of the message before, without reading the route. End this
    # turn of the queue now, and drop the open batches, so that the next send reads the route.
    producer.pipeline.single_sends._turns["orders"].until_s = 0.0
    producer.pipeline.open_batches._batches.clear()
    with pytest.raises(MessageIllegalError):
        producer.send(Message("orders", b"3"))


TABLES = {
    "plain": (pa.table({"body": [b"1", b"2"]}), {TopicMessageType.NORMAL}),
    "keyed": (pa.table({"body": [b"1", b"2"], "sharding_key": ["a", "b"]}), {TopicMessageType.FIFO}),
    "some keyed": (pa.table({"body": [b"1", b"2"], "sharding_key": ["a", None]}), set()),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", TYPES)
def test_a_table_is_taken_or_refused_as_a_whole(make, kind, name):
    table, takers = TABLES[name]
    producer, store = producer_of(make, kind)
    if kind in takers | EVERYTHING:
        assert producer.send_table("orders", table).count == 2
    else:
        with pytest.raises(MessageIllegalError):
            producer.send_table("orders", table)
        assert store.everything() == []


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", TYPES)
def test_a_repeatable_write_is_taken_or_refused_as_a_whole(kind, name):
    table, takers = TABLES[name]
    store = DedupStore()
    writers = Writers(route(kind), store)
    try:
        writer = writers.make()
        if kind in takers | EVERYTHING:
            writer.write(table)
            assert writer.finish().count == 2
        else:
            with pytest.raises(MessageIllegalError):
                writer.write(table)
            assert store.bodies("orders") == {}
    finally:
        writers.close()


def test_a_compaction_topic_takes_messages_with_keys_only(make):
    producer, store = producer_of(make, TopicMessageType.UNSPECIFIED, compacted=True)
    keyed, keyless = Message("orders", b"1", keys=["k"]), Message("orders", b"2")
    futures = [producer.send_async(keyed) for _ in range(5)]
    for send in (producer.send, producer.send_async):
        with pytest.raises(MessageIllegalError, match="keys="):
            send(keyless)
    with pytest.raises(MessageIllegalError):
        producer.send_batch([keyed, keyless])
    for future in futures:
        future.result(WAIT_S)
    producer.send_batch([keyed, Message("orders", b"3", properties={"shop": "1"}, keys=["k"])])
    assert len(store.everything()) == 7


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (["a", "b"], True),
        (["a", None], False),
        ([["a"], ["b", "c"]], True),
        ([["a"], []], False),
        ([["a"], None], False),
        (None, False),
    ],
)
def test_a_table_for_a_compaction_topic_has_a_key_in_each_row(make, keys, taken):
    producer, store = producer_of(make, TopicMessageType.UNSPECIFIED, compacted=True)
    columns = {"body": [b"1", b"2"]} | ({} if keys is None else {"keys": keys})
    if taken:
        assert producer.send_table("orders", pa.table(columns)).count == 2
    else:
        with pytest.raises(MessageIllegalError):
            producer.send_table("orders", pa.table(columns))
        assert store.everything() == []


@pytest.mark.parametrize(
    "message", [Message("orders", b"x", delay_level=1), half_message(Message("orders", b"x"), "payments")]
)
def test_a_topic_of_inner_batches_takes_nothing_that_waits_elsewhere(make, message):
    store = FakeStore()
    producer = make(store, route=replace(topic_route(a=2), attributes=TopicAttributes.parse({QUEUE_TYPE: "BatchCQ"})))
    with pytest.raises(MessageIllegalError, match="inner batches"):
        producer.send(message)
    assert store.everything() == []


def leveled(make, *stores: FakeStore, **queues: int):
    return make(*stores, route=replace(topic_route(**queues), attributes=TopicAttributes(TopicMessageType.PRIORITY)))


def of_priority(body: bytes, priority: int) -> Message:
    return Message("orders", body, priority=priority)


def test_a_priority_is_the_id_of_its_queue_and_the_last_queue_takes_all_higher_ones(make):
    store = FakeStore()
    producer = leveled(make, store, a=3)
    futures = [producer.send_async(of_priority(b"%d" % priority, priority)) for priority in range(10)]
    assert [future.result(WAIT_S).queue.queue_id for future in futures] == [0, 1, *[2] * 8]
    # messages of one level in a row may share a request, but messages of two levels never do
    for priority in (1, 0, 1, 1, 2, 0):
        assert producer.send(of_priority(b"again", priority)).queue.queue_id == priority
    assert sum(len(bodies) for bodies in store.queues.values()) == 16


def test_a_level_uses_all_brokers(make):
    producer = leveled(make, FakeStore("storage-a-0"), FakeStore("storage-b-0"), a=10, b=10)
    queues = {producer.send(of_priority(b"x", 7)).queue for _ in range(60)}
    assert queues == {MessageQueue("orders", "a", 7), MessageQueue("orders", "b", 7)}


def test_a_refused_message_keeps_its_level_at_another_broker(make):
    a, b = FakeStore("storage-a-0"), FakeStore("storage-b-0")
    producer = leveled(make, a, b, a=10, b=4)
    a.script = [SystemBusyError("the lock is held; nothing was stored")] * 20
    results = [producer.send(of_priority(b"x", priority)) for priority in (2, 9) for _ in range(10)]
    assert {result.queue for result in results if result.queue.broker_name == "b"} == {
        MessageQueue("orders", "b", 2),
        MessageQueue("orders", "b", 3),
    }


def test_a_batch_has_one_priority_and_goes_to_one_level(make):
    store = FakeStore()
    producer = leveled(make, store, a=10)
    for count in (2, 100):
        results = producer.send_batch([of_priority(b"x", 4) for _ in range(count)])
        assert {result.queue.queue_id for result in results} == {4}
    for count in (2, 100):
        with pytest.raises(MessageIllegalError, match="a separate batch for each priority"):
            producer.send_batch([of_priority(b"x", number % 2) for number in range(count)])
        with pytest.raises(MessageIllegalError, match="this message is NORMAL: give it a priority"):
            producer.send_batch([of_priority(b"x", 4)] + [Message("orders", b"x")] * count)
    assert store.bodies(MessageQueue("orders", "a", 4)) == [b"x"] * 102


@pytest.mark.parametrize("columns", [{}, {"sharding_key": ["k"]}])
def test_the_rows_of_a_table_have_no_priorities(make, columns):
    store = FakeStore()
    with pytest.raises(MessageIllegalError, match="the rows of a table have no priorities"):
        leveled(make, store, a=10).send_table("orders", pa.table({"body": [b"x"], **columns}))
    assert store.everything() == []


@pytest.mark.parametrize(
    "where", [{"queue": MessageQueue("orders", "a", 0)}, {"selector": lambda queues, message, argument: queues[0]}]
)
def test_the_priority_chooses_the_queue_so_that_nothing_else_may(make, where):
    store = FakeStore()
    with pytest.raises(MessageIllegalError, match="without queue= and selector="):
        leveled(make, store, a=10).send(of_priority(b"x", 4), **where)
    assert store.everything() == []


def test_a_topic_of_all_types_stores_the_priority_and_takes_its_queues_in_turn(make):
    store = FakeStore()
    producer = make(store, route=route(TopicMessageType.MIXED))
    producer.send_batch([of_priority(b"x", number % 10) for number in range(100)])
    [batch] = store.attempts[0]
    stored = decode_records(batch.records, broker_name="a")
    assert [message.priority for message in stored] == [number % 10 for number in range(100)]
