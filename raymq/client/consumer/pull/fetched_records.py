"""FetchedRecords and PolledRecords are found records of a queue. The functions of this module decode them for a poll.

Records stay bytes until a poll takes them. On the storage actor's node they stay in its mapped files; elsewhere the
buffered bytes limit the memory. A table is made without an object per message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.namespaces import Namespace
from raymq.records.format.compression import DECOMPRESSED_MAX_BYTES
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.messages import OnUnreadable, ignore, read_messages

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.records.kernels.column_bodies import BodyType
    from raymq.records.kernels.columns import Unreadable


@dataclass(slots=True)
class FetchedRecords:
    """The records of one fetch, or of one look into the mapped files, which polls take from the front."""

    records: LocatedRecords
    next_offset: int
    """The next queue offset after all records. It may be past messages that the tags excluded."""
    first: int = 0
    """The number of records that polls have taken."""

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
        """The bytes that hold the records."""
        return self.fetched.records.data

    @property
    def starts(self) -> NDArray[np.int64]:
        """The position of each record in `data`, shape (count,)."""
        return self.fetched.records.starts[self.fetched.first : self.fetched.first + self.count]

    @property
    def places(self) -> RecordPlaces:
        """The place of each record, in the order of `starts`."""
        records = self.fetched.records.part(self.fetched.first, self.fetched.first + self.count)
        return RecordPlaces.of(self.queue, records)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """The queue offset of each record, shape (count,)."""
        return self.fetched.records.offsets[self.fetched.first : self.fetched.first + self.count]

    @property
    def size_bytes(self) -> int:
        """The length of the records."""
        return int(self.fetched.records.sizes[self.fetched.first : self.fetched.first + self.count].sum())

    @property
    def next_offset(self) -> int:
        """The next queue offset after these records."""
        end = self.fetched.first + self.count
        offsets = self.fetched.records.offsets
        return self.fetched.next_offset if end == len(offsets) else int(offsets[end - 1]) + 1


_ERROR: Final = ("queue_offset", "born_timestamp", "error")
Found = TypeVar("Found", bound=Sized)
Decode = Callable[[Sequence[PolledRecords]], list[tuple[PolledRecords, Found]]]
Decoded = list[tuple[PolledRecords, list[MessageExt]]]
Columns = list[tuple[PolledRecords, "pa.RecordBatch"]]
"""Slices with their wanted messages, which may be none."""


def decode_messages(slices: Sequence[PolledRecords], on_unreadable: OnUnreadable = ignore) -> Decoded:
    """Decode the wanted messages of each slice. A damaged message is wanted if its tags are unknown or wanted."""
    decoded: Decoded = []
    for part in slices:
        messages = read_messages(
            part.data,
            part.starts,
            broker_name=part.queue.broker_name,
            places=part.places,
            on_unreadable=on_unreadable,
        )
        decoded.append((part, _wanted(messages, part)))
    return decoded


def decode_tables(
    slices: Sequence[PolledRecords],
    body_type: BodyType = "binary_view",
    columns: Sequence[str] | None = None,
    unreadable: Unreadable = "null",
    on_unreadable: OnUnreadable = ignore,
) -> Columns:
    """Decode the wanted messages of each slice to a batch of columns, see `decode_columns`.

    The slices may be fewer, and the last one shorter, because their decompressed bodies take at most
    DECOMPRESSED_MAX_BYTES. With `unreadable` "raise" they also end before an unreadable message; BodyUnreadableError if
    that one is the first of all.
    """
    from raymq.records.kernels.byte_column import sizes_of

    decoded: Columns = []
    left_bytes = DECOMPRESSED_MAX_BYTES
    for part in slices:
        decode = partial(
            _decode_part,
            body_type=body_type,
            columns=columns,
            max_decompressed_bytes=left_bytes,
            on_unreadable=on_unreadable,
        )
        try:
            done, batch = decode(part, unreadable=unreadable)
        except BodyUnreadableError as error:
            before = int(np.searchsorted(part.offsets, error.queue_offset))
            if before:
                decoded.append(decode(replace(part, count=before), unreadable="null"))
            if not decoded:
                raise
            return decoded
        decoded.append((done, batch))
        if "body" in batch.schema.names:
            left_bytes -= max(0, int(sizes_of(batch.column("body")).sum()) - done.size_bytes)
        if done.count < part.count or left_bytes <= 0:
            return decoded
    return decoded


def check_table(body_type: BodyType, columns: Sequence[str] | None, unreadable: Unreadable) -> None:
    """Raise InvalidArgumentError unless tables can be made with these options."""
    from raymq.records.kernels.columns import check_unreadable, schema_with

    schema_with(body_type, columns)
    check_unreadable(unreadable)


def shown_records(found: Any, names: Namespace) -> Any:
    """A poll's messages, a list or a batch of columns, with the topics' names within a namespace."""
    if isinstance(found, list):
        return names.shown_messages(found)
    from raymq.records.kernels.columns import shown_batch

    return shown_batch(found, names)


def found(parts: list[tuple[PolledRecords, Found]]) -> bool:
    """Return True if the slices have any wanted message."""
    return any(len(wanted) for _, wanted in parts)


def as_messages(parts: Decoded) -> list[MessageExt]:
    """Make the result of `poll`: the wanted messages of all slices, in order."""
    if len(parts) == 1:
        return parts[0][1]
    return [message for _, messages in parts for message in messages]


def as_table(parts: Columns, body_type: BodyType = "binary_view", columns: Sequence[str] | None = None) -> pa.Table:
    """Make the result of `poll_table`: a table with these `columns`, by default the columns of
    raymq.records.kernels.columns.SCHEMA, and bodies of `body_type`."""
    import pyarrow as pa

    from raymq.records.kernels.columns import schema_with

    return pa.Table.from_batches([batch for _, batch in parts], schema=schema_with(body_type, columns))


def _wanted(messages: list[MessageExt], part: PolledRecords) -> list[MessageExt]:
    subscription = part.subscription
    if not subscription.tags:
        return messages
    return [message for message in messages if subscription.matches(message.tags) or message.record_damaged]


def _decode_part(
    part: PolledRecords,
    *,
    body_type: BodyType,
    columns: Sequence[str] | None,
    unreadable: Unreadable,
    max_decompressed_bytes: int,
    on_unreadable: OnUnreadable,
) -> tuple[PolledRecords, pa.RecordBatch]:
    """The wanted messages of a slice as a batch, with the slice, which is shorter if the budget ends before its end."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from raymq.records.kernels.byte_column import mask_of, text_array
    from raymq.records.kernels.columns import decode_columns, schema_with

    names = schema_with(body_type, columns).names
    tags, starts, places = part.subscription.tags, part.starts, part.places
    decode = partial(
        decode_columns,
        part.data,
        broker_name=part.queue.broker_name,
        body_type=body_type,
        columns=list(dict.fromkeys((*names, "error", "queue_offset", "tags", "born_timestamp"))),
        check_crc=True,
        unreadable=unreadable,
        max_decompressed_bytes=max_decompressed_bytes,
    )
    batch = decode(starts, places=places)
    if batch.num_rows < part.count:
        part = replace(part, count=batch.num_rows)
        starts = part.starts
    if tags:
        # A damaged record has no time, and its tags are unknown.
        chosen = pc.is_in(batch.column("tags"), value_set=text_array(sorted(tags)))
        wanted = mask_of(pc.or_(chosen, batch.column("born_timestamp").is_null()))
        if not wanted.all():  # rare: the tags' codes have been compared before
            # Arrow cannot filter views, so the rows are chosen before they are made.
            batch = decode(starts[wanted], places=places.pick(np.flatnonzero(wanted)))
    if batch.column("error").null_count < batch.num_rows:
        for offset, born, reason in zip(*map(pa.Array.to_pylist, batch.select(_ERROR).columns), strict=True):
            if reason is not None:
                on_unreadable(BodyUnreadableError(str(part.queue), offset, -1, reason, born is None))
    return part, batch.select(names)
