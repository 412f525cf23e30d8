"""Tests of the server's side of an HTTP/2 connection, without a socket: bytes in, events and bytes out."""

from __future__ import annotations

import random
import struct
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from raymq.gateway.front import connection as module
from raymq.gateway.front.connection import (
    CONNECTION_WINDOW_BYTES,
    REPLIES_BYTES_MAX,
    STREAM_WINDOW_BYTES,
    STREAMS_MAX,
    WINDOW_STEP_BYTES,
    Event,
    Http2Connection,
    RequestData,
    RequestGone,
    RequestOpened,
)
from raymq.gateway.front.floods import IDLE_FRAMES_MAX, PING_STRIKES_MAX, RESETS_MAX
from raymq.gateway.front.frames import (
    ACK_FLAG,
    CONTINUATION_FRAME,
    DATA_FRAME,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    GOAWAY_FRAME,
    HEADERS_FRAME,
    PADDED_FLAG,
    PING_FRAME,
    PREFACE,
    PRIORITY_FLAG,
    PRIORITY_FRAME,
    PUSH_FRAME,
    RESET_FRAME,
    SETTINGS_FRAME,
    WINDOW_FRAME,
    WINDOW_MAX,
    WINDOW_START,
    Http2Code,
    Setting,
    frame,
    reset_frame,
    settings_frame,
    window_frame,
)
from raymq.gateway.front.header_blocks import BLOCK_BYTES_MAX, HEADERS_BYTES_MAX, header_block
from tests.support.gateway.http2_client import GRPC, NEEDED, FrameOf, Http2Bytes, frames_in, message

HEAD = header_block([(":status", "200")])
TAIL = header_block([("grpc-status", "0")])


class Served:
    """A connection whose client has greeted. `client`: makes the client's bytes. `frames`: all frames of the server."""

    def __init__(self, values: dict[Setting, int] | None = None, *, streams_max: int = STREAMS_MAX) -> None:
        self.client = Http2Bytes(values)
        self.http2 = Http2Connection(0.0, streams_max=streams_max)
        self.now_s = 0.0
        self.frames: list[FrameOf] = []
        assert self.send(self.client.greeting) == []
        assert self.http2.is_greeted
        self.frames.clear()

    def send(self, data: bytes) -> list[Event]:
        """Send bytes of the client, and return the server's events."""
        events = self.http2.receive(data, self.now_s)
        self.take()
        return events

    def take(self) -> list[FrameOf]:
        """Return the server's next frames."""
        taken: list[FrameOf] = []
        while self.http2.has_next():
            taken += frames_in(self.http2.take())
        self.frames += taken
        return taken

    def kinds(self) -> list[tuple[int, int]]:
        """Return kind and stream of all frames of the server since the last look."""
        seen = [(one.kind, one.stream_id) for one in self.frames]
        self.frames.clear()
        return seen

    def data_sent(self) -> bytes:
        return b"".join(one.payload for one in self.frames if one.kind == DATA_FRAME)

    def failure(self) -> Http2Code | None:
        """Return the code with which the server has ended the connection; None if it goes on."""
        codes = [Http2Code(struct.unpack(">I", one.payload[4:8])[0]) for one in self.frames if one.kind == GOAWAY_FRAME]
        assert self.http2.has_failed == bool(codes)
        return codes[-1] if codes else None

    def resets(self) -> list[tuple[int, Http2Code]]:
        return [(one.stream_id, Http2Code(one.number)) for one in self.frames if one.kind == RESET_FRAME]


def test_a_request_becomes_events_and_its_answer_frames() -> None:
    served = Served()
    [opened] = served.send(served.client.request(1, *GRPC, ("x-mq-client-id", "me")))
    assert isinstance(opened, RequestOpened)
    assert (opened.stream_id, opened.ended, opened.is_large) == (1, False, False)
    assert opened.fields[b":path"] == b"/s/echo"
    assert opened.fields[b"x-mq-client-id"] == b"me"
    assert served.send(frame(DATA_FRAME, 0, 1, b"one")) == [RequestData(1, b"one", False)]
    assert served.send(frame(DATA_FRAME, END_STREAM, 1, b"two")) == [RequestData(1, b"two", True)]
    served.http2.answer(1, HEAD, b"answer", TAIL)
    head, data, tail = served.take()
    assert (head.kind, head.flags, head.stream_id) == (HEADERS_FRAME, END_HEADERS, 1)
    assert served.client.fields(head) == {":status": "200"}
    assert (data.kind, data.flags, data.payload) == (DATA_FRAME, 0, b"answer")
    assert (tail.flags, served.client.fields(tail)) == (END_HEADERS | END_STREAM, {"grpc-status": "0"})
    assert not served.http2.is_open(1)
    served.http2.answer(1, HEAD, b"again", TAIL)
    assert served.take() == []


