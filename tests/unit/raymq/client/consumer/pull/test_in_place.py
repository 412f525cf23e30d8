"""Tests of a consumer that reads in place: from the store's memory-mapped files instead of by fetch calls. They cover
requests to the store, reads of mapped files, and fallbacks to fetch calls."""

from __future__ import annotations

import os
import threading
from datetime import datetime
from types import SimpleNamespace

import pytest

import raymq
from raymq.client.consumer import fetcher
from raymq.client.consumer.pull import engine as pull_engine, in_place
from raymq.client.consumer.pull.consumer import PullConsumer
from raymq.client.consumer.pull.engine import PullEngine
from raymq.client.consumer.pull.settings import PullSettings
from raymq.common.errors import BodyUnreadableError, DataLossError, PredicateFailedError, ServiceNotAvailableError
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.protocol.group import CommitAnswer, QueueOffset
from raymq.common.protocol.route import BrokerData, TopicRoute
from tests.support.clients.fakes import WAIT_S, FakeRoutes, topic_route
from tests.support.clients.watches import MappedStorage
from tests.support.history.waiting import eventually
from tests.support.stores.clocks import let_pass
from tests.support.stores.stores import make_batch, open_store

Q0, Q1 = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)


class Offsets:
    """Fake of the group's committed offsets: every queue starts at offset 0, and every commit succeeds."""

    def ensure_group(self, broker_name, timeout_s=20.0) -> None:
        pass

    def start_offset(self, queue, query, generation, timeout_s=20.0) -> QueueOffset:
        return QueueOffset(0)

    def start_offsets(self, generations, query, timeout_s=20.0) -> dict[MessageQueue, QueueOffset]:
        return {queue: self.start_offset(queue, query, generation) for queue, generation in generations.items()}

    def commit_offsets(self, commits, timeout_s=20.0) -> CommitAnswer:
        return CommitAnswer()


@pytest.fixture
def store(tmp_path, no_flushes):
    store = open_store(tmp_path / "store")
    store.append([make_batch([b"%d" % number for number in range(5)])])
    yield store
    store.close()


@pytest.fixture
def storages(store):
    return {"storage-a-0": MappedStorage(store), "storage-a-1": MappedStorage(store)}


@pytest.fixture
def routes():
    return FakeRoutes(topic_route(a=2))


@pytest.fixture
def consume(monkeypatch, storages, routes, commits):
    """Yield a function that makes consumers for the queues that a test chooses."""
    monkeypatch.setattr(pull_engine, "GroupOffsets", lambda name: Offsets())
    monkeypatch.setattr(fetcher, "FETCH_LONG_POLL_S", 0.02)
    monkeypatch.setattr(in_place, "OPEN_AGAIN_AFTER_S", 0.02)
    consumers = []

    def consume(*queues: MessageQueue, expression: str = "*") -> PullConsumer:
        engine = PullEngine(
            PullSettings.of("billing", auto_commit=False),
            routes=routes,
            storages=SimpleNamespace(get=lambda name: storages[name]),
            rebalance=SimpleNamespace(),
            commits=commits,
            node_id="node-1",
            announce=lambda engine, data: None,
            on_close=lambda engine: None,
        )
        consumers.append(PullConsumer(engine))
        consumers[-1].assign(queues, expression)
        return consumers[-1]

    yield consume
    for consumer in consumers:
        consumer.close()


def poll(consumer: PullConsumer, count: int, max_messages: int = 500) -> list[bytes]:
    """Poll until `count` messages have arrived. Returns their bodies."""
    bodies: list[bytes] = []
    while len(bodies) < count:
        messages = consumer.poll(max_messages, timeout_s=WAIT_S)
        assert messages, f"only {bodies} came"
        bodies += [message.body for message in messages]
    return bodies


def here(storages, name: str = "storage-a-0") -> MappedStorage:
    return storages[name]


def test_nothing_is_fetched_and_no_thread_reads(consume, store, storages):
    consumer = consume(Q0, Q1)
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    store.append([make_batch([b"a"], queue_id=1), make_batch([b"5"])])
    assert sorted(poll(consumer, 2)) == [b"5", b"a"]
    assert here(storages).fetched == []
    assert not [thread for thread in threading.enumerate() if thread.name == "fetch-storage-a-0"]
    assert len(here(storages).watches) == 1


