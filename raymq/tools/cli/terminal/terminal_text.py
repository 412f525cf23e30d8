"""Texts from outside, made safe for a terminal.

A body, a key or an error may hold any text. A control character that is sent to a terminal moves the cursor, renames
the window or turns the direction of writing, so that text looks like something else. Such characters are shown as
Python writes them in a string: \\x1b, \\n, \\u202e.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any, Final

_ESCAPED_CATEGORIES: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode's control, format (directions among them), surrogate, line and paragraph separator characters."""

_JOINERS: Final = frozenset("\u200c\u200d")
"""Format characters that ordinary text needs: Persian words, and emoji made of several."""


def printable(text: str) -> str:
    """`text` in one line, with every control character escaped; all other characters are unchanged."""
    if text.isprintable():
        return text
    return "".join(_python_escape(char) if _is_unsafe(char) else char for char in text)


def json_text(value: Any) -> str:
    """`value` as JSON in one line, readable and without control characters; it can be read back unchanged."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(_json_escape(char) if _is_unsafe(char) else char for char in text)


def error_text(text: str) -> str:
    """`text` for an error: as `printable`, but its lines are kept, those after the first indented."""
    return "\n  ".join(printable(line) for line in text.rstrip("\n").split("\n"))


def _is_unsafe(char: str) -> bool:
    return unicodedata.category(char) in _ESCAPED_CATEGORIES and char not in _JOINERS


def _python_escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _json_escape(char: str) -> str:
    """The JSON escape of one character; two, if it is outside Unicode's first plane."""
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
