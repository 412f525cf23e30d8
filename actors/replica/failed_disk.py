"""Ends the process of a storage actor whose disk has failed, so that Ray restarts the process.

This module decides when the process ends. actors.replica.replica defines the replica's behaviour until then.

After a failed write or flush, the kernel may drop the unwritten bytes and report success the next time. So the open
store is not used again. The next process recovers the store from its directory. Recovery writes the end of the log once
more and flushes it, before any message counts as stored.

    the disk fails ─▶ waiting appends get StoreFailedError ─▶ the Controller gets the report ─▶ the process ends
                                                                └── ANSWER_S ──┘
    Ray starts the process ─▶ the store opens, or each call tries again and raises the reason

A process ends itself only when it is at least RESTART_INTERVAL_S old, so a disk that stays broken costs at most one
process in that time.

A failed read through a memory map raises no Python error: the signal SIGBUS ends the process at once. `BusErrors` makes
the process write a note to the store's directory. The next process then reads the files with read calls before it maps
them:

    SIGBUS ─▶ faulthandler writes "Fatal Python error: Bus error" and the stack to ROOT/fatal ─▶ the process ends
    Ray starts the process ─▶ the note goes to the log ─▶ the files are read by calls
                                                            ├── an error ─▶ the store stays closed, and says why
                                                            └── none ─▶ the store opens; from the second note on, later
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from raymq.common.errors import StoreError
from storage.files import disk
from storage.files.read_check import require_readable

ANSWER_S: Final = 1.0
"""Time, in seconds, from a failure of the disk to the end of the process. In this time the process answers its callers
and reports the failure to the Controller."""
RESTART_INTERVAL_S: Final = 15.0
"""Minimum age, in seconds, of a process that ends itself because of a failed disk. Limits how often the process is
restarted."""
EXIT_CODE: Final = 74
"""Exit code after a failure of the disk: EX_IOERR of sysexits.h. Ray treats any unrequested exit as a crash, and
restarts the actor."""

FATAL_FILE: Final = "fatal"
QUIET_S: Final = 600.0
"""After a store has been open for this many seconds, the bus errors of earlier processes no longer count."""
FATAL_MAX_BYTES: Final = 64 << 10
_BUS_ERROR: Final = b"Fatal Python error: Bus error"

logger = logging.getLogger(__name__)


def end_delay_s(age_s: float) -> float:
    """Return the time, in s, from a failure of the disk until the process ends itself. `age_s`: the age of the
    process."""
    return max(ANSWER_S, RESTART_INTERVAL_S - age_s)


class FailedDisk:
    """Ends this process shortly after `note_failure` is called, because the disk has failed.

    `end` ends the process; `clock_s` and the wait function are parameters for tests.
    """

    def __init__(
        self,
        name: str,
        *,
        end: Callable[[], None] = lambda: os._exit(EXIT_CODE),
        clock_s: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._name, self._end, self._clock_s, self._wait = name, end, clock_s, wait
        self._started_s = clock_s()
        self._lock = threading.Lock()
        self._is_ending = False

    def note_failure(self) -> None:
        """Schedule the end of this process, because its disk has failed. Does not block. Any thread may call it, even
        more than once."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        threading.Thread(target=self._end_later, name="raymq-failed-disk", daemon=True).start()

    def _end_later(self) -> None:
        delay_s = end_delay_s(self._clock_s() - self._started_s)
        logger.error("%s ends its process in %.1f s and is restarted, because its disk failed", self._name, delay_s)
        self._wait(delay_s)
        logger.error("%s ends its process now", self._name)
        self._end()


def open_pause_s(bus_errors: int) -> float:
    """Return the minimum time, in seconds, between the start of a storage process and the opening of its store.
    `bus_errors`: the number of consecutive earlier processes that were ended by a bus error."""
    return 0.0 if bus_errors < 2 else min(RESTART_INTERVAL_S * 2 ** min(bus_errors - 2, 10), QUIET_S)


class BusErrors:
    """Counts the bus errors (SIGBUS) that ended the last processes of the store in `root`.

    The constructor logs the newest bus error, and installs the handler that writes a note if this process gets a bus
    error. `clock_s` and `check` are parameters for tests.
    """

    def __init__(
        self,
        root: Path,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        check: Callable[[Sequence[Path]], str] = require_readable,
    ) -> None:
        self._path, self._clock_s, self._check = root / FATAL_FILE, clock_s, check
        self._started_s = clock_s()
        self.count = 0
        """The number of consecutive earlier processes that were ended by a bus error."""
        self._is_checked = False
        self._forgetting = threading.Timer(QUIET_S, self.forget)
        self._forgetting.daemon = True
        try:
            disk.make_directory(root)
            notes = self._path.read_bytes()[-FATAL_MAX_BYTES:] if self._path.exists() else b""
            self.count = notes.count(_BUS_ERROR)
            # Keep the file for notes about bus errors open, because the signal handler cannot open a file itself.
            self._notes = self._path.open("ab", buffering=0)
            if not self.count or self._path.stat().st_size > FATAL_MAX_BYTES:
                self._notes.truncate(0)
        except OSError as error:
            logger.error("file %s cannot be used, so a bus error would not be recorded: %s", self._path, error)
            return
        if notes:
            newest = notes[notes.rfind(b"Fatal Python error") :].decode(errors="replace").strip()
            logger.error("the previous process ended by a fatal error, see file %s:\n%s", self._path, newest)
        faulthandler.enable(self._notes, all_threads=False)

    def require_readable(self, directories: Sequence[Path]) -> None:
        """Raise StoreError unless it is safe to open the store in these directories.

        It is not safe if a bus error ended the last process, and one of its files cannot be read with read calls
        either. The store must also wait if bus errors ended several processes in a row: until this process is
        `open_pause_s` old.
        """
        if not self.count or self._is_checked:
            return
        wait_s = open_pause_s(self.count) - (self._clock_s() - self._started_s)
        if wait_s > 0:
            raise StoreError(
                f"{self.count} processes in a row ended by a bus error (SIGBUS): a mapped file of "
                f"{self._path.parent} could not be read. The store opens again in {wait_s:.0f} s; see the stacks "
                f"in file {self._path}, and the kernel's log (dmesg) for disk errors"
            )
        text = self._check(directories)
        self._is_checked = True
        logger.warning("the store in %s is opened after %d bus errors: %s", self._path.parent, self.count, text)
        self._forgetting.start()

    def forget(self) -> None:
        """Delete the notes of bus errors in earlier processes, so that these errors no longer count."""
        self._notes.truncate(0)

    def close(self) -> None:
        """Remove the handler that writes a note if this process gets a bus error."""
        self._forgetting.cancel()
        faulthandler.disable()
        self._notes.close()
