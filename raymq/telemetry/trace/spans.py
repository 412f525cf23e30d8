"""OpenTelemetry spans around sends, polls and listener calls. Messages carry the spans' context.

    send T      PRODUCER   a message; the properties `traceparent`, `tracestate` and `baggage` carry its context
                CLIENT     several messages sent together: one span, one context for all of them
    receive T   CLIENT     a poll, with links to the contexts of its messages
    settle T    CLIENT     a commit of a pull consumer: only if the logger raymq.trace is at DEBUG
    process T   CONSUMER   a listener call: the child of its message's context, or with links to several contexts

A client has spans if its process sets a tracer provider before the client connects. A listener has spans if its process
sets a tracer provider before the listener is loaded. `spans_if_set` checks this once. In a process without spans, each
call costs one comparison. The module imports OpenTelemetry only if the program has imported it. Retries, dead letters
and replays keep a message's properties, and so its context. The context of a Java client's message, in the property
TRACE_CONTEXT, is also read: by consumers, and by a gateway that sends the message.

Names and attributes follow OpenTelemetry's conventions for messaging. They are written as literals in this module
because the conventions are still changing (spec/ecosystem.md §2d).
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from raymq.common.errors import MessageIllegalError
from raymq.common.message import USUAL_PROPERTIES_BYTES, Message, MessageExt, SendResult, with_added_properties
from raymq.records.format.encode import own_properties
from raymq.records.kernels.byte_column import ByteColumn, mask_of
from raymq.records.kernels.message_columns import MessageColumns

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, Tracer

LINKS_MAX: Final = 128
"""Maximum number of links of a span. OpenTelemetry's default limit is the same."""
CARRIED: Final = ("traceparent", "tracestate", "baggage")
"""The message properties that carry a span's context."""
_CARRIED_NAMES: Final = frozenset(CARRIED)
JAVA_CONTEXT: Final = "TRACE_CONTEXT"
"""The message property in which some Java clients store the value of `traceparent`."""
_SYSTEM: Final = {"messaging.system": "rocketmq"}
_LIGHT_OFFSET_BYTES: Final = 21
"""Maximum size in bytes of the offset that a store adds to a record's properties for each light queue."""

_settles: Final = logging.getLogger("raymq.trace")
"""Logger whose level controls whether commits have spans. Commits have spans only if the level is DEBUG. By default
commits have no spans, because a program may commit at each poll, and such spans contain little information."""


def spans_if_set() -> Spans | None:
    """Return the object that creates this process's spans; None if the process has no tracer provider."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return Spans(provider.get_tracer("raymq"))


class Spans:
    """Creates the spans of one client or listener. Thread-safe."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    # Methods that create the spans of sends

    def send_begins(self, group: str, messages: Sequence[Message]) -> tuple[Sequence[Message], SendSpan | None]:
        """Start the span of a send of messages to one topic. Returns the messages with the span's context in their
        properties, and the span. If the span is not recorded, returns the unchanged messages and None.

        A gateway sends messages of its clients, which may have the client's context in the property TRACE_CONTEXT: the
        span is the child of this context, or is linked to the contexts of several messages.
        """
        from opentelemetry import propagate, trace

        topic, count = messages[0].topic, len(messages)
        kind = trace.SpanKind.PRODUCER if count == 1 else trace.SpanKind.CLIENT
        attributes = {**_attributes("send", "send", topic), "messaging.rocketmq.client_group": group}
        own = (
            [] if isinstance(messages, MessageColumns) else [one for one in messages if JAVA_CONTEXT in one.properties]
        )
        parent = _context_of(messages[0]) if own and count == 1 else None
        links = _links(own) if count > 1 else []
        span = self._tracer.start_span(f"send {topic}", context=parent, kind=kind, attributes=attributes, links=links)
        if not span.is_recording():
            return messages, None
        if count == 1:
            span.set_attributes(_of_message(messages[0]))
        else:
            span.set_attribute("messaging.batch.message_count", count)
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        return _with_context(messages, _legal(carrier)), SendSpan(span, count)

    # Methods that create the spans of polls, commits and listener calls

    def received(self, group: str, topic: str, found: Any, began_ns: int) -> None:
        """Record the span of a poll that began at `began_ns`, in ns since 1970. `found`: the messages of `topic` that
        the poll returned, as a list or as a table. The messages of a table are only counted."""
        from opentelemetry import trace

        messages = found if isinstance(found, list) else []
        span = self._tracer.start_span(
            f"receive {topic}",
            kind=trace.SpanKind.CLIENT,
            attributes={
                **_attributes("receive", "receive", topic),
                "messaging.consumer.group.name": group,
                "messaging.batch.message_count": len(found),
            },
            links=_links(messages),
            start_time=began_ns,
        )
        span.end()

    def settled(self, group: str, topics: Iterable[str], began_ns: int) -> None:
        """Record the span of a durable commit of a group's offsets in `topics`. The commit began at `began_ns`, in ns
        since 1970. Does nothing unless the logger raymq.trace is at DEBUG."""
        if not _settles.isEnabledFor(logging.DEBUG):
            return
        from opentelemetry import trace

        for topic in topics:
            attributes = {**_attributes("settle", "settle", topic), "messaging.consumer.group.name": group}
            self._tracer.start_span(
                f"settle {topic}", kind=trace.SpanKind.CLIENT, attributes=attributes, start_time=began_ns
            ).end()

    def process_begins(self, group: str, messages: Sequence[MessageExt]) -> Processing:
        """Begin the span of a listener call with `messages` (at least one), and make it the current span."""
        from opentelemetry import context as contexts, trace

        first, count = messages[0], len(messages)
        attributes: dict[str, Any] = {
            **_attributes("process", "process", first.topic),
            "messaging.consumer.group.name": group,
            "messaging.destination.partition.id": f"{first.broker_name}:{first.queue_id}",
        }
        links: list[Link] = []
        parent: Context | None = None
        if count == 1:
            attributes |= {
                **_of_message(first),
                "messaging.message.id": first.message_id,
                "raymq.queue_offset": first.queue_offset,
                "raymq.reconsume_times": first.reconsume_times,
            }
            parent = _context_of(first)
        else:
            attributes["messaging.batch.message_count"] = count
            links = _links(messages)
        span = self._tracer.start_span(
            f"process {first.topic}", context=parent, kind=trace.SpanKind.CONSUMER, attributes=attributes, links=links
        )
        return Processing(span, contexts.attach(trace.set_span_in_context(span, parent)))


