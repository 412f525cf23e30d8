"""`/groups`, `/groups/G`: pages of consumer groups, their members and lag. Users can turn a group's consumption on or
off, change its number of retries, and delete it.

`/producers`: the page of the connected producers, whose clients send heartbeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.protocol.clients import ConsumerConnection, ProducerConnection
from raymq.common.protocol.group import (
    ORDERED,
    RETRY_INTERVALS_S,
    RETRY_MAX_TIMES,
    GroupChanges,
    GroupConfig,
    GroupSummary,
    intervals_text,
    parse_intervals,
)
from raymq.tools.console.cluster import ConsoleCluster, PushInstances
from raymq.tools.console.messages.export import exact, rows_as_file
from raymq.tools.console.web.answers import page, refused
from raymq.tools.console.web.changes import change, form_of
from raymq.tools.console.web.console import console_of
from raymq.tools.console.web.texts import segment

GROUP_COLUMNS: Final = (
    "group",
    "consume_type",
    "message_model",
    "members",
    "lag",
    "lag_ms",
    "retries",
    "dead_letters",
    "consume_enable",
)
"""The columns of the exported list of groups."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """All data that the page of one consumer group shows."""

    config: GroupConfig
    summary: GroupSummary
    members: Sequence[ConsumerConnection]
    push: PushInstances


def group_view(cluster: ConsoleCluster, group: str) -> GroupView:
    """Read all data for the page of one consumer group from the cluster. Raises GroupNotExistError if the group does
    not exist."""
    admin = cluster.admin
    config, summary = admin.group_config(group), admin.group_summary(group)
    return GroupView(config, summary, admin.consumer_connections(group), cluster.control.push_instances(group))


async def group_list(request: Request) -> Response:
    """Show the page with all consumer groups."""
    return page(request, "groups.html", {"groups": await console_of(request).groups()})


async def group_page(request: Request) -> Response:
    """Show the page of one consumer group, with the topics in which its offsets can be moved."""
    view = await _view(request)
    topics = sorted({one.queue.topic for one in view.summary.queues})
    members = [(one, _subscriptions(one)) for one in view.members]
    intervals = intervals_text(view.config.retry_intervals_s or RETRY_INTERVALS_S)
    values = {"group": view.config.group, "view": view, "members": members, "topics": topics, "intervals": intervals}
    return page(request, "group.html", values)


async def groups_json(request: Request) -> Response:
    """Return the same JSON as `raymq group list --json`."""
    snapshot = await console_of(request).groups()
    if snapshot.value is None:
        raise ServiceNotAvailableError(snapshot.error)
    return JSONResponse({"groups": [row.group for row in snapshot.value.rows]})


async def export(request: Request) -> Response:
    """Return the list of groups as a file, CSV or JSON."""
    snapshot = await console_of(request).groups()
    if snapshot.value is None:
        raise ServiceNotAvailableError(snapshot.error)
    return rows_as_file(request, "groups", GROUP_COLUMNS, [asdict(row) for row in snapshot.value.rows])


async def group_json(request: Request) -> Response:
    """Return the same JSON as `raymq group describe G --json`."""
    view = await _view(request)
    queues = [
        {
            "topic": one.queue.topic,
            "broker": one.queue.broker_name,
            "queue": one.queue.queue_id,
            "committed": one.committed,
            "max_offset": one.max_offset,
            "lag": one.lag,
            "in_flight": one.in_flight,
            "lag_ms": one.lag_ms,
        }
        for one in view.summary.queues
    ]
    sums = {name: getattr(view.summary, name) for name in ("lag", "lag_ms", "retry_lag", "dead_letters")}
    return JSONResponse(exact({"queues": queues, **sums}))


async def lag_json(request: Request) -> Response:
    """Return the data for the chart of a group's lag in the last hour: times in seconds since 1970, and the lag in
    messages. The data is empty if the group has no history (raymq.tools.console.web.history)."""
    samples = console_of(request).history.groups.values(request.path_params["group"])
    values = [(at_ms, lag) for at_ms, lag in samples if lag is not None]
    return JSONResponse({"at_s": [at_ms / 1000 for at_ms, _ in values], "lag": [lag for _, lag in values]})


async def members_json(request: Request) -> Response:
    """Return the same JSON as `raymq group members G --json`."""
    view = await _view(request)
    members = [
        {
            "client": one.client_id,
            "member": one.consumer.member,
            "host": one.host,
            "pid": one.pid,
            "language": one.language,
            "version": one.version,
            "type": one.consumer.consume_type,
            "mode": one.consumer.consume_mode,
            "model": one.consumer.message_model.value,
            "silent_s": round(one.silent_s, 1),
        }
        for one in view.members
    ]
    return JSONResponse({"members": members})


async def update(request: Request) -> Response:
    """Turn a group's consumption on or off, or change its retries or its order mode."""
    group, form = request.path_params["group"], await form_of(request)
    try:
        consume = form.text("consume")
        if consume not in ("", "on", "off"):
            raise InvalidArgumentError(f"consume must be on or off, not {consume!r}")
        retries = form.number("retry_max_times", "Retries", RETRY_MAX_TIMES)
        changes: GroupChanges = {}
        if consume:
            changes["consume_enable"] = consume == "on"
        if retries is not None:
            changes["retry_max_times"] = retries
        if intervals := form.text("retry_intervals"):
            changes["retry_intervals_s"] = parse_intervals(intervals)
        if ordered := form.text("ordered"):
            if ordered not in ORDERED:
                raise InvalidArgumentError(f"ordered must be {', '.join(ORDERED)}, not {ordered!r}")
            changes["ordered"] = ORDERED[ordered]
        if not changes:
            raise InvalidArgumentError("nothing to change: all fields were empty")
    except InvalidArgumentError as error:
        return refused(request, error, group_address(group))
    return await change(
        request,
        "group update",
        {"group": group, **changes},
        lambda cluster: cluster.admin.update_group(group, **changes),
        then=group_address(group),
        done=f"Group {group} is changed.",
    )


