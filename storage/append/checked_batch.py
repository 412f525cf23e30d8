"""A batch on its way through an append (appender.py), from the checks to the files.

How a checked batch is divided, because some of its messages are stored already or because a file ends, belongs here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.records.format.encode import EncodedBatch


class CheckedBatch(NamedTuple):
    """A batch that may be stored."""

    # The batch; of a part of one, only its sizes, tag codes, ids and producer are those of the part.
    batch: EncodedBatch
    # The bytes of the records, back to back. Nobody changes them any more.
    records: memoryview
    # For each message, the end of its record in `records`.
    ends: NDArray[np.int64]
    # The size of every record, if they are known to be alike in all their lengths (BatchFacts); else 0.
    stride: int = 0
    # The messages in an inner batch, which is one record; 0 for records of one message each.
    inner: int = 0

    def without(self, count: int) -> CheckedBatch:
        """The batch without its first `count` messages; itself for 0. The producer's sequence goes on behind them. Of
        an inner batch all messages go, or none."""
        if not count:
            return self
        if self.inner:
            count = 1
        batch, start = self.batch, int(self.ends[count - 1])
        producer = batch.producer
        if producer is not None:
            producer = replace(producer, first_sequence=producer.first_sequence + count)
        rest = replace(
            batch,
            sizes=batch.sizes[count:],
            tag_codes=batch.tag_codes[count:],
            producer=producer,
            message_ids=batch.message_ids[count:],
        )
        return CheckedBatch(rest, self.records[start:], self.ends[count:] - start, self.stride, self.inner)

    def part(self, first: int, last: int) -> CheckedBatch:
        """The messages from `first` to `last` (exclusive)."""
        rest = self.without(first)
        count = last - first
        if count == len(rest.batch):
            return rest
        batch = replace(
            rest.batch,
            sizes=rest.batch.sizes[:count],
            tag_codes=rest.batch.tag_codes[:count],
            message_ids=rest.batch.message_ids[:count],
        )
        return CheckedBatch(batch, rest.records[: int(rest.ends[count - 1])], rest.ends[:count], self.stride)
