"""The server side of a broker's lane (direct socket connection). It answers the clients' frequent calls, which are
faster over a lane than as calls to a Ray actor (raymq.remoting.broker_client).

No thread waits for an offset commit. The lane's thread passes commits to the state log, which answers after they are
durable, usually in the same thread (actors.broker.direct_appends). Receives and acknowledgements work in the same way
(actors.broker.pop). The other methods may wait, and run in a thread pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from actors.access.authenticated_server import lane_guard, lane_users
from actors.request_pool import RequestKind, RequestPool
from raymq.common.config.cluster import BrokerOptions
from raymq.common.errors import RaymqError
from raymq.common.protocol.group import CommitAnswer, OffsetCommit
from raymq.common.protocol.stats import RequestFigures
from raymq.remoting.broker_client import LANE_RESULTS
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import ControlCalls, encode_result
from raymq.remoting.lane.connection import Context, LaneRequest
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.loop import Loop
from raymq.remoting.lane.server import LaneServer

LANE_THREADS: Final = 16
"""Number of threads for calls that may block. If all threads are busy, further calls are queued."""
_COMMIT: Final = "commit_offsets"
_HEARTBEATS: Final = frozenset({"heartbeat", "unregister_client"})
"""The methods whose calls wait in the heartbeat request queue, as in RocketMQ. The other calls that may block wait in
the request queue of the client manager."""


class CommitSoon(Protocol):
    """The type of GroupMethods._commit_soon, which commits offsets and answers later."""

    def __call__(
        self,
        group: str,
        commits: Mapping[str, Mapping[int, OffsetCommit]],
        answer: Callable[[CommitAnswer], None],
        fail: Callable[[BaseException], None],
    ) -> None: ...


DEFAULT_OPTIONS: Final = BrokerOptions()


def request_kinds(options: BrokerOptions) -> list[RequestKind]:
    """Return the kinds of requests that a broker's lane (direct socket connection) queues separately while all its
    threads are busy. Each kind has its own limits on waiting requests and on their wait."""
    return [
        RequestKind(
            "heartbeat",
            options.heartbeat_queue_capacity,
            options.wait_time_in_heartbeat_queue_ms / 1000,
            "heartbeat_queue_capacity",
            "wait_time_in_heartbeat_queue_ms",
        ),
        RequestKind(
            "client",
            options.client_manager_queue_capacity,
            options.wait_time_in_client_manager_queue_ms / 1000,
            "client_manager_queue_capacity",
            "wait_time_in_client_manager_queue_ms",
        ),
    ]


class BrokerLane:
    """Serves the methods of `broker` that LANE_RESULTS names, over lanes (direct socket connections).

    `host`: an IP address of this node, for clients on other nodes.
    """

    def __init__(
        self,
        label: str,
        broker: Any,
        commit_soon: CommitSoon,
        host: str,
        at_once: Mapping[str, Callable[..., None]] | None = None,
        options: BrokerOptions = DEFAULT_OPTIONS,
        contexts: Callable[[], Context | None] = lambda: None,
    ) -> None:
        """`at_once`: non-blocking methods that send their answers themselves. They replace `broker`'s methods of the
        same names. `contexts` makes the state of each connection for these methods.

        `options`: how many calls of the other methods may wait for a thread, and how long.
        """
        self._commit_soon = commit_soon
        answered_later = {_COMMIT: self._commit, **(at_once or {})}
        self._pool = RequestPool("broker-lane", LANE_THREADS, request_kinds(options))
        self._heartbeats, self._others = self._pool.queues["heartbeat"], self._pool.queues["client"]
        methods = {name: getattr(broker, name) for name in LANE_RESULTS if name not in answered_later}
        calls = ControlCalls(methods, self._call_soon, answered_later, guard=lane_guard())
        self._host = host
        self._server = LaneServer(label, {FrameKind.CALL: calls}, contexts=contexts, users=lane_users())
        self._pool.refuse_by(self._server.loop)

    @property
    def address(self) -> LaneAddress:
        """The address of this broker's lane (direct socket connection) for clients on this node and on other nodes
        (LaneServer.open_to_nodes)."""
        return self._server.open_to_nodes(self._host)

    @property
    def loop(self) -> Loop:
        """The event loop that runs in the thread of the lane (direct socket connection)."""
        return self._server.loop

    def close(self) -> None:
        """Close every lane (direct socket connection), and end each thread after its current call. Idempotent."""
        self._server.close()
        self._pool.close()

    def requests(self) -> list[RequestFigures]:
        """Return metrics of the calls that wait for a thread, by request kind."""
        return self._pool.figures()

    def limit(self, options: BrokerOptions) -> None:
        """Change the limits of calls that wait for a thread of the lane (direct socket connection): their maximum
        number, and their maximum waiting time."""
        self._pool.limit(request_kinds(options))

    def _call_soon(self, method: str, call: Callable[[], None], fail: Callable[[RaymqError], None]) -> None:
        (self._heartbeats if method in _HEARTBEATS else self._others).submit(call, fail)

    def _commit(self, request: LaneRequest, group: str, commits: Mapping[str, Mapping[int, OffsetCommit]]) -> None:
        def fail(error: BaseException) -> None:
            request.fail(request.told(error, _COMMIT) if isinstance(error, Exception) else error)

        self._commit_soon(group, commits, lambda answer: request.answer(encode_result(answer)), fail)
