"""Tests of delayed messages on a simulated clock: any levels and times, restarts, crashes, a clock that jumps.

The decisions (storage.schedule.delay_queues, storage.dispatch.delivery_progress) run on a model of the log: a list of
puts and deliveries, in order. A crash keeps the first part of the list, and the delivery progress that was saved
before. The laws: every message in the log is delivered once and never before its time. Each delay level is delivered in
order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from raymq.common.delay import (
    DELAY_LEVELS_MS,
    TIMER_ROLL_MS,
    TIMER_ROLL_QUEUE,
    TIMER_TOPIC,
    level_delay_ms,
    timer_queue,
    waiting_code,
)
from raymq.common.names import SCHEDULE_TOPIC
from storage.dispatch.delivery_progress import DeliveryProgress, Source, SourceProgress, waiting_codes
from storage.schedule import delay_queues as schedule
from storage.schedule.delay_queues import DelayQueueBounds, Due, LevelQueue, TimerQueue
from tests.support.cases import examples

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
TARGET: Source = ("orders", 0)


@dataclass(frozen=True)
class Entry:
    """A record of the model's log: message `number` in `queue`. `source`: the delay queue from which the scheduler
    moved the message, if any."""

    number: int
    queue: Source
    store_ms: int
    clock_ms: int
    source: Source | None = None
    epoch: int = 0
    source_offset: int = 0


class Files:
    """Stand-in for storage.files.config_files that keeps the contents of the files in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def read(self, name: str) -> str | None:
        return self.texts.get(name)

    def write(self, name: str, text: str) -> None:
        self.texts[name] = text


class Queue:
    """Stand-in for a queue, with only the attributes that `DeliveryProgress.clamp_to_queues` reads."""

    def __init__(self, source: Source, next_offset: int) -> None:
        self.topic, self.queue_id = source
        self.next_offset = next_offset


