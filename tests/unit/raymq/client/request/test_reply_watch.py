"""Tests of the thread that reads a client's reply queue. It begins at the queue's end, returns each reply once, and
pauses while no request waits for a reply."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raymq.client.request.reply_watch import IDLE_AFTER_S, ReplyWatch
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import MessageQueue, PullStatus, SystemMessage
from raymq.common.protocol.store import FetchResult, QueueBounds
from raymq.records.format.encode import encode_batch
from raymq.records.format.layout import encode_host
from raymq.records.kernels.stamp import stamp

QUEUE = MessageQueue("c_REPLY_TOPIC", "a", 3)
ME = "10.0.0.1@1@ab"


def records(*clients: str, offset: int = 40) -> bytes:
    """Return one reply record for each client, at consecutive queue offsets from `offset` on."""
    messages = [SystemMessage("c_REPLY_TOPIC", client.encode(), client) for client in clients]
    batch = encode_batch(messages, 3, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=[""] * len(messages))
    data = bytearray(batch.records)
    stamp(
        data,
        batch.sizes,
        first_queue_offset=offset,
        first_physical_offset=0,
        store_timestamp_ms=1,
        store_host=encode_host("127.0.0.1", 1),
    )
    return bytes(data)


def found(next_offset: int, *clients: str) -> FetchResult:
    return FetchResult(PullStatus.FOUND, next_offset, 0, 100, records(*clients), len(clients))


@pytest.fixture
def scene():
    """Return a watch of a reply queue. Its threads find no storage actor, so that tests can pass fetch results to the
    watch directly."""
    made = SimpleNamespace(taken=[], idle_s=0.0)
    made.watch = ReplyWatch(
        ME,
        SimpleNamespace(get=no_route),
        SimpleNamespace(get=None),
        take=lambda m: made.taken.append(m.body),
        idle_s=lambda: made.idle_s,
    )
    made.watch._lookup = SimpleNamespace(bounds=lambda queue: QueueBounds(0, 40, 40))
    made.watch.begin(QUEUE)
    yield made
    made.watch.close()


def no_route(topic):
    raise ServiceNotAvailableError("no NameServer")


def deliver(scene, offset: int, result: FetchResult) -> None:
    """Simulate a fetch of the reply watch at `offset`: the watch makes the request, and then receives `result` as the
    fetch result."""
    scene.watch._reader._request(QUEUE, offset)
    scene.watch._reader._deliver(QUEUE, offset, result)


def test_a_reply_watch_begins_at_the_queues_end_and_skips_replies_to_others(scene):
    assert scene.watch.watches(QUEUE)
    assert scene.watch._reader._wanted() == {QUEUE: 40}
    deliver(scene, 40, found(43, ME, "another", ME))
    assert scene.taken == [ME.encode()] * 2
    assert scene.watch._reader._wanted() == {QUEUE: 43}


def test_a_result_that_comes_twice_is_taken_once(scene):
    for _ in range(2):
        deliver(scene, 40, found(41, ME))
    assert len(scene.taken) == 1


def test_a_reply_watch_continues_after_deleted_or_lost_replies(scene):
    deliver(scene, 40, FetchResult(PullStatus.OFFSET_ILLEGAL, 50, 50, 60, b"", 0))
    assert scene.watch._reader._wanted() == {QUEUE: 50}
    scene.watch._lose(QUEUE, 50, OSError("lost"))
    assert scene.watch._reader._wanted() == {QUEUE: 51}


def test_a_damaged_reply_is_left_out(scene):
    intact = records(ME)
    body_at = bytes(intact).index(ME.encode())
    damaged = bytearray(intact)
    damaged[body_at] ^= 0xFF
    deliver(scene, 40, FetchResult(PullStatus.FOUND, 42, 0, 100, bytes(damaged) + records(ME, offset=41), 2))
    assert scene.taken == [ME.encode()]
    assert scene.watch._reader._wanted() == {QUEUE: 42}


def test_nothing_is_read_once_nobody_has_asked_for_a_while(scene):
    scene.idle_s = IDLE_AFTER_S
    assert scene.watch._reader._wanted() == {}
