"""Reporter: hands a process's figures to Ray's agent of the node, from where Prometheus takes them.

A process has one Reporter, and one thread of it calls `report` every REPORT_INTERVAL_S. Its sources name instruments of
the table. A counter is given as its running total, of which the part that is new is counted: a total that went back
began anew. A histogram is given as its buckets (raymq.telemetry.metrics.instruments says why).

Topics and groups beyond the limits are added up under "(other)": numbers as sums, times as the largest. Nothing
survives the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from raymq.telemetry.metrics.histogram import HistogramFigures
from raymq.telemetry.metrics.instruments import INSTRUMENTS, OTHER, Instrument, InstrumentKind

FORGET_AFTER_REPORTS: Final = 60
"""A topic, a group or a total that so many reports did not name is forgotten: it was deleted."""

logger = logging.getLogger(__name__)

Labels = dict[str, str]
Source = Callable[["Reporter"], None]
_Key = tuple[str, tuple[str, ...]]
NO_LABELS: Final[Labels] = {}


class _Series:
    """One series of an instrument: its tags, those with which it is reported because of the limits, and the total that
    was seen last."""

    __slots__ = ("_make", "instrument", "limited", "seen", "tags", "total")

    def __init__(self, instrument: Instrument, tags: Labels, limited: Labels, make: Callable[..., Any]) -> None:
        self.instrument, self.tags, self.limited, self._make = instrument, tags, limited, make
        self.total: float = 0
        self.seen = 0

    def metric(self, name: str, *more: str) -> Any:
        """Ray's object for a metric of the instrument."""
        return self._make(self.instrument, name, *more)


class Reporter:
    """The way of one process's figures to Ray. Not thread-safe: one thread reports.

    Usage: `reporter.report(source)` with a function that calls `count`, `gauge` and `buckets` of the Reporter it gets.
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
        """`cluster`, `broker` and `storage` are labels of every series whose instrument has them, unless a call says
        otherwise. With `enable` off nothing is handed to Ray, and no source is called."""
        self._common = {"cluster": cluster, "broker": broker, "storage": storage}
        self._enable = enable
        self._limits = {"topic": per_topic_max, "consumer_group": per_group_max}
        self._known: dict[str, set[str]] = {label: set() for label in self._limits}
        """For each limited label, its values within the limit."""
        self._series: dict[tuple[str, tuple[tuple[str, object], ...]], _Series] = {}
        """By name and labels, what was found out about a series when it was reported first."""
        self._others: dict[_Key, tuple[float, Labels]] = {}
        """Of the present report, the gauges under "(other)"."""
        self._metrics: dict[str, Any] = {}
        self._reports = 0
        self._logged: set[str] = set()

    def limit(self, per_topic_max: int, per_group_max: int) -> None:
        """Have so many topics and groups with series of their own from now on. Those that have them keep them."""
        self._limits.update(topic=per_topic_max, consumer_group=per_group_max)

    @property
    def enabled(self) -> bool:
        """False if the settings switch metrics off."""
        return self._enable

    def report(self, *sources: Source) -> None:
        """Have each source name its figures, and hand them to Ray. Never raises: a source that fails is left out of
        this report, which is logged once for each kind of failure."""
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
        if not failed:  # a source that fails for long has forgotten nothing
            self._reports += 1
            self._forget()

    def count(self, name: str, total: float, /, **labels: object) -> None:
        """Count what is new in a counter's running total. KeyError for an unknown name, ValueError for other labels
        than the instrument has."""
        series = self._find(name, InstrumentKind.COUNTER, labels)
        new = total - series.total if total >= series.total else total
        if new > 0:  # Ray refuses to count nothing
            series.metric(name).inc(new, series.limited)
        series.total = total

    def gauge(self, name: str, value: float, /, **labels: object) -> None:
        """Set a gauge to its present value; raises as `count`. It is gone if the reports of 20 s do not set it."""
        self._set(name, value, self._find(name, InstrumentKind.GAUGE, labels))

    def buckets(self, name: str, figures: HistogramFigures, /, **labels: object) -> None:
        """Report a histogram (raymq.telemetry.metrics.histogram.Histogram.figures); raises as `count`."""
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
        # A sum of ages says nothing.
        longest = series.instrument.kind is InstrumentKind.GAUGE and series.instrument.unit == "ms"
        self._others[key] = (max(before, value) if longest else before + value, tags)

    def _send_others(self) -> None:
        for (name, _), (value, tags) in self._others.items():
            self._metrics[name].set(value, tags)

    def _limited(self, tags: Labels) -> Labels:
        """The tags, or others in which a topic or a group beyond the limit is "(other)"."""
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
        """Drop the series of deleted topics and groups, and give their room to others."""
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
            logger.warning("some metrics are not reported; said once for each kind of error", exc_info=error)


def _require(name: str, kind: InstrumentKind) -> Instrument:
    instrument = INSTRUMENTS[name]
    if instrument.kind is not kind:
        raise ValueError(f"{name} is a {instrument.kind.value}, not a {kind.value}")
    return instrument


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
