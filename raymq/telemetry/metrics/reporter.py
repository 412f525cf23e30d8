"""Passes a process's metrics to the Ray agent of its node, from which Prometheus scrapes them.

A process has one Reporter, and one thread calls `report` every REPORT_INTERVAL_S. The Reporter's sources report values
by the names in the table of metrics (raymq.telemetry.metrics.instruments). A source reports a counter as its running
total, and the Reporter passes on the increase since the last report. A smaller total means that the counter was reset
to 0. A source reports a histogram as its buckets.

Topics and groups beyond the limits are combined under "(other)": counts are added, and the maximum of times is
reported. Nothing survives the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from raymq.telemetry.metrics.histogram import HistogramFigures
from raymq.telemetry.metrics.instruments import INSTRUMENTS, OTHER, Instrument, InstrumentKind

FORGET_AFTER_REPORTS: Final = 60
"""Number of reports after which the Reporter drops a time series that none of the reports contained. Probably the
series' topic or group was deleted."""

logger = logging.getLogger(__name__)

Labels = dict[str, str]
Source = Callable[["Reporter"], None]
_Key = tuple[str, tuple[str, ...]]
NO_LABELS: Final[Labels] = {}


class _Series:
    """One time series of a metric: its tags, its tags after the limits on topics and groups are applied, and its last
    reported total."""

    __slots__ = ("_make", "instrument", "limited", "seen", "tags", "total")

    def __init__(self, instrument: Instrument, tags: Labels, limited: Labels, make: Callable[..., Any]) -> None:
        self.instrument, self.tags, self.limited, self._make = instrument, tags, limited, make
        self.total: float = 0
        self.seen = 0

    def metric(self, name: str, *more: str) -> Any:
        """Return the object of ray.util.metrics that has the name `name` and belongs to this time series."""
        return self._make(self.instrument, name, *more)


