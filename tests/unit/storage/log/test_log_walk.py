"""Tests of the position at which a scan of the log continues after a damaged record."""

from __future__ import annotations

import random

import numpy as np

from raymq.records.format.layout import MIN_RECORD_SIZE, encode_blank, encode_host, record_ends
from raymq.records.kernels.stamp import stamp_many
from storage.log.log_walk import fills_file, is_intact, resume_behind
from tests.support.stores.stores import make_batch

START = 1 << 20
HOST = encode_host("127.0.0.1", 1)


def file_of(*bodies: bytes, size: int = 0) -> tuple[memoryview, list[int]]:
    """Return a log file at physical offset START with one record per body, and the positions of the records. If `size`
    is set, a BLANK record fills the file up to `size`."""
    batch = make_batch(bodies)
    ends = record_ends(batch.sizes)
    data = bytearray(batch.records)
    stamp_many(ends, 7, START, 1000, HOST, memoryview(data))
    starts = [0, *ends[:-1].tolist()]
    if size:
        data += encode_blank(size - len(data)).ljust(size - len(data), b"\0")
    return memoryview(data), starts


def test_any_flipped_bit_of_a_record_leads_to_the_next_one():
    data, starts = file_of(b"a" * 50, b"b" * 60, b"c" * 70)
    for position in range(starts[1], starts[2]):
        for bit in range(8):
            data[position] ^= 1 << bit
            if not is_intact(data, START, starts[1]):
                assert resume_behind(data, START, starts[1]) == starts[2], (position, bit)
            data[position] ^= 1 << bit


def test_a_wrong_size_that_leads_to_an_intact_record_skips_none():
    data, starts = file_of(*[b"x" * 50] * 6)
    assert len(set(np.diff(starts).tolist())) == 1
    data[starts[1] : starts[1] + 4] = (3 * (starts[2] - starts[1])).to_bytes(4)
    assert resume_behind(data, START, starts[1]) == starts[2]


def test_a_record_within_a_body_is_not_taken_for_the_next_one():
    inner, _ = file_of(b"not me")
    data, starts = file_of(b"first", bytes(inner), b"last")
    place = bytes(data).find(bytes(inner))
    # The body of the second record looks like a record (`inner`). Set the physical offset in `inner` to its real
    # position, so that it looks like a record of this log.
    data[place + 28 : place + 36] = (START + place).to_bytes(8)
    assert is_intact(data, START, place)
    data[starts[1] + 8] ^= 1  # damage the checksum of the second record's body
    assert resume_behind(data, START, starts[1]) == starts[2]


def test_the_blank_ends_the_damage_and_only_if_it_fills_the_file():
    data, starts = file_of(b"a", b"b", size=4096)
    blank = len(bytes(data).rstrip(b"\0")) - 8
    data[starts[1] + 90] ^= 0xFF
    data[starts[1] + 88] ^= 0xFF
    found = resume_behind(data, START, starts[1])
    assert found is not None
    assert fills_file(data, found)
    assert found == blank
    data[blank + 3] ^= 1
    assert resume_behind(data, START, starts[1]) is None


def test_garbage_of_any_length_is_passed():
    seed = random.SystemRandom().randrange(1000)
    print(f"seed {seed}")
    dice = random.Random(seed)
    records, starts = file_of(b"a", b"b")
    for length in (1, 8, MIN_RECORD_SIZE, 5000, (1 << 20) + 3):
        data = memoryview(bytearray(dice.randbytes(length) + bytes(records)))
        assert resume_behind(data, START - length, 0) == length
        assert resume_behind(data, START - length, 0, length) is None
        assert resume_behind(data[: length + 50], START - length, 0) is None
    assert starts[0] == 0
