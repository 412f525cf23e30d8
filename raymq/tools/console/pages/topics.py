"""`/topics`, `/topics/T`: pages of topics, their queues, groups and routes. Users can create, change and delete
topics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raymq.client.admin.admin import Admin
from raymq.client.admin.topics import QueueDescription
from raymq.common.delay import parse_duration_ms
from raymq.common.errors import InvalidArgumentError, RaymqError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.bounds import MAX_BACKLOG, MAX_BACKLOG_BYTES
from raymq.common.protocol.route import QUEUES, TopicRoute
from raymq.common.protocol.stats import BrokerReadings, GroupReading
from raymq.tools.console.messages.export import exact, rows_as_file
from raymq.tools.console.web.answers import page, refused
from raymq.tools.console.web.changes import Form, change, form_of
from raymq.tools.console.web.console import console_of
from raymq.tools.console.web.lists import broker_readings, topic_parts
from raymq.tools.console.web.texts import plural, segment

PERMISSION_BITS: Final = {"R": 4, "W": 2, "RW": 6}
MESSAGE_TYPES: Final = (
    ("", "any"),
    ("normal", "normal"),
    ("fifo", "FIFO"),
    ("delay", "delay"),
    ("transaction", "transaction"),
)
TOPIC_COLUMNS: Final = ("topic", "queues", "messages", "rate", "groups", "perm", "attributes")
"""The columns of the exported list of topics."""


@dataclass(frozen=True, slots=True)
class TopicGroup:
    """A consumer group that consumes a topic, with the group's lag in the topic, in messages and in time."""

    group: str
    members: int
    lag: int
    lag_ms: int


@dataclass(frozen=True, slots=True)
class TopicView:
    """All data that the page of one topic shows. `since_ms`: for each queue, the store time of its first message, in ms
    since 1970. `rate`, `bytes_rate`: messages and bytes stored in the topic per second, over the last minute; None if
    no broker answered.

    `error`: the store's error if the queues' offsets are unknown; the offsets are then 0. `missing`: a sentence for
    each request that was not answered.
    """

    route: TopicRoute
    queues: Sequence[QueueDescription]
    since_ms: Mapping[MessageQueue, int | None]
    groups: Sequence[TopicGroup]
    rate: float | None
    bytes_rate: float | None
    error: str
    missing: Sequence[str]


def topic_view(admin: Admin, topic: str) -> TopicView:
    """Read all data for the page of one topic from the cluster, in few calls to each broker group. Raises
    TopicNotExistError if the topic does not exist."""
    route = admin.topic_route(topic)
    answers, silent = broker_readings(admin)
    missing, error = [f"{one.server}: {one.reason}" for one in silent], ""
    members: Counter[str] = Counter()
    since_ms: Mapping[MessageQueue, int | None] = {}
    try:
        since_ms, queues = admin.kept_since(topic), admin.describe_topic(topic)
        members.update(one.consumer.group for one in admin.consumer_connections())
    except RaymqError as problem:
        error = str(problem)
        queues = [QueueDescription(queue, 0, 0) for queue in route.subscribe_queues]
        missing.append(error)
    parts = topic_parts(answers).get(topic)
    return TopicView(
        route,
        queues,
        since_ms,
        _groups_of(topic, answers, members),
        sum(one.rate for one in parts) if parts else None,
        sum(one.bytes_rate for one in parts) if parts else None,
        error,
        missing,
    )


def _groups_of(topic: str, answers: Iterable[BrokerReadings], members: Mapping[str, int]) -> list[TopicGroup]:
    """Return the groups that consume a topic, with their lag in the topic. `members`: the number of members of each
    group."""
    found: dict[str, list[GroupReading]] = {}
    for answer in answers:
        for (group, name), reading in answer.groups.items():
            if name == topic:
                found.setdefault(group, []).append(reading)
    return [
        TopicGroup(
            group,
            members.get(group, 0),
            sum(one.lag for one in parts),
            max((one.behind_ms for one in parts if one.behind_ms is not None), default=0),
        )
        for group, parts in sorted(found.items())
    ]


async def topic_list(request: Request) -> Response:
    """Show the page with all topics, and a form for a new topic."""
    console = console_of(request)
    values = {"topics": await console.topics(), "types": MESSAGE_TYPES, "sparkline": console.sparkline}
    return page(request, "topics.html", values)


async def topic_page(request: Request) -> Response:
    """Show the page of one topic, with its queues, groups and route."""
    view = await _view(request)
    return page(request, "topic.html", {"topic": view.route.topic, "view": view, "types": MESSAGE_TYPES})


async def topics_json(request: Request) -> Response:
    """Return the same JSON as `raymq topic list --json`."""
    snapshot = await console_of(request).topics()
    if snapshot.value is None:
        raise ServiceNotAvailableError(snapshot.error)
    rows = snapshot.value.rows
    attributes = {row.topic: dict(row.attributes) for row in rows if row.attributes}
    return JSONResponse({"topics": [row.topic for row in rows], "attributes": attributes})


async def export(request: Request) -> Response:
    """Return the list of topics as a file, CSV or JSON."""
    snapshot = await console_of(request).topics()
    if snapshot.value is None:
        raise ServiceNotAvailableError(snapshot.error)
    return rows_as_file(request, "topics", TOPIC_COLUMNS, [asdict(row) for row in snapshot.value.rows])


