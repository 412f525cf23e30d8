"""FrameReader splits the bytes of one HTTP/2 client into frames, and joins the parts of a header block.

It checks what no single frame shows: the preface, the order of the first frames, the size of frames, and that nothing
interrupts a header block. It has no streams: `Http2Connection` decides what a frame means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from raymq.gateway.front.floods import FloodGuard
from raymq.gateway.front.frames import (
    ACK_FLAG,
    CONTINUATION_FRAME,
    END_HEADERS,
    FRAME_BYTES_MAX,
    FRAME_HEADER_BYTES,
    HEADERS_FRAME,
    PREFACE,
    SETTINGS_FRAME,
    STREAM_ID_MAX,
    Http2Code,
    Http2ConnectionError,
    header_fragment,
)
from raymq.gateway.front.header_blocks import BLOCK_BYTES_MAX


class ClientFrame(NamedTuple):
    """One frame of a client. The payload of a HEADERS frame is a whole header block, without padding and priority:
    no other frame continues it."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class FrameReader:
    """Reads the frames of one connection. `floods`: counts the frames that carry parts of a header block."""

    def __init__(self, floods: FloodGuard) -> None:
        self._floods = floods
        self._buffer = bytearray()
        """The bytes of a frame that has not wholly arrived."""
        self._needs_preface = True
        self.needs_settings = True
        """True until the client's first settings have arrived."""
        self._block: bytearray | None = None
        """The header block that the next frame must continue; None outside of a header block."""
        self._block_frame = (0, 0)
        """The stream and the flags of the frame that began the header block."""

    def read(self, data: bytes, now_s: float) -> Iterator[ClientFrame]:
        """Yield the whole frames in `data` and in the bytes before it. Raises Http2ConnectionError at a fault; then no
        further bytes can be read."""
        source: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            source = self._buffer
        position = self._after_preface(source)
        end = 0 if self._needs_preface else len(source)
        while end - position >= FRAME_HEADER_BYTES:
            size = int.from_bytes(source[position : position + 3], "big")
            kind, flags = source[position + 3], source[position + 4]
            if size > FRAME_BYTES_MAX:
                raise Http2ConnectionError(Http2Code.FRAME_SIZE_ERROR, "a frame is too large")
            if self.needs_settings and (kind != SETTINGS_FRAME or flags & ACK_FLAG):
                raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, "the first frame has no settings")
            body = position + FRAME_HEADER_BYTES
            if end - body < size:
                break
            self.needs_settings = False
            stream_id = int.from_bytes(source[position + 5 : body], "big") & STREAM_ID_MAX
            position = body + size
            payload = bytes(source[body:position])
            if kind in (HEADERS_FRAME, CONTINUATION_FRAME) or self._block is not None:
                block = self._joined(kind, flags, stream_id, payload, now_s)
                if block is None:
                    continue
                kind, payload, flags = HEADERS_FRAME, block, self._block_frame[1]
            yield ClientFrame(kind, flags, stream_id, payload)
        if source is data:
            self._buffer += memoryview(data)[position:]
        else:
            del self._buffer[:position]

    def _after_preface(self, source: bytes | bytearray) -> int:
        """Return where the first frame begins; 0 if the preface has not wholly arrived. Raises Http2ConnectionError
        unless the client begins with the preface."""
        if not self._needs_preface:
            return 0
        if not PREFACE.startswith(bytes(source[: len(PREFACE)])):
            raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, "the client does not speak HTTP/2")
        if len(source) < len(PREFACE):
            return 0
        self._needs_preface = False
        return len(PREFACE)

    def _joined(self, kind: int, flags: int, stream_id: int, payload: bytes, now_s: float) -> bytes | None:
        """Add a frame to the header block, and return the block if it is whole."""
        if self._block is None:
            if kind == CONTINUATION_FRAME:
                raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, "a continuation follows no header block")
            self._block_frame = stream_id, flags
            fragment = header_fragment(flags, payload)
            if flags & END_HEADERS:
                return _bounded(fragment)
            self._block = bytearray(fragment)
            return None
        if kind != CONTINUATION_FRAME or stream_id != self._block_frame[0]:
            raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, "a header block is interrupted")
        # many small frames may carry one block, as a flood would
        self._floods.idle_frame(now_s)
        self._block += payload
        block = _bounded(self._block)
        if not flags & END_HEADERS:
            return None
        self._block = None
        return bytes(block)


_Block = TypeVar("_Block", bytes, bytearray)


def _bounded(block: _Block) -> _Block:
    if len(block) > BLOCK_BYTES_MAX:
        raise Http2ConnectionError(Http2Code.ENHANCE_YOUR_CALM, "a header block is too large")
    return block
