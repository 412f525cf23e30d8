"""A message as commands of `raymq`, to be pasted into a shell."""

from __future__ import annotations

import shlex
from typing import Final

from raymq.common.message import MessageExt
from raymq.tools.console.messages.fields import place_of

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
