"""`/messages`: the search page for messages by key, id or place (BROKER:QUEUE:OFFSET), and the page of one message with
its state in each group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raymq.client.admin.admin import Admin
from raymq.client.admin.track import MessageTrack
from raymq.common.errors import InvalidArgumentError, NoPermissionError, OffsetOutOfRangeError, RaymqError
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.places import parse_position
from raymq.tools.console.messages.body import BODY_SHOWN_MAX_BYTES, BodyForm, is_text, view_body, visible
from raymq.tools.console.messages.export import saved
from raymq.tools.console.messages.fields import file_rows, query_command, row_of, send_command, visible_map
from raymq.tools.console.messages.search import bodies_shown
from raymq.tools.console.pages.sending import message_again, send_and_go_back
from raymq.tools.console.web.answers import page, redirect
from raymq.tools.console.web.changes import Form, change, form_of, query_of
from raymq.tools.console.web.console import console_of, notify, user_of

KEY_HITS_MAX: Final = 64


async def find(request: Request) -> Response:
    """Show the search form and the messages found. If only one message was found, show the message's page
    instead."""
    form, error = query_of(request), ""
    messages: Sequence[MessageExt] = ()
    try:
        messages = await _found(request, form)
    except RaymqError as problem:
        error = str(problem)
    if len(messages) == 1:
        return _show(request, messages[0])
    with_body = _with_body(request)
    rows = [row_of(message, with_body=with_body) for message in messages]
    asked = bool(form.text("topic")) and not error
    return page(request, "find.html", {"form": form, "rows": rows, "error": error, "asked": asked})


async def as_json(request: Request) -> Response:
    """Return the messages that the search by key, id or place found, as JSON for scripts."""
    with_body = _with_body(request)
    found = await _found(request, query_of(request))
    return JSONResponse({"messages": file_rows(found, with_body=with_body)})


async def track(request: Request) -> Response:
    """Show the state of a message in each group. The message's page loads this part separately, because it needs calls
    to stores and brokers."""
    tracks: Sequence[MessageTrack] = ()
    error = ""
    try:
        message = await _message(request, query_of(request))
        tracks = await console_of(request).ask(lambda cluster: cluster.admin.message_track(message))
    except RaymqError as problem:
        error = str(problem)
    return page(request, "track.html", {"tracks": tracks, "error": error})


async def download(request: Request) -> Response:
    """Return the whole body of a message as a download. Browsers save it and do not display it."""
    if not _with_body(request):
        raise NoPermissionError("bodies are hidden from viewers (console.show_bodies)")
    message = await _message(request, query_of(request))
    return saved(message.body, f"{message.topic}-{message.message_id}.bin")


async def send_again(request: Request) -> Response:
    """Send a copy of the displayed message: unchanged or edited, to the same or another topic, immediately or
    delayed."""
    form, back = await form_of(request), _own_page(request)
    try:
        message = await _message(request, query_of(request))
        again = message_again(form, message)
    except RaymqError as error:
        notify(request, "failed", str(error))
        return redirect(request, back)
    return await send_and_go_back(request, "send again", again, back)


async def deliver(request: Request) -> Response:
    """Deliver the displayed message again to a single consumer group."""
    form, query, back = await form_of(request), query_of(request), _own_page(request)
    try:
        message, group = await _message(request, query), form.needed("group", "the group")
    except RaymqError as error:
        notify(request, "failed", str(error))
        return redirect(request, back)
    return await change(
        request,
        "deliver again",
        {"topic": message.topic, "message_id": message.message_id, "group": group},
        lambda cluster: cluster.admin.replay(
            message.topic, ids=[message.message_id], to_group=group, name=f"console-{time.time_ns()}"
        ),
        then=back,
        done=f"Group {group} gets message {message.message_id} again.",
    )


def _show(request: Request, message: MessageExt) -> Response:
    """Show the page of one message, with its fields, body and actions."""
    with_body = _with_body(request)
    wanted = request.query_params.get("as", "")
    error = message.body_error if with_body else None
    body = message.body if with_body and error is None else None
    view = None if body is None else view_body(body, BodyForm(wanted) if wanted in set(BodyForm) else None)
    editable = body is not None and len(body) <= BODY_SHOWN_MAX_BYTES and is_text(body)
    values: dict[str, Any] = {
        "message": message,
        "row": row_of(message, with_body=False),
        "view": view,
        "error": None if error is None else visible(str(error)),
        "forms": list(BodyForm),
        "properties": visible_map(message.properties),
        "system": visible_map(message.system_properties),
        "body_text": body.decode() if editable and body is not None else None,
        "query_command": query_command(message),
        "send_command": None if body is None else send_command(message),
    }
    return page(request, "message.html", values)


async def _found(request: Request, form: Form) -> Sequence[MessageExt]:
    """Find messages by the search form's fields: a topic, and a key, an id or an offset. Returns no messages if all
    fields are empty. Raises RaymqError, for example if the fields contradict each other."""
    topic, key, message_id, place = (form.text(name) for name in ("topic", "key", "id", "offset"))
    if not topic and not (key or message_id or place):
        return ()
    if not topic or sum(map(bool, (key, message_id, place))) != 1:
        raise InvalidArgumentError("pass a topic, and one of key, id and place")
    console = console_of(request)
    if key:
        return await console.ask(lambda cluster: cluster.admin.query_by_key(topic, key, max_messages=KEY_HITS_MAX))
    if message_id:
        return await console.ask(lambda cluster: cluster.admin.query_by_id(topic, message_id))
    queue, offset = parse_position(topic, place)
    message = await console.ask(lambda cluster: message_at(cluster.admin, queue, offset))
    return () if message is None else (message,)


def message_at(admin: Admin, queue: MessageQueue, offset: int) -> MessageExt | None:
    """Return the message at an offset of a queue; None if no message has this offset."""
    try:
        found = admin.pull(queue, offset, max_messages=1).messages
    except OffsetOutOfRangeError:
        return None
    return found[0] if found and found[0].queue_offset == offset else None


async def _message(request: Request, form: Form) -> MessageExt:
    """Return the message at the topic and place (BROKER:QUEUE:OFFSET) in the URL. Raises InvalidArgumentError if no
    message exists at this place."""
    queue, offset = parse_position(form.needed("topic", "the topic"), form.needed("offset", "the place"))
    message = await console_of(request).ask(lambda cluster: message_at(cluster.admin, queue, offset))
    if message is None:
        raise InvalidArgumentError(
            f"topic {queue.topic!r} has no message at {queue.broker_name}:{queue.queue_id}:{offset}"
        )
    return message


def _own_page(request: Request) -> str:
    """Return the path of the message page from which the browser sent the form."""
    return f"/messages?{urlencode({name: request.query_params.get(name, '') for name in ('topic', 'offset')})}"


def _with_body(request: Request) -> bool:
    return bodies_shown(user_of(request), console_of(request).settings)


MESSAGE_ROUTES: Final = [
    Route("/messages", find),
    Route("/messages/track", track),
    Route("/messages/body", download),
    Route("/messages/send", send_again, methods=["POST"]),
    Route("/messages/deliver", deliver, methods=["POST"]),
    Route("/api/v1/messages", as_json),
]
