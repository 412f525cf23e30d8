"""Decides which messages of a delay queue are due, and in which order. It reads no clock: the time is an argument.

There are two kinds of delay queues. In one kind, the messages become due in the order in which they were stored; in the
other kind, in any order. Queues of both kinds return due messages in one fixed order. They start from the progress that
the previous process stored (storage.dispatch.delivery_progress.SourceProgress). Messages that `due` returned stay due
until `done` is called with them.

    LevelQueue    Each message waits equally long: the first stored is due first. The object holds the next
                  offset, and the steps of the clock during the waiting time.
    TimerQueue    Each message has a time of its own. Times and offsets of messages due in the next minutes are held,
                  sorted; later ones are read again from the units when the first of them is due. The order is by
                  (time, offset).

The order of a TimerQueue must be complete. So a queue entry (unit) that is appended after `due` was called with a time
must have a later time. The store ensures this (raymq.common.delay) if the caller passes to `due` a time that the store
has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.dispatch.delivery_progress import SourceProgress

Ints = NDArray[np.int64]
Codes = Callable[[int, int], Ints]
"""Function (queue offset, count) that returns the delivery times in at most `count` queue entries (units), from the
offset on. At the end of a queue file it returns fewer delivery times."""

WINDOW_MS: Final = 600_000
HELD_MAX: Final = 1_000_000
SCAN_UNITS: Final = 65_536
STEPS_MAX: Final = 8
"""Maximum number of steps of the clock that a level queue distinguishes. It merges earlier steps."""
_FRESH_MAX: Final = 4096
_NO_INTS: Final = np.empty(0, np.int64)


class Due(NamedTuple):
    """A delayed message whose delivery time has come, with its place in a delay queue."""

    queue_offset: int
    # The first sort key of a delay queue's messages: the delivery time in a timer queue, 0 in a level queue. The second
    # sort key is the offset.
    epoch: int
    # The time in ms since 1970 at which the message is due.
    due_ms: int


class DelayQueueBounds(NamedTuple):
    """Range of the queue offsets in a delay queue: from `min_offset` up to `end` (exclusive)."""

    min_offset: int
    end: int


class ClockStep(NamedTuple):
    """A step of the clock. Messages before the queue offset `end` were stored before the step. Such a message is due
    once the clock, set back by `shift_ms`, shows its delivery time. All of the messages are due at `free_ms`."""

    end: int
    shift_ms: int
    free_ms: int


class LevelQueue:
    """A delay queue in which each message waits equally long: `delay_ms` milliseconds.

    A message waits for a duration, so a step of the clock must not change the duration (`step`). With `may_be_early`
    a message whose time is further ahead than `delay_ms` is due at once; otherwise the message waits for `delay_ms`
    from now on.
    """

    def __init__(self, codes: Codes, delay_ms: int, progress: SourceProgress, *, may_be_early: bool = False) -> None:
        self._codes = codes
        self._delay_ms, self._may_be_early = delay_ms, may_be_early
        self._position = progress.next_offset
        self._wake_ms: int | None = None
        # The steps of the clock that concern waiting messages, by ascending end.
        self._steps: list[ClockStep] = []

    def step(self, end: int, by_ms: int, now_ms: int) -> None:
        """Note that the clock was set forward by `by_ms` (back, if negative) while the queue ended at `end`.

        `now_ms` is the time after the step. If the size of the step is not known exactly, `by_ms` must not be too low.
        Messages that were stored between the step and this call are delivered late, by `by_ms` or their delay at most.
        """
        self._steps = [ClockStep(one.end, one.shift_ms + by_ms, one.free_ms + by_ms) for one in self._steps]
        if not self._steps or self._steps[-1].end < end:
            self._steps.append(ClockStep(end, by_ms, now_ms + self._delay_ms))
        if len(self._steps) > STEPS_MAX:
            first, second = self._steps[:2]
            merged = ClockStep(second.end, max(first.shift_ms, second.shift_ms), max(first.free_ms, second.free_ms))
            self._steps[:2] = [merged]

    def due(self, bounds: DelayQueueBounds, now_ms: int, limit: int) -> list[Due]:
        """Return the first messages of the delay queue that are due at `now_ms`, at most `limit`.

        If the delivery time in a queue entry (unit) is further ahead than the delay, the clock was set back while no
        process ran, or the delay level was changed (spec/storage.md §12). RocketMQ then delivers the message at once.
        Here the message waits for `delay_ms` from now on, unless `may_be_early` is set.
        """
        self._position = min(max(self._position, bounds.min_offset), bounds.end)
        self._wake_ms = None
        dues: list[Due] = []
        while len(dues) < limit and self._position + len(dues) < bounds.end:
            first = self._position + len(dues)
            self._steps = [one for one in self._steps if one.end > self._position]
            step = next((one for one in self._steps if one.end > first), None)
            end = bounds.end if step is None else min(bounds.end, step.end)
            if end <= first:
                break
            codes = self._codes(first, min(limit - len(dues), end - first))
            if step is None:
                waits = codes > now_ms
                if self._may_be_early:
                    waits &= codes <= now_ms + self._delay_ms
                elif len(codes) and codes[0] > now_ms + self._delay_ms:
                    self._steps.append(ClockStep(bounds.end, 0, now_ms + self._delay_ms))
                    continue
            elif step.free_ms <= now_ms:
                waits = np.zeros(len(codes), np.bool_)
            else:
                waits = codes + step.shift_ms > now_ms
            waiting = np.flatnonzero(waits)
            ready = int(waiting[0]) if len(waiting) else len(codes)
            dues += [Due(first + index, 0, min(code, now_ms)) for index, code in enumerate(codes[:ready].tolist())]
            if ready < len(codes):
                self._wake_ms = int(codes[ready])
                if step is not None:
                    self._wake_ms = min(self._wake_ms + step.shift_ms, step.free_ms)
            if ready < len(codes) or not len(codes):
                break
        return dues

    def done(self, dues: Sequence[Due]) -> None:
        """Record that the messages `dues` were delivered or given up. `dues` must be the first messages of the list
        that the method `due` returned."""
        self._position = dues[-1].queue_offset + 1

    def wake_ms(self) -> int | None:
        """Return the due time, in ms, of the first message that the last `due` call read but that was not due yet; None
        if there was no such message."""
        return self._wake_ms

    def pending(self, bounds: DelayQueueBounds) -> int:
        """Return the number of messages that wait in the queue."""
        return bounds.end - min(max(self._position, bounds.min_offset), bounds.end)


class TimerQueue:
    """A delay queue whose messages each have their own time. Holds at most `held_max` messages in memory, 16 bytes
    each."""

    def __init__(
        self, codes: Codes, progress: SourceProgress, *, window_ms: int = WINDOW_MS, held_max: int = HELD_MAX
    ) -> None:
        self._codes = codes
        self._window_ms, self._held_max = window_ms, held_max
        # Delivery progress as (time in ms, queue offset): all messages before it are delivered or given up.
        self._mark = (progress.epoch, progress.next_offset)
        # The end offset of the delay-queue entries (units) that were read so far.
        self._seen = progress.low
        # The due times and queue offsets of the messages held in memory, sorted by (time, offset). `_at` is the index
        # of the first held message that is neither delivered nor given up.
        self._held_codes = self._held_offsets = _NO_INTS
        self._at = 0
        # Due times and queue offsets of newly appended messages, by ascending offset. Contains only messages that are
        # due by the horizon (`_horizon_ms`, the latest due time of messages in memory). Each offset is higher than all
        # offsets of held messages.
        self._fresh_codes = self._fresh_offsets = _NO_INTS
        # The latest due time, in ms, up to which all waiting messages are held in memory; -1 before the first read.
        self._horizon_ms = -1
        # Three values about the waiting messages that are due after `_horizon_ms` and so are not in memory: earliest
        # due time, lowest offset, and number. In the order of (time, offset) they follow all held messages.
        self._beyond_ms: int | None = 0
        self._beyond_low: int | None = progress.low
        self._beyond = 0

    def due(self, bounds: DelayQueueBounds, now_ms: int, limit: int) -> list[Due]:
        """Return the messages that are due at `now_ms`, earliest first, at most `limit`."""
        self._seen = max(self._seen, bounds.min_offset)
        if self._horizon_ms >= 0:
            self._look_at_new(bounds.end)
        self._merge_fresh(now_ms)
        ready = self._ready(now_ms, limit)
        if not ready and self._beyond_ms is not None and self._beyond_ms <= now_ms:
            self._reload(bounds, now_ms)
            ready = self._ready(now_ms, limit)
        part = slice(self._at, self._at + ready)
        return [
            Due(offset, code, code)
            for offset, code in zip(self._held_offsets[part].tolist(), self._held_codes[part].tolist(), strict=True)
        ]

    def done(self, dues: Sequence[Due]) -> None:
        """Record that the messages `dues` were delivered or given up. The last call of `due` returned these messages.
        `dues` may be only the beginning of that result."""
        self._mark = (dues[-1].epoch, dues[-1].queue_offset + 1)
        self._at += len(dues)

    def wake_ms(self) -> int | None:
        """Return the due time, in ms, of the next waiting message that `due` has read; None if no such message
        waits."""
        firsts = [] if self._beyond_ms is None else [self._beyond_ms]
        if self._at < len(self._held_codes):
            firsts.append(int(self._held_codes[self._at]))
        if len(self._fresh_codes):
            firsts.append(int(self._fresh_codes.min()))
        return min(firsts) if firsts else None

    def pending(self, bounds: DelayQueueBounds) -> int:
        """Return the number of messages that `due` has read from the delay queue and that still wait for their
        delivery."""
        return len(self._held_codes) - self._at + len(self._fresh_codes) + self._beyond

    def low(self) -> int:
        """Return the queue offset before which all messages are delivered or given up."""
        lows = [self._seen] if self._beyond_low is None else [self._beyond_low]
        if self._at < len(self._held_offsets):
            lows.append(int(self._held_offsets[self._at :].min()))
        if len(self._fresh_offsets):
            lows.append(int(self._fresh_offsets[0]))
        return min(lows)

    def _ready(self, now_ms: int, limit: int) -> int:
        """Return how many of the held messages are due at `now_ms`, at most `limit`. Held messages are kept in memory;
        this method assumes that they are sorted by due time."""
        return int(np.searchsorted(self._held_codes[self._at : self._at + limit], now_ms, "right"))

    def _look_at_new(self, end: int) -> None:
        """Read the delay queue's new entries (units), from offset `_seen` up to `end`. Messages that are due by
        `_horizon_ms` are added to the newly appended (fresh) messages in memory. Messages that are due later are only
        counted."""
        while self._seen < end:
            codes = self._codes(self._seen, min(end - self._seen, SCAN_UNITS))
            if not len(codes):
                return
            offsets = np.arange(self._seen, self._seen + len(codes))
            near = codes <= self._horizon_ms
            self._fresh_codes = np.concatenate((self._fresh_codes, codes[near]))
            self._fresh_offsets = np.concatenate((self._fresh_offsets, offsets[near]))
            self._leave_beyond(codes[~near], offsets[~near])
            self._seen += len(codes)
            if len(self._fresh_codes) > _FRESH_MAX:
                self._merge_fresh(None)

    def _leave_beyond(self, codes: Ints, offsets: Ints) -> None:
        """Count delayed messages that are due after `_horizon_ms`, and are therefore not held in memory. `codes`: the
        messages' due times. `offsets`: their queue offsets."""
        if len(codes):
            first_ms, low = int(codes.min()), int(offsets.min())
            self._beyond_ms = first_ms if self._beyond_ms is None else min(self._beyond_ms, first_ms)
            self._beyond_low = low if self._beyond_low is None else min(self._beyond_low, low)
            self._beyond += len(codes)

    def _merge_fresh(self, now_ms: int | None) -> None:
        """Merge the newly appended (fresh) messages into the held messages, which are in memory in the order of their
        due times. Does this only if a fresh message is due at `now_ms`, or if `now_ms` is None."""
        fresh = self._fresh_codes
        if not len(fresh) or (now_ms is not None and fresh.min() > now_ms):
            return
        # Sort the fresh messages by due time. A stable sort keeps messages with the same due time in the order of their
        # offsets.
        order = np.argsort(fresh, kind="stable")
        fresh, offsets = fresh[order], self._fresh_offsets[order]
        # Drop the held messages (messages in memory) that are already delivered or given up. They are the first of the
        # held messages.
        codes, held_offsets = self._held_codes[self._at :], self._held_offsets[self._at :]
        # Insert each fresh message after the held messages (messages in memory) with the same due time, because the
        # offsets of all held messages are lower.
        positions = np.searchsorted(codes, fresh, "right")
        self._held_codes = np.insert(codes, positions, fresh)
        self._held_offsets = np.insert(held_offsets, positions, offsets)
        self._at = 0
        self._fresh_codes = self._fresh_offsets = _NO_INTS
        self._trim()

    def _trim(self) -> None:
        """Keep only the first `held_max` waiting messages in memory. Further messages are only counted. `_horizon_ms`
        (the latest due time of messages in memory) is lowered so that it lies before the due times of all counted
        messages."""
        last = self._at + self._held_max
        if last < len(self._held_codes):
            self._leave_beyond(self._held_codes[last:], self._held_offsets[last:])
            # Message `last - 1` is now the last held message. A message with the same due time may be among the
            # messages that are only counted. So messages that are appended later with this due time must not be held in
            # memory either.
            self._horizon_ms = int(self._held_codes[last - 1]) - 1
            self._held_codes = self._held_codes[self._at : last].copy()
            self._held_offsets = self._held_offsets[self._at : last].copy()
            self._at = 0

    def _reload(self, bounds: DelayQueueBounds, now_ms: int) -> None:
        """Read all queue entries (units) whose messages may still wait. Hold in memory the messages that are due within
        `_window_ms` from now."""
        # Call `low`, the lowest queue offset at which a message may still wait, before the next lines reset the state
        # from which it is computed.
        offset = max(self.low(), bounds.min_offset)
        self._held_codes = self._held_offsets = self._fresh_codes = self._fresh_offsets = _NO_INTS
        self._at = 0
        self._beyond_ms = self._beyond_low = None
        self._beyond = 0
        self._horizon_ms = now_ms + self._window_ms
        epoch, next_offset = self._mark
        parts: list[tuple[Ints, Ints]] = []
        while offset < bounds.end:
            codes = self._codes(offset, min(bounds.end - offset, SCAN_UNITS))
            if not len(codes):
                break
            offsets = np.arange(offset, offset + len(codes))
            # `waits`: True for each message that still waits: its (due time, queue offset) is not before the delivery
            # position. `near`: True for each waiting message that is due within the time window.
            waits = (codes > epoch) | ((codes == epoch) & (offsets >= next_offset))
            near = waits & (codes <= self._horizon_ms)
            self._leave_beyond(codes[waits & ~near], offsets[waits & ~near])
            parts.append((codes[near], offsets[near]))
            offset += len(codes)
            # Drop all but the first `held_max` of the messages that were collected so far, so that memory stays bounded
            # during the scan.
            if sum(len(part) for part, _ in parts) > 2 * self._held_max:
                parts = self._hold(parts)
        self._hold(parts)
        self._seen = offset

    def _hold(self, parts: list[tuple[Ints, Ints]]) -> list[tuple[Ints, Ints]]:
        """Hold the given messages in memory, but only the first `held_max` in the order of delivery. Each pair of
        arrays has the due times and the queue offsets of some messages. Returns the held messages as a list with one
        pair of arrays."""
        codes = np.concatenate([part for part, _ in parts]) if parts else _NO_INTS
        offsets = np.concatenate([part for _, part in parts]) if parts else _NO_INTS
        order = np.lexsort((offsets, codes))
        self._held_codes, self._held_offsets = codes[order], offsets[order]
        self._trim()
        return [(self._held_codes, self._held_offsets)]
