"""Tests of a gateway's calls on a cluster: what a gRPC client sends is received, settled, recalled and dead."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import pytest

import raymq
from raymq.common.protocol.group import GroupConfig
from raymq.gateway.convert.times import duration, millis, timestamp
from raymq.gateway.service.cluster import cluster_of
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import (
    ClientType,
    Code,
    FilterType,
    Language,
    MessageType,
    QueryOffsetPolicy,
    TransactionResolution,
)
from tests.support.gateway.gateway_client import ANSWER_S, METADATA, GatewayClient, served

SEND_TIMEOUT_S = 30.0
CHECKED_S = 180.0
"""Time in s within which a broker asks about a transaction. It asks in rounds of 30 s."""


def message(topic: wire.Resource, body: bytes, **fields: Any) -> wire.Message:
    system = wire.SystemProperties(message_id=secrets.token_hex(17).upper(), **fields)
    return wire.Message(topic=topic, body=body, system_properties=system)


async def send(client: GatewayClient, *messages: wire.Message) -> list[wire.SendResultEntry]:
    answer = await client.call("SendMessage", wire.SendMessageRequest(messages=messages))
    assert answer.status.code == Code.OK, answer.status.message
    return list(answer.entries)


async def receive(
    client: GatewayClient, topic: wire.Resource, group: wire.Resource, count: int, **fields: Any
) -> list[wire.Message]:
    """Receive exactly `count` messages, in several calls if needed."""
    messages: list[wire.Message] = []
    end_s = time.monotonic() + ANSWER_S
    while len(messages) < count:
        assert time.monotonic() < end_s, f"{len(messages)} of {count} messages arrived"
        messages += await receive_once(client, topic, group, 5_000, **fields)
    assert len(messages) == count
    return messages


async def receive_once(
    client: GatewayClient, topic: wire.Resource, group: wire.Resource, wait_ms: int, **fields: Any
) -> list[wire.Message]:
    """Receive up to 32 messages in one call, which waits up to `wait_ms` for the first."""
    request = wire.ReceiveMessageRequest(
        group=group,
        message_queue=wire.MessageQueue(topic=topic),
        batch_size=32,
        invisible_duration=duration(60_000),
        long_polling_timeout=duration(wait_ms),
        **fields,
    )
    stream = client.method("ReceiveMessage")(request, metadata=METADATA, timeout=ANSWER_S)
    status, *answers, _ = [answer async for answer in stream]
    assert status.status.code in (Code.OK, Code.MESSAGE_NOT_FOUND), status.status.message
    return [answer.message for answer in answers]


def handle_of(message: wire.Message) -> str:
    return message.system_properties.receipt_handle


def run(mq: raymq.Client, scenario: Any) -> None:
    async def main() -> None:
        async with (
            mq.async_producer("gateway", send_timeout_s=SEND_TIMEOUT_S) as producer,
            served(cluster_of(mq, producer, SEND_TIMEOUT_S)) as client,
        ):
            await scenario(client)

    asyncio.run(main())


@pytest.mark.parametrize("namespace", ["", "gateway-team"])
def test_messages_are_sent_received_and_settled(mq: raymq.Client, namespace: str) -> None:
    prefix = f"{namespace}%" if namespace else ""
    mq.admin.create_topic(f"{prefix}gateway-orders", queues=4)
    mq.admin.create_group(GroupConfig(f"{prefix}gateway-billing", retry_max_times=3))
    topic = wire.Resource(name="gateway-orders", resource_namespace=namespace)
    group = wire.Resource(name="gateway-billing", resource_namespace=namespace)

    async def scenario(client: GatewayClient) -> None:
        sent = [message(topic, b"%d" % number, tag="even" if number % 2 == 0 else "odd") for number in range(20)]
        entries = [entry for answer in await asyncio.gather(*(send(client, one) for one in sent)) for entry in answer]
        wanted = wire.FilterExpression(type=FilterType.TAG, expression="even")
        got = await receive(client, topic, group, 10, filter_expression=wanted)
        assert sorted(int(one.body) for one in got) == list(range(0, 20, 2))
        assert all(one.topic == topic for one in got)
        assert {one.system_properties.message_id for one in got} <= {entry.message_id for entry in entries}
        again, letter, *rest = got
        acks = [wire.AckMessageEntry(receipt_handle=handle_of(one)) for one in rest]
        request = wire.AckMessageRequest(group=group, topic=topic, entries=acks)
        assert (await client.call("AckMessage", request)).status.code == Code.OK
        change = wire.ChangeInvisibleDurationRequest(
            group=group, topic=topic, receipt_handle=handle_of(again), invisible_duration=duration(0)
        )
        assert (await client.call("ChangeInvisibleDuration", change)).status.code == Code.OK
        answer = await client.call("ChangeInvisibleDuration", change)
        assert answer.status.code == Code.INVALID_RECEIPT_HANDLE
        forward = wire.ForwardMessageToDeadLetterQueueRequest(
            group=group, topic=topic, receipt_handle=handle_of(letter), delivery_attempt=2
        )
        assert (await client.call("ForwardMessageToDeadLetterQueue", forward)).status.code == Code.OK
        assert (await client.call("ForwardMessageToDeadLetterQueue", forward)).status.code == Code.OK
        [second] = await receive(client, topic, group, 1)
        assert (second.body, second.system_properties.delivery_attempt) == (again.body, 2)
        ack = wire.AckMessageRequest(
            group=group, topic=topic, entries=[wire.AckMessageEntry(receipt_handle=handle_of(second))]
        )
        assert (await client.call("AckMessage", ack)).status.code == Code.OK
        # All even messages may be in one broker group. This receive looks at both groups, and passes the odd messages.
        assert await receive_once(client, topic, group, 500, filter_expression=wanted) == []

    run(mq, scenario)
    summary = mq.admin.group_summary(f"{prefix}gateway-billing")
    assert (summary.lag, summary.dead_letters) == (0, 1)


def test_a_fifo_topic_keeps_the_order_of_a_message_group(mq: raymq.Client) -> None:
    mq.admin.create_topic("gateway-fifo", queues=4, message_type="FIFO")
    topic, group = wire.Resource(name="gateway-fifo"), wire.Resource(name="gateway-fifo-g")

    async def scenario(client: GatewayClient) -> None:
        for number in range(10):
            await send(client, message(topic, b"%d" % number, message_group="customer-7"))
        refused = await client.call("SendMessage", wire.SendMessageRequest(messages=[message(topic, b"x")]))
        assert refused.status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        got = await receive(client, topic, group, 10)
        assert [int(one.body) for one in got] == list(range(10))
        assert {one.system_properties.message_group for one in got} == {"customer-7"}

    run(mq, scenario)


def test_a_delayed_message_is_recalled(mq: raymq.Client) -> None:
    mq.admin.create_topic("gateway-later", queues=1)
    topic, group = wire.Resource(name="gateway-later"), wire.Resource(name="gateway-later-g")

    async def scenario(client: GatewayClient) -> None:
        now_ms = time.time_ns() // 1_000_000
        [recalled] = await send(client, message(topic, b"never", delivery_timestamp=timestamp(now_ms + 3_600_000)))
        request = wire.RecallMessageRequest(topic=topic, recall_handle=recalled.recall_handle)
        answer = await client.call("RecallMessage", request)
        assert (answer.status.code, answer.message_id) == (Code.OK, recalled.message_id)
        await send(client, message(topic, b"soon", delivery_timestamp=timestamp(now_ms + 300)))
        [got] = await receive(client, topic, group, 1)
        assert (got.body, millis(got.system_properties.delivery_timestamp)) == (b"soon", now_ms + 300)

    run(mq, scenario)


def test_a_transaction_ends_at_another_gateway_and_by_a_check(mq: raymq.Client) -> None:
    mq.admin.create_topic("gateway-paid", queues=2, message_type="TRANSACTION")
    topic, group = wire.Resource(name="gateway-paid"), wire.Resource(name="gateway-paid-g")

    async def end(client: GatewayClient, transaction_id: str, resolution: int, source: int = 1) -> Code:
        request = wire.EndTransactionRequest(
            topic=topic, transaction_id=transaction_id, resolution=resolution, source=source
        )
        return Code((await client.call("EndTransaction", request)).status.code)

    async def begun(client: GatewayClient, body: bytes) -> str:
        one = message(
            topic, body, message_type=MessageType.TRANSACTION, orphaned_transaction_recovery_duration=duration(1_000)
        )
        [entry] = await send(client, one)
        return entry.transaction_id

    async def scenario(client: GatewayClient) -> None:
        committed, dropped = await begun(client, b"committed"), await begun(client, b"dropped")
        await begun(client, b"orphaned")
        async with (
            mq.async_producer("gateway-2", send_timeout_s=SEND_TIMEOUT_S) as producer,
            served(cluster_of(mq, producer, SEND_TIMEOUT_S)) as other,
        ):
            assert await end(other, committed, TransactionResolution.COMMIT) == Code.OK
            assert await end(other, dropped, TransactionResolution.ROLLBACK) == Code.OK
            assert await end(other, dropped, TransactionResolution.COMMIT) == Code.INVALID_TRANSACTION_ID
        assert await end(client, committed, TransactionResolution.COMMIT) == Code.OK
        stream = client.method("Telemetry")(metadata=METADATA, timeout=CHECKED_S)
        publishing = wire.Publishing(topics=[topic])
        await stream.write(wire.TelemetryCommand(settings=wire.Settings(publishing=publishing)))
        assert (await stream.read()).status.code == Code.OK
        polls = asyncio.create_task(client.service.run())
        command = (await stream.read()).recover_orphaned_transaction_command
        polls.cancel()
        assert command.message.body == b"orphaned"
        assert await end(client, command.transaction_id, TransactionResolution.COMMIT, source=2) == Code.OK
        stream.cancel()
        got = await receive(client, topic, group, 2)
        assert {one.body for one in got} == {b"committed", b"orphaned"}
        assert {one.system_properties.message_type for one in got} == {MessageType.TRANSACTION}

    run(mq, scenario)


def test_a_pull_consumer_reads_a_queue_and_commits_its_offset(mq: raymq.Client) -> None:
    mq.admin.create_topic("gateway-pull", queues=1)
    topic, group = wire.Resource(name="gateway-pull"), wire.Resource(name="gateway-pull-g")

    async def pull(client: GatewayClient, queue: wire.MessageQueue, offset: int, wait_ms: int = 0) -> tuple[Any, ...]:
        request = wire.PullMessageRequest(
            group=group, message_queue=queue, offset=offset, batch_size=32, long_polling_timeout=duration(wait_ms)
        )
        stream = client.method("PullMessage")(request, metadata=METADATA, timeout=ANSWER_S)
        first, *answers, last = [answer async for answer in stream]
        return first.status.code, [answer.message.body for answer in answers], last.next_offset

    async def scenario(client: GatewayClient) -> None:
        route = await client.call("QueryRoute", wire.QueryRouteRequest(topic=topic))
        [queue] = route.message_queues
        for number in range(3):
            await send(client, message(topic, b"%d" % number))
        assert await pull(client, queue, 0, 20_000) == (Code.OK, [b"0", b"1", b"2"], 3)
        assert await pull(client, queue, 3) == (Code.MESSAGE_NOT_FOUND, [], 3)
        assert await pull(client, queue, 99) == (Code.ILLEGAL_OFFSET, [], 3)
        get = wire.GetOffsetRequest(group=group, message_queue=queue)
        assert (await client.call("GetOffset", get)).status.code == Code.OFFSET_NOT_FOUND
        for offset in (3, 1):
            update = wire.UpdateOffsetRequest(group=group, message_queue=queue, offset=offset)
            assert (await client.call("UpdateOffset", update)).status.code == Code.OK
            assert (await client.call("GetOffset", get)).offset == offset
        for policy, offset in ((QueryOffsetPolicy.BEGINNING, 0), (QueryOffsetPolicy.END, 3)):
            query = wire.QueryOffsetRequest(message_queue=queue, query_offset_policy=policy)
            assert (await client.call("QueryOffset", query)).offset == offset

    run(mq, scenario)


def test_an_administrator_asks_a_client_of_a_gateway(mq: raymq.Client) -> None:
    mq.admin.create_topic("gateway-asked", queues=1)
    topic, group = wire.Resource(name="gateway-asked"), wire.Resource(name="gateway-asked-g")

    async def scenario(client: GatewayClient) -> None:
        stream = client.method("Telemetry")(metadata=METADATA, timeout=ANSWER_S)
        entry = wire.SubscriptionEntry(topic=topic, expression=wire.FilterExpression(expression="*"))
        subscription = wire.Subscription(group=group, subscriptions=[entry])
        library = wire.UA(language=Language.JAVA, version="5.0.7")
        settings = wire.Settings(client_type=ClientType.PUSH_CONSUMER, subscription=subscription, user_agent=library)
        await stream.write(wire.TelemetryCommand(settings=settings))
        assert (await stream.read()).status.code == Code.OK

        def members() -> list[tuple[str, str, str]]:
            found = mq.admin.consumer_connections("gateway-asked-g")
            return [(one.consumer.member, one.language, one.version) for one in found]

        async with asyncio.timeout(ANSWER_S):
            while ("client-1", "JAVA", "5.0.7") not in await asyncio.to_thread(members):
                await asyncio.sleep(0.1)
        asked = asyncio.create_task(asyncio.to_thread(mq.admin.running_info, "gateway-asked-g", stacks=True))
        nonce = (await stream.read()).print_thread_stack_trace_command.nonce
        trace = wire.ThreadStackTrace(nonce=nonce, thread_stack_trace="main\nwait")
        await stream.write(wire.TelemetryCommand(thread_stack_trace=trace))
        [info] = [one for one in await asked if one.member == "client-1"]
        assert (info.consume_type, [stack.frames for stack in info.stacks]) == ("PUSH", [("main", "wait")])
        [entry] = await send(client, message(topic, b"once"))
        async with asyncio.timeout(ANSWER_S):
            while not (found := await asyncio.to_thread(mq.admin.query_by_id, "gateway-asked", entry.message_id)):
                await asyncio.sleep(0.1)
        consumed = asyncio.create_task(asyncio.to_thread(mq.admin.consume_directly, "gateway-asked-g", found[0]))
        command = (await stream.read()).verify_message_command
        assert command.message.body == b"once"
        result = wire.VerifyMessageResult(nonce=command.nonce)
        await stream.write(wire.TelemetryCommand(status=wire.Status(code=Code.OK), verify_message_result=result))
        assert (await consumed).status == "CONSUME_SUCCESS"
        end = wire.NotifyClientTerminationRequest(group=group)
        assert (await client.call("NotifyClientTermination", end)).status.code == Code.OK
        stream.cancel()

    run(mq, scenario)
