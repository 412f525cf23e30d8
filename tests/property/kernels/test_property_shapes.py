"""Tests of reading the properties of many records of equal layout (shape) at once. For any texts, the result equals
that of reading each record alone.

400 random blocks. RAYMQ_SOAK=1 tests 20,000 blocks; RAYMQ_SHAPES_SEED repeats a single block.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from raymq.common.java_text import decode_utf8
from raymq.records.format.hashing import java_hash
from raymq.records.format.layout import decode_properties
from raymq.records.kernels.property_shapes import PropertyShape, find_property_shapes

ONE_SEED = os.environ.get("RAYMQ_SHAPES_SEED")
ROUNDS = 20_000 if os.environ.get("RAYMQ_SOAK") == "1" else 400

NAMES = ("TAGS", "KEYS", "RMQ_SEQ", "a", "é", "")
ODD = (b"\xff", b"\x01", b"\x02", b"\x00", "ü".encode())


def random_value(dice: random.Random) -> bytes:
    length = dice.choice((0, 1, 2, 4, 4, 4))
    alphabet = dice.choice((b"0123456789", b"abc", b"a"))
    return bytes(dice.choice(alphabet) for _ in range(length))


def random_text(dice: random.Random, names: list[str]) -> bytes:
    pieces = [name.encode() + b"\x01" + random_value(dice) for name in names]
    if dice.random() < 0.02:
        pieces.append(dice.choice((b"", b"text", pieces[0] if pieces else b"x", b"TAGS\x01again")))
    text = bytearray(b"\x02".join(pieces) + dice.choice((b"\x02", b"\x02", b"\x02", b"")))
    if text and dice.random() < 0.02:
        text[dice.randrange(len(text))] = dice.choice(ODD)[0]
    return bytes(text)


def random_texts(dice: random.Random) -> list[bytes]:
    kinds = [dice.sample(NAMES, dice.randrange(len(NAMES))) for _ in range(dice.choice((1, 2, 3)))]
    return [random_text(dice, dice.choice(kinds)) for _ in range(dice.choice((1, 3, 30, 1000)))]


def shapes_of(texts: list[bytes]) -> list[PropertyShape] | None:
    sizes = np.array([len(text) for text in texts], np.int64)
    data = np.frombuffer(b"head" + b"".join(texts), np.uint8)
    return find_property_shapes(data, np.cumsum(sizes) - sizes + 4, sizes)


def check(texts: list[bytes], shapes: list[PropertyShape]) -> None:
    assert sorted(row for shape in shapes for row in shape.rows.tolist()) == list(range(len(texts)))
    for shape in shapes:
        assert sorted(shape.rows.tolist()) == shape.rows.tolist()
        expected = [decode_properties(texts[row]) for row in shape.rows.tolist()]
        for name in NAMES[:-1]:
            values = shape.get(name.encode())
            if values is None:
                assert all(name not in properties for properties in expected)
                continue
            wanted = [properties[name] for properties in expected]
            found = [bytes(value) for value in values.table]
            assert [decode_utf8(value) for value in found] == wanted
            different, codes = values.distinct()
            assert [different[code] for code in codes.tolist()] == found
            assert len(set(different)) == len(different)
            numbers = values.numbers()
            assert (numbers is None) == (not all(value.isdigit() for value in found))
            if numbers is not None:
                assert numbers.tolist() == [int(value) for value in found]
            hashes = values.java_hashes()
            assert (hashes is None) == (not all(value.isascii() for value in found))
            if hashes is not None:
                assert hashes.view(np.int32).tolist() == [java_hash(text) for text in wanted]


@pytest.mark.parametrize("part", range(2))
def test_shapes_hold_the_properties_of_each_record(part: int) -> None:
    taken = 0
    for seed in [int(ONE_SEED)] if ONE_SEED else range(part * ROUNDS // 2, (part + 1) * ROUNDS // 2):
        texts = random_texts(random.Random(seed))
        shapes = shapes_of(texts)
        if shapes is not None:
            taken += 1
            try:
                check(texts, shapes)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}; RAYMQ_SHAPES_SEED repeats it") from error
    assert taken > ROUNDS // 8 or ONE_SEED


def test_a_text_of_18_digits_is_a_number_and_one_of_19_is_not() -> None:
    for digits, expected in ((18, [10**17, 10**17 + 1]), (19, None)):
        texts = [b"n\x01" + b"%d" % (10 ** (digits - 1) + row) for row in range(2)]
        shapes = shapes_of(texts)
        assert shapes is not None
        values = shapes[0].get(b"n")
        assert values is not None
        numbers = values.numbers()
        assert (None if numbers is None else numbers.tolist()) == expected


def test_records_without_a_common_shape_or_with_a_repeated_property_have_no_shapes() -> None:
    assert shapes_of([b"n%d\x01v\x02" % row for row in range(9)]) is None
    assert shapes_of([b"n\x01v\x02n\x01w\x02"] * 100) is None
    assert shapes_of([b"n\x01" + b"v" * 3000]) is None
