"""Traces the messages that are delivered to one consumer, through the trace dispatcher of its process.

If tracing is disabled, the consumer has None instead of a DeliveryTrace. So disabled tracing costs one comparison per
poll or task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

from raymq.telemetry.trace.contexts import Begun, Done, Polled, TracedCalls, now_ms
from raymq.telemetry.trace.dispatcher import TraceDispatcher
from raymq.telemetry.trace.records import ContextCode


class DeliveryTrace:
    """Traces the messages that are delivered to a member of `group`. Thread-safe. The methods never block and never
    raise."""

    def __init__(self, group: str, dispatcher: TraceDispatcher) -> None:
        self._group, self._dispatcher = group, dispatcher

    def polled(self, topic: str, found: Sized) -> None:
        """Trace messages of `topic` that a poll is about to return: a list of messages, or an Arrow table."""
        if len(found) and topic != self._dispatcher.topic:
            self._dispatcher.put(Polled(self._group, found, len(found), now_ms()))

    def begun(self, topic: str, calls: TracedCalls) -> None:
        """Trace the beginning of the listener calls `calls` for messages of `topic`. The trace topic itself is not
        traced."""
        if topic != self._dispatcher.topic:
            self._dispatcher.put(Begun(self._group, calls, now_ms()))

    def done(
        self, topic: str, calls: TracedCalls, ended: Sequence[int], failed: Mapping[int, ContextCode], took_ms: float
    ) -> None:
        """Trace the end of a group of listener calls, which took `took_ms` in total. `ended`: the indices of the calls
        that were made. `failed`: the outcomes of failed calls. The caller must not change `ended` and `failed` after
        this call."""
        if topic != self._dispatcher.topic:
            self._dispatcher.put(Done(self._group, calls, ended, failed, took_ms, now_ms()))

    def close(self) -> None:
        """Send the recorded trace contexts that are not sent yet, and stop. Waits for a limited time."""
        self._dispatcher.close()
