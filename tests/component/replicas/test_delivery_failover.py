"""Tests of delayed messages over a cut of the log: the cut also takes back the deliveries that it removes. So each
message is delivered once, whichever replica leads next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raymq.common.delay import TIMER_TOPIC, timer_queue
from raymq.common.errors import StoreCorruptError
from raymq.common.message import Message
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.protocol.store import ScheduleStatus
from raymq.records.format.encode import EncodedBatch, ProducerSequence, WaitingBatch, encode_batch
from storage.dispatch.delivery_progress import CONFIRMED_DELIVERIES
from storage.schedule.schedule_service import ScheduleService
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas, settle_append
from tests.support.stores.stores import bodies_of

pytestmark = pytest.mark.usefixtures("no_flushes")

Start = Callable[[ScheduleService], None]
DELAY_MS = 1000
NO_STATUS = ScheduleStatus({}, 0, 0, 0)
HOST = ("127.0.0.1", 5000)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return the function that starts deliveries. Without its call no store delivers, whatever its role is."""
    start_delivery = ScheduleService.start_delivery
    monkeypatch.setattr(ScheduleService, "start_delivery", lambda self: None)
    return start_delivery


@pytest.fixture
def group(tmp_path: Path, start: Start) -> Iterator[LocalReplicas]:
    made = LocalReplicas(tmp_path, 2, flush_interval_consume_queue_ms=10, message_delay_level=f"{DELAY_MS // 1000}s")
    made.settle()
    yield made
    made.end()


def delayed(body: bytes, topic: str) -> EncodedBatch:
    """Return a batch with one message that is delayed by DELAY_MS, in a timer queue or in the queue of level 1."""
    now_ms = time.time_ns() // 1_000_000
    due_ms = now_ms + DELAY_MS
    timed = topic == TIMER_TOPIC
    message = Message("orders", body, deliver_at_ms=due_ms) if timed else Message("orders", body, delay_level=1)
    queue_id = timer_queue(due_ms, now_ms) if timed else 0
    return encode_batch(
        [message],
        queue_id,
        born_host=HOST,
        born_timestamp_ms=now_ms,
        message_ids=[body.hex().zfill(32)],
        producer=ProducerSequence(body.decode(), 0, 0),
        waiting=WaitingBatch(topic, [0]),
    )


def delivered(group: LocalReplicas) -> list[bytes]:
    """Return the bodies that the master's log has in the target queue, also before a replica has copied them. Returns
    an empty list while a delivery is being written: its record is then visible before its queue entry."""
    store = group.master.store
    store.gate.show(store.log.end_offset)
    try:
        return bodies_of(store)
    except AssertionError:
        return []


@pytest.mark.parametrize("topic", [TIMER_TOPIC, SCHEDULE_TOPIC])
def test_a_delivery_that_a_failover_removes_is_done_again_by_the_next_master(
    group: LocalReplicas, topic: str, start: Start
):
    """A replaced master delivers messages, and saves its delivery progress. It then follows the new master, and its log
    is cut. When it leads again, the messages whose deliveries were cut still wait. The other messages do not."""
    settle_append(group, delayed(b"early", topic))
    first = group.master.store.schedule
    start(first)
    eventually(lambda: delivered(group) == [b"early"], "the first delivery")
    first.stop_delivery()
    group.settle()
    waits_from = group.master.store.log.end_offset
    settle_append(group, delayed(b"acknowledged", topic))
    group.settle()
    old = group.cut_off_master()
    settle_append(group, delayed(b"new", topic))
    replaced = group.cut_off[old].any_store
    group.cut_off[old].start_append([delayed(b"lost", topic)])
    start(first)
    eventually(lambda: (first.status() or NO_STATUS).delivered == 2, "the deliveries of the old master")
    eventually(lambda: replaced._parts.deliveries.unsaved() is None, "the delivery progress on disk")
    # Retention must keep the messages that wait again after the cut.
    assert replaced.cleaner.pinned_physical_offset() <= waits_from
    group.rejoin()
    group.settle()
    assert delivered(group) == [b"early"]
    group.fail_over()
    assert group.master is group.replicas[old]
    start(group.master.store.schedule)
    eventually(lambda: len(delivered(group)) >= 3, "the deliveries of the new master")
    assert delivered(group) == [b"early", b"acknowledged", b"new"]


def test_a_damaged_file_of_confirmed_deliveries_is_one_clear_error(group: LocalReplicas, start: Start):
    settle_append(group, delayed(b"early", SCHEDULE_TOPIC))
    start(group.master.store.schedule)
    eventually(lambda: delivered(group) == [b"early"], "the first delivery")
    group.settle()
    path = group.directory(0) / "config" / CONFIRMED_DELIVERIES
    eventually(path.exists, "the file of confirmed deliveries")
    group.close(0)
    good = path.read_text()
    wrong = '{"end": 1, "confirmed": 1, "offsetTable": {"orders/0": [0, 1, 1]}}'
    for text in ("[]", "{}", wrong, wrong.replace("orders", SCHEDULE_TOPIC).replace("1", "-1")):
        path.write_text(text)
        path.with_name(f"{path.name}.bak").unlink(missing_ok=True)
        with pytest.raises(StoreCorruptError, match=CONFIRMED_DELIVERIES):
            group.open(0)
    path.write_text(good)
    group.open(0)
