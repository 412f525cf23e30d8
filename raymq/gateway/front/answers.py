"""AnswerQueue orders the frames that one connection writes, within the client's windows and the space of its socket.

A stream whose answer cannot be written yet stays open, so the number of waiting answers has the bound of open streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from raymq.gateway.front.frames import (
    DATA_FRAME,
    END_HEADERS,
    END_STREAM,
    HEADERS_FRAME,
    PLAIN_FRAME_BYTES,
    WINDOW_MAX,
    WINDOW_START,
    frame,
)
from raymq.gateway.front.header_blocks import DROP_TABLE
from raymq.gateway.front.streams import Http2Stream

OUTPUT_ROOM_BYTES: Final = 64 * 1024
"""Size in bytes of the frames in one write, at which no further answer joins them."""
DATA_FRAME_BYTES_MAX: Final = 64 * 1024
"""Maximum size in bytes of a frame of data that the server writes, if the client allows so much."""


class AnswerQueue:
    """The output of one connection. `ended`: called with each stream whose answer is completely in `take`."""

    def __init__(self, ended: Callable[[Http2Stream], None]) -> None:
        self._ended = ended
        self.is_writable = True
        """False while the socket accepts no more. Then only `add` adds frames."""
        self.window = WINDOW_START
        """Number of bytes that the client accepts on all streams together."""
        self.frame_bytes_max = PLAIN_FRAME_BYTES
        self.drops_table = False
        """True after the client has made HPACK's table smaller: the next header block says that the table is empty."""
        self.size = 0
        """Size in bytes of the frames for the next `take`."""
        self._frames: list[bytes] = []
        self._light: dict[Http2Stream, None] = {}
        """Streams with a head or a tail that waits, and no data: no window holds them up."""
        self._heavy: dict[Http2Stream, None] = {}
        """Streams with data that wait for room or for the connection's window."""
        self.drained: list[Http2Stream] = []
        """Streams whose data waited, and that may get more."""

    def add(self, data: bytes) -> None:
        """Add frames that belong to no answer, or that end one. They never wait for a window."""
        self._frames.append(data)
        self.size += len(data)

    def whole(self, stream: Http2Stream, head: bytes, data: bytes, tail: bytes) -> None:
        """Add a whole answer: headers, data and trailers."""
        size = len(data)
        if (
            self._has_room()
            and size <= stream.send_window
            and size <= self.window
            and size <= self.frame_bytes_max
            and not stream.waits
        ):
            stream.send_window -= size
            self.window -= size
            if self.drops_table:
                head = self._dropping_table(head)
            name = stream.id_bytes
            parts = (
                *(len(head).to_bytes(3, "big"), b"\x01\x04", name, head),
                *(size.to_bytes(3, "big"), b"\x00\x00", name, data),
                *(len(tail).to_bytes(3, "big"), b"\x01\x05", name, tail),
            )
            self.add(b"".join(parts))
            self._ended(stream)
            return
        self.head(stream, head)
        self.data(stream, data)
        self.tail(stream, tail)

    def head(self, stream: Http2Stream, block: bytes) -> None:
        """Add the headers of an answer."""
        stream.head = block
        self._push(stream)

    def data(self, stream: Http2Stream, data: bytes) -> None:
        """Add data of an answer. `data` is not empty."""
        if stream.chunks is None:
            stream.chunks = deque()
        stream.chunks.append(memoryview(data))
        self._push(stream)

    def tail(self, stream: Http2Stream, block: bytes) -> None:
        """Add the header block that ends an answer: its trailers, or its only headers."""
        stream.tail = block
        self._push(stream)

    def take(self) -> bytes:
        """Return the next frames to write; empty if nothing can be written now."""
        if not self.is_writable:
            return b""
        while self._light and self._has_room():
            self._advance(next(iter(self._light)))
        turns = len(self._heavy)
        while self._heavy and turns and self.window > 0 and self._has_room():
            turns -= 1
            # a stream that still waits goes behind the others
            self._advance(next(iter(self._heavy)))
        data = b"".join(self._frames)
        self._frames.clear()
        self.size = 0
        return data

    def opened(self, stream: Http2Stream, increment: int) -> bool:
        """Let a stream send `increment` bytes more; less if negative. Returns False if its window would be too
        large."""
        stream.send_window += increment
        if stream.chunks is not None and stream.send_window > 0:
            self._heavy[stream] = None
        return stream.send_window <= WINDOW_MAX

    def drop(self, stream: Http2Stream) -> None:
        """Forget the waiting part of an answer, because its stream has ended."""
        self._light.pop(stream, None)
        self._heavy.pop(stream, None)
        stream.head = stream.tail = stream.chunks = None

    def has_next(self) -> bool:
        """Return whether `take` would return frames."""
        if not self.is_writable:
            return False
        return bool(self._frames or self._light or (self._heavy and self.window > 0))

    def _has_room(self) -> bool:
        return self.is_writable and self.size < OUTPUT_ROOM_BYTES

    def _dropping_table(self, block: bytes) -> bytes:
        if self.drops_table:
            self.drops_table = False
            return DROP_TABLE + block
        return block

    def _push(self, stream: Http2Stream) -> None:
        """Write a stream's waiting part, as far as possible, and note where the rest waits."""
        if stream in self._heavy:
            return
        if self._has_room():
            self._advance(stream)
        elif stream.chunks is None or stream.head is not None:
            # no window holds up headers: a client may open its window only after it has read them
            self._light[stream] = None
        elif stream.send_window > 0:
            self._heavy[stream] = None

    def _advance(self, stream: Http2Stream) -> None:
        """Move the waiting part of an answer to the frames. Stops without window or without room."""
        self._light.pop(stream, None)
        self._heavy.pop(stream, None)
        if stream.head is not None:
            self.add(frame(HEADERS_FRAME, END_HEADERS, stream.stream_id, self._dropping_table(stream.head)))
            stream.head = None
        if stream.chunks is not None:
            if not self._advance_data(stream, stream.chunks):
                return
            stream.chunks = None
            if stream.tail is None:
                self.drained.append(stream)
        if stream.tail is not None:
            tail, stream.tail = self._dropping_table(stream.tail), None
            self.add(frame(HEADERS_FRAME, END_HEADERS | END_STREAM, stream.stream_id, tail))
            self._ended(stream)

    def _advance_data(self, stream: Http2Stream, chunks: deque[memoryview]) -> bool:
        """Move waiting data to the frames. Returns whether none is left."""
        while chunks:
            size = min(len(chunks[0]), stream.send_window, self.window, self.frame_bytes_max)
            if size <= 0 or not self._has_room():
                if stream.send_window > 0:
                    self._heavy[stream] = None
                return False
            stream.send_window -= size
            self.window -= size
            self.add(frame(DATA_FRAME, 0, stream.stream_id, bytes(chunks[0][:size])))
            if size == len(chunks[0]):
                chunks.popleft()
            else:
                chunks[0] = chunks[0][size:]
        return True
