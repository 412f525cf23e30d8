"""Reads every file of an open store once in a period, finds damage before a reader does, and starts its repair.

    sections: the log, …  ─▶ one step ─▶ damage: repaired at once, or a hole for replication, or reported
                              │
                              └─▶ pause: at most scrub_rate_max_bytes a second, at most CPU_SHARE_MAX of one core

A verification runs in the background, spread over the period `scrub_period_hours` (pace.py). By command
(`verify_now`) a verification runs at once and without pauses. Its progress is in a file (progress.py), so a restarted
process continues. The scrubber's thread does one small step at a time, and takes the append lock only if it finds
damage, so appends and reads do not wait for it. The thread has the normal priority: a thread of low priority that holds
Python's GIL would delay all others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.protocol.store import ScrubStatus
from storage.append.write_gate import WriteGate
from storage.parts import StoreParts
from storage.scrub.log_section import Checked, Section
from storage.scrub.pace import StepCost, even_rate, first_delay_s, is_overdue, ms_until_due, pause_s
from storage.scrub.progress import SCRUB_FILE, read_progress, write_progress

SCRUB_IDLE_S: Final = 30.0
"""Maximum time in s between two looks at the settings and the clock while no verification runs."""
SCRUB_RETRY_S: Final = 60.0
"""Time in s until a step that failed is repeated."""
SAVE_INTERVAL_S: Final = 60.0
"""Interval in s at which the progress is written during a verification. A crash repeats the checks of this time."""
SCRUB_STOP_TIMEOUT_S: Final = 60.0

logger = logging.getLogger(__name__)


class Scrubber:
    """Verifies the files of one open store. Thread-safe. `start` starts its thread; tests call `tick` instead."""

    def __init__(
        self,
        parts: StoreParts,
        gate: WriteGate,
        sections: Sequence[Section],
        *,
        clock_ms: Callable[[], int],
        clock_s: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """Read the progress of earlier verifications. `clock_ms`: the wall clock, for periods and ages. `clock_s`: a
        monotonic clock, for pauses. `cpu_s`: the processor time of the calling thread in s."""
        self._parts, self._gate, self._settings = parts, gate, parts.settings
        self._root = parts.settings.store_path_root_dir
        self._sections = {section.name: section for section in sections}
        self._clock_ms, self._clock_s, self._cpu_s = clock_ms, clock_s, cpu_s
        self._lock = threading.Lock()
        """Protects `_progress` and the counters. It is not held during a step."""
        self._progress = read_progress(self._root)
        if self._progress.section not in self._sections:
            self._progress.section = ""
        self._is_wanted = self._is_full_speed = self._is_unsaved = False
        self._saved_s = clock_s()
        self._error = ""
        self._read_bytes = self._found_ever = self._repaired_at_once = 0
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the scrubber's thread. The first check follows after a minute or more."""
        self._thread = threading.Thread(target=self._run, name="raymq-scrub", daemon=True)
        self._thread.start()

    def verify_now(self) -> int:
        """Begin a complete verification at full speed, unless one at full speed runs already. Returns the value that
        `ScrubStatus.completed` will have after this verification."""
        with self._lock:
            if not self._is_full_speed:
                self._is_wanted = True
            number = self._progress.completed + 1
        self._wake.set()
        return number

    def status(self) -> ScrubStatus:
        """Return the progress and the last result. Takes no lock of the store."""
        holes = self._parts.holes.holes
        now_ms, period = self._clock_ms(), self._settings.scrub_period_hours
        with self._lock:
            progress = self._progress
            closed = progress.closed_holes(holes)
            since_ms = progress.verified_from_ms or progress.waiting_since_ms
            return ScrubStatus(
                running=bool(progress.section) or self._is_wanted,
                full_speed=self._is_full_speed or self._is_wanted,
                section=progress.section,
                checked_bytes=progress.checked_bytes,
                total_bytes=max(progress.total_bytes, progress.checked_bytes),
                completed=progress.completed,
                began_ms=progress.began_ms,
                completed_ms=progress.completed_ms,
                overdue=is_overdue(now_ms, since_ms, period),
                found=progress.found,
                repaired=progress.repaired + closed,
                unrepaired=tuple(progress.unrepaired),
                error=self._error,
                age_ms=max(now_ms - since_ms, 0) if since_ms else 0,
                read_bytes=self._read_bytes,
                found_ever=self._found_ever,
                repaired_ever=self._repaired_at_once + self._parts.holes.mended_holes,
            )

    def tick(self) -> float:
        """Do one step if a verification runs or is due. Returns the time in s until the next call; a call may come
        earlier. Raises ServiceNotAvailableError if the store is closed."""
        now_ms, period = self._clock_ms(), self._settings.scrub_period_hours
        with self._lock:
            progress = self._progress
            if not progress.waiting_since_ms:
                progress.waiting_since_ms, self._is_unsaved = now_ms, True
            if self._is_wanted:
                self._is_wanted, self._is_full_speed = False, True
                self._begin(now_ms)
            elif not self._is_full_speed and not period:
                return SCRUB_IDLE_S
            elif not progress.section:
                wait_s = ms_until_due(now_ms, progress.began_ms, period) / 1000
                if wait_s > 0:
                    self._save_if_due()
                    return min(wait_s, SCRUB_IDLE_S)
                self._begin(now_ms)
            section, position = self._sections[progress.section], progress.position
        began_s, cpu_from_s = self._clock_s(), self._cpu_s()
        try:
            checked = section.step(position)
        except ServiceNotAvailableError:
            raise
        except (RaymqError, OSError) as error:
            if str(error) != self._error:
                logger.warning("%s: the verification of the store waits, and retries: %s", self._root, error)
            self._error = str(error)
            return SCRUB_RETRY_S
        self._error = ""
        cost = StepCost(checked.read_bytes, self._cpu_s() - cpu_from_s, self._clock_s() - began_s)
        with self._lock:
            is_full_speed = self._is_full_speed
            if not self._is_wanted:
                self._note(checked, now_ms)
            self._save_if_due()
            left = progress.total_bytes - progress.checked_bytes
            elapsed_ms = now_ms - progress.began_ms
        if is_full_speed:
            return 0.0
        return pause_s(cost, even_rate(left, elapsed_ms, period, self._settings.scrub_rate_max_bytes))

    def close(self) -> None:
        """Stop the thread, and write the progress to disk. Idempotent. Must be called before the store closes."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(SCRUB_STOP_TIMEOUT_S)
        with self._lock:
            if self._is_unsaved and self._progress.began_ms and not self._gate.failure:
                self._save()

    def _run(self) -> None:
        pause = first_delay_s(str(self._root))
        while not self._stop.is_set():
            # A wait of 0 s also lets the store's other threads run.
            self._wake.wait(pause)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                pause = self.tick()
            except ServiceNotAvailableError:
                return
            except Exception:
                # The verification must not end for good because of a fault in a check.
                logger.exception("%s: the verification of the store failed; it continues later", self._root)
                pause = SCRUB_RETRY_S

    def _begin(self, now_ms: int) -> None:
        sizes = {name: section.size() for name, section in self._sections.items()}
        self._progress.begin(now_ms, next(iter(self._sections)), sizes)
        self._is_unsaved = True

    def _note(self, checked: Checked, now_ms: int) -> None:
        """Add the result of a step to the progress. Called under the lock."""
        progress = self._progress
        self._is_unsaved = True
        self._read_bytes += checked.read_bytes
        self._found_ever += checked.found + len(checked.holes)
        self._repaired_at_once += checked.repaired
        progress.found += checked.found
        progress.repaired += checked.repaired
        progress.note_holes(checked.holes)
        for text in checked.unrepaired:
            if progress.note_unrepaired(text):
                logger.error("%s: %s", self._root, text)
        progress.checked_bytes += checked.read_bytes
        if checked.position is not None:
            progress.position = checked.position
            return
        names = list(self._sections)
        behind = names[names.index(progress.section) + 1 :]
        progress.checked_bytes = sum(
            size for name, size in progress.section_bytes.items() if name not in behind and name in self._sections
        )
        progress.position = ""
        if behind:
            progress.section = behind[0]
            return
        progress.complete(now_ms)
        self._is_full_speed = False
        self._save()
        logger.info(
            "%s: all files were verified: %d damaged places found, %d of them repaired at once",
            *(self._root, progress.found, progress.repaired),
        )

    def _save_if_due(self) -> None:
        if self._is_unsaved and self._clock_s() - self._saved_s >= SAVE_INTERVAL_S:
            self._save()

    def _save(self) -> None:
        """Write the progress to disk. If that fails, the verification continues, and a restart repeats it."""
        self._saved_s, self._is_unsaved = self._clock_s(), False
        try:
            write_progress(self._root, self._progress)
        except OSError as error:
            logger.warning("file %s was not written: %s", self._root / SCRUB_FILE, error)
