"""Main program of a predicate's process: `python -m raymq.client.predicates.child SOCKET MEMORY`. Both arguments are
inherited file descriptors.

    runner ── Load, Evaluate (places of records) ───▶ socket ──▶ this process: maps the log, calls the function
           ◀────────── PredicateAnswer ────────────── socket ◀──
           ◀── the present message, the matches ───── memory ◀──  also readable after this process has died

This process holds only the user's function and the code to read messages. If a call takes too long, SIGALRM ends the
process, even if the function holds the interpreter and never returns from C code. The process ends when its runner
closes the connection.
"""

from __future__ import annotations

import mmap
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, cast

import cloudpickle
import numpy as np

from raymq.client.predicates.evaluation import Calls, call_each, messages_at
from raymq.client.predicates.frames import (
    Evaluate,
    Load,
    Loaded,
    PredicateAnswer,
    SharedProgress,
    receive_frame,
    send_frame,
)
from raymq.client.predicates.predicate import OnError
from raymq.common.errors import DataLossError
from raymq.common.message import MessageExt
from raymq.common.protocol.consume_result import StoreLog
from raymq.records.format.compression import admit_bodies_of
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.logfiles.log_reader import LogReader

TRACEBACK_MAX = 4000


class PredicateMain:
    """Calls one predicate function for the records that the runner's Evaluate frames name."""

    def __init__(self, function: Callable[[MessageExt], Any], load: Load, progress: SharedProgress) -> None:
        self._function, self._load, self._progress = function, load, progress
        self._log: tuple[StoreLog, LogReader] | None = None
        self._set_again_s = 0.0
        """The alarm timer ends a call of the predicate function that takes too long. The first call after this
        monotonic time must reset the timer."""

    def evaluate(self, frame: Evaluate) -> PredicateAnswer:
        """Call the predicate function for each record that the Evaluate request names, within the request's time limit.
        Returns the answer to the request."""
        try:
            records = self._find(frame)
        except (DataLossError, OSError):
            return PredicateAnswer(unreadable=True)
        messages = messages_at(records.data, records.starts, frame.broker_name)
        self._set_again_s = 0.0
        try:
            calls: Calls = call_each(
                self._function,
                messages,
                self._progress.matches,
                on_error=cast(OnError, self._load.on_error),
                until_s=time.monotonic() + frame.budget_s,
                begin=self._begin,
            )
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return PredicateAnswer(*calls)

    def _begin(self, index: int) -> None:
        self._progress.at(index)
        now_s = time.monotonic()
        if now_s >= self._set_again_s:
            # Setting a timer is a system call, so do not set it for each message. A call may therefore take slightly
            # longer than its time limit.
            slack_s = self._load.timeout_s / 8
            signal.setitimer(signal.ITIMER_REAL, self._load.timeout_s + slack_s)
            self._set_again_s = now_s + slack_s

    def _find(self, frame: Evaluate) -> LocatedRecords:
        if frame.log is None or frame.places is None:
            sizes = np.frombuffer(frame.sizes, np.int64)
            return LocatedRecords(frame.records, np.cumsum(sizes) - sizes, sizes, np.full(len(sizes), -1))
        positions = np.frombuffer(frame.places.positions, np.int64)
        sizes = np.frombuffer(frame.places.sizes, np.int64)
        found = self._reader(frame.log).records_at(positions, sizes, positions)
        if len(found.starts) < len(positions):
            raise DataLossError(f"the log at {frame.log.root} lacks records after physical offset {positions[0]}")
        return found

    def _reader(self, log: StoreLog) -> LogReader:
        if self._log is None or self._log[0] != log:
            reader = LogReader(
                log.root,
                commit_log_file_size=log.commit_log_file_size,
                consume_queue_file_size=log.consume_queue_file_size,
                commit_log_directories=log.commit_log_directories,
            )
            self._log = (log, reader)
        return self._log[1]


def main(socket_fd: int, memory_fd: int) -> None:
    """Load the predicate function, and answer Evaluate frames until the runner closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the consuming program, not for this process
    connection = socket.socket(fileno=socket_fd)
    progress = SharedProgress(mmap.mmap(memory_fd, 0))
    load = receive_frame(connection, Load)
    try:
        function = cloudpickle.loads(load.payload)
    except Exception:  # importing a user's module may raise any exception
        send_frame(connection, Loaded(traceback.format_exc()[-TRACEBACK_MAX:]))
        return
    here = PredicateMain(function, load, progress)
    send_frame(connection, Loaded())
    try:
        while True:
            asked = receive_frame(connection, Evaluate)
            admit_bodies_of(asked.body_max_bytes)
            send_frame(connection, here.evaluate(asked))
    except (EOFError, OSError):
        return  # the runner has ended or closed the connection


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
