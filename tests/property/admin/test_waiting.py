"""Tests of the list of delayed messages that are not yet delivered. The expected list is all delayed messages minus the
delivered messages."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from raymq.common.delay import TIMER_RECALL_QUEUE, TIMER_TOPIC
from raymq.common.names import SCHEDULE_TOPIC
from storage.dispatch.delivery_progress import SourceProgress
from storage.schedule.delay_queues import DelayQueueBounds
from storage.schedule.waiting import _HOUR_MS, HOURS, waiting

NOW_MS = 1_700_000_000_000
SOURCES = [(SCHEDULE_TOPIC, 2), (TIMER_TOPIC, 5), (TIMER_TOPIC, TIMER_RECALL_QUEUE)]


class Queues:
    """Fake delay queues in memory. As in a real store, one read does not continue past the end of a queue file. Here a
    queue file has 7 entries."""

    def __init__(self, times: list[list[int]], done: list[int]) -> None:
        self.times = {SOURCES[0]: sorted(times[0]), SOURCES[1]: times[1], SOURCES[2]: times[2]}
        self.order = {
            source: sorted(range(len(units)), key=lambda at, units=units: (units[at], at))
            for source, units in self.times.items()
        }
        self.done = {source: min(count, len(self.times[source])) for source, count in zip(SOURCES, done, strict=True)}

    def read_bounds(self):
        return NOW_MS, {source: DelayQueueBounds(0, len(units)) for source, units in self.times.items()}

    def delivery_times(self, source, from_offset, count):
        end = min(from_offset + count, (from_offset // 7 + 1) * 7)
        return np.array([NOW_MS + one for one in self.times[source][from_offset:end]], np.int64)

    def left(self, source):
        return self.order[source][self.done[source] :]

    def progress(self, source):
        if source == SOURCES[0]:
            return SourceProgress(0, self.done[source], 0)
        if not self.done[source]:
            return SourceProgress()
        last = self.order[source][self.done[source] - 1]
        return SourceProgress(NOW_MS + self.times[source][last], last + 1, min(self.left(source), default=0))

    def read_records(self, source, queue_offsets):
        return [memoryview(f"{source[1]}:{at};".encode()) for at in queue_offsets]


times = st.lists(st.integers(-2 * _HOUR_MS, 30 * _HOUR_MS), max_size=30)


@given(
    st.builds(Queues, st.tuples(times, times, times), st.tuples(*[st.integers(0, 30)] * 3)),
    st.integers(-3, 30),
    st.integers(0, 30),
    st.integers(1, 40),
)
def test_waiting_messages_are_counted_and_the_first_are_listed(queues, begin_h, hours, limit):
    begin_ms, end_ms = begin_h * _HOUR_MS, (begin_h + hours) * _HOUR_MS
    answer = waiting(queues, NOW_MS + begin_ms, NOW_MS + end_ms, limit)
    left = [(queues.times[source][at], source, at) for source in SOURCES[:2] for at in queues.left(source)]
    counts = {name: len(queues.left(source)) for name, source in (("level 3", SOURCES[0]), ("deliver_at", SOURCES[1]))}
    assert answer.levels == {name: count for name, count in counts.items() if count}
    by_hour = [max(time // _HOUR_MS, 0) for time, _, _ in left]
    assert list(answer.hours) == [by_hour.count(hour) for hour in range(HOURS)]
    assert answer.late_ms == max([-time for time, _, _ in left if time < 0], default=0)
    wanted = sorted(one for one in left if begin_ms <= one[0] < end_ms)
    assert list(answer.due_ms) == [NOW_MS + time for time, _, _ in wanted[:limit]]
    assert answer.records.decode() == "".join(f"{source[1]}:{at};" for _, source, at in wanted[:limit])
    assert list(answer.positions) == [(*source, at) for _, source, at in wanted[:limit]]
    assert answer.complete is (len(wanted) <= limit)