def test_the_server_greets_with_its_bounds() -> None:
    http2 = Http2Connection(0.0)
    first, window = frames_in(http2.take())
    values = {Setting(name): value for name, value in struct.iter_unpack(">HI", first.payload)}
    assert values[Setting.MAX_CONCURRENT_STREAMS] == STREAMS_MAX
    assert values[Setting.INITIAL_WINDOW_SIZE] == STREAM_WINDOW_BYTES
    assert values[Setting.MAX_FRAME_SIZE] == FRAME_BYTES_MAX
    assert values[Setting.MAX_HEADER_LIST_SIZE] == HEADERS_BYTES_MAX
    assert (window.kind, window.number) == (WINDOW_FRAME, CONNECTION_WINDOW_BYTES - WINDOW_START)


def conversation() -> bytes:
    """Return the bytes of a client with frames of each kind."""
    client = Http2Bytes()
    padded = bytes([3]) + b"padded" + bytes(3)
    first = client.request(1, parts=4)
    prior = bytes(5) + client.block(*GRPC, ("x", "y" * 40))
    parts = [
        client.greeting,
        first,
        frame(DATA_FRAME, PADDED_FLAG, 1, padded),
        frame(PING_FRAME, 0, 0, b"12345678"),
        frame(HEADERS_FRAME, END_HEADERS | PRIORITY_FLAG, 3, prior),
        frame(PRIORITY_FRAME, 0, 3, bytes(5)),
        frame(DATA_FRAME, END_STREAM, 1, b"end"),
        frame(77, 5, 3, b"of no known kind"),
        window_frame(0, 5) + window_frame(1, 5),
        reset_frame(3, Http2Code.CANCEL),
        client.call(5, b"whole"),
        client.request(7) + frame(HEADERS_FRAME, END_HEADERS | END_STREAM, 7, client.block(("trailer", "1"))),
        frame(GOAWAY_FRAME, 0, 0, bytes(8)),
    ]
    return b"".join(parts)


CONVERSATION = conversation()


@given(cuts=st.lists(st.integers(0, len(CONVERSATION)), max_size=40))
def test_the_splits_of_the_bytes_change_nothing(cuts: list[int]) -> None:
    whole = Http2Connection(0.0)
    expected = whole.receive(CONVERSATION, 0.0)
    assert [one.stream_id for one in expected] == [1, 1, 3, 1, 3, 5, 5, 7, 7]
    assert expected[1] == RequestData(1, b"padded", False)
    split = Http2Connection(0.0)
    bounds = [0, *sorted(cuts), len(CONVERSATION)]
    events = [event for first, end in pairwise(bounds) for event in split.receive(CONVERSATION[first:end], 0.0)]
    assert events == expected
    assert split.take() == whole.take()


