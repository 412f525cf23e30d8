"""PullGroupMember makes a pull consumer's calls to its group and its brokers, beside the program's thread.

    RebalanceClient   heartbeats → queues granted and revoked; not used for queues assigned without a group
    worker thread     start offsets, commits that are due, releases, resets by an administrator

A program that stops polling for `poll_interval_max_s` is taken to hang: it leaves its group until it polls again.
Heartbeats wait for no other call, so a slow broker costs no session.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from raymq.consumer.assignment.group_member import GroupMember
from raymq.consumer.group_offsets import GroupOffsets
from raymq.consumer.pull.assigned_message_queue import AssignedMessageQueue
from raymq.consumer.pull.settings import PullSettings
from raymq.consumer.pull.subscription_state import SubscriptionState
from raymq.consumer.rebalance_client import RebalanceClient
from raymq.errors import RaymqError
from raymq.message import MessageQueue
from raymq.protocol.group import OffsetCommit, QueueOffset

WORK_INTERVAL_S: Final = 1.0
"""How soon the worker thread tries again, or goes on with work that it waits for others with."""
IDLE_INTERVAL_S: Final = 600.0
"""How long the worker thread sleeps at most while nothing is to be done."""
RESET_QUESTION_INTERVAL_S: Final = 2.0
"""How often the brokers are asked about resets of queues assigned without a group; a group's members are told with
the answers to their heartbeats."""
GROUP_CALL_TIMEOUT_S: Final = 20.0
"""For a call of the program's thread."""
WORK_TIMEOUT_S: Final = 5.0
"""For a call of the worker thread, which makes it again after a failure."""
JOIN_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


