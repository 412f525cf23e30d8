"""Receives of simple consumers at one broker. A receive leases messages at once if enough messages are available;
otherwise it waits for messages in a long poll.

This module implements the waiting; actors.core.pop decides which messages a receive leases, and from which queues
first (actors.core.pop.queue_order).

    receive ── enough messages are known ────────────────────→ decide ─→ state log ─→ answer
       └── else: ask the store for the queues' ends, wait ──────↑   (this module's one thread)
                 for a message, or for the end of a lease

A receive of a PRIORITY topic always asks the store first. Otherwise a long backlog of a low level, which is known,
would keep receives from new messages of a higher level, which are not known yet.

Receives with the same key (WaitKey) lease their messages one after another, so a new message wakes only one waiting
receive.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from actors.broker.pop.queue_ends import QueueEndsWatch
from actors.broker.state_log import StateLog
from actors.broker.stored_state import LEASE_CLOCK
from actors.core.broker.state import BrokerState, Change
from actors.core.pop.queue_order import QueueOrder
from actors.core.pop.receive import (
    LeaseGrant,
    TopicQueue,
    available,
    check_receive,
    decide_receive,
    next_due_ms,
)
from actors.core.pop.waiting import WaitingReceive, WaitingReceives, WaitKey
from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.names import retry_topic
from raymq.common.protocol.attributes import MESSAGE_TYPE, TopicMessageType
from raymq.common.protocol.group import is_ordered
from raymq.common.protocol.pop import ReceiveAnswer, ReceiveRequest

ASK_WAIT_S: Final = 30.0
LOOK_TIMEOUT_S: Final = 5.0
"""Extra time, in seconds, after the wait time that a receive itself requests. The receive fails if the store or the
state log does not answer within this extra time."""
NOT_READY_PAUSE_S: Final = 0.3

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Decision:
    """The decision about a receive: the leased messages, the topics in order mode, and the group's retry limit and
    retry intervals. `decide` fills in the fields."""

    handout: LeaseGrant | None = None
    retry_max_times: int = 0
    ordered_topics: tuple[str, ...] = ()
    retry_intervals_s: tuple[float, ...] = ()


class Receives:
    """Manages the receives of one broker: receives that wait for messages, and receives whose messages are being
    leased. Thread-safe."""

    def __init__(self, log: StateLog, ends: QueueEndsWatch) -> None:
        self._log, self._ends = log, ends
        self._order = QueueOrder()
        """The order of the queues of each receive. Only changes of the state log use it, and one change runs at a
        time."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        # The next three attributes are used only by the receive thread: `_waiting`, `_busy` and `_covered`.
        self._waiting = WaitingReceives()
        self._busy: set[WaitKey] = set()
        """The keys (WaitKey) of the receives whose messages are being leased now."""
        self._covered: list[WaitingReceive] = []
        """The receives that wait for the answer of the current question to the store. The question asks for the end
        offsets of their queues."""

    def submit(
        self,
        request: ReceiveRequest,
        answer: Callable[[ReceiveAnswer], None],
        fail: Callable[[BaseException], None],
    ) -> Callable[[], None]:
        """Lease messages for a receive, now or when messages arrive. `answer` or `fail` may be called from any thread.
        Returns a function for the case that nobody waits for the answer any more: the receive then leases nothing, and
        its answer is empty. Any thread may call this function; it does not block.

        Raises InvalidArgumentError if the request is invalid, and GroupNotExistError or TopicNotExistError if the group
        or a topic does not exist. Raises NoPermissionError if the group may not consume, if nobody may read a topic, or
        if this group may not read it. Raises ServiceNotAvailableError if the broker's state is not loaded.
        """
        check_receive(request)
        receive = WaitingReceive(request, time.monotonic() + request.wait_s, answer, fail)
        ready = self._is_ready(receive, self._check)
        if ready is None:
            raise ServiceNotAvailableError(
                "the broker is starting, or its broker group has a new master; try again later"
            )
        if ready:
            self._decide(receive, self._decided_at_once)
        else:
            self._post(lambda: self._add(receive))
        return partial(self._leave, receive)

    def _leave(self, receive: WaitingReceive) -> None:
        receive.has_left = True
        if not self._closed:
            self._post(lambda: self._end_left(receive))

    def look_again(self) -> None:
        """Wake the receive thread after messages were acknowledged or made visible, because waiting receives may now
        get messages."""
        if len(self._waiting):
            self._post(lambda: None)

    def close(self) -> None:
        """Stop the receive thread, and answer the waiting receives without messages. Idempotent."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join(LOOK_TIMEOUT_S)

    # Methods that select and lease the messages of a receive. Any thread may call them.

    def _is_ready(self, receive: WaitingReceive, check: Callable[[BrokerState, ReceiveRequest], None]) -> bool | None:
        """Return True if messages are leased to a receive now: as many as it may get, or any if the store has reported
        the ends of its queues. Returns None if the broker's state is not loaded."""
        request = receive.request

        def read(state: BrokerState) -> bool:
            check(state, request)
            queues = _queues(state, request)
            committed = partial(state.committed, request.group)
            ordered, now_ms = _ordered(state, request), LEASE_CLOCK.now_ms()
            count = available(state.pop, committed, queues, self._ends.known, request, now_ms, ordered)
            if receive.looked:
                return count > 0
            return count >= request.max_messages and not _leveled(state, request)

        return self._log.peek(read)

    def _check(self, state: BrokerState, request: ReceiveRequest) -> None:
        state.require_group(request.group)
        for topic in request.topics:
            state.check_readable(request.group, topic)

    def _decide(
        self, receive: WaitingReceive, done: Callable[[WaitingReceive, _Decision, Exception | None], None]
    ) -> None:
        decision = _Decision()

        def decide(state: BrokerState) -> list[Change]:
            if receive.has_left:
                return []
            request = receive.request
            self._check(state, request)
            leveled = _leveled(state, request)
            queues = self._order.order(request.group, _queues(state, request), leveled)
            now_ms = LEASE_CLOCK.now_ms()
            committed = partial(state.committed, request.group)
            ordered = _ordered(state, request)
            handout = decide_receive(state.pop, committed, queues, self._ends.known, request, now_ms, ordered)
            if handout.change is not None:
                self._order.leased(request.group, leveled)
            config = state.groups[request.group]
            decision.handout, decision.ordered_topics = handout, ordered
            decision.retry_max_times, decision.retry_intervals_s = config.retry_max_times, config.retry_intervals_s
            return [] if handout.change is None else [handout.change]

        try:
            self._log.submit_with(decide, lambda _, error: done(receive, decision, error))
        except RaymqError as error:
            done(receive, decision, error)

    def _decided_at_once(self, receive: WaitingReceive, decision: _Decision, error: Exception | None) -> None:
        if not _answer(receive, decision, error):
            # other receives leased the available messages first, so this receive must wait
            self._post(lambda: self._add(receive))

    def _decided(self, receive: WaitingReceive, decision: _Decision, error: Exception | None) -> None:
        answered = _answer(receive, decision, error)

        def go_on() -> None:
            self._busy.discard(receive.key)
            if not answered:
                # The present question to the store may leave out the queues of this receive.
                receive.looked = False
                self._waiting.put_back(receive)
                self._end_left(receive)

        self._post(go_on)

    # Only the receive thread may call the methods below. `_post` is the exception: every thread may call it.

    def _post(self, call: Callable[[], None]) -> None:
        """Queue a call for the receive thread."""
        self._inbox.append(call)
        if self._thread is None:
            with self._start_lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._run, name="broker-receives", daemon=True)
                    self._thread.start()
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            # Catch every exception, also of a programming error. If this thread ended, no waiting receive would be
            # answered any more.
            except Exception:
                logger.exception("serving the waiting receives failed, retrying")
                time.sleep(NOT_READY_PAUSE_S)
        for receive in self._waiting.all():
            receive.answer(ReceiveAnswer((), 0))
        self._ends.close()

    def _turn(self) -> None:
        """Run one iteration of the receive thread: run queued calls, serve ready receives, answer overdue receives,
        then wait for the next event."""
        while self._inbox:
            self._inbox.popleft()()
        due_s = self._serve()
        self._end_overdue()
        self._ask()
        self._wait(due_s)

    def _add(self, receive: WaitingReceive) -> None:
        try:
            self._waiting.add(receive)
        except RaymqError as error:
            receive.fail(error)
        self._end_left(receive)

    def _end_left(self, receive: WaitingReceive) -> None:
        """Answer a waiting receive without messages if nobody waits for its answer any more."""
        if receive.has_left and receive in self._waiting:
            self._waiting.take(receive)
            receive.answer(ReceiveAnswer((), 0))

    def _serve(self) -> float:
        """For each key (WaitKey), lease messages to the first waiting receive of the key, if messages are available for
        this receive. Returns the seconds until the next lease ends."""
        wait_s = ASK_WAIT_S
        for receive in self._waiting.firsts():
            if receive.key in self._busy:
                continue
            ready = self._is_ready(receive, lambda state, request: None)
            if ready is None:
                wait_s = NOT_READY_PAUSE_S
            elif ready:
                self._waiting.take(receive)
                self._busy.add(receive.key)
                self._decide(receive, self._decided)
            else:
                wait_s = min(wait_s, self._due_s(receive.request))
        return wait_s

    def _due_s(self, request: ReceiveRequest) -> float:
        """Return the seconds until leased messages in the queues of a receive become visible again."""
        now_ms = LEASE_CLOCK.now_ms()
        due_ms = self._log.peek(lambda state: next_due_ms(state.pop, request.group, _queues(state, request), now_ms))
        return ASK_WAIT_S if due_ms is None else max(0, due_ms - now_ms) / 1000

    def _end_overdue(self) -> None:
        """Answer the waiting receives whose wait time is over. If the store has not answered for a receive in time, the
        receive fails instead."""
        now_s = time.monotonic()
        for receive in self._waiting.late(now_s):
            if receive.looked and receive.key not in self._busy:
                self._waiting.take(receive)
                receive.answer(ReceiveAnswer((), 0))
            elif receive.deadline_s + LOOK_TIMEOUT_S <= now_s:
                self._waiting.take(receive)
                receive.fail(ServiceNotAvailableError("the broker's store does not answer; try again later"))

    def _ask(self) -> None:
        """Start a long poll for the end offsets of all queues that receives wait for, unless the current long poll
        already includes these queues."""
        unlooked = self._waiting.unlooked()
        if not len(self._waiting) or (self._ends.is_asking and set(self._covered).issuperset(unlooked)):
            return
        requests = [receive.request for receive in self._waiting.firsts()]
        queues = self._log.peek(
            lambda state: list(dict.fromkeys(queue for one in requests for queue in _queues(state, one)))
        )
        if queues and self._ends.ask(queues, 0.0 if unlooked else ASK_WAIT_S):
            self._covered = unlooked
            if not self._ends.is_asking:  # the end offsets were fetched without a long poll, so they are known already
                self._looked()
                self._post(lambda: None)

    def _looked(self) -> None:
        self._waiting.note_looked(self._covered)
        self._covered = []

    def _wait(self, due_s: float) -> None:
        """Wait for an answer of the store, for a queued call, or for the next deadline."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        descriptor = self._ends.descriptor
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
        wait_s = max(0.0, self._next_s(due_s) - time.monotonic())
        ready = {one for one, _ in poll.poll(wait_s * 1000 + 1 if len(self._waiting) else None)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._ends.is_asking and self._ends.take_answer(readable=descriptor in ready):
            self._looked()

    def _next_s(self, due_s: float) -> float:
        """Return the time of the next deadline, at which the receive thread must continue even without an
        event."""
        now_s = time.monotonic()
        times = [now_s + due_s, self._ends.next_look_s() or math.inf, self._waiting.next_deadline_s()]
        for receive in self._waiting.late(now_s):
            ends = receive.looked and receive.key not in self._busy
            times.append(receive.deadline_s + (0 if ends else LOOK_TIMEOUT_S))
        return min(times)


def _answer(receive: WaitingReceive, decision: _Decision, error: Exception | None) -> bool:
    """Answer a receive with the messages that were leased for it, or fail it with `error`. Returns False, and sends
    nothing, if the receive got no messages."""
    handout = decision.handout
    if error is None and handout is None and receive.has_left:
        receive.answer(ReceiveAnswer((), 0))
        return True
    if error is not None or handout is None:
        receive.fail(error or ServiceNotAvailableError("the broker could not serve a receive; try again later"))
        return True
    if handout.gone:
        logger.warning(
            "group %s neither acknowledged nor returned %d messages before they were deleted; raise the "
            "retention time, or consume faster",
            *(receive.request.group, handout.gone),
        )
    if not handout.ranges:
        return False
    settings = decision.retry_max_times, decision.ordered_topics, decision.retry_intervals_s
    receive.answer(ReceiveAnswer(handout.ranges, *settings))
    return True


def _queues(state: BrokerState, request: ReceiveRequest) -> list[TopicQueue]:
    """Return the queues of a receive: the queues of its topics and of its group's retry topic. Deleted topics have no
    queues."""
    topics = [state.topics.get(topic) for topic in (*request.topics, retry_topic(request.group))]
    return [(known.topic, queue_id) for known in topics if known for queue_id in range(known.read_queue_nums)]


def _ordered(state: BrokerState, request: ReceiveRequest) -> tuple[str, ...]:
    """Return the topics of a receive that are received in order mode: as the request says, or else as the group's
    setting and the topics' types say."""
    topics = (*request.topics, retry_topic(request.group))
    config = state.groups.get(request.group)
    if request.ordered is not None or config is None:
        return topics if request.ordered else ()
    known = [state.topics.get(topic) for topic in topics]
    return tuple(one.topic for one in known if one is not None and is_ordered(config, one.attributes))


def _leveled(state: BrokerState, request: ReceiveRequest) -> list[str]:
    """Return the topics of a receive whose type is PRIORITY."""
    known = [state.topics.get(topic) for topic in dict.fromkeys(request.topics)]
    return [one.topic for one in known if one and one.attributes.get(MESSAGE_TYPE) == TopicMessageType.PRIORITY]
