"""A gRPC client of a gateway in the test's own process, with the gateway's own messages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from raymq.client.consumer.subscription import Subscription
from raymq.client.producer.async_producer import AsyncProducer
from raymq.client.producer.producer import Producer
from raymq.common.errors import GroupNotExistError, OffsetOutOfRangeError, RaymqError, RequestTimeoutError
from raymq.common.message import MessageExt, MessageQueue, PullResult, PullStatus, SendStatus
from raymq.common.namespaces import Namespace
from raymq.common.protocol.clients import ConsumerData
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.store import QueueBounds
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest, TransactionCheck
from raymq.gateway.clients.access import GatewayAccess
from raymq.gateway.front.server import GrpcFront
from raymq.gateway.service.cluster import Announcer, GatewayCluster, QueueReads, Transactions
from raymq.gateway.service.polling_receive import GroupCalls
from raymq.gateway.service.route_calls import GatewayAddress
from raymq.gateway.service.service import GatewayService
from raymq.gateway.wire.messages import CLASSES
from raymq.gateway.wire.parsing import SEND_BYTES_MAX
from raymq.gateway.wire.table import METHODS, SERVICE

HOST = "127.0.0.1"
ANSWER_S = 60.0
METADATA = (("x-mq-client-id", "client-1"), ("x-mq-language", "PYTHON"), ("x-mq-namespace", ""))


class FakeGroups:
    """Groups in memory. It records each query."""

    def __init__(self, *configs: GroupConfig) -> None:
        self.configs = {config.group: config for config in configs}
        self.queried: list[str] = []

    def group_config(self, group: str) -> GroupConfig:
        self.queried.append(group)
        if group not in self.configs:
            raise GroupNotExistError(group)
        return self.configs[group]


class FakeTransactions:
    """Transactions in memory. `ends`: the broker group, the topic and the request of each end. `failure`: the error of
    each end. `checks`: the checks that each broker has. `polls`: the broker and the groups of each poll."""

    def __init__(self, **checks: list[TransactionCheck]) -> None:
        self.checks = checks
        self.failure: RaymqError | None = None
        self.ends: list[tuple[str, str, EndTransactionRequest]] = []
        self.polls: list[tuple[str, list[str]]] = []
        self.left: list[tuple[str, str]] = []
        self.dead: set[str] = set()

    def end(self, broker_name: str, topic: str, order: EndTransactionRequest, timeout_s: float) -> EndResult:
        self.ends.append((broker_name, topic, order))
        if self.failure is not None:
            raise self.failure
        return EndResult(SendStatus.SEND_OK, 0, 0, 1, topic=topic, queue_id=0)

    def brokers(self) -> list[str]:
        return sorted(self.checks)

    def take_checks(self, broker_name: str, groups: Sequence[str], client_id: str) -> list[TransactionCheck]:
        if broker_name in self.dead:
            raise RequestTimeoutError("a poll", 1.0)
        self.polls.append((broker_name, list(groups)))
        taken, self.checks[broker_name] = self.checks[broker_name], []
        return taken

    def leave_checks(self, broker_name: str, group: str, client_id: str) -> None:
        self.left.append((broker_name, group))


class FakeQueues:
    """One queue with messages, which begins at offset `first`, and the committed offsets of groups. `by_id`: by
    broker group, the messages that a question about ids finds, or its error. `asked`: the broker group and the ids of
    each question."""

    def __init__(self, *messages: MessageExt, first: int = 0) -> None:
        self.messages, self.first = list(messages), first
        self.commits: dict[tuple[str, MessageQueue], int] = {}
        self.pulls: list[tuple[MessageQueue, int, int]] = []
        self.by_id: dict[str, list[MessageExt] | RaymqError] = {}
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def pull(self, queue: MessageQueue, subscription: Subscription, offset: int, max_messages: int) -> PullResult:
        self.pulls.append((queue, offset, max_messages))
        bounds = self.bounds(queue)
        if not bounds.min_offset <= offset <= bounds.max_offset:
            raise OffsetOutOfRangeError(str(queue), offset, bounds.min_offset, bounds.max_offset)
        found = self.messages[offset - self.first :][:max_messages]
        wanted = tuple(one for one in found if subscription.matches(one.tags))
        status = PullStatus.FOUND if wanted else PullStatus.NO_NEW_MESSAGE
        return PullResult(status, wanted, offset + len(found), bounds.min_offset, bounds.max_offset)

    def bounds(self, queue: MessageQueue) -> QueueBounds:
        return QueueBounds(self.first, self.first + len(self.messages), 0)

    def offset_at(self, queue: MessageQueue, time_ms: int) -> int:
        return self.first + sum(message.store_timestamp_ms < time_ms for message in self.messages)

    def stored(
        self, topic: str, broker_name: str, message_ids: Sequence[str], timeout_s: float, *, delayed: bool = False
    ) -> list[MessageExt]:
        self.asked.append((broker_name, tuple(message_ids)))
        found = self.by_id.get(broker_name, [])
        if isinstance(found, RaymqError):
            raise found
        return [one for one in found if one.message_id in message_ids]

    def committed(self, group: str, queue: MessageQueue) -> int | None:
        return self.commits.get((group, queue))

    def commit(self, group: str, queue: MessageQueue, offset: int) -> None:
        self.commits[group, queue] = offset


class FakeAnnouncer:
    """The members that a gateway announces. `members`: the present members and their descriptions. `announced`: the
    number of announcements."""

    def __init__(self) -> None:
        self.members: dict[object, ConsumerData] = {}
        self.announced = 0

    def set_consumer(self, consumer: object, data: ConsumerData) -> None:
        self.members[consumer] = data
        self.announced += 1

    def remove(self, item: object) -> None:
        del self.members[item]


class GatewayClient:
    """Calls the methods of the service by name. `port`: the gateway's port."""

    def __init__(self, channel: grpc.aio.Channel, port: int, service: GatewayService) -> None:
        self._channel, self.port, self.service = channel, port, service

    def method(self, name: str, *, raw: bool = False) -> Any:
        """Return the stub of a method. `raw`: its requests are bytes, not messages."""
        [method] = [one for one in METHODS if one.name == name]
        kind = ("stream" if method.streams_requests else "unary") + "_"
        kind += "stream" if method.streams_responses else "unary"
        return getattr(self._channel, kind)(
            f"/{SERVICE}/{name}",
            request_serializer=None if raw else lambda message: message.SerializeToString(),
            response_deserializer=CLASSES[method.response].FromString,
        )

    async def call(self, name: str, request: Any, metadata: Any = METADATA, timeout_s: float = ANSWER_S) -> Any:
        """Call a method with one answer."""
        return await self.method(name)(request, metadata=metadata, timeout=timeout_s)

    async def bytes_of(self, name: str, data: bytes, metadata: Any = METADATA) -> Any:
        """Call a method with one answer. Its request is any bytes."""
        return await self.method(name, raw=True)(data, metadata=metadata, timeout=ANSWER_S)


