"""Counts and times the calls of a gateway, for metrics, without touching the calls: it wraps their handlers.

All answers of the protocol have the status as field 1. So one small message reads the code of every answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final

from raymq.gateway.calls import AnswerStream, BothStreams, CallContext, Handlers, StreamRefusedError, UnaryCall
from raymq.gateway.clients.connected_clients import ConnectedClients
from raymq.gateway.wire.enums import Code, Language
from raymq.gateway.wire.messages import AckMessageResponse, HeartbeatResponse
from raymq.telemetry.metrics.histogram import Histogram
from raymq.telemetry.metrics.reporter import Reporter

ACK: Final = "AckMessage"
CANCELLED: Final = "CANCELLED"
"""The code of a call whose client did not wait for the answer."""
_MESSAGE_FIELD: Final = b"\x12"
"""The first byte of an answer to a receive that has a message: field 2, with a length."""


class CallFigures:
    """The figures of the calls of one gateway process since its start. The event loop counts, and any thread may
    report."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """Number of ended calls, by method and code."""
        self.received = self.acknowledged = self.renewed = 0
        self.times: dict[str, Histogram] = {}
        """The time in ms from a call to the end of its answer, by method. Streams without an end are left out."""
        self.lag = Histogram("raymq_gateway_loop_lag_milliseconds")

    def ended(self, method: str, code: str, started_s: float) -> None:
        """Count a call that began at `started_s`, by `time.monotonic`."""
        self.calls[method, code] += 1
        times = self.times.get(method)
        if times is None:
            times = self.times[method] = Histogram("raymq_gateway_call_time_milliseconds")
        times.add((time.monotonic() - started_s) * 1000)

    async def measured_sleep(self, delay_s: float) -> None:
        """Sleep for `delay_s`, and add the time by which the event loop wakes up late to the figures."""
        loop = asyncio.get_running_loop()
        wanted_s = loop.time() + delay_s
        await asyncio.sleep(delay_s)
        self.lag.add(max(loop.time() - wanted_s, 0.0) * 1000)

    def report(self, reporter: Reporter, clients: ConnectedClients) -> None:
        """Report the figures, and the clients of the process."""
        for (method, code), total in self.calls.copy().items():
            reporter.count("raymq_gateway_calls", total, rpc=method, code=code)
        for method, times in self.times.copy().items():
            reporter.buckets("raymq_gateway_call_time_milliseconds", times.figures(), rpc=method)
        reporter.buckets("raymq_gateway_loop_lag_milliseconds", self.lag.figures())
        reporter.count("raymq_gateway_received_messages", self.received)
        reporter.count("raymq_gateway_acknowledged_messages", self.acknowledged)
        reporter.count("raymq_gateway_renewed_leases", self.renewed)
        reporter.gauge("raymq_gateway_streams", clients.streams())
        for number, count in clients.by_language().items():
            reporter.gauge("raymq_gateway_clients", count, language=language_name(number))


def language_name(number: int) -> str:
    """Return the name of a language of the protocol; the number as text if the protocol has no such language."""
    try:
        return Language(number).name
    except ValueError:
        return str(number)


def measured(handlers: Handlers, figures: CallFigures) -> Handlers:
    """Return handlers that do the same, and count their calls in `figures`."""
    return {path: _measured(path.rpartition("/")[2], handler, figures) for path, handler in handlers.items()}


def _measured(
    method: str, handler: UnaryCall | AnswerStream | BothStreams, figures: CallFigures
) -> UnaryCall | AnswerStream | BothStreams:
    if isinstance(handler, UnaryCall):
        return _unary(method, handler, figures)
    if isinstance(handler, AnswerStream):
        return _answers(method, handler, figures)
    return _both(method, handler, figures)


def _unary(method: str, handler: UnaryCall, figures: CallFigures) -> UnaryCall:
    async def handle(call: CallContext, data: bytes) -> bytes:
        started_s, code = time.monotonic(), CANCELLED
        try:
            answer = await handler.handle(call, data)
            code = _code(answer)
            if method == ACK:
                figures.acknowledged += _acknowledged(answer)
            return answer
        finally:
            figures.ended(method, code, started_s)

    at_once = handler.at_once
    if at_once is None:
        return UnaryCall(handle)

    def answer_at_once(call: CallContext, data: bytes) -> bytes | None:
        started_s = time.monotonic()
        answer = at_once(call, data)
        if answer is not None:
            figures.ended(method, _code(answer), started_s)
        return answer

    return UnaryCall(handle, answer_at_once)


def _answers(method: str, handler: AnswerStream, figures: CallFigures) -> AnswerStream:
    async def handle(call: CallContext, data: bytes) -> AsyncGenerator[bytes, None]:
        started_s, code, begun = time.monotonic(), CANCELLED, ""
        try:
            async with aclosing(handler.handle(call, data)) as answers:
                async for answer in answers:
                    begun = begun or _code(answer)
                    yield answer
                    # after the answer was written
                    figures.received += answer.startswith(_MESSAGE_FIELD)
            code = begun
        finally:
            figures.ended(method, code, started_s)

    return AnswerStream(handle)


def _both(method: str, handler: BothStreams, figures: CallFigures) -> BothStreams:
    async def handle(call: CallContext, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        code = CANCELLED
        try:
            async with aclosing(handler.handle(call, requests)) as answers:
                async for answer in answers:
                    yield answer
            code = Code.OK.name
        except StreamRefusedError:
            code = Code.BAD_REQUEST.name
            raise
        except Exception:
            code = Code.INTERNAL_ERROR.name
            raise
        finally:
            figures.calls[method, code] += 1

    return BothStreams(handle)


def _code(answer: bytes) -> str:
    number = HeartbeatResponse.FromString(answer).status.code
    try:
        return Code(number).name
    except ValueError:
        return str(number)


def _acknowledged(answer: bytes) -> int:
    return sum(entry.status.code == Code.OK for entry in AckMessageResponse.FromString(answer).entries)