class Model:
    """Model of a store with delayed messages (log, consume-queue entries, delivery progress), and of the scheduler's
    rounds over the store."""

    def __init__(self, held_max: int, window_ms: int, chunk: int) -> None:
        self.held_max, self.window_ms, self.chunk = held_max, window_ms, chunk
        self.clock_ms = self.store_ms = START_MS
        self.log: list[Entry] = []
        self.due_ms: dict[int, int | None] = {}
        self.level: dict[int, int] = {}
        self.files = Files()
        self.saved_log = 0
        self.start([])

    def start(self, log: list[Entry]) -> None:
        """Open the model store with `log`. Rebuilds the consume-queue entries from the log, and the delivery progress
        from its saved files and the log."""
        self.log = []
        self.units: dict[Source, list[int]] = {}
        self.numbers: dict[Source, list[int]] = {}
        self.queues: dict[Source, LevelQueue | TimerQueue] = {}
        self.deliveries = DeliveryProgress()
        self.deliveries.load(self.files)
        self.store_ms = max([START_MS, *(entry.store_ms for entry in log)])
        for index, entry in enumerate(log):
            properties = {"DELAY": str(self.level.get(entry.number, 0))}
            if self.due_ms[entry.number] is not None:
                properties["TIMER_DELIVER_MS"] = str(self.due_ms[entry.number])
            code = waiting_code(*entry.queue, properties, entry.store_ms) or 0
            self._write(entry, code, evidence=index >= self.saved_log)
        self.deliveries.clamp_to_queues([Queue(source, len(codes)) for source, codes in self.units.items()])

    def _write(self, entry: Entry, code: int, *, evidence: bool = True) -> None:
        self.log.append(entry)
        self.units.setdefault(entry.queue, []).append(code)
        self.numbers.setdefault(entry.queue, []).append(entry.number)
        if entry.source is not None and evidence:
            self.deliveries.advance(entry.source, entry.epoch, entry.source_offset + 1)

    def _append(self, number: int, queue: Source, source: Source | None = None, due: Due | None = None) -> None:
        self.store_ms = max(self.store_ms, self.clock_ms)
        code = 0
        if queue != TARGET:
            deliver_at_ms = np.array([self.due_ms[number] or 0], np.int64)
            [code] = waiting_codes(queue, deliver_at_ms, self.store_ms, DELAY_LEVELS_MS).tolist()
        epoch, offset = (0, 0) if due is None else (due.epoch, due.queue_offset)
        self._write(Entry(number, queue, self.store_ms, self.clock_ms, source, epoch, offset), code)

    def put_level(self, level: int) -> None:
        number = len(self.due_ms)
        self.due_ms[number], self.level[number] = None, level
        self._append(number, (SCHEDULE_TOPIC, level - 1))

    def put_time(self, ahead_ms: int) -> None:
        number = len(self.due_ms)
        self.due_ms[number] = self.clock_ms + ahead_ms
        self._append(number, (TIMER_TOPIC, timer_queue(self.clock_ms + ahead_ms, self.clock_ms)))

    def _queue(self, source: Source) -> LevelQueue | TimerQueue:
        if source not in self.queues:
            topic, queue_id = source
            progress = self.deliveries.get(source)

            def codes(first: int, count: int) -> np.ndarray:
                # As in a real store, a read stops at the end of a queue file, so it may return fewer than `count`
                # entries. In this test, a queue file has seven entries.
                return np.array(self.units[source][first : min(first + count, first - first % 7 + 7)], np.int64)

            if topic == SCHEDULE_TOPIC:
                self.queues[source] = LevelQueue(codes, level_delay_ms(queue_id + 1, DELAY_LEVELS_MS), progress)
            elif queue_id == TIMER_ROLL_QUEUE:
                self.queues[source] = LevelQueue(codes, TIMER_ROLL_MS, progress)
            else:
                self.queues[source] = TimerQueue(codes, progress, window_ms=self.window_ms, held_max=self.held_max)
        return self.queues[source]

    def round(self, stop_after: int | None = None) -> bool:
        """Run a round of the scheduler (storage.schedule.scheduler). Returns True if the round delivered a message.

        `stop_after`: the number of stored messages after which the round is killed.
        """
        self.store_ms = max(self.store_ms, self.clock_ms)
        busy = False
        for source in [source for source in list(self.units) if source != TARGET]:
            queue = self._queue(source)
            dues = queue.due(DelayQueueBounds(0, len(self.units[source])), self.clock_ms, self.chunk)
            for due in dues:
                if stop_after == 0:
                    return busy
                stop_after = None if stop_after is None else stop_after - 1
                number = self.numbers[source][due.queue_offset]
                deliver_at_ms = self.due_ms[number]
                place = TARGET
                if source == (TIMER_TOPIC, TIMER_ROLL_QUEUE) and (deliver_at_ms or 0) > self.clock_ms:
                    place = (TIMER_TOPIC, timer_queue(deliver_at_ms or 0, self.clock_ms))
                self._append(number, place, source, due)
            if dues:
                busy = True
                queue.done(dues)
            if isinstance(queue, TimerQueue):
                self.deliveries.raise_low(source, queue.low())
        return busy

    def save(self) -> None:
        table = self.deliveries.unsaved()
        if table is not None:
            self.deliveries.save(table, self.files, len(self.log))
        self.saved_log = len(self.log)

    def crash(self, lose: int) -> None:
        """Restart the model store without the last `lose` records of the log. Records from before the last save of the
        delivery progress are on disk and stay."""
        self.start(self.log[: max(len(self.log) - lose, self.saved_log)])

    def finish(self) -> None:
        """Advance the clock and run delivery rounds until no delayed message can be left."""
        self.clock_ms = max(self.clock_ms, self.store_ms)
        for _ in range(45):
            while self.round():
                pass
            self.clock_ms += DAY_MS
        while self.round():
            pass

    def check(self) -> None:
        put = {entry.number for entry in self.log if entry.source is None}
        arrived = [entry for entry in self.log if entry.queue == TARGET]
        numbers = [entry.number for entry in arrived]
        assert sorted(numbers) == sorted(put)
        for entry in arrived:
            due_ms = self.due_ms[entry.number]
            assert due_ms is None or entry.clock_ms >= due_ms
        for level in set(self.level.values()):
            order = [number for number in numbers if self.level.get(number) == level]
            assert order == sorted(order)


