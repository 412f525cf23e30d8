"""Builds and checks single frames of HTTP/2 (RFC 9113), without the state of a connection."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of each client."""
FRAME_HEADER_BYTES: Final = 9
PLAIN_FRAME_BYTES: Final = 16_384
"""Maximum size in bytes of a frame's payload, until a peer allows more."""
FRAME_BYTES_MAX: Final = 128 * 1024
"""Maximum size in bytes of a client's frame, without its header."""
WINDOW_START: Final = 65_535
"""First size in bytes of each flow-control window."""
WINDOW_MAX: Final = 2**31 - 1
STREAM_ID_MAX: Final = 2**31 - 1
SETTINGS_COUNT_MAX: Final = 100
"""Maximum number of values in one frame of settings."""

DATA_FRAME: Final = 0
HEADERS_FRAME: Final = 1
PRIORITY_FRAME: Final = 2
RESET_FRAME: Final = 3
SETTINGS_FRAME: Final = 4
PUSH_FRAME: Final = 5
PING_FRAME: Final = 6
GOAWAY_FRAME: Final = 7
WINDOW_FRAME: Final = 8
CONTINUATION_FRAME: Final = 9

END_STREAM: Final = 0x1
ACK_FLAG: Final = 0x1
END_HEADERS: Final = 0x4
PADDED_FLAG: Final = 0x8
PRIORITY_FLAG: Final = 0x20

_PRIORITY_BYTES: Final = 5
_SETTING: Final = struct.Struct(">HI")
_U32: Final = struct.Struct(">I")


class Http2Code(IntEnum):
    """The error codes of RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Setting(IntEnum):
    """The settings of RFC 9113, section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Http2ConnectionError(Exception):
    """A client breaks a rule of HTTP/2 so that its connection ends. `code`: the code that the client gets."""

    def __init__(self, code: Http2Code, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Http2StreamError(Exception):
    """A client breaks a rule of HTTP/2 so that one stream ends. `code`: the code that the client gets."""

    def __init__(self, code: Http2Code, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class FrameShape(NamedTuple):
    """The shape of a kind of frame. `has_stream`: True if it names a stream; None if it may.

    `size_min`, `size_max`: the bounds of the payload in bytes.
    """

    name: str
    has_stream: bool | None
    size_min: int
    size_max: int


_SHAPES: Final = {
    PRIORITY_FRAME: FrameShape("PRIORITY", True, _PRIORITY_BYTES, _PRIORITY_BYTES),
    RESET_FRAME: FrameShape("RST_STREAM", True, 4, 4),
    SETTINGS_FRAME: FrameShape("SETTINGS", False, 0, FRAME_BYTES_MAX),
    PING_FRAME: FrameShape("PING", False, 8, 8),
    GOAWAY_FRAME: FrameShape("GOAWAY", False, 8, FRAME_BYTES_MAX),
    WINDOW_FRAME: FrameShape("WINDOW_UPDATE", None, 4, 4),
}


def check_shape(kind: int, stream_id: int, payload: bytes) -> None:
    """Raise Http2ConnectionError if a frame of `kind` cannot have this stream, or a payload of this size."""
    shape = _SHAPES[kind]
    if shape.has_stream is not None and shape.has_stream != bool(stream_id):
        has = "a stream" if stream_id else "no stream"
        raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, f"a frame {shape.name} has {has}")
    if not shape.size_min <= len(payload) <= shape.size_max:
        raise Http2ConnectionError(Http2Code.FRAME_SIZE_ERROR, f"a frame {shape.name} has a wrong size")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def settings_frame(values: dict[Setting, int]) -> bytes:
    return frame(SETTINGS_FRAME, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


def window_frame(stream_id: int, increment: int) -> bytes:
    """Return a frame that lets the client send more bytes. `stream_id` 0: on all streams together."""
    return frame(WINDOW_FRAME, 0, stream_id, _U32.pack(increment))


def reset_frame(stream_id: int, code: Http2Code) -> bytes:
    return frame(RESET_FRAME, 0, stream_id, _U32.pack(code))


def goaway_frame(last_stream_id: int, code: Http2Code, reason: str) -> bytes:
    """Return a frame that ends a connection. `last_stream_id`: the last stream that the server serves. `reason`: a text
    for the client's log."""
    return frame(GOAWAY_FRAME, 0, 0, _U32.pack(last_stream_id) + _U32.pack(code) + reason.encode("ascii", "replace"))


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yield the numbers and values in a frame of settings, also of unknown settings. Raises Http2ConnectionError at a
    value that a known setting cannot have."""
    if len(payload) % _SETTING.size:
        raise Http2ConnectionError(Http2Code.FRAME_SIZE_ERROR, "a frame of settings has a wrong size")
    if len(payload) > SETTINGS_COUNT_MAX * _SETTING.size:
        raise Http2ConnectionError(Http2Code.ENHANCE_YOUR_CALM, "too many settings in a frame")
    for name, value in _SETTING.iter_unpack(payload):
        if name == Setting.ENABLE_PUSH and value > 1:
            raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        if name == Setting.INITIAL_WINDOW_SIZE and value > WINDOW_MAX:
            raise Http2ConnectionError(Http2Code.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
        if name == Setting.MAX_FRAME_SIZE and not PLAIN_FRAME_BYTES <= value < 1 << 24:
            raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of bounds")
        yield name, value


def read_u32(payload: bytes) -> int:
    """Return the number that is the whole payload of a frame."""
    number: int = _U32.unpack(payload)[0]
    return number


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return the payload of a frame without its padding. Raises Http2ConnectionError if the padding is too long."""
    if not flags & PADDED_FLAG:
        return payload
    if not payload:
        raise Http2ConnectionError(Http2Code.FRAME_SIZE_ERROR, "a padded frame is empty")
    end = len(payload) - payload[0]
    if end < 1:
        raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, "the padding is longer than its frame")
    return payload[1:end]


def header_fragment(flags: int, payload: bytes) -> bytes:
    """Return the part of a header block in a HEADERS frame. Raises Http2ConnectionError if the frame is malformed."""
    payload = without_padding(flags, payload)
    if not flags & PRIORITY_FLAG:
        return payload
    if len(payload) < _PRIORITY_BYTES:
        raise Http2ConnectionError(Http2Code.FRAME_SIZE_ERROR, "a HEADERS frame is too short for its priority")
    return payload[_PRIORITY_BYTES:]
