"""Tests of the function that hashes a range of unique ids, and of the check that records have these ids. The expected
results come from reading each record alone.

300 random batches. RAYMQ_SOAK=1 tests 15,000 batches; RAYMQ_INDEX_SEED repeats a single batch.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from raymq.common.errors import RaymqError
from raymq.common.message import Message
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.hashing import index_key_hash
from raymq.records.format.layout import SYS_FLAG_OFFSET, SYS_FLAG_TRANSACTION_ROLLBACK, record_ends
from raymq.records.format.message_id import IdRange
from raymq.records.format.walk import walk_records
from raymq.records.kernels.index_hashes import have_only_these_ids, id_range_hashes

ONE_SEED = os.environ.get("RAYMQ_INDEX_SEED")
ROUNDS = 15_000 if os.environ.get("RAYMQ_SOAK") == "1" else 300
STEM = "7F00000112340123456701234567"


@pytest.mark.parametrize("first", [0, 9, 65_000])
@pytest.mark.parametrize(("topic", "stem"), [("T", STEM), ("%RETRY%g", ""), ("é", "ü")])
def test_hashes_of_an_id_range_equal_the_hashes_of_its_ids(first: int, topic: str, stem: str) -> None:
    ids = IdRange(stem, first, 1000)
    others = IdRange(stem, 3, 2), IdRange(stem[::-1], 65_535, 4)
    ranges = (ids, *others)
    expected = [index_key_hash(topic, one) for some in ranges for one in some]
    assert id_range_hashes(topic, ranges).tolist() == expected


def test_hashes_of_all_counters_equal_the_hashes_of_their_ids() -> None:
    ids = IdRange(STEM, 0, 1 << 16)
    assert id_range_hashes("T", [ids]).tolist() == [index_key_hash("T", one) for one in ids]


def random_batch(dice: random.Random, stem: str) -> tuple[EncodedBatch, IdRange]:
    """Return a random batch, and the range of message ids that its sender claims for it. In most cases the claim is
    true."""
    tags = dice.choice(([None], ["a"], ["a", "b", "cc"]))
    keys: list[tuple[str, ...]] = [()] if dice.random() < 0.7 else [(), ("k",)]
    messages = [
        Message("topic", b"b" * dice.randrange(1, 30), tags=dice.choice(tags), keys=dice.choice(keys))
        for _ in range(dice.choice((1, 2, 40, 200)))
    ]
    ids = IdRange(stem, dice.choice((0, 5, 65_500)), len(messages))
    own = list(ids)
    if dice.random() < 0.2:
        own[dice.randrange(len(own))] = dice.choice(("", STEM + "ZZZZ", STEM.lower() + "0000", own[0], "short"))
    batch = encode_batch(
        messages,
        0,
        born_host=(dice.choice(("127.0.0.1", "127.0.0.1", "::1")), 1),
        born_timestamp_ms=1,
        message_ids=own,
        producer=dice.choice((None, ProducerSequence("p", 1, dice.randrange(2000)))),
    )
    claimed = dice.choice((ids,) * 8 + (IdRange(STEM, 6, len(ids)), IdRange("other", ids.first, len(ids))))
    return batch, claimed


def test_claimed_ids_are_accepted_only_if_the_records_have_them_and_no_other_key() -> None:
    believed = believed_together = 0
    for seed in [int(ONE_SEED)] if ONE_SEED else range(ROUNDS):
        dice = random.Random(seed)
        stems = dice.choice(((STEM,), (STEM,), (STEM, STEM[::-1], STEM), (STEM, STEM[1:])))
        sent, claims = zip(*(random_batch(dice, stem) for stem in stems), strict=True)
        records = bytearray(b"".join(bytes(batch.records) for batch in sent))
        sizes = np.concatenate([batch.sizes for batch in sent])
        starts = walk_records(records).starts.tolist()
        if dice.random() < 0.1:
            records[dice.choice(starts) + SYS_FLAG_OFFSET + 3] |= SYS_FLAG_TRANSACTION_ROLLBACK
        try:
            views = [dispatch_view(records, start) for start in starts]
        except RaymqError:
            continue  # after the change, the record's flag means another kind of record, which this test cannot parse
        has_them = all(
            view.keys == [one] and not view.sys_flag & SYS_FLAG_TRANSACTION_ROLLBACK
            for view, one in zip(views, (one for claimed in claims for one in claimed), strict=True)
        )
        found = have_only_these_ids(memoryview(records), record_ends(sizes), "topic", claims)
        believed += found
        believed_together += found and len(claims) > 1
        assert has_them or not found, f"seed {seed}; RAYMQ_INDEX_SEED repeats it"
        one_length = len({len(claimed.stem) for claimed in claims}) == 1
        if has_them and one_length and all(view.sys_flag == 0 for view in views):
            assert found, f"seed {seed}; RAYMQ_INDEX_SEED repeats it"
    assert (believed > ROUNDS // 8 and believed_together) or ONE_SEED