class PullGroupMember:
    """Calls and the worker thread around the engine's `core`, which `lock` guards.

    `node_id` is the Ray node this process runs on, for allocation by machine. `on_queues` is called when queues, or
    positions in them, may have become fetchable.
    """

    def __init__(
        self,
        core: SubscriptionState,
        lock: threading.Lock,
        settings: PullSettings,
        *,
        offsets: GroupOffsets,
        rebalance: RebalanceClient,
        node_id: str,
        on_queues: Callable[[], None],
    ) -> None:
        self._core = core
        self._lock = lock
        self._settings = settings
        self._offsets = offsets
        self._on_queues = on_queues
        self._ask = threading.Event()
        """Somebody has reset offsets of the group: the brokers are to be asked."""
        self._member = GroupMember(
            core,
            lock,
            rebalance,
            group=settings.group,
            name=f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}",
            node_id=node_id,
            allocation=settings.allocation,
            on_assigned=self._assigned,
            on_reset=self._ask.set,
        )
        self.fence, self.raise_failure = self._member.fence, self._member.raise_failure
        self._commit_lock = threading.Lock()
        """Held over a commit, so that one that was sought back is not overtaken by one from before."""
        self._known_at: set[str] = set()
        """The brokers that know the group."""
        self._queried_s = time.monotonic()
        """When the brokers were last asked about resets."""
        self._refusal: RaymqError | None = None
        """The error of an automatic commit that cannot succeed; None once it is raised to the program."""
        self._work = threading.Event()
        """Wakes the worker thread."""
        self._wakes_s = math.inf
        """The time at which the worker thread wakes by itself."""
        self._stopped = threading.Event()
        self._worker: threading.Thread | None = None

    def start(self, *, member: bool) -> None:
        """Start the work, once; a later call sends a heartbeat at once. `member`: take part in the group."""
        if self._worker is None:
            name = f"work-{self._settings.group}"
            self._worker = threading.Thread(target=self._run_worker, name=name, daemon=True)
            self._worker.start()
            if member:
                self._member.join()
        self._member.beat_soon()

    def stop(self) -> None:
        """Give up all queues, leave the group and end the thread."""
        self._stopped.set()
        self._work.set()
        self._member.leave()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(JOIN_TIMEOUT_S)

    def wake_worker(self) -> None:
        """Commit, start and release at once what is due."""
        self._work.set()

    def sleeps_beyond(self, time_s: float) -> bool:
        """True if the worker thread does not wake by itself soon after `time_s`."""
        return self._wakes_s > time_s + WORK_INTERVAL_S

    def raise_refusal(self) -> None:
        """Raise, once, the error with which the brokers have refused an automatic commit for good."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    # Calls to brokers

    def make_known(self, broker_names: Iterable[str], timeout_s: float = GROUP_CALL_TIMEOUT_S) -> None:
        """Make the group known to each of these brokers that does not know it yet."""
        for broker_name in sorted(set(broker_names) - self._known_at):
            self._offsets.ensure_group(broker_name, timeout_s)
            self._known_at.add(broker_name)

    def start_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, QueueOffset]:
        """The start offsets of queues that are assigned without a group."""
        generations = dict.fromkeys(queues, 0)
        starts = self._offsets.start_offsets(generations, self._settings.start, GROUP_CALL_TIMEOUT_S)
        for queue in generations:
            if queue not in starts:  # the call for one queue raises the reason
                starts[queue] = self._offsets.start_offset(queue, self._settings.start, 0, GROUP_CALL_TIMEOUT_S)
        return starts

    def committed_offset(self, queue: MessageQueue) -> int | None:
        """The group's committed offset, None where there is none."""
        return self._offsets.committed_offset(queue, GROUP_CALL_TIMEOUT_S)

    def commit_and_release(self, *, finished: bool) -> dict[MessageQueue, int]:
        """Commit the finished messages, release revoked queues, and return the committed offsets. `finished`: the
        program has finished with everything that polls returned."""
        self.fence()
        if finished:
            with self._lock:
                self._core.finish_all()
        committed = self.commit_finished()
        self._release()
        return committed

    def commit_finished(self, timeout_s: float = GROUP_CALL_TIMEOUT_S) -> dict[MessageQueue, int]:
        """Commit the finished messages, and return the committed offsets; durable on return."""
        with self._commit_lock:
            with self._lock:
                self._core.commit_begins(time.monotonic())
                commits = self._core.uncommitted()
            return self._commit_offsets(commits, timeout_s)

    def _commit_offsets(
        self, commits: Mapping[MessageQueue, OffsetCommit], timeout_s: float
    ) -> dict[MessageQueue, int]:
        if not commits:
            return {}
        answer = self._offsets.commit_offsets(commits, timeout_s)
        with self._lock:
            committed = self._core.commit_answered(commits, answer)
        verdicts = (("was reset", answer.reset), ("has another owner", answer.fenced), ("is deleted", answer.gone))
        for verdict, queues in verdicts:
            for queue in sorted(queues):
                logger.warning("group %s: %s %s", self._settings.group, queue, verdict)
        if answer.reset:
            self._on_queues()
        return committed

    def _release(self) -> None:
        with self._lock:
            released = self._core.release(time.monotonic())
        if released:  # a heartbeat at once: other members wait for them
            self._member.beat_soon()

    def _assigned(self) -> None:
        with self._lock:
            work = self._core.starting() or self._core.leaving
        if work or self._ask.is_set():
            self._work.set()

    # The worker thread

    def _run_worker(self) -> None:
        while not self._stopped.is_set():
            self._work.clear()
            failed = False
            for step in (self._start_granted, self._commit_due, self._release, self._ask_about_resets):
                try:
                    step()
                except RaymqError as error:
                    logger.warning("group %s, trying again: %s", self._settings.group, error)
                    failed = True
            now_s = time.monotonic()
            self._wakes_s = now_s + (WORK_INTERVAL_S if failed else self._idle_s(now_s))
            self._work.wait(self._wakes_s - now_s)

    def _idle_s(self, now_s: float) -> float:
        """How long the worker thread may sleep if nobody wakes it, in s."""
        with self._lock:
            commit_s = self._core.next_commit_s()
            busy = self._core.starting() or self._core.leaving
            alone = self._core.joined and self._core.offsets_version is None
        if busy:
            return WORK_INTERVAL_S
        idle_s = RESET_QUESTION_INTERVAL_S if alone else IDLE_INTERVAL_S
        return idle_s if commit_s is None else min(idle_s, max(commit_s - now_s, WORK_INTERVAL_S))

    def _start_granted(self) -> None:
        """Ask for the start offsets of granted queues, with one call to each broker group."""
        with self._lock:
            starting = self._core.starting()
        by_broker: dict[str, dict[MessageQueue, AssignedMessageQueue]] = {}
        for assigned in starting:
            by_broker.setdefault(assigned.queue.broker_name, {})[assigned.queue] = assigned
        failure: RaymqError | None = None
        for broker_name, queues in by_broker.items():
            if self._stopped.is_set():
                return
            try:
                self.make_known([broker_name], WORK_TIMEOUT_S)
                generations = {queue: assigned.generation for queue, assigned in queues.items()}
                starts = self._offsets.start_offsets(generations, self._settings.start, WORK_TIMEOUT_S)
            except RaymqError as error:
                failure = error
                continue
            with self._lock:
                for queue, start in starts.items():
                    self._core.started(queues[queue], start)
            if starts:
                self._on_queues()
            for queue in sorted(generations.keys() - starts.keys()):
                logger.warning("group %s: %s has no start offset; is its topic deleted?", self._settings.group, queue)
        if failure is not None:
            raise failure

    def _commit_due(self) -> None:
        self.fence()
        with self._lock:
            due = self._core.commits_due(time.monotonic())
        if due:
            try:
                self.commit_finished(WORK_TIMEOUT_S)
            except RaymqError as error:
                self._refusal = None if error.retryable else error
                raise

    def _ask_about_resets(self) -> None:
        """Ask the brokers when the group tells that somebody has reset offsets; without a group, every 2 s."""
        now_s = time.monotonic()
        with self._lock:
            alone = self._core.joined and self._core.offsets_version is None
            queries = self._core.reset_queries()
        if self._ask.is_set() or (alone and now_s - self._queried_s >= RESET_QUESTION_INTERVAL_S):
            self._commit_offsets(queries, WORK_TIMEOUT_S)
            self._queried_s = now_s
            self._ask.clear()
