"""The extension of a consume queue (spec/storage.md §2 "Extension", fact 30)."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.errors import InvalidArgumentError
from storage.consume_queue_ext import ConsumeQueueExt, ExtUnit, address_of, is_ext_address, offset_of

UNIT = ExtUnit(65, 1_700_000_000_001, bytes(range(8)))
"""28 bytes: three of them fit in 100."""


def open_ext(root: Path) -> ConsumeQueueExt:
    return ConsumeQueueExt(root, "T", 0, file_size=100)


def unit(index: int) -> ExtUnit:
    return UNIT._replace(tags_code=index)


def test_fact_30_addresses_and_units(tmp_path):
    assert address_of(22) == -9223372036854775786
    assert offset_of(-9223372036854775786) == 22
    assert UNIT.encode().hex().startswith("001c00000000000000410000018bcfe568010008")
    ext = open_ext(tmp_path)
    assert ext.put(UNIT) == address_of(0)
    assert (ext.directory / "00000000000000000000").read_bytes()[:28] == UNIT.encode()


def test_no_hash_is_an_address():
    assert [is_ext_address(code) for code in (-(2**63), -2147483649, -2147483648, 0, 65)] == [True, True, *[False] * 3]
    with pytest.raises(InvalidArgumentError, match="tag code"):
        offset_of(-1)


def test_units_roll_to_the_next_file_and_the_end_is_marked(tmp_path):
    ext = open_ext(tmp_path)
    addresses = [ext.put(unit(index)) for index in range(7)]
    assert [offset_of(address) for address in addresses] == [0, 28, 56, 100, 128, 156, 200]
    assert (ext.directory / "00000000000000000000").read_bytes()[84:86] == b"\xff\xff"
    for again in (ext, open_ext(tmp_path)):
        assert [again.get(address) for address in addresses] == [unit(index) for index in range(7)]
        assert again.end_offset == 228
        assert again.get(address_of(228)) is None
    assert offset_of(open_ext(tmp_path).put(unit(7))) == 228


def test_a_file_that_ends_with_its_mark_is_full_after_opening_it_again(tmp_path):
    ext = open_ext(tmp_path)
    for index in range(4):
        ext.put(unit(index))
    (ext.directory / "00000000000000000100").unlink()
    assert offset_of(open_ext(tmp_path).put(unit(9))) == 100


@pytest.mark.parametrize("keep", range(7))
def test_truncation_takes_a_unit_and_all_behind_it(tmp_path, keep):
    ext = open_ext(tmp_path)
    addresses = [ext.put(unit(index)) for index in range(7)]
    ext.truncate_from(addresses[keep])
    for again in (ext, open_ext(tmp_path)):
        found = [again.get(address) for address in addresses]
        assert found == [unit(index) for index in range(keep)] + [None] * (7 - keep)
    assert ext.put(unit(keep)) == addresses[keep]


def test_files_go_when_all_their_units_are_before_what_is_needed(tmp_path):
    ext = open_ext(tmp_path)
    addresses = [ext.put(unit(index)) for index in range(7)]
    assert ext.delete_before(addresses[2]) == 0
    assert ext.delete_before(addresses[4]) == 1
    assert ext.delete_before(address_of(10_000)) == 1
    assert ext.min_offset == 200
    assert [ext.get(address) is not None for address in addresses] == [False] * 6 + [True]
    assert open_ext(tmp_path).get(addresses[6]) == unit(6)


def test_a_unit_too_long_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="exceeds 32767"):
        ConsumeQueueExt(tmp_path, "T", 0).put(UNIT._replace(bitmap=bytes(32748)))
    with pytest.raises(InvalidArgumentError, match="does not fit"):
        open_ext(tmp_path).put(UNIT._replace(bitmap=bytes(77)))
    assert open_ext(tmp_path).put(UNIT._replace(bitmap=bytes(76))) == address_of(0)
