"""The bytes of an HTTP/2 client, made frame by frame, and a server's bytes as frames."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hpack import Decoder, Encoder

from raymq.gateway.front.frames import (
    ACK_FLAG,
    CONTINUATION_FRAME,
    DATA_FRAME,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER_BYTES,
    HEADERS_FRAME,
    PREFACE,
    SETTINGS_FRAME,
    Setting,
    frame,
    settings_frame,
)

NEEDED = ((":method", "POST"), (":scheme", "http"), (":path", "/s/echo"))
GRPC = (*NEEDED, ("content-type", "application/grpc"), ("te", "trailers"))


class FrameOf(NamedTuple):
    """One frame of a server."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def number(self) -> int:
        """The last 4 bytes of the payload as a number: the code of a reset, the increment of a window."""
        return int(struct.unpack(">I", self.payload[-4:])[0])


def frames_in(data: bytes) -> Iterator[FrameOf]:
    """Yield the frames in a server's bytes, which are whole frames."""
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 3], "big")
        body = position + FRAME_HEADER_BYTES
        assert body + size <= len(data), "a frame is incomplete"
        stream_id = int.from_bytes(data[position + 5 : body], "big")
        yield FrameOf(data[position + 3], data[position + 4], stream_id, data[body : body + size])
        position = body + size


def message(data: bytes, *, compressed: bool = False) -> bytes:
    """Return a message of gRPC with its prefix."""
    return bytes([compressed]) + len(data).to_bytes(4, "big") + data


class Http2Bytes:
    """Makes the bytes of one client, and decodes the headers of its server."""

    def __init__(self, settings: Mapping[Setting, int] | None = None) -> None:
        self.greeting = PREFACE + settings_frame(dict(settings or {})) + frame(SETTINGS_FRAME, ACK_FLAG, 0)
        self._encoder, self.decoder = Encoder(), Decoder()

    def block(self, *fields: tuple[str, str]) -> bytes:
        return self._encoder.encode(fields)

    def request(self, stream_id: int, *fields: tuple[str, str], end: bool = False, parts: int = 1) -> bytes:
        """Return the headers of a request. `parts`: number of frames with them."""
        block = self.block(*(fields or GRPC))
        size = -(-len(block) // parts)
        pieces = [block[first : first + size] for first in range(0, len(block), size)]
        last = len(pieces) - 1
        made = b""
        for number, piece in enumerate(pieces):
            flags = (END_STREAM if end and not number else 0) | (END_HEADERS if number == last else 0)
            made += frame(CONTINUATION_FRAME if number else HEADERS_FRAME, flags, stream_id, piece)
        return made

    def call(self, stream_id: int, data: bytes, *fields: tuple[str, str]) -> bytes:
        """Return a whole call with one message."""
        return self.request(stream_id, *fields) + frame(DATA_FRAME, END_STREAM, stream_id, message(data))

    def fields(self, one: FrameOf) -> dict[str, str]:
        """Return the headers in a frame of the server. Each frame with headers is decoded once, in order."""
        assert one.kind == HEADERS_FRAME
        return {name.decode(): value.decode() for name, value in self.decoder.decode(one.payload, raw=True)}