def test_an_idle_consumer_asks_once_and_polls_wait_for_the_answer(consume, store, storages):
    consumer = consume(Q0, Q1)
    poll(consumer, 5)
    for _ in range(5):
        assert consumer.poll(timeout_s=0.01) == []
    [watch] = here(storages).watches
    count = len(watch.asks)
    assert [request.queue_offset for request in watch.asks[-1] if request.queue_id == 0] == [5]
    for _ in range(5):
        assert consumer.poll(timeout_s=0.01) == []
    assert len(watch.asks) == count
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(poll(consumer, 1)))
    thread.start()
    eventually(lambda: consumer._engine._core.polling, "the poll", WAIT_S)
    store.append([make_batch([b"5"])])
    thread.join(WAIT_S)
    assert found == [b"5"]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_poll_that_has_nothing_to_look_at_waits(consume, storages, monkeypatch, where):
    if where == "elsewhere":
        monkeypatch.setattr(here(storages), "reader", lambda: None)
    consumer = consume(Q0)
    poll(consumer, 5)
    looks = []
    peek = consumer._engine.polls.peek
    monkeypatch.setattr(consumer._engine.polls, "peek", lambda count: looks.append(count) or peek(count))
    assert consumer.poll(timeout_s=0.3) == []
    assert len(looks) < 100
    assert consumer._engine.polls.wait_max_s() > 1.0


@pytest.mark.parametrize("change", ["seek", "resume", "assign"])
def test_a_waiting_poll_applies_changes_of_other_threads(consume, store, change):
    store.append([make_batch([b"a"], queue_id=1)])
    consumer = consume(Q0)
    poll(consumer, 5)
    if change == "resume":
        consumer.seek(Q0, 3)
        consumer.pause([Q0])
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(poll(consumer, 1)))
    thread.start()
    eventually(lambda: consumer._engine._core.polling, "the poll", WAIT_S)
    if change == "seek":
        consumer.seek(Q0, 3)
    elif change == "resume":
        consumer.resume([Q0])
    else:
        consumer.assign([Q0, Q1])
    thread.join(WAIT_S)
    assert found == ([b"a"] if change == "assign" else [b"3", b"4"])


def test_reading_continues_after_a_watch_has_ended(consume, store, storages):
    consumer = consume(Q0, Q1)
    poll(consumer, 5)
    here(storages).watches[0].cut()
    store.append([make_batch([b"5"])])
    assert poll(consumer, 1) == [b"5"]
    store.append([make_batch([b"6"], queue_id=1)])
    assert poll(consumer, 1) == [b"6"]
    eventually(lambda: len(here(storages).watches) == 2, "another watch", WAIT_S)


@pytest.mark.parametrize("refusal", [ServiceNotAvailableError("restarting"), None])
def test_without_a_watch_the_queue_is_fetched_until_one_can_be_opened(consume, store, storages, monkeypatch, refusal):
    def refuse():
        if refusal is not None:
            raise refusal

    storage = here(storages)
    monkeypatch.setattr(storage, "open_watch", refuse)
    consumer = consume(Q0)
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    assert storage.fetched
    monkeypatch.undo()
    eventually(lambda: consumer.poll(timeout_s=0.01) == [] and [w.asks for w in storage.watches], "a watch", WAIT_S)
    store.append([make_batch([b"5"])])
    assert poll(consumer, 1) == [b"5"]


def test_a_store_that_refuses_watches_is_asked_with_pauses(consume, store, storages, monkeypatch):
    """A consumer pauses between its requests to a store that refuses them. The store behaves like a replica that must
    not serve reads: its watch opens, but every answer is an error."""
    monkeypatch.setattr(in_place, "OPEN_AGAIN_AFTER_S", 3600.0)
    storage = here(storages)
    opened = storage.open_watch

    def refusing():
        watch = opened()
        watch.cut()
        return watch

    monkeypatch.setattr(storage, "open_watch", refusing)
    consumer = consume(Q0)
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    store.append([make_batch([b"5"])])
    assert poll(consumer, 1) == [b"5"]
    assert len(storage.watches) == 1


