"""The faults of chaos tests: processes are killed, by a seeded random generator, or stand still for a while."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil

import raymq
from raymq.common.errors import RaymqError
from tests.support.clusters.cluster import actor_processes

POLL_S = 0.002


@contextmanager
def standing_still(*pids: int) -> Iterator[None]:
    """Processes that are stopped with SIGSTOP in the body, one after another, and go on after it if they still live."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)


class _Killer:
    """Kills one of some processes with SIGKILL each time the workload's progress reaches the next mark.

    The marks are drawn from the seed: `kills` of them, between a tenth and nine tenths of `total`.
    """

    def __init__(
        self, names: Sequence[str], rng: random.Random, *, kills: int, total: int, progress: Callable[[], int]
    ) -> None:
        self._names, self._rng, self._progress = list(names), rng, progress
        self._marks = sorted(rng.randrange(total // 10, total * 9 // 10) for _ in range(kills))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.killed: list[str] = []
        """The faults, in words, for the report."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End. What is due at the marks that were reached is done before: its victim may just be starting again."""
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
                continue  # it was on its way to its end
            self.killed.append(f"{name} (pid {pid}) after {self._progress()} messages")
            return

    def _pid_of(self, name: str) -> int | None:
        raise NotImplementedError


class StorageKiller(_Killer):
    """Kills storage actors, by name."""

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
        """The process of a storage actor, once it answers (it may have been killed just now)."""
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
    """Kills any one process of a class of actors, such as "Pull"."""

    def _pid_of(self, name: str) -> int | None:
        """A process of the class, once there is one (all may have been killed just now)."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and not self._stop.is_set():
            processes = actor_processes(name)
            if processes:
                return self._rng.choice(sorted(processes, key=lambda process: process.pid)).pid
            self._stop.wait(0.05)
        return None
