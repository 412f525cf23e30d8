"""Clients that create groups and commit offsets at a broker. They check that the broker keeps every change that it
acknowledged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from raymq.common.errors import RaymqError
from raymq.common.protocol.group import OffsetCommit
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.broker_client import BrokerClient

CALL_TIMEOUT_S = 10.0


class StateUsers:
    """Threads that change a broker's state while a test kills servers.

    `makers` threads create consumer groups by actor calls. Each of the `committers` threads has its own group and its
    own queue of `topic`. The thread commits ever larger offsets over lanes (direct socket connections), and reads the
    committed offset. The threads end when the context ends. If a thread failed, the context then raises the thread's
    error. `check` fails if the broker lost a change that it acknowledged.
    """

    def __init__(
        self, broker_name: str, topic: str, queues: int, *, makers: int, committers: int, pause_s: float, prefix: str
    ) -> None:
        self._broker, self._topic, self._pause_s, self._prefix = ActorRef(broker_name), topic, pause_s, prefix
        self._client = BrokerClient(broker_name)
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._lock = threading.Lock()
        self.made: set[str] = set()
        self.committed: dict[tuple[str, int], int] = {}
        """Largest committed offset of each group and queue id. An offset counts if its commit was acknowledged, or if a
        thread read it."""
        self.went_back: list[str] = []
        self.progress = 0
        self.last_s = time.monotonic()
        self.longest_gap_s = 0.0
        steps: list[Callable[[], None]] = [self._maker(index) for index in range(makers)]
        steps += [self._committer(index, index % queues) for index in range(committers)]
        self._threads = [threading.Thread(target=self._run, args=(step,), daemon=True) for step in steps]

    def __enter__(self) -> StateUsers:
        self.last_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a user of the broker hangs"
        self._client.drop_lanes()
        if self._failures and error is None:
            raise self._failures[0]

    def check(self) -> None:
        """Raise AssertionError unless the broker still has every group and every committed offset that it
        acknowledged."""
        known = set(self._ask("groups"))
        forgotten = sorted(self.made - known)
        assert forgotten == [], f"{len(forgotten)} of {len(self.made)} groups are forgotten: {forgotten[:5]}"
        for (group, queue_id), offset in sorted(self.committed.items()):
            self._check_committed(
                group, queue_id, self._ask("committed_offsets", group, self._topic).get(queue_id, 0), offset
            )
        assert self.went_back == []

    def _ask(self, method: str, *args: object) -> list[str] | dict[int, int]:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                answer: list[str] | dict[int, int] = self._broker.call(method, *args, timeout_s=CALL_TIMEOUT_S)
                return answer
            except RaymqError as error:
                if not error.retryable or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)

    def _run(self, step: Callable[[], None]) -> None:
        try:
            while not self._stopping.wait(self._pause_s):
                try:
                    step()
                except RaymqError as error:
                    if not error.retryable:
                        raise
                    continue  # It is unknown if the broker has executed the call, so the thread repeats the call.
                with self._lock:
                    now_s, self.progress = time.monotonic(), self.progress + 1
                    self.longest_gap_s, self.last_s = max(self.longest_gap_s, now_s - self.last_s), now_s
        # keep the error of this thread: it is raised at the end of the `with` block of StateUsers
        except BaseException as error:
            self._failures.append(error)

    def _maker(self, index: int) -> Callable[[], None]:
        number = 0

        def make() -> None:
            nonlocal number
            group = f"{self._prefix}-{index}-{number}"
            self._broker.call("ensure_group", group, timeout_s=CALL_TIMEOUT_S)
            self.made.add(group)
            number += 1

        return make

    def _committer(self, index: int, queue_id: int) -> Callable[[], None]:
        group, offset = f"{self._prefix}-commits-{index}", 0

        def commit() -> None:
            nonlocal offset
            if group not in self.made:
                self._client.call("ensure_group", group, timeout_s=CALL_TIMEOUT_S)
                self.made.add(group)
            commits = {self._topic: {queue_id: OffsetCommit(offset + 1, 0, 0)}}
            self._client.call("commit_offsets", group, commits, timeout_s=CALL_TIMEOUT_S)
            offset += 1
            furthest = max(offset, self.committed.get((group, queue_id), 0))
            self.committed[group, queue_id] = furthest
            seen = self._client.call("committed_offsets", group, self._topic, timeout_s=CALL_TIMEOUT_S)
            self._check_committed(group, queue_id, seen.get(queue_id, 0), furthest)
            self.committed[group, queue_id] = max(seen.get(queue_id, 0), furthest)

        return commit

    def _check_committed(self, group: str, queue_id: int, seen: int, furthest: int) -> None:
        if seen < furthest:
            self.went_back.append(f"{group} in queue {queue_id}: {furthest} then {seen}")
