"""The part of raymq on which a gateway's calls work, without a blocking call in the event loop.

Routes of topics are reused for ROUTE_VALID_S, so that a send needs no thread. For the questions that each push consumer
repeats every 5 s, the settings of groups are reused for GROUP_VALID_S.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from raymq.client.client import Client
from raymq.client.consumer.queue_calls import QueueCalls
from raymq.client.consumer.simple.async_pop_calls import AsyncPopCalls
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.subscription import Subscription
from raymq.client.producer.async_producer import ROUTE_VALID_S, AsyncProducer
from raymq.client.transactions.group_transactions import GroupTransactions
from raymq.common.errors import GroupNotExistError, RaymqError, ServiceNotAvailableError, SystemBusyError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, MessageExt, MessageQueue, PullResult
from raymq.common.namespaces import Namespace
from raymq.common.protocol.clients import ConsumerData
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.route import MASTER_ID, TopicRoute
from raymq.common.protocol.store import QueueBounds
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest, TransactionCheck
from raymq.common.retry import left_s, persist_until
from raymq.gateway.service.polling_receive import GroupCalls, PollingReceive
from raymq.remoting.async_lane_pool import ASYNC_CALLS_MAX
from raymq.remoting.broker_client import AsyncBrokerClient, BrokerClient, broker_client
from raymq.remoting.route_cache import DEFAULT_TOPIC_QUEUE_NUMS

ROUTES_MAX: Final = 10_000
"""Maximum number of topics whose routes are kept. Beyond this number all are dropped."""
GROUP_VALID_S: Final = 5.0
GROUP_PATIENCE_S: Final = 20.0
"""Time in seconds for which a question about a group is repeated while no broker answers."""
GROUP_CALL_S: Final = 5.0
"""Timeout in seconds of one question about a group, and the time for which a broker that did not answer is asked
last."""
GROUPS_KNOWN_MAX: Final = 10_000
"""Maximum number of groups whose settings are kept. Beyond this number all are dropped."""
CLUSTER_CALLS_MAX: Final = 16
"""Maximum number of threads that one gateway uses for blocking calls."""
RECEIVES_MAX: Final = ASYNC_CALLS_MAX * 3 // 4
"""Maximum number of waits for messages at one gateway. A receive waits once at each of its broker groups, and holds no
thread. The other calls to a broker that may be under way are for acknowledgements and renewals."""
FINISH_S: Final = 3.0
"""Maximum time in seconds that a gateway which stops waits for its calls in the background."""
GROUPS_OPEN_MAX: Final = 1000
"""Maximum number of consumer groups whose connections to brokers stay open."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class TopicRoutes(Protocol):
    """The routes of a raymq client (`raymq.remoting.route_cache.RouteCache`). The calls may block."""

    def get(self, topic: str) -> TopicRoute: ...
    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute: ...


class GroupSettings(Protocol):
    """The settings of groups (`BrokersGroupSettings`). The call blocks."""

    def group_config(self, group: str) -> GroupConfig: ...


