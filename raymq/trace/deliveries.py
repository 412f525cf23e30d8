"""DeliveryTrace notes the messages that one consumer is given, for the dispatcher of its process.

A consumer without a trace has None in its place, so that it pays one comparison per poll or task.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from raymq.trace.contexts import Begun, Done, Polled, new_request_id, now_ms
from raymq.trace.dispatcher import TraceDispatcher
from raymq.trace.records import ContextCode


class DeliveryTrace:
    """The trace of what a member of `group` is given. Thread-safe; nothing here blocks or raises."""

    def __init__(self, group: str, dispatcher: TraceDispatcher) -> None:
        self._group, self._dispatcher = group, dispatcher

    def polled(self, topic: str, found: Sized) -> None:
        """Note messages of `topic` that a poll returns now: a list of them, or an Arrow table."""
        if len(found) and topic != self._dispatcher.topic:
            self._dispatcher.put(Polled(self._group, found, len(found), now_ms()))

    def begun(self, topic: str, calls: Sequence[Any], count: int) -> str:
        """Note a listener's calls of `count` messages, which begin now: a message or a list each. Returns the id with
        which `done` is to name them."""
        request_id = new_request_id()
        if topic != self._dispatcher.topic:
            self._dispatcher.put(Begun(self._group, request_id, calls, count, now_ms()))
        return request_id

    def done(
        self,
        topic: str,
        request_id: str,
        calls: Sequence[Any],
        codes: Sequence[ContextCode | None],
        count: int,
        took_ms: float,
    ) -> None:
        """Note how these calls ended, None for those that were not made; they took so long in all."""
        if topic != self._dispatcher.topic:
            self._dispatcher.put(Done(self._group, request_id, calls, codes, count, took_ms, now_ms()))

    def close(self) -> None:
        """Send what was noted, for a bounded time."""
        self._dispatcher.close()
