"""Answers that a browser saves as a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from raymq.common.errors import InvalidArgumentError
from raymq.tools.console.messages.export import csv_text, json_lines


def rows_as_file(request: Request, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Response:
    """Rows as a file, in the format that the address asks for: csv, or json with a row per line. InvalidArgumentError
    for another one."""
    form = request.query_params.get("format", "csv")
    if form not in ("csv", "json"):
        raise InvalidArgumentError(f"there is no format {form!r}; choose csv or json")
    text = (
        json_lines(rows)
        if form == "json"
        else csv_text(columns, [[_cell(row[one]) for one in columns] for row in rows])
    )
    kind = "application/x-ndjson" if form == "json" else "text/csv"
    return saved(text.encode(errors="replace"), f"{name}.{form}", f"{kind}; charset=utf-8")


def saved(content: bytes, name: str, media_type: str = "application/octet-stream") -> Response:
    """Bytes that a browser saves, and never shows, below a name of harmless characters."""
    harmless = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "file"
    disposition = f'attachment; filename="{harmless}"'
    return Response(content, media_type=media_type, headers={"Content-Disposition": disposition})


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={one}" for name, one in value.items())
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
