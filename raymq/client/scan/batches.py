"""Readers of offset ranges as Arrow batches of bounded size, for Spark tasks, Ray Data tasks and command-line jobs.

On the store's node the records are read from mapped files. On other nodes they are read over a lane (direct socket
connection); see raymq.client.scan.range_reader. A batch holds copies, so it stays valid after the files are deleted.

A message that cannot be read becomes a row with a null body (`raymq.records.kernels.columns`); the read continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypedDict, Unpack, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.client.consumer.repair_wait import CHECKSUM_WRONG, RepairWait, is_damage, wait_at_masters
from raymq.client.scan.queue_bounds import bounds_of
from raymq.client.scan.range_reader import RangeReader, RecordsChunk
from raymq.client.scan.ranges import NO_CREATIONS, Creations, OffsetRange, is_created_anew
from raymq.common.errors import BodyUnreadableError, DataLossError, InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.records.format.hashing import java_hash
from raymq.records.kernels.byte_column import text_array
from raymq.records.kernels.column_bodies import BodyType
from raymq.records.kernels.columns import Unreadable, decode_columns, schema_with, shown_batch
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_clients import StorageClients

BATCH_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of records in one Arrow batch. This limit bounds the memory of a worker and of its executor."""
BATCH_BYTES_WITHOUT_BODY: Final = 32 * 1024 * 1024
"""Maximum bytes of records in one Arrow batch if message bodies are not read."""

BATCH_DECOMPRESSED_BYTES: Final = 16 * 1024 * 1024
"""Maximum bytes of decompressed message bodies in one Arrow batch."""

OnLoss = Callable[[OffsetRange], None]
"""Callback that receives each offset range that a read skips because the range's messages were deleted or lost."""

logger = logging.getLogger(__name__)


def ignore_loss(lost: OffsetRange) -> None:
    """Do nothing with an offset range that a read has skipped. Used where a warning about the range was already
    logged."""


def check_unreadable(unreadable: str) -> None:
    """Raise InvalidArgumentError unless `unreadable` is a value of the type Unreadable ("null" or "raise")."""
    if unreadable not in get_args(Unreadable):
        raise InvalidArgumentError(f"unreadable={unreadable!r} must be one of {', '.join(get_args(Unreadable))}")


class RangeOptions(TypedDict, total=False):
    """Options for reading offset ranges; each option may be omitted.

    `columns`: read only these columns; by default all of `raymq.records.kernels.columns.SCHEMA`. `tags`: read only
    messages with one of these tags. `sql`: read only messages that pass this filter expression. `body_type`: the Arrow
    type of bodies. `on_loss`: called with each skipped offset range. `names`: the namespace of the topic names.
    `unreadable`: "null" or "raise", for a message that cannot be read.
    """

    columns: Sequence[str] | None
    tags: frozenset[str]
    sql: str | None
    body_type: BodyType
    on_loss: OnLoss
    names: Namespace
    unreadable: Unreadable


def open_ranges(
    routes: RouteSource,
    storages: StorageClients,
    ranges: Iterable[OffsetRange],
    *,
    fail_on_data_loss: bool,
    creations: Creations = NO_CREATIONS,
    **options: Unpack[RangeOptions],
) -> Iterator[pa.RecordBatch]:
    """Read the messages of several ranges, one range after another, each in order, with copied bodies. See RangeOptions
    for the options.

    `creations`: the creation ids of the topics when the read was planned. If a topic was deleted and created again
    after that, its ranges count as lost data, because their offsets now refer to other messages.

    Bodies are read only if `body` is among the columns. `tags`, if not empty, excludes messages by the tag codes in
    their consume-queue entries, before the messages' records are read. For a message that `sql` excludes, only the
    properties are read.

    Raises DataLossError if messages of a range were deleted or lost. Without `fail_on_data_loss` a warning names the
    missing offsets, `on_loss` is called, and the other messages are read. Raises InvalidArgumentError for an unknown
    column. The topic names of the ranges and of the messages are names in the namespace `names`.

    A message that cannot be read has a null body, and a warning is logged. A damaged record has no tags and properties;
    it passes every filter. If `unreadable` is "raise", an unreadable message raises BodyUnreadableError. Bodies are
    checked if `body` or `error` is among the columns, and always if `unreadable` is "raise". The read waits for the
    repair of a damaged record. All ranges share the limits of RepairWait.
    """
    names, on_loss = options.get("names", NO_NAMESPACE), options.get("on_loss", ignore_loss)
    repairs = wait_at_masters(routes, storages)
    for one in _same_topics(routes, ranges, creations, names, on_loss, fail_on_data_loss=fail_on_data_loss):
        yield from _RangeRead(routes, storages, repairs, one, fail_on_data_loss=fail_on_data_loss, **options).batches()


