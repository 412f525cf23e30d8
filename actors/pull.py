"""Pull: one instance of a push consumer. It fetches for the queues it holds, feeds its Listener, commits.

What survives its death: nothing but the committed offsets, at the brokers. Ray starts it again; it joins its group anew
and goes on from there, so what was in flight is delivered again. It ends by itself when its Listener is gone for good,
which happens when the user's program ends.

    Fetcher threads → ProcessQueues (actors.core) → Listener → commit
    member thread: heartbeats, grants, revocations, commits; once a second

May wait for: Storage, Broker, Rebalance, NameServer, Listener. None of them waits for a Pull.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError

from actors.core.process_queues import Batch, ProcessQueues
from actors.options import PERSISTENT
from actors.shell import shell
from raymq.errors import RaymqError, TopicNotExistError
from raymq.fetcher import Fetcher
from raymq.listener import ConsumeOutcome
from raymq.membership import HEARTBEAT_INTERVAL_S, SESSION_TIMEOUT_S, GroupAssignment, GroupHeartbeat
from raymq.message import ConsumeStatus, MessageQueue, PullStatus
from raymq.names import NameServerName
from raymq.offsets import GroupOffsets
from raymq.push_settings import PushSettings
from raymq.rebalance_client import RebalanceClient
from raymq.routes import Routes
from raymq.storages import Storages
from raymq.store_api import FetchRequest, FetchResult

FETCH_MESSAGES: Final = 512
IDLE_WAIT_S: Final = 0.5
STOP_TIMEOUT_S: Final = 30.0
START_OFFSET_TIMEOUT_S: Final = 5.0
"""Short beside the session: the next heartbeat grants the queue again."""
FENCE_AFTER_S: Final = SESSION_TIMEOUT_S * 0.6
"""Counted from the sending of the last heartbeat that was answered: the group's own count begins no earlier."""

_log = logging.getLogger(__name__)


