"""Exports tables as files that a browser saves: CSV for spreadsheets, JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from raymq.common.errors import InvalidArgumentError

_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")
"""Characters with which a formula begins in a spreadsheet. The export escapes cells that begin with them, because a
formula can send the table to an attacker."""


def csv_text(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as CSV (RFC 4180) with a header of column names. If a spreadsheet would read a text as a formula, the
    text gets an apostrophe in front."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(names)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format rows as JSON, one row per line. Integers beyond 2^53 become strings, because browsers would round
    them."""
    return "".join(json.dumps(exact(row), ensure_ascii=False) + "\n" for row in rows)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    text = value if isinstance(value, str) else None
    return f"'{text}" if text is not None and text.startswith(_FORMULA_STARTS) else value


def exact(value: Any) -> Any:
    """Return the JSON value `value` with integers beyond 2^53 as strings, because browsers would round them."""
    if isinstance(value, Mapping):
        return {name: exact(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [exact(one) for one in value]
    return str(value) if isinstance(value, int) and abs(value) > 2**53 else value


def rows_as_file(request: Request, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Response:
    """Return rows as a file in the format that the request's parameter `format` names: csv, or json with one row per
    line. Raises InvalidArgumentError for another format."""
    form = request.query_params.get("format", "csv")
    if form not in ("csv", "json"):
        raise InvalidArgumentError(f"format {form!r} does not exist; choose csv or json")
    text = (
        json_lines(rows)
        if form == "json"
        else csv_text(columns, [[_cell_text(row[one]) for one in columns] for row in rows])
    )
    kind = "application/x-ndjson" if form == "json" else "text/csv"
    return saved(text.encode(errors="replace"), f"{name}.{form}", f"{kind}; charset=utf-8")


def saved(content: bytes, name: str, media_type: str = "application/octet-stream") -> Response:
    """Return a response that makes the browser save `content` as a file and never display it. Unsafe characters in the
    file name are replaced."""
    harmless = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "file"
    disposition = f'attachment; filename="{harmless}"'
    return Response(content, media_type=media_type, headers={"Content-Disposition": disposition})


def _cell_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={one}" for name, one in value.items())
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
