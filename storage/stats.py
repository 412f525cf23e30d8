"""The counters of a store: puts and gets, their durations, and their rates in the last seconds and minutes.

All counters start when the store opens, except the daily totals, which are in a file and continue after a restart. The
names in `runtime` are RocketMQ's (spec/storage.md §12, Store stats), and the daily totals are counted as in RocketMQ.
``msgPutTotalTodayNow - msgPutTotalTodayMorning`` is the number of messages that were put since midnight.
``msgPutTotalTodayMorning - msgPutTotalYesterdayMorning`` is the number of the day before.

Gets are messages that fetches found, and messages that clients on the store's node read in the mapped files
(`count_reads`): clients report these messages with their next request.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from raymq.common.protocol.store import TopicPuts
from raymq.telemetry.metrics.histogram import Histogram, HistogramFigures
from storage.files import disk

SAMPLES_KEPT: Final = 600
DAY_TOTALS_FILE: Final = "dayTotals.json"
"""Name of the file with the daily totals, in the store's directory."""
DAY_TOTALS_INTERVAL_S: Final = 10.0
"""Interval in seconds at which the daily totals are written to their file. A crash loses at most the counts of one
interval."""
PUTS_NOTED_MAX: Final = 1000
"""Maximum number of appended batches (puts) that wait in a list to be counted. A full list is counted at once, which is
cheaper than counting each put."""
TPS_PERIODS_S: Final = (10, 60, 600)
LATENCY_BOUNDS_MS: Final = (0, 10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10_000)
"""Upper bounds in ms of RocketMQ's latency buckets. A 13th bucket holds all longer times."""
_FINE_BOUNDS_MS: Final = tuple(0.01 * 1.2**step for step in range(90))

logger = logging.getLogger(__name__)

K = TypeVar("K")


class PutKind(Enum):
    """How messages were put into the store: sent, delivered after a delay, committed by a transaction, or copied from
    another replica."""

    NORMAL = "normal"
    DELAY = "delay"
    TRANSACTION = "transaction"
    COPIED = "copied"


class _Sample(NamedTuple):
    at_s: float
    puts: int
    found: int
    missed: int
    transferred: int


class _DayTotals(NamedTuple):
    puts: int
    gets: int


class _Days(NamedTuple):
    """Total numbers of messages put and fetched, at three times: now, at midnight of `day`, and at the midnight
    before."""

    day: date
    now: _DayTotals
    today_morning: _DayTotals
    yesterday_morning: _DayTotals


