"""Tests of gRPC's messages, deadlines and statuses, without a connection."""

from __future__ import annotations

import gzip
import zlib
from itertools import pairwise
from urllib.parse import unquote

import pytest
from hpack import Decoder
from hypothesis import given, strategies as st

from raymq.gateway.front.messages import (
    STATUS_TEXT_MAX,
    TIMEOUT_S_MAX,
    CallEndedError,
    CallMetadata,
    GrpcMessage,
    GrpcStatus,
    MessageBuffer,
    encoding_is_known,
    inflated,
    only_trailers,
    prefixed,
    status_text,
    timeout_s,
    trailers,
)
from tests.support.gateway.http2_client import message

BYTES_MAX = 1000


def test_handlers_get_neither_pseudo_headers_nor_binary_values() -> None:
    metadata = CallMetadata({b":path": b"/s/echo", b"x-key-bin": b"AA==", b"x-mq-client-id": b"me\xff"})
    assert dict(metadata) == {"x-mq-client-id": "me\ufffd"}
    assert len(metadata) == 1
    assert [metadata.get(name) for name in (":path", "x-key-bin", "other")] == [None] * 3


@given(
    messages=st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=10),
)
def test_messages_are_the_same_for_each_split(messages: list[tuple[bytes, bool]], cuts: list[int]) -> None:
    data = b"".join(message(body, compressed=compressed) for body, compressed in messages)
    buffer = MessageBuffer(BYTES_MAX)
    taken = []
    for first, end in pairwise([0, *sorted(cuts), len(data)]):
        buffer.add(data[first:end])
        while buffer.has_message:
            taken.append(buffer.take())
        assert buffer.take() is None
    assert taken == [GrpcMessage(compressed, body) for body, compressed in messages]
    assert len(buffer) == 0


def test_a_message_that_is_too_large_is_refused_at_its_first_bytes() -> None:
    buffer = MessageBuffer(BYTES_MAX)
    with pytest.raises(CallEndedError) as caught:
        buffer.add(message(bytes(BYTES_MAX + 1))[:5])
    assert caught.value.status == GrpcStatus.RESOURCE_EXHAUSTED
    buffer = MessageBuffer(BYTES_MAX)
    buffer.add(message(b"first") + message(bytes(BYTES_MAX + 1))[:5])
    assert buffer.take() == GrpcMessage(False, b"first")
    with pytest.raises(CallEndedError):
        buffer.take()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3S", 3.0),
        ("250m", 0.25),
        ("5u", 5e-6),
        ("7n", 7e-9),
        ("2M", 120.0),
        ("1H", 3600.0),
        ("99999999H", TIMEOUT_S_MAX),
    ],
)
def test_deadlines(text: str, seconds: float) -> None:
    assert timeout_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "3", "S", "-1S", "123456789S", "3s", "3S ", "٣S"])
def test_a_malformed_deadline_is_refused(text: str) -> None:
    with pytest.raises(CallEndedError, match="grpc-timeout"):
        timeout_s(text)


@given(text=st.text(max_size=60))
def test_a_status_message_is_readable_ascii(text: str) -> None:
    encoded = status_text(text)
    assert encoded.isascii()
    assert encoded.isprintable()
    assert unquote(encoded) == text


def test_statuses_are_header_blocks() -> None:
    long = trailers(GrpcStatus.INTERNAL, "%" * 9999)
    fields = dict(Decoder().decode(long))
    assert fields == {"grpc-status": "13", "grpc-message": "%25" * STATUS_TEXT_MAX}
    fields = dict(Decoder().decode(only_trailers(GrpcStatus.UNIMPLEMENTED, "no")))
    assert fields == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "12",
        "grpc-message": "no",
        "grpc-accept-encoding": "identity,gzip,deflate",
    }
    assert prefixed(b"abc") == b"\x00\x00\x00\x00\x03abc"


def test_compressed_messages_are_inflated_up_to_the_bound() -> None:
    body = b"body" * 250
    assert inflated(gzip.compress(body), "gzip", BYTES_MAX) == body
    assert inflated(zlib.compress(body), "deflate", BYTES_MAX) == body
    for data, encoding, status in (
        (gzip.compress(bytes(BYTES_MAX + 1)), "gzip", GrpcStatus.RESOURCE_EXHAUSTED),
        (gzip.compress(bytes(100 << 20)), "gzip", GrpcStatus.RESOURCE_EXHAUSTED),
        (gzip.compress(body)[:-1], "gzip", GrpcStatus.INTERNAL),
        (b"rubbish", "gzip", GrpcStatus.INTERNAL),
        (gzip.compress(body), "identity", GrpcStatus.INTERNAL),
    ):
        with pytest.raises(CallEndedError) as caught:
            inflated(data, encoding, BYTES_MAX)
        assert caught.value.status == status
    assert [encoding_is_known(one) for one in ("gzip", "deflate", "identity", "br")] == [True, True, True, False]
