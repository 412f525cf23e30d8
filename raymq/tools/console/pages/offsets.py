"""`/groups/G/reset`, `/groups/G/copy`: pages that move a group's offsets in a topic, after a preview of the old and new
offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raymq.client.admin.groups import NewOffsets
from raymq.common.errors import InvalidArgumentError
from raymq.common.places import parse_queue
from raymq.tools.console.cluster import ConsoleCluster
from raymq.tools.console.pages.groups import group_address
from raymq.tools.console.web.answers import page, refused
from raymq.tools.console.web.changes import Form, change, form_of, query_of
from raymq.tools.console.web.console import console_of
from raymq.tools.console.web.texts import plural, time_of


@dataclass(frozen=True, slots=True)
class MoveForm:
    """The values of a form that moves a group's offsets: its `fields`, the target of the move in words (`words`), and
    the `arguments` of the Admin call."""

    fields: dict[str, str]
    words: str
    arguments: dict[str, Any]

    @staticmethod
    def of_reset(group: str, form: Form) -> MoveForm:
        """Build a MoveForm from the form that resets offsets. Raises InvalidArgumentError if a field is missing or
        invalid."""
        topic, to = form.needed("topic", "The topic"), form.needed("to", "The target")
        arguments: dict[str, Any] = {"group": group, "topic": topic}
        words = to
        if to in ("earliest", "latest"):
            arguments["to"] = to
        elif to == "time":
            arguments["timestamp_ms"] = at_ms = form.time_ms("time", "The time")
            words = f"{time_of(at_ms)} UTC"
        elif to == "offset":
            arguments["offset"] = form.number("offset", "The offset")
            words = f"offset {arguments['offset']}"
        else:
            raise InvalidArgumentError(f"the target must be earliest, latest, time or offset, not {to!r}")
        if None in arguments.values():
            raise InvalidArgumentError(f"the {to} of the target is missing")
        if text := form.text("queue"):
            arguments["queue"] = parse_queue(topic, text)
            words += f", queue {text} only"
        fields = {name: form.text(name) for name in ("topic", "to", "time", "offset", "queue")}
        return MoveForm(fields, f"to {words}", arguments)

    @staticmethod
    def of_copy(group: str, form: Form) -> MoveForm:
        """Build a MoveForm from the form that copies another group's offsets. Raises InvalidArgumentError if a field is
        missing or the groups are the same."""
        topic, source = form.needed("topic", "The topic"), form.needed("source", "The other group")
        if source == group:
            raise InvalidArgumentError("the source and the target are the same group: choose another group")
        arguments = {"source": source, "target": group, "topic": topic}
        return MoveForm({"topic": topic, "source": source}, f"to the offsets of group {source}", arguments)


async def preview_reset(request: Request) -> Response:
    """Preview an offset reset: show the old and new offsets, without changing them."""
    return await _preview(request, "reset")


async def reset(request: Request) -> Response:
    """Reset a group's offsets in a topic to the target that the user entered in the form."""
    return await _move(request, "reset")


async def preview_copy(request: Request) -> Response:
    """Preview a copy of another group's offsets: show the old and new offsets, without changing them."""
    return await _preview(request, "copy")


async def copy(request: Request) -> Response:
    """Set a group's offsets in a topic to the offsets of another group."""
    return await _move(request, "copy")


async def _preview(request: Request, kind: str) -> Response:
    group = request.path_params["group"]
    try:
        wanted = _wanted(kind, group, query_of(request))
    except InvalidArgumentError as error:
        return refused(request, error, group_address(group))
    moves = await console_of(request).ask(lambda cluster: _call(cluster, kind, wanted, dry_run=True))
    return page(
        request,
        "offsets.html",
        {
            "group": group,
            "kind": kind,
            "wanted": wanted,
            "moves": [(queue, moves.old[queue], moves[queue]) for queue in sorted(moves)],
            "summary": moved_messages(moves),
        },
    )


async def _move(request: Request, kind: str) -> Response:
    group = request.path_params["group"]
    try:
        wanted = _wanted(kind, group, await form_of(request))
    except InvalidArgumentError as error:
        return refused(request, error, group_address(group))
    topic = wanted.fields["topic"]
    return await change(
        request,
        "group reset-offset" if kind == "reset" else "group copy-offsets",
        wanted.arguments,
        lambda cluster: _call(cluster, kind, wanted, dry_run=False),
        then=group_address(group),
        done=f"Group {group} continues in topic {topic} {wanted.words}.",
    )


def _wanted(kind: str, group: str, form: Form) -> MoveForm:
    return MoveForm.of_reset(group, form) if kind == "reset" else MoveForm.of_copy(group, form)


def _call(cluster: ConsoleCluster, kind: str, wanted: MoveForm, *, dry_run: bool) -> NewOffsets:
    call = cluster.admin.reset_offsets if kind == "reset" else cluster.admin.clone_offsets
    return call(**wanted.arguments, dry_run=dry_run)


def moved_messages(moves: NewOffsets) -> str:
    """Describe in words how many messages the group will consume again or skip when its offsets move."""
    differences = [new - old for queue, new in moves.items() if (old := moves.old[queue]) is not None]
    back = sum(max(-one, 0) for one in differences)
    ahead = sum(max(one, 0) for one in differences)
    parts = [f"{plural(back, 'message')} consumed again"] if back else []
    parts += [f"{plural(ahead, 'message')} left out"] if ahead else []
    return ", ".join(parts) or "no message is consumed again or left out"


OFFSETS_ROUTES: Final = [
    Route("/groups/{group}/reset", preview_reset),
    Route("/groups/{group}/reset", reset, methods=["POST"]),
    Route("/groups/{group}/copy", preview_copy),
    Route("/groups/{group}/copy", copy, methods=["POST"]),
]
