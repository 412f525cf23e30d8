"""Test of a recall before a failover: the new master does not deliver a recalled message, but delivers all other
messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.common.delay import TIMER_TOPIC, timer_queue
from raymq.common.message import Message
from raymq.common.protocol.recall import RECALLED_TOPIC, RecallHandle
from raymq.records.format.encode import ProducerSequence, WaitingBatch, encode_batch
from raymq.remoting.recall import recall_batch
from storage.message_store import MessageStore
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas
from tests.support.stores.stores import read_queue

pytestmark = pytest.mark.usefixtures("no_flushes")

HOST = ("127.0.0.1", 5000)
WAITS_MS = 4000
"""Delay of the messages in milliseconds, longer than a failover takes.

If the failover takes longer on a busy machine, the first master applies the recall itself.
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[LocalReplicas]:
    made = LocalReplicas(tmp_path)
    made.settle()
    made.start()
    yield made
    made.end()


def bodies(store: MessageStore, topic: str, queue_id: int) -> list[bytes]:
    return [message.body for message in read_queue(store, topic, queue_id)]


def test_a_recall_survives_a_failover(group: LocalReplicas):
    now_ms = time.time_ns() // 1_000_000
    due_ms = now_ms + WAITS_MS
    batch = encode_batch(
        [Message("orders", body, deliver_at_ms=due_ms) for body in (b"gone", b"kept")],
        timer_queue(due_ms, now_ms),
        born_host=HOST,
        born_timestamp_ms=now_ms,
        message_ids=["0" * 31 + "1", "0" * 31 + "2"],
        producer=ProducerSequence("p", 0, 0),
        waiting=WaitingBatch(TIMER_TOPIC, [3, 3]),
    )
    group.master.append([batch])
    handle = RecallHandle("orders", "broker-a", due_ms, "0" * 31 + "1")
    [recalled] = group.master.append([recall_batch(handle, HOST, now_ms, "r")])
    assert recalled.store_timestamp_ms < due_ms

    group.fail_over()
    group.settle()
    [again] = group.master.append([recall_batch(handle, HOST, now_ms, "r")])
    assert (again.duplicate, again.store_timestamp_ms) == (True, recalled.store_timestamp_ms)
    eventually(lambda: bodies(group.master.store, "orders", 3), "the delivery of the other message")
    eventually(lambda: bodies(group.master.store, RECALLED_TOPIC, 0), "the end of the recalled message")
    assert bodies(group.master.store, "orders", 3) == [b"kept"]
    assert bodies(group.master.store, RECALLED_TOPIC, 0) == [b"gone"]
