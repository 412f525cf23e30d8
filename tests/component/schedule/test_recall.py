"""Tests of recalls of delayed messages in a real store: in time or too late, over stops, kills and several days, and on
a replica."""

from __future__ import annotations

import pytest

from raymq.common.delay import TIMER_RECALL_QUEUE, TIMER_ROLL_QUEUE, TIMER_TOPIC, timer_queue
from raymq.common.errors import SystemBusyError
from raymq.common.message import Message
from raymq.common.protocol.recall import RECALLED_TOPIC, RecallHandle
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import ProducerSequence, WaitingBatch, encode_batch
from raymq.remoting.recall import recall_batch
from storage.append import appender
from storage.message_store import MessageStore
from tests.support.history.waiting import eventually
from tests.support.stores.clocks import Clock
from tests.support.stores.stores import killed_copy, read_queue

pytestmark = pytest.mark.usefixtures("no_flushes")

DAY_MS = 86_400_000
HOST = ("127.0.0.1", 5000)


def send(store: MessageStore, clock: Clock, body: bytes, due_ms: int) -> RecallHandle:
    """Store a delayed message in the same way as a producer. Returns the handle with which the message can be
    recalled."""
    message_id = body.hex().upper().rjust(32, "0")
    batch = encode_batch(
        [Message("orders", body, tags="t", deliver_at_ms=due_ms)],
        timer_queue(due_ms, clock.now_ms),
        born_host=HOST,
        born_timestamp_ms=clock.now_ms,
        message_ids=[message_id],
        producer=ProducerSequence(message_id, 0, 0),
        waiting=WaitingBatch(TIMER_TOPIC, [3]),
    )
    store.append([batch])
    return RecallHandle("orders", "broker-a", due_ms, message_id)


def recall(store: MessageStore, clock: Clock, handle: RecallHandle, producer_id: str = "r") -> AppendResult:
    [result] = store.append([recall_batch(handle, HOST, clock.now_ms, producer_id)])
    return result


def bodies(store: MessageStore, topic: str = "orders", queue_id: int = 3) -> list[bytes]:
    return [message.body for message in read_queue(store, topic, queue_id)]


def settle(store: MessageStore) -> None:
    """Run the scheduler until no message is due at the present time of the test's clock."""
    scheduler = store.schedule.new_scheduler()
    store.schedule.stop_delivery()
    while scheduler.round() == 0:
        pass


def test_a_recalled_message_is_put_aside_when_it_is_due(opened, clock):
    store = opened(deliver=False)
    due_ms = clock.now_ms + 60_000
    kept, gone = send(store, clock, b"kept", due_ms), send(store, clock, b"gone", due_ms)
    assert kept.message_id != gone.message_id
    assert recall(store, clock, gone).store_timestamp_ms < due_ms
    recall(store, clock, gone, "again")
    clock.now_ms = due_ms
    store.schedule.start_delivery()
    eventually(lambda: store.schedule.status().recalled, "the end of the recalled message")
    eventually(lambda: bodies(store), "the other message")
    assert bodies(store) == [b"kept"]
    [aside] = read_queue(store, RECALLED_TOPIC, 0)
    assert (aside.body, aside.message_id, aside.tags) == (b"gone", gone.message_id, "t")
    assert store.schedule.status().pending == {}


def test_a_recall_stored_after_the_due_time_has_no_effect(opened, clock):
    store = opened(deliver=False)
    due_ms = clock.now_ms + 60_000
    handle = send(store, clock, b"late", due_ms)
    clock.now_ms = due_ms
    store.schedule.start_delivery()
    eventually(lambda: bodies(store), "the message")
    assert recall(store, clock, handle).store_timestamp_ms >= due_ms
    settle(store)
    assert bodies(store) == [b"late"]
    assert bodies(store, RECALLED_TOPIC, 0) == []


