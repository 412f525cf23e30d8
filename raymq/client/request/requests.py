"""ClientRequests: the requests of a client's producers, from the registration of a request to its reply.

direct    a request with durable=False travels over lanes only (direct.py)
begin     watch the reply queue ▶ the request waits (pending.py) ▶ the producer sends it
reply     a listener or a producer appends the reply to that queue ▶ reply_watch.py ▶ the request completes
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from typing import Final

from raymq.client.request.direct import DirectRequests
from raymq.client.request.pending import PendingRequests, WaitingRequest
from raymq.client.request.reply_watch import IDLE_AFTER_S, ReplyWatch
from raymq.common.errors import InvalidArgumentError, RaymqError, RequesterGoneError
from raymq.common.message import PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT, Message, MessageExt, SystemMessage
from raymq.common.protocol.request_reply import RequestStatistics, reply_queue, request_message
from raymq.common.protocol.route import TopicRoute
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.heartbeats import Heartbeats
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

ALIVE_VALID_S: Final = 5.0
"""Time in seconds for which a requester is assumed to be alive after the broker has confirmed that it is
connected."""
_ALIVE_MAX: Final = 10_000
_ALIVE_TIMEOUT_S: Final = 2.0


class RequesterLiveness:
    """Checks if a client that sent a request has disconnected, according to its heartbeats at the request's
    broker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s: dict[tuple[str, str], float] = {}
        self._brokers: dict[str, ActorRef] = {}

    def is_gone(self, request: MessageExt) -> bool:
        """Return True if the broker reports that the client of a request has disconnected. Returns False if the broker
        does not answer."""
        client_id, broker_name = request.system_properties[PROPERTY_REPLY_TO_CLIENT], request.broker_name
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._until_s.get((client_id, broker_name), 0.0):
                return False
            broker = self._brokers.setdefault(broker_name, ActorRef(broker_name))
        try:
            known = bool(broker.call("knows_client", client_id, timeout_s=_ALIVE_TIMEOUT_S))
        except RaymqError:
            return False
        if known:
            with self._lock:
                if len(self._until_s) >= _ALIVE_MAX:
                    self._until_s.clear()
                self._until_s[client_id, broker_name] = now_s + ALIVE_VALID_S
        return not known


class ClientRequests:
    """Registers the requests of one client's producers, and reads their replies. Thread-safe."""

    def __init__(self, routes: RouteCache, storages: StorageClients, heartbeats: Heartbeats, host: str = "") -> None:
        """`host`: the address of this node."""
        self._heartbeats = heartbeats
        self._direct = DirectRequests(heartbeats.client_id, host)
        self._pending = PendingRequests()
        self._liveness = RequesterLiveness()
        self._watch = ReplyWatch(
            heartbeats.client_id, routes, storages, take=self._pending.complete, idle_s=self._pending.idle_s
        )
        self._lock = threading.Lock()
        """Lock that is held during the remote calls that start the reading of reply queues."""

    def begin(self, route: TopicRoute, message: Message, timeout_s: float) -> WaitingRequest:
        """Register a request that waits for the reply to `message`. After this call the caller sends the request.
        `route`: the route of the message's topic.

        Raises InvalidArgumentError if `timeout_s` is out of range, SystemBusyError if too many requests wait,
        ClientStateError after `close`, and a RaymqError if a broker group of the topic does not answer.
        """
        if not 0 < timeout_s < math.inf:
            raise InvalidArgumentError(f"timeout_s must be positive, not {timeout_s!r}")
        # The cluster name of any broker will do, because all brokers of one raymq cluster have the same cluster name.
        cluster = next(iter(route.brokers.values())).cluster
        wakes = self._begin_watch(cluster, route) or self._pending.idle_s() > IDLE_AFTER_S / 2
        correlation_id = str(uuid.uuid4())
        ttl_ms = math.ceil(timeout_s * 1000)

        def make() -> SystemMessage:
            return request_message(message, correlation_id, self._heartbeats.client_id, cluster, ttl_ms)

        pending = self._pending.add(correlation_id, timeout_s, make)
        if wakes:
            self._watch.wake()
        return pending

    @property
    def direct(self) -> DirectRequests:
        """The requests of this client that are not stored."""
        return self._direct

    def check_present(self, request: MessageExt) -> None:
        """Check that the client that sent `request` is still connected. Raises RequesterGoneError if the broker reports
        that this client has disconnected."""
        if self._liveness.is_gone(request):
            asked = request.system_properties
            raise RequesterGoneError(asked[PROPERTY_REPLY_TO_CLIENT], asked[PROPERTY_CORRELATION_ID])

    def statistics(self) -> RequestStatistics:
        """Return the numbers of this client's requests so far, by their outcome."""
        return self._direct.statistics(self._pending.statistics())

    def close(self) -> None:
        """Fail all waiting requests, and stop the threads that read replies and expire requests. Idempotent."""
        self._direct.close()
        self._pending.close()
        self._watch.close()

    def _begin_watch(self, cluster: str, route: TopicRoute) -> bool:
        """Start to read the reply queues of all broker groups of the topic. Returns True if this call started to read
        any queue."""
        begun = False
        for data in route.queues:
            replies = reply_queue(cluster, data.broker_name, self._heartbeats.client_id)
            if self._watch.watches(replies):
                continue
            with self._lock:
                if not self._watch.watches(replies):
                    # Before the replier sends a reply, it asks the broker if this client is alive. So send this
                    # client's heartbeat before a reply can arrive.
                    self._heartbeats.send_now(data.broker_name)
                    self._watch.begin(replies)
                    begun = True
        return begun
