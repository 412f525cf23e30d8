"""Tests of replaying messages from one topic to another between real stores in this process: which messages are
selected, and that each copy is sent once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec.structs import force_setattr

from raymq.client.admin.admin import Admin
from raymq.client.admin.replay import Replay, ReplayChoice
from raymq.common.errors import GroupNotExistError, InvalidArgumentError, RequestTimeoutError, TopicNotExistError
from raymq.common.message import Message
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.common.protocol.store import Boundary
from raymq.records.format.encode import encode_batch
from storage.message_store import MessageStore
from tests.support.stores.stores import read_queue, small_settings

NAMES = ("broker-a", "broker-b")
START_MS = 1_700_000_000_000
MESSAGES = 150


class LocalStorage:
    """Fake StorageClient for replays, which calls a store in this process. `losing`: number of answers to appends that
    get lost."""

    def __init__(self, store: MessageStore) -> None:
        self.store, self.losing, self.appends = store, 0, 0

    def query_by_key(self, topic, key, max_num, begin_ms, end_ms, timeout_s):
        return self.store.queries.by_key(topic, key, max_num, begin_ms, end_ms)

    def query_by_unique_id(self, topic, message_id, timeout_s):
        return self.store.queries.by_unique_id(topic, message_id)

    def offset_by_time(self, topic, queue_id, timestamp_ms, timeout_s, boundary=Boundary.LOWER):
        return self.store.queues.offset_by_time(topic, queue_id, timestamp_ms, boundary)

    def queue_bounds(self, topic, queue_id, timeout_s):
        return self.store.queues.bounds(topic, queue_id)

    def fetch(self, requests, max_bytes, wait_s, timeout_s):
        return self.store.fetch(requests, max_bytes=max_bytes, wait_s=0)

    def next_sequences(self, producer_id, epoch, queues, timeout_s):
        return self.store.queues.next_sequences(producer_id, epoch, queues)

    def append(self, batches, timeout_s):
        self.appends += 1
        answer = self.store.append(batches)
        if self.losing:
            self.losing -= 1
            raise RequestTimeoutError("append", 1.0)
        return answer


class Routes:
    """Fake routes. Each known topic has one queue in each broker group; other topics do not exist."""

    def __init__(self, *topics: str) -> None:
        brokers = {name: BrokerData("c", name, {0: f"storage-{name}-0"}) for name in NAMES}
        queues = tuple(QueueData(name, 1, 1, 6) for name in NAMES)
        self.routes = {topic: TopicRoute(topic, brokers, queues) for topic in topics}

    def get(self, topic):
        if topic not in self.routes:
            raise TopicNotExistError(topic)
        return self.routes[topic]

    def wait(self, topic, timeout_s):
        return self.get(topic)

    def invalidate(self, topic):
        pass

    def all_brokers(self):
        return {}


@pytest.fixture
def stores(tmp_path) -> Iterator[dict[str, LocalStorage]]:
    """Yield two stores with messages 0 … 149 of topic "orders", which all have the key "all". The messages are one
    second apart and alternate between two broker groups."""
    clock = SimpleNamespace(now_ms=START_MS)
    made = {
        name: LocalStorage(
            MessageStore.open(
                small_settings(tmp_path / name),
                broker_name=name,
                store_host=("127.0.0.1", port),
                clock_ms=lambda: clock.now_ms,
            )
        )
        for port, name in enumerate(NAMES)
    }
    for number in range(MESSAGES):
        clock.now_ms = START_MS + number * 1000
        message = Message("orders", b"%d" % number, tags="t", keys=("all",), properties={"p": "q"})
        batch = encode_batch([message], 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=[f"ID{number}"])
        made[NAMES[number % 2]].store.append([batch])
    clock.now_ms += 1000
    yield made
    for storage in made.values():
        storage.store.close()


@pytest.fixture
def admin(stores) -> Admin:
    by_name = {f"storage-{name}-0": storage for name, storage in stores.items()}
    return Admin(Routes("orders", "again", "%RETRY%billing"), SimpleNamespace(get=by_name.__getitem__))


def copies(stores, topic="again"):
    """Return the messages of `topic` from all stores."""
    return [
        message
        for storage in stores.values()
        if topic in storage.store.topics.queue_ids()
        for message in read_queue(storage.store, topic, 0)
    ]


def numbers(stores, topic="again") -> list[int]:
    return sorted(int(message.body) for message in copies(stores, topic))


def test_a_time_range_is_sent_once_however_often_it_is_run(admin, stores):
    chosen = {"begin_ms": START_MS + 10_000, "end_ms": START_MS + 20_000, "to_topic": "again"}
    assert admin.replay("orders", **chosen, dry_run=True) == Replay("again", 10, 0, 0, True)
    assert copies(stores) == []
    done: list[int] = []
    assert admin.replay("orders", **chosen, max_messages=4, progress=done.append) == Replay("again", 4, 4, 0, False)
    assert sum(done) == 4
    assert admin.replay("orders", **chosen) == Replay("again", 10, 6, 4, True)
    assert admin.replay("orders", **chosen) == Replay("again", 10, 0, 10, True)
    assert numbers(stores) == list(range(10, 20))
    assert admin.replay("orders", **chosen, name="another").sent == 10


def test_a_copy_has_all_that_its_message_has(admin, stores):
    admin.replay("orders", ids=["ID3"], to_topic="again")
    [copy] = copies(stores)
    [source] = admin.query_by_id("orders", "ID3")
    for name in ("body", "tags", "keys", "properties", "flag", "message_id"):
        assert getattr(copy, name) == getattr(source, name)
    assert copy.system_properties["ORIGIN_MESSAGE_ID"] == source.offset_message_id


def test_a_message_that_a_producer_of_raymq_could_not_make_is_replayed(admin, stores):
    message = Message("orders", b"150", flag=7)
    for name, value in {"tags": " paid || new", "keys": ("\t",), "properties": {"p": " "}}.items():
        force_setattr(message, name, value)
    batch = encode_batch([message], 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=["ID150"])
    stores[NAMES[0]].store.append([batch])
    assert admin.replay("orders", ids=["ID150"], to_topic="again").sent == 1
    [copy] = copies(stores)
    assert (copy.body, copy.tags, copy.keys, copy.flag) == (b"150", " paid || new", ("\t",), 7)
    assert copy.properties == {"p": " "}


def test_a_copy_in_a_priority_topic_goes_to_the_level_of_its_message_and_is_sent_once(admin, stores):
    route = admin._routes.routes["again"]
    queues = tuple(QueueData(name, 4, 4, 6) for name in NAMES)
    levels = TopicAttributes(TopicMessageType.PRIORITY)
    admin._routes.routes["urgent"] = replace(route, topic="urgent", queues=queues, attributes=levels)
    admin._routes.routes["mixed"] = replace(route, topic="mixed")
    for number in range(44):
        message = Message("mixed", b"%d" % number, priority=None if number % 11 == 10 else number % 11)
        batch = encode_batch([message], 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=[f"P{number}"])
        stores[NAMES[0]].store.append([batch])
    assert admin.replay("mixed", begin_ms=START_MS, to_topic="urgent", max_messages=15).sent == 15
    assert admin.replay("mixed", begin_ms=START_MS, to_topic="urgent") == Replay("urgent", 44, 29, 15, True)
    assert admin.replay("mixed", begin_ms=START_MS, to_topic="urgent") == Replay("urgent", 44, 0, 44, True)
    found = [
        message
        for storage in stores.values()
        for queue_id in storage.store.topics.queue_ids().get("urgent", ())
        for message in read_queue(storage.store, "urgent", queue_id)
    ]
    assert sorted(int(message.body) for message in found) == list(range(44))
    for message in found:
        number = int(message.body)
        assert message.priority == (None if number % 11 == 10 else number % 11)
        assert message.queue_id == min(message.priority or 0, 3)
    for level in range(4):
        order = [int(message.body) for message in found if message.queue_id == level]
        assert order == sorted(order)


def test_a_key_finds_more_than_one_query_returns_each_once_and_sparse_ones_too(admin, stores):
    assert admin.replay("orders", key="all", to_topic="again").sent == MESSAGES
    assert admin.replay("orders", key="all", to_topic="again").sent_before == MESSAGES
    assert numbers(stores) == list(range(MESSAGES))
    odd = [f"ID{number}" for number in range(1, MESSAGES, 4)]
    assert admin.replay("orders", ids=odd, to_group="billing").sent == len(odd)
    assert admin.replay("orders", ids=odd, to_group="billing") == Replay("%RETRY%billing", len(odd), 0, len(odd), True)
    got = copies(stores, "%RETRY%billing")
    assert len(got) == len(odd)
    assert {message.system_properties["RETRY_TOPIC"] for message in got} == {"orders"}


def test_an_answer_that_is_lost_does_not_double_a_copy(admin, stores):
    for storage in stores.values():
        storage.losing = 1
    assert admin.replay("orders", begin_ms=0, to_topic="again").sent == MESSAGES
    assert numbers(stores) == list(range(MESSAGES))


def test_the_order_of_a_queue_is_kept(admin, stores):
    admin.replay("orders", begin_ms=0, to_topic="again")
    for parity in (0, 1):
        found = [int(m.body) for storage in stores.values() for m in copies({"": storage}) if int(m.body) % 2 == parity]
        assert found == list(range(parity, MESSAGES, 2))


def test_a_replay_into_its_own_topic_leaves_its_copies_out(admin, stores):
    for _ in range(2):
        admin.replay("orders", begin_ms=0, to_topic="orders")
    assert len(copies(stores, "orders")) == 2 * MESSAGES


def test_more_messages_of_a_second_than_a_query_returns_are_refused(admin, stores):
    many = [Message("orders", b"1", keys=("many",)) for _ in range(70)]
    batch = encode_batch(many, 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=[""] * 70)
    stores["broker-a"].store.append([batch])
    with pytest.raises(InvalidArgumentError, match="choose these messages by begin_ms and end_ms"):
        admin.replay("orders", key="many", to_topic="again")


@pytest.mark.parametrize(
    "arguments",
    [
        {"to_topic": "again"},
        {"key": "all"},
        {"key": "all", "ids": ["ID1"], "to_topic": "again"},
        {"key": "all", "to_topic": "again", "to_group": "billing"},
        {"key": "all", "to_topic": "rmq_sys_timer"},
        {"key": "all", "to_topic": "again", "rate": 0},
        {"key": "all", "to_topic": "again", "max_messages": 0},
    ],
)
def test_a_replay_with_missing_arguments_is_refused(admin, arguments):
    with pytest.raises(InvalidArgumentError):
        admin.replay("orders", **arguments)


def test_a_target_that_is_not_there_is_named(admin):
    with pytest.raises(GroupNotExistError):
        admin.replay("orders", key="all", to_group="nobody")
    with pytest.raises(TopicNotExistError):
        admin.replay("orders", key="all", to_topic="nowhere")


def test_a_choice_is_of_one_kind():
    assert ReplayChoice("orders", begin_ms=0).end_ms is None
    with pytest.raises(InvalidArgumentError):
        ReplayChoice("orders", key="k", begin_ms=0)