class BrokersGroupSettings:
    """Asks the brokers for the settings of groups. Thread-safe.

    An administrator stores the settings of a group at each broker. So the first answer counts, and consumers can start
    while a broker group is away. `brokers`: returns the names of all brokers. `broker`: returns the client of a broker.
    """

    def __init__(
        self,
        brokers: Callable[[], Iterable[str]],
        broker: Callable[[str], BrokerClient] = broker_client,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._brokers, self._broker, self._clock = brokers, broker, clock
        self._silent_until_s: dict[str, float] = {}

    def group_config(self, group: str) -> GroupConfig:
        """Return a group's settings from the first broker that has them. Blocks up to GROUP_PATIENCE_S.

        Raises GroupNotExistError if no broker that answers has the group. Raises ServiceNotAvailableError or
        RequestTimeoutError if no broker answers.
        """
        return persist_until(time.monotonic() + GROUP_PATIENCE_S, lambda left_s: self._first_answer(group, left_s))

    def _first_answer(self, group: str, timeout_s: float) -> GroupConfig:
        """Ask one broker after another, and return the first answer. Brokers that have just failed to answer are asked
        last."""
        deadline_s, now_s = time.monotonic() + timeout_s, self._clock()
        missing: GroupNotExistError | None = None
        failure: RaymqError = ServiceNotAvailableError("no broker is registered at the NameServer; see `raymq status`")
        for name in sorted(self._brokers(), key=lambda one: (self._silent_until_s.get(one, now_s) > now_s, one)):
            try:
                found: GroupConfig = self._broker(name).call(
                    "group_config", group, timeout_s=min(GROUP_CALL_S, left_s(deadline_s))
                )
            except GroupNotExistError as error:
                missing = error
            except RaymqError as error:
                if not error.retryable:
                    raise
                self._silent_until_s[name] = self._clock() + GROUP_CALL_S
                failure = error
            else:
                self._silent_until_s.pop(name, None)
                return found
        raise missing or failure


class Transactions(Protocol):
    """The transactions of all producer groups (`raymq.client.transactions.group_transactions.GroupTransactions`). All
    calls block."""

    def end(self, broker_name: str, topic: str, order: EndTransactionRequest, timeout_s: float) -> EndResult: ...
    def brokers(self) -> list[str]: ...
    def take_checks(self, broker_name: str, groups: Sequence[str], client_id: str) -> list[TransactionCheck]: ...
    def leave_checks(self, broker_name: str, group: str, client_id: str) -> None: ...


class QueueReads(Protocol):
    """The calls about single queues (`raymq.client.consumer.queue_calls.QueueCalls`). All calls block."""

    def pull(self, queue: MessageQueue, subscription: Subscription, offset: int, max_messages: int) -> PullResult: ...
    def bounds(self, queue: MessageQueue) -> QueueBounds: ...
    def offset_at(self, queue: MessageQueue, time_ms: int) -> int: ...
    def stored(
        self, topic: str, broker_name: str, message_ids: Sequence[str], timeout_s: float, *, delayed: bool = False
    ) -> list[MessageExt]: ...
    def committed(self, group: str, queue: MessageQueue) -> int | None: ...
    def commit(self, group: str, queue: MessageQueue, offset: int) -> None: ...


class Announcer(Protocol):
    """Announces consumers to brokers (`raymq.remoting.heartbeats.Heartbeats`). No call waits for a broker."""

    def set_consumer(self, consumer: object, data: ConsumerData) -> None: ...
    def remove(self, item: object) -> None: ...


class GatewayCluster:
    """The routes, groups, producer and transactions of one gateway process. Close it.

    `producer` sends for all clients; whoever made it closes it. `make_calls`: makes the calls of a consumer group, by
    the group's stored name and its namespace. `send_timeout_s`: the producer's timeout of a send. `max_body_bytes`: the
    maximum size of a body until `body_limit`, which may block, has returned the stores' limit.

    `threads`: CLUSTER_CALLS_MAX threads for calls that block; a receive that waits needs none of them.
    """

    def __init__(
        self,
        routes: TopicRoutes,
        groups: GroupSettings,
        producer: AsyncProducer,
        make_calls: Callable[[str, Namespace], GroupCalls],
        transactions: Transactions,
        announcer: Announcer,
        queues: QueueReads,
        *,
        send_timeout_s: float,
        max_body_bytes: int = MAX_MESSAGE_SIZE_BYTES,
        body_limit: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.producer, self.send_timeout_s, self.max_body_bytes = producer, send_timeout_s, max_body_bytes
        self._body_limit = body_limit
        self.transactions, self.announcer, self.queues = transactions, announcer, queues
        self._routes, self._groups, self._make_calls, self._clock = routes, groups, make_calls, clock
        self._known: dict[str, tuple[TopicRoute, float]] = {}
        self._configs: dict[str, tuple[GroupConfig, float]] = {}
        self._group_calls: OrderedDict[tuple[str, str], GroupCalls] = OrderedDict()
        """The calls of each group and namespace, the least recently used first."""
        self._waits = 0
        self._brokers: dict[str, AsyncBrokerClient] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self.threads = ThreadPoolExecutor(CLUSTER_CALLS_MAX, "gateway")

    async def route(self, topic: str, *, create: bool = False) -> TopicRoute:
        """Return a topic's route, at most ROUTE_VALID_S older than the client's route. `create`: create the topic if it
        does not exist and the cluster allows it. Raises TopicNotExistError."""
        known = self.known_route(topic)
        if known is not None:
            return known
        if create:
            route = await self.call(self._routes.get_or_create, topic, DEFAULT_TOPIC_QUEUE_NUMS)
        else:
            route = await self.call(self._routes.get, topic)
        if len(self._known) >= ROUTES_MAX:
            self._known.clear()
        self._known[topic] = route, self._clock() + ROUTE_VALID_S
        return route

    def known_route(self, topic: str) -> TopicRoute | None:
        """Return a topic's route of at most ROUTE_VALID_S ago; None if the client must be asked."""
        known = self._known.get(topic)
        return known[0] if known is not None and self._clock() < known[1] else None

    async def group_config(self, group: str) -> GroupConfig:
        """Return a group's settings; the default settings if the group does not exist yet."""
        try:
            return await self.call(self._groups.group_config, group)
        except GroupNotExistError:
            return GroupConfig(group)

    async def recent_group_config(self, group: str) -> GroupConfig:
        """Return a group's settings of at most GROUP_VALID_S ago; the default settings if the group did not exist."""
        known = self.known_group_config(group)
        if known is not None:
            return known
        config = await self.group_config(group)
        if len(self._configs) >= GROUPS_KNOWN_MAX:
            self._configs.clear()
        self._configs[group] = config, self._clock() + GROUP_VALID_S
        return config

    def known_group_config(self, group: str) -> GroupConfig | None:
        """Return a group's settings of at most GROUP_VALID_S ago; None if a broker must be asked."""
        known = self._configs.get(group)
        return known[0] if known is not None and self._clock() < known[1] else None

    async def refresh_limits(self) -> None:
        """Ask the stores again for the maximum size of a body. If a store does not answer, the known limit stays."""
        if self._body_limit is not None:
            try:
                self.max_body_bytes = await self.call(self._body_limit)
            except RaymqError as error:
                logger.info("the stores' limit of a body is unknown now: %s", error)

    async def call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call in one of CLUSTER_CALLS_MAX threads."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *arguments)

    def later(self, call: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in a task of its own, without a result. A failure is logged."""
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.warning("a call in the background failed: %s", error)

    def group_calls(self, group: str, namespace: Namespace) -> GroupCalls:
        """Return the calls of a consumer group. `group`: the stored name.

        If there are more than GROUPS_OPEN_MAX groups, the calls of the group that was used least recently are closed.
        """
        key = group, namespace.name
        found = self._group_calls.get(key)
        if found is None:
            found = self._group_calls[key] = self._make_calls(group, namespace)
        self._group_calls.move_to_end(key)
        if len(self._group_calls) > GROUPS_OPEN_MAX:
            _, oldest = self._group_calls.popitem(last=False)
            self.later(self.call(oldest.close))
        return found

    async def receive(self, receive: PollingReceive) -> list[ReceivedMessage]:
        """Run a receive. If the caller is cancelled, the receive ends at its brokers, too, and leases no more messages.

        Raises SystemBusyError if this gateway would wait for messages more than RECEIVES_MAX times.
        """
        waits = len(receive.brokers)
        if self._waits + waits > RECEIVES_MAX:
            raise SystemBusyError(f"this gateway waits for messages {self._waits} times; its maximum is {RECEIVES_MAX}")
        self._waits += waits
        try:
            return await receive.run(self.later)
        finally:
            self._waits -= waits

    def broker(self, name: str) -> AsyncBrokerClient:
        """Return the client of a broker, which the calls of all groups share."""
        found = self._brokers.get(name)
        if found is None:
            found = self._brokers[name] = AsyncBrokerClient(name)
        return found

    async def finish(self) -> None:
        """Wait up to FINISH_S for the calls in the background, above all for calls that give back the messages that no
        client has got. Call this method after the server has stopped: messages that are not given back are delivered
        again only after their invisible time."""
        try:
            async with asyncio.timeout(FINISH_S):
                while self._tasks:
                    await asyncio.wait(self._tasks)
                for calls in list(self._group_calls.values()):
                    await calls.finish()
        except TimeoutError:
            logger.info("some calls had not ended %s s after the gateway's server", FINISH_S)

    def close(self) -> None:
        """End the calls to brokers, let the threads end after their calls, and close the calls of groups.
        Idempotent."""
        for broker in self._brokers.values():
            broker.close()
        while self._group_calls:
            self.threads.submit(self._group_calls.popitem()[1].close)
        self.threads.shutdown(wait=False)


def cluster_of(client: Client, producer: AsyncProducer, send_timeout_s: float) -> GatewayCluster:
    """Return the cluster of a client without a namespace: the gateway adds the namespaces of its own clients.
    `send_timeout_s`: the timeout of `producer`, in seconds. The caller closes the client and the producer."""

    def make_calls(group: str, namespace: Namespace) -> GroupCalls:
        return AsyncPopCalls(
            group,
            routes=client.routes,
            storages=client.storages,
            broker=cluster.broker,
            threads=cluster.threads,
            names=namespace,
        )

    def body_limit() -> int:
        masters = [group.storages.get(MASTER_ID) for group in client.routes.brokers().values()]
        limits = [client.storages.get(name).describe().max_message_size_bytes for name in masters if name]
        return min([producer.max_message_size_bytes, *limits])

    transactions = GroupTransactions(routes=client.routes, storage=client.storages.get, brokers=client.routes.brokers)
    cluster = GatewayCluster(
        *(client.routes, BrokersGroupSettings(client.routes.brokers), producer, make_calls),
        *(transactions, client.heartbeats),
        QueueCalls(client.routes, client.storages),
        send_timeout_s=send_timeout_s,
        body_limit=body_limit,
    )
    return cluster
