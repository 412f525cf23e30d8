"""The batches appended lately, for the index: it puts their unique ids without walking over their records.

A producer's batch mostly has ids that follow each other, and says which. The append leaves a few fields of such a batch
here; the index thread compares them with the records in the log, and takes their hashes from a table. A small batch is
not worth it, nor are batches kept without bound: the index reads what it does not find here from the log.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from raymq.errors import DataLossError
from raymq.kernels.fields import Ints
from raymq.kernels.index_hashes import have_only_these_ids, id_range_hashes
from raymq.logfiles.log_reader import LogReader
from raymq.record.encode import EncodedBatch
from raymq.record.message_id import IdRange
from storage.index.index_file import IndexEntries

RECORDS_MIN: Final = 64
"""A batch of fewer records is quicker read from the log, together with its neighbours."""
RECORDS_MAX: Final = 1 << 20
"""So many records, 8 bytes for each, may wait for the index."""


class AppendedBatch(NamedTuple):
    """A batch whose records lie back to back in one file of the log."""

    physical_offset: int
    ends: Ints
    """The end of each record, counted from the first one's start."""
    topic: str
    ids: IdRange
    store_ms: int

    @property
    def end_offset(self) -> int:
        """The physical offset at which the last record ends."""
        return self.physical_offset + int(self.ends[-1])

    def entries(self, reader: LogReader) -> IndexEntries | None:
        """The index entries of the records; None if the log's bytes do not prove that their keys are these ids."""
        try:
            data = reader.log_bytes(self.physical_offset, self.end_offset)
        except DataLossError:
            return None
        if not have_only_these_ids(data, self.ends, self.topic, self.ids):
            return None
        starts = np.concatenate((np.zeros(1, np.int64), self.ends[:-1]))
        times = np.full(len(starts), self.store_ms, np.int64)
        return IndexEntries(id_range_hashes(self.topic, self.ids), starts + self.physical_offset, times)


class AppendedBatches:
    """The batches that the index has not put yet, in the order of the log, about `records_max` records at most. One
    thread adds, another one takes."""

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self._records_max = records_max
        self._batches: deque[AppendedBatch] = deque()
        self._records = 0
        self._lock = threading.Lock()

    def add(self, physical_offset: int, ends: Ints, batch: EncodedBatch, store_ms: int) -> None:
        """Note a batch whose first record is at `physical_offset`, unless the index had better read it from the log."""
        ids = batch.message_ids
        if len(ends) >= RECORDS_MIN and isinstance(ids, IdRange) and len(ids) == len(ends):
            with self._lock:
                if self._records < self._records_max:
                    self._batches.append(AppendedBatch(physical_offset, ends, batch.topic, ids, store_ms))
                    self._records += len(ends)

    def take_at(self, physical_offset: int) -> AppendedBatch | None:
        """Take the batch that starts at `physical_offset`, None if it is not here; forget those before it."""
        while self._batches and self._batches[0].physical_offset <= physical_offset:
            with self._lock:
                batch = self._batches.popleft()
                self._records -= len(batch.ends)
            if batch.physical_offset == physical_offset:
                return batch
        return None

    def put_back(self, batch: AppendedBatch) -> None:
        """Put back the batch that was taken last."""
        with self._lock:
            self._batches.appendleft(batch)
            self._records += len(batch.ends)

    def next_start(self) -> int | None:
        """The physical offset of the first batch here; None if there is none."""
        return self._batches[0].physical_offset if self._batches else None
