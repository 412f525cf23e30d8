"""`/topics/T/tail`: what arrives in a topic, as it arrives (server-sent events)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from raymq.client.consumer.pull_once import has_text, is_wanted
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import RaymqError
from raymq.common.message import MessageExt
from raymq.tools.console.messages.fields import tail_row
from raymq.tools.console.messages.rights import bodies_shown, check_text_search
from raymq.tools.console.messages.tail import TailEvent, TooManyViewersError, Wants
from raymq.tools.console.web.answers import page
from raymq.tools.console.web.console import console_of, session_of, user_of
from raymq.tools.console.web.forms import query_of

TAIL_FILTER_MAX: Final = 1_000
"""The most characters of a filter."""


async def show(request: Request) -> Response:
    """The page; its script asks for the events."""
    form, error = query_of(request), ""
    topic, with_body = request.path_params["topic"], _with_body(request)
    try:
        wants_of(topic, form.text("tags"), form.text("text"), with_body=with_body)
    except RaymqError as problem:
        error = str(problem)
    values = {
        "topic": topic,
        "tags": form.text("tags"),
        "text": form.text("text"),
        "error": error,
        "with_body": with_body,
    }
    return page(request, "tail.html", values)


async def events(request: Request) -> Response:
    """The events: `messages` with what came, `refused` with the reason before an end that lasts, comments as signs of
    life."""
    form, topic, with_body = query_of(request), request.path_params["topic"], _with_body(request)
    wants = wants_of(topic, form.text("tags"), form.text("text"), with_body=with_body)
    return StreamingResponse(
        _stream(request, topic, wants, with_body=with_body),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},  # proxies of the nginx kind would gather them
    )


async def _stream(request: Request, topic: str, wants: Wants, *, with_body: bool) -> AsyncIterator[str]:
    tails = console_of(request).tails
    try:
        viewer = tails.open(topic, wants)
    except TooManyViewersError as error:
        yield _event("refused", {"error": str(error)})
        return
    try:
        yield ": connected\n\n"
        async for event in viewer.events():
            if user_of(request).session and session_of(request) is None:
                yield _event("refused", {"error": "your session has ended: log in again"})
                return
            yield ": still there\n\n" if event is None else _event("messages", _shown(event, with_body=with_body))
    finally:
        tails.leave(topic, viewer)


def wants_of(topic: str, tags: str, contains: str, *, with_body: bool) -> Wants:
    """A test for the messages with these tags, as in a subscription, whose bodies contain this text; either may be
    empty. InvalidArgumentError, NoPermissionError."""
    check_text_search(contains, with_body=with_body)
    subscription = Subscription.parse(topic, tags[:TAIL_FILTER_MAX] or "*")
    text = contains[:TAIL_FILTER_MAX].encode(errors="replace")

    def wants(message: MessageExt) -> bool:
        return is_wanted(message, subscription) and has_text(message, text)

    return wants


def _shown(event: TailEvent, *, with_body: bool) -> dict[str, object]:
    rows = [tail_row(message, with_body=with_body) for message in event.messages]
    return {"messages": rows, "skipped": event.skipped, "error": event.error}


def _event(name: str, data: dict[str, object]) -> str:
    """One server-sent event. JSON has no end of a line in it, so it is one `data` field."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _with_body(request: Request) -> bool:
    return bodies_shown(user_of(request), console_of(request).settings)


TAIL_ROUTES: Final = [Route("/topics/{topic}/tail", show), Route("/topics/{topic}/tail/events", events)]
