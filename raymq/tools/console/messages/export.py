"""Tables as files: CSV for spreadsheets, JSON for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet calculates a cell that begins with one of these, and a formula can send the table to somebody else."""


def csv_text(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV (RFC 4180) below a row of names; a text that a spreadsheet would calculate gets an apostrophe."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(names)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as JSON, one per line. Whole numbers beyond 2^53 are strings, since browsers would round them."""
    return "".join(json.dumps(exact(row), ensure_ascii=False) + "\n" for row in rows)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    text = value if isinstance(value, str) else None
    return f"'{text}" if text is not None and text.startswith(_FORMULA_STARTS) else value


def exact(value: Any) -> Any:
    """`value`, of plain JSON values, with whole numbers beyond 2^53 as texts: browsers would round them."""
    if isinstance(value, Mapping):
        return {name: exact(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [exact(one) for one in value]
    return str(value) if isinstance(value, int) and abs(value) > 2**53 else value
