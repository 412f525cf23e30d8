"""Messages of one queue as they come from a store: whole records back to back, cut and joined without decoding them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from raymq.record.layout import header_size_at

_HEAD: Final = struct.Struct(">i16xq")
"""A record's total size and queue offset."""
_TIMES_FROM_END_OF_HEADER: Final = 16
"""Behind the reconsume times come the prepared transaction's offset and the body's size."""


@dataclass(frozen=True, slots=True)
class MessageRun:
    """`offsets` are the messages' queue offsets, ascending. Message i is `records[starts[i]:starts[i + 1]]`."""

    records: bytes
    starts: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def read(cls, records: bytes) -> MessageRun:
        """Find the messages. The records are whole, as a fetch gives them."""
        starts, offsets = [0], []
        position, end, unpack_from = 0, len(records), _HEAD.unpack_from
        while position < end:
            size, offset = unpack_from(records, position)
            position += size
            starts.append(position)
            offsets.append(offset)
        return cls(records, starts, offsets)

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def size_bytes(self) -> int:
        return len(self.records)

    def part(self, first: int, last: int) -> MessageRun:
        """Messages `first` to `last - 1`."""
        if first == 0 and last == len(self):
            return self
        base = self.starts[first]
        starts = [start - base for start in self.starts[first : last + 1]]
        return MessageRun(self.records[base : self.starts[last]], starts, self.offsets[first:last])

    def pick(self, indices: Iterable[int]) -> MessageRun:
        """The messages at these indices, in their order."""
        wanted = sorted(indices)
        if len(wanted) == len(self):
            return self
        return join([self.part(index, index + 1) for index in wanted])

    def reconsume_times(self, index: int) -> int:
        """How often a message came before, by its record."""
        return int.from_bytes(self.records[(place := self._times_at(index)) : place + 4])

    def failed_once_more(self, indices: Iterable[int]) -> MessageRun:
        """The same messages, with the reconsume times of some of them one higher."""
        records = bytearray(self.records)
        for index in indices:
            place = self._times_at(index)
            records[place : place + 4] = (int.from_bytes(records[place : place + 4]) + 1).to_bytes(4)
        return MessageRun(bytes(records), self.starts, self.offsets)

    def _times_at(self, index: int) -> int:
        start = self.starts[index]
        return start + header_size_at(self.records, start) - _TIMES_FROM_END_OF_HEADER


def join(runs: Sequence[MessageRun]) -> MessageRun:
    """Runs one behind the other; there is at least one."""
    if len(runs) == 1:
        return runs[0]
    starts, offsets = [0], list[int]()
    for run in runs:
        base = starts[-1]
        starts += [base + start for start in run.starts[1:]]
        offsets += run.offsets
    return MessageRun(b"".join(run.records for run in runs), starts, offsets)
