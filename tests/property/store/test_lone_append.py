"""Tests that the fast path for an append of one message and the general path produce equal bytes, results and errors.

40 random stores of 60 messages each. RAYMQ_SOAK=1 tests 2000 stores; RAYMQ_LONE_SEED repeats a single store.
"""

from __future__ import annotations

import os
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from raymq.common.config.store import FlushDiskType
from raymq.common.delay import SCHEDULE_TOPIC
from raymq.common.errors import RaymqError
from raymq.common.message import Message
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.layout import SYS_FLAG_OFFSET
from storage.message_store import MessageStore
from tests.support.stores.stores import LOG_FILE_BYTES, open_store

ONE_SEED = os.environ.get("RAYMQ_LONE_SEED")
ROUNDS = 2000 if os.environ.get("RAYMQ_SOAK") == "1" else 40
MESSAGES = 60
SETTINGS = (
    {"flush_disk_type": FlushDiskType.ASYNC_FLUSH},
    {"flush_disk_type": FlushDiskType.ASYNC_FLUSH, "warm_mapped_file_enable": False},
    {"flush_disk_type": FlushDiskType.SYNC_FLUSH, "warm_mapped_file_enable": False},
    {"flush_disk_type": FlushDiskType.ASYNC_FLUSH, "transient_store_pool_enable": True},
)
BODY_MAX = 9000


def random_message(dice: random.Random) -> EncodedBatch:
    """Return a batch of one random message. Usually it is a plain message, which the store can append on its fast path.
    Otherwise the store refuses it, or appends it on the slower general path."""
    plain = dice.random() < 0.6
    size = dice.choice((1, 100, 3000)) if plain else dice.choice((1, BODY_MAX, BODY_MAX + 1, LOG_FILE_BYTES))
    topic = "orders" if plain else dice.choice(("orders", SCHEDULE_TOPIC))
    extra = {} if plain else dice.choice(({}, {"INNER_NUM": "2"}, {"INNER_MULTI_QUEUE_OFFSET": "1"}, {"INNER": "x"}))
    sequence = ProducerSequence(dice.choice("pq"), dice.choice((1, 1, 1, 2)), dice.randrange(30))
    batch = encode_batch(
        [Message(topic, dice.randbytes(size), tags=dice.choice((None, "red")))],
        dice.randrange(2),
        born_host=(dice.choice(("127.0.0.1", "127.0.0.1", "::1")), 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=[f"{dice.randrange(10):032X}"],
        producer=dice.choice((None, None, sequence)),
        extra_properties=extra,
        append_prop_crc=not plain and dice.random() < 0.3,
        store_host_ipv6=not plain and dice.random() < 0.1,
    )
    return batch if plain or dice.random() < 0.5 else damaged(dice, batch)


def damaged(dice: random.Random, batch: EncodedBatch) -> EncodedBatch:
    """Return the batch with one random change in its record bytes or in its other fields."""
    records = bytearray(batch.records)
    what = dice.randrange(6)
    if what == 0:
        records[dice.randrange(min(len(records), 120))] ^= 1 << dice.randrange(8)
    elif what == 1:
        records[SYS_FLAG_OFFSET + 3] |= dice.choice((0x4, 0x8, 0xC, 0x80))
    elif what == 2:
        records[len(records) - dice.randrange(1, 80) :] = b""
    else:
        wrong = (
            {"sizes": batch.sizes + np.int32(1)},
            {"queue_id": dice.choice((-1, 7, 2**31))},
            {"topic": dice.choice(("other", "not a name"))},
        )[what - 3]
        return replace(batch, **wrong)  # type: ignore[arg-type]  # each is a field's own type
    return replace(batch, records=dice.choice((bytes, memoryview))(bytes(records)))


def outcome(store: MessageStore, batch: EncodedBatch) -> object:
    """Append `batch`. Returns the append results, or the class and text of the raised error. Two returned values can be
    compared with ==."""
    try:
        return store.append([batch])
    except RaymqError as error:
        return type(error), str(error)


def contents(root: Path) -> dict[str, bytes]:
    """Return the bytes of all files of the log and of the consume queues, by path."""
    paths = (path for kind in ("commitlog", "consumequeue") for path in (root / kind).rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def check_one_history(seed: int, directory: Path) -> int:
    """Append the same random messages to two stores; only one store uses the fast path. Returns the number of messages
    that took the fast path."""
    dice = random.Random(seed)
    settings = dice.choice(SETTINGS)
    now_ms = 1_700_000_000_000

    def open_one(name: str) -> MessageStore:
        return open_store(directory / name, clock_ms=lambda: now_ms, max_message_size_bytes=BODY_MAX, **settings)

    with closing(open_one("short")) as short, closing(open_one("general")) as general:
        written = mock.Mock(side_effect=short.log.write_record)
        with (
            mock.patch.object(general._appender, "_is_plain", return_value=False),
            mock.patch.object(short.log, "write_record", written),
        ):
            for number in range(MESSAGES):
                batch = random_message(dice)
                now_ms += dice.randrange(-5, 50)
                results = [outcome(store, batch) for store in (short, general)]
                hint = f"seed {seed}, message {number}; RAYMQ_LONE_SEED repeats it"
                assert results[0] == results[1], hint
                assert short.log.end_offset == general.log.end_offset, hint
                assert short._appender.last_record_offset == general._appender.last_record_offset, hint
        ends = [{queue.key: queue.next_offset for queue in store._parts.queues} for store in (short, general)]
        assert ends[0] == ends[1], f"seed {seed}; RAYMQ_LONE_SEED repeats it"
        # With a transient store pool, a separate thread makes messages visible. So the visible offsets of the two
        # compared stores may differ for a moment.
        if "transient_store_pool_enable" not in settings:
            seen = [{queue.key: queue.visible_offset for queue in store._parts.queues} for store in (short, general)]
            assert seen == ends, f"seed {seed}; RAYMQ_LONE_SEED repeats it"
        assert short._parts.dedup.rows() == general._parts.dedup.rows()
    assert contents(directory / "short") == contents(directory / "general"), f"seed {seed}"
    return sum(1 for call in written.mock_calls if call)


def test_the_fast_and_the_general_path_store_one_message_alike(tmp_path: Path) -> None:
    tried = 0
    for seed in [int(ONE_SEED)] if ONE_SEED else range(ROUNDS):
        tried += check_one_history(seed, tmp_path / str(seed))
    assert tried > ROUNDS * MESSAGES // 4 or ONE_SEED
