"""Recently appended batches, from which the index takes unique ids without scanning the batches' records.

The ids of a producer's batch are mostly consecutive, and the batch describes them. The append stores a few fields of
each batch in an AppendedBatches object. The index thread compares these fields with the records in the log, and takes
the hashes of the ids from a table. Small batches are not kept, because they gain too little, and the number of kept
records is bounded. For batches that are not kept, the index reads the log.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from raymq.common.errors import DataLossError
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.message_id import IdRange
from raymq.records.kernels.fields import Ints
from raymq.records.kernels.index_hashes import have_only_these_ids, id_range_hashes
from raymq.records.logfiles.log_reader import LogReader
from storage.index.index_file import IndexEntries

RECORDS_MIN: Final = 64
"""Minimum number of records of a kept batch. A smaller batch is faster to read from the log, together with adjacent
batches, unless the batch has BYTES_MIN bytes."""
BYTES_MIN: Final = 256 << 10
"""Size in bytes from which a batch is kept even if it has few records: reading the batch takes longer than comparing
fields."""
RECORDS_MAX: Final = 1 << 20
"""Maximum number of records (8 bytes of memory each) that may wait for the index."""
RUN_RECORDS: Final = 1 << 12
"""Number of records compared at a time. With fewer records the calls cost more than the work; with more the data does
not fit into the CPU caches."""


class AppendedBatch(NamedTuple):
    """A batch whose records lie back to back in one log file."""

    physical_offset: int
    ends: Ints
    """The end of each record, relative to the start of the batch's first record."""
    topic: str
    ids: IdRange
    store_ms: int

    @property
    def end_offset(self) -> int:
        """Physical offset at which the batch's last record ends."""
        return self.physical_offset + int(self.ends[-1])

    def is_like(self, other: AppendedBatch) -> bool:
        """True if the ids of both batches can be verified together: their topics, and the lengths of their id stems,
        are equal."""
        return self.topic == other.topic and len(self.ids.stem) == len(other.ids.stem)


def index_entries_of(run: Sequence[AppendedBatch], reader: LogReader) -> IndexEntries | None:
    """Return the index entries of batches that `take_run` returned.

    Returns None if the bytes in the log do not prove that the records' keys are the batches' ids.
    """
    start, topic, ranges = run[0].physical_offset, run[0].topic, [batch.ids for batch in run]
    try:
        data = reader.log_bytes(start, run[-1].end_offset)
    except DataLossError:
        return None
    ends = np.concatenate([batch.ends + (batch.physical_offset - start) for batch in run])
    if not have_only_these_ids(data, ends, topic, ranges):
        return None
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    times = np.repeat(np.array([batch.store_ms for batch in run]), [len(batch.ends) for batch in run])
    return IndexEntries(id_range_hashes(topic, ranges), starts + start, times)


class AppendedBatches:
    """The batches that are not indexed yet, in log order, with about `records_max` records at most.

    One thread adds batches, another thread takes them.
    """

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self._records_max = records_max
        self._batches: deque[AppendedBatch] = deque()
        self._records = 0
        self._lock = threading.Lock()

    def add(self, physical_offset: int, ends: Ints, batch: EncodedBatch, store_ms: int) -> None:
        """Keep a batch whose first record is at `physical_offset`, unless the index can read the batch faster from the
        log."""
        ids = batch.message_ids
        is_large = len(ends) >= RECORDS_MIN or int(ends[-1]) >= BYTES_MIN
        if is_large and isinstance(ids, IdRange) and len(ids) == len(ends):
            with self._lock:
                if self._records < self._records_max:
                    self._batches.append(AppendedBatch(physical_offset, ends, batch.topic, ids, store_ms))
                    self._records += len(ends)

    def take_run(self, physical_offset: int, limit: int) -> list[AppendedBatch]:
        """Take the similar batches that lie back to back in one file from `physical_offset` up to at most `limit`.

        A run has up to RUN_RECORDS records, plus the rest of its last batch. Batches before `physical_offset` are
        discarded. Returns an empty list if no batch starts at `physical_offset`.
        """
        run: list[AppendedBatch] = []
        end, records = physical_offset, 0
        with self._lock:
            while self._batches and records < RUN_RECORDS:
                batch = self._batches[0]
                if batch.physical_offset >= physical_offset:
                    # Between two log files lies a BLANK, so a batch in the next file does not start at the end of the
                    # previous batch.
                    if batch.physical_offset != end or batch.end_offset > limit or (run and not batch.is_like(run[0])):
                        break
                    run.append(batch)
                    end, records = batch.end_offset, records + len(batch.ends)
                self._records -= len(self._batches.popleft().ends)
        return run

    def next_start(self) -> int | None:
        """Return the physical offset of the first kept batch; None if no batch is kept."""
        return self._batches[0].physical_offset if self._batches else None