class Pull:
    """The shell around one ProcessQueues. `listener` is the handle of the instance's Listener actor."""

    def __init__(self, name: str, settings: PushSettings, nameservers: Sequence[NameServerName], listener: Any) -> None:
        self._name = name
        self._settings = settings
        self._listener = listener
        self._topics = frozenset(subscription.topic for subscription in settings.subscriptions)
        self._routes = Routes(nameservers)
        self._storages = Storages(ray.get_runtime_context().get_node_id())
        self._offsets = GroupOffsets(settings.group)
        self._rebalance = RebalanceClient(settings.group, self._routes)
        self._lock = threading.Lock()
        self._queues = ProcessQueues(threshold_count=settings.threshold_count, threshold_bytes=settings.threshold_bytes)
        self._lease_until_s = 0.0
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._consumed = 0
        self._failures = 0
        self._failing: dict[MessageQueue, str] = {}
        self._fetcher = Fetcher(
            wanted=self._wanted,
            held=self._held,
            deliver=self._deliver,
            request=self._request,
            storage_name=lambda queue: self._routes.get(queue.topic).master_storage(queue.broker_name),
            storage=self._storages.get,
        )
        threading.Thread(target=self._dispatch, name="dispatch", daemon=True).start()
        threading.Thread(target=self._member, name="member", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """What this instance holds and how it is doing."""
        with self._lock:
            return {
                "instance": self._name,
                "holding": sorted(str(queue) for queue in self._queues.holding),
                "buffered": sum(self._queues.lag_buffered().values()),
                "consumed": self._consumed,
                "failures": self._failures,
                "last_error": next(reversed(self._failing.values()), ""),
            }

    def stop(self, timeout_s: float) -> bool:
        """Finish what is in flight, commit, leave the group. False when that was not done in time."""
        self._stopping.set()
        self._work.set()
        return self._stopped.wait(timeout_s)

    # Fetching

    def _wanted(self) -> dict[MessageQueue, int]:
        with self._lock:
            return self._queues.wanted()

    def _held(self) -> frozenset[MessageQueue]:
        with self._lock:
            return self._queues.holding

    def _request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        codes = self._settings.subscription(queue.topic).tag_codes
        return FetchRequest(queue.topic, queue.queue_id, offset, FETCH_MESSAGES, codes)

    def _deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        with self._lock:
            if result.status is PullStatus.OFFSET_ILLEGAL:
                _log.warning("%s: offset %d is gone, going on at %d", queue, offset, result.next_offset)
                self._queues.jump(queue, offset, result.next_offset)
            else:
                self._queues.fetched(queue, offset, result.records, result.count, result.next_offset)
        self._work.set()

    # Feeding the listener

    def _dispatch(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                retry_at_s = self._queues.next_retry_s()
            now_s = time.monotonic()
            self._work.wait(IDLE_WAIT_S if retry_at_s is None else min(IDLE_WAIT_S, max(retry_at_s - now_s, 0.01)))
            self._work.clear()
            self._fence_when_late()  # the process may have stood still, or the member thread waits for a broker
            with self._lock:
                batches = self._queues.deliverable(time.monotonic())
            for batch in batches:
                self._feed(batch)

    def _feed(self, batch: Batch) -> None:
        reference = self._listener.consume.remote(batch.records, batch.queue.broker_name)
        reference.future().add_done_callback(partial(self._done, batch))

    def _done(self, batch: Batch, future: Future[ConsumeOutcome]) -> None:
        """The listener answered, or died. Runs in a thread of Ray's."""
        error = future.exception()
        outcome = ConsumeOutcome(ConsumeStatus.RECONSUME_LATER, str(error)) if error else future.result()
        with self._lock:
            if outcome.status is ConsumeStatus.CONSUME_SUCCESS:
                self._queues.consumed(batch)
                self._consumed += batch.count
                self._failing.pop(batch.queue, None)
            else:
                self._queues.failed(batch, time.monotonic())
                self._failures += 1
                self._failing.pop(batch.queue, None)  # so that the latest failure is the last
                self._failing[batch.queue] = outcome.error or "the listener answered RECONSUME_LATER"
        if isinstance(error, ActorDiedError):
            self._end("its listener is gone")
        self._work.set()
        self._fetcher.wake()

    # Membership

    def _member(self) -> None:
        while not self._stopping.is_set():
            try:
                self._take(self._beat())
            except RaymqError as error:
                _log.info("%s: %s", self._name, error)
            self._fence_when_late()
            released = self._commit_and_release()
            if not released:  # after a release, say so at once: somebody waits for the queue
                self._stopping.wait(HEARTBEAT_INTERVAL_S)
        self._leave()

    def _beat(self) -> GroupAssignment:
        """Say what is held. The answer renews the lease on it."""
        sent_s = time.monotonic()
        assignment = self._rebalance.heartbeat(GroupHeartbeat(self._name, self._topics, self._held()))
        self._lease_until_s = sent_s + FENCE_AFTER_S
        return assignment

    def _take(self, assignment: GroupAssignment) -> None:
        held = self._held()
        with self._lock:
            for queue in held - assignment.queues:
                self._queues.revoke(queue)
        for queue in sorted(assignment.queues - held):
            self._offsets.ensure_group(queue.broker_name, START_OFFSET_TIMEOUT_S)
            offset = self._offsets.start_offset(queue, self._settings.start, START_OFFSET_TIMEOUT_S)
            with self._lock:
                self._queues.add(queue, offset)
            self._fetcher.wake()

    def _commit_and_release(self) -> bool:
        """Commit what the listener finished; let go of revoked queues that are done. True if any was let go."""
        with self._lock:
            uncommitted = self._queues.uncommitted()
        if uncommitted:
            try:
                self._offsets.commit(uncommitted)
            except TopicNotExistError as error:
                _log.warning("%s lets go of deleted topic %s", self._name, error.topic)
                with self._lock:
                    for queue in [queue for queue in self._queues.holding if queue.topic == error.topic]:
                        self._drop(queue)
                return False
            except RaymqError as error:
                _log.warning("%s could not commit, trying again: %s", self._name, error)
                return False
        with self._lock:
            for queue, offset in uncommitted.items():
                self._queues.committed(queue, offset)
            released = self._queues.released()
            for queue in released:
                self._drop(queue)
        return bool(released)

    def _fence_when_late(self) -> None:
        if time.monotonic() > self._lease_until_s:
            self._fence()

    def _fence(self) -> None:
        """Not heard by the group for long: others may get the queues, so deliver and commit nothing more of them."""
        with self._lock:
            for queue in self._queues.holding:
                self._drop(queue)

    def _drop(self, queue: MessageQueue) -> None:
        self._queues.drop(queue)
        self._failing.pop(queue, None)

    def _leave(self) -> None:
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        with self._lock:
            for queue in self._queues.holding:
                self._queues.revoke(queue)
        beat_at_s = time.monotonic()
        while self._held() and time.monotonic() < deadline_s:
            if self._commit_and_release():
                continue
            if time.monotonic() >= beat_at_s:  # a slow listener must not cost the member its session
                beat_at_s = time.monotonic() + HEARTBEAT_INTERVAL_S
                try:
                    self._beat()
                except RaymqError as error:
                    _log.info("%s: %s", self._name, error)
            self._work.wait(0.05)
            self._work.clear()
        self._fetcher.stop()
        try:
            self._rebalance.heartbeat(GroupHeartbeat(self._name, self._topics, frozenset(), leaving=True))
        except RaymqError as error:
            _log.info("%s leaves without a word, the group will notice: %s", self._name, error)
        self._storages.close()
        self._stopped.set()

    def _end(self, reason: str) -> None:
        _log.info("%s ends: %s", self._name, reason)
        self._stopping.set()
        threading.Thread(target=self._end_process, name="end", daemon=True).start()

    def _end_process(self) -> None:
        self._fence()
        self._stopped.wait(STOP_TIMEOUT_S)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


OPTIONS: Final = {**PERSISTENT, "max_concurrency": 4}
PullActor = ray.remote(**OPTIONS)(shell(Pull))