async def delete(request: Request) -> Response:
    """Delete a group, its offsets and its retries, if the user typed the group's name as confirmation."""
    group, form = request.path_params["group"], await form_of(request)
    if form.text("confirm") != group:
        error = InvalidArgumentError(f"type the group's name, {group}, to delete it")
        return refused(request, error, group_address(group))
    letters = form.text("dead_letters") == "on"
    return await change(
        request,
        "group delete",
        {"group": group, "dead_letters": letters},
        lambda cluster: cluster.admin.delete_group(group, dead_letters=letters),
        then="/groups",
        done=f"Group {group} is deleted.",
        after_failure=group_address(group),
    )


async def _view(request: Request) -> GroupView:
    group = request.path_params["group"]
    return await console_of(request).ask(lambda cluster: group_view(cluster, group))


def _subscriptions(member: ConsumerConnection) -> str:
    return ", ".join(f"{topic}: {tags}" for topic, tags in sorted(member.consumer.subscriptions.items()))


def group_address(group: str) -> str:
    """Return the path of a group's page in the console."""
    return f"/groups/{segment(group)}"


GROUPS_ROUTES: Final = [
    Route("/groups", group_list),
    Route("/groups/{group}", group_page),
    Route("/groups/{group}/update", update, methods=["POST"]),
    Route("/groups/{group}/delete", delete, methods=["POST"]),
    Route("/export/groups", export),
    Route("/api/v1/groups", groups_json),
    Route("/api/v1/groups/{group}", group_json),
    Route("/api/v1/groups/{group}/lag", lag_json),
    Route("/api/v1/groups/{group}/members", members_json),
]


PRODUCER_COLUMNS: Final = ("group", "client_id", "host", "pid", "silent_s", "topics")


async def producers_page(request: Request) -> Response:
    """Show the page of connected producers, from a list that is at most a few seconds old."""
    wanted, snapshot = request.query_params.get("q", "").strip(), await console_of(request).producers()
    rows = snapshot.value or ()
    shown = [row for row in rows if any(wanted in text for text in (row.group, row.client_id, row.host))]
    return page(request, "producers.html", {"producers": snapshot, "rows": shown, "wanted": wanted})


async def export_producers(request: Request) -> Response:
    """Return the list of connected producers as a file."""
    snapshot = await console_of(request).producers()
    rows = [_producer_row(one) for one in snapshot.value or ()]
    return rows_as_file(request, "producers", PRODUCER_COLUMNS, rows)


async def producers_json(request: Request) -> Response:
    """Return the list of connected producers as JSON, for scripts."""
    snapshot = await console_of(request).producers()
    rows = [_producer_row(one) for one in snapshot.value or ()]
    return JSONResponse({"producers": rows, "error": snapshot.error})


def _producer_row(one: ProducerConnection) -> dict[str, Any]:
    """Return a connected producer as a row for JSON and files. `topics` is empty, because heartbeats do not name
    topics."""
    names = ("client_id", "host", "pid", "group", "silent_s")
    return {**{name: getattr(one, name) for name in names}, "topics": []}


PRODUCERS_ROUTES: Final = [
    Route("/producers", producers_page),
    Route("/producers/export", export_producers),
    Route("/api/v1/producers", producers_json),
]
