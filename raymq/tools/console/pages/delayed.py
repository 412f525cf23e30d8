"""`/delayed`: the page of delayed messages that are not due yet, with the action to recall a message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raymq.client.admin.delayed import Delayed, DelayedMessage
from raymq.common.errors import RaymqError
from raymq.common.message import TIMER_DELAY_MAX_MS
from raymq.common.protocol.recall import RecallHandle
from raymq.tools.console.messages.body import visible
from raymq.tools.console.messages.fields import file_row
from raymq.tools.console.messages.search import bodies_shown
from raymq.tools.console.web.answers import page, redirect
from raymq.tools.console.web.changes import change, form_of
from raymq.tools.console.web.console import console_of, notify, user_of

DELAYED_SHOWN: Final = 100
BAR_HEIGHT_MAX: Final = 80
BAR_PITCH: Final = 20


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of the histogram of delayed messages: its distance from the left edge and its height, in units of the SVG
    drawing."""

    hour: int
    count: int
    x: int
    height: int


async def show(request: Request) -> Response:
    """Show the delayed messages: their numbers by delay level and by hour, and the messages that are due next."""
    now_ms = time.time_ns() // 1_000_000
    view, error = None, ""
    try:
        view = await _delayed(request, now_ms)
    except RaymqError as problem:
        error = str(problem)
    values = {
        "view": view,
        "error": error,
        "bars": bars_of(view.hours) if view else [],
        "rows": [(one, _handle(one)) for one in view.next_due] if view else [],
        "visible": visible,
    }
    return page(request, "delayed.html", values)


async def as_json(request: Request) -> Response:
    """Return the delayed messages as JSON, for scripts."""
    view = await _delayed(request, time.time_ns() // 1_000_000)
    with_body = bodies_shown(user_of(request), console_of(request).settings)
    next_due: list[dict[str, Any]] = [
        {
            "topic": one.topic,
            "due_ms": one.due_ms,
            "level": one.level,
            "message": file_row(one.message, with_body=with_body),
        }
        for one in view.next_due
    ]
    values = {"levels": dict(view.levels), "hours": view.hours, "late_ms": view.late_ms, "next_due": next_due}
    return JSONResponse({**values, "truncated": view.truncated})


async def recall(request: Request) -> Response:
    """Recall a delayed message, so that it is never delivered."""
    form = await form_of(request)
    try:
        handle = RecallHandle.parse(form.needed("handle", "the recall handle"))
    except RaymqError as error:
        notify(request, "failed", str(error))
        return redirect(request, "/delayed")
    return await change(
        request,
        "recall",
        {"topic": handle.topic, "message_id": handle.message_id},
        lambda cluster: cluster.producer.recall(handle.topic, str(handle)),
        then="/delayed",
        done=f"Message {handle.message_id} will not be delivered.",
    )


def bars_of(hours: Sequence[int]) -> list[Bar]:
    """Build the histogram's bars from the number of delayed messages in each hour. The bar of the largest number has
    the full height; every number above 0 has a visible bar."""
    most = max(hours, default=0) or 1
    return [
        Bar(hour, count, hour * BAR_PITCH, -(-count * BAR_HEIGHT_MAX // most) if count else 0)
        for hour, count in enumerate(hours)
    ]


async def _delayed(request: Request, now_ms: int) -> Delayed:
    end_ms = now_ms + TIMER_DELAY_MAX_MS + 86_400_000
    return await console_of(request).ask(lambda cluster: cluster.admin.delayed(0, end_ms, limit=DELAYED_SHOWN))


def _handle(one: DelayedMessage) -> str:
    """Return the recall handle of a delayed message. Returns "" for a message with a delay level, which cannot be
    recalled."""
    if one.level or not one.message.message_id:
        return ""
    return str(RecallHandle(one.topic, one.message.broker_name, one.due_ms, one.message.message_id))


DELAYED_ROUTES: Final = [
    Route("/delayed", show),
    Route("/delayed/recall", recall, methods=["POST"]),
    Route("/api/v1/delayed", as_json),
]