ahead = st.one_of(
    st.integers(-5000, 5000),  # a producer's clock may be slow or fast
    st.integers(1, 3 * HOUR_MS),
    st.integers(1, 40 * DAY_MS),
    st.sampled_from([1000, 1000, 60_000, DAY_MS, DAY_MS + HOUR_MS, DAY_MS + HOUR_MS + 1]),
)
steps = st.one_of(
    st.tuples(st.just("level"), st.integers(1, 18)),
    st.tuples(st.just("time"), ahead),
    st.tuples(st.just("times"), st.integers(1, 60)),
    st.tuples(st.just("pass"), st.sampled_from([1, 99, 1000, 5000, 60_000, HOUR_MS, DAY_MS])),
    st.tuples(st.just("jump"), st.sampled_from([-1, -1000, -HOUR_MS, -DAY_MS, 30 * DAY_MS])),
    st.tuples(st.just("round"), st.one_of(st.none(), st.integers(0, 20))),
    st.tuples(st.just("save"), st.none()),
    st.tuples(st.just("crash"), st.integers(0, 30)),
)


LATE_THEN_CRASH = [("time", 1000), ("pass", 1000), ("round", None), ("time", -500), ("crash", 0)]
SET_BACK_THEN_CRASH = [("time", 1000), ("pass", 1000), ("round", None), ("jump", -1000), ("time", 1), ("crash", 0)]


@settings(max_examples=examples(400), deadline=None)
@example(work=LATE_THEN_CRASH, held_max=10, window_ms=1000, chunk=3)
@example(work=SET_BACK_THEN_CRASH, held_max=10, window_ms=1000, chunk=3)
@given(
    work=st.lists(steps, max_size=60),
    held_max=st.sampled_from([1, 2, 10, 1000]),
    window_ms=st.sampled_from([0, 1000, 600_000]),
    chunk=st.sampled_from([1, 3, 256]),
)
def test_each_message_is_delivered_once_and_not_before_its_time(work, held_max, window_ms, chunk):
    model = Model(held_max, window_ms, chunk)
    for name, value in work:
        match name:
            case "level":
                model.put_level(value)
            case "time":
                model.put_time(value)
            case "times":
                for index in range(value):
                    model.put_time(1 + index * 7919 % 4000)
            case "pass" | "jump":
                model.clock_ms += value
            case "round":
                model.round(value)
                if value is not None:
                    model.crash(0)
            case "save":
                model.save()
            case "crash":
                model.crash(value)
    model.finish()
    model.check()


@pytest.mark.parametrize("seed", range(5))
def test_a_timer_queue_sorts_by_time_and_keeps_within_its_memory_limit(monkeypatch, seed):
    """A timer queue returns its due entries sorted by time, also if entries are added while the queue runs. It never
    holds more entries in memory than its limit."""
    monkeypatch.setattr(schedule, "SCAN_UNITS", 50)
    monkeypatch.setattr(schedule, "_FRESH_MAX", 20)
    dice = random.Random(seed)
    units: list[int] = []
    queue = TimerQueue(lambda first, count: np.array(units[first : first + count], np.int64), SourceProgress(),
                       window_ms=300, held_max=64)  # fmt: skip
    now_ms, given_out, expected = 1000, [], []
    while now_ms < 6000 or len(given_out) < len(units):
        if now_ms < 6000:
            units += [now_ms + 1 + dice.randrange(2000) for _ in range(dice.randrange(200))]
        now_ms += dice.randrange(1, 200)
        while dues := queue.due(DelayQueueBounds(0, len(units)), now_ms, dice.choice([1, 7, 100])):
            queue.done(dues)
            given_out += [(due.due_ms, due.queue_offset) for due in dues]
            assert len(queue._held_codes) <= 64
        expected = sorted((code, offset) for offset, code in enumerate(units) if code <= now_ms)
        assert given_out == expected
        waiting = [offset for offset, code in enumerate(units) if code > now_ms]
        assert queue.low() == min(waiting, default=len(units))
        assert queue.pending(DelayQueueBounds(0, len(units))) == len(waiting)
        assert queue.wake_ms() == min([units[offset] for offset in waiting], default=None)
