"""Formats numbers, sizes, times and names for the console's pages."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from markupsafe import Markup, escape

from raymq.common.protocol.route import PERM_READ, PERM_WRITE

NOTHING: Final = "–"
"""The text that a page shows for an unknown value."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEPS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))
_THIN_SPACE: Final = "\u202f"


def permission(perm: int) -> str:
    """Format the permission bits of a topic as "RW", "R", "W" or ""."""
    return ("R" if perm & PERM_READ else "") + ("W" if perm & PERM_WRITE else "")


def number(value: float | None) -> str:
    """Format a number with thin spaces as thousands separators."""
    if value is None:
        return NOTHING
    # Do not convert integers to float, because this would round 64-bit numbers.
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"
    return text.replace(",", _THIN_SPACE)


def rate(value: float | None) -> str:
    """Format a rate per second, with one decimal if it is small."""
    if value is None:
        return NOTHING
    return f"{value:.1f}" if 0 < value < 10 else number(value)


def size(value: float | None) -> str:
    """Format a number of bytes with a suitable unit: 1.5 MiB."""
    if value is None:
        return NOTHING
    unit = 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units: 3 d 4 h, 12 s, 250 ms."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return "0 s" if seconds <= 0 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.0f} s"
    for index, (length, unit) in enumerate(_STEPS):
        if seconds >= length:
            rest = int(seconds % length)
            smaller = (*_STEPS[index + 1 :], (1, "s"))[0]
            more = f" {rest // smaller[0]} {smaller[1]}" if rest // smaller[0] else ""
            return f"{int(seconds // length)} {unit}{more}"
    raise AssertionError(seconds)


def duration_ms(milliseconds: float | None) -> str:
    """Format a duration in milliseconds with its two largest units, like `duration`."""
    return NOTHING if milliseconds is None else duration(milliseconds / 1000)


def time_of(at_ms: int | None) -> str:
    """Format a time (ms since 1970) in UTC, with seconds: 2026-11-23 02:31:51. A time outside of the calendar is
    formatted as a number."""
    if at_ms is None:
        return NOTHING
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"


def iso_time(at_ms: int | None) -> str:
    """Format a time (ms since 1970) as ISO 8601 for scripts in the browser; "" for a time outside of the
    calendar."""
    if at_ms is None:
        return ""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return ""


def percent(value: float | None) -> str:
    """Format a fraction (0 to 1) as a percentage."""
    return NOTHING if value is None else f"{value * 100:.0f} %"


def segment(name: str) -> str:
    """Quote a name for use as one segment of a URL path. Quoting is necessary because topic names may contain %
    and |."""
    return quote(name, safe="")


def plural(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: 1 queue, 2 queues."""
    return f"{number(count)} {one if count == 1 else many or one + 's'}"


def sentence(text: str) -> str:
    """Turn an error's text into a sentence that begins with a capital letter and ends with a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".") if text else ""


_COMMAND: Final = re.compile("`([^`]+)`")


def prose(text: str) -> Markup:
    """Return an error's text as HTML. A command between backticks becomes a `code` element, and the rest is
    escaped."""
    return Markup(_COMMAND.sub(r"<code>\1</code>", str(escape(text))))


def last_line(text: str) -> str:
    """Return the last non-blank line of `text`, such as the error at the end of a traceback; "" if all lines
    are blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def order(value: float | None) -> float:
    """Return the sort key of a table cell's value. Unknown values come first."""
    return -1 if value is None else value