async def topic_json(request: Request) -> Response:
    """Return the same JSON as `raymq topic describe T --json`."""
    view = await _view(request)
    queues = [
        {
            "broker": one.queue.broker_name,
            "queue": one.queue.queue_id,
            "min_offset": one.min_offset,
            "max_offset": one.max_offset,
            "messages": one.messages,
        }
        for one in view.queues
    ]
    return JSONResponse(exact({"queues": queues, "attributes": view.route.attributes.mapping()}))


async def create(request: Request) -> Response:
    """Create a topic from the values that the user entered in the form."""
    form = await form_of(request)
    try:
        topic = form.needed("topic", "The name")
        queues = form.number("queues", "Queues", QUEUES)
        arguments: dict[str, Any] = {
            "message_type": form.text("message_type") or None,
            "reserve_time_s": _retention_s(form),
            "cleanup_policy": form.text("cleanup_policy") or None,
            **_bound(form),
        }
    except InvalidArgumentError as error:
        return refused(request, error, "/topics")
    return await change(
        request,
        "topic create",
        {"topic": topic, "queues": queues, **arguments},
        lambda cluster: cluster.admin.create_topic(topic, queues, **arguments),
        then=_address(topic),
        done=f"Topic {topic} is created." if queues is None else f"Topic {topic} has {plural(queues, 'queue')}.",
        after_failure="/topics",
    )


async def update(request: Request) -> Response:
    """Change a topic's number of queues, permission, type, retention or bound. Empty fields change nothing."""
    topic, form = request.path_params["topic"], await form_of(request)
    try:
        perm = form.text("perm")
        if perm and perm not in PERMISSION_BITS:
            raise InvalidArgumentError(f"a permission must be R, W or RW, not {perm!r}")
        wanted: dict[str, Any] = {
            "queues": form.number("queues", "Queues", QUEUES),
            "perm": PERMISSION_BITS.get(perm),
            "message_type": form.text("message_type") or None,
            "reserve_time_s": _retention_s(form),
            **_bound(form),
        }
        changes = {name: value for name, value in wanted.items() if value is not None}
        if not changes:
            raise InvalidArgumentError("nothing to change: all fields were empty")
    except InvalidArgumentError as error:
        return refused(request, error, _address(topic))
    return await change(
        request,
        "topic update",
        {"topic": topic, **changes},
        lambda cluster: cluster.admin.update_topic(topic, **changes),
        then=_address(topic),
        done=f"Topic {topic} is changed; clients see it within half a minute.",
    )


async def set_order(request: Request) -> Response:
    """Set the queues of an order topic, or turn an order topic into an ordinary topic."""
    topic, form = request.path_params["topic"], await form_of(request)
    config = form.text("config") or None
    return await change(
        request,
        "topic order",
        {"topic": topic, "config": config or ""},
        lambda cluster: cluster.admin.set_order_config(topic, config),
        then=_address(topic),
        done=f"Topic {topic} is written to {config} only." if config else f"Topic {topic} is no order topic.",
    )


async def delete(request: Request) -> Response:
    """Delete a topic if the user typed the topic's name as confirmation."""
    topic, form = request.path_params["topic"], await form_of(request)
    if form.text("confirm") != topic:
        error = InvalidArgumentError(f"type the topic's name, {topic}, to delete it")
        return refused(request, error, _address(topic))
    return await change(
        request,
        "topic delete",
        {"topic": topic},
        lambda cluster: cluster.admin.delete_topic(topic),
        then="/topics",
        done=f"Topic {topic} is deleted.",
        after_failure=_address(topic),
    )


async def _view(request: Request) -> TopicView:
    topic = request.path_params["topic"]
    return await console_of(request).ask(lambda cluster: topic_view(cluster.admin, topic))


def _address(topic: str) -> str:
    return f"/topics/{segment(topic)}"


def _retention_s(form: Form) -> float | None:
    """Return a topic's retention in seconds from the form field `retention`, such as 12h or 7d. Returns None for an
    empty field. Returns 0 for the text 0, which means that the store's own retention applies."""
    text = form.text("retention")
    return None if not text else 0.0 if text == "0" else parse_duration_ms(text) / 1000


def _bound(form: Form) -> dict[str, Any]:
    """Return the topic's bound from the form, as arguments of `Admin.create_topic`. An empty field is None."""
    groups = [name.strip() for name in form.text("backlog_groups").split(",") if name.strip()]
    return {
        "max_backlog": form.number("max_backlog", "The limit of messages", MAX_BACKLOG),
        "max_backlog_bytes": form.number("max_backlog_bytes", "The limit of bytes", MAX_BACKLOG_BYTES),
        "backlog_policy": form.text("backlog_policy") or None,
        "backlog_groups": groups or None,
    }


TOPICS_ROUTES: Final = [
    Route("/topics", topic_list),
    Route("/topics", create, methods=["POST"]),
    Route("/topics/{topic}", topic_page),
    Route("/topics/{topic}/update", update, methods=["POST"]),
    Route("/topics/{topic}/order", set_order, methods=["POST"]),
    Route("/topics/{topic}/delete", delete, methods=["POST"]),
    Route("/export/topics", export),
    Route("/api/v1/topics", topics_json),
    Route("/api/v1/topics/{topic}", topic_json),
]
