"""SendObserver: what watches the sends of a producer. Metrics, the trace, spans and the user's hooks are one list.

    begin ──► selected ──► put ──► sent, or failed
      │          │                    once per batch, when it ends: metrics and trace
      │          └ hooks: check_forbidden, before_send ──► after_send
      └ spans: start, and a context in each message ─────► end

The pipeline (raymq.client.producer.pipeline) calls `begin` and the methods of the SendWatch that `begin` returns. The
sender calls `sent` or `failed` for each batch that ends. A new observer overrides the methods that it needs; all others
do nothing. No observer may block. An observer that fails must catch its own exceptions; only `SendWatch.selected` may
raise, and then nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raymq.client.producer.results import BeforeEnd, Outcome
from raymq.common.message import Message, MessageExt, MessageQueue, SendResult
from raymq.common.parallel import aside
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES
from raymq.telemetry.trace.contexts import Sent, ended_transaction, now_ms, recalled
from raymq.telemetry.trace.dispatcher import TraceDispatcher
from raymq.telemetry.trace.spans import SendSpan, Spans


class SendWatch:
    """One observer's watch over the messages of one send, from `SendObserver.begin` until each message has ended."""

    def selected(self, messages: Sequence[Message], queue: MessageQueue) -> None:
        """Take note that `messages` will be put into `queue`. An exception refuses the send; the caller gets it."""

    def ended(self, indices: Sequence[int], outcome: Outcome) -> None:
        """Take note of the outcome of the messages with these indices. Several threads may call this method."""

    def abandoned(self, error: BaseException) -> None:
        """Take note that the send failed with `error` before its messages had a queue, or that it was cancelled."""


class SendObserver:
    """Watches the sends of one producer. Thread-safe. Each method of this base class does nothing."""

    watches = False
    """True if `begin` has to see each send. A message of such a producer joins no open batch and takes no single
    turn."""
    needs_objects = False
    """True if the observer needs each message of `send_batch` as a Message, not as a row of MessageColumns."""

    def begin(self, messages: Sequence[Message]) -> tuple[Sequence[Message], SendWatch | None]:
        """Begin to watch a send of these messages of one topic. Returns the messages to send instead, and the watch."""
        return messages, None

    def sent(
        self, topic: str, messages: Sequence[Message], results: Callable[[], Sequence[SendResult]], took_ms: float
    ) -> None:
        """Take note that messages are stored in `topic`, `took_ms` after the first of them was handed over. `results`
        makes their SendResults."""

    def failed(self, topic: str, count: int, took_ms: float) -> None:
        """Take note that `count` messages to `topic` failed, `took_ms` after the first of them was handed over."""

    def recalled(self, topic: str, message_id: str, *, success: bool) -> None:
        """Take note that a delayed message was recalled, or could not be recalled."""

    def transaction_ended(
        self,
        topic: str,
        message: Message | MessageExt,
        message_id: str,
        offset_message_id: str,
        state: str,
        *,
        from_check: bool = False,
    ) -> None:
        """Take note that the transaction of `message` ended with `state`. Both ids are those of its half message.
        `from_check`: the broker had asked for the outcome."""


class SendFigures(SendObserver):
    """Counts each message once for the metrics of this process, by topic and success."""

    def sent(
        self, topic: str, messages: Sequence[Message], results: Callable[[], Sequence[SendResult]], took_ms: float
    ) -> None:
        """Count stored messages."""
        CLIENT_FIGURES.sent(topic, took_ms, len(messages), ok=True)

    def failed(self, topic: str, count: int, took_ms: float) -> None:
        """Count failed messages."""
        CLIENT_FIGURES.sent(topic, took_ms, count, ok=False)


class SendTrace(SendObserver):
    """Records sends, ends of transactions and recalls of the producer group `group` for the client's trace."""

    def __init__(self, group: str, dispatcher: TraceDispatcher) -> None:
        self._group, self._dispatcher = group, dispatcher

    def sent(
        self, topic: str, messages: Sequence[Message], results: Callable[[], Sequence[SendResult]], took_ms: float
    ) -> None:
        """Record stored messages. The trace's own messages are not traced."""
        if topic != self._dispatcher.topic:
            # No signal handler may interrupt the dispatcher, whose lock is shared with its thread.
            aside(self._dispatcher.put, Sent(self._group, topic, messages, results, took_ms, now_ms()))

    def recalled(self, topic: str, message_id: str, *, success: bool) -> None:
        """Record a recall."""
        self._dispatcher.put(recalled(self._group, topic, message_id, success=success))

    def transaction_ended(
        self,
        topic: str,
        message: Message | MessageExt,
        message_id: str,
        offset_message_id: str,
        state: str,
        *,
        from_check: bool = False,
    ) -> None:
        """Record the end of a transaction."""
        self._dispatcher.put(
            ended_transaction(self._group, topic, message, message_id, offset_message_id, state, from_check=from_check)
        )


class SendSpans(SendObserver):
    """Makes an OpenTelemetry span of each send of the producer group `group`."""

    watches = True

    def __init__(self, group: str, spans: Spans) -> None:
        self._group, self._spans = group, spans

    def begin(self, messages: Sequence[Message]) -> tuple[Sequence[Message], SendWatch | None]:
        """Start a span. Returns the messages with the span's context; no watch if the span is not recorded."""
        messages, span = self._spans.send_begins(self._group, messages)
        return messages, None if span is None else _SpanWatch(span)


class _SpanWatch(SendWatch):
    """Ends a span when all messages of its send have ended."""

    def __init__(self, span: SendSpan) -> None:
        self._span = span

    def ended(self, indices: Sequence[int], outcome: Outcome) -> None:
        """Record the outcome."""
        self._span.ended(len(indices), outcome)

    def abandoned(self, error: BaseException) -> None:
        """End the span with an error, unless it has ended."""
        self._span.fail(error)


class _WatchedPart:
    """Calls the watches of a send, then the sender's own `then`, when messages of one part of the send end."""

    def __init__(self, watches: Sequence[SendWatch], indices: Sequence[int], then: BeforeEnd | None) -> None:
        self._watches, self._indices, self._then = watches, indices, then

    def __call__(self, first: int, end: int, outcome: Outcome) -> None:
        for watch in self._watches:
            watch.ended(self._indices[first:end], outcome)
        if self._then is not None:
            self._then(first, end, outcome)


def before_end(watches: Sequence[SendWatch], indices: Sequence[int], then: BeforeEnd | None) -> BeforeEnd | None:
    """Return the function for a Completion of the messages with these indices of one send; None if nobody needs it."""
    return _WatchedPart(watches, indices, then) if watches else then
