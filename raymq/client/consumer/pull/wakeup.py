"""Wakeup lets one thread wait for a call from another thread and for descriptors at the same time."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from typing import Final

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
        # Not earlier: another thread that still calls `set` must not write to a descriptor that is somebody else's now.
        os.close(self._descriptor)

    def set(self) -> None:
        """End the wait under way, or the next one. May be called from any thread, and by signal handlers."""
        if not self._set:
            self._set = True
            os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Have the next wait last. Call it before looking for what `set` tells of."""
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
