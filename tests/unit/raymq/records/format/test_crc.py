"""Tests of the two checksums of a record: body CRC and property CRC."""

from __future__ import annotations

import zlib
from random import Random

import numpy as np
import pytest

from raymq.records.format.crc import (
    PROPERTY_CRC_LENGTH,
    PROPERTY_CRC_PLACEHOLDER,
    body_crc,
    body_crcs,
    crc32,
    property_crc,
    property_crc_digits,
)


def test_body_crc_clears_the_top_bit() -> None:
    # zlib.crc32 itself returns 0xe8b7be43; the body CRC is this value with the top bit cleared
    assert body_crc(b"a") == 0x68B7BE43


def test_body_crc_of_nothing_is_zero() -> None:
    assert body_crc(b"") == 0


def test_body_crc_reads_any_buffer() -> None:
    assert body_crc(memoryview(b"hi")) == body_crc(bytearray(b"hi")) == body_crc(b"hi")


@pytest.mark.parametrize(("crc", "digits"), [(0, b"0000000000"), (7, b"7000000000"), (1809997533, b"3357999081")])
def test_property_crc_digits_are_least_significant_first(crc: int, digits: bytes) -> None:
    assert property_crc_digits(crc) == digits


def test_property_crc_covers_all_but_its_own_bytes() -> None:
    assert len(PROPERTY_CRC_PLACEHOLDER) == PROPERTY_CRC_LENGTH
    record = b"record" + PROPERTY_CRC_PLACEHOLDER
    expected = b"__CRC32#\x01" + property_crc_digits(body_crc(b"record")) + b"\x02"
    assert property_crc(record) == expected
    assert property_crc(b"record" + b"?" * PROPERTY_CRC_LENGTH) == expected


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_body_crcs_are_the_crcs_of_the_ranges_one_by_one(count: int) -> None:
    random = Random(count)
    data = random.randbytes(5000)
    at = np.array([random.randrange(5000) for _ in range(count)], np.int64)
    ends = np.array([random.randint(start, 5000) for start in at.tolist()], np.int64)
    expected = [zlib.crc32(data[start:end]) & 0x7FFFFFFF for start, end in zip(at.tolist(), ends.tolist(), strict=True)]
    assert body_crcs(data, at, ends).tolist() == expected
    assert body_crcs(memoryview(data), at, ends).dtype == np.int32


@pytest.mark.parametrize("size", [0, 1, 15, 16, 64, 1024, 100_000])
def test_crc32_is_that_of_zlib(size: int) -> None:
    data = Random(size).randbytes(size)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data, 0x1234) == zlib.crc32(data, 0x1234)