class Processing(Struct, eq=False):
    """The span of a listener call that is running, and the token that restores the previous context."""

    span: Span
    token: Any

    def end(self, error: str) -> None:
        """End the span of the listener call. The thread that began the span must call this method. `error`: the reason
        why the messages were not consumed; empty if they were consumed."""
        from opentelemetry import context as contexts

        contexts.detach(self.token)
        if error:
            _fail(self.span, error.rstrip().rpartition("\n")[2])
        self.span.end()


class SendSpan:
    """The span of one send of `count` messages. The span ends after all messages have succeeded or failed.
    Thread-safe."""

    def __init__(self, span: Span, count: int) -> None:
        self._span, self._left = span, count
        self._lock = threading.Lock()
        """Lock that guards the span, because the messages of one send may complete in several threads."""

    def fail(self, error: BaseException) -> None:
        """End the span of the send with an error, because the messages could not be passed to the sender. Does nothing
        if the span has ended."""
        with self._lock:
            if self._left > 0:
                self._left = 0
                self._failed(error)
                self._span.end()

    def ended(self, count: int, outcome: Any) -> None:
        """Record that `count` messages of the send have succeeded or failed. `outcome` is an exception, or an object
        whose method `results` returns the SendResults."""
        with self._lock:
            if self._left > 0:
                self._left -= count
                self._note(count, outcome)

    def _failed(self, error: BaseException) -> None:
        self._span.set_attribute("error.type", type(error).__name__)
        _fail(self._span, str(error))

    def _note(self, count: int, outcome: Any) -> None:
        if isinstance(outcome, BaseException):
            self._failed(outcome)
        elif count == 1 and self._left == 0:
            result: SendResult = outcome.results()[0]
            self._span.set_attributes(
                {
                    "messaging.message.id": result.message_id,
                    "messaging.destination.partition.id": f"{result.queue.broker_name}:{result.queue.queue_id}",
                    "raymq.queue_offset": result.queue_offset,
                }
            )
        if self._left <= 0:
            self._span.end()


def _fail(span: Span, description: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, description))


def _attributes(operation: str, kind: str, topic: str) -> dict[str, Any]:
    return {
        **_SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }


def _of_message(message: Message | MessageExt) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if isinstance(message, Message) or message.body_error is None:
        told["messaging.message.body.size"] = len(message.body)
    if message.tags is not None:
        told["messaging.rocketmq.message.tag"] = message.tags
    if message.keys:
        told["messaging.rocketmq.message.keys"] = list(message.keys)
    if isinstance(message, Message) and message.delay_level:
        told["messaging.rocketmq.message.delay_time_level"] = message.delay_level
    if isinstance(message, Message) and message.deliver_at_ms is not None:
        told["messaging.rocketmq.message.delivery_timestamp"] = message.deliver_at_ms
    return told


