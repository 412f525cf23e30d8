"""PredicateProcess runs a predicate in a child process, and starts a new child after the previous one has
ended."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Final

import msgspec
import numpy as np

from raymq.client.predicates.evaluation import REASON_MAX, Evaluated
from raymq.client.predicates.frames import (
    ANSWER_MAX_BYTES,
    EVALUATED_MAX,
    PROGRESS_BYTES,
    Evaluate,
    Load,
    Loaded,
    PredicateAnswer,
    SharedProgress,
    receive_frame,
    send_frame,
)
from raymq.client.predicates.predicate import Predicate
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.consume_result import LogPlaces, StoreLog
from raymq.common.retry import Backoff
from raymq.records.format.compression import body_max_bytes
from raymq.records.format.memory_records import LocatedRecords

CHILD_START_TIMEOUT_S: Final = 30.0
"""Timeout in s for starting a predicate's process and loading its function, including the modules that the function
imports."""
GRACE_S: Final = 2.0
"""Extra time in s, after a call's time limit has passed, before the runner kills the predicate's process. Normally the
process ends itself, unless it hangs or has changed the handling of SIGALRM."""
END_TIMEOUT_S: Final = 5.0
COPIED_MAX_BYTES: Final = 8 << 20
"""Maximum bytes of records that are sent to a predicate's process at a time. Records are sent if the process cannot
read them from the store's mapped files. A single record may be larger."""

logger = logging.getLogger(__name__)


