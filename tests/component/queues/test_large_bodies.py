"""Tests of message bodies of more than 4 MiB, in a store that allows 16 MiB. Every reader gets the whole body,
compressed or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

import raymq
from actors.core.consume.process_queue import ConsumeTask, ProcessQueue
from actors.core.consume.records_in_place import RecordsInPlace
from actors.pull.tasks_in_flight import ship_task
from raymq.client.consumer.pull.fetched_records import (
    FetchedRecords,
    PolledRecords,
    as_messages,
    as_table,
    decode_messages,
    decode_tables,
)
from raymq.client.consumer.pull_once import read_fetched
from raymq.client.consumer.push.task_reader import TaskReader
from raymq.client.consumer.simple.lease_reader import LeaseReader
from raymq.client.consumer.subscription import Subscription
from raymq.client.predicates.process import PredicateProcess
from raymq.client.producer.settings import ProducerSettings
from raymq.client.scan import batches as scan_batches
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, MESSAGE_SIZE_LIMIT_BYTES, Message, MessageQueue
from raymq.common.protocol.consume_result import StoreLog
from raymq.common.protocol.pop import LeasedRange
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.records.format import compression
from raymq.records.format.memory_records import LocatedRecords
from raymq.remoting import storage_client
from raymq.remoting.storage_client import StorageClient
from storage.message_store import MessageStore
from tests.support.clients.fakes import description
from tests.support.clients.store_client import StoreClient, producer_of
from tests.support.clients.watches import MappedStorage
from tests.support.stores.damaged_topic import one_broker_routes
from tests.support.stores.stores import open_store

LIMIT = 16 << 20
QUEUE = MessageQueue("orders", "broker-a", 0)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def bodies() -> list[bytes]:
    """Return one short body, one incompressible body, three bodies that compress well, and one body of the maximum
    size."""
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    return [b"short", random.Random(seed).randbytes(5 << 20), *[b"%d" % n * (6 << 20) for n in (1, 2, 3)], bytes(LIMIT)]


@pytest.fixture(scope="module")
def store(tmp_path_factory, bodies) -> Iterator[MessageStore]:
    root = tmp_path_factory.mktemp("large") / "store"
    before = compression.body_max_bytes()
    store = open_store(root, max_message_size_bytes=LIMIT, mapped_file_size_commit_log_bytes=64 << 20)
    with producer_of(StoreClient(store, max_message_size_bytes=LIMIT), max_message_size_bytes=LIMIT) as producer:
        for body in bodies[:4]:
            producer.send(Message("orders", body, keys=["k"]))
        producer.send_table("orders", pa.table({"body": pa.array(bodies[4:], pa.large_binary())}))
    yield store
    store.close()
    compression._bound.most_bytes = before


@pytest.fixture(autouse=True)
def process(store, monkeypatch) -> None:
    """Reset this process's maximum message size to the default. Otherwise the process would keep the value that it
    received from an earlier store."""
    monkeypatch.setattr(compression._bound, "most_bytes", MAX_MESSAGE_SIZE_BYTES)


@pytest.fixture
def described(monkeypatch, store) -> None:
    """Let this process learn the store's maximum message size, as a client does: by the answer to `describe`."""
    actor = SimpleNamespace(call=lambda name, timeout_s: replace(description(), max_message_size_bytes=LIMIT))
    monkeypatch.setattr(storage_client, "ActorRef", lambda name: actor)
    client = StorageClient("storage-broker-a-0", "elsewhere")
    client.describe(WAIT_S)
    client.close()


def fetched(store: MessageStore) -> FetchResult:
    [result] = store.fetch([FetchRequest("orders", 0, 0, 100)], max_bytes=128 << 20, wait_s=0)
    return result


def mapped(store: MessageStore) -> tuple[LocatedRecords, ...]:
    storage = MappedStorage(store)
    [result] = storage.find([FetchRequest("orders", 0, 0, 100)], 128 << 20, 0.0, WAIT_S)
    return result.mapped


def polled(store: MessageStore, *, in_place: bool) -> list[PolledRecords]:
    """Return the store's records as the objects that a consumer's poll decodes (PolledRecords): from the mapped files
    if `in_place` is true, otherwise from the bytes of a fetch."""
    parts = mapped(store) if in_place else (LocatedRecords.read(fetched(store).records),)
    subscription = Subscription.parse("orders", "*")
    return [PolledRecords(QUEUE, subscription, FetchedRecords(part, 6), len(part.starts)) for part in parts]