def _same_topics(
    routes: RouteSource,
    ranges: Iterable[OffsetRange],
    creations: Creations,
    names: Namespace,
    on_loss: OnLoss,
    *,
    fail_on_data_loss: bool,
) -> Iterator[OffsetRange]:
    """Yield the ranges whose topic was not created again after `creations` was recorded. For a range of a recreated
    topic, raise DataLossError, or call `on_loss` and skip the range."""
    now: dict[str, dict[str, str]] = {}
    for one in ranges:
        if one.topic in creations and one.topic not in now:
            stored = names.wrap(one.topic)
            routes.invalidate(stored)
            now[one.topic] = {data.broker_name: data.creation_id for data in routes.get(stored).queues}
        if is_created_anew(one.queue, creations, now):
            said = f"the topic of queue {one.queue} was deleted and created again after the read was planned"
            if fail_on_data_loss:
                raise DataLossError(f"{said}; plan the read again, because the planned offsets now name other messages")
            logger.warning("%s: offsets %d to %d are skipped", said, one.start_offset, one.end_offset - 1)
            on_loss(one)
            continue
        yield one


class _RangeRead:
    """The read of one offset range: reads its records in chunks, decodes them to batches, and waits for the repair of
    damaged ones. A repaired message is read again, together with the messages after it."""

    def __init__(
        self,
        routes: RouteSource,
        storages: StorageClients,
        repairs: RepairWait,
        queue_range: OffsetRange,
        *,
        fail_on_data_loss: bool,
        columns: Sequence[str] | None = None,
        tags: frozenset[str] = frozenset(),
        sql: str | None = None,
        body_type: BodyType = "binary",
        on_loss: OnLoss = ignore_loss,
        names: Namespace = NO_NAMESPACE,
        unreadable: Unreadable = "null",
    ) -> None:
        """`repairs`: the damaged records that the reader of this range and of other ranges has met. See `open_ranges`
        for the other arguments, and for the errors."""
        self._routes, self._storages, self._repairs = routes, storages, repairs
        self._shown, self._names = queue_range, names
        self._stored = replace(queue_range, topic=names.wrap(queue_range.topic))
        self._sql, self._fail_on_data_loss, self._on_loss = sql, fail_on_data_loss, on_loss
        self._decoder = _Decoder(queue_range, self._stored.queue, columns, tags, body_type, unreadable)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the wanted messages of the range, in order."""
        start: int | None = self._stored.start_offset
        while start is not None:
            start = yield from self._read_from(start)

    def _read_from(self, start: int) -> Generator[pa.RecordBatch, None, int | None]:
        """Yield the batches of the range from offset `start` on. Returns the offset from which to read again, because a
        damaged message was repaired; None at the end of the range."""
        for chunk in self._chunks(start):
            for rows in _slices(chunk, self._decoder.batch_bytes):
                first = rows.start
                while first < rows.stop:
                    batch = self._decode(chunk, slice(first, rows.stop))
                    if batch is None:
                        return int(chunk.offsets[first])
                    first += batch.num_rows
                    selected = self._decoder.select(batch)
                    if selected.num_rows:
                        yield shown_batch(selected, self._names)
        return None

    def _decode(self, chunk: RecordsChunk, rows: slice) -> pa.RecordBatch | None:
        """Decode some records of a chunk, or the first of them. Returns None if a damaged one was repaired, so that the
        records must be read again. Raises BodyUnreadableError if the reader asked for this error."""
        queue = self._stored.queue
        try:
            batch = self._decoder.decode(chunk, rows)
        except BodyUnreadableError as error:
            if is_damage(error) and self._repairs.wait(queue, [error.queue_offset]):
                return None
            raise
        count = _unreadable_count(batch)
        if count:
            decoded = slice(rows.start, rows.start + batch.num_rows)
            if self._repairs.wait(queue, _damaged_offsets(chunk, decoded, queue)):
                return None
            logger.warning(
                "%d messages of queue %s cannot be read: their fields are null in the result", count, self._shown
            )
        return batch

    def _chunks(self, position: int) -> Iterator[RecordsChunk]:
        """Yield the records of the range from offset `position` on. Deleted or lost records are skipped. With
        `fail_on_data_loss`, they raise DataLossError instead."""
        queue, end = self._stored.queue, self._stored.end_offset
        reader = RangeReader(self._routes, self._storages)
        while position < end:
            try:
                for chunk in reader.read(queue, position, end, self._decoder.tag_codes, self._sql):
                    yield chunk
                    position = chunk.next_offset
                return
            except DataLossError as error:
                kept = bounds_of(self._routes, self._storages, queue).min_offset
                if self._fail_on_data_loss or kept <= position:
                    raise
                kept = min(kept, end)
                logger.warning("queue %s: offsets %d to %d no longer exist: %s", queue, position, kept - 1, error)
                self._on_loss(replace(self._shown, start_offset=position, end_offset=kept))
                position = kept


class _Decoder:
    """Decodes the records of one range to Arrow batches with the wanted columns, and selects messages by their tags."""

    def __init__(
        self,
        queue_range: OffsetRange,
        stored_queue: MessageQueue,
        columns: Sequence[str] | None,
        tags: frozenset[str],
        body_type: BodyType,
        unreadable: Unreadable,
    ) -> None:
        """`stored_queue`: the queue of the range, with its name in the store. Raises InvalidArgumentError for an
        unknown column."""
        self.queue_range, self.stored_queue = queue_range, stored_queue
        self._body_type, self._unreadable = body_type, unreadable
        self._wanted = schema_with(body_type, columns).names
        self._checked = unreadable == "raise" or not {"body", "error"}.isdisjoint(self._wanted)
        self._tags, self._chosen = tags, text_array(sorted(tags))
        self.tag_codes = frozenset(map(java_hash, tags)) if tags else None
        # Only a damaged record has no `born_timestamp`.
        self._read = list(dict.fromkeys([*self._wanted, *(["tags"] if tags else []), "born_timestamp"]))
        self.batch_bytes = BATCH_BYTES if "body" in self._wanted else BATCH_BYTES_WITHOUT_BODY

    def decode(self, chunk: RecordsChunk, rows: slice) -> pa.RecordBatch:
        """Decode some records of a chunk, or the first of them. Raises BodyUnreadableError if the reader asked for
        this error instead of a null body."""
        return decode_columns(
            chunk.data,
            chunk.starts[rows],
            broker_name=self.queue_range.broker_name,
            body_type=self._body_type,
            check_crc=self._checked,
            columns=self._read,
            places=chunk.places(self.stored_queue).pick(rows),
            unreadable=self._unreadable,
            max_decompressed_bytes=BATCH_DECOMPRESSED_BYTES,
        )

    def select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the wanted messages and columns of a decoded batch."""
        if self._tags:
            # Two tags may share a hash code, so compare the texts. Keep a damaged record: its tags are unknown.
            right = pc.is_in(batch.column("tags"), value_set=self._chosen)
            batch = batch.filter(pc.or_(right, batch.column("born_timestamp").is_null()))
        return batch if batch.schema.names == self._wanted else batch.select(self._wanted)