class PredicateProcess:
    """The child process that runs one predicate. Thread-safe: one evaluation runs at a time; other callers
    wait."""

    def __init__(self, predicate: Predicate) -> None:
        self._predicate = predicate
        self._lock = threading.Lock()
        """Lock that guards all attributes that `__init__` assigns after it. Held while the predicate's function
        runs."""
        self._backoff = Backoff(0.1, 5.0)
        """Pause between the starts of predicate processes that end without an answer."""
        self._not_before_s = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        memory_fd = os.memfd_create("raymq-predicate")
        os.ftruncate(memory_fd, PROGRESS_BYTES)
        self._memory_fd = memory_fd
        self._progress = SharedProgress(mmap.mmap(memory_fd, PROGRESS_BYTES))

    @property
    def pid(self) -> int | None:
        """The id of the predicate's child process; None while no child runs."""
        child = self._child
        return None if child is None else child.pid

    def evaluate(
        self, records: LocatedRecords, broker_name: str, until_s: float, log: StoreLog | None = None
    ) -> Evaluated:
        """Evaluate the predicate on `records`, one after another, until `until_s`, but on at least one record.

        The predicate's process reads the records in the files of `log` if it can find them there; otherwise the records
        are sent to the process. If a call of the function raises, hangs or ends the process, the predicate's `on_error`
        decides. With "raise" the result has the `failure`. If the function cannot be loaded, the result has the
        `failure`, whatever `on_error` is. Raises ServiceNotAvailableError if no process can be started now.
        """
        records = records.part(0, EVALUATED_MAX)
        with self._lock:
            connection = self._connection or self._start()
            if isinstance(connection, str):
                return Evaluated(np.empty(0, np.bool_), connection[-REASON_MAX:], ended=True)
            budget_s = max(0.0, until_s - time.monotonic())
            self._progress.at(0)
            try:
                answer = PredicateAnswer(unreadable=True)
                if log is not None and records.position >= 0:
                    positions = records.starts + records.position
                    places = LogPlaces(positions.tobytes(), np.ascontiguousarray(records.sizes).tobytes())
                    answer = self._ask(connection, Evaluate(broker_name, budget_s, log, places))
                if answer.unreadable:
                    some = _first_of(records)
                    sizes = np.ascontiguousarray(some.sizes).tobytes()
                    answer = self._ask(connection, Evaluate(broker_name, budget_s, records=some.joined(), sizes=sizes))
            except (OSError, EOFError, ValueError) as error:
                return self._ended(records, error)
            self._backoff.reset()
            if answer.failures:
                logger.warning(
                    "%s failed on %d messages; the last failure: %s",
                    self._predicate,
                    answer.failures,
                    answer.last_failure,
                )
            return Evaluated(self._progress.matching(min(answer.decided, len(records.starts))), answer.failure)

    def close(self) -> None:
        """End the predicate's child process. Idempotent. Do not call `evaluate` afterwards."""
        with self._lock:
            self._end()
            if self._memory_fd >= 0:
                os.close(self._memory_fd)
                self._memory_fd = -1

    def _ask(self, connection: socket.socket, frame: Evaluate) -> PredicateAnswer:
        send_frame(connection, msgspec.structs.replace(frame, body_max_bytes=body_max_bytes()))
        index = -1
        while True:
            # The time limit applies to the check of one message. While the index of the checked message grows, the
            # process is not hanging.
            connection.settimeout(self._predicate.timeout_s + GRACE_S)
            try:
                first = connection.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                if self._progress.index == index:
                    raise
                index = self._progress.index
                continue
            if not first:
                raise EOFError("the predicate's process has closed its connection")
            return receive_frame(connection, PredicateAnswer, ANSWER_MAX_BYTES)

    def _ended(self, records: LocatedRecords, error: Exception) -> Evaluated:
        """Return the predicate's decisions on `records` after the predicate's process has died, or if it must be
        killed. The process has already decided the messages before its current message. The predicate's `on_error`
        decides on the current message."""
        index = min(max(self._progress.index, 0), len(records.starts) - 1)
        decided = self._progress.matching(index)
        reason = self._end() or f"the predicate's process does not answer ({error!r})"
        self._not_before_s = time.monotonic() + self._backoff.next()
        logger.warning("%s failed: %s; a new process will be started", self._predicate, reason)
        if self._predicate.on_error == "raise":
            return Evaluated(decided, reason[:REASON_MAX], ended=True)
        return Evaluated(np.append(decided, self._predicate.on_error == "match"), ended=True)

    def _start(self) -> socket.socket | str:
        """Start a new predicate process. Returns the connection to it, or the reason why it cannot load the
        function."""
        pause_s = self._not_before_s - time.monotonic()
        if pause_s > 0:
            time.sleep(min(pause_s, 5.0))
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                fds = (theirs.fileno(), self._memory_fd)
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "raymq.client.predicates.child", *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
            ours.settimeout(CHILD_START_TIMEOUT_S)
            send_frame(ours, Load(self._predicate.payload, self._predicate.on_error, self._predicate.timeout_s))
            loaded = receive_frame(ours, Loaded, ANSWER_MAX_BYTES)
        except (OSError, EOFError, ValueError) as error:
            self._connection = ours
            reason = self._end() or repr(error)
            self._not_before_s = time.monotonic() + self._backoff.next()
            raise ServiceNotAvailableError(f"the process of {self._predicate} does not start: {reason}") from error
        self._connection = ours
        if loaded.failure:
            self._end()
            self._not_before_s = time.monotonic() + self._backoff.next()
            return f"the predicate cannot be loaded in its process:\n{loaded.failure}"
        return ours

    def _end(self) -> str:
        """End the predicate's process. If the process had ended by itself, returns how it ended. Returns an empty
        string if it had to be killed."""
        child, self._child = self._child, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if child is None:
            return ""
        try:
            # The connection to the child process is closed now, so the child process usually ends by itself within
            # moments.
            child.wait(0.2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(END_TIMEOUT_S)
            return ""
        return self._reason(child.returncode)

    def _reason(self, returncode: int) -> str:
        if returncode == -signal.SIGALRM:
            return f"the predicate took longer than its time limit of {self._predicate.timeout_s:g} s"
        if returncode < 0:
            return f"the predicate's process was ended by signal {-returncode} ({signal.strsignal(-returncode)})"
        return f"the predicate ended its process with exit status {returncode}"


def _first_of(records: LocatedRecords) -> LocatedRecords:
    """Return the first records: as many as fit into COPIED_MAX_BYTES, but at least one record."""
    count = max(1, int(np.searchsorted(np.cumsum(records.sizes), COPIED_MAX_BYTES, "right")))
    return records.part(0, count)
