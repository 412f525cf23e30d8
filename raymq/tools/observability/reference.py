"""Generate the table of metrics in docs/observability.md from the table of instruments.

`python -m raymq.tools.observability.reference` prints the table. A test compares the printed table with the docs page.
"""

from __future__ import annotations

from raymq.telemetry.metrics.instruments import COMMON_LABELS, INSTRUMENTS, Instrument, InstrumentKind
from raymq.tools.observability.series import exposed_names


def metrics_table() -> str:
    """Return the table of metrics in Markdown, with one line for each instrument."""
    lines = [
        "| in Prometheus | kind | unit | labels besides `cluster`, `broker` | meaning | from | in RocketMQ |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_line(instrument) for instrument in INSTRUMENTS.values()]
    return "\n".join(lines) + "\n"


def _line(instrument: Instrument) -> str:
    first = exposed_names(instrument)[0]
    name = f"`{first.removesuffix('_bucket')}`" if instrument.kind is InstrumentKind.HISTOGRAM else f"`{first}`"
    labels = ", ".join(f"`{label}`" for label in instrument.labels if label not in COMMON_LABELS)
    meaning = instrument.description
    if instrument.bounds:
        meaning += f" Buckets to {', '.join(f'{bound:,}' for bound in instrument.bounds)}."
    rocketmq = {"=": "the same", "": "–"}.get(instrument.rocketmq, f"`{instrument.rocketmq}`")
    cells = [name, instrument.kind.value, instrument.unit, labels or "–", meaning, instrument.reported_by, rocketmq]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(metrics_table(), end="")