@asynccontextmanager
async def served(
    cluster: GatewayCluster,
    advertise: tuple[str, int] | None = None,
    clock: Callable[[], float] = time.monotonic,
    access: GatewayAccess | None = None,
) -> AsyncIterator[GatewayClient]:
    """Serve a gateway, and yield its client. At the end, the cluster is closed. `access`: None for no access
    control."""
    service = GatewayService(cluster, GatewayAddress(HOST, 0, advertise), access or GatewayAccess(None), clock)
    front = GrpcFront(service.handlers(), request_bytes_max=SEND_BYTES_MAX)
    port = await front.start(HOST, 0)
    service.moved(GatewayAddress(HOST, port, advertise))
    try:
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
            yield GatewayClient(channel, port, service)
    finally:
        await front.stop()
        await cluster.finish()
        cluster.close()


@asynccontextmanager
async def gateway_of(
    producer: Producer,
    groups: FakeGroups,
    make_calls: Callable[[str, Namespace], GroupCalls],
    advertise: tuple[str, int] | None = None,
    clock: Callable[[], float] = time.monotonic,
    transactions: Transactions | None = None,
    access: GatewayAccess | None = None,
    announcer: Announcer | None = None,
    queues: QueueReads | None = None,
    **more: Any,
) -> AsyncIterator[GatewayClient]:
    """Serve a gateway on a producer over fake stores, and yield its client. `more`: arguments of GatewayCluster."""
    async with AsyncProducer(producer) as sender:
        places = (producer.test_routes, groups, sender, make_calls)
        more |= {"transactions": transactions or FakeTransactions(), "announcer": announcer or FakeAnnouncer()}
        more["queues"] = queues or FakeQueues()
        cluster = GatewayCluster(*places, send_timeout_s=producer.settings.send_timeout_s, clock=clock, **more)
        async with served(cluster, advertise, clock, access) as client:
            yield client
