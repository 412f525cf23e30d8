"""`/producers`: the clients that produce, by their heartbeats."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raymq.tools.console.backend.cluster import Listing
from raymq.tools.console.backend.messages import ProducerRow
from raymq.tools.console.pages.files import rows_as_file
from raymq.tools.console.web.answers import page
from raymq.tools.console.web.calls import LIST_TIMEOUT_S
from raymq.tools.console.web.console import console_of
from raymq.tools.console.web.snapshots import Snapshot

PRODUCER_COLUMNS: Final = ("group", "client_id", "host", "pid", "silent_s", "topics")


async def show(request: Request) -> Response:
    """The list, at most a few seconds old."""
    wanted, snapshot = request.query_params.get("q", "").strip(), await _producers(request)
    rows = snapshot.value.rows if snapshot.value else ()
    shown = [row for row in rows if any(wanted in text for text in (row.group, row.client_id, row.host, *row.topics))]
    return page(request, "producers.html", {"producers": snapshot, "rows": shown, "wanted": wanted})


async def export(request: Request) -> Response:
    """The list as a file."""
    snapshot = await _producers(request)
    rows = [asdict(row) for row in snapshot.value.rows] if snapshot.value else []
    return rows_as_file(request, "producers", PRODUCER_COLUMNS, rows)


async def as_json(request: Request) -> Response:
    """The list for scripts."""
    snapshot = await _producers(request)
    rows = [asdict(row) for row in snapshot.value.rows] if snapshot.value else []
    return JSONResponse({"producers": rows, "error": snapshot.error})


async def _producers(request: Request) -> Snapshot[Listing[ProducerRow]]:
    console = console_of(request)
    return await console.snapshots.get(
        "producers", lambda: console.ask(lambda backend: backend.producers(), LIST_TIMEOUT_S)
    )


PRODUCERS_ROUTES: Final = [
    Route("/producers", show),
    Route("/producers/export", export),
    Route("/api/v1/producers", as_json),
]
