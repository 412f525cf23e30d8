"""The load of a soak test: producers and consumers in processes of their own, and the threads of the test that collect
their reports. A killed consumer is replaced by a new one."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayActorError

from tests.support.soak import audit, clients, number_set
from tests.support.soak.audit import Audit
from tests.support.soak.clients import LoadConsumer, LoadProducer, SendReport

# Ray's workers cannot import the tests, so Ray sends them the code of the producers and consumers.
for _module in (audit, clients, number_set):
    ray.cloudpickle.register_pickle_by_value(_module)

CALL_TIMEOUT_S: Final = 120.0
COLLECT_S: Final = 0.5
FAILURES_MAX: Final = 20


class Interval(NamedTuple):
    """The load between two calls of `Load.take`. `sent`: acknowledged messages. `read`: messages read for the first
    time. `send_ms`, `read_ms`: p50 and p99 of the latencies. `failed`: messages whose send had no SEND_OK."""

    sent: int
    read: int
    send_ms: tuple[float, float]
    read_ms: tuple[float, float]
    failed: int


class Load:
    """`producers` processes that send `per_s` messages per second together, and `consumers` processes of one group.

    Start the load, call `take` at intervals, then `stop_sending` and `stop`.
    """

    def __init__(
        self, topic: str, group: str, audit: Audit, *, producers: int, consumers: int, per_s: float, size: int
    ) -> None:
        self._topic, self._group, self._audit = topic, group, audit
        make = ray.remote(num_cpus=0)(LoadProducer)
        self._producers = [make.remote(topic, number, per_s / producers, size) for number in range(producers)]
        self._consumers = [self._new_consumer() for _ in range(consumers)]
        self._lock = threading.Lock()
        self._sent = self._read = self._failed = 0
        self._send_ms: list[float] = []
        self._read_ms: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        self._ending, self._stopping = threading.Event(), threading.Event()
        self._errors: list[BaseException] = []
        self.failures: list[str] = []
        """Errors of the first failed sends. A failed send is no fault of raymq: its outcome is unknown."""
        self._collector = self._thread(self._collect)
        self._readers = [self._thread(lambda index=index: self._read_on(index)) for index in range(consumers)]

    def start(self) -> None:
        """Start to send and to read. Returns after all processes run."""
        ray.get([consumer.pid.remote() for consumer in self._consumers], timeout=CALL_TIMEOUT_S)
        ray.get([producer.start.remote() for producer in self._producers], timeout=CALL_TIMEOUT_S)
        for thread in (self._collector, *self._readers):
            thread.start()

    def take(self) -> Interval:
        """Return what has happened since the last call. Raises the error of a thread that has failed."""
        self.check()
        with self._lock:
            interval = Interval(
                self._sent,
                self._read,
                _p50_and_p99(np.array(self._send_ms)),
                _p50_and_p99(np.concatenate([np.zeros(0, np.float32), *self._read_ms])),
                self._failed,
            )
            self._sent = self._read = self._failed = 0
            self._send_ms, self._read_ms = [], []
        return interval

    def check(self) -> None:
        """Raise the error of a thread that has failed."""
        if self._errors:
            raise self._errors[0]

    def kill_consumer(self, rng: random.Random) -> str:
        """Kill the process of a consumer with SIGKILL. Returns the process's name."""
        pid = int(ray.get(rng.choice(self._consumers).pid.remote(), timeout=CALL_TIMEOUT_S))
        os.kill(pid, signal.SIGKILL)
        return f"consumer ({pid})"

    def stop_sending(self) -> None:
        """Stop the producers, and record the outcome of all their sends."""
        self._ending.set()
        self._collector.join(CALL_TIMEOUT_S)
        for number, reports in enumerate(
            ray.get([producer.stop.remote() for producer in self._producers], timeout=CALL_TIMEOUT_S)
        ):
            self._note(number, reports)
        self.check()

    def stop(self) -> None:
        """Stop the consumers, and end all client processes."""
        self._ending.set()
        self._stopping.set()
        for thread in (self._collector, *self._readers):
            if thread.ident is not None:
                thread.join(CALL_TIMEOUT_S)
        for actor in (*self._producers, *self._consumers):
            ray.kill(actor)
        self.check()

    def _new_consumer(self) -> Any:
        return ray.remote(num_cpus=0)(LoadConsumer).remote(self._topic, self._group)

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # keep the error of this thread; `check` raises it in the test's thread
                self._errors.append(error)

        return threading.Thread(target=run, daemon=True)

    def _collect(self) -> None:
        while not self._ending.wait(COLLECT_S):
            calls = [producer.reports.remote() for producer in self._producers]
            for number, reports in enumerate(ray.get(calls, timeout=CALL_TIMEOUT_S)):
                self._note(number, reports)

    def _note(self, producer: int, reports: list[SendReport]) -> None:
        for report in reports:
            if not report.error:
                self._audit.add_acknowledged(producer, report.first, report.count)
        with self._lock:
            for report in reports:
                self._send_ms.append(report.took_ms)
                if report.error:
                    self._failed += report.count
                    self.failures += [report.error][: FAILURES_MAX - len(self.failures)]
                else:
                    self._sent += report.count

    def _read_on(self, index: int) -> None:
        while not self._stopping.is_set():
            try:
                rows = ray.get(self._consumers[index].read.remote(COLLECT_S), timeout=CALL_TIMEOUT_S)
            except RayActorError:
                ray.kill(self._consumers[index])  # Ray may have lost only the connection; two members would remain
                self._consumers[index] = self._new_consumer()
                continue
            if rows is not None:
                new = self._audit.add_read(rows)
                with self._lock:
                    self._read += new
                    self._read_ms.append(rows.latencies_ms.astype(np.float32))


def _p50_and_p99(values: np.ndarray[Any, np.dtype[Any]]) -> tuple[float, float]:
    if not len(values):
        return 0.0, 0.0
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99)