def _with_context(messages: Sequence[Message], carrier: Mapping[str, str]) -> Sequence[Message]:
    """Return the messages with the span context `carrier` added to their properties.

    A message stays unchanged if it already has a property with a name of the context, or if its properties leave no
    space for the context in a record.
    """
    if not carrier:
        return messages
    text = "".join(f"{name}\x01{value}\x02" for name, value in carrier.items()).encode()
    if isinstance(messages, MessageColumns):
        own = messages.properties
        if own is None:
            return replace(messages, properties=ByteColumn.repeated(text, np.ones(len(messages), bool)))
        takes = (own.sizes + len(text) <= USUAL_PROPERTIES_BYTES) & ~_rows_with(own, carrier)
        return replace(messages, properties=ByteColumn.joined([own, ByteColumn.repeated(text, takes)]))
    return [
        with_added_properties(message, carrier) if _takes(message, carrier, len(text)) else message
        for message in messages
    ]


def _legal(carrier: Mapping[str, str]) -> Mapping[str, str]:
    """Return the entries of `carrier` that are valid message properties. OpenTelemetry's propagators have written a
    span context into `carrier`. A program may install any propagator, and its values must not break a record or make a
    send fail."""
    # Fast path: OpenTelemetry's own propagators use only the names in _CARRIED_NAMES. Their values are printable ASCII
    # and need no full check.
    if carrier.keys() <= _CARRIED_NAMES and all(
        isinstance(text, str) and text.isascii() and text.isprintable() and text.strip() for text in carrier.values()
    ):
        return carrier
    return {name: value for name, value in carrier.items() if _is_legal({name: value})}


def _is_legal(properties: Mapping[str, str]) -> bool:
    try:
        Message("context", b"-", properties=properties)
    except MessageIllegalError:
        return False
    return True


def _takes(message: Message, carrier: Mapping[str, str], size: int) -> bool:
    """Return True if the trace context `carrier` can be added to a message's properties: no property has one of its
    names, and the message has space for its `size` bytes."""
    if not carrier.keys().isdisjoint(message.properties):
        return False
    own_bytes = len(own_properties(message).encode()) + _LIGHT_OFFSET_BYTES * len(message.light_queues)
    return own_bytes + size <= USUAL_PROPERTIES_BYTES


def _rows_with(texts: ByteColumn, names: Collection[str]) -> NDArray[np.bool_]:
    """Return a mask of the rows of property texts that have a property with one of the names."""
    written = texts.data[texts.offsets[0] : texts.offsets[-1]].tobytes()
    if not any(f"{name}\x01".encode() in written for name in names):
        # Usually no property text contains any of `names`. One search in the bytes of all texts finds that out faster
        # than a regular expression on each row.
        return np.zeros(len(texts), np.bool_)
    import pyarrow.compute as pc  # imported only by processes with spans, because the import takes 0.06 s

    pattern = f"(?:^|\x02)(?:{'|'.join(map(re.escape, names))})\x01"
    return mask_of(pc.match_substring_regex(texts.array(), pattern))


def _context_of(message: Message | MessageExt) -> Context | None:
    """Return the span context from a message's properties; None if the properties contain none."""
    from opentelemetry import propagate

    properties = message.properties
    carrier = {name: properties[name] for name in CARRIED if name in properties}
    if CARRIED[0] not in carrier and JAVA_CONTEXT in properties:
        carrier[CARRIED[0]] = properties[JAVA_CONTEXT]
    return propagate.extract(carrier) if CARRIED[0] in carrier else None


def _links(messages: Iterable[Message | MessageExt]) -> list[Link]:
    """Return span links to the contexts of messages, for OpenTelemetry. Each context is linked once; the result has at
    most LINKS_MAX links."""
    from opentelemetry.trace import Link, get_current_span

    links: dict[int, Link] = {}
    for message in messages:
        context = _context_of(message)
        if context is None:
            continue
        found = get_current_span(context).get_span_context()
        if found.is_valid:
            links.setdefault(found.span_id, Link(found))
            if len(links) >= LINKS_MAX:
                break
    return list(links.values())


class SpanHook:
    """A ConsumeHook (raymq.client.consumer.push.hook) that creates a span for each listener call."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def before(self, context: Any) -> None:
        """Begin the span of a listener call."""
        context.properties[_HOOKED] = self._spans.process_begins(context.group, context.messages)

    def after(self, context: Any) -> None:
        """End the span of a listener call."""
        begun: Processing | None = context.properties.pop(_HOOKED, None)
        if begun is not None:
            begun.end("" if context.success else context.error or "the message was not consumed")


_HOOKED: Final = "raymq.telemetry.trace.spans"
