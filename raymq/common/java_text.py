"""Reads text and numbers as Java does, because bytes on disk follow from it: tag codes, index keys, delay levels."""

from __future__ import annotations

import re
from typing import Final

_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
_REPLACEMENT: Final = "\ufffd".encode()
_NUMBER: Final = re.compile(r"[+-]?\d{1,18}")


def decode_utf8(data: bytes) -> str:
    """The text that `new String(data, UTF_8)` gives: malformed bytes become replacement characters.

    As Python's "replace" but for an encoded surrogate (ED A0 80 to ED BF BF, also cut short): one replacement character
    in Java, one for each byte in Python.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _SURROGATE.sub(_REPLACEMENT, data).decode("utf-8", "replace")


def parse_number(text: str | None) -> int | None:
    """The whole number of at most 18 digits that `Long.parseLong` reads, which may have a sign; None for all else."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None
