"""Console: the state that all pages of one console application share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from raymq.client.admin.live_tails import Positions, Tails
from raymq.client.admin.messages import Arrived
from raymq.common.errors import RaymqError
from raymq.common.protocol.clients import ProducerConnection
from raymq.tools.console.cluster import ClusterView, ConsoleCluster
from raymq.tools.console.messages.replays import Replays
from raymq.tools.console.security.sessions import NOTICES_MAX, ConsoleUser, Notice, Session, Sessions
from raymq.tools.console.settings import ConsoleSettings
from raymq.tools.console.web.history import SAMPLE_INTERVAL_S, ClusterFigures, RateHistory, spark_points
from raymq.tools.console.web.lists import GroupRow, Listing, TopicRow, cluster_figures, list_groups, list_topics
from raymq.tools.console.web.render import Renderer
from raymq.tools.console.web.snapshots import (
    LIST_TIMEOUT_S,
    PAGE_QUERY_TIMEOUT_S,
    SNAPSHOT_KEPT_S,
    CachedAnswer,
    CallPool,
    Snapshots,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Console:
    """The shared state of a console application: the cluster and the calls to it, cached lists, rates, sessions, live
    tails and replays. Each application has one Console object."""

    def __init__(self, cluster: ConsoleCluster, settings: ConsoleSettings) -> None:
        self.settings = settings
        self.renderer = Renderer(settings)
        self.calls = CallPool(cluster)
        self.snapshots = Snapshots(kept_s=min(settings.refresh_s, SNAPSHOT_KEPT_S))
        self.history = RateHistory()
        self._sparklines: dict[str, str] = {}
        """Cached sparklines (small charts) by topic. They are dropped at each new sample."""
        self.sessions = Sessions()
        self.tails = Tails(
            self._read_tail, rate=settings.tail_rate, max_viewers=settings.max_viewers, limit="console.max_viewers"
        )
        self.replays = Replays()

    async def ask(self, call: Callable[[ConsoleCluster], T], timeout_s: float = PAGE_QUERY_TIMEOUT_S) -> T:
        """Run a call to the cluster in the console's pool of threads, and return its result. Raises the call's error,
        or RequestTimeoutError after `timeout_s`."""
        return await self.calls.call(call, timeout_s)

    async def cluster(self, kept_s: float | None = None) -> CachedAnswer[ClusterView]:
        """Return the state of the cluster, from a cached answer that is at most `kept_s` seconds old; by default at
        most SNAPSHOT_KEPT_S."""
        return await self._cached("cluster", lambda cluster: cluster.control.cluster(), kept_s)

    async def topics(self) -> CachedAnswer[Listing[TopicRow]]:
        """Return the list of topics, from a cache that is at most a few seconds old."""
        return await self._cached("topics", lambda cluster: list_topics(cluster.admin))

    async def groups(self) -> CachedAnswer[Listing[GroupRow]]:
        """Return the list of groups, from a cache that is at most a few seconds old."""
        return await self._cached("groups", lambda cluster: list_groups(cluster.admin))

    async def producers(self) -> CachedAnswer[list[ProducerConnection]]:
        """Return the connected producers, from a cache that is at most a few seconds old."""
        return await self._cached("producers", lambda cluster: cluster.admin.producer_connections())

    async def _cached(
        self, name: str, call: Callable[[ConsoleCluster], T], kept_s: float | None = None
    ) -> CachedAnswer[T]:
        return await self.snapshots.get(name, lambda: self.ask(call, LIST_TIMEOUT_S), kept_s=kept_s)

    async def sample_figures(self) -> None:
        """Store a sample of the cluster's counters every SAMPLE_INTERVAL_S, until the task is cancelled."""
        while True:
            try:
                self.history.add(await self.ask(_figures, LIST_TIMEOUT_S))
                self._sparklines.clear()
            except RaymqError as error:
                logger.info("cannot sample the cluster's metrics: %s", error)
            except Exception:  # a failed sample must not stop the sampling
                logger.exception("cannot sample the cluster's metrics")
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def sparkline(self, topic: str) -> str:
        """Return the points of a topic's sparkline (small chart): incoming messages per second over the last hour.
        Returns "" if the rates are unknown."""
        if topic not in self._sparklines:
            self._sparklines[topic] = spark_points(self.history.topics.growth(topic))
        return self._sparklines[topic]

    async def _read_tail(self, topic: str, positions: Positions | None, most: int) -> Arrived:
        return await self.ask(lambda cluster: cluster.admin.tail(topic, positions, max_messages=most))

    def close_streams(self) -> None:
        """End all live tails. Otherwise a server that stops would wait for their connections."""
        self.tails.close()

    def close(self) -> None:
        """End all live tails, refuse further calls to the cluster, and stop each replay after the dead letter that it
        currently sends."""
        self.close_streams()
        self.replays.close()
        self.calls.close()


def _figures(cluster: ConsoleCluster) -> ClusterFigures:
    return cluster_figures(cluster.admin, time.time_ns() // 1_000_000)


def console_of(request: Request) -> Console:
    """Return the Console of the application that serves this request."""
    console: Console = request.app.state.console
    return console


def user_of(request: Request) -> ConsoleUser:
    """Return the user of a request that has passed the access check."""
    user: ConsoleUser = request.scope["user"]
    return user


def session_of(request: Request) -> Session | None:
    """Return the session of the request's user. Returns None for scripts, and if the console needs no login."""
    user: ConsoleUser | None = request.scope.get("user")
    return request.app.state.console.sessions.find(user.session, time.monotonic()) if user and user.session else None


def notify(request: Request, kind: str, text: str) -> None:
    """Show the sentence `text` on the user's next page. `kind`: "done" or "failed"."""
    session = session_of(request)
    if session is not None:
        session.notices = [*session.notices, Notice(kind, text)][-NOTICES_MAX:]
