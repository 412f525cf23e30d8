"""Tests of TraceDispatcher. It sends trace contexts, drops contexts above its limit, and never raises an error to its
callers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import SystemMessage
from raymq.telemetry.trace.dispatcher import (
    CONTEXTS_MAX,
    TRACE_KEYS_MAX,
    TRACE_TEXT_MAX,
    TraceDispatcher,
    TraceLine,
    TraceProducer,
)

LONG_S = 20.0


class Lines:
    """Fake trace context that is encoded to the given lines."""

    def __init__(self, *lines: tuple[str, tuple[str, ...]]) -> None:
        self._lines = [TraceLine(*line) for line in lines]
        self.count = len(lines)

    def lines(self) -> Iterator[TraceLine]:
        yield from self._lines


class RecordingProducer:
    """Fake producer that keeps the sent messages, and fails while `error` is set."""

    def __init__(self) -> None:
        self.sent: list[SystemMessage] = []
        self.error: Exception | None = None
        self.closed = False

    def send(self, message: SystemMessage, *, timeout_s: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


def dispatcher(kept: RecordingProducer) -> TraceDispatcher:
    return TraceDispatcher(lambda: kept, share=1.0)


def test_contexts_that_gather_are_one_message_with_the_keys_of_all() -> None:
    kept = RecordingProducer()
    traces = dispatcher(kept)
    traces.put(Lines(("a", ("1", "k")), ("b", ("2", "k"))))
    traces.put(Lines(("c", ("3", ""))))
    traces.close(LONG_S)
    [message] = kept.sent
    assert (message.topic, message.body, message.keys) == ("RMQ_SYS_TRACE_TOPIC", b"abc", ("1", "k", "2", "3"))
    assert traces.statistics().sent == 3
    assert kept.closed


@pytest.mark.parametrize(
    ("text", "key", "count"),
    [("x" * 1000, "{}", 3 * TRACE_TEXT_MAX // 1000), ("x", "k" * 1000 + "{}", 3 * TRACE_KEYS_MAX // 1000)],
    ids=["text", "keys"],
)
def test_a_trace_message_is_bounded(text: str, key: str, count: int) -> None:
    kept = RecordingProducer()
    traces = dispatcher(kept)
    traces.put(Lines(*((text, (key.format(number),)) for number in range(count))))
    traces.close(LONG_S)
    assert len(kept.sent) >= 3
    assert sum(len(message.keys) for message in kept.sent) == count
    for message in kept.sent:
        assert len(message.body) < TRACE_TEXT_MAX + 1001
        assert sum(len(key) for key in message.keys) < TRACE_KEYS_MAX + 1010


def test_records_that_find_the_buffer_full_are_dropped_and_counted() -> None:
    entered, may_go = threading.Event(), threading.Event()
    kept = RecordingProducer()

    def connect() -> TraceProducer:
        entered.set()
        assert may_go.wait(LONG_S)
        return kept

    traces = TraceDispatcher(connect, share=1.0)
    traces.put(Lines(("first", ())))
    assert entered.wait(LONG_S)
    for _ in range(CONTEXTS_MAX + 5):
        traces.put(Lines(("x", ()), ("y", ())))
    assert traces.statistics().dropped == 10
    may_go.set()
    traces.close(LONG_S)
    assert traces.statistics().sent == 1 + 2 * CONTEXTS_MAX


def test_a_failure_is_counted_and_the_next_records_are_sent() -> None:
    kept = RecordingProducer()
    kept.error = ServiceNotAvailableError("the broker is away")
    traces = dispatcher(kept)
    failed = threading.Event()

    class Watched(Lines):
        def lines(self) -> Iterator[TraceLine]:
            yield from super().lines()
            failed.set()

    traces.put(Watched(("lost", ())))
    assert failed.wait(LONG_S)
    while not traces.statistics().failed:
        failed.wait(0.01)
    kept.error = None
    traces.put(Lines(("sent", ())))
    traces.close(LONG_S)
    assert [message.body for message in kept.sent] == [b"sent"]
    statistics = traces.statistics()
    assert (statistics.sent, statistics.failed, statistics.last_error) == (1, 1, "the broker is away")


def test_without_a_connection_nothing_is_raised() -> None:
    def connect() -> TraceProducer:
        raise ServiceNotAvailableError("no NameServer")

    traces = TraceDispatcher(connect, share=1.0)
    traces.put(Lines(("x", ())))
    traces.close(LONG_S)
    assert (traces.statistics().failed, traces.statistics().last_error) == (1, "no NameServer")


def test_nothing_is_taken_after_the_end() -> None:
    kept = RecordingProducer()
    traces = dispatcher(kept)
    traces.close(LONG_S)
    traces.put(Lines(("x", ())))
    assert (kept.sent, traces.statistics().dropped) == ([], 1)
