"""Headers of lane frames, and the encoding of errors in frames. A lane is a direct socket connection to a
server."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final
from zlib import crc32

import msgspec

from raymq.common import errors
from raymq.common.errors import RaymqError, ServiceNotAvailableError

HEADER: Final = struct.Struct("<IBBHQ")
"""Format of a frame header: payload length in bytes, kind, flags, count, correlation."""
CHECKED_HEADER: Final = struct.Struct("<IBBHQI")
"""Format of a frame header on TCP. This header ends with the CRC-32 of its other fields."""
_CRC: Final = struct.Struct("<I")

PAYLOAD_MAX: Final = 2**32 - 1
COUNT_MAX: Final = 2**16 - 1
FLAG_ERROR: Final = 1
"""Header flag of an answer whose payload is an error."""

Buffer = bytes | bytearray | memoryview


CORRELATION: Final = struct.Struct("<Q")
"""Format of the payload of a LEAVE frame: the correlation of the request whose answer nobody waits for any more."""


class FrameKind(IntEnum):
    """The kinds of frames that storage actors serve. Other servers define their own kinds, with numbers from OTHER on.

    Each server takes a LEAVE frame: it ends an earlier request of the same connection if the request's handler can do
    so (`LaneRequest.when_gone`). The request gets its answer as usual; the LEAVE frame gets none.
    """

    OPEN = 1
    APPEND = 2
    FETCH = 3
    WAIT = 4
    CALL = 5
    READ_LOG = 6
    APPEND_LOG = 7
    ACK_LOG = 8
    LEAVE = 9
    OTHER = 16


Fields = tuple[int, int, int, int, int]
"""The fields of a frame header: payload length in bytes, kind, flags, count, correlation."""


class ProtocolError(OSError):
    """Raised if the peer of a lane (direct socket connection) sent bytes that are not a frame, or sent an unexpected
    frame. The lane must be closed."""


def pack_header(length: int, kind: int, flags: int, count: int, correlation: int, *, checked: bool) -> bytes:
    """Encode a frame header, with a CRC if `checked`. Raises struct.error if a number does not fit into its
    field."""
    header = HEADER.pack(length, kind, flags, count, correlation)
    return header + _CRC.pack(crc32(header)) if checked else header


def unpack_header(buffer: Buffer, at: int, *, checked: bool) -> Fields:
    """Decode the frame header at offset `at` of a buffer that contains the whole header. Raises ProtocolError if the
    header's CRC is wrong."""
    if not checked:
        return HEADER.unpack_from(buffer, at)
    length, kind, flags, count, correlation, crc = CHECKED_HEADER.unpack_from(buffer, at)
    if crc32(memoryview(buffer)[at : at + HEADER.size]) != crc:
        raise ProtocolError("the header of a received frame is damaged")
    return length, kind, flags, count, correlation


class ReceivedBytes:
    """The received bytes of one connection that are not yet handled, and their split into frames. Pure.

    `checked`: true if the frame headers have a CRC. `payload_max`: the maximum payload of a frame in bytes.
    """

    def __init__(self, *, checked: bool, payload_max: int) -> None:
        self._checked, self._payload_max = checked, payload_max
        self._header_bytes = CHECKED_HEADER.size if checked else HEADER.size
        self._data = bytearray()

    def add(self, data: Buffer) -> None:
        """Add bytes that arrived."""
        self._data += data

    def take(self, size: int) -> bytes | None:
        """Return the first `size` bytes, and remove them; None if fewer bytes are there."""
        return self._cut(0, size) if len(self._data) >= size else None

    def take_frame(self) -> tuple[Fields, bytes] | None:
        """Return the header fields and the payload of the first frame, and remove the frame; None if the frame is not
        complete.

        Raises ProtocolError if the header's CRC is wrong, or if the payload is longer than `payload_max`.
        """
        start = self._header_bytes
        if len(self._data) < start:
            return None
        fields = unpack_header(self._data, 0, checked=self._checked)
        size = fields[0]
        if size > self._payload_max:
            raise ProtocolError(f"a received frame has {size} bytes; at most {self._payload_max} are allowed")
        return (fields, self._cut(start, start + size)) if len(self._data) >= start + size else None

    def _cut(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, and remove all bytes before `stop`."""
        with memoryview(self._data) as view:
            found = bytes(view[start:stop])
        del self._data[:stop]
        return found


_ERRORS: Final[Mapping[str, type[RaymqError]]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RaymqError)
}
"""The error classes that a lane can transmit, by class name."""


def encode_error(error: BaseException) -> bytes:
    """Encode an error as the payload of an answer frame."""
    name = type(error).__name__
    try:
        return msgspec.msgpack.encode((name, error.args, str(error)))
    # An argument of the error cannot be encoded by msgpack, so send only the error's text.
    except (TypeError, OverflowError, ValueError):
        return msgspec.msgpack.encode((name, None, str(error)))


def decode_error(payload: Buffer) -> RaymqError:
    """Decode the error in the payload of an answer.

    An error of raymq.common.errors is rebuilt. Any other error becomes a ServiceNotAvailableError with the error's name
    and text.
    """
    try:
        name, arguments, text = msgspec.msgpack.decode(payload, type=tuple[str, list[Any] | None, str])
    except msgspec.DecodeError as error:
        return ServiceNotAvailableError(f"cannot decode the error in a server's answer: {error}")
    kind = _ERRORS.get(name)
    if kind is not None and arguments is not None:
        try:
            return kind(*arguments)
        except Exception:  # A server with another version of raymq may give this error class other arguments.
            return ServiceNotAvailableError(f"{name}: {text}")
    return ServiceNotAvailableError(f"{name}: {text}")
