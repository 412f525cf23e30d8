"""Generates PromQL expressions for the instruments of raymq.telemetry.metrics.instruments.

Ray adds the prefix `ray_` to each name, and the suffix `_total` to counters. A histogram of raymq is three series:
`_bucket`, `_sum` and `_count`. A selector filters by the dashboard's variables, if the instrument has the label. An
unknown instrument or label raises KeyError when the dashboard is generated.
"""

from __future__ import annotations

from typing import Final

from raymq.telemetry.metrics.instruments import INSTRUMENTS, Instrument, InstrumentKind

RATE_WINDOW: Final = "$__rate_interval"
"""Grafana's window for rates: at least four scrapes."""

BOARD_LABELS: Final = {"SessionName": "SessionName", "ray_io_cluster": "Cluster"}
"""Labels that Ray and KubeRay add to every series, with the dashboard's variables for their values."""
CHOSEN_LABELS: Final = ("broker", "topic", "consumer_group")
"""Labels of raymq for which the dashboard has a variable of the same name."""

SUFFIXES: Final = {
    InstrumentKind.COUNTER: ("_total",),
    InstrumentKind.GAUGE: ("",),
    InstrumentKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}


def exposed_names(instrument: Instrument) -> tuple[str, ...]:
    """Return the names of an instrument's series in Prometheus."""
    return tuple(f"ray_{instrument.name}{suffix}" for suffix in SUFFIXES[instrument.kind])


def selector(name: str, suffix: str = "", **equal: str) -> str:
    """Return a selector of an instrument's series, filtered by the dashboard's variables. `equal`: required values."""
    instrument = INSTRUMENTS[name]
    _check(instrument, suffix, equal)
    matchers = [f'{label}=~"${variable}"' for label, variable in BOARD_LABELS.items()]
    matchers += [f'{label}=~"${label}"' for label in CHOSEN_LABELS if label in instrument.labels and label not in equal]
    matchers += [f'{label}="{value}"' for label, value in equal.items()]
    return f"ray_{name}{suffix}{{{','.join(matchers)}}}"


def per_second(name: str, *by: str, **equal: str) -> str:
    """Return the rate of a counter, summed over the series with equal values of the labels `by`."""
    return _summed("sum", by, f"rate({selector(name, '_total', **equal)}[{RATE_WINDOW}])")


def increase(name: str, *by: str, **equal: str) -> str:
    """Return a counter's growth in the window, summed over the series with equal values of the labels `by`."""
    return _summed("sum", by, f"increase({selector(name, '_total', **equal)}[{RATE_WINDOW}])")


def total(name: str, *by: str, **equal: str) -> str:
    """Return the sum of a gauge over the series with equal values of the labels `by`."""
    return _summed("sum", by, selector(name, **equal))


def highest(name: str, *by: str, **equal: str) -> str:
    """Return the maximum of a gauge over the series with equal values of the labels `by`."""
    return _summed("max", by, selector(name, **equal))


def lowest(name: str, *by: str, **equal: str) -> str:
    """Return the minimum of a gauge over the series with equal values of the labels `by`."""
    return _summed("min", by, selector(name, **equal))


def percentile(percent: int, name: str, *by: str, **equal: str) -> str:
    """Return a percentile of the values that a histogram counted in the window."""
    rates = f"rate({selector(name, '_bucket', **equal)}[{RATE_WINDOW}])"
    return f"histogram_quantile({percent / 100:g}, {_summed('sum', ('le', *by), rates)})"


def _summed(function: str, by: tuple[str, ...], inner: str) -> str:
    return f"{function} by ({', '.join(by)}) ({inner})" if by else f"{function}({inner})"


def _check(instrument: Instrument, suffix: str, equal: dict[str, str]) -> None:
    """Raise KeyError for a suffix or a label that the instrument does not have."""
    if suffix not in SUFFIXES[instrument.kind]:
        raise KeyError(f"{instrument.name} is a {instrument.kind.value}: it has no series with {suffix!r}")
    for label in equal:
        if label not in instrument.labels:
            raise KeyError(f"{instrument.name} has no label {label!r}, only {', '.join(instrument.labels)}")
