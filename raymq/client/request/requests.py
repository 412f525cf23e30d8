"""ClientRequests are the requests of a client's producers: they wait here, and their replies are watched for.

begin     the reply queue is watched ▶ the request waits (pending.py) ▶ the producer sends it
reply     a listener's or a producer's, an append into that queue ▶ reply_watch.py ▶ the request ends
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from typing import Final

from raymq.client.request.pending import Pending, PendingRequests
from raymq.client.request.reply_watch import IDLE_AFTER_S, ReplyWatch
from raymq.common.errors import InvalidArgumentError, RaymqError, RequesterGoneError
from raymq.common.message import PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT, Message, MessageExt, SystemMessage
from raymq.common.protocol.request_reply import RequestStatistics, reply_queue, request_message
from raymq.common.protocol.route import TopicRoute
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.heartbeats import Heartbeats
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

PRESENT_VALID_S: Final = 5.0
"""Time for which a client that the broker knows is not asked about again."""
_PRESENT_MAX: Final = 10_000
_PRESENT_TIMEOUT_S: Final = 2.0


class Presence:
    """Says if the senders of requests are gone, by their heartbeats at the broker that the request came from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s: dict[tuple[str, str], float] = {}
        self._brokers: dict[str, ActorRef] = {}

    def is_gone(self, request: MessageExt) -> bool:
        """True if the broker knows that the sender of a request is gone; False also where it does not answer."""
        client_id, broker_name = request.system_properties[PROPERTY_REPLY_TO_CLIENT], request.broker_name
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._until_s.get((client_id, broker_name), 0.0):
                return False
            broker = self._brokers.setdefault(broker_name, ActorRef(broker_name))
        try:
            known = bool(broker.call("knows_client", client_id, timeout_s=_PRESENT_TIMEOUT_S))
        except RaymqError:
            return False
        if known:
            with self._lock:
                if len(self._until_s) >= _PRESENT_MAX:
                    self._until_s.clear()
                self._until_s[client_id, broker_name] = now_s + PRESENT_VALID_S
        return not known


class ClientRequests:
    """The requests of one client. Thread-safe."""

    def __init__(self, routes: RouteCache, storages: StorageClients, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self._pending = PendingRequests()
        self._presence = Presence()
        self._watch = ReplyWatch(
            heartbeats.client_id, routes, storages, take=self._pending.complete, idle_s=self._pending.idle_s
        )
        self._lock = threading.Lock()
        """Held over the calls with which the watch of a queue begins."""

    def begin(self, route: TopicRoute, message: Message, timeout_s: float) -> Pending:
        """Wait for the reply to a message from now on. `route`: of its topic. InvalidArgumentError, SystemBusyError,
        ClientStateError, RaymqError when a broker group of the topic does not answer."""
        if not 0 < timeout_s < math.inf:
            raise InvalidArgumentError(f"timeout_s must be positive, not {timeout_s!r}")
        cluster = next(iter(route.brokers.values())).cluster  # a raymq has one
        wakes = self._begin_watch(cluster, route) or self._pending.idle_s() > IDLE_AFTER_S / 2
        correlation_id = str(uuid.uuid4())
        ttl_ms = math.ceil(timeout_s * 1000)

        def make() -> SystemMessage:
            return request_message(message, correlation_id, self._heartbeats.client_id, cluster, ttl_ms)

        pending = self._pending.add(correlation_id, timeout_s, make)
        if wakes:
            self._watch.wake()
        return pending

    def check_present(self, request: MessageExt) -> None:
        """RequesterGoneError if the broker knows that the sender of a request is gone."""
        if self._presence.is_gone(request):
            asked = request.system_properties
            raise RequesterGoneError(asked[PROPERTY_REPLY_TO_CLIENT], asked[PROPERTY_CORRELATION_ID])

    def statistics(self) -> RequestStatistics:
        """The requests so far, by how they ended."""
        return self._pending.statistics()

    def close(self) -> None:
        """End all requests that wait, and the threads. Idempotent."""
        self._pending.close()
        self._watch.close()

    def _begin_watch(self, cluster: str, route: TopicRoute) -> bool:
        """Watch the reply queues of the broker groups that may get a request; True if one was not watched before."""
        begun = False
        for data in route.queues:
            replies = reply_queue(cluster, data.broker_name, self._heartbeats.client_id)
            if self._watch.watches(replies):
                continue
            with self._lock:
                if not self._watch.watches(replies):
                    # Before a reply comes: its sender asks the broker for this client.
                    self._heartbeats.send_now(data.broker_name)
                    self._watch.begin(replies)
                    begun = True
        return begun
