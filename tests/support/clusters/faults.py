"""Fault injection for chaos tests: a seeded random generator chooses the processes to kill or to pause."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
import ray

import raymq
from raymq.client.cluster.launcher import launch
from raymq.common.config.cluster import load_settings
from raymq.common.errors import RaymqError
from raymq.common.names import NAMESPACE, StorageName
from raymq.remoting.actor_ref import ActorRef, find_actor
from tests.support.clusters.cluster import Sandbox, actor_processes
from tests.support.history.waiting import eventually

POLL_S = 0.002
END_S = 60.0


@contextmanager
def standing_still(*pids: int) -> Iterator[None]:
    """Pause processes with SIGSTOP, one after another. At the end of the block, SIGCONT resumes the processes that
    still exist."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def broker_group_away(box: Sandbox, broker_name: str) -> Iterator[None]:
    """Kill the broker and the only store of a broker group permanently. At the end of the block, start both again, as
    `raymq up` does."""
    names = [broker_name, str(StorageName(broker_name, 0))]
    store = psutil.Process(ActorRef(names[1]).call("describe").pid)
    try:
        for name in names:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        eventually(lambda: not any(map(find_actor, names)), f"the end of {broker_name}")
        store.wait(END_S)
        yield
    finally:
        launch("start", ray.get_runtime_context().gcs_address, load_settings(box.work / "raymq.yaml"))


class _Killer:
    """Kills a random process of a set with SIGKILL each time the workload's progress reaches the next threshold.

    The seed decides the thresholds; `kills` is their number. A threshold is between a tenth and nine tenths of `total`.
    """

    def __init__(
        self, names: Sequence[str], rng: random.Random, *, kills: int, total: int, progress: Callable[[], int]
    ) -> None:
        self._names, self._rng, self._progress = list(names), rng, progress
        self._marks = sorted(rng.randrange(total // 10, total * 9 // 10) for _ in range(kills))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.killed: list[str] = []
        """Descriptions of the processes killed so far, for the test's report."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread that kills processes. If the test's progress has reached the threshold of the last kill, first
        wait until all kills are done. A kill may still wait for a process that is restarting."""
        self._thread.join(60 if self._progress() >= self._marks[-1] else 0)
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        for mark in self._marks:
            while self._progress() < mark:
                if self._stop.wait(POLL_S):
                    return
            self._kill(self._rng.choice(self._names))

    def _kill(self, name: str) -> None:
        while (pid := self._pid_of(name)) is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # the chosen process has ended by itself; look for its successor
            self.killed.append(f"{name} (pid {pid}) after {self._progress()} messages")
            return

    def _pid_of(self, name: str) -> int | None:
        raise NotImplementedError


class StorageKiller(_Killer):
    """Kills the processes of random storage actors. The test gives the names of the actors."""

    def __init__(
        self,
        mq: raymq.Client,
        names: Sequence[str],
        rng: random.Random,
        *,
        kills: int,
        total: int,
        progress: Callable[[], int],
    ) -> None:
        super().__init__(names, rng, kills=kills, total=total, progress=progress)
        self._mq = mq

    def _pid_of(self, name: str) -> int | None:
        """Return the process id of a storage actor. Waits until the actor answers, because it may be restarting after a
        kill."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and not self._stop.is_set():
            try:
                status = self._mq.storages.get(name).control("status", timeout_s=2.0)
            except RaymqError:
                self._stop.wait(POLL_S)
                continue
            return int(status["pid"])
        return None


class ActorKiller(_Killer):
    """Kills random processes of one class of actors, such as "Pull"."""

    def _pid_of(self, name: str) -> int | None:
        """Return the process id of an actor of the class. Waits until such a process exists, because the killer may
        have just killed all of them."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and not self._stop.is_set():
            processes = actor_processes(name)
            if processes:
                return self._rng.choice(sorted(processes, key=lambda process: process.pid)).pid
            self._stop.wait(0.05)
        return None
