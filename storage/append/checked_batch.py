"""A batch that has passed the checks of an append (appender.py) and will be written to the files.

This module also divides checked batches. An append divides a batch if some of its messages are already stored, or if a
file is full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.records.format.encode import EncodedBatch


class CheckedBatch(NamedTuple):
    """A batch that has passed all checks and may be stored."""

    # The producer's batch. If this CheckedBatch is only a part of the producer's batch, then only the sizes, tag codes,
    # ids and producer describe the part. The other fields describe the whole batch.
    batch: EncodedBatch
    # The bytes of the records, back to back. These bytes no longer change.
    records: memoryview
    # The end offset of each message's record in `records`.
    ends: NDArray[np.int64]
    # The size in bytes of each record of the batch, if BatchFacts shows that all records have equal sizes; else 0.
    stride: int = 0
    # The number of messages in an inner batch, which is one record; 0 for records of one message each.
    inner: int = 0

    def without(self, count: int) -> CheckedBatch:
        """Return the batch without its first `count` messages, or the batch itself if `count` is 0.

        The producer's sequence is advanced past the removed messages. An inner batch loses all of its messages, or
        none.
        """
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
        """Return the part of the batch with the messages from index `first` to `last` (exclusive)."""
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
