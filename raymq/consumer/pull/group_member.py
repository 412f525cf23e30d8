"""A pull consumer's group and brokers: queues come and go, offsets are committed, resets are heard of.

    member thread   heartbeats → queues granted and revoked; not for assigned queues
    worker thread   start offsets, commits that are due, queues let go, resets by an administrator

A program that stops polling for `poll_interval_max_s` is taken to hang: it leaves its group until it polls again.
Heartbeats wait for no other call, so a slow broker costs no session.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from raymq.consumer.group_offsets import GroupOffsets
from raymq.consumer.pull.settings import PullSettings
from raymq.consumer.pull.subscription_state import SubscriptionState
from raymq.consumer.rebalance_client import RebalanceClient
from raymq.errors import RaymqError
from raymq.message import MessageQueue
from raymq.protocol.group import OffsetCommit, QueueOffset
from raymq.protocol.membership import MEMBER_HEARTBEAT_INTERVAL_S, GroupHeartbeat

WORK_INTERVAL_S: Final = 1.0
RESET_QUESTION_INTERVAL_S: Final = 2.0
"""How often the brokers are asked about assigned queues; a group's members hear of resets with their heartbeats."""
GROUP_CALL_TIMEOUT_S: Final = 20.0
WORK_TIMEOUT_S: Final = 5.0
"""Of one call of the worker thread, which comes to it again."""
JOIN_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


