"""Tests of the fast scan of a commit log, for any record sizes and any damage. The scan finds the same records as a
loop that reads record after record.

450 random logs. RAYMQ_SOAK=1 tests 15,000 logs; RAYMQ_WALK_SEED repeats a single log.
"""

from __future__ import annotations

import os
import random
import struct

import pytest

from raymq.records.format.layout import BLANK_MAGIC, MAGIC_V1, MAGIC_V2, MIN_RECORD_SIZE
from raymq.records.format.walk import walk_records

ONE_SEED = os.environ.get("RAYMQ_WALK_SEED")
ROUNDS = 5000 if os.environ.get("RAYMQ_SOAK") == "1" else 150


def hop(data: bytes, position: int, limit: int, *, any_magic: bool) -> tuple[list[int], int]:
    """Scan the log's records in a simple loop. Returns the records' start positions, and the position at which the scan
    ended."""
    starts = []
    while position < limit and position <= len(data) - MIN_RECORD_SIZE:
        size, magic = struct.unpack_from(">ii", data, position)
        if size < MIN_RECORD_SIZE or position + size > len(data):
            break
        if not any_magic and magic not in (MAGIC_V1, MAGIC_V2):
            break
        starts.append(position)
        position += size
    return starts, position


def sizes_of(dice: random.Random) -> list[int]:
    """Return the sizes of a run of records: all equal, repeating, or random."""
    count = dice.choice((1, 5, 40, 300, 3000, 20_000))
    pattern = [
        dice.randrange(MIN_RECORD_SIZE, MIN_RECORD_SIZE + 60) for _ in range(dice.choice((1, 1, 2, 3, 8, 9, 40)))
    ]
    if dice.random() < 0.2:
        return [dice.choice(pattern) for _ in range(min(count, 3000))]
    return (pattern * (count // len(pattern) + 1))[:count]


def random_log(dice: random.Random) -> bytearray:
    """Return random log bytes with several runs of records. Most records have the same magic number, and one record may
    have a damaged header."""
    sizes = [size for _ in range(dice.choice((1, 2, 5))) for size in sizes_of(dice)]
    magic = dice.choice((MAGIC_V1, MAGIC_V2))
    log, starts = bytearray(sum(sizes)), []
    position = 0
    for size in sizes:
        other = dice.random() < 0.0005
        struct.pack_into(">ii", log, position, size, MAGIC_V1 + MAGIC_V2 - magic if other else magic)
        starts.append(position)
        position += size
    for _ in range(dice.choice((0, 0, 1))):
        at = dice.choice(starts)
        harm = dice.choice(((0, 0), (-1, magic), (MIN_RECORD_SIZE - 1, magic), (2**31 - 1, magic), (100, BLANK_MAGIC)))
        struct.pack_into(">ii", log, at, *harm)
    if dice.random() < 0.3:
        del log[dice.randrange(len(log)) :]
    if dice.random() < 0.3:
        log += bytes(dice.randrange(200))
    return log


@pytest.mark.parametrize("part", range(3))
def test_the_walk_finds_the_same_records_as_hopping(part: int) -> None:
    for seed in [int(ONE_SEED)] if ONE_SEED else range(part * ROUNDS, (part + 1) * ROUNDS):
        dice = random.Random(seed)
        data = bytes(random_log(dice))
        for any_magic in (False, True):
            limit = dice.choice((len(data), len(data) + 10, dice.randrange(len(data) + 1)))
            first = hop(data, 0, len(data), any_magic=True)[0]
            position = dice.choice([0, *first[:50]])
            walked = walk_records(memoryview(data), position, limit, any_magic=any_magic)
            starts, end = hop(data, position, limit, any_magic=any_magic)
            assert (walked.starts.tolist(), walked.end) == (starts, end), f"seed {seed}; RAYMQ_WALK_SEED repeats it"


def test_the_walk_continues_after_a_record_with_another_magic() -> None:
    """A run of records of equal size may contain records of both magic numbers (format versions 1 and 2)."""
    head = {magic: struct.pack(">ii", 100, magic).ljust(100, b"\0") for magic in (MAGIC_V1, MAGIC_V2)}
    data = head[MAGIC_V1] * 2000 + head[MAGIC_V2] * 2000
    assert walk_records(data).starts.tolist() == list(range(0, 400_000, 100))
