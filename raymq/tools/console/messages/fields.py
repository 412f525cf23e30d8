"""A message's fields for pages and files, as harmless texts, with the address of the message's page in the console.

A message's place, BROKER:QUEUE:OFFSET, identifies one record for as long as the record is stored. Several records may
have the same message id.

This module also formats a message as `raymq` commands that can be pasted into a shell.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from raymq.common.errors import BodyUnreadableError
from raymq.common.message import PRIORITY_MAX, MessageExt
from raymq.tools.console.messages.body import is_text, preview_of, visible

HIDDEN_BODY: Final = "hidden from viewers"
MESSAGE_COLUMNS: Final = (
    *("topic", "queue", "queue_offset", "stored_ms", "born_ms", "tags", "keys", "properties"),
    *("message_id", "offset_message_id", "reconsume_times", "body", "body_base64", "error"),
)
"""The columns of a file of exported messages."""
FILE_BODIES_MAX_BYTES: Final = 16 * 1024 * 1024
"""Maximum number of bytes of message bodies in one exported file. The file is built in memory."""


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One row of a message list. Its texts contain no control characters. `address` is the query string of the
    message's page."""

    message: MessageExt
    place: str
    tags: str
    keys: str
    body: str
    address: str

    @property
    def stored_ms(self) -> int:
        """The time at which the broker stored the message, in ms since 1970."""
        return self.message.store_timestamp_ms


def place_of(message: MessageExt) -> str:
    """Return the place of a message (its broker, queue and offset) as BROKER:QUEUE:OFFSET."""
    return f"{message.broker_name}:{message.queue_id}:{message.queue_offset}"


def row_of(message: MessageExt, *, with_body: bool) -> MessageRow:
    """Build the row of a message in a message list. If the user may not see bodies (`with_body` is False), the row has
    HIDDEN_BODY in place of the body."""
    return MessageRow(
        message,
        visible(place_of(message)),
        visible(message.tags or ""),
        visible(" ".join(message.keys)),
        preview_of(message) if with_body else HIDDEN_BODY,
        urlencode({"topic": message.topic, "offset": place_of(message)}),
    )


def file_rows(messages: Iterable[MessageExt], *, with_body: bool) -> list[dict[str, Any]]:
    """Return the rows of an exported file of messages, each built by `file_row`. When the rows have
    FILE_BODIES_MAX_BYTES of bodies, further bodies are left out, and the `error` of their rows states this."""
    rows, left_bytes = [], FILE_BODIES_MAX_BYTES
    for message in messages:
        row = file_row(message, with_body=with_body, max_body_bytes=left_bytes)
        left_bytes -= len(row["body"]) + len(row["body_base64"])
        rows.append(row)
    return rows


def file_row(message: MessageExt, *, with_body: bool, max_body_bytes: int = FILE_BODIES_MAX_BYTES) -> dict[str, Any]:
    """Return a message as a row of an exported file, with the columns MESSAGE_COLUMNS. A body that is not text is in
    base64.

    Both body columns are empty if the user may not see bodies, or if the body is longer than `max_body_bytes` or cannot
    be read. In the last two cases, `error` states the reason.
    """
    body, error = b"", None
    if with_body:
        try:
            body = message.body
        except BodyUnreadableError as problem:
            error = str(problem)
    if len(body) > max_body_bytes:
        size, body = len(body), b""
        error = f"the body of {size} bytes is left out: the file has no space for it, download the message itself"
    readable = is_text(body)
    values = (
        *(message.topic, f"{message.broker_name}:{message.queue_id}", message.queue_offset),
        *(message.store_timestamp_ms, message.born_timestamp_ms, message.tags, list(message.keys)),
        *(dict(message.properties), message.message_id, message.offset_message_id, message.reconsume_times),
        body.decode() if readable else "",
        "" if readable else base64.b64encode(body).decode(),
        error,
    )
    return dict(zip(MESSAGE_COLUMNS, values, strict=True))


def tail_row(message: MessageExt, *, with_body: bool) -> dict[str, str]:
    """Return a message as a row of a live tail. All values are texts; `stored` is the store time in ms since
    1970."""
    row = row_of(message, with_body=with_body)
    return {
        "stored": str(row.stored_ms),
        "place": row.place,
        "tags": row.tags,
        "keys": row.keys,
        "body": row.body,
        "address": row.address,
    }


def visible_map(properties: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a message's properties, sorted by name, with control characters escaped."""
    return sorted((visible(name), visible(value)) for name, value in properties.items())


COMMAND_BODY_MAX_BYTES: Final = 8 * 1024
"""Maximum number of bytes of a body that `send_command` writes into a shell command."""


def query_command(message: MessageExt) -> str:
    """Return the `raymq query` command that shows this message."""
    return shlex.join(["raymq", "query", message.topic, "--offset", place_of(message)])


def send_command(message: MessageExt) -> str | None:
    """Return the `raymq send` command that sends a copy of this message.

    Returns None if the body is too long, or if the body, tags, keys or properties are not one printable line. A
    terminal would execute control characters that are pasted into it.
    """
    if len(message.body) > COMMAND_BODY_MAX_BYTES:
        return None
    try:
        body = message.body.decode()
    except UnicodeDecodeError:
        return None
    words = ["raymq", "send"]
    words += ["--tags", message.tags] if message.tags else []
    for key in message.keys:
        words += ["--key", key]
    words += [] if message.priority is None else ["--priority", str(min(message.priority, PRIORITY_MAX))]
    for name, value in sorted(message.properties.items()):
        words += ["--property", f"{name}={value}"]
    words += ["--", message.topic, body]
    return shlex.join(words) if all(word.isprintable() for word in words) else None
