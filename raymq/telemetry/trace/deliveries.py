"""Records the messages of one consumer, for the dispatcher of its process.

A consumer without a trace has None instead of a DeliveryTrace, which costs one comparison per poll or task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

from raymq.telemetry.trace.contexts import Begun, Done, Polled, TracedCalls, now_ms
from raymq.telemetry.trace.dispatcher import TraceDispatcher
from raymq.telemetry.trace.records import ContextCode


class DeliveryTrace:
    """The trace of the messages that a member of `group` gets. Thread-safe; never blocks, never raises."""

    def __init__(self, group: str, dispatcher: TraceDispatcher) -> None:
        self._group, self._dispatcher = group, dispatcher

    def polled(self, topic: str, found: Sized) -> None:
        """Record messages of `topic` that a poll returns now: a list of messages, or an Arrow table."""
        if len(found) and topic != self._dispatcher.topic:
            self._dispatcher.put(Polled(self._group, found, len(found), now_ms()))

    def begun(self, topic: str, calls: TracedCalls) -> None:
        """Record a listener's calls that begin now."""
        if topic != self._dispatcher.topic:
            self._dispatcher.put(Begun(self._group, calls, now_ms()))

    def done(
        self, topic: str, calls: TracedCalls, ended: Sequence[int], failed: Mapping[int, ContextCode], took_ms: float
    ) -> None:
        """Record the end of these calls, which took `took_ms` altogether. `ended`: the indices of calls that were made.
        `failed`: the failed calls among them. The caller must not change both arguments later."""
        if topic != self._dispatcher.topic:
            self._dispatcher.put(Done(self._group, calls, ended, failed, took_ms, now_ms()))

    def close(self) -> None:
        """Send the recorded contexts, for a bounded time."""
        self._dispatcher.close()
