"""`/topics/T/messages`: the page that searches a limited number of a topic's messages, and a form for a new message.

`/topics/T/tail`: the live tail page, with the messages of a topic as they arrive (server-sent events).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raymq.client.admin.browse import Page
from raymq.client.admin.live_tails import TailEvent, TooManyViewersError, Wants
from raymq.client.consumer.pull_once import has_text, is_wanted
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import InvalidArgumentError, RaymqError, TopicNotExistError
from raymq.common.message import MessageExt
from raymq.tools.console.messages.export import rows_as_file
from raymq.tools.console.messages.fields import MESSAGE_COLUMNS, file_rows, row_of, tail_row
from raymq.tools.console.messages.search import (
    SEARCH_LIMITS,
    SEARCH_STARTS,
    SearchForm,
    bodies_shown,
    check_text_search,
)
from raymq.tools.console.pages.sending import new_message, send_and_go_back
from raymq.tools.console.web.answers import page, redirect
from raymq.tools.console.web.changes import form_of, query_of
from raymq.tools.console.web.console import console_of, notify, session_of, user_of
from raymq.tools.console.web.snapshots import LIST_TIMEOUT_S
from raymq.tools.console.web.texts import segment


async def browse(request: Request) -> Response:
    """Show the search form for a topic's messages, and the messages found. An error is shown as a line between the form
    and the messages."""
    topic, form = request.path_params["topic"], SearchForm.of(request.query_params)
    (found, error), queues = await asyncio.gather(_try_to_search(request, topic, form), _queues(request, topic))
    with_body = _with_body(request)
    values = {
        "topic": topic,
        "form": form,
        "starts": SEARCH_STARTS,
        "limit_choices": [(limit, limit) for limit in SEARCH_LIMITS],
        "queue_choices": [("", "all"), *((queue, queue) for queue in _with_chosen(queues, form.queue))],
        "found": found,
        "rows": [row_of(message, with_body=with_body) for message in found.messages] if found else [],
        "error": error,
        "with_body": with_body,
    }
    return page(request, "messages.html", values)


async def export(request: Request) -> Response:
    """Return the messages that the search found as a file."""
    topic, form = request.path_params["topic"], SearchForm.of(request.query_params)
    found, with_body = await _search(request, topic, form), _with_body(request)
    rows = file_rows(found.messages, with_body=with_body)
    return rows_as_file(request, f"messages-{topic}", MESSAGE_COLUMNS, rows)


async def as_json(request: Request) -> Response:
    """Return the messages that the search found as JSON, for scripts."""
    topic, form = request.path_params["topic"], SearchForm.of(request.query_params)
    found, with_body = await _search(request, topic, form), _with_body(request)
    return JSONResponse(
        {
            "messages": file_rows(found.messages, with_body=with_body),
            "scanned": found.scanned,
            "truncated": found.truncated,
            "cursor": found.cursor,
        }
    )


async def send(request: Request) -> Response:
    """Send a new message with the values that the user entered in the form."""
    topic = request.path_params["topic"]
    back = f"/topics/{segment(topic)}/messages"
    try:
        message = new_message(topic, await form_of(request))
    except InvalidArgumentError as error:
        notify(request, "failed", str(error))
        return redirect(request, back)
    return await send_and_go_back(request, "send", message, back)


def _with_body(request: Request) -> bool:
    return bodies_shown(user_of(request), console_of(request).settings)


async def _search(request: Request, topic: str, form: SearchForm) -> Page:
    arguments = form.arguments(topic, time.time_ns() // 1_000_000)
    check_text_search(form.text, with_body=_with_body(request))
    return await console_of(request).ask(lambda cluster: cluster.admin.browse(topic, **arguments, whole_bodies=False))


async def _try_to_search(request: Request, topic: str, form: SearchForm) -> tuple[Page | None, str]:
    """Search messages of a topic. Returns (page of messages, "") or (None, error text). Raises TopicNotExistError if
    the topic does not exist, because a missing topic has no page."""
    try:
        return await _search(request, topic, form), ""
    except TopicNotExistError:
        raise
    except RaymqError as error:
        return None, str(error)


def _with_chosen(queues: list[str], chosen: str) -> list[str]:
    """Return the queues from which the user can choose. `chosen` is included even if it is not in `queues`."""
    return [*queues, chosen] if chosen and chosen not in queues else queues


async def _queues(request: Request, topic: str) -> list[str]:
    """Return the topic's queues, as BROKER:QUEUE, from which the user can choose. Returns an empty list if the topic's
    route is unknown."""
    try:
        route = await console_of(request).ask(lambda cluster: cluster.admin.topic_route(topic), LIST_TIMEOUT_S)
    except RaymqError:
        return []
    return [f"{queue.broker_name}:{queue.queue_id}" for queue in route.subscribe_queues]


MESSAGES_ROUTES: Final = [
    Route("/topics/{topic}/messages", browse),
    Route("/topics/{topic}/messages", send, methods=["POST"]),
    Route("/topics/{topic}/messages/export", export),
    Route("/api/v1/topics/{topic}/messages", as_json),
]


TAIL_FILTER_MAX: Final = 1_000
"""Maximum number of characters of a tag filter or text filter of a live tail."""


async def tail_page(request: Request) -> Response:
    """Show the live tail page of a topic. A script on the page requests the stream of new messages."""
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
    """Stream a topic's live tail as server-sent events. `messages` has new messages, `refused` has a reason why the
    stream must not be reopened, and comments are heartbeats."""
    form, topic, with_body = query_of(request), request.path_params["topic"], _with_body(request)
    wants = wants_of(topic, form.text("tags"), form.text("text"), with_body=with_body)
    return StreamingResponse(
        _stream(request, topic, wants, with_body=with_body),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},  # without this header, nginx and similar proxies buffer the events
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
    """Return a function that decides which messages of `topic` a live tail shows. A message must have the tags `tags`
    (a tag expression as in a subscription) and contain the text `contains` in its body. Both filters may be empty.
    Raises InvalidArgumentError if the tags are invalid, and NoPermissionError if the user may not search in bodies."""
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
    """Format one server-sent event of a live tail. The JSON contains no line end, so one `data` field is
    enough."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


TAIL_ROUTES: Final = [Route("/topics/{topic}/tail", tail_page), Route("/topics/{topic}/tail/events", events)]
