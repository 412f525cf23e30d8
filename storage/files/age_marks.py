"""How long the bytes of a log have been in this store, without any wall clock: so a wrong clock deletes nothing early.

On disk
    config/retentionAges.json   {"boot": B, "elapsedMs": E, "ageMs": A, "from": F, "marks": [[age, log end], …]}

The age clock of a store advances only with the machine's CLOCK_BOOTTIME. It continues after a restart of the process if
the machine has not been booted since; the time between two boots does not count. A mark says: at this time of the age
clock, the log already ended at this offset. So all records before the offset are at least as old as the mark.

Records before `from` are older than the file, for example of an earlier version of raymq. They have no marks, and are
judged by store times and file times only. If the file is damaged, all records count as new, and the store keeps them
longer. The log of a store can only be cut while the store is opened; marks after the cut are then dropped.

Marks become sparse with age, so that their number is bounded: a record counts as younger than it is by at most 20 s, or
by a 32nd of its age.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from raymq.common.errors import StoreCorruptError
from storage.files.config_files import ConfigFiles
from storage.files.disk_usage import NoRoomError, is_want_of_space

AGES_FILE: Final = "retentionAges.json"
MARK_GAP_MS: Final = 10_000
SAVE_MARKS_MS: Final = 60_000
SAVE_AGE_MS: Final = 600_000
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SPARSENESS: Final = 64

logger = logging.getLogger(__name__)


class Elapsed(NamedTuple):
    """A reading of a machine's clock: the id of the machine's boot, and the ms since then, with the time asleep."""

    boot: str
    ms: int


def machine_elapsed() -> Elapsed:
    """Read this machine's clock. The boot id is empty if the machine has none; such a boot equals no other boot."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return Elapsed(boot, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000)


class Mark(NamedTuple):
    """At the time `age_ms` of the age clock, the log ended at the physical offset `end`."""

    age_ms: int
    end: int


class AgeMarks:
    """The age clock of one store, and the marks of its log. Only one thread at a time may call `observe` and `save`;
    any thread may call `old_until`."""

    def __init__(
        self, config: ConfigFiles, log_end: int, read_elapsed: Callable[[], Elapsed] = machine_elapsed
    ) -> None:
        """Read the marks of the store whose log ends at `log_end` after recovery. `read_elapsed` reads the machine's
        clock."""
        self._config = config
        self.read_elapsed = read_elapsed
        # A time of the age clock in ms, with the machine's clock at this time. Replaced as a whole.
        self._at = 0, read_elapsed()
        # Physical offset from which on the marks hold.
        self._from = log_end
        self._marks: tuple[Mark, ...] = ()
        self._saved_ms = -SAVE_AGE_MS
        self._has_new_mark = self._was_cut = False
        try:
            text = config.read(AGES_FILE)
            if text is not None:
                self._load(text, log_end)
        except (StoreCorruptError, ValueError, KeyError, TypeError) as error:
            logger.warning("the file %s is damaged; all messages count as new for retention: %s", AGES_FILE, error)
            self._from, self._marks = 0, ()

    def _load(self, text: str, log_end: int) -> None:
        saved = json.loads(text)
        before = Elapsed(str(saved["boot"]), int(saved["elapsedMs"]))
        marks = tuple(Mark(int(age_ms), int(end)) for age_ms, end in saved["marks"] if int(end) <= log_end)
        self._at = int(saved["ageMs"]) + _between(before, self._at[1]), self._at[1]
        self._from, self._marks = min(int(saved["from"]), log_end), marks
        self._was_cut = len(marks) < len(saved["marks"]) or self._from < int(saved["from"])

    def now_ms(self) -> int:
        """Return the time of the age clock, in ms."""
        age_ms, before = self._at
        return age_ms + _between(before, self.read_elapsed())

    def observe(self, log_end: int) -> None:
        """Note that the log ends at `log_end` now."""
        age_ms, before = self._at
        elapsed = self.read_elapsed()
        age_ms += _between(before, elapsed)
        self._at = age_ms, elapsed
        marks = self._marks
        if log_end <= max(self._from, marks[-1].end if marks else 0):
            return
        if len(marks) > 1 and age_ms - marks[-2].age_ms <= MARK_GAP_MS:
            marks = marks[:-1]
        self._marks = (*marks, Mark(age_ms, log_end))
        self._has_new_mark = True

    def old_until(self, age_ms: int) -> int:
        """Return the physical offset before which every record is at least `age_ms` old, or has no mark."""
        before_ms = self.now_ms() - age_ms
        return max([mark.end for mark in self._marks if mark.age_ms <= before_ms], default=self._from)

    def since_ms(self, log_end: int) -> int | None:
        """Return a time in ms for which the log has certainly ended at `log_end`, or 0. Returns None if the log has no
        marks: its records are older than the marks."""
        marks = self._marks
        if not marks:
            return None if log_end <= self._from else 0
        return self.now_ms() - marks[-1].age_ms if log_end <= marks[-1].end else 0

    def save_if_cut(self, min_offset: int) -> None:
        """Write the marks to disk if the log was cut since they were written. Otherwise a later process could take the
        marks of the cut records for marks of the records that follow. Raises OSError if the disk fails."""
        if self._was_cut:
            self._save(min_offset, may_use_reserve=True)
            self._was_cut = False

    def save_if_due(self, min_offset: int) -> None:
        """Write the marks to disk if they have changed and were last written a minute ago, or after ten minutes.

        `min_offset`: the log's start; marks of deleted records are dropped. If the disk is full, the marks on disk stay
        as they are, and a later process keeps messages longer. Raises OSError if the disk fails.
        """
        since_ms = self._at[0] - self._saved_ms
        if since_ms < (SAVE_MARKS_MS if self._has_new_mark else SAVE_AGE_MS):
            return
        try:
            self._save(min_offset, may_use_reserve=False)
        except OSError as error:
            if not isinstance(error, NoRoomError) and not is_want_of_space(error):
                raise
            logger.warning("the disk is full: %s is not written, and messages may stay longer: %s", AGES_FILE, error)
            self._saved_ms, self._has_new_mark = self._at[0], False

    def _save(self, min_offset: int, *, may_use_reserve: bool) -> None:
        age_ms, elapsed = self._at
        self._marks = self._sparse(min_offset, age_ms)
        content = {
            "boot": elapsed.boot,
            "elapsedMs": elapsed.ms,
            "ageMs": age_ms,
            "from": self._from,
            "marks": self._marks,
        }
        self._config.write(AGES_FILE, json.dumps(content), may_use_reserve=may_use_reserve)
        self._saved_ms, self._has_new_mark = age_ms, False

    def _sparse(self, min_offset: int, now_ms: int) -> tuple[Mark, ...]:
        """Return the marks without marks of deleted records. Of marks that are close together in relation to their
        age, only some stay."""
        marks = [mark for mark in self._marks if mark.end > min_offset]
        kept = marks[:1]
        for mark, following in pairwise(marks[1:]):
            gap_ms = max(MARK_GAP_MS, (now_ms - following.age_ms) // _SPARSENESS)
            if following.age_ms - kept[-1].age_ms > gap_ms:
                kept.append(mark)
        return (*kept, *marks[1:][-1:])


def _between(before: Elapsed, now: Elapsed) -> int:
    """Return the ms that have certainly passed between two readings of a machine's clock: 0 if it was booted since."""
    return max(0, now.ms - before.ms) if before.boot and before.boot == now.boot else 0
