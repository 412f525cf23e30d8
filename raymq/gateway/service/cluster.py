"""The part of raymq on which a gateway's calls work, without a blocking call in the event loop.

Routes of topics are reused for ROUTE_VALID_S, so that a send needs no thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from raymq.client.producer.async_producer import ROUTE_VALID_S, AsyncProducer
from raymq.common.errors import GroupNotExistError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.route import TopicRoute
from raymq.remoting.route_cache import DEFAULT_TOPIC_QUEUE_NUMS

ROUTES_MAX: Final = 10_000
"""Maximum number of topics whose routes are kept. Beyond this number all are dropped."""
CLUSTER_CALLS_MAX: Final = 16
"""Maximum number of threads that one gateway uses for blocking calls."""

T = TypeVar("T")


class TopicRoutes(Protocol):
    """The routes of a raymq client (`raymq.remoting.route_cache.RouteCache`). The calls may block."""

    def get(self, topic: str) -> TopicRoute: ...
    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute: ...


class GroupSettings(Protocol):
    """The settings of groups (`client.admin`). The call blocks."""

    def group_config(self, group: str) -> GroupConfig: ...


class GatewayCluster:
    """The routes, groups and producer of one gateway process. Close it.

    `producer` sends for all clients; whoever made it closes it. `send_timeout_s`: the producer's timeout of a send.
    `max_body_bytes`: the maximum size of a body.
    """

    def __init__(
        self,
        routes: TopicRoutes,
        groups: GroupSettings,
        producer: AsyncProducer,
        *,
        send_timeout_s: float,
        max_body_bytes: int = MAX_MESSAGE_SIZE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.producer, self.send_timeout_s, self.max_body_bytes = producer, send_timeout_s, max_body_bytes
        self._routes, self._groups, self._clock = routes, groups, clock
        self._known: dict[str, tuple[TopicRoute, float]] = {}
        self._calls = ThreadPoolExecutor(CLUSTER_CALLS_MAX, "gateway")

    async def route(self, topic: str, *, create: bool = False) -> TopicRoute:
        """Return a topic's route, at most ROUTE_VALID_S older than the client's route. `create`: create the topic if it
        does not exist and the cluster allows it. Raises TopicNotExistError."""
        known = self._known.get(topic)
        if known is not None and self._clock() < known[1]:
            return known[0]
        if create:
            route = await self.call(self._routes.get_or_create, topic, DEFAULT_TOPIC_QUEUE_NUMS)
        else:
            route = await self.call(self._routes.get, topic)
        if len(self._known) >= ROUTES_MAX:
            self._known.clear()
        self._known[topic] = route, self._clock() + ROUTE_VALID_S
        return route

    async def group_config(self, group: str) -> GroupConfig:
        """Return a group's settings; the default settings if the group does not exist yet."""
        try:
            return await self.call(self._groups.group_config, group)
        except GroupNotExistError:
            return GroupConfig(group)

    async def call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call in one of CLUSTER_CALLS_MAX threads."""
        return await asyncio.get_running_loop().run_in_executor(self._calls, call, *arguments)

    def close(self) -> None:
        """Let the threads end after their calls. Idempotent."""
        self._calls.shutdown(wait=False, cancel_futures=True)
