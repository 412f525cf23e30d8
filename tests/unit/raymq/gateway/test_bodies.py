"""Tests of the bodies that clients send: digests in all their texts, compression, and bounds."""

from __future__ import annotations

import gzip
import hashlib
import zlib

import pytest
from hypothesis import given, settings, strategies as st

from raymq.gateway.convert.bodies import body_of, has_digest, md5_digest
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.wire.enums import Code, DigestType, Encoding
from raymq.gateway.wire.messages import Digest, Message, SystemProperties
from tests.support.cases import examples

MAX = 1 << 20
BODY = b"body 42"


def sent(body: bytes, encoding: int = Encoding.IDENTITY, digest: Digest | None = None) -> Message:
    return Message(body=body, system_properties=SystemProperties(body_encoding=encoding, body_digest=digest))


def refused(message: Message) -> Code:
    with pytest.raises(CallRefusedError) as caught:
        body_of(message, MAX)
    return caught.value.status


def texts_of(body: bytes) -> list[tuple[int, str]]:
    """Return the digests of a body in all texts that clients write."""
    crc = zlib.crc32(body)
    return [
        (DigestType.CRC32, f"{crc:08X}"),
        (DigestType.CRC32, f"{crc:X}"),
        (DigestType.CRC32, str(crc)),
        (DigestType.MD5, hashlib.md5(body).hexdigest().upper()),
        (DigestType.MD5, hashlib.md5(body).hexdigest()),
        (DigestType.SHA1, hashlib.sha1(body).hexdigest().upper()),
    ]


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_a_body_comes_through_with_each_digest_and_encoding(body: bytes) -> None:
    packed = gzip.compress(body)
    for kind, text in texts_of(body):
        assert body_of(sent(body, digest=Digest(type=kind, checksum=text)), MAX) == body
        assert body_of(sent(packed, Encoding.GZIP, Digest(type=kind, checksum=text)), MAX) == body
    for kind, text in texts_of(packed):
        assert body_of(sent(packed, Encoding.GZIP, Digest(type=kind, checksum=text)), MAX) == body
    assert has_digest(body, md5_digest(body))


def test_a_checksum_with_leading_zeros_matches_in_both_hexadecimal_texts() -> None:
    body = next(body for number in range(10_000) if zlib.crc32(body := b"%d" % number) < 1 << 24)
    for kind, text in texts_of(body):
        assert has_digest(body, Digest(type=kind, checksum=text))


@pytest.mark.parametrize(("kind", "text"), texts_of(BODY))
def test_a_body_with_the_digest_of_another_body_is_corrupted(kind: int, text: str) -> None:
    assert refused(sent(b"other", digest=Digest(type=kind, checksum=text))) == Code.MESSAGE_CORRUPTED
    assert refused(sent(gzip.compress(b"other"), Encoding.GZIP, Digest(type=kind, checksum=text))) == (
        Code.MESSAGE_CORRUPTED
    )


def test_a_body_without_a_digest_is_accepted() -> None:
    assert body_of(sent(BODY), MAX) == BODY
    assert body_of(sent(BODY, Encoding.ENCODING_UNSPECIFIED, Digest(type=DigestType.MD5)), MAX) == BODY


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (sent(b""), Code.MESSAGE_BODY_EMPTY),
        (sent(gzip.compress(b""), Encoding.GZIP), Code.MESSAGE_BODY_EMPTY),
        (sent(b"x" * (MAX + 1)), Code.MESSAGE_BODY_TOO_LARGE),
        (sent(gzip.compress(b"x" * (MAX + 1)), Encoding.GZIP), Code.MESSAGE_BODY_TOO_LARGE),
        (sent(gzip.compress(b"x" * (MAX * 100)), Encoding.GZIP), Code.MESSAGE_BODY_TOO_LARGE),
        (sent(b"not gzip", Encoding.GZIP), Code.MESSAGE_CORRUPTED),
        (sent(gzip.compress(BODY)[:-3], Encoding.GZIP), Code.MESSAGE_CORRUPTED),
        (sent(gzip.compress(BODY) + b"more", Encoding.GZIP), Code.MESSAGE_CORRUPTED),
        (sent(BODY, 7), Code.UNSUPPORTED),
        (sent(BODY, digest=Digest(type=7, checksum="a")), Code.UNSUPPORTED),
    ],
    ids=range(10),
)
def test_an_illegal_body_is_refused(message: Message, code: Code) -> None:
    assert refused(message) == code


def test_bodies_of_the_maximum_size_are_accepted() -> None:
    body = b"x" * MAX
    assert body_of(sent(body), MAX) == body
    assert body_of(sent(gzip.compress(body), Encoding.GZIP), MAX) == body
