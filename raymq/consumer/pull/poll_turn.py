"""One poll of a program, from its beginning until the program has its messages.

A signal handler may raise in the thread that polls, at any moment. Then nobody knows the messages that the poll took,
so they must not count as returned: the poll is abandoned, and the next call gives them back to their queues.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Sequence
from typing import Final, NamedTuple

from raymq.message import MessageQueue

ABANDONED_MAX_S: Final = 10.0
"""Bounds the wait for the end of an abandoned poll. It ends as soon as it sees that, and waits for nothing."""


class TakenRange(NamedTuple):
    """Messages that a poll took from a queue: the queue's position before and after, and offsets to acknowledge."""

    queue: MessageQueue
    start: int
    end: int
    expected: Sequence[int]


class PollTurn:
    """A poll. `abandoned` is set by the thread that called it, by a single store, which no handler interrupts."""

    __slots__ = ("_ended", "abandoned", "taken")

    def __init__(self) -> None:
        self.abandoned = False
        self.taken: list[TakenRange] = []
        self._ended = allocate_lock()
        self._ended.acquire()

    def end(self) -> None:
        """Let whoever waits for the end of this poll go on. Called once."""
        self._ended.release()

    def wait_ended(self) -> bool:
        """Wait until the poll takes nothing more. False if it did not end in ABANDONED_MAX_S."""
        ended = self._ended.acquire(timeout=ABANDONED_MAX_S)
        if ended:
            self._ended.release()
        return ended
