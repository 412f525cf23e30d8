"""Sends trace records to the trace topic, without delaying the program's own work.

    Producer, TransactionProducer, PullConsumer, Listener ──▶ put: a TraceContext, into a bounded buffer
        ──▶ one thread: the records as text (raymq.telemetry.trace.records) ──▶ messages of the trace topic

A context stands for all messages of a batch, a poll or a task. Adding a context costs one append to a list; the
dispatcher's thread formats the text. If the buffer is full or contexts cannot be sent, contexts are dropped and
counted, because tracing must never prevent the delivery of a message. The thread uses at most SHARE of a processor. So
a program that sends more messages than this thread can trace keeps its speed, and loses part of its trace.

The body of a trace message has records of up to TRACE_TEXT_MAX characters. The keys of a trace message are the ids and
keys of the traced messages (spec/features.md §6). Unsent records are lost if the process ends; `close` waits for them,
for a bounded time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.message import SystemMessage
from raymq.common.names import TRACE_TOPIC
from raymq.common.parallel import start_daemon

CONTEXTS_MAX: Final = 2048
"""Maximum number of trace contexts that wait to be sent, as in RocketMQ's buffer."""
TRACED_MESSAGES_MAX: Final = 65_536
"""Maximum number of messages in the trace contexts that wait to be sent. Each context keeps its messages in
memory."""
TRACE_TEXT_MAX: Final = 128_000
"""Approximate maximum number of characters in the records of one trace message, as in RocketMQ."""
TRACE_KEYS_MAX: Final = 24_000
"""Approximate maximum number of characters in the keys of one trace message. All properties of a message together have
at most 32,767 bytes."""
DISPATCH_INTERVAL_S: Final = 1.0
"""Seconds for which trace contexts accumulate before they are sent, unless the buffer is half full earlier. RocketMQ's
interval is 5 s."""
SHARE: Final = 0.05
"""Maximum share of a processor that the trace dispatcher's thread uses."""
TRACE_CLOSE_TIMEOUT_S: Final = 5.0
TRACE_SEND_TIMEOUT_S: Final = 5.0
TRACE_PRODUCER_GROUP: Final = "_INNER_TRACE_PRODUCER"

logger = logging.getLogger(__name__)


class TraceLine(NamedTuple):
    """A trace record as text, and the keys by which queries find the record."""

    text: str
    keys: Iterable[str]


class TraceContext(Protocol):
    """A traced event that concerns `count` messages. The dispatcher's thread calls `lines` to get the trace
    records."""

    @property
    def count(self) -> int: ...

    def lines(self) -> Iterable[TraceLine]: ...


class TraceStatistics(Struct, frozen=True):
    """Counts of traced messages since the dispatcher's start. `sent`: messages whose records are stored. `dropped`:
    messages that were not traced because the buffer was full. `failed`: messages whose records could not be sent;
    `last_error` is the last reason."""

    sent: int = 0
    dropped: int = 0
    failed: int = 0
    last_error: str = ""


class TraceProducer(Protocol):
    """A producer that sends trace messages (raymq.client.producer.producer.Producer)."""

    def send(self, message: SystemMessage, *, timeout_s: float | None = None) -> object:
        """Send a message and wait until it is stored, for at most `timeout_s`; None stands for the producer's own
        timeout. Raises RaymqError if the send fails."""

    def close(self) -> None:
        """Release the resources of the producer of trace messages."""


