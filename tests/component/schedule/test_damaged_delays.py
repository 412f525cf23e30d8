"""Tests of one damaged record among delayed messages and recalls. All other messages are delivered once, and the damage
is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raymq.common.delay import TIMER_RECALL_QUEUE, TIMER_TOPIC, timer_queue
from raymq.common.message import Message, MessageExt, MessageQueue
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.protocol.recall import RECALLED_TOPIC
from raymq.common.protocol.store import FetchRequest, RepairState
from raymq.records.format.check import check_record
from raymq.records.format.decode import read_record
from raymq.records.format.encode import WaitingBatch, encode_batch
from raymq.records.format.places import RecordPlace
from storage.message_store import MessageStore
from storage.schedule import scheduler as scheduler_module
from storage.schedule.scheduler import DELIVERY_RETRY_MS
from tests.component.schedule.test_recall import recall, send
from tests.support.stores.clocks import Clock
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.stores import killed_copy

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"body of %d" % number for number in range(5)]
DAMAGED = 2
DUE_MS = 10_000
RETURNED = {"size": "intact", "queue id": "intact", "topic": "intact", "body": "unreadable"}
"""How consumers receive a message whose record has one damaged field, by the name of the damaged field. If another
field is damaged, consumers do not receive the message."""


def put_delayed(store: MessageStore, clock: Clock, kind: str) -> list[int]:
    """Store BODIES as delayed messages, with delay level 3 or with a delivery time (`kind`). Returns the physical
    offsets of the messages."""
    due_ms = clock.now_ms + DUE_MS
    places = []
    for number, body in enumerate(BODIES):
        if kind == "level":
            message, source = Message("orders", body, keys=["k"], delay_level=3), (SCHEDULE_TOPIC, 2)
        else:
            message, source = (
                Message("orders", body, keys=["k"], deliver_at_ms=due_ms),
                (TIMER_TOPIC, timer_queue(due_ms, clock.now_ms)),
            )
        batch = encode_batch([message], source[1], born_host=("127.0.0.1", 1), born_timestamp_ms=clock.now_ms,
                             message_ids=[f"ID{number}"], waiting=WaitingBatch(source[0], [3]))  # fmt: skip
        places.append(store.append([batch])[0].physical_offset)
    return places


def received(store: MessageStore, topic: str = "orders", queue_id: int = 3) -> list[MessageExt]:
    """Return all messages of a queue, as a consumer gets them. A damaged record is returned as an unreadable
    message."""
    bounds = store.queues.bounds(topic, queue_id)
    messages = []
    for offset in range(bounds.min_offset, bounds.max_offset):
        [result] = store.fetch([FetchRequest(topic, queue_id, offset, 1)], max_bytes=1 << 20, wait_s=0)
        place = RecordPlace(MessageQueue(topic, "broker-a", queue_id), offset)
        messages.append(read_record(result.records, 0, place))
    return messages


def deliver_all(store: MessageStore) -> None:
    """Run rounds of the scheduler until no message is due."""
    scheduler = store.schedule.new_scheduler()
    while scheduler.round() == 0:
        pass


def damaged_deliveries(store: MessageStore) -> list[int]:
    """Return the physical offsets of the damaged records among the delayed messages that were delivered. A replica
    would refuse to copy such a record."""
    queue = store._parts.queues.get("orders", 3)
    units = queue.units(0, queue.next_offset)
    found = []
    for unit in units:
        start = int(unit["physical_offset"])
        size, good = check_record(bytes(store._parts.reader.log_bytes(start, start + int(unit["size"]))))
        found += [] if good and size == unit["size"] else [start]
    return found


@pytest.mark.parametrize("at_rest", [False, True], ids=["while open", "at rest"])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", ["level", "timer"])
def test_a_damaged_delayed_message_holds_up_no_other(
    opened: Callable[..., MessageStore], clock: Clock, tmp_path: Path, caplog, kind: str, field: str, at_rest: bool
):
    root = tmp_path / "store"
    store = opened(deliver=False)
    places = put_delayed(store, clock, kind)
    if at_rest:
        store.close()
    flip(root, places[DAMAGED], field)
    if at_rest:
        store = opened(deliver=False)
    clock.now_ms += DUE_MS
    deliver_all(store)
    messages = received(store)
    returned = RETURNED.get(field)
    kept = [body for number, body in enumerate(BODIES) if number != DAMAGED or returned]
    assert [message.keys for message in messages] == [("k",)] * len(kept)
    for message, body in zip(messages, kept, strict=True):
        if body == BODIES[DAMAGED] and returned == "unreadable":
            assert (message.body_error is not None, message.message_id) == (True, "ID2")
        else:
            assert message.body == body
    assert returned or f"the delayed message at offset {DAMAGED} cannot be delivered" in caplog.text
    assert damaged_deliveries(store) == []
    killed = opened(killed_copy(root, tmp_path / "killed"), deliver=False)
    deliver_all(killed)
    assert len(received(killed)) == len(messages)
    assert all(places[DAMAGED] <= hole.offset < places[DAMAGED + 1] for hole in killed.mender.holes)


def test_a_delayed_message_of_a_changed_level_is_delivered_once_over_a_kill(opened, clock, tmp_path):
    """A delayed message whose delay level is damaged on disk is delivered once, even if the process is killed after the
    delivery. Setup: the message's queue offset equals the next offset in the queue of the wrong level. So recovery
    could take the message for a message of that queue."""
    store = opened(deliver=False)
    places = put_delayed(store, clock, "level")
    batch = encode_batch(
        [Message("orders", b"later", delay_level=4)] * DAMAGED, 3, born_host=("127.0.0.1", 1), born_timestamp_ms=1,
        message_ids=["L0", "L1"], waiting=WaitingBatch(SCHEDULE_TOPIC, [3] * DAMAGED),
    )  # fmt: skip
    store.append([batch])
    clock.now_ms += DUE_MS
    deliver_all(store)
    assert [message.body for message in received(store)] == BODIES
    killed = killed_copy(tmp_path / "store", tmp_path / "killed")
    flip(killed, places[DAMAGED], "queue id")
    store = opened(killed, deliver=False)
    assert [hole.offset for hole in store.mender.holes] == [places[DAMAGED]]
    clock.now_ms += 10 * DUE_MS
    deliver_all(store)
    assert [message.body for message in received(store)] == [*BODIES, b"later", b"later"]


def test_a_wrong_unit_of_a_delayed_message_delivers_no_other_message_twice(opened, clock, tmp_path):
    store = opened(deliver=False)
    put_delayed(store, clock, "level")
    [queue] = store._parts.queues.plain
    [other] = queue.units(1, 1)
    with store._parts.append_lock:
        queue.put_unit_at(DAMAGED, int(other["physical_offset"]), int(other["size"]), clock.now_ms + DUE_MS)
    clock.now_ms += DUE_MS
    deliver_all(store)
    assert [message.body for message in received(store)] == BODIES


@pytest.mark.parametrize("field", ["body size", "magic", "body"])
def test_a_damaged_recall_is_logged_and_the_others_are_obeyed(opened, clock, tmp_path, caplog, field):
    store = opened(deliver=False)
    due_ms = clock.now_ms + 60_000
    handles = [send(store, clock, body, due_ms) for body in BODIES]
    places = [recall(store, clock, handle, f"r{number}").physical_offset for number, handle in enumerate(handles[:4])]
    flip(tmp_path / "store", places[1], field)
    clock.now_ms = due_ms
    deliver_all(store)
    # A recall keeps all of its data in its properties, so damage in its body changes nothing.
    delivered = [BODIES[4]] if field == "body" else [BODIES[1], BODIES[4]]
    assert [message.body for message in received(store)] == delivered
    recalled = [message.body for message in received(store, RECALLED_TOPIC, 0)]
    assert recalled == [body for body in BODIES if body not in delivered]
    named = f"{TIMER_TOPIC}:{TIMER_RECALL_QUEUE}: the recall at offset 1 cannot be read"
    assert (named in caplog.text) == (field != "body")


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "size"])
@pytest.mark.parametrize("kind", ["level", "timer"])
def test_a_damaged_delayed_message_waits_for_its_repair(
    opened: Callable[..., MessageStore], clock: Clock, tmp_path: Path, kind: str, field: str
):
    store = opened(deliver=False)
    places = put_delayed(store, clock, kind)
    store._parts.reader.state_of = store.reported.state_of
    flip(tmp_path / "store", places[DAMAGED], field)
    clock.now_ms += DUE_MS
    scheduler = store.schedule.new_scheduler()
    for _ in range(3):
        scheduler.round()
        clock.now_ms += DELIVERY_RETRY_MS
    assert [message.body for message in received(store)] in (BODIES[:DAMAGED], BODIES)
    assert store.reported.settle(60.0)
    flip(tmp_path / "store", places[DAMAGED], field)
    log = b"".join(path.read_bytes() for path in sorted((tmp_path / "store" / "commitlog").iterdir()))
    for hole in store.mender.holes:
        store.mender.mend(hole.offset, log[hole.offset : hole.end_offset])
    deliver_all(store)
    assert [message.body for message in received(store)] == BODIES


def test_a_delay_queue_does_not_wait_for_ever(
    opened: Callable[..., MessageStore], clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler_module, "MENDING_WAIT_S", 0.0)
    store = opened(deliver=False)
    places = put_delayed(store, clock, "level")
    store._parts.reader.state_of = lambda position: RepairState.PENDING
    flip(tmp_path / "store", places[DAMAGED], "magic")
    clock.now_ms += DUE_MS
    deliver_all(store)
    assert [message.body for message in received(store)] == [*BODIES[:DAMAGED], *BODIES[DAMAGED + 1 :]]