OPEN = Http2Bytes().request(1)
WHOLE = Http2Bytes().request(1, end=True)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(DATA_FRAME, 0, 0, b"x"), Http2Code.PROTOCOL_ERROR),
        (frame(DATA_FRAME, 0, 1, b"x"), Http2Code.PROTOCOL_ERROR),
        (frame(DATA_FRAME, 0, 2, b"x"), Http2Code.PROTOCOL_ERROR),
        (OPEN + frame(DATA_FRAME, PADDED_FLAG, 1, b"\x02x"), Http2Code.PROTOCOL_ERROR),
        (OPEN + frame(DATA_FRAME, PADDED_FLAG, 1), Http2Code.FRAME_SIZE_ERROR),
        (frame(HEADERS_FRAME, END_HEADERS, 0, b""), Http2Code.PROTOCOL_ERROR),
        (frame(HEADERS_FRAME, END_HEADERS, 2, b""), Http2Code.PROTOCOL_ERROR),
        (frame(HEADERS_FRAME, END_HEADERS | PRIORITY_FLAG, 1, b"1234"), Http2Code.FRAME_SIZE_ERROR),
        (frame(HEADERS_FRAME, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), Http2Code.COMPRESSION_ERROR),
        (frame(HEADERS_FRAME, END_HEADERS, 1, b"\x40"), Http2Code.COMPRESSION_ERROR),
        (frame(HEADERS_FRAME, END_HEADERS, 1, b"\xbf"), Http2Code.COMPRESSION_ERROR),
        (frame(HEADERS_FRAME, 0, 1, b"") + frame(PING_FRAME, 0, 0, bytes(8)), Http2Code.PROTOCOL_ERROR),
        (frame(HEADERS_FRAME, 0, 1, b"") + frame(CONTINUATION_FRAME, 0, 3, b""), Http2Code.PROTOCOL_ERROR),
        (frame(HEADERS_FRAME, 0, 1, b"") + frame(77, 0, 0, b""), Http2Code.PROTOCOL_ERROR),
        (frame(CONTINUATION_FRAME, END_HEADERS, 1, b""), Http2Code.PROTOCOL_ERROR),
        (Http2Bytes().request(3) + frame(HEADERS_FRAME, END_HEADERS, 1, b""), Http2Code.STREAM_CLOSED),
        (frame(PRIORITY_FRAME, 0, 0, bytes(5)), Http2Code.PROTOCOL_ERROR),
        (frame(PRIORITY_FRAME, 0, 1, bytes(4)), Http2Code.FRAME_SIZE_ERROR),
        (frame(RESET_FRAME, 0, 0, bytes(4)), Http2Code.PROTOCOL_ERROR),
        (frame(RESET_FRAME, 0, 1, bytes(4)), Http2Code.PROTOCOL_ERROR),
        (OPEN + frame(RESET_FRAME, 0, 1, bytes(3)), Http2Code.FRAME_SIZE_ERROR),
        (frame(SETTINGS_FRAME, 0, 1), Http2Code.PROTOCOL_ERROR),
        (frame(SETTINGS_FRAME, 0, 0, bytes(5)), Http2Code.FRAME_SIZE_ERROR),
        (frame(SETTINGS_FRAME, ACK_FLAG, 0, bytes(6)), Http2Code.FRAME_SIZE_ERROR),
        (settings_frame({Setting.ENABLE_PUSH: 2}), Http2Code.PROTOCOL_ERROR),
        (settings_frame({Setting.INITIAL_WINDOW_SIZE: 1 << 31}), Http2Code.FLOW_CONTROL_ERROR),
        (settings_frame({Setting.MAX_FRAME_SIZE: 16_383}), Http2Code.PROTOCOL_ERROR),
        (settings_frame({Setting.MAX_FRAME_SIZE: 1 << 24}), Http2Code.PROTOCOL_ERROR),
        (frame(SETTINGS_FRAME, 0, 0, bytes(6 * 101)), Http2Code.ENHANCE_YOUR_CALM),
        (
            OPEN + window_frame(1, WINDOW_MAX - WINDOW_START) + settings_frame({Setting.INITIAL_WINDOW_SIZE: 70_000}),
            Http2Code.FLOW_CONTROL_ERROR,
        ),
        (frame(PUSH_FRAME, 0, 1, bytes(4)), Http2Code.PROTOCOL_ERROR),
        (frame(PING_FRAME, 0, 1, bytes(8)), Http2Code.PROTOCOL_ERROR),
        (frame(PING_FRAME, 0, 0, bytes(7)), Http2Code.FRAME_SIZE_ERROR),
        (frame(GOAWAY_FRAME, 0, 1, bytes(8)), Http2Code.PROTOCOL_ERROR),
        (frame(GOAWAY_FRAME, 0, 0, bytes(7)), Http2Code.FRAME_SIZE_ERROR),
        (window_frame(0, 0), Http2Code.PROTOCOL_ERROR),
        (window_frame(0, WINDOW_MAX), Http2Code.FLOW_CONTROL_ERROR),
        (window_frame(1, 1), Http2Code.PROTOCOL_ERROR),
        (frame(WINDOW_FRAME, 0, 0, bytes(3)), Http2Code.FRAME_SIZE_ERROR),
        ((FRAME_BYTES_MAX + 1).to_bytes(3, "big") + bytes(6), Http2Code.FRAME_SIZE_ERROR),
    ],
)
def test_a_fault_of_the_connection_ends_it(data: bytes, code: Http2Code) -> None:
    served = Served()
    served.send(data)
    assert served.failure() == code
    assert served.http2.is_closing
    assert served.send(Http2Bytes().request(9)) == []
    assert served.http2.stream_count == 0


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01",
        PREFACE + frame(PING_FRAME, 0, 0, bytes(8)),
        PREFACE + frame(SETTINGS_FRAME, ACK_FLAG, 0),
    ],
)
def test_a_client_of_another_protocol_is_refused(first: bytes) -> None:
    http2 = Http2Connection(0.0)
    assert http2.receive(first, 0.0) == []
    assert http2.has_failed
    assert not http2.is_greeted


