"""Records of one queue that stay in the store's memory-mapped files. They are selected and joined by their positions in
these files.

A Pull actor on the store's node keeps fetched messages in this form. The Pull actor reads only the consume-queue
entries (units). The Listener reads the records at the positions that the units contain. The memory maps stay open, so
the records can be read even after their files are deleted. The class in this module has the methods of MemoryRecords,
and converts to MemoryRecords when bytes are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from raymq.records.format.memory_records import LocatedRecords, MemoryRecords, join_records
from raymq.records.logfiles.log_reader import StoreFiles


@dataclass(frozen=True, slots=True)
class RecordsInPlace:
    """Records that lie in the files of one store, in ascending order of their queue offsets."""

    files: StoreFiles
    parts: tuple[LocatedRecords, ...]
    """The records in groups (parts), none of them empty. The records of one part lie in the same log file."""
    offsets: Sequence[int]
    """The queue offset of each record, in ascending order."""
    size_bytes: int
    """The total size, in bytes, of all records."""

    @classmethod
    def of(cls, files: StoreFiles, parts: Sequence[LocatedRecords]) -> RecordsInPlace:
        """Create the object from groups of located records (`parts`). All records must lie in the files of one store,
        `files`."""
        if len(parts) == 1:
            return cls(files, tuple(parts), parts[0].offsets.tolist(), int(parts[0].sizes.sum()))
        offsets = [offset for part in parts for offset in part.offsets.tolist()]
        return cls(files, tuple(parts), offsets, sum(int(part.sizes.sum()) for part in parts))

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def data(self) -> bytes:
        """Return the bytes of all records, concatenated."""
        return b"".join(
            [
                part.data[start : start + size]
                for part in self.parts
                for start, size in zip(part.starts.tolist(), part.sizes.tolist(), strict=True)
            ]
        )

    def size_of(self, indices: Iterable[int]) -> int:
        """Return the total size, in bytes, of the records at these indices."""
        sizes = [size for part in self.parts for size in part.sizes.tolist()]
        return sum(sizes[index] for index in indices)

    def in_memory(self) -> MemoryRecords:
        """Return a copy of these mapped records in memory (MemoryRecords)."""
        ends = np.cumsum(np.concatenate([part.sizes for part in self.parts]))
        return MemoryRecords(self.data, [0, *ends.tolist()], list(self.offsets))

    def part(self, first: int, last: int) -> RecordsInPlace:
        """Return the records with the indices `first` to `last - 1`, at least one record. Returns this object itself if
        the range covers all records."""
        if first == 0 and last == len(self):
            return self
        parts, before = [], 0
        for part in self.parts:
            count = len(part.starts)
            low, high = max(first - before, 0), min(last - before, count)
            if low < high:
                parts.append(part.part(low, high))
            before += count
        return RecordsInPlace.of(self.files, parts)

    def pick(self, indices: Iterable[int]) -> RecordsInPlace:
        """Return the records at these indices, which must be ascending. At least one index is required. Returns this
        object itself if all records are selected."""
        wanted = sorted(indices)
        if len(wanted) == len(self):
            return self
        if wanted[-1] - wanted[0] == len(wanted) - 1:
            return self.part(wanted[0], wanted[-1] + 1)
        return RecordsInPlace.of(self.files, [self.part(index, index + 1).parts[0] for index in wanted])

    def reconsume_times(self, index: int) -> int:
        """Return the number of times that a consumer sent back the record at `index`, as stored in the record's
        header."""
        return self.pick((index,)).in_memory().reconsume_times(0)

    def failed_once_more(self, indices: Iterable[int]) -> MemoryRecords:
        """Return a copy of the task's records in memory. The copy's records at `indices` have reconsume times that are
        one higher."""
        return self.in_memory().failed_once_more(indices)


TaskRecords = MemoryRecords | RecordsInPlace


def join_parts(parts: Sequence[TaskRecords]) -> TaskRecords:
    """Join the records of several parts, in order. At least one part is required; a single part is returned unchanged.

    The joined records stay in the store's files if all parts lie in the files of one store.
    """
    if len(parts) == 1:
        return parts[0]
    located = [part for part in parts if isinstance(part, RecordsInPlace)]
    if len(located) == len(parts) and all(part.files == located[0].files for part in located):
        return RecordsInPlace.of(located[0].files, [mapped for part in located for mapped in part.parts])
    return join_records([part.in_memory() for part in parts])