def _unreadable_count(batch: pa.RecordBatch) -> int:
    """Return the number of rows in a batch that cannot be read. The number is counted in the column `body` or, if the
    batch lacks this column, in the column `error`. A batch without both columns shows only damaged records, which have
    no `born_timestamp`."""
    names = batch.schema.names
    if "body" in names:
        return int(batch.column("body").null_count)
    if "error" in names:
        return int(batch.num_rows - batch.column("error").null_count)
    return int(batch.column("born_timestamp").null_count)


def _damaged_offsets(chunk: RecordsChunk, rows: slice, queue: MessageQueue) -> list[int]:
    """Return the queue offsets of the messages in a part of a chunk whose records are damaged."""
    found = decode_columns(
        chunk.data,
        chunk.starts[rows],
        broker_name=queue.broker_name,
        check_crc=True,
        columns=["queue_offset", "born_timestamp", "error"],
        places=chunk.places(queue).pick(rows),
    )
    columns = zip(*(found.column(index).to_pylist() for index in range(3)), strict=True)
    return [at for at, born, reason in columns if reason is not None and (born is None or reason in CHECKSUM_WRONG)]


def _slices(chunk: RecordsChunk, max_bytes: int) -> Iterator[slice]:
    """Cut a chunk of records into slices of at most `max_bytes`, with at least one record each. A whole chunk may be
    too large for one batch, because Spark copies each batch."""
    ends = np.cumsum(chunk.sizes)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + max_bytes, side="right")))
        yield slice(first, last)
        first = last
