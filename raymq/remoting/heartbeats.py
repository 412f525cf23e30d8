"""Sends a client's heartbeats, which report its producers and consumers to every broker each 30 s and soon after a
change.

    heartbeats.set_producer(producer, group)         a client's producer
    heartbeats.set_consumer(consumer, ConsumerData)  a consumer; again when its subscriptions have changed
    heartbeats.remove(producer or consumer)          when it closes

One thread sends the heartbeats (raymq.common.protocol.clients defines them). If a broker does not answer, the next
heartbeat retries. A missing heartbeat affects only administrators' views. Each answer shows if the cluster's metrics
are on. If they are on, the same thread reports this process's metrics every 10 s
(raymq.telemetry.metrics.client_figures). While the client has consumers that answer administrators' queries, another
thread polls a broker for queries (raymq.common.members).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from raymq.common.errors import RaymqError
from raymq.common.members.questions import Answers, MemberAnswer, Question
from raymq.common.parallel import start_daemon
from raymq.common.protocol.clients import CLIENT_HEARTBEAT_INTERVAL_S, ClientHeartbeat, ConsumerData
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.question_listener import QuestionListener
from raymq.remoting.route_cache import RouteCache
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, ClientMetrics
from raymq.telemetry.metrics.instruments import REPORT_INTERVAL_S

HEARTBEAT_CALL_TIMEOUT_S: Final = 5.0
"""Timeout in seconds of a heartbeat call to one broker. Also the maximum time that `close` waits for the heartbeat
thread."""
GATHER_S: Final = 0.05
"""Time in seconds for which changes are collected before a heartbeat is sent. Programs often create several consumers
at once."""

logger = logging.getLogger(__name__)


class Heartbeats:
    """Sends the heartbeats of one client. Thread-safe. `host`: this node's IP address; `node_id`: the id of this Ray
    node."""

    def __init__(self, routes: RouteCache, host: str, node_id: str = "") -> None:
        self._routes = routes
        self._host, self._node_id = host, node_id
        self.client_id = f"{host}@{os.getpid()}@{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._producers: dict[int, str] = {}
        self._consumers: dict[int, ConsumerData] = {}
        self._members: dict[int, Answers] = {}
        """The client's consumers that can answer administrators' queries."""
        self._questions: QuestionListener | None = None
        self._brokers: dict[str, ActorRef] = {}
        self._changed = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def set_producer(self, producer: object, group: str) -> None:
        """Add a producer of the group `group` to the heartbeats."""
        with self._lock:
            self._producers[id(producer)] = group
        self._send_soon()

    def send_now(self, broker_name: str) -> None:
        """Report this client's producers and consumers to one broker now. Raises RaymqError if the broker does not
        answer."""
        broker = self._brokers.setdefault(broker_name, ActorRef(broker_name))
        broker.call("heartbeat", self._heartbeat(), timeout_s=HEARTBEAT_CALL_TIMEOUT_S)

    def set_consumer(self, consumer: object, data: ConsumerData) -> None:
        """Include a consumer in this client's heartbeats, with the description `data`. A later call replaces the
        consumer's description."""
        with self._lock:
            known = self._consumers.get(id(consumer))
            since_ms = time.time_ns() // 1_000_000 if known is None else known.since_ms
            self._consumers[id(consumer)] = replace(data, since_ms=since_ms)
            if isinstance(consumer, Answers):
                self._members[id(consumer)] = consumer
                if self._questions is None and not self._closed:
                    self._questions = QuestionListener(self.client_id, self._routes.brokers, self._answer)
        self._send_soon()

    def remove(self, item: object) -> None:
        """Remove a closed producer or consumer from the heartbeats. Does nothing if the heartbeats do not
        contain it."""
        with self._lock:
            known = self._producers.pop(id(item), None) or self._consumers.pop(id(item), None)
            self._members.pop(id(item), None)
        if known is not None:
            self._send_soon()

    def close(self) -> None:
        """Unregister this client at the brokers and stop the heartbeat thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread, questions = self._thread, self._questions
        if questions is not None:
            questions.begin_close()
        self._changed.set()
        if thread is not None:
            thread.join(HEARTBEAT_CALL_TIMEOUT_S)
        if questions is not None:
            questions.close()

    def _send_soon(self) -> None:
        self._changed.set()
        with self._lock:
            if self._thread is None and not self._closed:
                # At the interpreter's exit no thread starts; the client then ends before a heartbeat is due.
                self._thread = start_daemon(self._run, name="heartbeats")

    def _run(self) -> None:
        next_s = 0.0
        while not self._closed:
            if self._changed.is_set() or time.monotonic() >= next_s:
                self._changed.clear()
                self._call_brokers("heartbeat", self._heartbeat)
                next_s = time.monotonic() + CLIENT_HEARTBEAT_INTERVAL_S
            CLIENT_FIGURES.report_if_due()
            if self._changed.wait(min(REPORT_INTERVAL_S, CLIENT_HEARTBEAT_INTERVAL_S)) and not self._closed:
                time.sleep(GATHER_S)
        self._call_brokers("unregister_client", lambda: self.client_id)

    def _heartbeat(self) -> ClientHeartbeat:
        with self._lock:
            producers, consumers = frozenset(self._producers.values()), tuple(self._consumers.values())
        return ClientHeartbeat(
            *(self.client_id, self._host, os.getpid(), producers, consumers),
            node=self._node_id,
            version=_own_version(),
        )

    def _answer(self, question: Question) -> MemberAnswer:
        """Return the answer to an administrator's query about this client's consumers. Raises RaymqError if the query
        fails."""
        with self._lock:
            names = {key: data for key, data in self._consumers.items() if data.group == question.group}
            members = [
                self._members[key]
                for key, data in names.items()
                if key in self._members and (question.member in ("", data.member))
            ]
        if not members:
            wanted = f" {question.member!r}" if question.member else ""
            return MemberAnswer(f"this client has no member{wanted} of group {question.group!r} now")
        if question.kind == "consume":
            return MemberAnswer(
                consumed=members[0].consume_directly(self.client_id, question.record, question.broker_name)
            )
        running = [one.running_info(self.client_id, self._host, stacks=question.stacks) for one in members]
        return MemberAnswer(running=tuple(running))

    def _call_brokers(self, method: str, argument: Callable[[], object]) -> None:
        """Call a method of every known broker, present or former.

        `argument()` builds the method's argument anew for each call. An argument that was built earlier might contain a
        consumer that has closed since. An administrator may then have deleted the consumer's group, and the outdated
        heartbeat would create the group again.
        """
        try:
            for name in self._routes.brokers():
                self._brokers.setdefault(name, ActorRef(name))
        except RaymqError as error:
            logger.debug("no NameServer says which brokers there are: %s", error)
        for broker in list(self._brokers.values()):
            try:
                answer = broker.call(method, argument(), timeout_s=HEARTBEAT_CALL_TIMEOUT_S)
                if isinstance(answer, ClientMetrics):
                    CLIENT_FIGURES.told(answer)
            except RaymqError as error:
                logger.info("%s did not accept %s: %s", broker.name, method, error)


@cache
def _own_version() -> str:
    """Return the version of this process's raymq; empty if raymq is not installed."""
    try:
        return version("raymq")
    except PackageNotFoundError:
        return ""
