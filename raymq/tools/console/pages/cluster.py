"""`/cluster`: the page of masters, in-sync replicas, stores and other servers. Users can balance masters, drain a node,
clean a store, and change a broker group's write permission.

Also `/`, the overview page of the whole cluster, and `/api/v1/rates`, the rates of the last hour for its charts.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.tools.console.messages.export import exact
from raymq.tools.console.web.answers import page, refused
from raymq.tools.console.web.changes import change, form_of
from raymq.tools.console.web.console import console_of
from raymq.tools.console.web.lists import GroupRow

LAGGING_GROUPS_SHOWN: Final = 5
HEALTH_KEPT_S: Final = 1.0
"""Maximum age, in seconds, of the cached cluster state that the overview shows. An older state may miss that a server
has died."""


async def overview(request: Request) -> Response:
    """Show the overview page: faults, rates, the groups with the largest lag, and disk usage."""
    console = console_of(request)
    cluster, groups = await console.cluster(HEALTH_KEPT_S), await console.groups()
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
    """Return the groups with the largest lag, sorted by lag in time and then by lag in messages, largest first."""
    behind = [group for group in groups if group.lag]
    return sorted(behind, key=lambda one: (-(one.lag_ms or 0), -one.lag, one.group))[:LAGGING_GROUPS_SHOWN]


async def rates(request: Request) -> Response:
    """Return the data of the overview charts as JSON: times in seconds since 1970, and rates per second (null if
    unknown)."""
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


CLUSTER_ADDRESS: Final = "/cluster"


async def cluster_page(request: Request) -> Response:
    """Show the cluster page: broker groups, replicas and other servers."""
    return page(request, "cluster.html", {"cluster": await console_of(request).cluster()})


async def status_json(request: Request) -> Response:
    """Return the same JSON as `raymq status --json`."""
    snapshot = await console_of(request).cluster()
    if snapshot.value is None:
        raise ServiceNotAvailableError(snapshot.error)
    return JSONResponse(exact(snapshot.value.status.report))


async def balance(request: Request) -> Response:
    """Start spreading the masters of the broker groups over the nodes."""
    return await change(
        request,
        "balance",
        {},
        lambda cluster: cluster.control.balance(),
        then=CLUSTER_ADDRESS,
        done="The leads are being spread over the nodes.",
    )


async def drain(request: Request) -> Response:
    """Move all replicas off a node after a confirmation, or allow replicas on the node again."""
    form = await form_of(request)
    drained = form.text("undo") != "on"
    try:
        node = form.needed("node", "The node")
        if drained and form.text("confirm") != "on":
            raise InvalidArgumentError(f"confirm that all replicas should leave node {node}")
    except InvalidArgumentError as error:
        return refused(request, error, CLUSTER_ADDRESS)
    return await change(
        request,
        "drain" if drained else "drain --undo",
        {"node": node},
        lambda cluster: cluster.control.drain(node, drained=drained),
        then=CLUSTER_ADDRESS,
        done=f"Replicas leave node {node}." if drained else f"Replicas may be on node {node} again.",
    )


async def clean(request: Request) -> Response:
    """Make a store delete expired messages now."""
    form = await form_of(request)
    try:
        broker_name = form.needed("broker", "The broker group")
    except InvalidArgumentError as error:
        return refused(request, error, CLUSTER_ADDRESS)
    return await change(
        request,
        "store clean",
        {"broker": broker_name},
        lambda cluster: cluster.admin.clean_store(broker_name),
        then=CLUSTER_ADDRESS,
        done=f"{broker_name} deletes expired messages now.",
    )


async def set_write_permission(request: Request) -> Response:
    """Allow or forbid writes to a broker group."""
    form = await form_of(request)
    try:
        broker_name, write = form.needed("broker", "The broker group"), form.needed("write", "On or off")
        if write not in ("on", "off"):
            raise InvalidArgumentError(f"write must be on or off, not {write!r}")
    except InvalidArgumentError as error:
        return refused(request, error, CLUSTER_ADDRESS)
    writable = write == "on"
    return await change(
        request,
        "write permission",
        {"broker": broker_name, "writable": writable},
        lambda cluster: (cluster.admin.add_write_perm if writable else cluster.admin.wipe_write_perm)(broker_name),
        then=CLUSTER_ADDRESS,
        done=f"{broker_name} {'takes writes again' if writable else 'takes no more writes'}; clients see it soon.",
    )


CLUSTER_ROUTES: Final = [
    Route(CLUSTER_ADDRESS, cluster_page),
    Route("/cluster/balance", balance, methods=["POST"]),
    Route("/cluster/drain", drain, methods=["POST"]),
    Route("/cluster/clean", clean, methods=["POST"]),
    Route("/cluster/write-permission", set_write_permission, methods=["POST"]),
    Route("/api/v1/status", status_json),
]