def test_a_slave_that_the_master_names_is_read_in_its_place(consume, store, storages, routes):
    names = {0: "storage-a-0", 1: "storage-a-1"}
    routes.routes["orders"] = TopicRoute(
        "orders",
        {"a": BrokerData("raymq", "a", names, slave_read_enable=True)},
        routes.routes["orders"].queues,
    )
    here(storages).pull_from = "storage-a-1"
    consumer = consume(Q0)
    poll(consumer, 5)
    store.append([make_batch([b"5"])])
    assert poll(consumer, 1) == [b"5"]
    eventually(lambda: consumer.poll(timeout_s=0.01) == [] and here(storages, "storage-a-1").watches, "it", WAIT_S)
    store.append([make_batch([b"6"])])
    assert poll(consumer, 1) == [b"6"]
    assert here(storages, "storage-a-1").watches[0].asks


def test_a_queue_that_is_found_before_it_is_given_up_stays_where_it_was_found(consume, store, storages):
    """If a queue moves to another storage actor, one thread finds the new actor while the polling thread gives up the
    old one. If the new actor is found first, the consumer must not lose it."""
    consumer = consume(Q0)
    poll(consumer, 5)
    reader = consumer._engine._reader._in_place
    other = MappedStorage(store)
    storages["storage-a-1"] = other
    reader._replaced = lambda queue, name, pull_from: name == "storage-a-0" and reader.found(queue, "storage-a-1")
    store.append([make_batch([b"5"])])
    assert poll(consumer, 1) == [b"5"]
    store.append([make_batch([b"6"])])
    assert poll(consumer, 1) == [b"6"]
    assert other.watches[0].asks
    assert here(storages).fetched == other.fetched == []


def test_tags_are_compared_by_code_and_then_by_text(consume, store, storages):
    store.append([make_batch([b"collides"], tags="BBBB"), make_batch([b"wanted"], tags="AaAa"), make_batch([b"none"])])
    consumer = consume(Q0, expression="AaAa")
    assert poll(consumer, 1) == [b"wanted"]
    assert consumer.poll(timeout_s=0.0) == []
    assert consumer.position(Q0) == 8
    assert here(storages).fetched == []


def test_a_queue_goes_over_the_ends_of_files(consume, store, storages):
    bodies = [b"%04d" % number + b"." * 500 for number in range(400)]
    for first in range(0, 400, 50):
        store.append([make_batch(bodies[first : first + 50]), make_batch([b"x" * 900], queue_id=1)])
    assert len(list((store._root / "commitlog").iterdir())) > 2
    consumer = consume(Q0)
    assert poll(consumer, 405, max_messages=33)[5:] == bodies
    consumer.seek(Q0, 5)
    assert poll(consumer, 400, max_messages=1000) == bodies
    consumer.seek(Q0, 5)
    found: list[bytes] = []
    while len(found) < 400:
        found += consumer.poll_table(timeout_s=WAIT_S).column("body").to_pylist()
    assert found == bodies
    assert here(storages).fetched == []


def test_an_offset_that_is_gone_is_jumped_over(consume, store, tmp_path):
    consumer = consume(Q0)
    poll(consumer, 2, max_messages=2)
    for _ in range(30):
        store.append([make_batch([b"." * 10_000 for _ in range(5)])])
    now = datetime(2026, 3, 1, 3, 0)
    for path in sorted((tmp_path / "store" / "commitlog").iterdir())[:2]:
        os.utime(path, (now.timestamp() - 100 * 3600,) * 2)
    store.cleaner._by_hand = 1
    let_pass(store)
    store.cleaner.run_once(now)
    bounds = store.queues.bounds("orders", 0)
    assert bounds.min_offset > 5
    first = consumer.poll(timeout_s=WAIT_S)[0].queue_offset
    # skip messages that were read before the consumer jumped to the queue's new first offset
    while first < bounds.min_offset:
        first = consumer.poll(timeout_s=WAIT_S)[0].queue_offset
    assert first == bounds.min_offset


