"""Test of killed gateways: gateway processes, brokers and masters are killed while clients of RocketMQ 5's protocol
send to message groups, receive and acknowledge.

A client repeats a send with the same message id until a gateway acknowledges it. No acknowledged message is lost or
stored twice, and each message group keeps its order in the queues and at the consumers. The short form has each kind of
kill once or twice. RAYMQ_SOAK=1 kills each kind for two minutes (RAYMQ_CHAOS_SECONDS). RAYMQ_CHAOS_SEED repeats the
order of a run's faults.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import raymq
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import GroupConfig
from raymq.gateway.convert.times import duration
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import one_group
from tests.support.gateway.faults import KINDS, GatewayFaults
from tests.support.gateway.gateway_client import GatewayClient
from tests.support.gateway.gateways import running_gateway
from tests.support.history.checker import check
from tests.support.history.history import Operation, Outcome, Sent
from tests.support.history.workload import read_back
from tests.support.replicas.ray_replicas import RayReplicas

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
SECONDS = float(os.environ.get("RAYMQ_CHAOS_SECONDS", "120"))
SHORT = (*KINDS, "gateway and master")
REPLICAS = 3
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
PROCESSES = 2
SENDERS = 4
GROUPS = 6
"""Number of message groups of each sender. Each group has one send in flight."""
CONSUMERS = 3
BETWEEN_FAULTS = 3
"""Number of messages of each message group that are acknowledged between two faults."""
CALL_S = 3.0
"""Timeout of a call in s, as in the official clients."""
PAUSE_S = 0.02
INVISIBLE_S = 5.0
PATIENCE_S = 120.0
REPEATED = {
    *(Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT, Code.TOO_MANY_REQUESTS),
    *(Code.MASTER_PERSISTENCE_TIMEOUT, Code.SLAVE_PERSISTENCE_TIMEOUT),
}


class Lane:
    """One message group of a client: sends messages one after another, and repeats each until it is acknowledged."""

    def __init__(self, number: int, topic: wire.Resource) -> None:
        self.number, self._topic = number, topic
        self.acknowledged: dict[Sent, int] = {}
        """The acknowledged messages, and the queue offset of each."""
        self.answers: Counter[str] = Counter()
        self.trail: dict[Sent, list[str]] = defaultdict(list)
        """The answers to the sends of each message, with their times, for a failure's report."""

    async def run(self, client: GatewayClient, metadata: Any, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            sent = Sent(self.number, len(self.acknowledged))
            system = wire.SystemProperties(
                message_id=secrets.token_hex(17).upper(), message_group=f"group-{self.number}"
            )
            one = wire.Message(topic=self._topic, body=sent.body(), system_properties=system)
            self.acknowledged[sent] = await self._send(sent, client, metadata, wire.SendMessageRequest(messages=[one]))

    async def _send(self, sent: Sent, client: GatewayClient, metadata: Any, request: wire.SendMessageRequest) -> int:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            try:
                answer = await client.call("SendMessage", request, metadata, CALL_S)
            except grpc.aio.AioRpcError as error:
                code, offset = _passing(error), -1
            else:
                assert answer.status.code in REPEATED | {Code.OK}, answer.status
                code, offset = f"{Code(answer.status.code).name} {answer.status.message}", answer.entries[0].offset
            self.answers[code.split()[0]] += 1
            self.trail[sent].append(f"{time.monotonic():.2f} {code}")
            if code.split()[0] == Code.OK.name:
                return int(offset)
            await asyncio.sleep(PAUSE_S)
        raise AssertionError(f"a send was not acknowledged within {PATIENCE_S:g} s: {dict(self.answers)}")


class Consumer:
    """Receives messages of a group in order, and acknowledges them. `first`: the messages of each lane in the order of
    their first deliveries, which all consumers of a test share."""

    def __init__(
        self, topic: wire.Resource, group: wire.Resource, first: dict[int, list[Sent]], seen: set[Sent]
    ) -> None:
        self._topic, self._group, self._first, self._seen = topic, group, first, seen

    async def run(self, client: GatewayClient, metadata: Any, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                for one in await self._receive(client, metadata):
                    sent = Sent.parse(one.body)
                    if sent not in self._seen:
                        self._seen.add(sent)
                        self._first[sent.producer].append(sent)
                    entry = wire.AckMessageEntry(receipt_handle=one.system_properties.receipt_handle)
                    request = wire.AckMessageRequest(group=self._group, topic=self._topic, entries=[entry])
                    await client.call("AckMessage", request, metadata, CALL_S)
            except grpc.aio.AioRpcError as error:
                _passing(error)
                await asyncio.sleep(PAUSE_S)

    async def _receive(self, client: GatewayClient, metadata: Any) -> list[wire.Message]:
        request = wire.ReceiveMessageRequest(
            group=self._group,
            message_queue=wire.MessageQueue(topic=self._topic),
            batch_size=32,
            invisible_duration=duration(int(INVISIBLE_S * 1000)),
            long_polling_timeout=duration(1000),
        )
        found = []
        async for answer in client.method("ReceiveMessage")(request, metadata=metadata, timeout=2 * CALL_S):
            if answer.HasField("message"):
                found.append(answer.message)
            elif answer.HasField("status"):
                expected = REPEATED | {Code.OK, Code.MESSAGE_NOT_FOUND}
                assert answer.status.code in expected, answer.status
                if answer.status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                    await asyncio.sleep(PAUSE_S)
        return found


def _passing(error: grpc.aio.AioRpcError) -> str:
    """Return the name of an error's code. Raises the error unless it passes when its gateway runs again."""
    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise error
    return str(error.code().name)


@asynccontextmanager
async def connected(endpoints: str) -> AsyncIterator[GatewayClient]:
    """Yield a client with a connection of its own. It connects again soon after its gateway was killed."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    async with grpc.aio.insecure_channel(endpoints, options) as channel:
        yield GatewayClient(channel, 0, None)  # type: ignore[arg-type]


def fault_kinds(dice: random.Random) -> Iterator[str]:
    """Yield the kind of the next fault."""
    if not SOAK:
        yield from dice.sample(SHORT, len(SHORT))
        return
    for kind in KINDS:
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s:
            yield kind


@pytest.fixture
def replicas(mq: raymq.Client) -> RayReplicas:
    """Return the broker group after all its replicas are in sync."""
    group = RayReplicas("broker-a", REPLICAS)
    group.settled()
    return group


@pytest.mark.timeout(600 + 3 * int(SECONDS))
def test_killed_gateways_brokers_and_masters_lose_double_and_reorder_nothing(
    mq: raymq.Client, replicas: RayReplicas, tmp_path: Path
) -> None:
    dice = random.Random(chaos_seed())
    name, consumers = f"gateways-{secrets.token_hex(4)}", f"gateways-{secrets.token_hex(4)}"
    mq.admin.create_topic(name, queues=4, message_type="FIFO")
    mq.admin.create_group(GroupConfig(consumers, retry_max_times=1000))
    topic, group = wire.Resource(name=name), wire.Resource(name=consumers)
    lanes = [Lane(number, topic) for number in range(SENDERS * GROUPS)]
    first: dict[int, list[Sent]] = defaultdict(list)
    seen: set[Sent] = set()
    faults = GatewayFaults(replicas, dice)

    async def scenario(endpoints: str) -> None:
        stopping, ending = asyncio.Event(), asyncio.Event()

        async def client(number: int, parts: Sequence[Any], until: asyncio.Event) -> None:
            metadata = (("x-mq-client-id", f"client-{number}"), ("x-mq-language", "PYTHON"))
            async with connected(endpoints) as found:
                await asyncio.gather(*(part.run(found, metadata, until) for part in parts))

        async def progress(working: Sequence[asyncio.Task[None]]) -> None:
            """Wait until each message group has some more acknowledged messages."""
            wanted = [len(lane.acknowledged) + BETWEEN_FAULTS for lane in lanes]
            async with asyncio.timeout(PATIENCE_S):
                while any(len(lane.acknowledged) < count for lane, count in zip(lanes, wanted, strict=True)):
                    raise_failure(working)
                    await asyncio.sleep(0.02)

        senders = [asyncio.create_task(client(number, lanes[number::SENDERS], stopping)) for number in range(SENDERS)]
        receivers = [
            asyncio.create_task(client(SENDERS + number, [Consumer(topic, group, first, seen)], ending))
            for number in range(CONSUMERS)
        ]
        await progress(senders)
        for kind in fault_kinds(dice):
            await asyncio.to_thread(faults.inject, kind)
            await progress(senders)
        stopping.set()
        await asyncio.gather(*senders)
        acknowledged = {sent for lane in lanes for sent in lane.acknowledged}
        async with asyncio.timeout(PATIENCE_S):
            while not acknowledged <= seen:
                raise_failure(receivers)
                await asyncio.sleep(0.02)
        ending.set()
        await asyncio.gather(*receivers)

    started_s = time.monotonic()
    with running_gateway(tmp_path, f", processes: {PROCESSES}") as gateway:
        asyncio.run(scenario(gateway.endpoints))
    replicas.settled()
    queues = read_back(mq, name)
    report = check(operations(lanes, queues), queues)
    answers = sum((lane.answers for lane in lanes), Counter[str]())
    print(f"{dict(faults.kills)} in {time.monotonic() - started_s:.1f} s: {report}, answers {dict(answers)}")
    for queue, messages in queues.items():
        for sent, count in Counter(messages).items():
            if count > 1:
                places = [offset for offset, one in enumerate(messages) if one == sent]
                trail = lanes[sent.producer].trail[sent]
                print(f"{sent} is at {places} of {queue}: {len(trail)} sends, {trail[0]} to {trail[-1]}")
    assert report.violations == {}
    assert {number: order for number, order in first.items() if order != sorted(order)} == {}
    assert set(KINDS) <= set(faults.kills)


def operations(lanes: Sequence[Lane], queues: Mapping[MessageQueue, Sequence[Sent]]) -> list[Operation]:
    """Return the history of the sends. An answer has a message's queue offset, and not its queue: the queue is that of
    the stored message."""
    places = {sent: queue for queue, messages in queues.items() for sent in messages}
    anywhere = next(iter(queues))
    return [
        Operation(sent, Outcome.OK, places.get(sent, anywhere), offset)
        for lane in lanes
        for sent, offset in lane.acknowledged.items()
    ]


def raise_failure(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raise the error of a client that has failed."""
    for task in tasks:
        if task.done():
            task.result()
