"""The two checksums."""

from __future__ import annotations

import pytest

from raymq.record.crc import PROPERTY_CRC_LENGTH, PROPERTY_CRC_PLACEHOLDER, body_crc, property_crc, property_crc_digits


def test_body_crc_clears_the_top_bit() -> None:
    assert body_crc(b"a") == 0x68B7BE43  # zlib gives 0xe8b7be43


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