def test_a_damaged_record_is_handed_over_in_its_place(consume, store, tmp_path):
    consumer = consume(Q0)
    store.append([make_batch([b"a whole body", b"a damaged body", b"the last body"])])
    log = tmp_path / "store" / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        file.seek(log.read_bytes().index(b"a damaged body"))
        file.write(b"A")
    found: list[MessageExt] = []
    while len(found) < 8:
        found += consumer.poll(timeout_s=WAIT_S)
    with pytest.raises(BodyUnreadableError, match=r"offset 6 of queue orders@a:0 .*CRC is wrong"):
        _ = found.pop(6).body
    assert [m.body for m in found] == [b"0", b"1", b"2", b"3", b"4", b"a whole body", b"the last body"]


def test_many_queues_with_a_message_each_are_read_with_few_asks(consume, store, storages, routes):
    count = 300
    routes.routes["orders"] = topic_route(a=count)
    store.append([make_batch([b"%d" % number], queue_id=number) for number in range(1, count)])
    consumer = consume(*(MessageQueue("orders", "a", number) for number in range(count)))
    assert sorted(map(int, poll(consumer, count + 4))) == sorted([*range(5), *range(1, count)])
    assert sum(len(watch.asks) for watch in here(storages).watches) < count / 4


def test_a_queue_with_more_than_a_poll_takes_does_not_hide_the_others(consume, store):
    store.append([make_batch([b"." for _ in range(300)])])
    consumer = consume(Q0, Q1)
    poll(consumer, 10, max_messages=10)
    store.append([make_batch([b"the other"], queue_id=1)])
    polled = 0
    while True:
        polled += 1
        bodies = [message.body for message in consumer.poll(10, timeout_s=WAIT_S)]
        if b"the other" in bodies:
            break
        assert bodies, "the other queue's message does not come"


def test_a_queue_of_inner_batches_is_fetched_and_looked_for_in_the_files_once(consume, store, storages, monkeypatch):
    """A consumer tries to read a queue of inner batches from the mapped files once, and then reads it by fetch calls.
    Each record of such a queue holds many messages without consume-queue entries of their own, and only the store can
    split it."""
    looks = []

    def lacks(request, end, max_bytes):
        looks.append(request)
        raise DataLossError("no units")

    reader = here(storages).reader()
    monkeypatch.setattr(reader, "find", lacks)
    monkeypatch.setattr(reader, "makes_records", lambda topic, queue_id: True)
    consumer = consume(Q0)
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    store.append([make_batch([b"5"])])
    assert poll(consumer, 1) == [b"5"]
    assert len(looks) == 1


def test_a_watch_that_does_not_answer_in_time_is_replaced(consume, store, storages, monkeypatch):
    monkeypatch.setattr(in_place, "WATCH_WAIT_S", 0.02)
    monkeypatch.setattr(in_place, "WATCH_GRACE_S", 0.02)
    consumer = consume(Q0)
    poll(consumer, 5)
    assert consumer.poll(timeout_s=0.2) == []
    eventually(lambda: consumer.poll(timeout_s=0.05) == [] and len(here(storages).watches) > 1, "another", WAIT_S)
    store.append([make_batch([b"5"])])
    assert poll(consumer, 1) == [b"5"]


def test_a_watch_that_ends_while_its_queue_is_found_does_not_leave_the_queue_unread(consume, store, storages):
    consumer = consume(Q0)
    poll(consumer, 5)
    reader = consumer._engine._reader._in_place
    [(name, ended)] = reader._stores.items()
    usual = reader._open
    # The consumer opens the store's files again, but gets the old reader object, whose watch for new messages has
    # ended. This lasts until the polling thread has noticed that the watch ended.
    reader._open = lambda name: ended
    here(storages).watches[0].cut()
    store.append([make_batch([b"5"])])
    eventually(lambda: consumer.poll(timeout_s=0.01) or reader._stores.get(name) is not ended, "the end", WAIT_S)
    assert not reader.found(Q0, name)
    reader._open = usual
    store.append([make_batch([b"6"])])
    eventually(lambda: consumer.poll(timeout_s=0.01) and consumer.position(Q0) == 7, "the last message", WAIT_S)