@pytest.mark.parametrize(
    "fields",
    [
        NEEDED[1:],
        NEEDED[:-1],
        (*NEEDED[:-1], (":path", "")),
        (*NEEDED, NEEDED[0]),
        (*NEEDED, (":status", "200")),
        (NEEDED[0], ("x", "1"), *NEEDED[1:]),
        (*NEEDED, ("Upper", "1")),
        (*NEEDED, ("white space", "1")),
        (*NEEDED, ("", "1")),
        (*NEEDED, ("connection", "close")),
        (*NEEDED, ("te", "gzip")),
        (*NEEDED, ("x", "a\r\nb: c")),
        (*NEEDED, ("content-length", "-1")),
        (*NEEDED, ("content-length", "7")),
    ],
)
def test_illegal_headers_end_only_their_stream(fields: tuple[tuple[str, str], ...]) -> None:
    served = Served()
    data = served.client.request(1, *fields, end=True)
    events = served.send(data + served.client.call(3, b"next"))
    assert served.resets() == [(1, Http2Code.PROTOCOL_ERROR)]
    assert served.failure() is None
    assert [event.stream_id for event in events if isinstance(event, RequestOpened)] == [3]
    assert RequestGone(1) in events


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (WHOLE + frame(DATA_FRAME, 0, 1, b"x"), Http2Code.STREAM_CLOSED),
        (WHOLE + frame(HEADERS_FRAME, END_HEADERS | END_STREAM, 1, b""), Http2Code.STREAM_CLOSED),
        (OPEN + frame(HEADERS_FRAME, END_HEADERS, 1, b""), Http2Code.PROTOCOL_ERROR),
        (OPEN + frame(HEADERS_FRAME, END_HEADERS | END_STREAM, 1, b"\x82"), Http2Code.PROTOCOL_ERROR),
        (OPEN + window_frame(1, 0), Http2Code.PROTOCOL_ERROR),
        (OPEN + window_frame(1, WINDOW_MAX), Http2Code.FLOW_CONTROL_ERROR),
        (
            OPEN + frame(DATA_FRAME, 0, 1, bytes(FRAME_BYTES_MAX)) * (STREAM_WINDOW_BYTES // FRAME_BYTES_MAX + 1),
            Http2Code.FLOW_CONTROL_ERROR,
        ),
    ],
)
def test_a_fault_of_a_stream_ends_only_this_stream(data: bytes, code: Http2Code) -> None:
    served = Served()
    events = served.send(data)
    assert served.resets() == [(1, code)]
    assert events[-1] == RequestGone(1)
    assert served.failure() is None
    assert not served.http2.is_open(1)


def test_an_answer_waits_for_the_windows_of_stream_and_connection() -> None:
    served = Served({Setting.INITIAL_WINDOW_SIZE: 10})
    served.send(served.client.call(1, b""))
    served.http2.answer(1, HEAD, b"x" * 100_000, TAIL)
    assert [(one.kind, len(one.payload)) for one in served.take()] == [(HEADERS_FRAME, len(HEAD)), (DATA_FRAME, 10)]
    assert served.http2.waits(1)
    assert not served.http2.has_next()
    served.send(window_frame(1, 5))
    assert len(served.data_sent()) == 15
    served.send(settings_frame({Setting.INITIAL_WINDOW_SIZE: 0}) + window_frame(1, 10))
    assert len(served.data_sent()) == 15, "the smaller first window has taken 10 bytes back"
    served.send(window_frame(1, 200_000))
    assert len(served.data_sent()) == WINDOW_START, "the window of the connection is used up"
    assert max(len(one.payload) for one in served.frames) <= 16_384
    # an answer without data needs no window
    served.send(served.client.call(3, b""))
    served.http2.send_tail(3, TAIL)
    assert [(one.kind, one.stream_id) for one in served.take()] == [(HEADERS_FRAME, 3)]
    served.send(window_frame(0, 200_000))
    assert served.data_sent() == b"x" * 100_000
    assert not served.http2.is_open(1)
    assert served.http2.take_drained() == [], "nobody waits for room after the whole answer"


