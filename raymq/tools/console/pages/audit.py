"""`/audit`: the audit log page, with every change that users made or tried in the console."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raymq.common.errors import RaymqError
from raymq.tools.console.cluster import AuditPage
from raymq.tools.console.messages.body import visible
from raymq.tools.console.messages.export import rows_as_file
from raymq.tools.console.messages.fields import visible_map
from raymq.tools.console.web.answers import page
from raymq.tools.console.web.console import console_of

AUDIT_SHOWN: Final = 100
AUDIT_EXPORTED: Final = 10_000
AUDIT_COLUMNS: Final = ("at_ms", "who", "role", "address", "action", "arguments", "outcome")


async def show(request: Request) -> Response:
    """Show the audit log page: the changes made in the console, newest first."""
    found, error = AuditPage(()), ""
    try:
        found = await _audit(request, AUDIT_SHOWN)
    except RaymqError as problem:
        error = str(problem)
    values = {
        "entries": found.entries,
        "cursor": found.cursor,
        "error": error,
        "visible": visible,
        "pairs": visible_map,
    }
    return page(request, "audit.html", values)


async def export(request: Request) -> Response:
    """Return the entries of the audit log as a file that the browser saves."""
    return rows_as_file(request, "audit", AUDIT_COLUMNS, _rows(await _audit(request, AUDIT_EXPORTED)))


async def as_json(request: Request) -> Response:
    """Return a page of the audit log as JSON, for scripts."""
    found = await _audit(request, AUDIT_SHOWN)
    return JSONResponse({"audit": _rows(found), "cursor": found.cursor})


async def _audit(request: Request, limit: int) -> AuditPage:
    cursor = request.query_params.get("cursor") or None
    return await console_of(request).ask(lambda cluster: cluster.control.audit(limit=limit, cursor=cursor))


def _rows(found: AuditPage) -> list[dict[str, Any]]:
    return [asdict(entry) | {"arguments": dict(entry.arguments)} for entry in found.entries]


AUDIT_ROUTES: Final = [
    Route("/audit", show),
    Route("/audit/export", export),
    Route("/api/v1/audit", as_json),
]
