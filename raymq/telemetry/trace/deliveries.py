"""DeliveryTrace notes the messages that one consumer is given, for the dispatcher of its process.

A consumer without a trace has None in its place, so that it pays one comparison per poll or task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

from raymq.telemetry.trace.contexts import Begun, Done, Polled, TracedCalls, now_ms
from raymq.telemetry.trace.dispatcher import TraceDispatcher
from raymq.telemetry.trace.records import ContextCode


class DeliveryTrace:
    """The trace of what a member of `group` is given. Thread-safe; nothing here blocks or raises."""

    def __init__(self, group: str, dispatcher: TraceDispatcher) -> None:
        self._group, self._dispatcher = group, dispatcher

    def polled(self, topic: str, found: Sized) -> None:
        """Note messages of `topic` that a poll returns now: a list of them, or an Arrow table."""
        if len(found) and topic != self._dispatcher.topic:
            self._dispatcher.put(Polled(self._group, found, len(found), now_ms()))

    def begun(self, topic: str, calls: TracedCalls) -> None:
        """Note a listener's calls, which begin now."""
        if topic != self._dispatcher.topic:
            self._dispatcher.put(Begun(self._group, calls, now_ms()))

    def done(
        self, topic: str, calls: TracedCalls, ended: Sequence[int], failed: Mapping[int, ContextCode], took_ms: float
    ) -> None:
        """Note how these calls ended, which took so long in all. `ended`: the indices of those that were made;
        `failed`: the ones among them that failed. Both stay as they are."""
        if topic != self._dispatcher.topic:
            self._dispatcher.put(Done(self._group, calls, ended, failed, took_ms, now_ms()))

    def close(self) -> None:
        """Send what was noted, for a bounded time."""
        self._dispatcher.close()
