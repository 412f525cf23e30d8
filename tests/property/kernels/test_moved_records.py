"""Tests of moving delayed records to their destination queues: moving many records at once produces the same records as
moving each record alone.

300 random chunks. RAYMQ_SOAK=1 tests 15,000 chunks; RAYMQ_MOVED_SEED repeats a single chunk.
"""

from __future__ import annotations

import os
import random
import struct
from itertools import pairwise

import pytest

from raymq.common.delay import TIMER_TOPIC
from raymq.common.errors import RaymqError
from raymq.common.message import Message
from raymq.records.format.encode import ProducerSequence, WaitingBatch, encode_batch
from raymq.records.format.hashing import tags_code
from raymq.records.format.rewrite import move_record, read_waiting
from raymq.records.format.walk import walk_records
from raymq.records.kernels.moved_records import MovedRecord, move_waiting_records

ONE_SEED = os.environ.get("RAYMQ_MOVED_SEED")
ROUNDS = 15_000 if os.environ.get("RAYMQ_SOAK") == "1" else 300


def random_records(dice: random.Random) -> list[bytes]:
    topics = dice.choice((["a"], ["a", "b"], ["a", "t" * 127, "%RETRY%" + "g" * 150]))
    tags = dice.choice(([None], ["x", "y"], ["x", "é", None]))
    messages = [
        Message(
            dice.choice(topics),
            b"b" * dice.randrange(1, 30),
            tags=dice.choice(tags),
            properties=dice.choice(({}, {"user": "1"})),
            deliver_at_ms=1_700_000_000_000 + dice.randrange(1000),
        )
        for _ in range(dice.choice((1, 3, 100)))
    ]
    batch = encode_batch(
        messages,
        0,
        born_host=(dice.choice(("127.0.0.1",) * 9 + ("::1",)), 1),
        born_timestamp_ms=1,
        message_ids=[f"{row:032X}" for row in range(len(messages))],
        producer=dice.choice((None, ProducerSequence("p", 1, 95))),
        extra_properties=dice.choice((None, None, {"INNER_MULTI_QUEUE_OFFSET": "3"})),
        append_prop_crc=dice.random() < 0.1,
        reconsume_times=dice.choice((0, 3)),
        waiting=WaitingBatch(TIMER_TOPIC, [dice.randrange(12) for _ in messages]),
    )
    starts = [*walk_records(batch.records).starts.tolist(), len(batch.records)]
    return [bytes(batch.records[start:end]) for start, end in pairwise(starts)]


def harm(dice: random.Random, record: bytes) -> bytes:
    """Return a copy of the record with one random change. Some of these changes are not detected by the functions that
    parse records."""
    names = (b"REAL_TOPIC\x01", b"REAL_QID\x01", b"TIMER_DELIVER_MS\x01", b"\x02UNIQ_KEY")
    data, name = bytearray(record), dice.choice(names)
    at = data.find(name)
    choice = dice.randrange(3)
    if choice == 0 and at >= 0:
        data[at + len(name)] = dice.choice(b"/-x\x01\x02\xff ")
    elif choice == 1 and at >= 0:
        data[at] ^= 1
    else:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(data)


def moved_singly(record: bytes, producer: ProducerSequence) -> MovedRecord | None:
    try:
        waiting = read_waiting(record)
        topic, queue_id = waiting.real_topic, waiting.real_queue_id
        data = move_record(waiting, topic, queue_id, producer=producer, store_host_ipv6=False)
    # struct.error is raised if a queue id does not fit into the record's queue id field
    except (RaymqError, ValueError, struct.error):
        return None
    return MovedRecord(topic, queue_id, data, tags_code(waiting.tags))


@pytest.mark.parametrize("part", range(2))
def test_moving_records_together_equals_moving_them_singly(part: int) -> None:
    together = 0
    for seed in [int(ONE_SEED)] if ONE_SEED else range(part * ROUNDS // 2, (part + 1) * ROUNDS // 2):
        dice = random.Random(seed)
        records = random_records(dice)
        whole = dice.random() < 0.5
        if not whole:
            row = dice.randrange(len(records))
            records[row] = harm(dice, records[row])
        producers = [ProducerSequence("%SCHEDULE%0", 5 + row, 99 + row) for row in range(len(records))]
        found = move_waiting_records([memoryview(record) for record in records], producers)
        for record, producer, one in zip(records, producers, found, strict=True):
            together += one is not None
            assert one is None or one == moved_singly(record, producer), f"seed {seed}; RAYMQ_MOVED_SEED repeats it"
    assert together > ROUNDS or ONE_SEED


def test_records_of_one_kind_are_all_moved_together() -> None:
    batch = encode_batch(
        [Message("a", b"body", tags="t", deliver_at_ms=1_700_000_000_000 + row) for row in range(256)],
        0,
        born_host=("127.0.0.1", 1),
        born_timestamp_ms=1,
        message_ids=[f"{row:032X}" for row in range(256)],
        waiting=WaitingBatch(TIMER_TOPIC, [row % 12 for row in range(256)]),
    )
    starts = [*walk_records(batch.records).starts.tolist(), len(batch.records)]
    records = [bytes(batch.records[start:end]) for start, end in pairwise(starts)]
    found = move_waiting_records(records, [ProducerSequence("p", 1, row) for row in range(256)])
    assert all(one is not None for one in found)
