"""Tests of counting the messages that a consumer has not fetched yet. This takes one call per broker group, and only to
groups that may have messages."""

from __future__ import annotations

import time

import pytest

from raymq.client.consumer import ready_messages
from raymq.client.consumer.ready_messages import QueueState, with_ready
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.protocol.store import FetchResult
from raymq.records.format.layout import RecordHeader
from raymq.telemetry.metrics.client_figures import ConsumerFigures


def state(queue_id: int, fetch_offset: int, end: int, *, ask: bool, broker: str = "a") -> QueueState:
    return QueueState(MessageQueue("orders", broker, queue_id), ConsumerFigures("orders", "g"), fetch_offset, end, ask)


def record(age_ms: int) -> bytes:
    stored_ms = time.time_ns() // 1_000_000 - age_ms
    return RecordHeader(100, 0, 0, 0, 0, 0, 0, 0, 0, bytes(8), stored_ms, bytes(8), 0, 0, 0).encode()


class Storage:
    """Fake storage actor whose queues end at offset 100. The first message is one minute old."""

    def __init__(self):
        self.calls = []

    def fetch(self, requests, max_bytes, wait_s, timeout_s):
        self.calls.append([(request.queue_id, request.queue_offset) for request in requests])
        assert wait_s == 0
        records = [record(60_000), *[b""] * (len(requests) - 1)]
        return [FetchResult(PullStatus.FOUND, 1, 0, 100, data, 1) for data in records]


@pytest.fixture
def storages(monkeypatch):
    storages = {"a": Storage(), "b": Storage()}

    def call_master(routes, clients, queue, timeout_s, call):
        if queue.broker_name not in storages:
            raise ServiceNotAvailableError("gone")
        return call(storages[queue.broker_name], timeout_s)

    monkeypatch.setattr(ready_messages, "call_master", call_master)
    return storages


def test_queues_at_their_ends_ask_nobody(storages):
    assert with_ready([state(0, 7, 7, ask=False)], None, None) == [ConsumerFigures("orders", "g")]
    assert storages["a"].calls == []


def test_all_queues_of_a_broker_group_are_one_call(storages):
    states = [state(0, 40, 50, ask=True), state(1, 100, 0, ask=True), state(0, 90, 0, ask=True, broker="b")]
    first, second, third = with_ready(states, None, None)
    assert (first.ready, second.ready, third.ready) == (60, 0, 10)
    assert 60_000 <= first.queueing_ms < 120_000
    assert second.queueing_ms == 0
    assert storages["a"].calls == [[(0, 40), (1, 100)]]
    assert storages["b"].calls == [[(0, 90)]]


def test_an_unavailable_broker_group_keeps_the_last_figures(storages):
    [figures] = with_ready([state(0, 40, 50, ask=True, broker="gone")], None, None)
    assert (figures.ready, figures.queueing_ms) == (10, 0)


def test_more_queues_than_one_call_takes_count_as_they_were_seen(storages, monkeypatch):
    monkeypatch.setattr(ready_messages, "QUEUES_MAX", 1)
    found = with_ready([state(0, 40, 50, ask=True), state(1, 40, 50, ask=True)], None, None)
    assert sorted(one.ready for one in found) == [10, 60]
