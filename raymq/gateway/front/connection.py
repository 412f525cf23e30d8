"""Http2Connection is the server's side of one HTTP/2 connection (RFC 9113): bytes in, events and bytes out.

It has no socket and no clock: the caller passes bytes and times. A client that breaks a rule loses its stream, or its
connection if the rule concerns the connection. All that a client can make the server keep or do has a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from raymq.gateway.front.answers import DATA_FRAME_BYTES_MAX, AnswerQueue
from raymq.gateway.front.floods import FloodGuard
from raymq.gateway.front.frame_reader import FrameReader
from raymq.gateway.front.frames import (
    ACK_FLAG,
    DATA_FRAME,
    END_STREAM,
    FRAME_BYTES_MAX,
    GOAWAY_FRAME,
    HEADERS_FRAME,
    PING_FRAME,
    PRIORITY_FRAME,
    PUSH_FRAME,
    RESET_FRAME,
    SETTINGS_FRAME,
    WINDOW_FRAME,
    WINDOW_MAX,
    WINDOW_START,
    Http2Code,
    Http2ConnectionError,
    Http2StreamError,
    Setting,
    check_shape,
    frame,
    goaway_frame,
    read_settings,
    read_u32,
    reset_frame,
    settings_frame,
    window_frame,
    without_padding,
)
from raymq.gateway.front.header_blocks import HEADERS_BYTES_MAX, HeaderReader
from raymq.gateway.front.header_decoder import HEADER_TABLE_BYTES
from raymq.gateway.front.streams import STREAM_WINDOW_BYTES, Http2Stream, StreamTable

STREAMS_MAX: Final = 1000
"""Maximum number of calls at the same time on one connection."""
CONNECTION_WINDOW_BYTES: Final = 16 << 20
"""Number of bytes that a client may send on all streams before the server has seen them."""
REPLIES_BYTES_MAX: Final = 512 * 1024
"""Size in bytes of frames that wait for the socket, at which the connection ends. A client reaches it if it demands
replies without reading them."""
WINDOW_STEP_BYTES: Final = 1024
"""Size in bytes of a normal step of a client's window. Smaller steps count as frames without content."""


class RequestOpened(NamedTuple):
    """A client begins a request. `is_large`: its headers are too large. `ended`: it has no data."""

    stream_id: int
    fields: dict[bytes, bytes]
    is_large: bool
    ended: bool


class RequestData(NamedTuple):
    """A part of a request. `ended`: True with the last part. Its bytes count for the stream's window until
    `Http2Connection.consumed`."""

    stream_id: int
    data: bytes
    ended: bool


class RequestGone(NamedTuple):
    """The stream of a request has ended before its answer: nobody waits for it."""

    stream_id: int


Event = RequestOpened | RequestData | RequestGone


