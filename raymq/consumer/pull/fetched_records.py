"""FetchedRecords and PolledRecords are records of a queue as they were found; functions here decode them for a poll.

Records stay bytes until a poll takes them: on the storage actor's node they stay in its mapped files, elsewhere memory
is bounded by the bytes really held. A table is made without an object per message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raymq.consumer.subscription import Subscription
from raymq.errors import StoreCorruptError
from raymq.kernels.messages import read_messages
from raymq.message import MessageExt, MessageQueue
from raymq.namespaces import Namespace
from raymq.record.decode import decode_record
from raymq.record.layout import RecordError
from raymq.record.memory_records import LocatedRecords

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.kernels.columns import BodyType


@dataclass(slots=True)
class FetchedRecords:
    """The records of one fetch, or of one look into the mapped files, which polls take from the front."""

    records: LocatedRecords
    next_offset: int
    """The queue offset to go on at behind all of them, which may be past messages that the tags excluded."""
    first: int = 0
    """How many of them polls have taken."""

    @property
    def count(self) -> int:
        """The number of records that no poll has taken yet."""
        return len(self.records.starts) - self.first

    @property
    def size_bytes(self) -> int:
        """The length of all records, taken ones too."""
        return int(self.records.sizes.sum())


@dataclass(frozen=True, slots=True)
class PolledRecords:
    """The next `count` records of `queue` that were fetched, and the subscription that says which are wanted."""

    queue: MessageQueue
    subscription: Subscription
    fetched: FetchedRecords
    count: int

    @property
    def data(self) -> memoryview | bytes:
        """The bytes that the records lie in."""
        return self.fetched.records.data

    @property
    def starts(self) -> NDArray[np.int64]:
        """The position of each record in `data`, shape (count,)."""
        return self.fetched.records.starts[self.fetched.first : self.fetched.first + self.count]

    @property
    def size_bytes(self) -> int:
        """The length of the records."""
        return int(self.fetched.records.sizes[self.fetched.first : self.fetched.first + self.count].sum())

    @property
    def next_offset(self) -> int:
        """The queue offset to go on at once these are taken."""
        end = self.fetched.first + self.count
        offsets = self.fetched.records.offsets
        return self.fetched.next_offset if end == len(offsets) else int(offsets[end - 1]) + 1


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
            messages = read_messages(part.data, part.starts, broker_name=part.queue.broker_name)
        except RecordError as error:
            intact = _intact(part)
            if intact:
                decoded.append((replace(part, count=len(intact)), _wanted(intact, part)))
            if not decoded:
                raise _corrupt(part, error) from error
            return decoded
        decoded.append((part, _wanted(messages, part)))
    return decoded


def decode_tables(slices: Sequence[PolledRecords], body_type: BodyType = "binary_view") -> Columns:
    """Decode the wanted messages of each slice to a batch of columns. StoreCorruptError if a record is damaged."""
    import pyarrow.compute as pc

    from raymq.kernels.byte_column import mask_of, text_array
    from raymq.kernels.columns import decode_columns

    decoded: Columns = []
    for part in slices:
        broker_name, starts = part.queue.broker_name, part.starts
        try:
            batch = decode_columns(part.data, starts, broker_name=broker_name, body_type=body_type, check_crc=True)
        except RecordError as error:
            raise _corrupt(part, error) from error
        if tags := part.subscription.tags:
            wanted = pc.is_in(batch.column("tags"), value_set=text_array(sorted(tags)))
            if wanted.true_count < len(wanted):  # rare: the tags' codes have been compared before
                # Arrow cannot filter views, so the rows are chosen before they are made.
                starts = starts[mask_of(wanted)]
                batch = decode_columns(part.data, starts, broker_name=broker_name, body_type=body_type)
        decoded.append((part, batch))
    return decoded


def shown_records(found: Any, names: Namespace) -> Any:
    """A poll's messages, a list or a batch of columns, with the topics' names within a namespace."""
    if isinstance(found, list):
        return names.shown_messages(found)
    from raymq.kernels.columns import shown_batch

    return shown_batch(found, names)


def found(parts: list[tuple[PolledRecords, Found]]) -> bool:
    """True if the slices have any wanted message."""
    return any(len(wanted) for _, wanted in parts)


def as_messages(parts: Decoded) -> list[MessageExt]:
    """The result of `poll`: the wanted messages of all slices, in order."""
    if len(parts) == 1:
        return parts[0][1]
    return [message for _, messages in parts for message in messages]


def as_table(parts: Columns, body_type: BodyType = "binary_view") -> pa.Table:
    """The result of `poll_table`: a table with the columns of raymq.kernels.columns.SCHEMA, and bodies of
    `body_type`."""
    import pyarrow as pa

    from raymq.kernels.columns import SCHEMA

    # `body_type` is the name of Arrow's function that makes the type.
    body = pa.field("body", getattr(pa, body_type)())
    schema = SCHEMA.set(SCHEMA.get_field_index("body"), body)
    return pa.Table.from_batches([batch for _, batch in parts], schema=schema)


def _wanted(messages: list[MessageExt], part: PolledRecords) -> list[MessageExt]:
    subscription = part.subscription
    return [message for message in messages if subscription.matches(message.tags)] if subscription.tags else messages


def _intact(part: PolledRecords) -> list[MessageExt]:
    """The messages before the damaged record of a slice."""
    messages = []
    for start in part.starts.tolist():
        try:
            messages.append(decode_record(part.data, start, broker_name=part.queue.broker_name))
        except RecordError:
            break
    return messages


def _corrupt(part: PolledRecords, error: RecordError) -> StoreCorruptError:
    offset = part.fetched.records.offsets[part.fetched.first]
    return StoreCorruptError(
        f"{part.queue}: a record at or behind queue offset {offset} is damaged ({error}); poll(max_messages=1) "
        "finds it, seek goes past it"
    )
