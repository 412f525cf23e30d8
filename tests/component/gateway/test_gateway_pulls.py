"""Tests of pull consumers over gRPC: pulls at an offset, committed offsets, and offsets by position and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from raymq.common.errors import BodyUnreadableError
from raymq.common.message import MessageExt, MessageQueue
from raymq.gateway.convert.times import duration, timestamp
from raymq.gateway.service import pull_calls
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, FilterType, QueryOffsetPolicy
from tests.support.clients.fakes import FakeStore, topic_route
from tests.support.clients.producers import MakeProducer, producers_of_fakes
from tests.support.console.fake_cluster import fake_message
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import (
    ANSWER_S,
    METADATA,
    FakeGroups,
    FakeQueues,
    GatewayClient,
    gateway_of,
)

ORDERS, BILLING = wire.Resource(name="orders"), wire.Resource(name="billing")
QUEUE = wire.MessageQueue(topic=ORDERS, id=1, broker=wire.Broker(name="a"))
STORED = MessageQueue("orders", "a", 1)
Scenario = Callable[[GatewayClient], Awaitable[None]]


def message(offset: int, tags: str = "paid") -> MessageExt:
    return fake_message(
        "orders", b"%d" % offset, queue_offset=offset, queue_id=1, broker_name="a", tags=tags, at_ms=1000 + offset
    )


class Gateway:
    """A gateway on one queue, whose messages have the offsets 5 to 8."""

    def __init__(self, make: MakeProducer) -> None:
        self._make = make
        self.queues = FakeQueues(*(message(offset) for offset in range(5, 9)), first=5)

    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            producer = self._make(FakeStore(), route=topic_route(a=2), send_timeout_s=30.0)
            calls = lambda group, namespace: FakeGroupCalls(group)  # noqa: E731
            async with gateway_of(producer, FakeGroups(), calls, queues=self.queues) as client:
                await scenario(client)

        asyncio.run(main())


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with producers_of_fakes() as make:
        yield Gateway(make)


async def pull(client: GatewayClient, offset: int, wait_ms: int = 0, **fields: Any) -> tuple[int, list[bytes], int]:
    """Return the status code of a pull, the bodies, and the next offset; -1 for none. The status is the first answer,
    and the next offset is the last one."""
    values = {"group": BILLING, "message_queue": QUEUE, "batch_size": 10, **fields}
    request = wire.PullMessageRequest(offset=offset, long_polling_timeout=duration(wait_ms), **values)
    first, *rest = [
        answer async for answer in client.method("PullMessage")(request, metadata=METADATA, timeout=ANSWER_S)
    ]
    assert first.WhichOneof("content") == "status"
    next_offset = rest.pop().next_offset if rest and rest[-1].WhichOneof("content") == "next_offset" else -1
    assert all(answer.WhichOneof("content") == "message" for answer in rest)
    assert all(answer.message.topic == ORDERS for answer in rest)
    return first.status.code, [answer.message.body for answer in rest], next_offset


def test_a_pull_returns_messages_and_the_next_offset(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert await pull(client, 5, batch_size=2) == (Code.OK, [b"5", b"6"], 7)
        assert await pull(client, 7) == (Code.OK, [b"7", b"8"], 9)
        assert await pull(client, 9) == (Code.MESSAGE_NOT_FOUND, [], 9)
        assert gateway.queues.pulls == [(STORED, 5, 2), (STORED, 7, 10), (STORED, 9, 10)]

    gateway.run(scenario)


@pytest.mark.parametrize(
    ("offset", "fields", "code", "next_offset"),
    [
        (4, {}, Code.ILLEGAL_OFFSET, 5),
        (10, {}, Code.ILLEGAL_OFFSET, 9),
        (-1, {}, Code.ILLEGAL_OFFSET, -1),
        (5, {"batch_size": 0}, Code.BAD_REQUEST, -1),
        (5, {"group": wire.Resource(name="a b")}, Code.ILLEGAL_CONSUMER_GROUP, -1),
        (5, {"filter_expression": wire.FilterExpression(type=2, expression="n>")}, Code.ILLEGAL_FILTER_EXPRESSION, -1),
    ],
    ids=range(6),
)
def test_a_wrong_pull_is_answered_with_its_status(
    gateway: Gateway, offset: int, fields: dict[str, Any], code: Code, next_offset: int
) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert await pull(client, offset, **fields) == (code, [], next_offset)

    gateway.run(scenario)


def test_a_pull_waits_for_a_wanted_message(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_calls, "PULL_PAUSE_S", 0.001)

    async def scenario(client: GatewayClient) -> None:
        wanted = wire.FilterExpression(type=FilterType.TAG, expression="late")
        waiting = asyncio.create_task(pull(client, 5, wait_ms=20_000, filter_expression=wanted))
        while len(gateway.queues.pulls) < 3:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        gateway.queues.messages += [message(9), message(10, "late")]
        assert await waiting == (Code.OK, [b"10"], 11)
        assert {offset for _, offset, _ in gateway.queues.pulls} == {5, 9}

    gateway.run(scenario)


def test_a_pull_ends_before_a_message_that_cannot_be_read(gateway: Gateway) -> None:
    error = BodyUnreadableError("orders@a:1", 7, 700, "the checksum differs", record_damaged=True)
    gateway.queues.messages[2] = MessageExt.damaged(error, STORED)

    async def scenario(client: GatewayClient) -> None:
        wanted = {"filter_expression": wire.FilterExpression(expression="*")}
        assert await pull(client, 5, **wanted) == (Code.OK, [b"5", b"6"], 7)
        code, bodies, next_offset = await pull(client, 7, **wanted)
        assert (code == Code.OK, bodies, next_offset) == (False, [], -1)
        assert await pull(client, 8, **wanted) == (Code.OK, [b"8"], 9)

    gateway.run(scenario)


def test_offsets_are_committed_and_read(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        get = wire.GetOffsetRequest(group=BILLING, message_queue=QUEUE)
        assert (await client.call("GetOffset", get)).status.code == Code.OFFSET_NOT_FOUND
        for offset in (7, 5):
            update = wire.UpdateOffsetRequest(group=BILLING, message_queue=QUEUE, offset=offset)
            assert (await client.call("UpdateOffset", update)).status.code == Code.OK
            answer = await client.call("GetOffset", get)
            assert (answer.status.code, answer.offset) == (Code.OK, offset)
        assert gateway.queues.commits == {("billing", STORED): 5}
        negative = wire.UpdateOffsetRequest(group=BILLING, message_queue=QUEUE, offset=-1)
        assert (await client.call("UpdateOffset", negative)).status.code == Code.ILLEGAL_OFFSET

    gateway.run(scenario)


@pytest.mark.parametrize(
    ("policy", "time_ms", "code", "offset"),
    [
        (QueryOffsetPolicy.BEGINNING, None, Code.OK, 5),
        (QueryOffsetPolicy.END, None, Code.OK, 9),
        (QueryOffsetPolicy.TIMESTAMP, 1007, Code.OK, 7),
        (QueryOffsetPolicy.TIMESTAMP, -5, Code.OK, 5),
        (QueryOffsetPolicy.TIMESTAMP, None, Code.BAD_REQUEST, 0),
        (9, None, Code.BAD_REQUEST, 0),
    ],
)
def test_an_offset_is_found_by_position_or_time(
    gateway: Gateway, policy: int, time_ms: int | None, code: Code, offset: int
) -> None:
    async def scenario(client: GatewayClient) -> None:
        at = None if time_ms is None else timestamp(time_ms)
        request = wire.QueryOffsetRequest(message_queue=QUEUE, query_offset_policy=policy, timestamp=at)
        answer = await client.call("QueryOffset", request)
        assert (answer.status.code, answer.offset) == (code, offset)

    gateway.run(scenario)


def test_lite_topics_are_unsupported(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        answer = await client.call("SyncLiteSubscription", wire.SyncLiteSubscriptionRequest(topic=ORDERS))
        assert answer.status.code == Code.UNSUPPORTED

    gateway.run(scenario)
