"""Writes the statistics of topics as one HTML file that people can send to each other: tables, and charts as inline
SVG.

The file needs no other file, no script and no network. Texts of messages, such as tags, are escaped. A chart has at
most BARS_MAX bars: neighbouring intervals of a longer period are combined.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Final

from raydp_jobs.jobs.pictures import check_folder
from raydp_jobs.jobs.times import Period
from raydp_jobs.jobs.topic_figures import Bucket, TopicFigures, rates_by_tag
from raymq.common.errors import InvalidArgumentError

BARS_MAX: Final = 200
"""Maximum number of bars of a chart."""
INTERVALS_SHOWN: Final = 500
"""Maximum number of intervals in a topic's table; older intervals are left out."""

_COLOURS: Final = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 900, 240, 70, 24, 10
_TICKS: Final = 4
_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1e21; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-top: 1px solid #d8dbe0; padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; } .note { color: #5b616b; }
table { border-collapse: collapse; margin: .4rem 0; } .wide { overflow-x: auto; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #e4e6ea; white-space: nowrap; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; } td { font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #5b616b; } .grid { stroke: #e4e6ea; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .2rem 0; }
.legend span { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; border-radius: 2px; }
@media print { h2, h3, svg { break-after: avoid; } tr { break-inside: avoid; } }
"""

Series = Mapping[str, Sequence[float]]


def check_report(path: Path | None) -> None:
    """Check that a report can be saved, before the job begins. Does nothing if `path` is None (no report). Raises
    InvalidArgumentError if the suffix of `path` is not .html, or if its directory does not exist or is not
    writable."""
    if path is None:
        return
    if path.suffix != ".html":
        raise InvalidArgumentError(f"a report is an HTML file: name it {path.with_suffix('.html')}, not {path}")
    check_folder(path, "the report")


def save_report(path: Path, text: str) -> None:
    """Save a report. An existing file is replaced only after the new report is complete. Raises InvalidArgumentError if
    the file cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidArgumentError(f"cannot write the report {path}: {error.strerror}") from None


def report(found: Sequence[TopicFigures], every_s: int, *, made: datetime, period: Period, tags: str = "*") -> str:
    """Return the HTML text of a report about topics. `every_s`: the length of an interval, in seconds. `made`: the
    present time. `period` and `tags`: the selection of the messages, which the report names."""
    names = escape(", ".join(one.topic for one in found))
    parts = [
        f"<h1>Statistics of {names}</h1>",
        f'<p class="note">{escape(_selection(every_s, made, period, tags))}</p>',
    ]
    parts.append(_summary(found))
    if len(found) > 1:
        parts.append(_charts(_by_topic(found, every_s), every_s, found))
    for one in found:
        parts.append(f"<h2>{escape(one.topic)}</h2>")
        parts.append(_of_topic(one, every_s) if one.buckets else "<p>No messages.</p>")
    # The policy forbids the browser to load anything for this page.
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Statistics of {names}</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _selection(every_s: int, made: datetime, period: Period, tags: str) -> str:
    """Return the sentence that says which messages the report counts."""
    bounds = [
        f"{word} {_time(datetime.fromtimestamp(time_ms / 1000, UTC))}"
        for word, time_ms in (("from", period.start_ms), ("before", period.end_ms))
        if time_ms is not None
    ]
    chosen = ["Messages", *(["with the tags", tags] if tags != "*" else []), *(["stored", *bounds] if bounds else [])]
    kind = " ".join(chosen) if len(chosen) > 1 else "All messages"
    return (
        f"{kind}. Times are store times in UTC; intervals are {_length(every_s)} long. Made {_time(made)} UTC by raymq."
    )


def _summary(found: Iterable[TopicFigures]) -> str:
    names = ["topic", "messages", "messages/s", "bytes", "bytes/s", "largest body", "keys", "first", "last"]
    rows = [
        [
            *(one.topic, one.messages, one.per_second(one.messages), one.bytes, one.per_second(one.bytes)),
            *(one.largest, one.keys, _time(one.first), _time(one.last)),
        ]
        for one in found
    ]
    return _table(names, rows)


def _of_topic(one: TopicFigures, every_s: int) -> str:
    times = [bucket.start for bucket in one.buckets]
    series = rates_by_tag(one, every_s)
    tags = [(_tag(tag), count, f"{count / one.messages:.1%}") for tag, count in one.tags.items()]
    tags += [("(others)", one.other_tags, f"{one.other_tags / one.messages:.1%}")] if one.other_tags else []
    newest = one.buckets[-INTERVALS_SHOWN:]
    left_out = len(one.buckets) - len(newest)
    note = f'<p class="note">{left_out:,} older intervals are left out.</p>' if left_out else ""
    rows = [[_time(b.start), b.messages, b.messages / every_s, b.bytes, b.keys, *b.tags.values()] for b in newest]
    names = ["from", "messages", "messages/s", "bytes", "keys", *map(_tag, one.tags)]
    return "\n".join(
        [
            _chart("Messages per second", times, every_s, series),
            _chart("Bytes per second", times, every_s, {"bytes": [bucket.bytes / every_s for bucket in one.buckets]}),
            f"<h3>Tags</h3>{_table(['tag', 'messages', 'share'], tags)}" if tags else "",
            f"<h3>Intervals</h3>{note}{_table(names, rows)}",
        ]
    )


def _by_topic(found: Sequence[TopicFigures], every_s: int) -> list[tuple[str, dict[str, dict[datetime, float]]]]:
    return [
        (
            title,
            {one.topic: {bucket.start: amount(bucket) / every_s for bucket in one.buckets} for one in found},
        )
        for title, amount in (("Messages per second", _messages), ("Bytes per second", _bytes))
    ]


def _messages(bucket: Bucket) -> int:
    return bucket.messages


def _bytes(bucket: Bucket) -> int:
    return bucket.bytes


def _charts(
    charts: Iterable[tuple[str, dict[str, dict[datetime, float]]]], every_s: int, found: Sequence[TopicFigures]
) -> str:
    times = sorted({bucket.start for one in found for bucket in one.buckets})
    return "\n".join(
        _chart(title, times, every_s, {name: [rates.get(start, 0.0) for start in times] for name, rates in by.items()})
        for title, by in charts
        if times
    )


def merged(
    times: Sequence[datetime], every_s: int, series: Series
) -> tuple[list[datetime], int, dict[str, list[float]]]:
    """Combine neighbouring intervals until at most BARS_MAX intervals cover the time from the first to the last of
    `times`, which ascend. Returns the starts of the intervals, their length in seconds, and their mean rates."""
    first = times[0]
    places = [round((time - first).total_seconds() / every_s) for time in times]
    together = ceil((places[-1] + 1) / BARS_MAX)
    if together == 1:
        return list(times), every_s, {name: list(rates) for name, rates in series.items()}
    used = sorted({place // together for place in places})
    index = {place: at for at, place in enumerate(used)}
    rates_of = {}
    for name, rates in series.items():
        sums = [0.0] * len(used)
        for place, rate in zip(places, rates, strict=True):
            sums[index[place // together]] += rate
        rates_of[name] = [total / together for total in sums]
    return [first + timedelta(seconds=place * together * every_s) for place in used], together * every_s, rates_of


def _chart(title: str, times: Sequence[datetime], every_s: int, series: Series) -> str:
    """Return a chart of stacked bars over time with its title and legend."""
    starts, width_s, rates = merged(times, every_s, series)
    span_s = (starts[-1] - starts[0]).total_seconds() + width_s
    step = _step(max(sum(values) for values in zip(*rates.values(), strict=True)))
    top = step * _TICKS
    height, width = _HEIGHT - _BOTTOM - _TOP, _WIDTH - _LEFT

    def down(value: float) -> float:
        return round(_TOP + height * (1 - value / top), 2)

    def across(time: datetime) -> float:
        return round(_LEFT + width * (time - starts[0]).total_seconds() / span_s, 2)

    shapes = []
    for tick in range(_TICKS + 1):
        y = down(tick * step)
        shapes.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>')
        shapes.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_number(tick * step)}</text>')
    below = [0.0] * len(starts)
    bar = max(width * width_s / span_s - 0.5, 0.5)
    for at, (name, values) in enumerate(rates.items()):
        for place, (start, value) in enumerate(zip(starts, values, strict=True)):
            if value <= 0:
                continue
            y = down(below[place] + value)
            hint = escape(f"{_time(start)}, {name}: {_number(value)}")
            shapes.append(
                f'<rect x="{across(start)}" y="{y}" width="{bar:.2f}" height="{down(below[place]) - y:.2f}" '
                f'fill="{_colour(at)}"><title>{hint}</title></rect>'
            )
            below[place] += value
    for tick in range(_TICKS + 1):
        time = starts[0] + timedelta(seconds=span_s * tick / _TICKS)
        anchor = {0: "start", _TICKS: "end"}.get(tick, "middle")
        shapes.append(
            f'<text x="{across(time)}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{_short(time, span_s)}</text>'
        )
    legend = "".join(
        f'<li><span style="background:{_colour(at)}"></span>{escape(name)}</li>' for at, name in enumerate(rates)
    )
    length = f" (means of {_length(width_s)})" if width_s != every_s else ""
    return (
        f"<h3>{escape(title)}{length}</h3>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)} over time">'
        f"{''.join(shapes)}</svg>" + (f'<ul class="legend">{legend}</ul>' if len(rates) > 1 else "")
    )


def _step(highest: float) -> float:
    """Return the distance of the marks of an axis from 0 to `highest`: 1, 2, 2.5 or 5, times a power of ten."""
    if highest <= 0:
        return 1.0
    rough = highest / _TICKS
    power = 10.0 ** floor(log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999_999)


def _table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = "\n".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, int | float):
        return _number(value)
    return escape(str(value))


def _number(value: float) -> str:
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _colour(at: int) -> str:
    return _COLOURS[at] if at < len(_COLOURS) else f"hsl({at * 137 % 360} 45% 60%)"


def _tag(tag: str | None) -> str:
    return "(no tag)" if tag is None else tag


def _time(time: datetime | None) -> str | None:
    return None if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def _short(time: datetime, span_s: float) -> str:
    return f"{time:%H:%M:%S}" if span_s < 600 else f"{time:%m-%d %H:%M}" if span_s < 5 * 86_400 else f"{time:%Y-%m-%d}"


def _length(seconds: int) -> str:
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds % unit == 0:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"
