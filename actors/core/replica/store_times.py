"""The times at which the bytes of a log were stored, approximate and in little memory: for the lag in seconds.

A mark has an end offset and a time: the bytes from the end of the previous mark to its own end were stored at that time
or later. Bytes stored within MARK_S of a mark's time are added to the mark; if there are more than MARKS_MAX marks, two
are joined. So an age may be too large, by a few percent and MARK_S. It is never too small, except for bytes stored
before the first mark. Nothing survives the process.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

MARK_S: Final = 0.1
MARKS_MAX: Final = 512


class StoreTimes:
    """The marks of one log, which ended at `end_offset` at `now_s`; bytes before that count as stored at `now_s`."""

    def __init__(self, end_offset: int, now_s: float) -> None:
        self._ends = [end_offset]
        self._times_s = [now_s]

    def stored(self, end_offset: int, now_s: float) -> None:
        """Record that everything before `end_offset` is stored now."""
        if end_offset <= self._ends[-1]:
            return
        if len(self._ends) > 1 and now_s - self._times_s[-1] < MARK_S:
            self._ends[-1] = end_offset
            return
        self._ends.append(end_offset)
        self._times_s.append(now_s)
        if len(self._ends) > MARKS_MAX:
            self._join_two(now_s)

    def age_s(self, physical_offset: int, now_s: float) -> float:
        """Return the time in s since the byte at `physical_offset` was stored; 0 if it is not stored yet."""
        index = bisect_right(self._ends, physical_offset)
        return max(now_s - self._times_s[index], 0.0) if index < len(self._ends) else 0.0

    def _join_two(self, now_s: float) -> None:
        """Join the two neighbouring marks whose ages change least, in proportion: keep the earlier time and the later
        end.
        """
        times_s = self._times_s
        first = min(
            range(1, len(times_s) - 2), key=lambda i: (times_s[i + 2] - times_s[i]) / max(now_s - times_s[i], MARK_S)
        )
        del self._times_s[first + 1], self._ends[first]
