"""The metrics of all producers and consumers of one process, for Ray's metrics pipeline.

    producers, consumers, listeners ──► CLIENT_FIGURES: histograms, totals ──► Reporter, every 10 s
                                          sources of gauges: called at each report

A process has one ClientFigures object for all its clients. Ray keeps one time series per process, so two clients that
report the same histogram would overwrite each other. A batch or a call is counted once, with its number of messages, so
no code runs per message. No thread is started for reports. Threads that wake often anyway (for heartbeats, or for a
listener's reports) call `report_if_due`.

ClientFigures counts until a broker's answer to a heartbeat switches the cluster's metrics off. After that, each call
only costs one comparison. Metrics end with the process: its gauges disappear from Ray's agent within 20 s, and a
process that connects to another Ray cluster starts at 0. A consumer reports a topic without messages only once, and
again after a change. Repeated reports of thousands of idle topics and groups would keep the agent busy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from msgspec import Struct

from raymq.common.closing import in_forked_child
from raymq.common.names import RETRY_PREFIX, is_system_topic
from raymq.telemetry.metrics.histogram import Histogram
from raymq.telemetry.metrics.instruments import INSTRUMENTS, OTHER, REPORT_INTERVAL_S
from raymq.telemetry.metrics.reporter import Reporter

SEND_COST: Final = "raymq_send_cost_time_milliseconds"
DELIVERY_LATENCY: Final = "raymq_delivery_latency_milliseconds"
AWAIT_TIME: Final = "raymq_await_time_milliseconds"
PROCESS_TIME: Final = "raymq_process_time_milliseconds"
PROCESS_BOUNDS_MS: Final = INSTRUMENTS[PROCESS_TIME].bounds

SERIES_MAX: Final = 4096
"""Maximum number of time series of each kind in a process. Further topics and groups are counted under
"(other)"."""
EARLY_S: Final = 1.0
"""Seconds by which a report may be too early. Without this tolerance, a thread that wakes every REPORT_INTERVAL_S could
wake just too early, and report one interval late."""

logger = logging.getLogger(__name__)


class ClientMetrics(Struct, frozen=True):
    """The metrics options of a cluster, which a broker sends to its clients."""

    cluster: str
    enable: bool = True
    per_topic_max: int = 500
    per_group_max: int = 500


class ConsumerFigures(NamedTuple):
    """Metrics of a consumer in a group, for one queue or summed over several queues of a topic.

    `inflight`: number of messages that are fetched and not committed. `ready`: number of messages that are visible and
    not fetched. `queueing_ms`: the age of the first ready message, 0 if no message is ready. `cached` and
    `cached_bytes`: number and size of messages that are fetched and not finished.
    """

    topic: str
    group: str
    inflight: int = 0
    ready: int = 0
    queueing_ms: int = 0
    cached: int = 0
    cached_bytes: int = 0

    def plus(self, other: ConsumerFigures) -> ConsumerFigures:
        """Return the sum of two consumers' metrics, with one exception: `queueing_ms`, an age in ms, is the greater of
        the two values."""
        return ConsumerFigures(
            self.topic,
            self.group,
            self.inflight + other.inflight,
            self.ready + other.ready,
            max(self.queueing_ms, other.queueing_ms),
            self.cached + other.cached,
            self.cached_bytes + other.cached_bytes,
        )


Source = Callable[[], Iterable[ConsumerFigures]]
"""A function that returns the current gauge metrics of a consumer. The reporting thread calls the function at each
report. The function may call storage actors, for a few seconds at most."""


def _worker() -> str:
    """Return the id of this process in its Ray cluster; empty if the process is not connected to a cluster."""
    import ray

    return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else ""


class ClientFigures:
    """The client metrics of one process. Thread-safe. `worker` returns the id of this process in its Ray cluster;
    `clock` returns monotonic seconds."""

    def __init__(
        self,
        *,
        worker: Callable[[], str] = _worker,
        open_reporter: Callable[..., Reporter] = Reporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enabled = True
        """False after a broker has switched the cluster's metrics off."""
        self._worker, self._open_reporter, self._clock = worker, open_reporter, clock
        self._options: ClientMetrics | None = None
        """The metrics options from a broker. None before a broker's first answer; until then nothing is
        reported."""
        self._up: tuple[str, str] | None = None
        self._lock = threading.Lock()
        """Lock that guards the tables of histograms, bytes and sources. A thread that holds the lock never
        blocks."""
        self._histograms: dict[tuple[str, ...], Histogram] = {}
        """Histograms by metric name and label values. The label values are in the order of the metric's labels."""
        self._out_bytes: dict[tuple[str, str], int] = {}
        """Total number of bytes that each group has fetched from each topic; the key is (topic, group)."""
        self._unreadable: dict[tuple[str, str], int] = {}
        """Total number of messages that each group could not read in each topic; the key is (topic, group)."""
        self._sources: dict[int, Source] = {}
        self._reporting = threading.Lock()
        """The reporting thread holds this lock, so that only one thread reports at a time. The lock guards the
        reporter, the time of the next report, and the set of idle topics."""
        self._reporter: tuple[str, ClientMetrics, Reporter] | None = None
        self._next_s = clock()
        self._told_idle: set[tuple[str, str]] = set()
        """Pairs of (topic, group) whose consumer metrics were all 0 in the last report. Pairs that are still 0 are not
        reported again."""

    def identify(self, role: str, name: str) -> None:
        """Mark this process as an actor of raymq, so that it also reports the metric `raymq_up` from now on."""
        self._up = role, name

    @property
    def options(self) -> ClientMetrics | None:
        """The metrics options from a broker; None before a broker's first answer."""
        return self._options

    def told(self, options: ClientMetrics) -> None:
        """Store the cluster's metrics options from a broker's answer."""
        self.enabled, self._options = options.enable, options

    def add(self, owner: object, source: Source) -> None:
        """Register `source`, a function that returns the gauges of the consumer `owner`. It is called at each report,
        until `remove(owner)`."""
        with self._lock:
            self._sources[id(owner)] = source

    def remove(self, owner: object) -> None:
        """Stop reporting the gauges of the consumer `owner`, so that they disappear from Ray's metrics. Does nothing if
        the consumer is unknown."""
        with self._lock:
            self._sources.pop(id(owner), None)

    # Methods that count messages and calls

    def sent(self, topic: str, cost_ms: float, count: int, *, ok: bool) -> None:
        """Add `count` messages that a producer sent to a topic to the metric of send times. `ok`: True if the messages
        were stored, False if the send failed. `cost_ms`: the time from the send of the first message to the outcome."""
        if self.enabled:
            self._observe((SEND_COST, topic, "success" if ok else "failure"), cost_ms, count)

    def delivered(self, topic: str, group: str, stored_ms: int, count: int, size_bytes: int) -> None:
        """Count `count` messages with a total of `size_bytes` that a consumer has received. `stored_ms`: the time at
        which the first message was stored, in ms since 1970 by the store's clock. All of the messages are counted with
        this store time."""
        if self.enabled:
            self._observe((DELIVERY_LATENCY, topic, group), max(0.0, time.time() * 1000 - stored_ms), count)
            self._add(self._out_bytes, topic, group, size_bytes)

    def unreadable(self, topic: str, group: str, count: int) -> None:
        """Add `count` to the number of messages of a topic that consumers of the group could not read."""
        if self.enabled:
            self._add(self._unreadable, topic, group, count)

    def _add(self, totals: dict[tuple[str, str], int], topic: str, group: str, count: int) -> None:
        with self._lock:
            place = (topic, group)
            if place not in totals and len(totals) >= SERIES_MAX:
                place = (OTHER, OTHER)
            totals[place] = totals.get(place, 0) + count

    def awaited(self, topic: str, group: str, wait_ms: float, count: int) -> None:
        """Add `count` messages, which are passed to a listener now, to the histogram of waiting times. `wait_ms`: the
        time since the first of these messages was fetched."""
        if self.enabled:
            self._observe((AWAIT_TIME, topic, group), wait_ms, count)

    def processed(self, topic: str, group: str, took_ms: float, count: int, *, ok: bool) -> None:
        """Add `count` listener calls, each of about `took_ms`, to the histogram of processing times."""
        if self.enabled:
            self._observe((PROCESS_TIME, topic, group, "success" if ok else "failure"), took_ms, count)

    def _observe(self, key: tuple[str, ...], value: float, count: int) -> None:
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._new_histogram(key)
        histogram.add(value, count)

    def _new_histogram(self, key: tuple[str, ...]) -> Histogram:
        """Create the histogram for a new combination of instrument and labels. If SERIES_MAX histograms exist, return
        the histogram that all further combinations share."""
        with self._lock:
            if key not in self._histograms and len(self._histograms) >= SERIES_MAX:
                name, _, *rest = key
                key = (name, OTHER, *rest) if name == SEND_COST else (name, OTHER, OTHER, *rest[1:])
            return self._histograms.setdefault(key, Histogram(key[0]))

    # Methods that report metrics to Ray

    def report_if_due(self) -> None:
        """Report all client metrics to Ray if the last report is about REPORT_INTERVAL_S old and no other thread is
        reporting.

        Does nothing if the process is not connected to Ray, or has no answer from a broker yet. Never raises.
        """
        options = self._options
        if options is None or not options.enable or self._clock() < self._next_s:
            return
        if not self._reporting.acquire(blocking=False):
            return
        try:
            self._next_s = self._clock() + REPORT_INTERVAL_S - EARLY_S
            worker = self._worker()
            if worker:
                self._reporter_for(worker, options).report(self._report_counted, self._report_consumers)
        except Exception:  # errors of Ray's metrics must not end a client's thread
            logger.warning("cannot report the metrics of this process, retrying", exc_info=True)
        finally:
            self._reporting.release()

    def _reporter_for(self, worker: str, options: ClientMetrics) -> Reporter:
        """Return the reporter for this process in its current Ray cluster. If the process has moved to another cluster,
        all counts for the earlier cluster are dropped."""
        known = self._reporter
        if known is not None and known[:2] == (worker, options):
            return known[2]
        if known is not None:
            with self._lock:
                self._histograms, self._out_bytes, self._unreadable = {}, {}, {}
        reporter = self._open_reporter(
            options.cluster, per_topic_max=options.per_topic_max, per_group_max=options.per_group_max
        )
        self._reporter = worker, options, reporter
        return reporter

    def _report_counted(self, reporter: Reporter) -> None:
        if self._up is not None:
            reporter.gauge("raymq_up", 1, role=self._up[0], name=self._up[1])
        with self._lock:
            histograms, out_bytes = list(self._histograms.items()), list(self._out_bytes.items())
            unreadable = list(self._unreadable.items())
        for (name, topic, *rest), histogram in histograms:
            labels = {"topic": topic}
            if name != SEND_COST:
                labels["consumer_group"] = rest.pop(0)
            if rest:
                labels["invocation_status"] = rest[0]
            reporter.buckets(name, histogram.figures(), **labels)
        for (topic, group), total in out_bytes:
            reporter.count("raymq_throughput_out", total, topic=topic, consumer_group=group)
        for (topic, group), total in unreadable:
            reporter.count("raymq_unreadable_messages", total, topic=topic, consumer_group=group)

    def _report_consumers(self, reporter: Reporter) -> None:
        with self._lock:
            sources = list(self._sources.values())
        idle: set[tuple[str, str]] = set()
        for figures in _together(sources):
            if not any(figures[2:]):
                idle.add(figures[:2])
                if figures[:2] in self._told_idle:
                    continue
            labels = {"topic": figures.topic, "consumer_group": figures.group}
            reporter.gauge("raymq_consumer_cached_messages", figures.cached, **labels)
            reporter.gauge("raymq_consumer_cached_bytes", figures.cached_bytes, **labels)
            retry = figures.topic.startswith(RETRY_PREFIX)
            more = {**labels, "is_retry": str(retry).lower(), "is_system": str(is_system_topic(figures.topic)).lower()}
            reporter.gauge("raymq_consumer_inflight_messages", figures.inflight, **more)
            reporter.gauge("raymq_consumer_ready_messages", figures.ready, **more)
            reporter.gauge("raymq_consumer_queueing_latency_milliseconds", figures.queueing_ms, **more)
        self._told_idle = idle


def _together(sources: Iterable[Source]) -> list[ConsumerFigures]:
    """Return the consumers' metrics from all sources, summed by topic and group."""
    found: dict[tuple[str, str], ConsumerFigures] = {}
    for source in sources:
        for one in source():
            known = found.get((one.topic, one.group))
            found[one.topic, one.group] = one if known is None else known.plus(one)
    return list(found.values())


CLIENT_FIGURES: Final = ClientFigures()
"""The client metrics of this process."""
in_forked_child(CLIENT_FIGURES.__init__)  # type: ignore[misc]  # a forked child has no clients and no reporter
