"""PromQL for the instruments of raymq.telemetry.metrics.instruments, as Ray's agent exposes them.

Ray puts `ray_` before each name and `_total` behind a counter's; a histogram here is three series with exact values,
`_bucket`, `_sum` and `_count`. The filters of a selector are the board's variables, as far as the instrument has the
label: a name or a label that does not exist is a KeyError when the board is made.
"""

from __future__ import annotations

from typing import Final

from raymq.telemetry.metrics.instruments import INSTRUMENTS, Instrument, InstrumentKind

RATE_WINDOW: Final = "$__rate_interval"
"""Grafana's window: four scrapes, or the step of the panel."""

BOARD_LABELS: Final = {"SessionName": "SessionName", "ray_io_cluster": "Cluster"}
"""Labels that Ray and KubeRay put on every series, with the board's variables that choose among their values."""
CHOSEN_LABELS: Final = ("broker", "topic", "consumer_group")
"""Our own labels that the board has a variable for, of the same name."""

SUFFIXES: Final = {
    InstrumentKind.COUNTER: ("_total",),
    InstrumentKind.GAUGE: ("",),
    InstrumentKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}


def exposed_names(instrument: Instrument) -> tuple[str, ...]:
    """The names of an instrument's series in Prometheus."""
    return tuple(f"ray_{instrument.name}{suffix}" for suffix in SUFFIXES[instrument.kind])


def selector(name: str, suffix: str = "", **equal: str) -> str:
    """The series of an instrument that the board's variables choose. `equal`: labels with the value they must have."""
    instrument = INSTRUMENTS[name]
    _check(instrument, suffix, equal)
    matchers = [f'{label}=~"${variable}"' for label, variable in BOARD_LABELS.items()]
    matchers += [f'{label}=~"${label}"' for label in CHOSEN_LABELS if label in instrument.labels and label not in equal]
    matchers += [f'{label}="{value}"' for label, value in equal.items()]
    return f"ray_{name}{suffix}{{{','.join(matchers)}}}"


def per_second(name: str, *by: str, **equal: str) -> str:
    """The rate of a counter, summed over all series with the same values of `by`."""
    return _summed("sum", by, f"rate({selector(name, '_total', **equal)}[{RATE_WINDOW}])")


def increase(name: str, *by: str, **equal: str) -> str:
    """The growth of a counter within the window, summed over all series with the same values of `by`."""
    return _summed("sum", by, f"increase({selector(name, '_total', **equal)}[{RATE_WINDOW}])")


def total(name: str, *by: str, **equal: str) -> str:
    """The values of a gauge, summed over all series with the same values of `by`."""
    return _summed("sum", by, selector(name, **equal))


def highest(name: str, *by: str, **equal: str) -> str:
    """The largest value of a gauge among the series with the same values of `by`."""
    return _summed("max", by, selector(name, **equal))


def lowest(name: str, *by: str, **equal: str) -> str:
    """The smallest value of a gauge among the series with the same values of `by`."""
    return _summed("min", by, selector(name, **equal))


def percentile(percent: int, name: str, *by: str, **equal: str) -> str:
    """A percentile of a histogram, of what came in within the window."""
    rates = f"rate({selector(name, '_bucket', **equal)}[{RATE_WINDOW}])"
    return f"histogram_quantile({percent / 100:g}, {_summed('sum', ('le', *by), rates)})"


def _summed(function: str, by: tuple[str, ...], inner: str) -> str:
    return f"{function} by ({', '.join(by)}) ({inner})" if by else f"{function}({inner})"


def _check(instrument: Instrument, suffix: str, equal: dict[str, str]) -> None:
    """KeyError for a suffix or a label that the instrument does not have."""
    if suffix not in SUFFIXES[instrument.kind]:
        raise KeyError(f"{instrument.name} is a {instrument.kind.value}: it has no series with {suffix!r}")
    for label in equal:
        if label not in instrument.labels:
            raise KeyError(f"{instrument.name} has no label {label!r}, only {', '.join(instrument.labels)}")