def test_waiting_answers_take_turns() -> None:
    served = Served({Setting.INITIAL_WINDOW_SIZE: WINDOW_MAX})
    for stream_id in (1, 3, 5):
        served.send(served.client.call(stream_id, b""))
    served.send(window_frame(0, 1 << 30))
    for stream_id in (1, 3, 5):
        served.http2.send_head(stream_id, HEAD)
        served.http2.send_data(stream_id, bytes(200_000))
    first = next(frames_in(served.http2.take()))
    assert first.stream_id == 1
    turns = [{one.stream_id for one in frames_in(served.http2.take())} for _ in range(3)]
    assert set.union(*turns) == {1, 3, 5}
    served.take()
    assert sorted(served.http2.take_drained()) == [1, 3, 5]
    assert not any(served.http2.waits(stream_id) for stream_id in (1, 3, 5))


def test_nothing_is_written_while_the_socket_is_full_and_the_streams_stay_open() -> None:
    served = Served()
    for stream_id in (1, 3):
        served.send(served.client.call(stream_id, b""))
    served.http2.is_writable = False
    served.http2.answer(1, HEAD, b"one", TAIL)
    served.http2.send_tail(3, TAIL)
    assert served.take() == []
    assert served.http2.stream_count == 2
    served.http2.is_writable = True
    assert sorted((one.stream_id, one.kind) for one in served.take()) == [(1, 0), (1, 1), (1, 1), (3, 1)]
    assert served.http2.stream_count == 0


