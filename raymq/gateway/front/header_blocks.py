"""HeaderReader decodes the header blocks of one connection and checks them; `header_block` encodes answers' headers.

Blocks of answers use no dynamic table. So each block is encoded once for all connections, and a client may choose any
size of the table.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from hpack import Decoder, Encoder, HPACKError

from raymq.gateway.front.frames import Http2Code, Http2ConnectionError, Http2StreamError

HEADERS_BYTES_MAX: Final = 16 * 1024
"""Maximum size in bytes of a request's headers. HPACK counts 32 bytes more for each header."""
BLOCK_BYTES_MAX: Final = 64 * 1024
"""Size in bytes of a header block, and of its decoded headers, at which the connection ends. Smaller headers that are
too large end their call only."""
DROP_TABLE: Final = b"\x20"
"""The first byte of a block after which the dynamic table has size 0."""
_HEADER_EXTRA_BYTES: Final = 32

_ILLEGAL_VALUE: Final = re.compile(rb"[\0\r\n]")
_LEGAL_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_REQUEST_FIELDS: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_NEEDED_FIELDS: Final = (b":method", b":scheme", b":path")
_CONNECTION_FIELDS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)

# its lines for debugging show whole headers, also signatures
logging.getLogger("hpack").setLevel(logging.INFO)


class RequestHeaders(NamedTuple):
    """The headers of a request. `fields`: the headers by name, with the pseudo-headers such as ``:path``; the last
    value of a name counts. `is_large`: True if the headers exceed HEADERS_BYTES_MAX."""

    fields: dict[bytes, bytes]
    is_large: bool


class HeaderReader:
    """Decodes the header blocks of one connection, in the order in which they arrive."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=BLOCK_BYTES_MAX)

    def request(self, block: bytes) -> RequestHeaders:
        """Return the headers in the block that begins a request. Raises Http2ConnectionError if the block cannot be
        decoded, and Http2StreamError if a header is illegal."""
        decoded = self._decoded(block)
        fields: dict[bytes, bytes] = {}
        size, regular = 0, False
        for name, value in decoded:
            size += len(name) + len(value) + _HEADER_EXTRA_BYTES
            if name.startswith(b":"):
                if regular or name in fields or name not in _REQUEST_FIELDS:
                    raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "a pseudo-header is unknown, late or repeated")
            else:
                regular = True
            fields[name] = value
        _check_regular(decoded)
        if any(not fields.get(name) for name in _NEEDED_FIELDS):
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "a pseudo-header is missing")
        return RequestHeaders(fields, size > HEADERS_BYTES_MAX)

    def trailers(self, block: bytes) -> None:
        """Check the block that ends a request. Raises the errors of `request`."""
        decoded = self._decoded(block)
        if any(name.startswith(b":") for name, _ in decoded):
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "trailers have a pseudo-header")
        _check_regular(decoded)

    def skip(self, block: bytes) -> None:
        """Decode a block that nobody needs: later blocks refer to its headers. Raises Http2ConnectionError if the block
        cannot be decoded."""
        self._decoded(block)

    def _decoded(self, block: bytes) -> Sequence[tuple[bytes, bytes]]:
        try:
            return list(self._decoder.decode(block, raw=True))
        # a block may also end inside a number or a Huffman code, which hpack shows as an IndexError
        except (HPACKError, IndexError) as error:
            raise Http2ConnectionError(Http2Code.COMPRESSION_ERROR, f"a header block is malformed: {error}") from None


def _check_regular(fields: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise Http2StreamError if a header is illegal in HTTP/2."""
    for name, value in fields:
        if not _is_legal(name) or (name == b"te" and value.lower() != b"trailers"):
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "a header is illegal in HTTP/2")
    if _ILLEGAL_VALUE.search(b"".join([value for _, value in fields])):
        raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "the value of a header has a line end or a zero byte")


@lru_cache(maxsize=1024)
def _is_legal(name: bytes) -> bool:
    if name.startswith(b":"):
        return name in _REQUEST_FIELDS
    return name not in _CONNECTION_FIELDS and _LEGAL_NAME.fullmatch(name) is not None


def header_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the block of some headers. It uses no dynamic table, so it is legal on each connection at any time."""
    return Encoder().encode([(name, value, True) for name, value in fields])
