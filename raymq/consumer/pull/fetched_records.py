"""FetchedRecords and PolledRecords are records of a queue as they were fetched; functions here decode them for a poll.

Records stay bytes until a poll takes them: that bounds memory by the bytes really held, and a table is made without an
object per message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from raymq.consumer.subscription import Subscription
from raymq.errors import StoreCorruptError
from raymq.message import MessageExt, MessageQueue
from raymq.record.decode import decode_record, decode_records
from raymq.record.layout import RecordError
from raymq.record.memory_records import MemoryRecords

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(slots=True)
class FetchedRecords:
    """The records of one fetch, which polls take from the front."""

    records: MemoryRecords
    next_offset: int
    """The queue offset to go on at behind all of them, which may be past messages that the tags excluded."""
    first: int = 0
    """How many of them polls have taken."""

    @classmethod
    def read(cls, data: bytes, next_offset: int) -> FetchedRecords:
        """Read the records that fill `data`. RecordError when their sizes do not add up."""
        return cls(MemoryRecords.read(data), next_offset)

    @property
    def count(self) -> int:
        """The number of records that no poll has taken yet."""
        return len(self.records) - self.first


@dataclass(frozen=True, slots=True)
class PolledRecords:
    """The next `count` records of `queue` that were fetched, and the subscription that says which are wanted."""

    queue: MessageQueue
    subscription: Subscription
    fetched: FetchedRecords
    count: int

    @property
    def records(self) -> memoryview:
        """The records' bytes."""
        first, starts = self.fetched.first, self.fetched.records.starts
        return memoryview(self.fetched.records.data)[starts[first] : starts[first + self.count]]

    @property
    def starts(self) -> NDArray[np.int64]:
        """The position of each record in `records`, shape (count,)."""
        first, starts = self.fetched.first, self.fetched.records.starts
        return np.array(starts[first : first + self.count], dtype=np.int64) - starts[first]

    @property
    def next_offset(self) -> int:
        """The queue offset to go on at once these are taken."""
        end = self.fetched.first + self.count
        records = self.fetched.records
        return self.fetched.next_offset if end == len(records) else records.offsets[end - 1] + 1


Found = TypeVar("Found", bound=Sized)
Decode = Callable[[Sequence[PolledRecords]], list[tuple[PolledRecords, Found]]]
Decoded = list[tuple[PolledRecords, list[MessageExt]]]
Columns = list[tuple[PolledRecords, "pa.RecordBatch"]]
"""Slices with their wanted messages, which may be none."""


def decode_messages(slices: Sequence[PolledRecords]) -> Decoded:
    """Decode the wanted messages of each slice. They end before a damaged record; StoreCorruptError if that is the
    first one."""
    decoded: Decoded = []
    for part in slices:
        try:
            messages = decode_records(part.records, broker_name=part.queue.broker_name)
        except RecordError as error:
            intact = _intact(part)
            if intact:
                decoded.append((replace(part, count=len(intact)), _wanted(intact, part)))
            if not decoded:
                raise _corrupt(part, error) from error
            return decoded
        decoded.append((part, _wanted(messages, part)))
    return decoded


def decode_tables(slices: Sequence[PolledRecords]) -> Columns:
    """Decode the wanted messages of each slice to a batch of columns. StoreCorruptError if a record is damaged."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from raymq.kernels import columns

    decoded: Columns = []
    for part in slices:
        try:
            batch = columns.decode_columns(
                part.records, part.starts, broker_name=part.queue.broker_name, check_crc=True
            )
        except RecordError as error:
            raise _corrupt(part, error) from error
        if tags := part.subscription.tags:
            batch = batch.filter(pc.is_in(batch.column("tags"), pa.array(sorted(tags), pa.string())))
        decoded.append((part, batch))
    return decoded


def found(parts: list[tuple[PolledRecords, Found]]) -> bool:
    """True if the slices have any wanted message."""
    return any(len(wanted) for _, wanted in parts)


def as_messages(parts: Decoded) -> list[MessageExt]:
    """The result of `poll`: the wanted messages of all slices, in order."""
    return [message for _, messages in parts for message in messages]


def as_table(parts: Columns) -> pa.Table:
    """The result of `poll_table`: a table with the columns of raymq.kernels.columns.SCHEMA."""
    import pyarrow as pa

    from raymq.kernels.columns import SCHEMA

    return pa.Table.from_batches([batch for _, batch in parts], schema=SCHEMA)


def _wanted(messages: list[MessageExt], part: PolledRecords) -> list[MessageExt]:
    subscription = part.subscription
    return [message for message in messages if subscription.matches(message.tags)] if subscription.tags else messages


def _intact(part: PolledRecords) -> list[MessageExt]:
    """The messages before the damaged record of a slice."""
    records, messages = bytes(part.records), []
    for start in part.starts.tolist():
        try:
            messages.append(decode_record(records, start, broker_name=part.queue.broker_name))
        except RecordError:
            break
    return messages


def _corrupt(part: PolledRecords, error: RecordError) -> StoreCorruptError:
    offset = part.fetched.records.offsets[part.fetched.first]
    return StoreCorruptError(
        f"{part.queue}: a record at or behind queue offset {offset} is damaged ({error}); poll(max_messages=1) "
        "finds it, seek goes past it"
    )
