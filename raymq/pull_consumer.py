"""The pull consumer: a member of a consumer group that lives in the user's process and is read with `poll`.

    member thread: heartbeats → granted and revoked queues
    Fetcher threads → [buffered runs per queue, bounded] → poll → commit

A queue that is to go to another member is let go inside `poll`, `commit` or `close`: only then has the program finished
with what earlier polls returned. So a program that stops polling for POLL_INTERVAL_MAX_S is taken to hang, and leaves
its group until it polls again.

Offsets are committed to the brokers, by `commit` or by `auto_commit`; the rest is gone with the process, so messages
that were returned but not committed are delivered again.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NoReturn

from raymq.errors import ClientStateError, InvalidArgumentError, OffsetOutOfRangeError, RaymqError, TopicNotExistError
from raymq.fetcher import Fetcher
from raymq.group_info import StartOffsetQuery
from raymq.membership import HEARTBEAT_INTERVAL_S, SESSION_TIMEOUT_S, GroupHeartbeat
from raymq.message import MessageExt, MessageQueue, PullStatus
from raymq.names import check_group
from raymq.offsets import GroupOffsets
from raymq.rebalance_client import RebalanceClient
from raymq.record import decode_records
from raymq.routes import Routes
from raymq.storages import Storages
from raymq.store_api import FetchRequest, FetchResult
from raymq.subscription import Subscription

AUTO_COMMIT_INTERVAL_S: Final = 5.0
POLL_INTERVAL_MAX_S: Final = 300.0
FETCH_MESSAGES: Final = 2048
BUFFER_MAX_BYTES: Final = 16 * 1024 * 1024
FENCE_AFTER_S: Final = SESSION_TIMEOUT_S * 0.6
"""Counted from the sending of the last heartbeat that was answered: the group's own count begins no earlier."""
BOUNDS_TIMEOUT_S: Final = 10.0
START_OFFSET_TIMEOUT_S: Final = 5.0
"""Short, because no heartbeat is said meanwhile; a queue without a start offset is granted again at the next."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Queue:
    """A queue this consumer holds. `position`: the next offset `poll` returns; `done`: what may be committed."""

    queue: MessageQueue
    fetch_offset: int
    position: int
    done: int
    committed: int
    runs: deque[tuple[deque[MessageExt], int]] = field(default_factory=deque)
    buffered_bytes: int = 0
    revoked: bool = False

    def restart(self, offset: int) -> None:
        self.fetch_offset = self.position = self.done = offset
        self.runs.clear()
        self.buffered_bytes = 0


class PullConsumer:
    """Made by `Client.pull_consumer`. One thread polls; `commit`, `seek` and the rest may be called from the same."""

    def __init__(
        self,
        group: str,
        *,
        routes: Routes,
        storages: Storages,
        start: StartOffsetQuery,
        auto_commit: bool,
        on_close: Callable[[PullConsumer], None],
    ) -> None:
        self.group = check_group(group)
        self._routes = routes
        self._storages = storages
        self._start = start
        self._auto_commit = auto_commit
        self._on_close = on_close
        self._member = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._offsets = GroupOffsets(group)
        self._rebalance = RebalanceClient(group, routes)
        self._subscriptions: dict[str, Subscription] = {}
        self._changed = threading.Condition()
        self._queues: dict[MessageQueue, _Queue] = {}
        self._turn: deque[MessageQueue] = deque()
        self._members_known = threading.Event()
        self._beat = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: RaymqError | None = None
        self._lease_until_s = 0.0
        self._polled_s = time.monotonic()
        self._committed_s = time.monotonic()
        self._fetcher = Fetcher(
            wanted=self._wanted,
            held=lambda: frozenset(self._queues),
            deliver=self._deliver,
            request=self._request,
            storage_name=lambda queue: self._routes.get(queue.topic).master_storage(queue.broker_name),
            storage=storages.get,
        )

    def subscribe(self, topic: str, expression: str = "*") -> None:
        """Consume a topic's messages whose tag is in `expression`, for example ``"paid || refunded"``.

        TopicNotExistError, IllegalNameError or InvalidArgumentError. A second call for a topic replaces the first for
        what is read from then on.
        """
        self._check_open()
        subscription = Subscription.parse(topic, expression)
        for broker_name in self._routes.get(topic).brokers:
            self._offsets.ensure_group(broker_name)
        with self._changed:
            self._subscriptions[topic] = subscription
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_member, name=f"member-{self.group}", daemon=True)
            self._thread.start()
        self._beat.set()

    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[MessageExt]:
        """Up to `max_messages` messages; waits up to `timeout_s` for the first, and returns an empty list after that.

        Messages of one queue come in order. With auto_commit, what earlier polls returned counts as done from now on.
        Raises ClientStateError when closed or without a subscription, and the error of the group when it cannot be
        joined within the timeout.
        """
        self._check_open()
        if not self._subscriptions:
            raise ClientStateError("this consumer has no subscription; call subscribe(topic) before poll()")
        if max_messages < 1 or timeout_s < 0:
            raise InvalidArgumentError(
                f"poll needs max_messages ≥ 1 and timeout_s ≥ 0, not {max_messages}, {timeout_s}"
            )
        self._polled_s = time.monotonic()
        self._fence()
        self._settle()
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not (messages := self._take(max_messages)):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or any(held.revoked for held in self._queues.values()):
                    break
                self._changed.wait(left_s)
        if messages:
            self._fetcher.wake()
        elif not self._members_known.is_set() and self._failure is not None:
            raise self._failure
        return messages

    def __iter__(self) -> Iterator[MessageExt]:
        """Messages one after another, for ever; ends when the consumer is closed."""
        while not self._closing.is_set():
            yield from self.poll()

    def commit(self) -> None:
        """Commit everything that polls have returned. Durable on return; on an error, call it again."""
        self._check_open()
        self._polled_s = time.monotonic()
        self._fence()
        self._mark_done()
        self._commit_done()
        self._release_revoked()

    def committed(self, queue: MessageQueue) -> int | None:
        """The group's committed offset in a queue, None where there is none."""
        self._check_open()
        return self._offsets.committed(queue)

    def assignment(self) -> list[MessageQueue]:
        """The queues this consumer holds now, sorted."""
        with self._changed:
            return sorted(self._queues)

    def position(self, queue: MessageQueue) -> int:
        """The offset the next poll returns from a queue this consumer holds."""
        with self._changed:
            return self._held(queue).position

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at `offset` in a queue this consumer holds. OffsetOutOfRangeError outside what the queue holds."""
        self._check_open()
        storage = self._storages.get(self._routes.get(queue.topic).master_storage(queue.broker_name))
        with self._changed:
            self._held(queue)
        bounds = storage.queue_bounds(queue.topic, queue.queue_id, BOUNDS_TIMEOUT_S)
        if not bounds.min_offset <= offset <= bounds.max_offset:
            raise OffsetOutOfRangeError(str(queue), offset, bounds.min_offset, bounds.max_offset)
        with self._changed:
            self._held(queue).restart(offset)
        self._fetcher.wake()

    def close(self) -> None:
        """Leave the group and end the threads; with auto_commit, first commit everything that polls have returned.

        Where an exception leaves a `with`, what the last poll returned is not committed: it is delivered again.
        Idempotent.
        """
        self._close(finished=True)

    def _close(self, *, finished: bool) -> None:
        if self._closing.is_set():
            return
        try:
            if self._auto_commit:
                self._fence()
                if finished:
                    self._mark_done()
                self._commit_done()
        finally:
            self._closing.set()
            self._beat.set()
            self._fetcher.stop()
            with self._changed:
                self._queues.clear()
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join(HEARTBEAT_INTERVAL_S * 10)
            self._on_close(self)

    def __enter__(self) -> PullConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(finished=kind is None)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq consumer cannot be pickled: call raymq.connect().pull_consumer(...) where it is used")

    # What poll does

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClientStateError("this consumer is closed; make a new one with client.pull_consumer(...)")

    def _held(self, queue: MessageQueue) -> _Queue:
        held = self._queues.get(queue)
        if held is None:
            raise ClientStateError(f"this consumer does not hold {queue} now; see assignment()")
        return held

    def _take(self, max_messages: int) -> list[MessageExt]:
        """Messages from the buffers, queue by queue in turn. Called with the lock."""
        self._fence()  # the process may have stood still since the call of poll
        messages: list[MessageExt] = []
        for _ in range(len(self._turn)):
            queue = self._turn[0]
            self._turn.rotate(-1)
            held = self._queues.get(queue)
            if held is None or held.revoked:
                continue
            while held.runs and len(messages) < max_messages:
                run, next_offset = held.runs[0]
                while run and len(messages) < max_messages:
                    message = run.popleft()
                    held.buffered_bytes -= len(message.body)
                    held.position = message.queue_offset + 1
                    messages.append(message)
                if not run:
                    held.position = next_offset
                    held.runs.popleft()
            if len(messages) >= max_messages:
                break
        return messages

    def _settle(self) -> None:
        """What polls returned before is finished now: commit it when due, and let revoked queues go."""
        with self._changed:
            revoked = any(held.revoked for held in self._queues.values())
        if self._auto_commit:
            self._mark_done()
        due = time.monotonic() - self._committed_s >= AUTO_COMMIT_INTERVAL_S
        if self._auto_commit and (due or revoked):
            try:
                self._commit_done()
            except RaymqError as error:
                if not error.retryable:
                    raise
                _log.warning("group %s could not commit, trying again at the next poll: %s", self.group, error)
                return
        if revoked:
            self._release_revoked()

    def _mark_done(self) -> None:
        """The program has finished with what polls have returned."""
        with self._changed:
            for held in self._queues.values():
                held.done = held.position

    def _commit_done(self) -> None:
        with self._changed:
            offsets = {held.queue: held.done for held in self._queues.values() if held.done != held.committed}
        while offsets:
            try:
                self._offsets.commit(offsets)
                break
            except TopicNotExistError as error:
                _log.warning("group %s lets go of deleted topic %s", self.group, error.topic)
                offsets = {queue: offset for queue, offset in offsets.items() if queue.topic != error.topic}
                with self._changed:
                    for queue in [queue for queue in self._queues if queue.topic == error.topic]:
                        self._drop(queue)
        with self._changed:
            for queue, offset in offsets.items():
                if queue in self._queues:
                    self._queues[queue].committed = offset
        self._committed_s = time.monotonic()

    def _release_revoked(self) -> None:
        with self._changed:
            for held in [held for held in self._queues.values() if held.revoked]:
                self._drop(held.queue)
        self._beat.set()

    def _drop(self, queue: MessageQueue) -> None:
        del self._queues[queue]
        self._turn.remove(queue)

    # What the fetcher asks and brings

    def _wanted(self) -> Mapping[MessageQueue, int]:
        with self._changed:
            room = BUFFER_MAX_BYTES // max(1, len(self._queues))
            return {
                held.queue: held.fetch_offset
                for held in self._queues.values()
                if not held.revoked and held.buffered_bytes < room
            }

    def _request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        codes = self._subscriptions[queue.topic].tag_codes
        return FetchRequest(queue.topic, queue.queue_id, offset, FETCH_MESSAGES, codes)

    def _deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        subscription = self._subscriptions[queue.topic]
        decoded = decode_records(result.records, broker_name=queue.broker_name) if result.count else []
        messages = deque(message for message in decoded if subscription.matches(message.tags))
        with self._changed:
            held = self._queues.get(queue)
            if held is None or held.revoked or held.fetch_offset != offset:
                return  # an answer to a question of before a seek or a rebalance
            if result.status is PullStatus.OFFSET_ILLEGAL:
                _log.warning("%s: offset %d is gone, going on at %d", queue, offset, result.next_offset)
                if held.runs and result.next_offset > offset:
                    held.fetch_offset = result.next_offset  # what waits here is from before the gap: poll returns it
                else:
                    held.restart(result.next_offset)
                return
            held.fetch_offset = result.next_offset
            if messages:
                held.runs.append((messages, result.next_offset))
                held.buffered_bytes += sum(len(message.body) for message in messages)
                self._changed.notify_all()
            elif not held.runs:
                held.position = result.next_offset

    # Membership

    def _run_member(self) -> None:
        while not self._closing.is_set():
            self._beat.clear()
            if time.monotonic() - self._polled_s > POLL_INTERVAL_MAX_S:
                self._lose_all("poll was not called for %.0f s", POLL_INTERVAL_MAX_S)
                self._leave()
                self._beat.wait(HEARTBEAT_INTERVAL_S)
                continue
            try:
                with self._changed:
                    heartbeat = GroupHeartbeat(self._member, frozenset(self._subscriptions), frozenset(self._queues))
                sent_s = time.monotonic()
                assignment = self._rebalance.heartbeat(heartbeat)
                self._lease_until_s = sent_s + FENCE_AFTER_S
                self._take_assignment(assignment.queues)
                self._members_known.set()
                self._failure = None
            except RaymqError as error:
                self._failure = error
                _log.info("group %s: %s", self.group, error)
                self._fence()
            self._beat.wait(HEARTBEAT_INTERVAL_S)
        self._leave()

    def _take_assignment(self, granted: Iterable[MessageQueue]) -> None:
        granted = frozenset(granted)
        with self._changed:
            new = sorted(granted - frozenset(self._queues))
            for held in self._queues.values():
                if held.queue not in granted and not held.revoked:
                    held.revoked = True
                    held.runs.clear()
                    self._changed.notify_all()  # a poll that waits returns, so that the next one lets the queue go
        for queue in new:
            offset = self._offsets.start_offset(queue, self._start, START_OFFSET_TIMEOUT_S)
            with self._changed:
                self._queues[queue] = _Queue(queue, offset, offset, offset, committed=offset)
                self._turn.append(queue)
        self._fetcher.wake()

    def _fence(self) -> None:
        """Without an answer of the group for too long, others may get the queues soon, or have them."""
        if time.monotonic() > self._lease_until_s:
            self._lose_all("its group gave no answer for %.0f s", FENCE_AFTER_S)

    def _lose_all(self, reason: str, *args: object) -> None:
        """Others may get the queues: return and commit nothing more of them."""
        with self._changed:
            if self._queues:
                _log.warning("consumer of group %s gives up its queues: " + reason, self.group, *args)
            self._queues.clear()
            self._turn.clear()

    def _leave(self) -> None:
        try:
            self._rebalance.heartbeat(GroupHeartbeat(self._member, frozenset(), frozenset(), leaving=True))
        except RaymqError as error:
            _log.info("group %s: left without a word, the group will notice: %s", self.group, error)