class DayTotalsFile:
    """The file with the daily totals of messages put and fetched.

    The totals are statistics: if the file is damaged, or cannot be written, only the totals are lost.

        {"day": "2026-11-25", "totals": [[puts, gets] now, this morning, yesterday morning], "crc": …}
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> _Days | None:
        """Read the daily totals. Returns None if the file does not exist or, with a warning, if it is damaged."""
        try:
            values = json.loads(self._path.read_bytes())
            if values["crc"] != _crc(values["day"], values["totals"]):
                raise ValueError("the file does not match its checksum")
            now, today, yesterday = (_DayTotals(*map(int, pair)) for pair in values["totals"])
            return _Days(date.fromisoformat(values["day"]), now, today, yesterday)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "file %s cannot be read, so the totals of yesterday and today begin at 0: %s", self._path, error
            )
            return None

    def write(self, days: _Days) -> None:
        """Replace the daily totals in the file. If this fails, a warning is logged."""
        day, totals = days.day.isoformat(), [list(one) for one in days[1:]]
        text = json.dumps({"day": day, "totals": totals, "crc": _crc(day, totals)})
        try:
            disk.replace_file(self._path, text.encode())
        except OSError as error:
            logger.warning(
                "file %s cannot be written; after a restart the totals of today are too low: %s", self._path, error
            )


def _crc(day: str, totals: list[list[int]]) -> int:
    return zlib.crc32(json.dumps([day, totals]).encode())


class StoreStats:
    """The counters of one store. Thread-safe; counting takes less than a microsecond per call."""

    def __init__(self, today: Callable[[], date] = date.today, file: DayTotalsFile | None = None) -> None:
        """Create the counters. `today`: a function that returns the current day of the local calendar. `file`: stores
        the totals of each day; None stores no totals."""
        self.put_latency = Histogram("raymq_put_latency_milliseconds")
        self.send_latency = Histogram("raymq_rpc_latency_milliseconds")
        self.get_latency = Histogram("raymq_rpc_latency_milliseconds")
        self.delays = Histogram("raymq_delay_message_latency_seconds")
        self._lock = threading.Lock()
        self._booted_ms = time.time_ns() // 1_000_000
        # Puts that are not counted yet: topic, messages, bytes, seconds and kind. Appending to the deque needs no lock.
        self._puts: deque[tuple[str, int, int, float | None, PutKind]] = deque()
        # Numbers of messages and bytes that were put, by topic.
        self._topics: dict[str, list[int]] = {}
        # Messages and bytes that were put to topics that have been deleted.
        self._forgotten = [0, 0]
        # Numbers of messages and bytes that were put, by topic and kind of put. Copies from other replicas are not
        # counted.
        self._received: dict[tuple[str, PutKind], list[int]] = {}
        # For each kind of put: a histogram of the mean record size of each batch.
        self._sizes: dict[PutKind, Histogram] = {}
        # Numbers of appends by duration: in RocketMQ's buckets, and in finer buckets for the percentiles.
        self._buckets = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        self._fine = [0] * (len(_FINE_BOUNDS_MS) + 1)
        # Numbers of failed appends, of fetched queues that had messages, of fetched queues that had none, and of
        # fetched messages.
        self._puts_failed = self._gets_found = self._gets_missed = self._transferred = 0
        # Durations of the slowest append and of the slowest fetch, in ms.
        self._put_max_ms = self._get_max_ms = 0.0
        self._today = today
        self._day = today()
        # Number of messages put and number of messages fetched, in total, up to the beginning of yesterday, and up to
        # the beginning of today.
        self._yesterday_morning = self._today_morning = _DayTotals(0, 0)
        # Total messages put and fetched before the store was opened.
        self._before = _DayTotals(0, 0)
        self._file = file
        self._saved: _Days | None = None
        self._saved_s = time.monotonic()
        self._go_on()
        # Earlier values of the counters: one sample per second, oldest first.
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_KEPT + 1)
        self.take_sample(time.monotonic())

    def count_puts(
        self, batches: Iterable[tuple[str, int, int]], took_s: float | None, kind: PutKind = PutKind.NORMAL
    ) -> None:
        """Count an append of batches, each (topic, messages, bytes), that took `took_s` seconds, including the wait for
        the disk.

        `took_s` is None for a chunk from another replica: only the chunk's messages and bytes are counted.
        """
        for topic, messages, size in batches:
            self.count_put(topic, messages, size, None, kind)
        if took_s is not None:
            self.count_put("", 0, 0, took_s)

    def count_put(
        self, topic: str, messages: int, size: int, took_s: float | None, kind: PutKind = PutKind.NORMAL
    ) -> None:
        """Count an append of one batch, as `count_puts` does. To save time, this method only adds the append's figures
        to a list. The figures of many appends are later added to the statistics together."""
        self._puts.append((topic, messages, size, took_s, kind))
        if len(self._puts) >= PUTS_NOTED_MAX:
            with self._lock:
                self._count_noted()

    def _count_noted(self) -> None:
        """Count the appends that `count_put` has only noted in a list, in the store's statistics. The caller holds the
        lock."""
        noted = [self._puts.popleft() for _ in range(len(self._puts))]
        for topic, messages, size, _, kind in noted:
            if messages:
                _add(self._topics, topic, messages, size)
                if kind is not PutKind.COPIED:
                    _add(self._received, (topic, kind), messages, size)
        self._count_sizes(noted)
        took_ms = np.array([took_s * 1000 for *_, took_s, _ in noted if took_s is not None])
        if len(took_ms):
            self.put_latency.add_many(took_ms)
            self.send_latency.add_many(took_ms)
            self._put_max_ms = max(self._put_max_ms, float(took_ms.max()))
            _count_in(self._buckets, np.searchsorted(LATENCY_BOUNDS_MS, took_ms.astype(np.int64)))
            _count_in(self._fine, np.searchsorted(_FINE_BOUNDS_MS, took_ms))

    def _count_sizes(self, noted: Iterable[tuple[str, int, int, float | None, PutKind]]) -> None:
        by_kind: dict[PutKind, tuple[list[float], list[int]]] = {}
        for _, messages, size, _, kind in noted:
            if size and kind is not PutKind.COPIED:
                means, times = by_kind.setdefault(kind, ([], []))
                means.append(size / messages)
                times.append(messages)
        for kind, (means, times) in by_kind.items():
            if kind not in self._sizes:
                self._sizes[kind] = Histogram("raymq_message_size")
            self._sizes[kind].add_many(means, times)

    def forget_topic(self, topic: str) -> None:
        """Drop the counters of a deleted topic. The store's totals still include the topic's messages and
        bytes."""
        with self._lock:
            self._count_noted()
            for index, count in enumerate(self._topics.pop(topic, (0, 0))):
                self._forgotten[index] += count
            for kind in PutKind:
                self._received.pop((topic, kind), None)

    def received(self) -> dict[tuple[str, PutKind], TopicPuts]:
        """Return the numbers of messages and bytes that were stored, by topic and by the way in which they were stored
        (PutKind). Copies from other replicas are not counted."""
        with self._lock:
            self._count_noted()
            return {key: TopicPuts(*counts) for key, counts in self._received.items()}

    def sizes(self) -> dict[PutKind, HistogramFigures]:
        """Return, for each way in which messages were put into the store, a histogram of the batches' mean record
        sizes. Batches that were copied from other replicas are not included."""
        with self._lock:
            self._count_noted()
            return {kind: one.figures() for kind, one in self._sizes.items()}

    @property
    def puts_failed(self) -> int:
        """Number of appends that failed, or whose outcome is unknown."""
        return self._puts_failed

    def count_failed_put(self) -> None:
        """Count an append that failed, or whose outcome is unknown."""
        with self._lock:
            self._puts_failed += 1

    def count_gets(self, found: int, missed: int, messages: int, took_s: float) -> None:
        """Count one fetch that read several queues. `found`: number of queues that had messages. `missed`: number of
        queues that had none. `messages`: total number of messages."""
        self.get_latency.add(took_s * 1000)
        with self._lock:
            self._gets_found += found
            self._gets_missed += missed
            self._transferred += messages
            self._get_max_ms = max(self._get_max_ms, took_s * 1000)

    def count_reads(self, found: int, messages: int) -> None:
        """Count messages that clients on this node read in the mapped files: `messages` messages in `found`
        queues."""
        with self._lock:
            self._gets_found += found
            self._transferred += messages

    def take_sample(self, now_s: float) -> None:
        """Keep the current counters as a sample for the rates, at most once a second. `now_s` is the current
        `time.monotonic()`."""
        with self._lock:
            self._count_noted()
            if not self._samples or now_s - self._samples[-1].at_s >= 1.0:
                now = self._counters(now_s)
                self._samples.append(now)
                self._begin_day(self._today(), self._totals(now))

    def _go_on(self) -> None:
        """Load the daily totals from the file, to continue counting from them."""
        self._saved = saved = None if self._file is None else self._file.read()
        if saved is None:
            return
        self._before, self._today_morning, self._yesterday_morning = saved[1:]
        self._day, today = saved.day, self._day
        self._begin_day(today, saved.now)

    def save_days(self, now_s: float, *, last: bool = False) -> None:
        """Write the daily totals to their file, if they have changed.

        Writes every DAY_TOTALS_INTERVAL_S, and when the store closes (`last`). `now_s` is the current
        `time.monotonic()`.
        """
        if self._file is None or (not last and now_s - self._saved_s < DAY_TOTALS_INTERVAL_S):
            return
        with self._lock:
            self._saved_s = now_s
            self._count_noted()
            totals = self._totals(self._counters(now_s))
            days = _Days(self._day, totals, self._today_morning, self._yesterday_morning)
            if days == self._saved:
                return
            self._saved = days
        self._file.write(days)

    def _totals(self, now: _Sample) -> _DayTotals:
        return _DayTotals(self._before.puts + now.puts, self._before.gets + now.transferred)

    def _begin_day(self, today: date, totals: _DayTotals) -> None:
        """If a new day has begun, store `totals` as the totals at the beginning of today. The totals that were stored
        yesterday become the totals at the beginning of yesterday. If no totals were stored yesterday, `totals` are used
        for yesterday, too."""
        if today == self._day:
            return
        follows = (today - self._day).days == 1
        self._yesterday_morning = self._today_morning if follows else totals
        self._today_morning, self._day = totals, today

    def topics(self) -> dict[str, TopicPuts]:
        """Return the numbers of messages and bytes that were put, by topic. Copies from other replicas are counted,
        too."""
        with self._lock:
            self._count_noted()
            return {topic: TopicPuts(*counts) for topic, counts in self._topics.items()}

    def latency_buckets(self) -> tuple[int, ...]:
        """Return the numbers of appends that took up to 0, 10, 50 … 10,000 ms, and the number of appends that took
        longer."""
        with self._lock:
            self._count_noted()
            return tuple(self._buckets)

    def runtime(self, now_s: float, now_ms: int) -> dict[str, str]:
        """Return RocketMQ's runtime keys that are computed from counters. Rates cover the last 10, 60 and 600
        seconds."""
        with self._lock:
            self._count_noted()
            now = self._counters(now_s)
            totals = self._totals(now)
            size = self._forgotten[1] + sum(counts[1] for counts in self._topics.values())
            found, missed = self._rates(now, "found"), self._rates(now, "missed")
            values: dict[str, object] = {
                "bootTimestamp": self._booted_ms,
                "runtime": f"{max(now_ms - self._booted_ms, 0) // 1000} s",
                "putMessageEntireTimeMax": round(self._put_max_ms),
                "putMessageTimesTotal": now.puts,
                "putMessageFailedTimes": self._puts_failed,
                "putMessageSizeTotal": size,
                "putMessageDistributeTime": " ".join(map(str, self._buckets)),
                "putMessageAverageSize": f"{size / now.puts if now.puts else 0.0:.1f}",
                "getMessageEntireTimeMax": round(self._get_max_ms),
                "putTps": _text(self._rates(now, "puts")),
                "getFoundTps": _text(found),
                "getMissTps": _text(missed),
                "getTotalTps": _text([a + b for a, b in zip(found, missed, strict=True)]),
                "getTransferredTps": _text(self._rates(now, "transferred")),
                "msgPutTotalYesterdayMorning": self._yesterday_morning.puts,
                "msgPutTotalTodayMorning": self._today_morning.puts,
                "msgPutTotalTodayNow": totals.puts,
                "msgGetTotalYesterdayMorning": self._yesterday_morning.gets,
                "msgGetTotalTodayMorning": self._today_morning.gets,
                "msgGetTotalTodayNow": totals.gets,
                "putLatency99": f"{self._quantile_ms(0.99):.2f}",
                "putLatency999": f"{self._quantile_ms(0.999):.2f}",
            }
        return {name: str(value) for name, value in values.items()}

    def _counters(self, now_s: float) -> _Sample:
        puts = self._forgotten[0] + sum(counts[0] for counts in self._topics.values())
        return _Sample(now_s, puts, self._gets_found, self._gets_missed, self._transferred)

    def _rates(self, now: _Sample, name: str) -> list[float]:
        rates = []
        for period_s in TPS_PERIODS_S:
            # Compute the counter's rate since the newest sample that is at least `period_s` old. If the store is
            # younger than `period_s`, compute the rate since the oldest sample.
            before = next((s for s in reversed(self._samples) if now.at_s - s.at_s >= period_s), self._samples[0])
            passed_s = now.at_s - before.at_s
            rates.append(max(getattr(now, name) - getattr(before, name), 0) / passed_s if passed_s > 0 else 0.0)
        return rates

    def _quantile_ms(self, quantile: float) -> float:
        rank, total = quantile * sum(self._fine), 0
        for bound, count in zip((*_FINE_BOUNDS_MS, self._put_max_ms), self._fine, strict=True):
            total += count
            if count and total >= rank:
                return min(bound, self._put_max_ms)
        return 0.0


def _add(totals: dict[K, list[int]], key: K, messages: int, size: int) -> None:
    counts = totals.get(key)
    if counts is None:
        counts = totals[key] = [0, 0]
    counts[0] += messages
    counts[1] += size


def _count_in(counts: list[int], indices: NDArray[np.int64]) -> None:
    """Increase each count by the number of times that its index occurs in `indices`."""
    for index, more in zip(*np.unique(indices, return_counts=True), strict=True):
        counts[index] += int(more)


def _text(rates: list[float]) -> str:
    return " ".join(f"{rate:.1f}" for rate in rates)
