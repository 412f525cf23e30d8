"""When which bytes of a log were stored, remembered roughly and in little memory: for lag in seconds.

A mark says that the bytes behind the mark before it, up to its end, were stored from a time on. What comes within
MARK_S of a mark's time is counted to it; when there are MARKS_MAX, two become one. So an age may be too large, by a few
percent of it and MARK_S, and is never too small, but for what was stored before the first mark. Nothing survives the
process.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

MARK_S: Final = 0.1
MARKS_MAX: Final = 512


class StoreTimes:
    """The marks of one log, which ended at `end_offset` at `now_s`; of what is before, no more is known than that."""

    def __init__(self, end_offset: int, now_s: float) -> None:
        self._ends = [end_offset]
        self._times_s = [now_s]

    def stored(self, end_offset: int, now_s: float) -> None:
        """Everything before `end_offset` is stored, from now on."""
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
        """How long ago the byte at `physical_offset` was stored; 0 if there is none yet."""
        index = bisect_right(self._ends, physical_offset)
        return max(now_s - self._times_s[index], 0.0) if index < len(self._ends) else 0.0

    def _join_two(self, now_s: float) -> None:
        """Of two neighbours make one, with the earlier time and the later end: where that matters least for its age."""
        times_s = self._times_s
        first = min(
            range(1, len(times_s) - 2), key=lambda i: (times_s[i + 2] - times_s[i]) / max(now_s - times_s[i], MARK_S)
        )
        del self._times_s[first + 1], self._ends[first]
