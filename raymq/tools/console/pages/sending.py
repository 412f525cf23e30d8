"""Forms that send a message: parse the form, send the message, and show a notice with the message's place
(BROKER:QUEUE:OFFSET).

A browser sends each line end of a text field as CR LF. The console converts it back to LF. So a body that a user sends
unedited does not change. A body in which every byte matters is never read from a text field.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from raymq.common.delay import parse_delay_levels
from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.message import PRIORITY_MAX, Message, MessageExt, SendResult
from raymq.common.numbers import NumberRange
from raymq.tools.console.web.answers import redirect, wants_json
from raymq.tools.console.web.changes import Form, audited
from raymq.tools.console.web.console import notify

SEND_DELAY_MAX_MS: Final = 40 * 86_400_000
_PRIORITY: Final = NumberRange(0, PRIORITY_MAX)


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The parsed fields of a form that sends a message. If `delay_ms` is 0, the message is sent without a delay; if
    `priority` is None, without a priority."""

    topic: str
    body: bytes
    tags: str | None
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    delay_ms: int
    priority: int | None = None

    def message(self, now_ms: int) -> Message:
        """Build the message to send at time `now_ms` (ms since 1970). Raises IllegalNameError or MessageIllegalError if
        the fields are not a valid message."""
        deliver_at_ms = now_ms + self.delay_ms if self.delay_ms else None
        return Message(
            self.topic,
            self.body,
            self.tags,
            self.keys,
            dict(self.properties),
            deliver_at_ms=deliver_at_ms,
            priority=self.priority,
        )


def new_message(topic: str, form: Form) -> MessageForm:
    """Parse a form for a new message with the fields body, tags, keys (separated by spaces), properties (one NAME=VALUE
    per line), delay and priority. Raises InvalidArgumentError if a field is missing or invalid."""
    return MessageForm(
        topic,
        _body(form),
        form.text("tags") or None,
        tuple(form.text("keys").split()),
        parse_properties(form.raw("properties")),
        parse_delay_ms(form.text("delay")),
        form.number("priority", "The priority", _PRIORITY),
    )


def message_again(form: Form, message: MessageExt) -> MessageForm:
    """Parse a form that sends a copy of `message`, with the fields topic and delay, and the field body if `edited` is
    set. The copy has the message's priority, unless it is delayed. Raises InvalidArgumentError if a field is missing or
    invalid."""
    delay_ms, priority = parse_delay_ms(form.text("delay")), message.priority
    return MessageForm(
        form.needed("topic", "the topic"),
        _body(form) if form.text("edited") else message.body,
        message.tags,
        tuple(message.keys),
        dict(message.properties),
        delay_ms,
        None if delay_ms or priority is None else min(priority, PRIORITY_MAX),
    )


async def send_and_go_back(request: Request, action: str, message: MessageForm, back: str) -> Response:
    """Send a message once, and redirect the browser to the page `back`. The audit log contains the size of the message,
    but not its body."""
    arguments = {"topic": message.topic, "bytes": len(message.body), "delay_ms": message.delay_ms or None}
    try:
        sent: SendResult = await audited(
            request,
            action,
            arguments,
            lambda cluster: cluster.producer.send(message.message(time.time_ns() // 1_000_000)),
        )
    except RaymqError as error:
        if wants_json(request):
            return JSONResponse({"outcome": str(error)}, 409)
        notify(request, "failed", f"The message was not sent: {error}")
        return redirect(request, back)
    if wants_json(request):
        place = f"{sent.queue.broker_name}:{sent.queue.queue_id}:{sent.queue_offset}"
        return JSONResponse({"outcome": "done", "message_id": sent.message_id, "place": place})
    when = (
        f"waits for {message.delay_ms // 1000} s"
        if message.delay_ms
        else f"is at {sent.queue.broker_name}:{sent.queue.queue_id}:{sent.queue_offset}"
    )
    notify(request, "done", f"Sent: message {sent.message_id} of topic {message.topic} {when}.")
    return redirect(request, back)


def parse_properties(text: str) -> dict[str, str]:
    """Parse message properties from lines of the form NAME=VALUE. Raises InvalidArgumentError if a line has another
    form."""
    properties: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, separator, value = line.partition("=")
        if not separator or not name.strip():
            raise InvalidArgumentError(f"property {line!r} must be NAME=VALUE, one property per line")
        properties[name.strip()] = value.strip()
    return properties


def parse_delay_ms(text: str) -> int:
    """Parse a delay such as 30s, 5m, 2h or 1d and return it in ms; 0 for an empty text or "0". Raises
    InvalidArgumentError if the text is not a delay of at most 40 days."""
    text = text.strip().removeprefix("+")
    if not text or text == "0":
        return 0
    [delay_ms, *more] = parse_delay_levels(text)
    if more or delay_ms > SEND_DELAY_MAX_MS:
        raise InvalidArgumentError(f"{text!r} is not a delay of at most 40 days: write 30s, 5m, 2h or 1d")
    return delay_ms


def _body(form: Form) -> bytes:
    body = form.raw("body").replace("\r\n", "\n")
    if not body:
        raise InvalidArgumentError("the body is empty; a message needs at least one byte")
    return body.encode(errors="surrogatepass")
