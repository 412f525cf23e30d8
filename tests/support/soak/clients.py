"""The clients of a soak test: Ray actors that send at a set rate, or read, and report in columns.

Each body begins with the producer's number, the message's sequence number, and the time at which the message was due,
in ns of CLOCK_MONOTONIC. A message is due at a fixed time, even if the producer is late. So latencies include the time
for which a message could not be sent.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import raymq
from tests.support.soak.audit import ReadRows

TICK_S: Final = 0.05
TABLE_ROWS_MAX: Final = 5000
HEADER: Final = 3
"""Number of integers of 64 bits at the beginning of each body."""
COLUMNS: Final = ("queue_id", "queue_offset", "body")


class SendReport(NamedTuple):
    """One call of `send_table`: the first sequence number, the number of rows, and the call's duration in ms. `error`
    is empty if all rows were acknowledged with SEND_OK. Otherwise the rows may or may not be stored."""

    first: int
    count: int
    took_ms: float
    error: str


def bodies_of(producer: int, first: int, due_ns: NDArray[np.int64], filler: bytes) -> pa.Table:
    """Return a table of messages. `due_ns`: the time at which each message is due. Each body ends with `filler`."""
    count = len(due_ns)
    header = np.empty((count, HEADER), "<i8")
    header[:, 0], header[:, 1], header[:, 2] = producer, np.arange(first, first + count), due_ns
    rows = np.empty((count, HEADER * 8 + len(filler)), np.uint8)
    rows[:, : HEADER * 8] = header.view(np.uint8)
    rows[:, HEADER * 8 :] = np.frombuffer(filler, np.uint8)
    column = pa.Array.from_buffers(pa.binary(rows.shape[1]), count, [None, pa.py_buffer(rows.tobytes())])
    return pa.table({"body": column})


def rows_of(table: pa.Table, now_ns: int) -> ReadRows:
    """Return the messages of a polled table, whose bodies all have one length. `now_ns`: the time of the poll's end.
    Raises AssertionError if a body could not be read."""
    header = np.concatenate([np.zeros((0, HEADER), np.int64), *map(_headers, table["body"].chunks)])
    numbers = [table[name].to_numpy().astype(np.int64) for name in COLUMNS[:2]]
    return ReadRows(numbers[0], numbers[1], header[:, 0], header[:, 1], (now_ns - header[:, 2]) / 1e6)


def _headers(bodies: pa.Array) -> NDArray[np.int64]:
    assert bodies.null_count == 0, "a body could not be read"
    if not len(bodies):
        return np.zeros((0, HEADER), np.int64)
    ends = np.frombuffer(bodies.buffers()[1], np.int32)[bodies.offset : bodies.offset + len(bodies) + 1]
    data = np.frombuffer(bodies.buffers()[2], np.uint8)[ends[0] : ends[-1]]
    rows = data.reshape(len(bodies), -1)[:, : HEADER * 8]
    return np.ascontiguousarray(rows).view("<i8").astype(np.int64)


class LoadProducer:
    """An actor that sends `per_s` messages of `size` bytes per second in its own thread, with `send_table`. After a
    pause it sends faster, until it has sent every message that was due."""

    def __init__(self, topic: str, number: int, per_s: float, size: int) -> None:
        self._client = raymq.connect()
        self._producer = self._client.producer(f"soak-{number}")
        self._topic, self._number, self._per_s = topic, number, per_s
        self._filler = np.random.default_rng(number).bytes(size - HEADER * 8)
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._reports: list[SendReport] = []
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="soak-producer")

    def start(self) -> None:
        """Start to send."""
        self._thread.start()

    def reports(self) -> list[SendReport]:
        """Return the reports since the last call. Raises RuntimeError if the thread has failed."""
        if self._failure:
            raise RuntimeError(self._failure)
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def stop(self) -> list[SendReport]:
        """Stop to send, wait for the current send, close the client, and return the remaining reports."""
        self._stopping.set()
        self._thread.join()
        self._client.close()
        return self.reports()

    def _run(self) -> None:
        try:
            start_ns, sent = time.monotonic_ns(), 0
            while not self._stopping.is_set():
                due = int((time.monotonic_ns() - start_ns) * self._per_s / 1e9)
                count = min(due - sent, TABLE_ROWS_MAX)
                if count:
                    due_ns = start_ns + (np.arange(sent, sent + count) * (1e9 / self._per_s)).astype(np.int64)
                    self._send(bodies_of(self._number, sent, due_ns, self._filler), sent)
                    sent += count
                if count < TABLE_ROWS_MAX:
                    self._stopping.wait(TICK_S)
        except BaseException as error:  # keep the error of this thread; `reports` raises it in the test
            self._failure = repr(error)

    def _send(self, table: pa.Table, first: int) -> None:
        begin_s, error = time.monotonic(), ""
        try:
            result = self._producer.send_table(self._topic, table)
        except raymq.RaymqError as failure:
            error = repr(failure)
        else:
            if set(result.statuses) != {raymq.SendStatus.SEND_OK}:
                error = f"statuses {result.statuses}"
        report = SendReport(first, len(table), (time.monotonic() - begin_s) * 1e3, error)
        with self._lock:
            self._reports.append(report)


class LoadConsumer:
    """An actor that reads a topic as a member of a group."""

    def __init__(self, topic: str, group: str) -> None:
        self._client = raymq.connect()
        first = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
        self._consumer = self._client.pull_consumer(group, consume_from=first, auto_commit=False)
        self._consumer.subscribe(topic)

    def pid(self) -> int:
        """Return the process id of this actor."""
        return os.getpid()

    def read(self, seconds: float) -> ReadRows | None:
        """Commit the messages of the previous calls, and read for `seconds`. Returns None if there was no message.

        The caller has received the messages of the previous calls. So the messages that a killed consumer could not
        return are not committed, and another member of the group reads them.
        """
        end_s = time.monotonic() + seconds
        parts: list[ReadRows] = []
        try:
            self._consumer.commit()
            while (left_s := end_s - time.monotonic()) > 0:
                table: Any = self._consumer.poll_table(timeout_s=left_s, body_type="binary", columns=COLUMNS)
                if len(table):
                    parts.append(rows_of(table, time.monotonic_ns()))
        except raymq.RaymqError as error:
            if not error.retryable:
                raise
        return ReadRows(*map(np.concatenate, zip(*parts, strict=True))) if parts else None

    def close(self) -> None:
        """Leave the group."""
        self._client.close()
