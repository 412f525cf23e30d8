"""The observations of a chaos test: what clients saw of each queue, and between which times they saw it.

Clients of the test add observations while faults happen. `tests.support.history.log_rules` decides afterwards whether
the observations fit a log. All times are in s, from one monotonic clock of the test's machine.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import raymq
from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue
from tests.support.history.history import Outcome, Recording, read_history_file

WATCH_S = 0.1
STOP_TIMEOUT_S = 120.0


class Seen(Enum):
    """The kinds of observations, and the meaning of an observation's offset and text."""

    ACKNOWLEDGED = "a send of the body `text` was acknowledged at `offset`"
    READ = "the reader `actor` got the body `text` at `offset`"
    TAIL = "the queue ended before `offset`"
    COMMITTED = "the group `actor` had committed `offset`"
    ABORTED = "the transaction with the body `text` was rolled back"


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation. The request was sent at `begin_s`, and its answer was there at `end_s`."""

    seen: Seen
    begin_s: float
    end_s: float
    queue: MessageQueue | None = None
    offset: int = -1
    text: bytes = b""
    actor: str = ""


class Observations(Recording[Observation]):
    """The observations of all clients of a chaos test."""


def acknowledgements_in(path: Path) -> list[Observation]:
    """Return the acknowledged sends of a history file. Only the times of the acknowledgements are known."""
    return [
        Observation(Seen.ACKNOWLEDGED, 0.0, one.end_s, one.queue, one.queue_offset, one.sent.body())
        for one in read_history_file(path).values()
        if one.outcome is Outcome.OK
    ]


class TailWatcher:
    """A thread that asks for the ends of a topic's queues and for a group's committed offsets every WATCH_S seconds.

    While servers are away, its questions fail; it then asks again. `group` None: no group is asked for.
    """

    def __init__(self, mq: raymq.Client, topic: str, observations: Observations, group: str | None = None) -> None:
        self._mq, self._topic, self._group, self._observations = mq, topic, group, observations
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="tail-watcher", daemon=True)

    def __enter__(self) -> TailWatcher:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join(STOP_TIMEOUT_S)
        assert not self._thread.is_alive(), "the thread that watches the queues' ends hangs"

    def check(self) -> None:
        """Raise AssertionError if an error other than one of raymq's has stopped the thread."""
        assert self._failures == []

    def _run(self) -> None:
        try:
            while not self._stopping.wait(WATCH_S):
                self._look()
        except BaseException as error:  # keep the error of this thread; `check` raises it in the test's thread
            self._failures.append(error)

    def _look(self) -> None:
        try:
            begin_s = time.monotonic()
            tails = {entry.queue: entry.max_offset for entry in self._mq.admin.describe_topic(self._topic)}
            self._add(Seen.TAIL, begin_s, tails)
            if self._group is not None:
                begin_s = time.monotonic()
                entries = self._mq.admin.describe_group(self._group)
                committed = {entry.queue: entry.committed for entry in entries if entry.committed is not None}
                self._add(Seen.COMMITTED, begin_s, committed, self._group)
        except RaymqError:
            pass  # a server does not answer at the moment, which is part of the test

    def _add(self, seen: Seen, begin_s: float, offsets: dict[MessageQueue, int], actor: str = "") -> None:
        end_s = time.monotonic()
        self._observations.extend(
            Observation(seen, begin_s, end_s, queue, offset, actor=actor) for queue, offset in offsets.items()
        )
