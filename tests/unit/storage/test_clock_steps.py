"""Tests of the detection of a clock's steps, and of delay levels whose clock is set."""

from __future__ import annotations

import random

import numpy as np
import pytest

from storage.dispatch.delivery_progress import SourceProgress
from storage.schedule.clock_steps import STEP_AT_START_MS, ClockSteps
from storage.schedule.delay_queues import STEPS_MAX, DelayQueueBounds, LevelQueue

DAY_MS = 86_400_000
START_MS = 1_700_000_000_000
DELAY_MS = 10_000
STEPS_MS = (-DAY_MS, -600_000, 600_000, DAY_MS)


class Clocks:
    def __init__(self, expected_ms: int | None = None) -> None:
        self.now_ms, self.steady_ms = START_MS, 7
        self.steps = ClockSteps(lambda: self.steady_ms, expected_ms)

    def passes(self, ms: int) -> None:
        self.now_ms += ms
        self.steady_ms += ms

    def look(self, pause_ms: int = 0) -> int:
        """Read the clock, and be suspended for `pause_ms` after the reading."""
        self.steps.begin()
        now_ms = self.now_ms
        self.passes(pause_ms)
        return self.steps.step_ms(now_ms)


@pytest.mark.parametrize("by_ms", STEPS_MS)
def test_a_step_between_two_rounds_is_noticed(by_ms: int) -> None:
    clocks = Clocks()
    assert clocks.look() == 0
    clocks.passes(500)
    assert clocks.look() == 0
    clocks.now_ms += by_ms
    clocks.passes(500)
    assert clocks.look() == by_ms
    clocks.passes(500)
    assert clocks.look() == 0


def test_a_suspended_process_sees_no_step() -> None:
    clocks = Clocks()
    for pause_ms in (0, 50_000, 0, 3000, 100_000, 0):
        clocks.passes(70_000)
        assert clocks.look(pause_ms) == 0


def test_a_step_is_never_returned_smaller_than_it_was() -> None:
    clocks = Clocks()
    clocks.look(5000)
    clocks.now_ms += DAY_MS
    clocks.passes(100)
    assert DAY_MS <= clocks.look(7000) <= DAY_MS + 12_000


@pytest.mark.parametrize(("ahead_ms", "found"), [(0, False), (STEP_AT_START_MS, False), (DAY_MS, True), (-5000, True)])
def test_the_first_reading_is_compared_with_the_expected_time(ahead_ms: int, found: bool) -> None:
    clocks = Clocks(START_MS - ahead_ms)
    assert clocks.look() == (ahead_ms if found else 0)
    assert clocks.look() == 0


class Level:
    """A delay level of 10 s, whose messages are stored by a clock that is set."""

    def __init__(self) -> None:
        self.now_ms, self.true_ms, self.latest_ms = START_MS, 0, 0
        self.codes: list[int] = []
        self.stored_at: list[int] = []
        self.delivered_at: list[int] = []
        self.queue = LevelQueue(self._read, DELAY_MS, SourceProgress(0, 0, 0))

    def _read(self, first: int, count: int) -> np.ndarray:
        return np.array(self.codes[first : first + min(count, 3)], np.int64)

    def store(self) -> None:
        self.latest_ms = max(self.latest_ms, self.now_ms)
        self.codes.append(self.latest_ms + DELAY_MS)
        self.stored_at.append(self.true_ms)

    def passes(self, ms: int) -> None:
        self.now_ms += ms
        self.true_ms += ms
        while dues := self.queue.due(DelayQueueBounds(0, len(self.codes)), self.now_ms, 5):
            assert [due.queue_offset for due in dues] == list(
                range(len(self.delivered_at), len(self.delivered_at) + len(dues))
            )
            self.delivered_at += [self.true_ms] * len(dues)
            self.queue.done(dues)

    def is_set(self, by_ms: int) -> None:
        self.now_ms += by_ms
        self.queue.step(len(self.codes), by_ms, self.now_ms)


@pytest.mark.parametrize("number", range(30))
def test_no_message_of_a_level_is_early_and_none_is_later_than_two_more_delays(number: int) -> None:
    seed = number if number < 29 else random.randrange(1 << 32)
    print(f"seed {seed}")
    dice, level = random.Random(seed), Level()
    for _ in range(400):
        for _ in range(dice.randrange(3)):
            level.store()
        if dice.random() < 0.02:
            level.is_set(dice.choice(STEPS_MS))
        level.passes(dice.choice((1, 100, 1000)))
    for _ in range(4):
        level.passes(DELAY_MS)
    assert len(level.delivered_at) == len(level.codes)
    waited = [at - stored for stored, at in zip(level.stored_at, level.delivered_at, strict=True)]
    assert min(waited) >= DELAY_MS
    assert max(waited) <= 3 * DELAY_MS + 1000
    assert len(level.queue._steps) <= STEPS_MAX


def test_without_a_step_the_time_in_the_entry_decides() -> None:
    level = Level()
    level.store()
    level.passes(DELAY_MS - 1)
    assert level.delivered_at == []
    assert level.queue.wake_ms() == level.codes[0]
    level.passes(1)
    assert level.delivered_at == [DELAY_MS]
