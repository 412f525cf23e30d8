"""Reads text and numbers as Java does. Tag codes, index keys and delay levels on disk depend on these rules."""

from __future__ import annotations

import re
from typing import Final

_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
_REPLACEMENT: Final = "\ufffd".encode()
_NUMBER: Final = re.compile(r"[+-]?\d{1,18}")


def decode_utf8(data: bytes) -> str:
    """Decode bytes as Java's `new String(data, UTF_8)`: malformed bytes become replacement characters.

    The result differs from Python's `errors="replace"` if the bytes contain an encoded surrogate (ED A0 80 to ED BF BF,
    even truncated). Java replaces the whole surrogate by one replacement character; Python replaces each byte.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _SURROGATE.sub(_REPLACEMENT, data).decode("utf-8", "replace")


def parse_number(text: str | None) -> int | None:
    """Parse an integer of at most 18 digits, with or without a sign, as Java's `Long.parseLong` does. Returns None for
    other text."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None
