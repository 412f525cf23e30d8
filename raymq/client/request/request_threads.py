"""RequestThreads answers requests with ``durable=False`` in a listener's process.

    manager thread    knows the broker groups of the topics; each of them has at least one worker thread
    worker thread     waits for a request on a lane of its own ▶ calls the listener ▶ sends the answer, and waits again

A worker calls the listener in the thread that has received the request, so a request costs no thread switch. If all
workers of a broker group work, one more starts, up to `request_threads`. A worker ends if it has waited for a whole
turn while another one waits. All workers together make at most `request_threads` listener calls at a time.

The answer and the wait for the next request are one call. If its lane breaks, the requester gets an error from the
broker, and the worker connects again. Nothing survives the process.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from raymq.client.consumer.push.answers import Replier
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.request.replier import replies_of
from raymq.common.errors import (
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    TopicNotExistError,
)
from raymq.common.message import ConsumeStatus, MessageExt
from raymq.common.namespaces import Namespace
from raymq.common.parallel import start_daemon
from raymq.common.protocol.request_reply import Reply, ReplyStatistics
from raymq.common.retry import Backoff
from raymq.remoting.actor_ref import running_nameservers
from raymq.remoting.broker_client import LANE_RESULTS, BrokerClient, broker_client
from raymq.remoting.direct_requests import (
    TURN_WAIT_MS,
    AnswerKind,
    DirectDelivery,
    DirectTurn,
    decode_request,
    encode_failure,
    encode_no_reply,
    encode_reply,
)
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane_pool import LANE_LOST, lane_broken
from raymq.remoting.route_cache import RouteCache
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES

BROKERS_INTERVAL_S: Final = 2.0
"""Interval in seconds at which the broker groups of the topics are read from the cached routes."""
OPEN_LANE_S: Final = 5.0
TURN_TIMEOUT_S: Final = TURN_WAIT_MS / 1000 + 10.0
"""Time in seconds within which a broker must answer a turn."""
RECONNECT_MAX_S: Final = 2.0
"""Maximum pause in seconds before a worker connects again to a broker that it cannot reach."""
START_PAUSE_S: Final = 0.05
"""Interval in seconds at which the manager looks after the workers until all broker groups have one."""
_METHOD: Final = "take_requests"
_LAST: Final = -1
"""The `wait_ms` of a worker's last turn, after which the broker hands it no further request."""
SUSPEND_WAIT_S: Final = 1.0
"""Maximum time in seconds that `suspend` waits for the end of the workers."""

logger = logging.getLogger(__name__)

CallListener = Callable[[MessageExt, Replier], tuple[str, str, float]]
"""Function that calls the listener with a message. It returns the status, the reason of a failure, and the duration in
ms, as ConsumePool.call_directly. The Replier gets the listener's replies."""


class _OneReply:
    """Keeps the reply that a listener returns for one request (raymq.client.consumer.push.answers.Replier)."""

    def __init__(self) -> None:
        self.reply: Reply | None = None

    def answer(self, messages: Sequence[MessageExt], answer: Reply | Sequence[object]) -> str:
        replies, wrong = replies_of(messages, answer)
        if replies:
            self.reply = replies[0]
        return wrong

    def statistics(self) -> ReplyStatistics:
        return ReplyStatistics()


@dataclass(eq=False, slots=True)
class _BrokerGroup:
    """The workers of one broker group.

    `first` and `idle`: the turns of a worker that registers, and of a worker that has no answer. `workers`: number of
    the workers; `waiting`: how many of them wait for a request. `is_connected`: True while a worker is registered.
    """

    client: BrokerClient
    first: DirectTurn
    idle: DirectTurn
    workers: int = 0
    waiting: int = 0
    is_connected: bool = False

    @property
    def name(self) -> str:
        return self.client.name


