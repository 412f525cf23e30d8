"""FetchedRecords and PolledRecords hold encoded records of a queue; the functions of this module decode them for a
poll.

Records stay encoded until a poll takes them. On the storage actor's node their bytes stay in the actor's mapped files.
On other nodes, the limit of buffered bytes bounds the memory. A table is created without an object per message.
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
    """The records that one fetch, or one read of the mapped files, has found. Polls take these records in
    order."""

    records: LocatedRecords
    next_offset: int
    """The queue offset at which reading continues: after the fetched records, and after the following messages that the
    tags excluded."""
    first: int = 0
    """The number of fetched records that polls have taken."""

    @property
    def count(self) -> int:
        """The number of fetched records that no poll has taken yet."""
        return len(self.records.starts) - self.first

    @property
    def size_bytes(self) -> int:
        """Total size in bytes of all fetched records, including the records that polls have taken."""
        return int(self.records.sizes.sum())


@dataclass(frozen=True, slots=True)
class PolledRecords:
    """The next `count` fetched records of `queue`, and the subscription that selects the wanted records."""

    queue: MessageQueue
    subscription: Subscription
    fetched: FetchedRecords
    count: int

    @property
    def data(self) -> memoryview | bytes:
        """The buffer that contains the records of this slice; it may contain other records, too."""
        return self.fetched.records.data

    @property
    def starts(self) -> NDArray[np.int64]:
        """Byte position of each record in `data`, shape (count,)."""
        return self.fetched.records.starts[self.fetched.first : self.fetched.first + self.count]

    @property
    def places(self) -> RecordPlaces:
        """The expected queue offset, physical offset and size of each record of this slice, in the order of
        `starts`."""
        records = self.fetched.records.part(self.fetched.first, self.fetched.first + self.count)
        return RecordPlaces.of(self.queue, records)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """The queue offset of each record, shape (count,)."""
        return self.fetched.records.offsets[self.fetched.first : self.fetched.first + self.count]

    @property
    def size_bytes(self) -> int:
        """Total size in bytes of the slice's records."""
        return int(self.fetched.records.sizes[self.fetched.first : self.fetched.first + self.count].sum())

    @property
    def next_offset(self) -> int:
        """The queue offset after the slice's last record."""
        end = self.fetched.first + self.count
        offsets = self.fetched.records.offsets
        return self.fetched.next_offset if end == len(offsets) else int(offsets[end - 1]) + 1


_ERROR: Final = ("queue_offset", "born_timestamp", "error")
Found = TypeVar("Found", bound=Sized)
Decode = Callable[[Sequence[PolledRecords], OnUnreadable], list[tuple[PolledRecords, Found]]]
"""Function that decodes slices of polled records. Its second argument receives the error of each unreadable
message."""
Decoded = list[tuple[PolledRecords, list[MessageExt]]]
Columns = list[tuple[PolledRecords, "pa.RecordBatch"]]
"""Slices of polled records, each with a batch of the messages in this slice that the consumer wants. A batch may be
empty."""


def decode_messages(slices: Sequence[PolledRecords], on_unreadable: OnUnreadable = ignore) -> Decoded:
    """In each slice of records, decode the messages that match the consumer's tags. A damaged message is decoded too,
    unless its tags are known and do not match."""
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
    on_unreadable: OnUnreadable = ignore,
    *,
    body_type: BodyType = "binary_view",
    columns: Sequence[str] | None = None,
    unreadable: Unreadable = "null",
) -> Columns:
    """Decode the wanted messages of each slice to a batch of columns (see `decode_columns`).

    Decompressed bodies may take at most DECOMPRESSED_MAX_BYTES. So the result may have fewer slices, and its last slice
    may be shorter. With `unreadable` "raise" the result also ends before an unreadable message. Raises
    BodyUnreadableError if the first message is unreadable.
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
    """Check the options of a table that a poll returns. Raises InvalidArgumentError if no table can be created with
    them."""
    from raymq.records.kernels.columns import check_unreadable, schema_with

    schema_with(body_type, columns)
    check_unreadable(unreadable)


def shown_records(found: Any, names: Namespace) -> Any:
    """Remove the namespace from the topic names in the result of a poll. `found`: a list of messages, or a batch of
    columns."""
    if isinstance(found, list):
        return names.shown_messages(found)
    from raymq.records.kernels.columns import shown_batch

    return shown_batch(found, names)


def found(parts: list[tuple[PolledRecords, Found]]) -> bool:
    """Return True if at least one of the polled slices contains a message that the subscription selects."""
    return any(len(wanted) for _, wanted in parts)


def as_messages(parts: Decoded) -> list[MessageExt]:
    """Build the result of `poll`: the wanted messages of all slices, in order."""
    if len(parts) == 1:
        return parts[0][1]
    return [message for _, messages in parts for message in messages]


def as_table(parts: Columns, body_type: BodyType = "binary_view", columns: Sequence[str] | None = None) -> pa.Table:
    """Build the result of `poll_table`: a table with these `columns` and with bodies of `body_type`. Default columns:
    raymq.records.kernels.columns.SCHEMA."""
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
    """Decode the wanted messages of a slice to a batch, and return the slice and the batch. The slice is shortened if
    the limit of decompressed bytes does not allow the whole slice."""
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
        # The tags of a damaged record are unknown, so select it, too: the consumer must see the damage. A damaged
        # record is recognized by its missing born timestamp.
        chosen = pc.is_in(batch.column("tags"), value_set=text_array(sorted(tags)))
        wanted = mask_of(pc.or_(chosen, batch.column("born_timestamp").is_null()))
        # If some messages have no wanted tag, decode the others a second time, without them. This is rarely necessary,
        # because a comparison of the tags' hash codes has already excluded most other messages.
        if not wanted.all():
            # Arrow cannot filter view columns, so choose the rows before decoding them.
            batch = decode(starts[wanted], places=places.pick(np.flatnonzero(wanted)))
    if batch.column("error").null_count < batch.num_rows:
        for offset, born, reason in zip(*map(pa.Array.to_pylist, batch.select(_ERROR).columns), strict=True):
            if reason is not None:
                on_unreadable(BodyUnreadableError(str(part.queue), offset, -1, reason, born is None))
    return part, batch.select(names)
