"""Tests that the two ways of reading the record properties in a block of the log give equal results."""

from __future__ import annotations

import random

import numpy as np
import pytest

from raymq.common.message import Message
from raymq.records.format.encode import ProducerSequence, encode_batch
from raymq.records.format.walk import walk_records
from raymq.records.kernels.fields import find_fields
from raymq.records.kernels.property_shapes import find_property_shapes
from storage.dispatch import block_properties
from storage.dispatch.block_properties import FoundProperties, read_properties


def records(dice: random.Random) -> bytes:
    """Return the bytes of random batches of a few producers. Some messages have tags."""
    tags = dice.choice(([None], ["a"], ["a", "b"], [None, "ab", "é"], ["Aa", "BB"]))
    parts = []
    for number in range(dice.randrange(1, 6)):
        messages = [Message("t", b"body", tags=dice.choice(tags)) for _ in range(dice.randrange(1, 60))]
        producer = ProducerSequence(f"p{dice.randrange(3)}", dice.randrange(2), dice.randrange(5000))
        batch = encode_batch(
            messages,
            0,
            born_host=("127.0.0.1", 1),
            born_timestamp_ms=1,
            message_ids=[f"{number:028X}{row:04X}" for row in range(len(messages))],
            producer=producer if dice.random() < 0.8 else None,
            extra_properties={"REAL_TOPIC": "u"} if dice.random() < 0.2 else None,
        )
        parts.append(bytes(batch.records))
    return b"".join(parts)


def plain(found: FoundProperties | None) -> object:
    assert found is not None
    rows, codes, sequences, instances = found.producers
    producers = [
        (row, *instances[code], sequence)
        for row, code, sequence in zip(rows.tolist(), codes.tolist(), sequences.tolist(), strict=True)
    ]
    return found.tags_codes.tolist(), producers, found.was_moved.tolist(), found.has_light_queue_units


def test_property_shapes_equal_decoded_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes_taken = 0
    for seed in range(300):
        data = records(random.Random(seed))
        bytes_of = np.frombuffer(data, np.uint8)
        fields = find_fields(bytes_of, walk_records(data).starts)
        shapes = find_property_shapes(bytes_of, fields.properties_at, fields.properties_size)
        shapes_taken += shapes is not None
        by_shapes = plain(read_properties(bytes_of, fields))
        with monkeypatch.context() as patched:
            patched.setattr(block_properties, "find_property_shapes", lambda *_: None)
            assert by_shapes == plain(read_properties(bytes_of, fields)), f"seed {seed}"
    assert 100 < shapes_taken <= 300
