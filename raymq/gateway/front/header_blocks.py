"""HeaderReader decodes the header blocks of one connection and checks them; `header_block` encodes answers' headers.

Blocks of answers use no dynamic table. So each block is encoded once for all connections, and a client may choose any
size of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from hpack import Encoder, HPACKDecodingError

from raymq.gateway.front.frames import Http2Code, Http2ConnectionError, Http2StreamError
from raymq.gateway.front.header_decoder import HeaderDecoder

HEADERS_BYTES_MAX: Final = 16 * 1024
"""Maximum size in bytes of a request's headers. HPACK counts 32 bytes more for each header."""
BLOCK_BYTES_MAX: Final = 64 * 1024
"""Size in bytes of a header block, and of its decoded headers, at which the connection ends. Smaller headers that are
too large end their call only."""
_CACHED_NAMES_MAX: Final = 64
"""Number of headers up to which the check of their names is kept for the next request."""
DROP_TABLE: Final = b"\x20"
"""The first byte of a block after which the dynamic table has size 0."""

_ILLEGAL_VALUE: Final = re.compile(rb"[\0\r\n]")
_LEGAL_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_REQUEST_FIELDS: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_NEEDED_FIELDS: Final = frozenset((b":method", b":scheme", b":path"))
_CONNECTION_FIELDS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)


class RequestHeaders(NamedTuple):
    """The headers of a request. `fields`: the headers by name, with the pseudo-headers such as ``:path``; the last
    value of a name counts. `is_large`: True if the headers exceed HEADERS_BYTES_MAX."""

    fields: dict[bytes, bytes]
    is_large: bool


class HeaderReader:
    """Decodes the header blocks of one connection, in the order in which they arrive."""

    def __init__(self) -> None:
        self._decoder = HeaderDecoder(BLOCK_BYTES_MAX)

    def request(self, block: bytes) -> RequestHeaders:
        """Return the headers in the block that begins a request. Raises Http2ConnectionError if the block cannot be
        decoded, and Http2StreamError if a header is illegal."""
        decoded = self._decoded(block)
        names = tuple([name for name, _ in decoded])
        fault = _fault(names) if len(names) <= _CACHED_NAMES_MAX else _fault.__wrapped__(names)
        if fault:
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, fault)
        fields = dict(decoded)
        if not (fields[b":method"] and fields[b":scheme"] and fields[b":path"]):
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "a pseudo-header is empty")
        _check_values(decoded)
        if fields.get(b"te", b"trailers") != b"trailers":
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "the header te may only name trailers")
        return RequestHeaders(fields, self._decoder.list_bytes > HEADERS_BYTES_MAX)

    def trailers(self, block: bytes) -> None:
        """Check the block that ends a request. Raises the errors of `request`."""
        decoded = self._decoded(block)
        if not all(_is_legal(name) for name, _ in decoded):
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "trailers have a header that is illegal in HTTP/2")
        _check_values(decoded)

    def skip(self, block: bytes) -> None:
        """Decode a block that nobody needs: later blocks refer to its headers. Raises Http2ConnectionError if the block
        cannot be decoded."""
        self._decoded(block)

    def _decoded(self, block: bytes) -> Sequence[tuple[bytes, bytes]]:
        try:
            return self._decoder.decode(block)
        except HPACKDecodingError as error:
            raise Http2ConnectionError(Http2Code.COMPRESSION_ERROR, f"a header block is malformed: {error}") from None


def _check_values(fields: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise Http2StreamError if a value is illegal in HTTP/2."""
    if _ILLEGAL_VALUE.search(b"".join([value for _, value in fields])):
        raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "the value of a header has a line end or a zero byte")


@lru_cache(maxsize=128)
def _fault(names: tuple[bytes, ...]) -> str:
    """Return why a request may not have headers of these names, in this order; empty if it may. A client sends nearly
    always the same names."""
    count = next((number for number, name in enumerate(names) if not name.startswith(b":")), len(names))
    pseudo = set(names[:count])
    if len(pseudo) < count or not pseudo <= _REQUEST_FIELDS or not pseudo >= _NEEDED_FIELDS:
        return "a pseudo-header is unknown, repeated or missing"
    return "" if all(_is_legal(name) for name in names[count:]) else "a header is illegal in HTTP/2, or late"


def _is_legal(name: bytes) -> bool:
    """Return whether a header that is no pseudo-header may have a name."""
    return name not in _CONNECTION_FIELDS and _LEGAL_NAME.fullmatch(name) is not None


def header_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the block of some headers. It uses no dynamic table, so it is legal on each connection at any time."""
    return Encoder().encode([(name, value, True) for name, value in fields])
