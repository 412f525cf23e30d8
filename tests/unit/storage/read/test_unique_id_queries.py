"""Tests of the query for several unique ids: it finds each message that the store received before, also a delayed one.
If consumers may not see all these messages yet, the result says that it is not complete."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from raymq.client.consumer.queue_calls import QueueCalls
from raymq.common.delay import TIMER_TOPIC
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import Message
from raymq.common.protocol.store import QueryResult
from raymq.records.format.encode import WaitingBatch, encode_batch
from raymq.remoting.lane.calls import decode_result, encode_result
from storage.message_store import MessageStore
from storage.read import queries
from tests.support.clients.fakes import FakeRoutes, topic_route
from tests.support.stores.stores import open_store, small_settings

HOUR_MS = 3_600_000
CLIENT_ID = "01A2B3C4D5E6F70008ABCDEF0100000001"
"""An id of 34 digits, as RocketMQ 5's clients make them."""


def send(store: MessageStore, message_id: str, *, delayed: bool = False) -> None:
    now_ms = time.time_ns() // 1_000_000
    message = Message("orders", message_id.encode(), deliver_at_ms=now_ms + HOUR_MS if delayed else None)
    batch = encode_batch(
        [message],
        0,
        born_host=("127.0.0.1", 1),
        born_timestamp_ms=now_ms,
        message_ids=[message_id],
        waiting=WaitingBatch(TIMER_TOPIC, [0]) if delayed else None,
    )
    store.append([batch])


def calls_of(store: MessageStore) -> QueueCalls:
    """Return QueueCalls of a topic with one broker group, whose store is in this process."""

    def query(topic: str, message_ids: list[str], since_ms: int, timeout_s: float) -> object:
        return store.queries.by_unique_ids(topic, message_ids, since_ms)

    storage = SimpleNamespace(query_by_unique_ids=query)
    return QueueCalls(FakeRoutes(topic_route(a=1)), SimpleNamespace(get=lambda name: storage))


def test_stored_messages_are_found_by_their_ids(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "store")) as store:
        for message_id in ("one", CLIENT_ID, CLIENT_ID, "three"):
            send(store, message_id)
        send(store, "later", delayed=True)
        calls, ids = calls_of(store), ["one", CLIENT_ID, "two", "later"]
        found = calls.stored("orders", "a", ids, 10.0)
        assert [(one.message_id, one.queue_offset) for one in found] == [("one", 0), (CLIENT_ID, 1), (CLIENT_ID, 2)]
        found = calls.stored("orders", "a", ids, 10.0, delayed=True)
        assert [one.message_id for one in found] == ["one", CLIENT_ID, CLIENT_ID, "later"]
        assert found[-1].body == b"later"


def test_a_query_waits_until_the_messages_that_the_store_received_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "SETTLE_MAX_S", 30.0)
    settings = small_settings(tmp_path / "store", query_wait_index_ms=30_000)
    with closing(MessageStore.open(settings, broker_name="broker-a", on_stored=lambda end: None)) as store:
        send(store, "one")
        timer = threading.Timer(0.2, lambda: store.show(store.status().max_physical_offset))
        timer.start()
        result = store.queries.by_unique_ids("orders", ["one"])
        timer.join()
        assert (result.count, result.complete) == (1, True)
        # the form in which a lane carries the result
        assert decode_result(encode_result(result), QueryResult) == result


def test_a_result_is_not_complete_while_a_message_could_be_lost(tmp_path: Path) -> None:
    settings = small_settings(tmp_path / "store", query_wait_index_ms=1)
    with closing(MessageStore.open(settings, broker_name="broker-a", on_stored=lambda end: None)) as store:
        send(store, "one")
        assert not store.queries.by_unique_ids("orders", ["two"]).complete
        with pytest.raises(ServiceNotAvailableError, match="cannot tell yet"):
            calls_of(store).stored("orders", "a", ["two"], 0.1)