class Reporter:
    """Passes one process's metrics to Ray. Not thread-safe: only one thread may report.

    Usage: `reporter.report(source)`. `source` gets the Reporter as its argument and calls the Reporter's methods
    `count`, `gauge` and `buckets`.
    """

    def __init__(
        self,
        cluster: str,
        broker: str = "",
        storage: str = "",
        *,
        enable: bool = True,
        per_topic_max: int = 500,
        per_group_max: int = 500,
    ) -> None:
        """`cluster`, `broker` and `storage`: default values of these labels, for metrics that have the labels. If
        `enable` is False, nothing is reported to Ray, and no function that supplies gauges is called."""
        self._common = {"cluster": cluster, "broker": broker, "storage": storage}
        self._enable = enable
        self._limits = {"topic": per_topic_max, "consumer_group": per_group_max}
        self._known: dict[str, set[str]] = {label: set() for label in self._limits}
        """Names that have their own time series, by metric label ("topic" or "consumer_group"). All other names share
        one series."""
        self._series: dict[tuple[str, tuple[tuple[str, object], ...]], _Series] = {}
        """The time series that were reported so far, by metric name and labels."""
        self._others: dict[_Key, tuple[float, Labels]] = {}
        """The gauge values that the current report combines under "(other)"."""
        self._metrics: dict[str, Any] = {}
        self._reports = 0
        self._logged: set[str] = set()

    def limit(self, per_topic_max: int, per_group_max: int) -> None:
        """Change the maximum numbers of topics and groups with separate series. Topics and groups that already have
        separate series keep them."""
        self._limits.update(topic=per_topic_max, consumer_group=per_group_max)

    @property
    def enabled(self) -> bool:
        """True unless the settings turn metrics off."""
        return self._enable

    def report(self, *sources: Source) -> None:
        """Call each source, and pass its metrics to Ray. Never raises. If a source fails, its metrics are left out of
        this report, and each kind of failure is logged once."""
        if not self._enable:
            return
        failed = False
        for source in (*sources, Reporter._send_others):
            try:
                source(self)
            except Exception as error:
                failed = True
                self._log_once(error)
        self._others.clear()
        # If a source failed in this report, forget no time series: the topics and groups of this source are missing
        # from the report, although they still exist.
        if not failed:
            self._reports += 1
            self._forget()

    def count(self, name: str, total: float, /, **labels: object) -> None:
        """Report a counter's running total. The increase since the last report is passed to Ray. Raises KeyError if the
        name is unknown, and ValueError if the metric does not have the labels."""
        series = self._find(name, InstrumentKind.COUNTER, labels)
        new = total - series.total if total >= series.total else total
        if new > 0:  # Ray's counters refuse to add 0
            series.metric(name).inc(new, series.limited)
        series.total = total

    def gauge(self, name: str, value: float, /, **labels: object) -> None:
        """Report a gauge's value. Ray drops a gauge that was not reported for 20 s. Raises KeyError if the name is
        unknown, and ValueError if the metric does not have the labels."""
        self._set(name, value, self._find(name, InstrumentKind.GAUGE, labels))

    def buckets(self, name: str, figures: HistogramFigures, /, **labels: object) -> None:
        """Report a histogram's buckets (raymq.telemetry.metrics.histogram.Histogram.figures). Raises KeyError if the
        name is unknown, and ValueError if the metric does not have the labels."""
        series = self._find(name, InstrumentKind.HISTOGRAM, labels)
        below = 0
        for bound, count in zip((*series.instrument.bounds, "+Inf"), figures.counts, strict=True):
            below += count
            self._set(f"{name}_bucket", below, series, {"le": str(bound)})
        self._set(f"{name}_sum", figures.sum, series)
        self._set(f"{name}_count", below, series)

    def _find(self, name: str, kind: InstrumentKind, labels: dict[str, object]) -> _Series:
        key = (name, tuple(labels.items()))
        series = self._series.get(key)
        if series is None:
            tags = self._tags(_require(name, kind), labels)
            series = self._series[key] = _Series(INSTRUMENTS[name], tags, self._limited(tags), self._metric)
        elif series.instrument.kind is not kind:
            _require(name, kind)
        series.seen = self._reports
        return series

    def _tags(self, instrument: Instrument, labels: dict[str, object]) -> Labels:
        if not labels.keys() <= set(instrument.labels):
            raise ValueError(f"{instrument.name} has the labels {', '.join(instrument.labels)}, not {sorted(labels)}")
        tags = self._common | {label: _text(value) for label, value in labels.items()}
        missing = [label for label in instrument.labels if label not in tags]
        if missing:
            raise ValueError(f"{instrument.name} needs the labels {', '.join(missing)}")
        return {label: tags[label] for label in instrument.labels}

    def _set(self, name: str, value: float, series: _Series, more: Labels = NO_LABELS) -> None:
        tags, metric = series.limited | more if more else series.limited, series.metric(name, *more)
        if series.limited is series.tags:
            metric.set(value, tags)
            return
        key = (name, tuple(tags.values()))
        before, _ = self._others.get(key, (0.0, tags))
        # The label "(other)" combines all names without a time series of their own. Times (gauges in ms) are combined
        # by their maximum, because a sum of ages has no meaning.
        longest = series.instrument.kind is InstrumentKind.GAUGE and series.instrument.unit == "ms"
        self._others[key] = (max(before, value) if longest else before + value, tags)

    def _send_others(self) -> None:
        for (name, _), (value, tags) in self._others.items():
            self._metrics[name].set(value, tags)

    def _limited(self, tags: Labels) -> Labels:
        """Return the tags of a time series, with "(other)" in place of a topic or a group beyond the limit."""
        limited = tags
        for label, most in self._limits.items():
            value = tags.get(label)
            if value is None:
                continue
            known = self._known[label]
            if value in known or len(known) < most:
                known.add(value)
            else:
                limited = {**limited, label: OTHER}
        return limited

    def _metric(self, instrument: Instrument, name: str, *more: str) -> Any:
        metric = self._metrics.get(name)
        if metric is None:
            from ray.util.metrics import Counter, Gauge

            made = Counter if instrument.kind is InstrumentKind.COUNTER else Gauge
            metric = self._metrics[name] = made(name, instrument.description, (*instrument.labels, *more))
        return metric

    def _forget(self) -> None:
        """Drop the time series of deleted topics and groups, so that other topics and groups can get separate
        series."""
        oldest = self._reports - FORGET_AFTER_REPORTS
        gone = [key for key, series in self._series.items() if series.seen < oldest]
        if not gone:
            return
        for key in gone:
            del self._series[key]
        left = [series.tags for series in self._series.values() if series.limited is series.tags]
        for label, known in self._known.items():
            known.intersection_update({tags[label] for tags in left if label in tags})
        for series in self._series.values():
            series.limited = self._limited(series.tags)

    def _log_once(self, error: Exception) -> None:
        kind = type(error).__name__
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "some metrics cannot be reported; this message is logged once for each kind of error", exc_info=error
            )


def _require(name: str, kind: InstrumentKind) -> Instrument:
    instrument = INSTRUMENTS[name]
    if instrument.kind is not kind:
        raise ValueError(f"{name} is a {instrument.kind.value}, not a {kind.value}")
    return instrument


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
