"""`/`: the state of the whole in a few figures, and `/api/v1/rates`, the last hour for its charts."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raymq.tools.console.backend.groups import GroupRow
from raymq.tools.console.web.answers import page
from raymq.tools.console.web.console import console_of

LAGGING_GROUPS_SHOWN: Final = 5


async def overview(request: Request) -> Response:
    """Health in words, rates, the groups that lag most, disks."""
    console = console_of(request)
    cluster, groups = await console.cluster(), await console.groups()
    points = console.history.points()
    return page(
        request,
        "overview.html",
        {
            "cluster": cluster,
            "groups": groups,
            "lagging": most_behind(groups.value.rows if groups.value else ()),
            "rates": points[-1] if points else None,
            "figures": console.history.newest,
        },
    )


def most_behind(groups: tuple[GroupRow, ...]) -> list[GroupRow]:
    """The groups that are behind most, by time, then by messages."""
    behind = [group for group in groups if group.lag]
    return sorted(behind, key=lambda one: (-(one.lag_ms or 0), -(one.lag or 0), one.group))[:LAGGING_GROUPS_SHOWN]


async def rates(request: Request) -> Response:
    """Columns for charts: times in seconds since 1970, and rates per second, null where they are not known."""
    points = console_of(request).history.points()
    return JSONResponse(
        {
            "at_s": [point.at_ms / 1000 for point in points],
            "messages_in": [point.messages_in for point in points],
            "messages_out": [point.messages_out for point in points],
            "bytes_in": [point.bytes_in for point in points],
        }
    )


OVERVIEW_ROUTES: Final = [Route("/", overview), Route("/api/v1/rates", rates)]
