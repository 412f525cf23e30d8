"""Sends trace records to the trace topic, without delaying the program's own work.

    Producer, TransactionProducer, PullConsumer, Listener ──▶ put: a TraceContext, into a bounded buffer
        ──▶ one thread: the records as text (raymq.telemetry.trace.records) ──▶ messages of the trace topic

A context stands for all messages of a batch, a poll or a task. Adding it costs one append to a list; the thread formats
the text. Contexts are dropped and counted if the buffer is full or they cannot be sent: a trace must never cost a
message. The thread uses at most SHARE of a processor. So a program whose messages are too fast for the trace keeps its
speed, and loses part of its trace.

The body of a trace message has records of up to TRACE_TEXT_MAX characters. Its keys are the ids and keys of the
records' messages (spec/features.md §6). Unsent records are lost with the process; `close` waits for them, for a bounded
time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from raymq.common.errors import RaymqError
from raymq.common.message import SystemMessage
from raymq.common.names import TRACE_TOPIC

CONTEXTS_MAX: Final = 2048
"""The most waiting contexts, as in RocketMQ's buffer."""
TRACED_MESSAGES_MAX: Final = 65_536
"""The most messages in waiting contexts. Each context holds its messages in memory."""
TRACE_TEXT_MAX: Final = 128_000
"""The approximate limit of characters in a trace message's records, RocketMQ's limit."""
TRACE_KEYS_MAX: Final = 24_000
"""The approximate limit of characters in a trace message's keys. All properties of a message have at most 32,767
bytes."""
DISPATCH_INTERVAL_S: Final = 1.0
"""The time for which contexts accumulate, unless the buffer is half full earlier. RocketMQ's is 5 s."""
SHARE: Final = 0.05
"""The share of a processor that the thread may use."""
TRACE_CLOSE_TIMEOUT_S: Final = 5.0
TRACE_SEND_TIMEOUT_S: Final = 5.0
TRACE_PRODUCER_GROUP: Final = "_INNER_TRACE_PRODUCER"

logger = logging.getLogger(__name__)


class TraceLine(NamedTuple):
    """A record as text, and the keys under which the record is found."""

    text: str
    keys: Iterable[str]


class TraceContext(Protocol):
    """An event of `count` messages. The dispatcher's thread calls `lines`."""

    @property
    def count(self) -> int: ...

    def lines(self) -> Iterable[TraceLine]: ...


class TraceStatistics(Struct, frozen=True):
    """Numbers of messages since the dispatcher's start. `sent`: with stored records. `dropped`: the buffer was full.
    `failed`: the records could not be sent; `last_error` is the last reason."""

    sent: int = 0
    dropped: int = 0
    failed: int = 0
    last_error: str = ""


class TraceProducer(Protocol):
    """Sends trace messages (raymq.client.producer.producer.Producer)."""

    def send(self, message: SystemMessage) -> object:
        """Send a message and wait until it is stored. Raises RaymqError."""

    def close(self) -> None:
        """Release the producer's resources."""


class TraceDispatcher:
    """The trace of one process or client. Thread-safe.

    `connect` creates the producer when there are records to send; the dispatcher's thread calls it. `share`: the part
    of a processor that the thread may use, greater than 0 and at most 1.
    """

    def __init__(self, connect: Callable[[], TraceProducer], topic: str = TRACE_TOPIC, *, share: float = SHARE) -> None:
        self.topic = topic
        self._connect = connect
        self._share = share
        self._changed = threading.Condition()
        """Guards all fields below."""
        self._contexts: deque[TraceContext] = deque()
        self._messages = 0
        """The number of messages in waiting contexts."""
        self._thread: threading.Thread | None = None
        self._closing = False
        self._sent = self._dropped = self._failed = 0
        self._last_error = ""

    def put(self, context: TraceContext) -> None:
        """Add a context. Never blocks, and never raises."""
        with self._changed:
            if self._closing or len(self._contexts) >= CONTEXTS_MAX or self._messages >= TRACED_MESSAGES_MAX:
                self._dropped += context.count
                return
            self._contexts.append(context)
            self._messages += context.count
            if len(self._contexts) in (1, CONTEXTS_MAX // 2):
                self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float = TRACE_CLOSE_TIMEOUT_S) -> None:
        """Refuse further contexts, and send the waiting contexts for at most `timeout_s`. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def statistics(self) -> TraceStatistics:
        """Return the numbers of messages whose records were sent, dropped, or could not be sent."""
        with self._changed:
            return TraceStatistics(self._sent, self._dropped, self._failed, self._last_error)

    def _run(self) -> None:
        producer: TraceProducer | None = None
        rest_s = 0.0
        while contexts := self._take(rest_s):
            began_s = time.thread_time()
            try:
                producer = producer or self._connect()
                for message, count in self._messages_of(contexts):
                    self._send(producer, message, count)
            except Exception as error:  # a bug or a lost connection; the program's own messages must not suffer
                logger.warning("a part of the trace is lost: %s", error)
                self._note(0, sum(context.count for context in contexts), error)
            rest_s = (time.thread_time() - began_s) * (1 / self._share - 1)
        if producer is not None:
            producer.close()

    def _take(self, rest_s: float) -> list[TraceContext]:
        """Wait until contexts have accumulated and the thread has rested, and return them; empty at the end."""
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
        """Return the records of all contexts as messages, each with the number of its records."""
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

    def _send(self, producer: TraceProducer, message: SystemMessage, count: int) -> None:
        try:
            producer.send(message)
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
