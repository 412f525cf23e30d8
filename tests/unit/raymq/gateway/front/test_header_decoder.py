"""Tests that the decoder of header blocks agrees with hpack's decoder on legal blocks and on rubbish."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder, HPACKDecodingError, HPACKError
from hpack.table import HeaderTable
from hypothesis import given, settings, strategies as st

from raymq.gateway.front.header_decoder import HeaderDecoder

BYTES_MAX = 2000
NAMES = st.sampled_from([b":path", b":method", b"te", b"user-agent", b"x-mq-request-id", b"x", b"x" * 200, b"x" * 5000])
FIELDS = st.tuples(NAMES | st.binary(max_size=20), st.binary(max_size=90) | st.just(b"POST"), st.booleans())
SIZES = st.none() | st.integers(0, 5000)


def both(ours: HeaderDecoder, theirs: Decoder, block: bytes) -> bool:
    """Decode a block with both decoders, and compare the results. Returns whether the block is legal."""
    try:
        expected = [tuple(field) for field in theirs.decode(block, raw=True)]
    # hpack's decoder raises IndexError at the end of some blocks
    except (HPACKError, IndexError):
        with pytest.raises(HPACKDecodingError):
            ours.decode(block)
        return False
    assert ours.decode(block) == expected
    return True


@settings(max_examples=300)
@given(
    blocks=st.lists(st.tuples(SIZES, st.lists(FIELDS, max_size=8), st.booleans()), max_size=8),
    cut=st.integers(0, 60),
)
def test_blocks_of_an_encoder(blocks: list[tuple[int | None, list[tuple[bytes, bytes, bool]], bool]], cut: int) -> None:
    encoder = Encoder()
    ours, theirs = HeaderDecoder(BYTES_MAX), Decoder(max_header_list_size=BYTES_MAX)
    for size, fields, huffman in blocks:
        if size is not None:
            encoder.header_table_size = size
        block = encoder.encode(fields, huffman=huffman)
        if not both(ours, theirs, block):
            return
    whole = encoder.encode([(b"x-last", b"value" * 9, False), (b":path", b"/", False)])
    both(ours, theirs, whole[:cut])


@settings(max_examples=500)
@given(blocks=st.lists(st.binary(max_size=40), max_size=6))
def test_random_blocks(blocks: list[bytes]) -> None:
    ours, theirs = HeaderDecoder(BYTES_MAX), Decoder(max_header_list_size=BYTES_MAX)
    for block in blocks:
        if not both(ours, theirs, block):
            return


@pytest.mark.parametrize(
    "block",
    [
        *(bytes([0x80 | index]) for index in range(1, len(HeaderTable.STATIC_TABLE) + 1)),
        b"\x80",
        b"\xbe",
        b"\xff\x80\x80\x80\x80\x80\x80\x00",
        b"\x00\x7f\x80\x80\x80\x01",
        b"\x20\x20\x82",
        b"\x82\x20",
        b"\x3f\xe1\x1f\x82",
        b"\x3f\xe2\x1f\x82",
        b"\x10\x01a\x01b",
        b"\x00\x81\xff\x00",
        b"\x00\x01a\x84\xff\xff\xff\xff",
        b"\x40\x00\x00",
        b"",
    ],
)
def test_special_blocks(block: bytes) -> None:
    both(HeaderDecoder(BYTES_MAX), Decoder(max_header_list_size=BYTES_MAX), block)


def test_headers_are_bounded() -> None:
    decoder = HeaderDecoder(BYTES_MAX)
    long = Encoder().encode([(b"x", b"y" * 900)])
    with pytest.raises(HPACKDecodingError, match="too large"):
        decoder.decode(long + b"\xbe\xbe")
