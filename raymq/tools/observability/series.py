"""Generate PromQL expressions for the instruments of raymq.telemetry.metrics.instruments.

Ray adds the prefix `ray_` to each name, and the suffix `_total` to counters. Each histogram of raymq has three series:
`_bucket`, `_sum` and `_count`. If an instrument has the label of a dashboard variable, its selector filters by this
variable. An unknown instrument or label raises KeyError when the dashboard is generated.
"""

from __future__ import annotations

from typing import Final

from raymq.telemetry.metrics.instruments import INSTRUMENTS, Instrument, InstrumentKind

RATE_WINDOW: Final = "$__rate_interval"
"""Grafana's variable for the time window of rates: at least four scrape intervals."""

BOARD_LABELS: Final = {"SessionName": "SessionName", "ray_io_cluster": "Cluster"}
"""Maps each label that Ray or KubeRay adds to every series to the dashboard variable that selects its value."""
CHOSEN_LABELS: Final = ("broker", "topic", "consumer_group")
"""raymq's labels for which the dashboard has a variable of the same name."""

SUFFIXES: Final = {
    InstrumentKind.COUNTER: ("_total",),
    InstrumentKind.GAUGE: ("",),
    InstrumentKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}


def exposed_names(instrument: Instrument) -> tuple[str, ...]:
    """Return the names of an instrument's series in Prometheus."""
    return tuple(f"ray_{instrument.name}{suffix}" for suffix in SUFFIXES[instrument.kind])


def selector(name: str, suffix: str = "", **equal: str) -> str:
    """Return a PromQL selector for an instrument's series, filtered by the dashboard's variables. `equal`: the value
    that a label must have."""
    instrument = INSTRUMENTS[name]
    _check(instrument, suffix, equal)
    matchers = [f'{label}=~"${variable}"' for label, variable in BOARD_LABELS.items()]
    matchers += [f'{label}=~"${label}"' for label in CHOSEN_LABELS if label in instrument.labels and label not in equal]
    matchers += [f'{label}="{value}"' for label, value in equal.items()]
    return f"ray_{name}{suffix}{{{','.join(matchers)}}}"


def per_second(name: str, *by: str, **equal: str) -> str:
    """Return the PromQL expression for a counter's rate per second, with one sum for each value of the labels
    `by`."""
    return _summed("sum", by, f"rate({selector(name, '_total', **equal)}[{RATE_WINDOW}])")


def increase(name: str, *by: str, **equal: str) -> str:
    """Return the PromQL expression for a counter's growth in the time window, with one sum for each value of the labels
    `by`."""
    return _summed("sum", by, f"increase({selector(name, '_total', **equal)}[{RATE_WINDOW}])")


def total(name: str, *by: str, **equal: str) -> str:
    """Return the PromQL expression for the sum of a gauge, for each value of the labels `by`."""
    return _summed("sum", by, selector(name, **equal))


def highest(name: str, *by: str, **equal: str) -> str:
    """Return the PromQL expression for the maximum of a gauge, for each value of the labels `by`."""
    return _summed("max", by, selector(name, **equal))


def lowest(name: str, *by: str, **equal: str) -> str:
    """Return the PromQL expression for the minimum of a gauge, for each value of the labels `by`."""
    return _summed("min", by, selector(name, **equal))


def percentile(percent: int, name: str, *by: str, **equal: str) -> str:
    """Return the PromQL expression for a percentile of the values that a histogram counted in the time window."""
    rates = f"rate({selector(name, '_bucket', **equal)}[{RATE_WINDOW}])"
    return f"histogram_quantile({percent / 100:g}, {_summed('sum', ('le', *by), rates)})"


def _summed(function: str, by: tuple[str, ...], inner: str) -> str:
    return f"{function} by ({', '.join(by)}) ({inner})" if by else f"{function}({inner})"


def _check(instrument: Instrument, suffix: str, equal: dict[str, str]) -> None:
    """Raise KeyError if series of this instrument cannot have the name suffix `suffix`, or if the instrument does not
    have all labels in `equal`."""
    if suffix not in SUFFIXES[instrument.kind]:
        raise KeyError(f"{instrument.name} is a {instrument.kind.value}, which has no series with suffix {suffix!r}")
    for label in equal:
        if label not in instrument.labels:
            raise KeyError(f"{instrument.name} has no label {label!r}, only {', '.join(instrument.labels)}")
