"""One poll of a program, from its beginning until the program has its messages, and the wakeup of a poll that waits.

A signal handler may raise in the polling thread at any moment. The messages that the poll took are then unknown to the
program, so they must not count as returned. The poll is abandoned, and the next call gives the messages back to their
queues.
"""

from __future__ import annotations

import os
import select
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from raymq.common.errors import ClientStateError
from raymq.common.message import MessageQueue

ABANDONED_MAX_S: Final = 10.0
"""Bounds the wait for the end of an abandoned poll. It ends as soon as it sees that, and waits for nothing."""


Result = TypeVar("Result")


class TakenRange(NamedTuple):
    """Messages that a poll took from a queue: the queue's position before and after, and offsets to acknowledge."""

    queue: MessageQueue
    start: int
    end: int
    expected: Sequence[int]


class PollTurn:
    """A poll. The thread that called it sets `abandoned` by a single store, which no handler interrupts.

    A poll of an event loop consists of steps, and nothing interrupts a step. Between two steps the loop may drop the
    poll. The next caller then ends it (`end_dropped`).
    """

    __slots__ = ("_step", "abandoned", "has_ended", "taken")

    def __init__(self) -> None:
        self.abandoned = False
        self.has_ended = False
        """True once the poll takes nothing more."""
        self.taken: list[TakenRange] = []
        self._step = allocate_lock()
        """Held while a step of this poll runs."""

    def step(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Make a call that is a step of this poll, or a whole poll. ClientStateError if the poll was abandoned."""
        with self._step:
            if self.abandoned:
                raise ClientStateError("this poll was interrupted")
            return call(*arguments)

    def end_dropped(self, end: Callable[[PollTurn], None]) -> None:
        """Have `end(turn)` end this abandoned poll, unless a step of it is still running after ABANDONED_MAX_S."""
        if self._step.acquire(timeout=ABANDONED_MAX_S):
            try:
                if not self.has_ended:
                    end(self)
            finally:
                self._step.release()


POLL_MAX_S: Final = 3600.0


class Wakeup:
    """Like a threading.Event, but its `wait` also ends when one of some descriptors is readable. One thread waits."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._set = False
        self._waited_for: tuple[int, ...] = ()
        """The descriptors of the last wait."""
        self._poll = self._registered(())

    def __del__(self) -> None:
        # Not earlier: `set` in another thread must not write to a descriptor that names another file by then.
        os.close(self._descriptor)

    def set(self) -> None:
        """End the wait under way, or the next one. May be called from any thread, and by signal handlers."""
        if not self._set:
            self._set = True
            os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make the next wait last until the next `set`. Call it before looking for what `set` announces."""
        if self._set:
            try:
                os.eventfd_read(self._descriptor)
            except BlockingIOError:
                pass  # `set` is between its two steps: the next wait ends at once, which is harmless
            self._set = False

    def wait(self, descriptors: Iterable[int], timeout_s: float) -> None:
        """Wait until `set`, until a descriptor is readable or broken, or for `timeout_s`, up to an hour."""
        wanted = tuple(descriptors)
        if wanted != self._waited_for:
            self._poll, self._waited_for = self._registered(wanted), wanted
        self._poll.poll(min(timeout_s, POLL_MAX_S) * 1000)

    def _registered(self, descriptors: tuple[int, ...]) -> select.poll:
        poll = select.poll()
        for descriptor in (self._descriptor, *descriptors):
            poll.register(descriptor, select.POLLIN)
        return poll