def test_the_client_gets_credit_for_read_bytes() -> None:
    served = Served()
    served.send(served.client.request(1))
    half = frame(DATA_FRAME, 0, 1, bytes(FRAME_BYTES_MAX)) * (STREAM_WINDOW_BYTES // 2 // FRAME_BYTES_MAX)
    for _ in range(CONNECTION_WINDOW_BYTES // STREAM_WINDOW_BYTES):
        served.send(half)
        served.http2.consumed(1, STREAM_WINDOW_BYTES // 2)
        [credit] = served.take()
        assert (credit.kind, credit.stream_id, credit.number) == (WINDOW_FRAME, 1, STREAM_WINDOW_BYTES // 2)
    [whole] = [one for one in served.frames if one.kind == WINDOW_FRAME and not one.stream_id]
    assert whole.number == CONNECTION_WINDOW_BYTES // 2
    assert served.failure() is None


def test_more_streams_than_allowed_are_refused_and_headers_stay_readable() -> None:
    served = Served(streams_max=2)
    for stream_id in (1, 3):
        served.send(served.client.request(stream_id))
    assert served.send(served.client.request(5, *GRPC, ("x-new", "value"))) == [RequestGone(5)]
    assert served.resets() == [(5, Http2Code.REFUSED_STREAM)]
    served.send(reset_frame(1, Http2Code.CANCEL))
    # the encoder of the client refers to the headers of the refused request
    [opened] = served.send(served.client.request(7, *GRPC, ("x-new", "value")))
    assert isinstance(opened, RequestOpened)
    assert opened.fields[b"x-new"] == b"value"


def test_an_early_answer_ends_the_request_and_its_later_frames_are_ignored() -> None:
    served = Served()
    served.send(served.client.request(1))
    served.http2.send_tail(1, TAIL)
    served.take()
    assert served.resets() == [(1, Http2Code.NO_ERROR)]
    assert served.send(frame(DATA_FRAME, 0, 1, b"late")) == []
    assert served.send(window_frame(1, 7) + reset_frame(1, Http2Code.CANCEL)) == []
    trailer = frame(HEADERS_FRAME, END_HEADERS | END_STREAM, 1, served.client.block(("late", "1")))
    assert served.send(trailer) == []
    assert served.failure() is None
    # a stream that was answered after its request is closed for good
    served.send(served.client.call(3, b""))
    served.http2.answer(3, HEAD, b"x", TAIL)
    served.send(frame(DATA_FRAME, 0, 3, b"late"))
    assert (3, Http2Code.STREAM_CLOSED) in served.resets()


def test_a_reset_drops_the_answer_that_waits() -> None:
    served = Served({Setting.INITIAL_WINDOW_SIZE: 0})
    served.send(served.client.call(1, b""))
    served.http2.answer(1, HEAD, b"waits", TAIL)
    served.take()
    assert served.send(reset_frame(1, Http2Code.CANCEL)) == [RequestGone(1)]
    served.send(window_frame(0, 100))
    assert served.data_sent() == b""


def test_the_end_is_announced_and_running_calls_end_first() -> None:
    served = Served()
    served.send(served.client.call(1, b""))
    served.http2.go_away()
    served.http2.go_away()
    [announced] = served.take()
    assert (announced.kind, struct.unpack(">II", announced.payload)) == (GOAWAY_FRAME, (1, Http2Code.NO_ERROR))
    assert not served.http2.is_closing
    assert served.send(served.client.call(3, b"too late")) == []
    assert served.send(reset_frame(3, Http2Code.CANCEL) + window_frame(3, 1)) == []
    served.http2.answer(1, HEAD, b"answer", TAIL)
    assert served.http2.is_closing
    assert [one.kind for one in served.take()] == [HEADERS_FRAME, DATA_FRAME, HEADERS_FRAME]
    assert not served.http2.has_failed
    idle = Served()
    idle.http2.go_away()
    assert idle.http2.is_closing


def test_a_client_with_a_small_table_can_read_each_answer() -> None:
    served = Served({Setting.HEADER_TABLE_SIZE: 0})
    served.client.decoder.header_table_size = 0
    served.client.decoder.max_allowed_table_size = 0
    for stream_id in (1, 3):
        served.send(served.client.call(stream_id, b""))
        served.http2.answer(stream_id, HEAD, b"x", TAIL)
        head, _, tail = served.take()
        assert head.payload.startswith(b"\x20") == (stream_id == 1)
        assert served.client.fields(head) | served.client.fields(tail) == {":status": "200", "grpc-status": "0"}


def test_large_headers_end_their_call_and_huge_ones_the_connection() -> None:
    served = Served()
    [opened] = served.send(served.client.request(1, *GRPC, ("x", "y" * HEADERS_BYTES_MAX)))
    assert isinstance(opened, RequestOpened)
    assert opened.is_large
    [opened] = served.send(served.client.request(3))
    assert isinstance(opened, RequestOpened)
    assert not opened.is_large
    # a few bytes may refer to one long header again and again
    served.send(served.client.request(5, *NEEDED, ("x", "y" * 3000), *[("x", "y" * 3000)] * 30))
    assert served.failure() == Http2Code.COMPRESSION_ERROR


def test_a_header_block_without_end_is_bounded() -> None:
    served = Served()
    served.send(frame(HEADERS_FRAME, 0, 1, b"x"))
    for _ in range(BLOCK_BYTES_MAX // 1024 + 1):
        served.send(frame(CONTINUATION_FRAME, 0, 1, bytes(1024)))
    assert served.failure() == Http2Code.ENHANCE_YOUR_CALM


def test_rapid_resets_end_the_connection_and_slow_ones_do_not() -> None:
    served = Served()
    stream_ids = iter(range(1, 1 << 20, 2))
    for _ in range(3 * RESETS_MAX):
        stream_id = next(stream_ids)
        served.now_s += 0.1
        served.send(served.client.request(stream_id) + reset_frame(stream_id, Http2Code.CANCEL))
    assert served.failure() is None
    rapid = b""
    for _ in range(RESETS_MAX + 1):
        stream_id = next(stream_ids)
        rapid += served.client.request(stream_id) + reset_frame(stream_id, Http2Code.CANCEL)
    served.send(rapid)
    assert served.failure() == Http2Code.ENHANCE_YOUR_CALM


def test_pings_are_answered_and_a_flood_of_them_ends_the_connection() -> None:
    served = Served()
    ping = frame(PING_FRAME, 0, 0, b"12345678")
    for _ in range(10):
        served.now_s += 10.0
        served.send(ping)
    assert [(one.flags, one.payload) for one in served.frames] == [(ACK_FLAG, b"12345678")] * 10
    served.frames.clear()
    # a client measures the network with a ping after each answer
    for stream_id in range(1, 21, 2):
        served.send(served.client.call(stream_id, b""))
        served.http2.answer(stream_id, HEAD, b"x", TAIL)
        served.send(ping)
    assert served.failure() is None
    served.send(ping * (PING_STRIKES_MAX + 1))
    assert served.failure() == Http2Code.ENHANCE_YOUR_CALM
    assert served.frames[-1].payload.endswith(b"too_many_pings")


@pytest.mark.parametrize(
    "flood",
    [
        frame(SETTINGS_FRAME, 0, 0),
        frame(DATA_FRAME, 0, 1),
        frame(DATA_FRAME, PADDED_FLAG, 1, b"\x00"),
        frame(PRIORITY_FRAME, 0, 1, bytes(5)),
        frame(77, 0, 1),
        window_frame(0, 1),
        window_frame(1, 1),
        frame(PING_FRAME, ACK_FLAG, 0, bytes(8)),
    ],
)
def test_a_flood_of_frames_without_content_ends_the_connection(flood: bytes) -> None:
    served = Served()
    served.send(served.client.request(1))
    for _ in range(IDLE_FRAMES_MAX // 100):
        assert served.failure() is None
        served.send(flood * 100)
    served.send(flood * 100)
    assert served.failure() == Http2Code.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "flood",
    [
        frame(CONTINUATION_FRAME, 0, 5),
        frame(HEADERS_FRAME, END_HEADERS, 1),
        frame(DATA_FRAME, 0, 1, b"x"),
        reset_frame(3, Http2Code.CANCEL),
        window_frame(3, WINDOW_STEP_BYTES),
        frame(GOAWAY_FRAME, 0, 0, bytes(8)),
    ],
    ids=["parts of a header block", "trailers", "data", "resets", "windows", "announced ends"],
)
def test_a_flood_of_frames_for_ended_streams_ends_the_connection(flood: bytes) -> None:
    """Stream 1 was answered before its request ended, and the client has reset stream 3."""
    served = Served()
    served.send(served.client.request(1))
    served.http2.answer(1, HEAD, b"x", TAIL)
    served.send(served.client.request(3) + reset_frame(3, Http2Code.CANCEL))
    if flood[3] == CONTINUATION_FRAME:
        served.send(frame(HEADERS_FRAME, 0, 5))
    for _ in range(IDLE_FRAMES_MAX // 100 - 1):
        served.send(flood * 100)
        assert served.failure() is None
    served.send(flood * 200)
    assert served.failure() == Http2Code.ENHANCE_YOUR_CALM


def test_a_client_that_reads_much_sends_many_windows() -> None:
    served = Served()
    served.send(served.client.request(1))
    for _ in range(2 * IDLE_FRAMES_MAX // 100):
        served.send((window_frame(0, 1024) + window_frame(1, 1024)) * 100)
    assert served.failure() is None


def test_replies_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLIES_BYTES_MAX", 9 * 100)
    served = Served()
    served.http2.is_writable = False
    served.http2.receive(frame(SETTINGS_FRAME, 0, 0) * 100, 0.0)
    assert not served.http2.has_failed
    served.http2.receive(frame(SETTINGS_FRAME, 0, 0), 0.0)
    assert served.http2.has_failed
    assert REPLIES_BYTES_MAX < 1 << 20


class RandomClient:
    """Sends random frames, mostly legal ones, and checks the server's frames against the windows that it has given."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.made = Http2Bytes()
        self.next_id = 1
        self.whole_window = WINDOW_START
        self.windows: dict[int, int] = {}
        self.ended: set[int] = set()

    def frame(self) -> bytes:
        """Return the next frame or frames."""
        rng = self.rng
        stream_id = max(1, self.next_id - 2 * rng.randint(1, 5))
        choice = rng.randrange(100)
        if choice < 30 or self.next_id == 1:
            stream_id, self.next_id = self.next_id, self.next_id + 2
            self.windows[stream_id] = WINDOW_START
            fields = (*GRPC, ("x", str(rng.random())))
            return self.made.request(stream_id, *fields, end=rng.random() < 0.5, parts=rng.randint(1, 3))
        if choice < 60:
            flags = rng.choice((0, 0, END_STREAM))
            return frame(DATA_FRAME, flags, stream_id, message(rng.randbytes(rng.randrange(9000))))
        if choice < 80:
            increment = rng.choice((1, 1000, 1 << 20))
            stream_id = rng.choice((0, stream_id))
            if stream_id:
                self.windows[stream_id] += increment
            else:
                self.whole_window += increment
            return window_frame(stream_id, increment)
        if choice < 90:
            return reset_frame(stream_id, Http2Code.CANCEL)
        if choice < 93:
            return settings_frame({Setting.HEADER_TABLE_SIZE: rng.randrange(5000), Setting.MAX_FRAME_SIZE: 1 << 20})
        if choice < 97:
            return frame(PING_FRAME, rng.choice((0, ACK_FLAG)), 0, bytes(8))
        # without windows and settings, whose effect `windows` lacks
        kind = rng.choice((DATA_FRAME, HEADERS_FRAME, RESET_FRAME, PUSH_FRAME, GOAWAY_FRAME, CONTINUATION_FRAME, 10))
        return frame(kind, rng.randrange(256), stream_id, rng.randbytes(rng.randrange(40)))

    def check(self, data: bytes) -> None:
        """Check the server's frames: no data without a window, nothing after a stream's end."""
        for one in frames_in(data):
            if one.kind in (DATA_FRAME, HEADERS_FRAME):
                assert one.stream_id not in self.ended
                if one.flags & END_STREAM:
                    self.ended.add(one.stream_id)
            if one.kind == DATA_FRAME:
                self.whole_window -= len(one.payload)
                self.windows[one.stream_id] -= len(one.payload)
                assert min(self.whole_window, self.windows[one.stream_id]) >= 0


def play(seed: int) -> int:
    """Send random frames, and answer random requests. Checks the bounds after each step. Returns the number of
    events."""
    client, http2 = RandomClient(seed), Http2Connection(0.0, streams_max=4)
    rng, opened, count = client.rng, set[int](), 0
    http2.receive(client.made.greeting, 0.0)
    for number in range(80):
        data = client.frame()
        cut = rng.randrange(len(data) + 1)
        for part in (data[:cut], data[cut:]):
            for event in http2.receive(part, number * 20.0):
                count += 1
                if isinstance(event, RequestOpened):
                    assert event.stream_id not in opened | client.ended
                    opened.add(event.stream_id)
                else:
                    assert event.stream_id < client.next_id
        http2.is_writable = rng.random() < 0.7
        if opened and rng.random() < 0.5:
            stream_id, choice = rng.choice(sorted(opened)), rng.randrange(4)
            if choice < 2:
                http2.answer(stream_id, HEAD, rng.randbytes(rng.randrange(1, 90_000)), TAIL)
            elif choice == 2:
                http2.send_tail(stream_id, TAIL)
            else:
                http2.reset(stream_id, Http2Code.CANCEL)
            opened.discard(stream_id)
        if rng.random() < 0.01:
            http2.go_away()
        client.check(http2.take())
        http2.take_drained()
        assert http2.stream_count <= 4
    return count


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_frames_break_nothing(seed: int) -> None:
    play(seed)


def test_random_frames_reach_many_events() -> None:
    assert sum(play(seed) for seed in range(20)) > 200


@given(data=st.binary(max_size=400), greets=st.booleans())
def test_random_bytes_break_nothing(data: bytes, greets: bool) -> None:
    http2 = Http2Connection(0.0)
    http2.receive((Http2Bytes().greeting if greets else PREFACE) + data, 0.0)
    list(frames_in(http2.take()))


@given(block=st.binary(max_size=200))
def test_random_header_blocks_break_nothing(block: bytes) -> None:
    served = Served()
    served.send(frame(HEADERS_FRAME, END_HEADERS | END_STREAM, 1, block))
    assert served.http2.stream_count <= 1


def test_a_client_that_sends_on_and_reads_nothing_takes_bounded_memory() -> None:
    """A client opens all streams, sends data on each without end, and reads no answer."""
    served = Served()
    served.http2.is_writable = False
    tracemalloc.start()
    try:
        for stream_id in range(1, 2 * STREAMS_MAX, 2):
            served.http2.receive(served.client.request(stream_id), 0.0)
            served.http2.receive(frame(DATA_FRAME, END_STREAM, stream_id, bytes(10_000)), 0.0)
            served.http2.answer(stream_id, HEAD, b"x", TAIL)
            # the data of further streams is refused, and dropped
            served.http2.receive(frame(77, 0, 0, bytes(1000)), 0.0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert served.http2.stream_count == STREAMS_MAX
    assert held < 4 << 20
