"""Recently appended batches, from which the index takes unique ids without scanning the batches' records.

The ids of a producer's batch are mostly consecutive, and the batch describes them. The append stores a few fields of
each batch in an AppendedBatches object. The index thread compares these fields with the records in the log, and takes
the hashes of the ids from a table. Small batches are not kept, because keeping them would save too little time. The
number of kept records is bounded. For batches that are not kept, the index reads the log.
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
"""Minimum number of records of a batch that is kept for the index. A batch with fewer records is kept only if it has at
least BYTES_MIN bytes. The index reads other small batches faster from the log, together with adjacent batches."""
BYTES_MIN: Final = 256 << 10
"""Minimum size, in bytes, of a batch with few records that is kept in memory for the index. Reading such a large batch
from the log would take longer than using the few fields that are kept in memory."""
RECORDS_MAX: Final = 1 << 20
"""Maximum number of records (8 bytes of memory each) in batches that wait for the index."""
RUN_RECORDS: Final = 1 << 12
"""Number of records that the index compares at a time. With fewer records the calls cost more than the work; with more
records the data does not fit into the CPU caches."""


class AppendedBatch(NamedTuple):
    """An appended batch that waits for the index. Its records lie back to back in one log file."""

    physical_offset: int
    ends: Ints
    """The end of each record of the batch, counted from the start of the first record."""
    topic: str
    ids: IdRange
    store_ms: int

    @property
    def end_offset(self) -> int:
        """Physical offset at which the last record of the batch ends."""
        return self.physical_offset + int(self.ends[-1])

    def is_like(self, other: AppendedBatch) -> bool:
        """True if one comparison can verify the ids of both batches. The batches must have the same topic, and the
        common first parts (`stem`) of their ids must be equally long."""
        return self.topic == other.topic and len(self.ids.stem) == len(other.ids.stem)


def index_entries_of(run: Sequence[AppendedBatch], reader: LogReader) -> IndexEntries | None:
    """Return the index entries of the batches that `take_run` returned.

    Returns None if the log's bytes do not prove that each record has exactly one key: a unique id. The id must be in
    the range of ids of the record's batch.
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
    """The appended batches that are not indexed yet, in log order. They have at most about `records_max` records.

    One thread adds batches, another thread takes them.
    """

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self._records_max = records_max
        self._batches: deque[AppendedBatch] = deque()
        self._records = 0
        self._lock = threading.Lock()

    def add(self, physical_offset: int, ends: Ints, batch: EncodedBatch, store_ms: int) -> None:
        """Keep an appended batch in memory until the index takes it. Small batches are not kept, because the index
        reads them faster from the log. `physical_offset`: the offset of the batch's first record."""
        ids = batch.message_ids
        is_large = len(ends) >= RECORDS_MIN or int(ends[-1]) >= BYTES_MIN
        if is_large and isinstance(ids, IdRange) and len(ids) == len(ends):
            with self._lock:
                if self._records < self._records_max:
                    self._batches.append(AppendedBatch(physical_offset, ends, batch.topic, ids, store_ms))
                    self._records += len(ends)

    def take_run(self, physical_offset: int, limit: int) -> list[AppendedBatch]:
        """Take batches of the same kind that lie back to back in one log file. The first batch starts at
        `physical_offset`, and the last one ends at or before `limit`.

        Batches are taken until they have RUN_RECORDS records together; the last batch is taken whole. Batches before
        `physical_offset` are discarded. Returns an empty list if no batch starts at `physical_offset`.
        """
        run: list[AppendedBatch] = []
        end, records = physical_offset, 0
        with self._lock:
            while self._batches and records < RUN_RECORDS:
                batch = self._batches[0]
                if batch.physical_offset >= physical_offset:
                    # A BLANK lies between two log files, so a batch in the next file does not start at the end of the
                    # previous batch.
                    if batch.physical_offset != end or batch.end_offset > limit or (run and not batch.is_like(run[0])):
                        break
                    run.append(batch)
                    end, records = batch.end_offset, records + len(batch.ends)
                self._records -= len(self._batches.popleft().ends)
        return run

    def next_start(self) -> int | None:
        """Return the physical offset of the first batch that waits for the index; None if no batch waits."""
        return self._batches[0].physical_offset if self._batches else None
