"""Tests of the planner of a streaming query's batches. Between two batches the queues change at random: messages arrive
or expire, queues are added, or their offsets cannot be read for a while."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, strategies as st

from raydp_jobs.stream.planner import BatchLimits, batch_partitions, batch_ranges, plan_batch
from raydp_jobs.stream.progress import StreamOffsets
from raymq.client.scan.offsets import EARLIEST, LATEST
from raymq.common.errors import DataLossError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds

QUEUES = [MessageQueue(topic, broker, index) for topic in ("a", "b") for broker in ("x", "y") for index in range(2)]

limits_of = st.builds(
    BatchLimits,
    max_offsets=st.none() | st.integers(1, 50),
    min_partitions=st.none() | st.integers(1, 9),
    parallelism=st.integers(1, 4),
    tags=st.sampled_from(["*", "paid", "paid || späť"]),
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "expire", "join", "hide", "batch", "batch"]),
        st.integers(0, len(QUEUES) - 1),
        st.integers(0, 60),
    ),
    max_size=40,
)


class Topics:
    """Fake topics. `held`: lowest and highest offset of each existing queue. `hidden`: queues whose offsets the query
    cannot read at the moment."""

    def __init__(self, first: int) -> None:
        self.held: dict[MessageQueue, tuple[int, int]] = dict.fromkeys(QUEUES[:first], (0, 0))
        self.hidden: set[MessageQueue] = set()

    def change(self, step: str, queue: MessageQueue, count: int) -> None:
        low, high = self.held.get(queue, (0, 0))
        if step == "join":
            self.held.setdefault(queue, (0, 0))
        elif queue not in self.held:
            return
        elif step == "append":
            self.held[queue] = low, high + count
        elif step == "expire":
            self.held[queue] = min(high, low + count), high
        elif step == "hide":
            self.hidden ^= {queue}

    def bounds(self, *, hide: bool = True) -> dict[MessageQueue, QueueBounds]:
        hidden = self.hidden if hide else set()
        return {queue: QueueBounds(*held, 0) for queue, held in self.held.items() if queue not in hidden}


def read(previous: StreamOffsets | None, end: StreamOffsets, seen: dict[MessageQueue, list[int]]) -> int:
    """Read a batch as Spark's driver reads it: from offsets that were encoded as JSON. Returns the number of offsets in
    the batch."""
    again = StreamOffsets.from_json(end.to_json())
    assert again == end
    before = StreamOffsets.from_json(previous.to_json()) if previous is not None else None
    ranges, parts = batch_ranges(before, again), batch_partitions(before, again)
    assert parts == batch_partitions(previous, end)
    pieces = sorted((one for part in parts for one in part.ranges), key=lambda one: (one.queue, one.start_offset))
    offsets = [(piece.queue, offset) for piece in pieces for offset in range(piece.start_offset, piece.end_offset)]
    assert offsets == [(one.queue, offset) for one in ranges for offset in range(one.start_offset, one.end_offset)]
    assert len(parts) >= min(end.partitions, len(offsets))
    assert all(len({one.broker_name for one in part.ranges}) == 1 for part in parts)
    for queue, offset in offsets:
        seen[queue].append(offset)
    return len(offsets)


@given(first=st.integers(0, len(QUEUES)), limits=limits_of, steps=steps)
def test_every_offset_is_read_once_and_in_order_or_reported_lost(
    first: int, limits: BatchLimits, steps: list[tuple[str, int, int]]
) -> None:
    """Every offset is read once and in order, or is reported as lost. Queues grow, lose old messages, are created, or
    temporarily do not answer. If nothing changed, no batch is planned."""
    topics, previous = Topics(first), None
    seen: dict[MessageQueue, list[int]] = defaultdict(list)
    lost: dict[MessageQueue, list[int]] = defaultdict(list)
    forgiving = BatchLimits(
        limits.max_offsets, None, limits.min_partitions, limits.parallelism, limits.tags, fail_on_data_loss=False
    )

    def batch(*, hide: bool = True) -> bool:
        nonlocal previous
        plan = plan_batch(previous, topics.bounds(hide=hide), forgiving)
        for loss in plan.lost:
            lost[loss.queue] += range(loss.start_offset, loss.end_offset)
        if plan.offsets is None:
            assert not plan.lost
            return False
        count = read(previous, plan.offsets, seen)
        assert count <= (limits.max_offsets or count)
        assert count or plan.lost or previous is None
        assert (plan.offsets.tags, plan.offsets.partitions >= (limits.min_partitions or 1)) == (limits.tags, True)
        previous = plan.offsets
        return True

    for step, index, count in steps:
        if step == "batch":
            batch()
        else:
            topics.change(step, QUEUES[index], count)
    while batch(hide=False):
        pass
    for queue, (low, high) in topics.held.items():
        assert seen[queue] == sorted(seen[queue])
        begin = min([*seen[queue], *lost[queue], high])
        assert sorted(seen[queue] + lost[queue]) == list(range(begin, high))
        # When a query finds a new queue, it starts at the first message that the queue has at that time.
        assert begin <= low or begin == high


@given(
    held=st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted),
    position=st.integers(0, 40),
    appended=st.integers(0, 9),
)
def test_a_loss_is_an_error_unless_it_is_allowed(held: list[int], position: int, appended: int) -> None:
    queue, (low, high) = QUEUES[0], held
    previous, bounds = StreamOffsets({queue: position}), {queue: QueueBounds(low, high, 0)}
    plan = plan_batch(previous, bounds, BatchLimits(fail_on_data_loss=False))
    if low <= position <= high:
        assert plan == plan_batch(previous, bounds, BatchLimits())
        assert (plan.offsets is None, plan.lost) == (position == high, ())
        return
    with pytest.raises(DataLossError, match="fail_on_data_loss=False"):
        plan_batch(previous, bounds, BatchLimits())
    [loss] = plan.lost
    assert plan.offsets is not None
    # The query's position lies outside of the queue's offset range. If old messages were deleted or the queue was
    # created again, the query continues at the first existing message, as RocketMQ's consumers do. Otherwise it
    # continues at the queue's end.
    begin = low if position < low or low == 0 else high
    assert (loss.start_offset, loss.end_offset) == ((position, low) if position < low else (high, position))
    assert plan.offsets.starts == {queue: begin}
    assert plan.offsets.offsets == {queue: high}
    later = plan_batch(plan.offsets, {queue: QueueBounds(low, high + appended, 0)}, BatchLimits())
    assert (later.offsets is None, later.lost) == (appended == 0, ())


@given(starts=st.dictionaries(st.sampled_from(QUEUES), st.sampled_from([EARLIEST, LATEST, 5])), later=st.integers(1, 9))
def test_the_first_batch_fixes_the_start_offset_of_every_queue(starts: dict[MessageQueue, int], later: int) -> None:
    bounds = {queue: QueueBounds(3, 8, 0) for queue in QUEUES[:4]}
    first = plan_batch(None, bounds, BatchLimits(max_offsets=1), starts=starts).offsets
    assert first is not None
    expected = {queue: {EARLIEST: 3, LATEST: 8, 5: 5}[starts.get(queue, EARLIEST)] for queue in bounds}
    assert first.starts == expected
    grown = {queue: QueueBounds(3, 8 + later, 0) for queue in QUEUES}
    second = plan_batch(first, grown, BatchLimits()).offsets
    assert second is not None
    assert second.starts == dict.fromkeys(QUEUES[4:], 3)
    seen: dict[MessageQueue, list[int]] = defaultdict(list)
    read(None, first, seen)
    read(first, second, seen)
    assert seen == {queue: list(range(expected.get(queue, 3), 8 + later)) for queue in QUEUES}


@given(until=st.dictionaries(st.sampled_from(QUEUES), st.integers(0, 20)), max_offsets=st.none() | st.integers(1, 30))
def test_a_fixed_end_is_reached_and_never_passed(until: dict[MessageQueue, int], max_offsets: int | None) -> None:
    bounds = {queue: QueueBounds(0, 20, 0) for queue in QUEUES}
    previous = StreamOffsets(dict.fromkeys(QUEUES[:3], 4))
    seen: dict[MessageQueue, list[int]] = defaultdict(list)
    position = previous
    while (end := plan_batch(position, bounds, BatchLimits(max_offsets=max_offsets), until=until).offsets) is not None:
        read(position, end, seen)
        position = end
    expected = {queue: list(range(previous.offsets.get(queue, 0), until.get(queue, 0))) for queue in QUEUES}
    assert {queue: offsets for queue, offsets in seen.items() if offsets} == {
        queue: offsets for queue, offsets in expected.items() if offsets
    }


@given(available=st.integers(0, 20), min_offsets=st.integers(1, 20), patient=st.booleans())
def test_a_batch_below_the_minimum_size_waits_until_the_querys_limit(
    available: int, min_offsets: int, patient: bool
) -> None:
    bounds = {QUEUES[0]: QueueBounds(0, available, 0)}
    plan = plan_batch(StreamOffsets({QUEUES[0]: 0}), bounds, BatchLimits(min_offsets=min_offsets), patient=patient)
    assert (plan.offsets is not None) == (available > 0 and (available >= min_offsets or not patient))
