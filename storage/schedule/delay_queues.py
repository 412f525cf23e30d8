"""Decides which messages of a delay queue are due, and in which order. Pure: the time is an argument.

There are two kinds of delay queues, by the order of their units' times. Both return due messages in one fixed order,
and both start from the progress of the last process (storage.dispatch.delivery_progress.SourceProgress). Messages that
`due` returned stay due until `done` is called with them.

    LevelQueue    Each message waits equally long: the first stored is due first. The object holds one
                  number: the next offset.
    TimerQueue    Each message has a time of its own. Times and offsets of messages due in the next minutes are held,
                  sorted; later ones are read again from the units when the first of them is due. The order is by
                  (time, offset).

For a TimerQueue's order to be complete, a unit that is appended after `due` was called with a time must have a later
time. The store ensures that (raymq.common.delay), if it was given the same time before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.dispatch.delivery_progress import SourceProgress

Ints = NDArray[np.int64]
Codes = Callable[[int, int], Ints]
"""Returns the times in the units from a queue offset on, at most the given number; fewer at the end of a file."""

WINDOW_MS: Final = 600_000
HELD_MAX: Final = 1_000_000
SCAN_UNITS: Final = 65_536
_FRESH_MAX: Final = 4096
_NO_INTS: Final = np.empty(0, np.int64)


class Due(NamedTuple):
    """A message that is due."""

    queue_offset: int
    # Orders the messages of a queue before their offsets do: the time in a timer queue, else 0.
    epoch: int
    # The time at which the message is due.
    due_ms: int


class DelayQueueBounds(NamedTuple):
    """The range of queue offsets in a queue: from `min_offset` up to `end`, exclusive."""

    min_offset: int
    end: int


class LevelQueue:
    """A queue whose messages all wait `delay_ms`."""

    def __init__(self, codes: Codes, delay_ms: int, progress: SourceProgress) -> None:
        self._codes = codes
        self._delay_ms = delay_ms
        self._position = progress.next_offset
        self._wake_ms: int | None = None

    def due(self, bounds: DelayQueueBounds, now_ms: int, limit: int) -> list[Due]:
        """Return the first messages that are due at `now_ms`, at most `limit`.

        If a time is further ahead than the delay, the clock was set back, or the level changed: the message is then due
        now (spec/storage.md §12).
        """
        self._position = min(max(self._position, bounds.min_offset), bounds.end)
        self._wake_ms = None
        dues: list[Due] = []
        while len(dues) < limit and self._position + len(dues) < bounds.end:
            first = self._position + len(dues)
            codes = self._codes(first, min(limit - len(dues), bounds.end - first))
            waiting = np.flatnonzero((codes > now_ms) & (codes <= now_ms + self._delay_ms))
            ready = int(waiting[0]) if len(waiting) else len(codes)
            dues += [Due(first + index, 0, min(code, now_ms)) for index, code in enumerate(codes[:ready].tolist())]
            if ready < len(codes):
                self._wake_ms = int(codes[ready])
            if ready < len(codes) or not len(codes):
                break
        return dues

    def done(self, dues: Sequence[Due]) -> None:
        """Record that `dues`, the first messages that `due` returned, were delivered or given up."""
        self._position = dues[-1].queue_offset + 1

    def wake_ms(self) -> int | None:
        """Return when the next message is due, as far as the last `due` read; None if it read none."""
        return self._wake_ms

    def pending(self, bounds: DelayQueueBounds) -> int:
        """Return the number of waiting messages."""
        return bounds.end - min(max(self._position, bounds.min_offset), bounds.end)


class TimerQueue:
    """A queue of messages that each have a time of their own. Holds at most `held_max` of them, 16 bytes each."""

    def __init__(
        self, codes: Codes, progress: SourceProgress, *, window_ms: int = WINDOW_MS, held_max: int = HELD_MAX
    ) -> None:
        self._codes = codes
        self._window_ms, self._held_max = window_ms, held_max
        # Everything before this (time, offset) is done.
        self._mark = (progress.epoch, progress.next_offset)
        # The offset up to which units were read.
        self._seen = progress.low
        # The held messages: their times and offsets, sorted by (time, offset). `_at` is the index of the first one that
        # is not done.
        self._held_codes = self._held_offsets = _NO_INTS
        self._at = 0
        # Newly appended messages that are due before the horizon, by ascending offset. All of them come later in the
        # queue than the held messages.
        self._fresh_codes = self._fresh_offsets = _NO_INTS
        # The latest time of held messages; -1 before the first read.
        self._horizon_ms = -1
        # The messages after the horizon, which are not held: their first time, lowest offset, and number. In the order
        # of (time, offset) they come after all held messages.
        self._beyond_ms: int | None = 0
        self._beyond_low: int | None = progress.low
        self._beyond = 0

    def due(self, bounds: DelayQueueBounds, now_ms: int, limit: int) -> list[Due]:
        """Return the first messages that are due at `now_ms`, at most `limit`."""
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
        """Record that `dues`, the first messages that `due` returned, were delivered or given up."""
        self._mark = (dues[-1].epoch, dues[-1].queue_offset + 1)
        self._at += len(dues)

    def wake_ms(self) -> int | None:
        """Return when the next message that `due` has read is due; None if there is none."""
        firsts = [] if self._beyond_ms is None else [self._beyond_ms]
        if self._at < len(self._held_codes):
            firsts.append(int(self._held_codes[self._at]))
        if len(self._fresh_codes):
            firsts.append(int(self._fresh_codes.min()))
        return min(firsts) if firsts else None

    def pending(self, bounds: DelayQueueBounds) -> int:
        """Return the number of waiting messages that `due` has read."""
        return len(self._held_codes) - self._at + len(self._fresh_codes) + self._beyond

    def low(self) -> int:
        """Return the offset before which no message waits any more."""
        lows = [self._seen] if self._beyond_low is None else [self._beyond_low]
        if self._at < len(self._held_offsets):
            lows.append(int(self._held_offsets[self._at :].min()))
        if len(self._fresh_offsets):
            lows.append(int(self._fresh_offsets[0]))
        return min(lows)

    def _ready(self, now_ms: int, limit: int) -> int:
        """Return the number of held messages that are due, at most `limit`. The times are sorted."""
        return int(np.searchsorted(self._held_codes[self._at : self._at + limit], now_ms, "right"))

    def _look_at_new(self, end: int) -> None:
        """Read the units from `_seen` up to `end`: those before the horizon become fresh, the others count as beyond
        it.
        """
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
        """Count these messages as beyond the horizon."""
        if len(codes):
            first_ms, low = int(codes.min()), int(offsets.min())
            self._beyond_ms = first_ms if self._beyond_ms is None else min(self._beyond_ms, first_ms)
            self._beyond_low = low if self._beyond_low is None else min(self._beyond_low, low)
            self._beyond += len(codes)

    def _merge_fresh(self, now_ms: int | None) -> None:
        """Move the fresh messages to the held ones if one of them is due at `now_ms`; always if `now_ms` is None."""
        fresh = self._fresh_codes
        if not len(fresh) or (now_ms is not None and fresh.min() > now_ms):
            return
        # Sort them by time; a stable sort keeps the order of offsets within a time.
        order = np.argsort(fresh, kind="stable")
        fresh, offsets = fresh[order], self._fresh_offsets[order]
        # Keep only the held messages that are not done.
        codes, held_offsets = self._held_codes[self._at :], self._held_offsets[self._at :]
        # Insert each fresh message after the held ones of its time, whose offsets are all lower.
        positions = np.searchsorted(codes, fresh, "right")
        self._held_codes = np.insert(codes, positions, fresh)
        self._held_offsets = np.insert(held_offsets, positions, offsets)
        self._at = 0
        self._fresh_codes = self._fresh_offsets = _NO_INTS
        self._trim()

    def _trim(self) -> None:
        """Hold only the first `held_max` messages; the others count as beyond the horizon."""
        last = self._at + self._held_max
        if last < len(self._held_codes):
            self._leave_beyond(self._held_codes[last:], self._held_offsets[last:])
            # A later unit with the time of the last held message comes after the messages left out now: it is beyond,
            # too.
            self._horizon_ms = int(self._held_codes[last - 1]) - 1
            self._held_codes = self._held_codes[self._at : last].copy()
            self._held_offsets = self._held_offsets[self._at : last].copy()
            self._at = 0

    def _reload(self, bounds: DelayQueueBounds, now_ms: int) -> None:
        """Read all units that may wait, and hold the messages that are due within the window."""
        # Compute this before the state is reset: the lowest offset that may wait.
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
            # The messages that are not done yet, by (time, offset), and those of them that are within the window.
            waits = (codes > epoch) | ((codes == epoch) & (offsets >= next_offset))
            near = waits & (codes <= self._horizon_ms)
            self._leave_beyond(codes[waits & ~near], offsets[waits & ~near])
            parts.append((codes[near], offsets[near]))
            offset += len(codes)
            # Trim the parts at intervals, so that memory stays bounded.
            if sum(len(part) for part, _ in parts) > 2 * self._held_max:
                parts = self._hold(parts)
        self._hold(parts)
        self._seen = offset

    def _hold(self, parts: list[tuple[Ints, Ints]]) -> list[tuple[Ints, Ints]]:
        """Hold the messages of these parts (times and offsets), as many as allowed. Returns them as one part."""
        codes = np.concatenate([part for part, _ in parts]) if parts else _NO_INTS
        offsets = np.concatenate([part for _, part in parts]) if parts else _NO_INTS
        order = np.lexsort((offsets, codes))
        self._held_codes, self._held_offsets = codes[order], offsets[order]
        self._trim()
        return [(self._held_codes, self._held_offsets)]
