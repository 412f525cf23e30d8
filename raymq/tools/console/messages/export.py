"""Tables as files that a browser saves: CSV for spreadsheets, JSON for programs."""

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


def rows_as_file(request: Request, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Response:
    """Rows as a file, in the format that the address asks for: csv, or json with a row per line. InvalidArgumentError
    for another one."""
    form = request.query_params.get("format", "csv")
    if form not in ("csv", "json"):
        raise InvalidArgumentError(f"there is no format {form!r}; choose csv or json")
    text = (
        json_lines(rows)
        if form == "json"
        else csv_text(columns, [[_cell_text(row[one]) for one in columns] for row in rows])
    )
    kind = "application/x-ndjson" if form == "json" else "text/csv"
    return saved(text.encode(errors="replace"), f"{name}.{form}", f"{kind}; charset=utf-8")


def saved(content: bytes, name: str, media_type: str = "application/octet-stream") -> Response:
    """Bytes that a browser saves, and never shows, below a name of harmless characters."""
    harmless = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "file"
    disposition = f'attachment; filename="{harmless}"'
    return Response(content, media_type=media_type, headers={"Content-Disposition": disposition})


def _cell_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={one}" for name, one in value.items())
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