class _Routes:
    """The broker groups that have a listener's topics, by the routes of a NameServer."""

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = topics
        self._cache: RouteCache | None = None

    def brokers(self) -> dict[str, frozenset[str]]:
        """Return the topics that each broker group has, without topics that do not exist. Raises RaymqError if no
        NameServer answers."""
        if self._cache is None:
            self._cache = RouteCache(running_nameservers())
        found: dict[str, set[str]] = {}
        for topic in self._topics:
            with suppress(TopicNotExistError):
                for data in self._cache.get(topic).queues:
                    found.setdefault(data.broker_name, set()).add(topic)
        return {name: frozenset(topics) for name, topics in found.items()}


class RequestThreads:
    """The threads that answer the direct requests of one push-consumer instance. Thread-safe.

    `call` calls the listener. `brokers` returns the topics of each broker group; by default, by the routes in a cache
    that this object makes.
    """

    def __init__(
        self,
        settings: PushSettings,
        instance: str,
        call: CallListener,
        *,
        brokers: Callable[[], Mapping[str, frozenset[str]]] | None = None,
        client_of: Callable[[str], BrokerClient] = broker_client,
    ) -> None:
        self._settings, self._instance, self._call, self._client_of = settings, instance, call, client_of
        names = Namespace(settings.namespace)
        self._tags = {one.topic: tuple(sorted(one.tags)) for one in settings.subscriptions}
        self._shown = {topic: names.unwrap(topic) for topic in self._tags}
        self._brokers = brokers or _Routes(tuple(self._tags)).brokers
        self._calls = threading.Semaphore(settings.request_threads)
        self._changed = threading.Condition()
        """Condition that guards the attributes below."""
        self._groups: dict[str, _BrokerGroup] = {}
        self._begun = self._suspended = self._stopping = self._is_ready = False
        self._workers = 0
        """Number of worker threads, of present and of earlier broker groups."""
        self._trouble: RaymqError | None = None
        """The last error of a worker; None after a worker has registered."""
        self._counts = ReplyStatistics()
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Event file that is readable while no worker shall wait for a request."""

    # Methods that the Listener actor calls

    def begin(self, wait_s: float) -> str:
        """Start to answer requests, unless that has begun. Returns an empty string if, within `wait_s`, workers are
        registered at all broker groups that have the topics; otherwise the reason. Raises an error of a broker that a
        repetition does not mend, for example NoPermissionError."""
        with self._changed:
            first, self._begun = not self._begun, True
        if first:
            start_daemon(self._manage, name="requests")
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._is_refused(), wait_s)
            if self._trouble is not None and self._is_refused():
                raise self._trouble
            return "" if self._is_ready else str(self._trouble or "no broker group has answered yet")

    def suspend(self, *, suspended: bool) -> None:
        """Take no further requests, or take requests again. Running listener calls end and are answered; this method
        waits for them for at most SUSPEND_WAIT_S."""
        with self._changed:
            if suspended == self._suspended or self._stopping:
                return
            self._suspended = suspended
            if suspended:
                os.eventfd_write(self._end, 1)
            else:
                os.eventfd_read(self._end)
            self._changed.notify_all()
            if suspended:
                self._changed.wait_for(lambda: not self._workers, SUSPEND_WAIT_S)

    def stop(self, wait_s: float) -> bool:
        """Take no further requests, and wait until the running listener calls have ended and are answered. Returns
        False if that takes longer than `wait_s`; the call may be repeated."""
        with self._changed:
            if not self._stopping:
                self._stopping = True
                os.eventfd_write(self._end, 1)
                self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._workers, wait_s)

    def statistics(self) -> ReplyStatistics:
        """Return the number of replies that were sent to a broker, and of replies that could not be sent."""
        with self._changed:
            return self._counts

    def _is_refused(self) -> bool:
        return self._trouble is not None and not self._trouble.retryable

    # The manager thread

    def _manage(self) -> None:
        while not self._stopping:
            try:
                self._look()
            except RaymqError as error:
                logger.info("cannot read the routes of topics with requests, retrying: %s", error)
            except Exception:  # a bug: without this thread, lost brokers would get no worker again
                logger.exception("cannot look after the threads for requests, retrying")
            with self._changed:
                if not self._stopping:
                    self._changed.wait(BROKERS_INTERVAL_S if self._is_ready or self._suspended else START_PAUSE_S)

    def _look(self) -> None:
        """Give each broker group of the topics a worker, and forget groups that no longer have the topics."""
        found = self._brokers()
        with self._changed:
            for name, group in list(self._groups.items()):
                if group.first.topics.keys() != found.get(name, frozenset()):
                    del self._groups[name]
            for name, topics in found.items():
                if name not in self._groups:
                    tags = {topic: self._tags[topic] for topic in sorted(topics)}
                    first = DirectTurn(self._settings.group, self._instance, tags, 0)
                    idle = DirectTurn(self._settings.group, self._instance, tags, TURN_WAIT_MS)
                    self._groups[name] = _BrokerGroup(self._client_of(name), first, idle)
            for group in self._groups.values():
                if not group.workers:
                    self._start_worker(group)
            self._note_connected()

    def _start_worker(self, group: _BrokerGroup) -> None:
        """Start one more worker of a broker group, if it may have one. The caller holds the condition."""
        if group.workers >= self._settings.request_threads or not self._is_wanted(group):
            return
        group.workers += 1
        self._workers += 1
        # at the process's exit no thread starts, and other listeners get the requests
        if start_daemon(self._work, group, name=f"requests-{group.name}") is None:
            self._note_end(group)

    def _is_wanted(self, group: _BrokerGroup) -> bool:
        return not (self._suspended or self._stopping) and self._groups.get(group.name) is group

    def _note_connected(self, group: _BrokerGroup | None = None, *, connected: bool = False) -> None:
        """Note that a broker group has a registered worker, or has none, and whether all of them have. The caller holds
        the condition."""
        if group is not None:
            group.is_connected = connected
        self._is_ready = bool(self._groups) and all(one.is_connected for one in self._groups.values())
        self._changed.notify_all()

    def _note_end(self, group: _BrokerGroup) -> None:
        """Note the end of a worker. The caller holds the condition."""
        group.workers -= 1
        self._workers -= 1
        self._note_connected(group, connected=group.is_connected and group.workers > 0)

    # The worker threads

    def _work(self, group: _BrokerGroup) -> None:
        backoff, is_over = Backoff(max_s=RECONNECT_MAX_S), False
        try:
            while not is_over and self._is_wanted(group):
                trouble: RaymqError | None = None
                try:
                    with group.client.lane(_METHOD, OPEN_LANE_S) as lane:
                        try:
                            self._serve(group, lane, backoff)
                            is_over = True
                        finally:
                            # the broker must see that this worker is gone, so no other call may use the lane
                            lane.close()
                except BlockingIOError:
                    trouble = RequestTimeoutError(f"the call {_METHOD} to {group.name}", TURN_TIMEOUT_S)
                except RaymqError as error:
                    trouble = error
                except LANE_LOST as error:
                    group.client.drop_lanes()
                    trouble = lane_broken(_METHOD, group.name, error)
                except Exception as error:  # a bug: if this thread ended, the manager would start the next one at once
                    logger.exception("cannot take requests from %s, retrying", group.name)
                    trouble = ServiceNotAvailableError(f"cannot take requests from {group.name}: {error!r}")
                if trouble is not None:
                    logger.info("cannot take requests from %s, retrying: %s", group.name, trouble)
                    self._note_trouble(group, trouble, backoff.next())
        finally:
            with self._changed:
                self._note_end(group)

    def _note_trouble(self, group: _BrokerGroup, trouble: RaymqError, pause_s: float) -> None:
        with self._changed:
            self._trouble = trouble
            self._note_connected(group, connected=False)
            self._changed.wait_for(
                lambda: self._stopping, max(pause_s, min(trouble.retry_after_s or 0.0, RECONNECT_MAX_S))
            )

    def _serve(self, group: _BrokerGroup, lane: Lane, backoff: Backoff) -> None:
        """Take and answer requests over a lane, until the worker is not needed any more. Raises the errors of a lane
        and of the broker."""
        poll = select.poll()
        poll.register(lane.fileno(), select.POLLIN)
        poll.register(self._end, select.POLLIN)
        turn = group.first
        while True:
            delivery = self._take(group, lane, poll, turn)
            if turn is group.first:
                backoff.reset()
                with self._changed:
                    self._trouble = None
                    self._note_connected(group, connected=True)
            if delivery is not None:
                turn = self._answer(group, delivery)
            elif turn.wait_ms == _LAST:
                return
            elif not self._is_wanted(group) or self._is_surplus(group, turn):
                turn = DirectTurn(turn.group, turn.instance, turn.topics, _LAST)
            else:
                turn = group.idle

    def _is_surplus(self, group: _BrokerGroup, turn: DirectTurn) -> bool:
        """True if a worker has waited for a whole turn while another worker of its broker group waits."""
        return turn is group.idle and group.waiting > 0

    def _take(self, group: _BrokerGroup, lane: Lane, poll: select.poll, turn: DirectTurn) -> DirectDelivery | None:
        """Send a turn, which may have the answer to the last request, and return the next request; None if none came in
        time. If the worker shall wait no longer, the broker is asked to answer at once."""
        deadline_s = time.monotonic() + TURN_TIMEOUT_S
        try:
            lane.send(FrameKind.CALL, (encode_call(_METHOD, (turn,)),), deadline_s)
        except BaseException:
            self._count(turn, "unsent")
            raise
        self._count(turn, "sent")
        with self._changed:
            group.waiting += 1
        try:
            if not lane.has_received and turn.wait_ms > 0:
                ready = poll.poll(TURN_TIMEOUT_S * 1000)
                if ready and all(file == self._end for file, _ in ready):
                    lane.leave(deadline_s)
            found: DirectDelivery | None = decode_result(lane.receive(deadline_s).payload, LANE_RESULTS[_METHOD])
        finally:
            with self._changed:
                group.waiting -= 1
        return found

    def _answer(self, group: _BrokerGroup, delivery: DirectDelivery) -> DirectTurn:
        """Call the listener with a request. Returns the next turn, which has the answer."""
        if not group.waiting:
            with self._changed:
                self._start_worker(group)
        replier = _OneReply()
        try:
            message = decode_request(delivery, self._shown.get(delivery.topic, delivery.topic), group.name)
            with self._calls:
                status, error, took_ms = self._call(message, replier)
        except RaymqError as wrong:
            status, error, took_ms = "", str(wrong), 0.0
        is_consumed = status == ConsumeStatus.CONSUME_SUCCESS.name
        CLIENT_FIGURES.processed(delivery.topic, self._settings.group, took_ms, 1, ok=is_consumed)
        kind, answer = AnswerKind.REPLY, b""
        if not is_consumed:
            kind, answer = AnswerKind.FAILED, encode_failure(error)
        elif replier.reply is None:
            kind, answer = AnswerKind.NO_REPLY, encode_no_reply()
        else:
            answer = encode_reply(replier.reply)
        wait_ms = TURN_WAIT_MS if self._is_wanted(group) else _LAST
        first = group.first
        return DirectTurn(first.group, first.instance, first.topics, wait_ms, delivery.ticket, answer, kind)

    def _count(self, turn: DirectTurn, what: str) -> None:
        """Count the reply in a turn, if it has one."""
        if turn.ticket and turn.kind is AnswerKind.REPLY:
            with self._changed:
                self._counts = replace(self._counts, **{what: getattr(self._counts, what) + 1})
