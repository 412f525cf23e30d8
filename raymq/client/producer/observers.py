"""SendObserver: an interface for observers of a producer's sends. Metrics, the trace, spans and the user's hooks use
it.

    begin ──► selected ──► put ──► sent, or failed
      │          │                    once per batch, when it ends: metrics and trace
      │          └ hooks: check_forbidden, before_send ──► after_send
      └ spans: start, and a context in each message ─────► end

The pipeline (raymq.client.producer.pipeline) calls `begin` and the methods of the SendWatch that `begin` returns. The
sender calls `sent` or `failed` for each batch that completes. A new observer overrides the methods that it needs; the
base methods do nothing. No observer may block. An observer must catch its own exceptions. Only `SendWatch.selected` may
raise; the exception refuses the send.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from raymq.client.producer.results import BeforeEnd, Outcome
from raymq.common.message import Message, MessageExt, MessageQueue, SendResult
from raymq.common.parallel import aside, contained
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES
from raymq.telemetry.trace.contexts import Sent, ended_transaction, now_ms, recalled
from raymq.telemetry.trace.dispatcher import TraceDispatcher
from raymq.telemetry.trace.spans import SendSpan, Spans

OBSERVER_FAILED: Final = "an observer of sends raised an exception"

logger = logging.getLogger(__name__)


class SendWatch:
    """Follows the messages of one send for one observer. It is used from `SendObserver.begin` until each message has
    succeeded or failed."""

    def selected(self, messages: Sequence[Message], queue: MessageQueue) -> None:
        """Called before `messages` are put into `queue`. If it raises, the messages are not sent, and the caller of the
        send gets the exception."""

    def ended(self, indices: Sequence[int], outcome: Outcome) -> None:
        """Called when some messages of the send have an outcome. `indices`: the indices of these messages. Several
        threads may call this method."""

    def abandoned(self, error: BaseException) -> None:
        """Called if the send ended before a queue was selected: it was cancelled, or it failed with `error`."""


class SendObserver:
    """Base class of objects that observe the sends of one producer. Thread-safe. Each method of this base class does
    nothing."""

    watches = False
    """True if this observer's `begin` must be called for each send. The producer then uses no open batches and no
    single sends, because both shortcuts skip `begin`."""
    needs_objects = False
    """True if the observer needs each message of `send_batch` as a Message instead of a row of MessageColumns."""

    def begin(self, messages: Sequence[Message]) -> tuple[Sequence[Message], SendWatch | None]:
        """Begin to observe a send of messages of one topic. Returns the messages to send instead of the given messages,
        and the SendWatch of this send, or None."""
        return messages, None

    def sent(
        self, topic: str, messages: Sequence[Message], results: Callable[[], Sequence[SendResult]], took_ms: float
    ) -> None:
        """Called when messages are stored in `topic`. `results` is a function that returns their SendResults.
        `took_ms`: the time in milliseconds since the first of the messages was enqueued."""

    def failed(self, topic: str, count: int, took_ms: float) -> None:
        """Called when the sends of `count` messages to `topic` failed. `took_ms`: the time in milliseconds since the
        first of the messages was enqueued."""

    def recalled(self, topic: str, message_id: str, *, success: bool) -> None:
        """Record the result of a recall of a delayed message. `success`: True if the message was recalled. The producer
        calls this method after each recall."""

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
        """Called when the transaction of `message` ended with `state`. Both ids belong to the half message.
        `from_check`: True if the broker requested the outcome by a transaction check."""


class SendFigures(SendObserver):
    """Observer that counts each message once in the metrics of this process, by topic and by success or
    failure."""

    def sent(
        self, topic: str, messages: Sequence[Message], results: Callable[[], Sequence[SendResult]], took_ms: float
    ) -> None:
        """Count stored messages in the metrics."""
        CLIENT_FIGURES.sent(topic, took_ms, len(messages), ok=True)

    def failed(self, topic: str, count: int, took_ms: float) -> None:
        """Count failed messages in the metrics."""
        CLIENT_FIGURES.sent(topic, took_ms, count, ok=False)


class SendTrace(SendObserver):
    """Observer that records sends, ends of transactions and recalls in the client's trace. `group`: the producer group
    that the records name."""

    def __init__(self, group: str, dispatcher: TraceDispatcher) -> None:
        self._group, self._dispatcher = group, dispatcher

    def sent(
        self, topic: str, messages: Sequence[Message], results: Callable[[], Sequence[SendResult]], took_ms: float
    ) -> None:
        """Record stored messages in the trace. The trace's own messages are not recorded."""
        if topic != self._dispatcher.topic:
            # `put` holds the dispatcher's lock, which the dispatcher's thread needs too. `aside` prevents a signal
            # handler from interrupting `put` while it holds this lock.
            aside(self._dispatcher.put, Sent(self._group, topic, messages, results, took_ms, now_ms()))

    def recalled(self, topic: str, message_id: str, *, success: bool) -> None:
        """Record the recall of a delayed message in the trace."""
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
        """Record the end of a transaction in the trace."""
        self._dispatcher.put(
            ended_transaction(self._group, topic, message, message_id, offset_message_id, state, from_check=from_check)
        )


class SendSpans(SendObserver):
    """Observer that makes an OpenTelemetry span for each send. `group`: the producer group that the spans name."""

    watches = True

    def __init__(self, group: str, spans: Spans) -> None:
        self._group, self._spans = group, spans

    def begin(self, messages: Sequence[Message]) -> tuple[Sequence[Message], SendWatch | None]:
        """Start a trace span for a send. Returns the messages, which now carry the span's context, and a SendWatch,
        which ends the span. The SendWatch is None if the span is not recorded."""
        messages, span = self._spans.send_begins(self._group, messages)
        return messages, None if span is None else _SpanWatch(span)


class _SpanWatch(SendWatch):
    """Ends a span when all messages of its send have an outcome."""

    def __init__(self, span: SendSpan) -> None:
        self._span = span

    def ended(self, indices: Sequence[int], outcome: Outcome) -> None:
        """Record the outcome of messages in the span."""
        self._span.ended(len(indices), outcome)

    def abandoned(self, error: BaseException) -> None:
        """End the span with an error, unless it has already ended."""
        self._span.fail(error)


class _WatchedPart:
    """Callback that a Completion calls with the outcome of some messages of a send. It passes the outcome to the
    SendWatch objects that observe the send, and then to the sender's callback `then`."""

    def __init__(self, watches: Sequence[SendWatch], indices: Sequence[int], then: BeforeEnd | None) -> None:
        self._watches, self._indices, self._then = watches, indices, then

    def __call__(self, first: int, end: int, outcome: Outcome) -> None:
        raised: BaseException | None = None
        for watch in self._watches:
            raised = contained(logger, OBSERVER_FAILED, watch.ended, self._indices[first:end], outcome) or raised
        if self._then is not None:
            self._then(first, end, outcome)
        if raised is not None:
            raise raised


def before_end(watches: Sequence[SendWatch], indices: Sequence[int], then: BeforeEnd | None) -> BeforeEnd | None:
    """Return the function that a Completion calls just before it sets the outcome of some messages of a send.
    `indices`: the indices of these messages in the send. The function passes the outcome to the send's `watches`, and
    then to `then`. Without watches, returns `then`, which may be None."""
    return _WatchedPart(watches, indices, then) if watches else then