def test_a_repeated_recall_is_answered_with_the_time_of_the_first(opened, clock):
    store = opened(deliver=False)
    handle = send(store, clock, b"x", clock.now_ms + 60_000)
    first = recall(store, clock, handle)
    clock.now_ms += 120_000
    again = recall(store, clock, handle)
    assert (again.duplicate, again.store_timestamp_ms) == (True, first.store_timestamp_ms)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_recall_outlives_its_store(opened, clock, tmp_path, end):
    store = opened(deliver=False)
    due_ms = clock.now_ms + 60_000
    handle = send(store, clock, b"gone", due_ms)
    send(store, clock, b"kept", due_ms)
    recall(store, clock, handle)
    if end == "close":
        store.close()
        root = tmp_path / "store"
    else:
        root = killed_copy(store._root, tmp_path / "copy")
    clock.now_ms = due_ms + 3 * DAY_MS  # The store was closed for three days, but the recall is still valid.
    again = opened(root, deliver=False)
    settle(again)
    assert bodies(again) == [b"kept"]
    assert bodies(again, RECALLED_TOPIC, 0) == [b"gone"]


def test_a_message_that_was_put_aside_stays_so_in_a_store_that_has_only_the_log(opened, clock, tmp_path):
    store = opened(deliver=False)
    due_ms = clock.now_ms + 60_000
    recall(store, clock, send(store, clock, b"gone", due_ms))
    clock.now_ms = due_ms
    settle(store)
    clock.now_ms += 2 * DAY_MS
    settle(store)  # Two days after the message's due time, the scheduler removes the message's recall from memory.
    copy = killed_copy(store._root, tmp_path / "copy")
    for name in ("delayOffset.json", "timerOffset.json"):
        (copy / "config" / name).unlink(missing_ok=True)
    again = opened(copy, deliver=False)
    settle(again)
    assert bodies(again) == []
    assert bodies(again, RECALLED_TOPIC, 0) == [b"gone"]


def test_a_recall_of_a_message_due_in_days_is_filed_again_each_day_until_then(opened, clock):
    store = opened(deliver=False)
    due_ms = clock.now_ms + 3 * DAY_MS
    handle = send(store, clock, b"gone", due_ms)
    send(store, clock, b"kept", due_ms)
    assert store.queues.bounds(TIMER_TOPIC, TIMER_ROLL_QUEUE).max_offset == 2
    recall(store, clock, handle)
    scheduler = store.schedule.new_scheduler()
    for _ in range(4):
        clock.now_ms += DAY_MS
        while scheduler.round() == 0:
            pass
    assert store.queues.bounds(TIMER_TOPIC, TIMER_RECALL_QUEUE).max_offset == 3
    assert bodies(store) == [b"kept"]
    assert bodies(store, RECALLED_TOPIC, 0) == [b"gone"]
    assert scheduler._recalls._due_ms == {}
    assert not scheduler._recalls._times
    assert store.schedule._parts.deliveries.get((TIMER_TOPIC, TIMER_RECALL_QUEUE)).low == 3


def test_recalls_are_bounded(opened, clock, monkeypatch):
    monkeypatch.setattr(appender, "RECALLS_MAX", 2)
    store = opened(deliver=False)
    handles = [send(store, clock, b"%d" % number, clock.now_ms + 60_000) for number in range(3)]
    for handle in handles[:2]:
        recall(store, clock, handle, handle.message_id)
    with pytest.raises(SystemBusyError, match="already keeps 2 recalls of messages"):
        recall(store, clock, handles[2], handles[2].message_id)
    send(store, clock, b"others are not concerned", clock.now_ms + 60_000)
    clock.now_ms += 2 * DAY_MS
    scheduler = store.schedule.new_scheduler()
    while scheduler.round() == 0:
        pass
    recall(store, clock, send(store, clock, b"4", clock.now_ms + 60_000), "later")


def test_messages_of_a_delay_level_cannot_be_recalled(opened, clock):
    """A recall of a message with a delay level has no effect. Like RocketMQ, raymq can recall only messages with a
    delivery time."""
    store = opened(deliver=False)
    recall(store, clock, RecallHandle("orders", "broker-a", clock.now_ms + 5000, "0" * 31 + "1"))
    batch = encode_batch(
        [Message("orders", b"level", delay_level=1)],
        0,
        born_host=HOST,
        born_timestamp_ms=clock.now_ms,
        message_ids=["0" * 31 + "1"],
        producer=None,
        waiting=WaitingBatch("SCHEDULE_TOPIC_XXXX", [3]),
    )
    store.append([batch])
    clock.now_ms += 6000
    settle(store)
    assert bodies(store) == [b"level"]
