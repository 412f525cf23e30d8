"""Runs a Spark driver program with a streaming query in a process of its own, which a test kills and restarts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.support.clusters.cluster import assert_gone
from tests.support.history.waiting import eventually
from tests.support.spark.batch_files import BatchFiles

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 120.0


class Driver:
    """A process that runs `python -m MODULE ARGUMENTS` and writes its output to a file in `directory`."""

    def __init__(self, module: str, directory: Path, *arguments: str, variables: Mapping[str, str] | None = None):
        self._log = directory / "driver.log"
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL the driver program, and check that its child processes end by themselves."""
        if self._process.poll() is not None:
            return
        below = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)
        assert_gone(below)

    def check_runs(self) -> bool:
        """Return True while the driver program runs. Raises AssertionError with the program's output if the program has
        ended."""
        assert self._process.poll() is None, self._log.read_text()[-4000:]
        return True

    def finish(self) -> None:
        """Wait until the driver program ends. Raises AssertionError if its exit code is not 0."""
        try:
            assert self._process.wait(START_TIMEOUT_S) == 0, self._log.read_text()[-4000:]
        finally:
            self.kill()


def kill_again_and_again(start: Callable[[], Driver], sink: BatchFiles, rng: random.Random, kills: int) -> None:
    """Start and kill a driver `kills` times.

    A random choice decides when a driver is killed: after it has begun, or after it has written, its first or its
    second batch.
    """
    for _ in range(kills):
        sink.forget_unfinished()
        suffix, enough = rng.choice(["begun", "json"]), sink.count("json") + rng.randrange(1, 3)
        driver = start()

        def reached(driver: Driver = driver, suffix: str = suffix, enough: int = enough) -> bool:
            return driver.check_runs() and sink.count(suffix) >= enough

        try:
            eventually(reached, "batches after the start", START_TIMEOUT_S)
        finally:
            driver.kill()