class Http2Connection:
    """The state of one connection. After `is_closing` is True, the caller writes `take` and closes the socket."""

    def __init__(self, now_s: float, *, streams_max: int = STREAMS_MAX) -> None:
        self.is_closing = False
        self.has_failed = False
        """True after an error that ended the connection; False after an end that the server announced."""
        self._now_s = now_s
        self._events: list[Event] = []
        self._streams = StreamTable(streams_max)
        self._headers = HeaderReader()
        self._received = 0
        """Number of bytes received since the last window frame of the connection."""
        self._floods = FloodGuard(now_s)
        self._frames = FrameReader(self._floods)
        self._queue = AnswerQueue(self._answered)
        self._queue.add(
            settings_frame(
                {
                    Setting.MAX_CONCURRENT_STREAMS: streams_max,
                    Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                    Setting.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
                    Setting.MAX_HEADER_LIST_SIZE: HEADERS_BYTES_MAX,
                }
            )
            + window_frame(0, CONNECTION_WINDOW_BYTES - WINDOW_START)
        )

    # The side of the client: bytes come in.

    @property
    def is_greeted(self) -> bool:
        """True after the client has shown that it speaks HTTP/2."""
        return not self._frames.needs_settings

    @property
    def stream_count(self) -> int:
        return len(self._streams.open)

    def receive(self, data: bytes, now_s: float) -> list[Event]:
        """Read bytes of the client, and return the events in them. `now_s`: the time, which never falls. At a fault of
        the client, the events before the fault are returned, and `is_closing` becomes True."""
        if self.is_closing:
            return []
        self._now_s = now_s
        events: list[Event] = []
        self._events = events
        try:
            for one in self._frames.read(data, now_s):
                self._read(*one)
                if self.is_closing:
                    break
            if self._queue.size > REPLIES_BYTES_MAX:
                raise Http2ConnectionError(Http2Code.ENHANCE_YOUR_CALM, "replies are not read")
        except Http2ConnectionError as error:
            self.fail(error.code, error.reason)
        return events

    def _read(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Read one frame."""
        read = _READERS.get(kind)
        if read is None:
            self._floods.idle_frame(self._now_s)
            return
        try:
            read(self, stream_id, flags, payload)
        except Http2StreamError as error:
            self._floods.reset(self._now_s)
            self.reset(stream_id, error.code)
            self._events.append(RequestGone(stream_id))

    def _read_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received >= CONNECTION_WINDOW_BYTES // 2:
            self._queue.add(window_frame(0, self._received))
            self._received = 0
        stream = self._streams.open.get(stream_id)
        if stream is None:
            self._streams.refuse_idle(stream_id, "DATA")
            self._floods.idle_frame(self._now_s)
            self._streams.refuse_closed(stream_id)
            return
        stream.arrived(size)
        data = without_padding(flags, payload)
        if len(data) < size:
            self.consumed(stream_id, size - len(data))
        ended = bool(flags & END_STREAM)
        if not data and not ended:
            self._floods.idle_frame(self._now_s)
            return
        if stream.body_left is not None:
            stream.body_left -= len(data)
        if ended:
            stream.end_request()
        self._events.append(RequestData(stream_id, data, ended))

    def _read_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if not stream_id % 2:
            raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, "a request has an even stream, or none")
        # each block is decoded, also if its stream is refused: later blocks refer to it
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._end_with_trailers(stream, flags, payload)
        elif not self._streams.is_new(stream_id):
            self._floods.idle_frame(self._now_s)
            self._headers.skip(payload)
        else:
            self._open(stream_id, flags, payload)

    def _open(self, stream_id: int, flags: int, block: bytes) -> None:
        try:
            stream = self._streams.add(stream_id)
        except Http2StreamError:
            self._headers.skip(block)
            raise
        headers = self._headers.request(block)
        length = headers.fields.get(b"content-length")
        if length is not None:
            stream.announce(length)
        ended = bool(flags & END_STREAM)
        if ended:
            stream.end_request()
        self._events.append(RequestOpened(stream_id, headers.fields, headers.is_large, ended))

    def _end_with_trailers(self, stream: Http2Stream, flags: int, block: bytes) -> None:
        self._headers.trailers(block)
        if stream.ended:
            raise Http2StreamError(Http2Code.STREAM_CLOSED, "headers after the end of the request")
        if not flags & END_STREAM:
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "trailers do not end the request")
        stream.end_request()
        self._events.append(RequestData(stream.stream_id, b"", True))

    def _read_priority(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Check a priority, which RFC 9113 lets servers ignore."""
        check_shape(PRIORITY_FRAME, stream_id, payload)
        self._floods.idle_frame(self._now_s)

    def _read_reset(self, stream_id: int, flags: int, payload: bytes) -> None:
        check_shape(RESET_FRAME, stream_id, payload)
        self._streams.refuse_idle(stream_id, "RST_STREAM")
        stream = self._streams.open.pop(stream_id, None)
        if stream is None:
            self._floods.idle_frame(self._now_s)
            return
        self._floods.reset(self._now_s)
        self._queue.drop(stream)
        self._events.append(RequestGone(stream_id))
        self._close_if_done()

    def _read_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        check_shape(SETTINGS_FRAME, stream_id, payload)
        self._floods.idle_frame(self._now_s)
        if flags & ACK_FLAG:
            if payload:
                raise Http2ConnectionError(Http2Code.FRAME_SIZE_ERROR, "an acknowledgement has settings")
            return
        first_window = self._streams.first_window
        for name, value in read_settings(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                first_window = value
            elif name == Setting.MAX_FRAME_SIZE:
                self._queue.frame_bytes_max = min(value, DATA_FRAME_BYTES_MAX)
            elif name == Setting.HEADER_TABLE_SIZE and value < HEADER_TABLE_BYTES:
                self._queue.drops_table = True
        difference, self._streams.first_window = first_window - self._streams.first_window, first_window
        if difference:
            for stream in self._streams.open.values():
                if not self._queue.opened(stream, difference):
                    raise Http2ConnectionError(Http2Code.FLOW_CONTROL_ERROR, "the window of a stream is too large")
        self._queue.add(frame(SETTINGS_FRAME, ACK_FLAG, 0))

    def _read_push(self, stream_id: int, flags: int, payload: bytes) -> None:
        raise Http2ConnectionError(Http2Code.PROTOCOL_ERROR, "a client cannot push")

    def _read_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        check_shape(PING_FRAME, stream_id, payload)
        self._floods.idle_frame(self._now_s)
        if flags & ACK_FLAG:
            return
        self._floods.ping(self._now_s)
        self._queue.add(frame(PING_FRAME, ACK_FLAG, 0, payload))

    def _read_goaway(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Check the announced end of a client. The client's open requests go on, and the client closes the socket."""
        check_shape(GOAWAY_FRAME, stream_id, payload)
        self._floods.idle_frame(self._now_s)

    def _read_window(self, stream_id: int, flags: int, payload: bytes) -> None:
        check_shape(WINDOW_FRAME, stream_id, payload)
        increment = read_u32(payload) & WINDOW_MAX
        stream = self._streams.open.get(stream_id)
        # larger increments have a bound already: no window of an open stream may grow beyond its maximum
        if increment < WINDOW_STEP_BYTES or (stream_id and stream is None):
            self._floods.idle_frame(self._now_s)
        if not stream_id:
            self._queue.window += increment
            if not increment or self._queue.window > WINDOW_MAX:
                code = Http2Code.FLOW_CONTROL_ERROR if increment else Http2Code.PROTOCOL_ERROR
                raise Http2ConnectionError(code, "the window of the connection cannot change so")
            return
        self._streams.refuse_idle(stream_id, "WINDOW_UPDATE")
        if stream is None:
            return
        if not increment:
            raise Http2StreamError(Http2Code.PROTOCOL_ERROR, "a window grows by nothing")
        if not self._queue.opened(stream, increment):
            raise Http2StreamError(Http2Code.FLOW_CONTROL_ERROR, "the window of a stream is too large")

    # The side of the server: answers go out. A stream that has ended is ignored.

    @property
    def is_writable(self) -> bool:
        """False while the caller's socket accepts no more."""
        return self._queue.is_writable

    @is_writable.setter
    def is_writable(self, value: bool) -> None:
        self._queue.is_writable = value

    def has_next(self) -> bool:
        """Return whether `take` would return bytes."""
        return self._queue.has_next()

    def take(self) -> bytes:
        """Return the next bytes to write; empty if nothing can be written now."""
        return self._queue.take()

    def take_drained(self) -> list[int]:
        """Return the streams whose data has been taken since the last call."""
        drained = self._queue.drained
        if not drained:
            return []
        self._queue.drained = []
        return [stream.stream_id for stream in drained]

    def is_open(self, stream_id: int) -> bool:
        return stream_id in self._streams.open

    def waits(self, stream_id: int) -> bool:
        """Return whether data of an answer waits for the client. Then the caller gives no more data."""
        stream = self._streams.open.get(stream_id)
        return stream is not None and stream.chunks is not None

    def answer(self, stream_id: int, head: bytes, data: bytes, tail: bytes) -> None:
        """Send a whole answer: a header block, data, and a header block as trailers."""
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._floods.answered()
            self._queue.whole(stream, head, data, tail)

    def send_head(self, stream_id: int, block: bytes) -> None:
        """Send the header block that begins an answer."""
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._floods.answered()
            self._queue.head(stream, block)

    def send_data(self, stream_id: int, data: bytes) -> None:
        """Send a part of an answer. `data` is not empty."""
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._floods.answered()
            self._queue.data(stream, data)

    def send_tail(self, stream_id: int, block: bytes) -> None:
        """Send the header block that ends an answer: its trailers, or its only headers."""
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._floods.answered()
            self._queue.tail(stream, block)

    def reset(self, stream_id: int, code: Http2Code) -> None:
        """End a stream at once, also a stream that was refused."""
        stream = self._streams.open.pop(stream_id, None)
        if stream is not None:
            self._queue.drop(stream)
        self._streams.leave(stream_id)
        self._queue.add(reset_frame(stream_id, code))
        self._close_if_done()

    def consumed(self, stream_id: int, size: int) -> None:
        """Let the client send `size` bytes more on a stream, whose received bytes have been used."""
        stream = self._streams.open.get(stream_id)
        credit = 0 if stream is None else stream.consumed(size)
        if credit:
            self._queue.add(window_frame(stream_id, credit))

    def ping(self) -> None:
        """Ask the client for a sign of life: it sends some bytes."""
        self._queue.add(frame(PING_FRAME, 0, 0, bytes(8)))

    def go_away(self) -> None:
        """Announce the end of the connection: open streams go on, later ones are not served. Idempotent."""
        if self._streams.last_served is None and not self.is_closing:
            self._streams.last_served = self._streams.last_id
            self._queue.add(goaway_frame(self._streams.last_id, Http2Code.NO_ERROR, ""))
            self._close_if_done()

    def fail(self, code: Http2Code, reason: str) -> None:
        """End the connection at once, with an error for the client. The caller ends all calls."""
        self.is_closing = self.has_failed = True
        for stream in self._streams.open.values():
            self._queue.drop(stream)
        self._streams.open.clear()
        self._queue.add(goaway_frame(self._streams.last_id, code, reason))

    def _answered(self, stream: Http2Stream) -> None:
        """Close a stream whose whole answer is in the output."""
        del self._streams.open[stream.stream_id]
        if not stream.ended:
            # the client need not send the rest of its request
            self._streams.leave(stream.stream_id)
            self._queue.add(reset_frame(stream.stream_id, Http2Code.NO_ERROR))
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._streams.is_done:
            self.is_closing = True


_READERS: Final[dict[int, Callable[[Http2Connection, int, int, bytes], None]]] = {
    DATA_FRAME: Http2Connection._read_data,
    HEADERS_FRAME: Http2Connection._read_headers,
    PRIORITY_FRAME: Http2Connection._read_priority,
    RESET_FRAME: Http2Connection._read_reset,
    SETTINGS_FRAME: Http2Connection._read_settings,
    PUSH_FRAME: Http2Connection._read_push,
    PING_FRAME: Http2Connection._read_ping,
    GOAWAY_FRAME: Http2Connection._read_goaway,
    WINDOW_FRAME: Http2Connection._read_window,
}
"""The reader of each kind of frame: it gets the frame's stream, flags and payload. Other kinds are ignored. FrameReader
joins the frames of a header block."""