class TraceDispatcher:
    """Collects trace contexts of one process or client, and sends their records. Thread-safe.

    `connect` creates the producer; the dispatcher's thread calls it when it sends the first records. `share`: the
    maximum share of a processor that the thread uses, greater than 0 and at most 1.
    """

    def __init__(self, connect: Callable[[], TraceProducer], topic: str = TRACE_TOPIC, *, share: float = SHARE) -> None:
        self.topic = topic
        self._connect = connect
        self._share = share
        self._changed = threading.Condition()
        """Condition that guards the buffer of trace contexts and the counters."""
        self._contexts: deque[TraceContext] = deque()
        self._messages = 0
        """Number of messages in the trace contexts that wait to be sent."""
        self._thread: threading.Thread | None = None
        self._closing = False
        self._sent = self._dropped = self._failed = 0
        self._last_error = ""

    def put(self, context: TraceContext) -> None:
        """Add a trace context to the buffer. Never blocks, and never raises."""
        with self._changed:
            if self._closing or len(self._contexts) >= CONTEXTS_MAX or self._messages >= TRACED_MESSAGES_MAX:
                self._dropped += context.count
                return
            self._contexts.append(context)
            self._messages += context.count
            if len(self._contexts) in (1, CONTEXTS_MAX // 2):
                self._changed.notify_all()
            self._start_locked()

    def close(self, timeout_s: float = TRACE_CLOSE_TIMEOUT_S) -> None:
        """Refuse further trace contexts, and send the waiting contexts for at most `timeout_s`. Repeated calls are
        harmless.

        If no thread can be started, as at the exit of Python 3.12, the calling thread sends the contexts. After
        `timeout_s`, it counts the remaining contexts as failed.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._contexts:
                self._start_locked()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        else:
            self._run(time.monotonic() + timeout_s)

    def statistics(self) -> TraceStatistics:
        """Return the numbers of messages whose trace records were sent, dropped, or could not be sent."""
        with self._changed:
            return TraceStatistics(self._sent, self._dropped, self._failed, self._last_error)

    def _start_locked(self) -> None:
        """Start the dispatcher's thread if it does not run. If no thread can be started, the next `put` tries again,
        and `close` sends the contexts itself."""
        if self._thread is None:
            try:
                self._thread = start_daemon(self._run, name="trace")
            except RuntimeError as error:
                logger.debug("the trace thread cannot be started now: %s", error)

    def _run(self, until_s: float = math.inf) -> None:
        """Send the contexts until the dispatcher is closed and none is left. `until_s`: monotonic time after which
        nothing is sent."""
        producer: TraceProducer | None = None
        rest_s = 0.0
        while contexts := self._take(rest_s):
            began_s = time.thread_time()
            try:
                producer = producer or self._connect()
                for message, count in self._messages_of(contexts):
                    self._send(producer, message, count, until_s)
            # a bug in tracing, or a lost connection, must not affect the program's own messages
            except Exception as error:
                logger.warning("some trace messages are lost: %s", error)
                self._note(0, sum(context.count for context in contexts), error)
            rest_s = (time.thread_time() - began_s) * (1 / self._share - 1)
        if producer is not None:
            producer.close()

    def _take(self, rest_s: float) -> list[TraceContext]:
        """Wait for trace contexts, and return them. First waits `rest_s`, which limits the thread's processor time, and
        then until contexts have accumulated. Returns an empty list if the dispatcher is closed and no contexts are
        left."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, rest_s)
            self._changed.wait_for(lambda: self._closing or self._is_half_full(), DISPATCH_INTERVAL_S)
            self._changed.wait_for(lambda: self._closing or self._contexts)
            taken = list(self._contexts)
            self._contexts.clear()
            self._messages = 0
            return taken

    def _is_half_full(self) -> bool:
        return len(self._contexts) >= CONTEXTS_MAX // 2

    def _messages_of(self, contexts: Iterable[TraceContext]) -> Iterator[tuple[SystemMessage, int]]:
        """Pack the records of all trace contexts into trace messages. Yields each trace message with the number of its
        records."""
        texts: list[str] = []
        keys: dict[str, None] = {}
        size = keys_size = 0
        for context in contexts:
            for text, found in context.lines():
                texts.append(text)
                size += len(text)
                for key in found:
                    if key and key not in keys:
                        keys[key] = None
                        keys_size += len(key) + 1
                if size >= TRACE_TEXT_MAX or keys_size >= TRACE_KEYS_MAX:
                    yield self._message(texts, keys), len(texts)
                    texts, keys, size, keys_size = [], {}, 0, 0
        if texts:
            yield self._message(texts, keys), len(texts)

    def _message(self, texts: Iterable[str], keys: Iterable[str]) -> SystemMessage:
        return SystemMessage(self.topic, "".join(texts).encode(errors="replace"), keys=tuple(keys))

    def _send(self, producer: TraceProducer, message: SystemMessage, count: int, until_s: float) -> None:
        left_s = until_s - time.monotonic()
        try:
            if left_s <= 0:
                raise ServiceNotAvailableError("the close of the trace took too long to send this record")
            producer.send(message, timeout_s=None if left_s == math.inf else left_s)
        except RaymqError as error:
            self._note(0, count, error)
        else:
            self._note(count, 0, None)

    def _note(self, sent: int, failed: int, error: BaseException | None) -> None:
        with self._changed:
            self._sent += sent
            self._failed += failed
            if error is not None:
                self._last_error = str(error) or repr(error)
