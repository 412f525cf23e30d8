"""PollTurn is one poll, from its call until the program has the messages; Wakeup wakes a poll that waits.

A signal handler may raise in the polling thread at any moment. The program then never receives the messages that the
poll took, so these messages must not count as returned. The poll is abandoned, and the next call puts the messages back
into their queues.
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
"""Maximum time in s to wait for the end of an abandoned poll (a poll whose call was interrupted by an exception). An
abandoned poll does not wait for messages, so it normally ends at once."""


Result = TypeVar("Result")


class TakenRange(NamedTuple):
    """Messages that a poll took from a queue. Contains the queue's position before and after the poll, and the offsets
    that the program must acknowledge."""

    queue: MessageQueue
    start: int
    end: int
    expected: Sequence[int]


class PollTurn:
    """One call of `poll`. If the call is interrupted, its thread sets `abandoned`. This is a single assignment, so no
    signal handler can interrupt it.

    On an event loop, a poll consists of steps. Nothing interrupts a step, but the loop may drop the poll between two
    steps. The next caller of `poll` then ends the dropped poll (`end_dropped`).
    """

    __slots__ = ("_step", "abandoned", "has_ended", "taken")

    def __init__(self) -> None:
        self.abandoned = False
        self.has_ended = False
        """True if the poll has ended and takes no more messages."""
        self.taken: list[TakenRange] = []
        self._step = allocate_lock()
        """Lock that is held while a step of this poll runs."""

    def step(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a step of this poll, or a whole poll. Raises ClientStateError if the poll was abandoned."""
        with self._step:
            if self.abandoned:
                raise ClientStateError("the poll was interrupted")
            return call(*arguments)

    def end_dropped(self, end: Callable[[PollTurn], None]) -> None:
        """Clean up after this poll, which was interrupted: call `end` with this poll, unless the poll has already
        ended. Does nothing if a step of the poll is still running after ABANDONED_MAX_S."""
        if self._step.acquire(timeout=ABANDONED_MAX_S):
            try:
                if not self.has_ended:
                    end(self)
            finally:
                self._step.release()


POLL_MAX_S: Final = 3600.0


class Wakeup:
    """An event like threading.Event, for one waiting thread. `wait` also ends if one of the given file descriptors is
    readable."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._set = False
        self._waited_for: tuple[int, ...] = ()
        """The file descriptors that the last call of `wait` waited for."""
        self._poll = self._registered(())

    def __del__(self) -> None:
        # Close the eventfd only on deletion. Otherwise `set` in another thread could write to a descriptor number that
        # was reused for another file.
        os.close(self._descriptor)

    def set(self) -> None:
        """End the running wait, or the next wait. May be called from any thread, and from a signal handler."""
        if not self._set:
            self._set = True
            os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Reset the event, so that the next wait lasts until the next call of `set`. Call `clear` before checking the
        state whose changes `set` announces: then a change after the check ends the wait."""
        if self._set:
            try:
                os.eventfd_read(self._descriptor)
            except BlockingIOError:
                # Another thread is inside `set`, so the next call of `wait` returns at once. This is harmless: the
                # thread that waits only checks its state once more.
                pass
            self._set = False

    def wait(self, descriptors: Iterable[int], timeout_s: float) -> None:
        """Wait until `set` is called or a descriptor is readable or broken, for at most `timeout_s` and at most an
        hour."""
        wanted = tuple(descriptors)
        if wanted != self._waited_for:
            self._poll, self._waited_for = self._registered(wanted), wanted
        self._poll.poll(min(timeout_s, POLL_MAX_S) * 1000)

    def _registered(self, descriptors: tuple[int, ...]) -> select.poll:
        poll = select.poll()
        for descriptor in (self._descriptor, *descriptors):
            poll.register(descriptor, select.POLLIN)
        return poll
