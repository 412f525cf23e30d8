"""StreamTable keeps the streams of one HTTP/2 connection: which are open, which were left, and which are still served.

A client opens streams with rising odd numbers. Frames for other streams are faults, unless the server ended a stream
first: then the client could not know.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from raymq.gateway.front.frames import WINDOW_START, Http2Code, Http2ConnectionError, Http2StreamError

STREAM_WINDOW_BYTES: Final = 1 << 20
"""Number of bytes that a client may send on one stream before they are read."""
_LEFT_STREAMS_MAX: Final = 1000
"""Number of streams that the server ended first, and whose later frames are ignored."""


class Http2Stream:
    """One open stream: the windows of both sides, and the part of the answer that waits."""

    __slots__ = (
        *("stream_id", "id_bytes", "send_window", "receive_used", "receive_credit", "ended", "body_left"),
        *("head", "chunks", "tail"),
    )

    def __init__(self, stream_id: int, send_window: int) -> None:
        self.stream_id = stream_id
        self.id_bytes = stream_id.to_bytes(4, "big")
        self.send_window = send_window
        """Number of bytes that the client accepts now; negative if the client has made its window smaller."""
        self.receive_used = 0
        """Number of received bytes for which the client has no new credit yet."""
        self.receive_credit = 0
        """Number of these bytes that have been used, so that the client gets credit for them soon."""
        self.ended = False
        """True after the client has sent its whole request."""
        self.body_left: int | None = None
        """Number of bytes that the request's content-length still announces; None without this header."""
        self.head: bytes | None = None
        """The header block of the answer, while it waits."""
        self.chunks: deque[memoryview] | None = None
        """Data of the answer that waits. None or not empty."""
        self.tail: bytes | None = None
        """The header block with which the answer ends, while it waits."""

    @property
    def waits(self) -> bool:
        """True while a part of the answer waits."""
        return self.chunks is not None or self.head is not None or self.tail is not None

    def announce(self, content_length: bytes) -> None:
        """Note the size of the request that its headers announce. Raises Http2StreamError if it is no number."""
        if not content_length.isdigit() or len(content_length) > 18:
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "the content-length is no number")
        self.body_left = int(content_length)

    def arrived(self, size: int) -> None:
        """Count a received frame of data, padding included. Raises Http2StreamError at data that the client may not
        send."""
        if self.ended:
            raise Http2StreamError(Http2Code.STREAM_CLOSED, "data after the end of the request")
        self.receive_used += size
        if self.receive_used > STREAM_WINDOW_BYTES:
            raise Http2StreamError(Http2Code.FLOW_CONTROL_ERROR, "more data than the window allows")

    def consumed(self, size: int) -> int:
        """Note that received bytes have been used. Returns the credit to give to the client now, which is often 0: one
        frame for many parts. Half a window is left for the time until the client reads it."""
        if self.ended:
            return 0
        self.receive_credit += size
        if self.receive_credit < STREAM_WINDOW_BYTES // 2:
            return 0
        credit, self.receive_credit = self.receive_credit, 0
        self.receive_used -= credit
        return credit

    def end_request(self) -> None:
        """Note that the client has sent its whole request. Raises Http2StreamError if it is shorter or longer than
        announced."""
        self.ended = True
        if self.body_left:
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "the content-length differs from the data")


class StreamTable:
    """The streams of one connection. `open`: the open streams, by number. `streams_max`: their maximum number."""

    def __init__(self, streams_max: int) -> None:
        self.open: dict[int, Http2Stream] = {}
        self.last_id = 0
        """The newest stream of the client."""
        self.last_served: int | None = None
        """The last stream that is served, after the server has announced its end."""
        self.first_window = WINDOW_START
        """The first send window of new streams."""
        self._max = streams_max
        self._left: deque[int] | None = None
        """The streams that the server ended first. Most connections have none."""

    @property
    def is_done(self) -> bool:
        """True if the server has announced its end, and no stream is open."""
        return self.last_served is not None and not self.open

    def add(self, stream_id: int) -> Http2Stream:
        """Open a new stream. Raises Http2StreamError if too many are open."""
        self.last_id = stream_id
        if len(self.open) >= self._max:
            raise Http2StreamError(Http2Code.REFUSED_STREAM, "too many streams")
        stream = self.open[stream_id] = Http2Stream(stream_id, self.first_window)
        return stream

    def is_new(self, stream_id: int) -> bool:
        """Return whether headers open a stream that is not open. False: the headers are ignored, because the server has
        left their stream, or has announced its end. Raises Http2ConnectionError at a stream that has ended."""
        if stream_id > self.last_id:
            return self.last_served is None
        if not self.was_left(stream_id):
            raise Http2ConnectionError(Http2Code.STREAM_CLOSED, "headers for a closed stream")
        return False

    def leave(self, stream_id: int) -> None:
        """Note that the server has ended a stream first: the client's later frames for it are no fault."""
        if self._left is None:
            self._left = deque(maxlen=_LEFT_STREAMS_MAX)
        self._left.append(stream_id)

    def was_left(self, stream_id: int) -> bool:
        return self._left is not None and stream_id in self._left

    def refuse_closed(self, stream_id: int) -> None:
        """Raise Http2StreamError at data for a stream that has ended, unless the client could not know."""
        if not self.was_left(stream_id) and (self.last_served is None or stream_id <= self.last_served):
            raise Http2StreamError(Http2Code.STREAM_CLOSED, "data for a closed stream")

    def refuse_idle(self, stream_id: int, name: str) -> None:
        """Raise Http2ConnectionError if a frame names a stream that the client has not opened. `name`: the frame's
        name."""
        if not stream_id % 2 or (stream_id > self.last_id and self.last_served is None):
            raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, f"a frame {name} names a stream that is not open")
