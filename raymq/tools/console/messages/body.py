"""Converts a message's body to text, JSON or hex for people. The result has bounded length, and is harmless whatever
the bytes are.

A body may contain anything: markup, characters that reverse the writing direction, four million bytes of JSON brackets.
These functions return text of bounded length without control characters. A template that escapes markup can show this
text unchanged. The download contains the whole body.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from raymq.common.errors import BodyUnreadableError
from raymq.common.message import MessageExt

BODY_SHOWN_MAX_BYTES: Final = 64 * 1024
"""Maximum number of body bytes that a message page shows."""
JSON_BODY_MAX_BYTES: Final = 1024 * 1024
"""Maximum number of bytes of a body that is parsed as JSON. Longer bodies are shown as text or hex."""
JSON_INDENT_MAX: Final = 40
"""Maximum indentation depth of displayed JSON. Without this limit, a short body of nested brackets would become
megabytes of spaces."""
HEX_ROW_BYTES: Final = 16
PREVIEW_CHARACTERS: Final = 160
"""Maximum number of body characters that a message list shows as a preview."""
UNREADABLE: Final = "cannot be read"
"""The first words of the text that a message list shows for a body that cannot be read."""

_UNSAFE_CATEGORIES: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_HARMLESS: Final = frozenset("\n\t\u200c\u200d")
"""Special characters that message pages show unescaped: line ends, tabs, and the joiners that Persian words and
composed emoji need."""
_JSON_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')


class BodyForm(StrEnum):
    """The form in which a message page shows a body: text, JSON or hex."""

    TEXT = "text"
    JSON = "json"
    HEX = "hex"


@dataclass(frozen=True, slots=True)
class BodyView:
    """A message body prepared for display. `text` is in the form `form`, made from the first `shown` of the body's
    `size` bytes. `cut`: True if the text does not contain the whole body."""

    form: BodyForm
    text: str
    shown: int
    size: int
    cut: bool


def view_body(body: bytes, form: BodyForm | None = None) -> BodyView:
    """Convert a message body for display in the given form. Without a form, JSON is chosen if the body is JSON, else
    text if the whole body is text, else hex.

    If the form is JSON, but the body is not JSON, the body is shown as text. The form text shows bytes that are not
    UTF-8 as U+FFFD.
    """
    if form is None or form is BodyForm.JSON:
        tokens = _json_tokens(body)
        if tokens is not None:
            text, cut = _indented(tokens)
            return BodyView(BodyForm.JSON, text, len(body), len(body), cut)
        form = BodyForm.TEXT if form is BodyForm.JSON or is_text(body) else BodyForm.HEX
    part = body[:BODY_SHOWN_MAX_BYTES]
    text = hex_rows(part) if form is BodyForm.HEX else visible(_decoded(part, whole=len(part) == len(body)))
    return BodyView(form, text, len(part), len(body), len(part) < len(body))


def preview_of(message: MessageExt, length: int = PREVIEW_CHARACTERS) -> str:
    """Return a preview of a message's body (`preview`), or the reason why the body cannot be read. The body is
    decompressed only as far as needed.

    Damage after the decompressed part is not detected; the message's own page reads the whole body.
    """
    try:
        return preview(message._body_prefix(4 * length + 1), length)
    except BodyUnreadableError as error:
        return f"{UNREADABLE}: {visible(error.reason)}"


def preview(body: bytes, length: int = PREVIEW_CHARACTERS) -> str:
    """Return the first characters of a body as one line of at most `length` characters; hex digits if the bytes are not
    text. `body` may be only the first 4 * `length` + 1 bytes of a longer body."""
    part = body[: 4 * length]
    if not is_text(part, whole=len(part) == len(body)):
        text = part[: length // 3].hex(" ")
        return text + " …" if len(body) > length // 3 else text
    text = " ".join(visible(_decoded(part, whole=len(part) == len(body))).split())
    return text[: length - 1] + "…" if len(text) > length or len(part) < len(body) else text


def is_text(body: bytes, *, whole: bool = True) -> bool:
    """Return True if the body is UTF-8 and has no control characters except line ends and tabs. If `whole` is False,
    the body may end in the middle of a character."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(body, final=whole)
    except UnicodeDecodeError:
        return False
    return re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text) is None


def visible(text: str) -> str:
    """`text` with its control characters, directions of writing among them, as Python writes them in a string:
    \\x1b, \\u202e. Ends of lines and tabs stay."""
    text = text.replace("\r\n", "\n")
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in _UNSAFE_CATEGORIES and char not in _HARMLESS
        else char
        for char in text
    )


def hex_rows(body: bytes) -> str:
    """Return a hex dump of `body` in rows of 16 bytes. A row has its offset, the bytes in hex, and the printable ASCII
    characters."""
    width = 3 * HEX_ROW_BYTES - 1
    rows = []
    for start in range(0, len(body), HEX_ROW_BYTES):
        row = body[start : start + HEX_ROW_BYTES]
        chars = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        rows.append(f"{start:08x}  {row.hex(' '):<{width}}  {chars}")
    return "\n".join(rows)


def _decoded(part: bytes, *, whole: bool) -> str:
    """Decode the first bytes of a body as text. If `whole` is False and the bytes end in the middle of a character,
    this character is left out."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(part, final=whole)


def _json_tokens(body: bytes) -> Iterator[str] | None:
    """Return the tokens of a body that is a JSON object or list. Each token has the spelling that it has in the body.
    Returns None for any other body."""
    if len(body) > JSON_BODY_MAX_BYTES or body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        text = body.decode()
        json.loads(text, parse_int=len, parse_float=len)  # accept JSON numbers of any length without converting them
    except (ValueError, RecursionError):
        return None
    return (match[0] for match in _JSON_TOKEN.finditer(text))


def _indented(tokens: Iterable[str]) -> tuple[str, bool]:
    """Format JSON tokens in indented lines, one value per line, without changing a token. Returns the text, and True if
    the text was cut at its limit."""
    parts: list[str] = []
    depth = length = 0
    before = ""
    for token in tokens:
        closes = token in ("]", "}")
        depth -= closes
        is_empty = closes and before in ("[", "{")
        begins_line = closes or before in ("[", "{", ",")
        indent = "\n" + "  " * min(depth, JSON_INDENT_MAX) if begins_line and not is_empty else ""
        part = indent + visible(token) + (" " if token == ":" else "")
        depth += token in ("[", "{")
        parts.append(part)
        length += len(part)
        if length > BODY_SHOWN_MAX_BYTES:
            return "".join(parts)[:BODY_SHOWN_MAX_BYTES], True
        before = token
    return "".join(parts), False