def test_a_process_that_has_seen_no_such_store_refuses_larger_bodies(store, bodies):
    messages = as_messages(decode_messages(polled(store, in_place=False)))
    assert [message.body_error is None for message in messages] == [True, True, False, False, False, False]


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_poll_returns_large_bodies_as_messages_and_tables(store, bodies, in_place):
    assert [message.body for message in as_messages(decode_messages(polled(store, in_place=in_place)))] == bodies
    table = as_table(decode_tables(polled(store, in_place=in_place)))
    assert table.column("body").to_pylist() == bodies


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("near", [True, False])
def test_a_simple_consumer_and_a_scan_read_large_bodies(store, bodies, near):
    storage = SimpleNamespace(
        name="storage-broker-a-0",
        reader=lambda: store._parts.reader if near else None,
        fetch=lambda requests, max_bytes, wait_s, timeout_s: store.fetch(requests, max_bytes=max_bytes, wait_s=0),
        count_read=lambda count: None,
    )
    routes, storages = one_broker_routes(), SimpleNamespace(get=lambda name: storage)
    found = LeaseReader(routes, storages).read(  # type: ignore[arg-type]  # stand-ins
        "broker-a", LeasedRange("orders", 0, 0, 6, 1, 60_000, 1), Subscription.parse("orders", "*"), 128 << 20
    )
    assert [message.body for message in found.messages] == bodies
    whole = OffsetRange("orders", "broker-a", 0, 0, 6)
    rows = scan_batches.open_ranges(routes, storages, [whole], fail_on_data_loss=True, columns=["body", "error"])
    assert [row for batch in rows for row in batch.to_pylist()] == [{"body": body, "error": None} for body in bodies]


@pytest.mark.usefixtures("described")
def test_an_administrator_reads_large_bodies(store, bodies):
    assert [one.message.body for one in read_fetched(fetched(store).records, QUEUE)] == bodies


@pytest.mark.parametrize("in_place", [True, False])
def test_a_listener_gets_the_body_bound_with_its_task(store, bodies, in_place, monkeypatch):
    files = MappedStorage(store)._files
    records = RecordsInPlace.of(files, mapped(store))
    monkeypatch.setattr(compression._bound, "most_bytes", LIMIT)
    shipped = ship_task(ConsumeTask(ProcessQueue(QUEUE), records, number=1), in_place=in_place)
    monkeypatch.setattr(compression._bound, "most_bytes", MAX_MESSAGE_SIZE_BYTES)
    messages, damaged = TaskReader().messages(shipped) or ([], True)
    assert ([message.body for message in messages], damaged) == (bodies, False)


@pytest.mark.usefixtures("described")
def test_the_process_of_a_predicate_gets_the_body_bound(store, bodies):
    files = MappedStorage(store)._files
    predicate = PredicateProcess(raymq.predicate(lambda message: len(message.body) > 6 << 20, timeout_s=WAIT_S))
    [records] = mapped(store)
    log = StoreLog(files.root, files.commit_log_file_size, files.consume_queue_file_size)
    evaluated = predicate.evaluate(records, "broker-a", 1e12, log)
    predicate.close()
    assert evaluated.matches.tolist() == [len(body) > 6 << 20 for body in bodies]


def test_a_body_over_the_bound_of_a_producer_or_a_store_is_refused(store):
    client = StoreClient(store, max_message_size_bytes=LIMIT)
    with producer_of(client) as producer, pytest.raises(MessageIllegalError, match="this producer's max_message_size"):
        producer.send(Message("orders", bytes(MAX_MESSAGE_SIZE_BYTES + 1)))
    too_long = random.Random(1).randbytes(LIMIT + 1)
    with producer_of(client, max_message_size_bytes=2 * LIMIT) as producer:
        for send in (producer.send, lambda message: producer.send_async(message).result(WAIT_S)):
            with pytest.raises(MessageIllegalError, match="exceeds the store's limit of 16777216"):
                send(Message("orders", too_long))
    with pytest.raises(InvalidArgumentError, match="must be 1 to 1073741824"):
        ProducerSettings(max_message_size_bytes=MESSAGE_SIZE_LIMIT_BYTES + 1)