def test_closing_ends_a_poll_and_the_watch(consume, storages):
    consumer = consume(Q1)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(consumer.poll(timeout_s=3600.0)))
    thread.start()
    eventually(lambda: here(storages).watches and here(storages).watches[0].asks, "the ask", WAIT_S)
    consumer.close()
    thread.join(WAIT_S)
    assert answers == [[]]
    eventually(lambda: here(storages).watches[0]._closed, "the end of the watch", WAIT_S)


def test_a_file_that_is_gone_is_found_out_by_a_fetch_and_the_rest_is_read_in_place(consume, store, storages, tmp_path):
    """A fetch call reports a missing log file, and the consumer reads all other records in place. The test restores the
    file later, as if a user had moved it away for a while."""
    consumer = consume(Q0)
    poll(consumer, 2, max_messages=2)
    log = tmp_path / "store" / "commitlog" / f"{0:020d}"
    os.rename(log, tmp_path / "away")
    thread = threading.Timer(0.05, lambda: os.rename(tmp_path / "away", log))
    thread.start()
    assert poll(consumer, 3) == [b"2", b"3", b"4"]
    thread.join(WAIT_S)


def test_a_predicate_is_asked_before_anything_is_kept(consume, store, storages):
    store.append([make_batch([b"%d" % number for number in range(5, 3000)])])
    asked = []
    consumer = consume(Q0, expression=raymq.predicate(lambda message: asked.append(1) or message.body.endswith(b"99")))
    assert poll(consumer, 30) == [b"%d" % number for number in range(99, 3000, 100)]
    assert len(asked) == 3000, "each message once, in this process"
    assert here(storages).fetched == []
    assert consumer.position(Q0) == 3000


def test_a_table_has_only_messages_that_match_the_predicate(consume):
    consumer = consume(Q0, expression=raymq.predicate(lambda message: int(message.body) % 2))
    assert consumer.poll_table(timeout_s=WAIT_S).column("queue_offset").to_pylist() == [1, 3]


def test_a_predicate_that_fails_stops_its_queue_only_and_names_the_message(consume, store):
    store.append([make_batch([b"a"], queue_id=1)])
    predicate = raymq.predicate(lambda message: message.queue_id or 1 / (int(message.body) - 2))
    consumer = consume(Q0, Q1, expression=predicate)
    found: list[bytes] = []
    with pytest.raises(PredicateFailedError, match=r"offset 2 of .*ZeroDivisionError"):
        poll_into(found, consumer)
    store.append([make_batch([b"b"], queue_id=1)])
    # The predicate fails on queue 0, and some polls may raise its error before one returns the message of queue 1.
    eventually(lambda: found.extend(poll_through(consumer)) or b"b" in found, "the other queue's messages")
    assert sorted(found) == [b"0", b"1", b"a", b"b"]
    consumer.seek(Q0, 3)
    assert poll(consumer, 2) == [b"3", b"4"]


def poll_into(found: list[bytes], consumer: PullConsumer) -> None:
    """Poll repeatedly, until a call returns no messages. Adds the bodies of all messages to `found`."""
    while messages := consumer.poll(timeout_s=WAIT_S):
        found += [message.body for message in messages]


def poll_through(consumer: PullConsumer) -> list[bytes]:
    """Poll once and return the bodies of the messages. Returns an empty list if the poll raises the predicate's
    error."""
    try:
        return [message.body for message in consumer.poll(timeout_s=0.1)]
    except PredicateFailedError:
        return []


def test_a_new_predicate_applies_to_messages_not_yet_polled(consume, store):
    consumer = consume(Q0, expression=raymq.predicate(lambda message: False))
    eventually(lambda: consumer.poll(timeout_s=0.1) == [] and consumer.position(Q0) == 5, "all messages are passed")
    consumer.assign([Q0], raymq.predicate(lambda message: True))
    store.append([make_batch([b"5"])])
    assert poll(consumer, 1) == [b"5"]
