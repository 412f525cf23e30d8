"""A message's fields for pages and files: harmless texts, and its address in the console.

The place of a message, BROKER:QUEUE:OFFSET, names one record for as long as it is kept; ids may name several.

A message as commands of `raymq`, to be pasted into a shell.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from raymq.common.errors import BodyUnreadableError
from raymq.common.message import MessageExt
from raymq.tools.console.messages.body import is_text, preview_of, visible

HIDDEN_BODY: Final = "hidden from viewers"
MESSAGE_COLUMNS: Final = (
    *("topic", "queue", "queue_offset", "stored_ms", "born_ms", "tags", "keys", "properties"),
    *("message_id", "offset_message_id", "reconsume_times", "body", "body_base64", "error"),
)
"""The columns of a message in a file."""
FILE_BODIES_MAX_BYTES: Final = 16 * 1024 * 1024
"""The most bytes of bodies in a file, which is made in memory."""


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in a list. All texts are without control characters; `address` is the query of its page."""

    message: MessageExt
    place: str
    tags: str
    keys: str
    body: str
    address: str

    @property
    def stored_ms(self) -> int:
        """When it was stored, ms since 1970."""
        return self.message.store_timestamp_ms


def place_of(message: MessageExt) -> str:
    """BROKER:QUEUE:OFFSET of a message."""
    return f"{message.broker_name}:{message.queue_id}:{message.queue_offset}"


def row_of(message: MessageExt, *, with_body: bool) -> MessageRow:
    """A message in a list; its body is replaced by HIDDEN_BODY for those who may not see it."""
    return MessageRow(
        message,
        visible(place_of(message)),
        visible(message.tags or ""),
        visible(" ".join(message.keys)),
        preview_of(message) if with_body else HIDDEN_BODY,
        urlencode({"topic": message.topic, "offset": place_of(message)}),
    )


def file_rows(messages: Iterable[MessageExt], *, with_body: bool) -> list[dict[str, Any]]:
    """Messages in a file, each as `file_row`. The file has bodies of FILE_BODIES_MAX_BYTES in all; each further body is
    left out, and its row's `error` says so."""
    rows, left_bytes = [], FILE_BODIES_MAX_BYTES
    for message in messages:
        row = file_row(message, with_body=with_body, max_body_bytes=left_bytes)
        left_bytes -= len(row["body"]) + len(row["body_base64"])
        rows.append(row)
    return rows


def file_row(message: MessageExt, *, with_body: bool, max_body_bytes: int = FILE_BODIES_MAX_BYTES) -> dict[str, Any]:
    """A message in a file, by MESSAGE_COLUMNS: a body that is no text is in base64; both are empty if it is hidden.

    They are empty, too, for a body that is longer than `max_body_bytes` or cannot be read: then `error` says why.
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
    """A message of a tail, all texts; the stored time in ms since 1970."""
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
    """Properties by name, without control characters."""
    return sorted((visible(name), visible(value)) for name, value in properties.items())


COMMAND_BODY_MAX_BYTES: Final = 8 * 1024
"""A longer body is not written into a command."""


def query_command(message: MessageExt) -> str:
    """The command that shows the message."""
    return shlex.join(["raymq", "query", message.topic, "--offset", place_of(message)])


def send_command(message: MessageExt) -> str | None:
    """The command that sends the same message again.

    None for a body that is long or no printable line, and for tags, keys or properties of that kind: a terminal does
    what control characters say when they are pasted.
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
    for name, value in sorted(message.properties.items()):
        words += ["--property", f"{name}={value}"]
    words += ["--", message.topic, body]
    return shlex.join(words) if all(word.isprintable() for word in words) else None
