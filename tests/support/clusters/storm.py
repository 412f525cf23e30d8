"""Bursts of random faults for chaos tests: several processes fail at once, a second fault hits during the recovery from
the first, and some processes are paused while others are killed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from tests.support.clusters.cluster import actor_processes, title

WHOLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Weather:
    """Settings of a storm: the kinds, frequency and duration of its faults.

    `kills` and `stops` map each class of actors, such as "Storage", to its weight in the random choice. `stop_s`:
    shortest and longest duration of a pause of a process. `again_s`: shortest and longest delay between the first and
    the second fault of a burst. `calm_s`: shortest and longest pause between two bursts. `at_once`: maximum number of
    processes that a burst hits.
    """

    kills: Mapping[str, int]
    stops: Mapping[str, int]
    stop_s: tuple[float, float] = (1.0, 6.0)
    again_s: tuple[float, float] = (0.1, 2.5)
    calm_s: tuple[float, float] = (0.5, 6.0)
    at_once: int = 3


class Storm:
    """A thread that causes bursts of random faults for `seconds`. At the end of this time it resumes all paused
    processes."""

    def __init__(self, weather: Weather, rng: random.Random, seconds: float) -> None:
        self._weather, self._rng, self._seconds = weather, rng, seconds
        self._stopped: dict[psutil.Process, float] = {}
        """The paused processes, each with the time at which the process resumes."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storm", daemon=True)
        self.started_s = time.monotonic()
        self.ended_s = 0.0
        """Time at which the last fault of this object ended, in seconds on the clock of `time.monotonic`."""
        self.faults: list[str] = []
        """Descriptions of the faults that this storm (a sequence of random faults) has caused so far, for the test's
        report."""

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread that causes faults has ended, and check that it has ended in time."""
        self._thread.join(self._seconds + 120)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """End the storm early. This also works before the storm has begun."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(60)
            assert not self._thread.is_alive()

    def _run(self) -> None:
        weather, self.started_s = self._weather, time.monotonic()
        try:
            while time.monotonic() - self.started_s < self._seconds and not self._ending.is_set():
                struck = [self._strike() for _ in range(self._rng.randint(1, weather.at_once))]
                if self._rng.random() < 0.6:
                    self._pass(self._rng.uniform(*weather.again_s))
                    self._strike(self._rng.choice(struck))
                self._pass(self._rng.uniform(*weather.calm_s))
        finally:
            self._continue(float("inf"))
            self.ended_s = time.monotonic()

    def _strike(self, actor: str | None = None) -> str:
        """Kill or pause a process of the actor class `actor`, or of a random class if `actor` is None. Returns the name
        of the class."""
        weather, rng = self._weather, self._rng
        if actor is None or actor not in weather.kills:
            stops = rng.random() < 0.4
            actor = _chosen(weather.stops if stops else weather.kills, rng)
        else:
            stops = False
        processes = sorted(actor_processes(actor), key=lambda process: process.pid)
        if processes:
            process = rng.choice(processes)
            try:
                self._stop(process, actor) if stops else self._kill(process, actor)
            except psutil.NoSuchProcess:
                self._note("found ended", actor, process)
        return actor

    def _kill(self, process: psutil.Process, actor: str) -> None:
        process.kill()
        self._stopped.pop(process, None)
        self._note("killed", actor, process)

    def _stop(self, process: psutil.Process, actor: str) -> None:
        seconds = self._rng.uniform(*self._weather.stop_s)
        process.suspend()
        self._stopped[process] = time.monotonic() + seconds
        self._note(f"stopped for {seconds:.1f} s", actor, process)

    def _note(self, what: str, actor: str, process: psutil.Process) -> None:
        self.faults.append(f"{time.monotonic() - self.started_s:6.1f} s: {what} {actor} ({process.pid})")

    def _pass(self, seconds: float) -> None:
        """Wait for `seconds`. In this time, resume each paused process when its pause ends."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not self._ending.wait(WHOLE_S):
            self._continue(time.monotonic())

    def _continue(self, now_s: float) -> None:
        for process in [process for process, until_s in self._stopped.items() if until_s <= now_s]:
            del self._stopped[process]
            try:
                process.resume()
            except psutil.NoSuchProcess:
                continue  # the paused process no longer exists: it was killed together with its node, or by Ray
            self._note("continued", title(process).removeprefix("ray::").split(".")[0], process)


def _chosen(weights: Mapping[str, int], rng: random.Random) -> str:
    names: Sequence[str] = sorted(weights)
    return rng.choices(names, [weights[name] for name in names])[0]