class PullGroupMember:
    """Calls and threads around a core that it shares, and the core's lock. `on_queues` is called when there may be
    queues, or places in them, to read from."""

    def __init__(
        self,
        core: SubscriptionState,
        lock: threading.Lock,
        settings: PullSettings,
        *,
        offsets: GroupOffsets,
        rebalance: RebalanceClient,
        room: str,
        on_queues: Callable[[], None],
    ) -> None:
        self._core = core
        self._lock = lock
        self._settings = settings
        self._offsets = offsets
        self._rebalance = rebalance
        self._room = room
        self._on_queues = on_queues
        self._member = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._commit_lock = threading.Lock()
        self._known_at: set[str] = set()
        self._asked_version: int | None = None
        self._asked_s = time.monotonic()
        self._failure: RaymqError | None = None
        self._refusal: RaymqError | None = None
        self._beat = threading.Event()
        self._work = threading.Event()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, *, member: bool) -> None:
        """Start the threads, once; later calls say a heartbeat at once. `member`: be one of the group."""
        if not self._threads:
            for what, target in [("work", self._run_worker), ("member", self._run_member)][: 1 + member]:
                name = f"{what}-{self._settings.group}"
                self._threads.append(threading.Thread(target=target, name=name, daemon=True))
            for thread in self._threads:
                thread.start()
        self._beat.set()

    def stop(self) -> None:
        """Hold nothing any more, leave the group and end the threads."""
        self._stopped.set()
        with self._lock:
            self._core.lose_all()
        self._beat.set()
        self._work.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def work(self) -> None:
        """There is something to commit or to let go."""
        self._work.set()

    def raise_failure(self) -> None:
        """Raise why the group cannot be joined, if it never was."""
        with self._lock:
            joined = self._core.joined
        if not joined and self._failure is not None:
            raise self._failure

    def raise_refusal(self) -> None:
        """Raise, once, why the brokers refuse what the worker thread commits: trying again does not help."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def fence(self) -> None:
        """Without an answer of the group for too long, others may get the queues soon, or have them."""
        with self._lock:
            lost = self._core.fence(time.monotonic())
        if lost:
            logger.warning("a consumer of group %s gives up its queues: the group gave no answer", self._settings.group)

    # Calls to brokers

    def make_known(self, broker_names: Iterable[str], timeout_s: float = GROUP_CALL_TIMEOUT_S) -> None:
        """Make the group known to brokers, once each."""
        for broker_name in sorted(set(broker_names) - self._known_at):
            self._offsets.ensure_group(broker_name, timeout_s)
            self._known_at.add(broker_name)

    def starts(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, QueueOffset]:
        """Where the group starts in queues that are read without being a member of it."""
        return {queue: self._offsets.start(queue, self._settings.start, 0, GROUP_CALL_TIMEOUT_S) for queue in queues}

    def committed(self, queue: MessageQueue) -> int | None:
        """The group's committed offset, None where there is none."""
        return self._offsets.committed(queue, GROUP_CALL_TIMEOUT_S)

    def commit_all(self, *, finished: bool) -> dict[MessageQueue, int]:
        """Commit what is finished, and let go of revoked queues. `finished`: that is all that polls returned."""
        self.fence()
        if finished:
            with self._lock:
                self._core.finish_all()
        committed = self.commit()
        self._release()
        return committed

    def commit(self, timeout_s: float = GROUP_CALL_TIMEOUT_S) -> dict[MessageQueue, int]:
        """Commit what is finished. Gives the offsets that count; durable on return."""
        with (
            self._commit_lock
        ):  # one after another: a commit of a place sought back must not be overtaken by one before
            with self._lock:
                commits = self._core.uncommitted(time.monotonic())
            return self._say(commits, timeout_s)

    def _say(self, commits: Mapping[MessageQueue, OffsetCommit], timeout_s: float) -> dict[MessageQueue, int]:
        if not commits:
            return {}
        answer = self._offsets.commit(commits, timeout_s)
        with self._lock:
            committed = self._core.answered(commits, answer)
        for what, queues in (("was reset", answer.reset), ("is another's", answer.fenced), ("is gone", answer.gone)):
            for queue in sorted(queues):
                logger.warning("group %s: %s %s", self._settings.group, queue, what)
        if answer.reset:
            self._on_queues()
        return committed

    def _release(self) -> None:
        with self._lock:
            released = self._core.release()
        if released:  # say so at once: somebody waits for them
            self._beat.set()

    # The worker thread

    def _run_worker(self) -> None:
        while not self._stopped.is_set():
            self._work.clear()
            for step in (self._start_granted, self._commit_due, self._release, self._hear_of_resets):
                try:
                    step()
                except RaymqError as error:
                    logger.warning("group %s, trying again: %s", self._settings.group, error)
            self._work.wait(WORK_INTERVAL_S)

    def _start_granted(self) -> None:
        with self._lock:
            starting = dict(self._core.starting)
        failures: dict[str, RaymqError] = {}
        for queue, generation in starting.items():
            if queue.broker_name in failures or self._stopped.is_set():
                continue  # not a timeout for each queue of a broker that is away
            try:
                self.make_known([queue.broker_name], WORK_TIMEOUT_S)
                start = self._offsets.start(queue, self._settings.start, generation, WORK_TIMEOUT_S)
            except RaymqError as error:
                failures[queue.broker_name] = error
                continue
            with self._lock:
                self._core.started(queue, start)
            self._on_queues()
        for failure in failures.values():
            raise failure

    def _commit_due(self) -> None:
        self.fence()
        with self._lock:
            due = self._core.commits_due(time.monotonic())
        if due:
            try:
                self.commit(WORK_TIMEOUT_S)
            except RaymqError as error:
                self._refusal = None if error.retryable else error
                raise

    def _hear_of_resets(self) -> None:
        """Ask the brokers, when the group says that somebody has reset offsets; without a group, every 2 s."""
        now_s = time.monotonic()
        with self._lock:
            version, questions = self._core.offsets_version, self._core.questions()
        silent = version is None and now_s - self._asked_s >= RESET_QUESTION_INTERVAL_S
        if silent or version != self._asked_version:
            self._say(questions, WORK_TIMEOUT_S)
            self._asked_s, self._asked_version = now_s, version

    # The member thread

    def _run_member(self) -> None:
        while not self._stopped.is_set():
            self._beat.clear()
            with self._lock:
                abandoned = self._core.abandoned(time.monotonic())
            if abandoned:
                self._abandon()
            else:
                self._say_heartbeat()
            self._beat.wait(MEMBER_HEARTBEAT_INTERVAL_S)
        self._leave()

    def _say_heartbeat(self) -> None:
        with self._lock:
            heartbeat = GroupHeartbeat(
                self._member,
                frozenset(self._core.subscriptions),
                self._core.holding,
                allocation=self._settings.allocation,
                node=self._room,
            )
        sent_s = time.monotonic()
        try:
            assignment = self._rebalance.heartbeat(heartbeat)
        except RaymqError as error:
            self._failure = error
            logger.info("group %s: %s", self._settings.group, error)
            self.fence()
            return
        if self._asked_version is None:  # before any queue is begun with
            self._asked_version = assignment.offsets_version
        with self._lock:
            self._core.assigned(assignment, sent_s)
            work = self._core.starting or self._core.leaving or assignment.offsets_version != self._asked_version
        if work:
            self._work.set()

    def _abandon(self) -> None:
        with self._lock:
            lost = self._core.lose_all()
        if lost:
            silent_s = self._settings.poll_interval_max_s
            logger.warning("a consumer of group %s leaves it: no poll for %g s", self._settings.group, silent_s)
            self._leave()

    def _leave(self) -> None:
        try:
            self._rebalance.heartbeat(GroupHeartbeat(self._member, frozenset(), frozenset(), leaving=True))
        except RaymqError as error:
            logger.info("group %s: left without a word, the group will notice: %s", self._settings.group, error)
