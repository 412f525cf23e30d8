"""Tests of queues of inner batches with one damaged record. Consumers read all other messages, and the damage is
reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.common.message import MessageQueue
from raymq.common.protocol.store import Boundary, FetchRequest, QueuePosition
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.messages import read_messages
from storage.message_store import MessageStore
from tests.component.queues.test_inner_batches import TOPIC, inner
from tests.support.stores.damage import flip
from tests.support.stores.stores import killed_copy, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

FIELDS = ("size", "magic", "body size", "body", "topic size")
FIRST_MS = 1_700_000_000_000


def found(store: MessageStore, max_messages: int) -> dict[int, bytes | None]:
    """Return the messages that a consumer reads, by queue offset. The value of an unreadable message is None."""
    bodies: dict[int, bytes | None] = {}
    offset, end = 0, store.queues.bounds(TOPIC, 0).max_offset
    while offset < end:
        [result] = store.fetch([FetchRequest(TOPIC, 0, offset, max_messages)], max_bytes=1 << 20, wait_s=0)
        assert offset < result.next_offset <= end
        records = LocatedRecords.of_fetch(result.records, result.count, offset, result.next_offset)
        queue = MessageQueue(TOPIC, "broker-a", 0)
        messages = read_messages(
            records.data, records.starts, broker_name="broker-a", places=RecordPlaces.of(queue, records)
        )
        for at, message in zip(records.offsets.tolist(), messages, strict=True):
            bodies[at] = None if message.body_error else message.body
        offset = result.next_offset
    return bodies


@pytest.mark.parametrize("how", ["open", "stopped", "killed"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_damaged_inner_batch_holds_up_no_other(tmp_path: Path, field: str, how: str) -> None:
    times = iter(range(FIRST_MS, FIRST_MS + 10_000_000, 1000))
    root = tmp_path / "store"
    store = open_store(root, clock_ms=lambda: next(times))
    places = [
        store.append([inner(*[b"body %d" % (3 * n + m) for m in range(3)], sequence=3 * n)])[0].physical_offset
        for n in range(5)
    ]
    stored_ms = store.queues.stored_times([QueuePosition(TOPIC, 0, 3 * n) for n in range(5)])
    if how == "killed":
        root = killed_copy(root, tmp_path / "killed")
    if how != "open":
        store.close()
        (root / "dedup").unlink(missing_ok=True)
    flip(root, places[2], field)
    if how != "open":
        store = open_store(root, clock_ms=lambda: next(times))
    for max_messages in (1, 2, 100):
        bodies = found(store, max_messages)
        damaged = {at for at, body in bodies.items() if body is None}
        assert damaged <= {6, 7, 8}
        assert {at: body for at, body in bodies.items() if at not in (6, 7, 8)} == {
            at: b"body %d" % at for at in range(15) if at not in (6, 7, 8)
        }
        # After a kill, the offsets of a batch with a damaged header are unknown. Only the hole (damaged range of the
        # log) is reported.
        assert damaged or field == "size" or (how == "killed" and store.mender.holes[0].offset == places[2])
    assert store.queues.stored_times([QueuePosition(TOPIC, 0, 3 * n) for n in (0, 1, 3, 4)]) == [
        ms for n, ms in enumerate(stored_ms) if n != 2
    ]
    for number in (0, 1, 3, 4):
        assert store.queues.offset_by_time(TOPIC, 0, stored_ms[number], Boundary.UPPER) == 3 * number
        assert store.queues.offset_by_time(TOPIC, 0, stored_ms[number]) == 3 * number
    store.close()


@pytest.mark.parametrize("field", ["size", "magic", "body"])
def test_a_slave_that_gets_a_damaged_inner_batch_reports_it_at_the_same_offsets(tmp_path: Path, field: str) -> None:
    root = tmp_path / "store"
    store = open_store(root)
    batches = [inner(*[b"body %d" % (3 * n + m) for m in range(3)], sequence=3 * n) for n in range(5)]
    places = [store.append([batch])[0].physical_offset for batch in batches]
    store.close()
    (root / "dedup").unlink()
    flip(root, places[2], field)
    store = open_store(root)
    [hole] = store.mender.holes
    slave = open_store(tmp_path / "slave")
    slave.chunks.append_chunk(0, store.chunks.read_chunk(0, 1 << 20))
    slave.chunks.append_hole(hole.offset, *store.chunks.read_hole(hole.offset, store.log.end_offset))
    slave.chunks.append_chunk(hole.end_offset, store.chunks.read_chunk(hole.end_offset, 1 << 20))
    slave.show(slave.log.end_offset)
    assert slave.mender.holes == store.mender.holes
    assert found(slave, 100) == found(store, 100)
    assert None in found(slave, 100).values()
