"""Tests of the figures of a gateway's calls: codes, messages, streams, and their report as metrics."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from raymq.gateway.calls import AnswerStream, BothStreams, CallContext, Handlers, StreamRefusedError, UnaryCall
from raymq.gateway.clients.connected_clients import ConnectedClients
from raymq.gateway.service.measured_calls import CallFigures, measured
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import ClientType, Code, Language
from raymq.telemetry.metrics.reporter import Reporter
from tests.support.metrics.fake_ray import FakeMetrics

CALL = CallContext()


def status(code: int) -> wire.Status:
    return wire.Status(code=code, message="text")


def answering(answer: bytes) -> UnaryCall:
    async def handle(call: CallContext, data: bytes) -> bytes:
        return answer

    return UnaryCall(handle)


def test_an_answer_at_once_is_counted_and_a_call_that_waits_is_counted_once() -> None:
    answer = wire.HeartbeatResponse(status=status(Code.FORBIDDEN)).SerializeToString()
    figures = CallFigures()
    slow = answering(answer)
    handlers = measured({"/s/Heartbeat": UnaryCall(slow.handle, lambda call, data: answer if data else None)}, figures)
    heartbeat = handlers["/s/Heartbeat"]
    assert isinstance(heartbeat, UnaryCall)
    assert heartbeat.at_once is not None
    assert heartbeat.at_once(CALL, b"") is None
    assert not figures.calls
    assert heartbeat.at_once(CALL, b"x") == answer
    assert figures.calls == {("Heartbeat", "FORBIDDEN"): 1}
    assert figures.times["Heartbeat"].figures()


class Unhurried:
    """A handler that waits until it is cancelled."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()

    async def handle(self, call: CallContext, data: bytes) -> bytes:
        self.entered.set()
        await asyncio.Event().wait()
        return b""


async def received(call: CallContext, data: bytes) -> AsyncGenerator[bytes, None]:
    yield wire.ReceiveMessageResponse(status=status(Code.OK)).SerializeToString()
    for number in range(int(data)):
        yield wire.ReceiveMessageResponse(message=wire.Message(body=b"%d" % number)).SerializeToString()
    yield wire.ReceiveMessageResponse(delivery_timestamp={"seconds": 1}).SerializeToString()


async def telemetry(call: CallContext, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for request in requests:
        if request == b"refuse":
            raise StreamRefusedError("no such thing")
        if request == b"break":
            raise KeyError("a fault")
        yield request


async def each(*requests: bytes) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


def acks(*codes: int) -> bytes:
    entries = [wire.AckMessageResultEntry(status=status(code)) for code in codes]
    return wire.AckMessageResponse(status=status(Code.MULTIPLE_RESULTS), entries=entries).SerializeToString()


def table(figures: CallFigures, **handlers: Any) -> Handlers:
    return measured({f"/apache.rocketmq.v2.MessagingService/{name}": one for name, one in handlers.items()}, figures)


async def call(handlers: Handlers, data: bytes = b"") -> bytes:
    [handler] = handlers.values()
    assert isinstance(handler, UnaryCall)
    return await handler.handle(CALL, data)


def test_calls_are_counted_by_method_and_code_and_their_answers_stay_the_same() -> None:
    figures = CallFigures()
    answer = wire.SendMessageResponse(status=status(Code.TOPIC_NOT_FOUND)).SerializeToString()

    async def main() -> None:
        for _ in range(2):
            assert await call(table(figures, SendMessage=answering(answer))) == answer
        await call(table(figures, Heartbeat=answering(b"")))
        await call(table(figures, AckMessage=answering(acks(Code.OK, Code.INVALID_RECEIPT_HANDLE, Code.OK))))

    asyncio.run(main())
    assert figures.calls == {
        ("SendMessage", "TOPIC_NOT_FOUND"): 2,
        ("Heartbeat", "CODE_UNSPECIFIED"): 1,
        ("AckMessage", "MULTIPLE_RESULTS"): 1,
    }
    assert figures.acknowledged == 2
    assert sum(figures.times["SendMessage"].figures().counts) == 2


def test_a_call_whose_client_goes_is_cancelled() -> None:
    figures = CallFigures()

    async def main() -> None:
        unhurried = Unhurried()
        running = asyncio.ensure_future(call(table(figures, QueryRoute=UnaryCall(unhurried.handle))))
        await unhurried.entered.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert figures.calls == {("QueryRoute", "CANCELLED"): 1}


def test_received_messages_are_counted_once_they_are_written() -> None:
    figures = CallFigures()

    async def main() -> None:
        [handler] = table(figures, ReceiveMessage=AnswerStream(received)).values()
        assert isinstance(handler, AnswerStream)
        assert len([one async for one in handler.handle(CALL, b"3")]) == 5
        # the client goes after it got the status and one message
        async with aclosing(handler.handle(CALL, b"3")) as answers:
            for _ in range(3):
                await anext(answers)

    asyncio.run(main())
    assert figures.received == 4
    assert figures.calls == {("ReceiveMessage", "OK"): 1, ("ReceiveMessage", "CANCELLED"): 1}


def test_streams_end_with_a_code() -> None:
    figures = CallFigures()

    async def main() -> None:
        [handler] = table(figures, Telemetry=BothStreams(telemetry)).values()
        assert isinstance(handler, BothStreams)
        assert [one async for one in handler.handle(CALL, each(b"a", b"b"))] == [b"a", b"b"]
        for request, kind in ((b"refuse", StreamRefusedError), (b"break", KeyError)):
            with pytest.raises(kind):
                [one async for one in handler.handle(CALL, each(request))]

    asyncio.run(main())
    assert figures.calls == {("Telemetry", code): 1 for code in ("OK", "BAD_REQUEST", "INTERNAL_ERROR")}
    assert figures.times == {}


def test_the_figures_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_metrics = FakeMetrics()
    monkeypatch.setitem(sys.modules, "ray.util.metrics", ray_metrics.module())
    figures, clients = CallFigures(), ConnectedClients()
    for number, language in enumerate((Language.JAVA, Language.JAVA, Language.GOLANG, 77)):
        clients.active(f"client-{number}", 0.0, client_type=ClientType.PRODUCER, group="", language=language)
    clients.stream_opened("client-0")
    figures.received, figures.acknowledged, figures.renewed = 7, 5, 3

    async def main() -> None:
        answer = wire.HeartbeatResponse(status=status(Code.OK)).SerializeToString()
        await call(table(figures, Heartbeat=answering(answer)))
        await figures.measured_sleep(0)

    asyncio.run(main())
    Reporter("c").report(lambda reporter: figures.report(reporter, clients))
    assert ray_metrics.value("raymq_gateway_calls", rpc="Heartbeat", code="OK") == 1
    assert ray_metrics.value("raymq_gateway_call_time_milliseconds_count", rpc="Heartbeat") == 1
    assert ray_metrics.value("raymq_gateway_loop_lag_milliseconds_count") == 1
    assert ray_metrics.value("raymq_gateway_clients", language="JAVA") == 2
    assert ray_metrics.value("raymq_gateway_clients", language="77") == 1
    assert ray_metrics.value("raymq_gateway_streams") == 1
    figures_of = {"received_messages": 7, "acknowledged_messages": 5, "renewed_leases": 3}
    assert {name: ray_metrics.value(f"raymq_gateway_{name}") for name in figures_of} == figures_of
