"""The messages of offset ranges as Arrow batches of bounded size, read by whoever runs a part of a scan.

A Spark task, a Ray Data task and a job of the command line all read their ranges here: from mapped files on the store's
node, over a lane elsewhere (raymq.scan.range_reader). A batch holds copies, so it outlives the files it came from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raymq.errors import DataLossError
from raymq.kernels.byte_column import text_array
from raymq.kernels.column_bodies import BodyType
from raymq.kernels.columns import decode_columns, schema_with, shown_batch
from raymq.namespaces import NO_NAMESPACE, Namespace
from raymq.record.hashing import java_hash
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_clients import StorageClients
from raymq.scan.queue_bounds import bounds_of
from raymq.scan.range_reader import RangeReader, RecordsChunk
from raymq.scan.ranges import OffsetRange

BATCH_BYTES: Final = 4 * 1024 * 1024
"""The bytes of records in one Arrow batch, which bounds the memory of a worker and of its executor."""
BATCH_BYTES_WITHOUT_BODY: Final = 32 * 1024 * 1024
"""Likewise, of a batch that holds only the small parts of its records."""

OnLoss = Callable[[OffsetRange], None]
"""Is told each range of offsets that a read has left out because they are gone."""

logger = logging.getLogger(__name__)


def open_ranges(
    routes: RouteSource,
    storages: StorageClients,
    ranges: Iterable[OffsetRange],
    *,
    fail_on_data_loss: bool,
    columns: Sequence[str] | None = None,
    tags: frozenset[str] = frozenset(),
    sql: str | None = None,
    body_type: BodyType = "binary",
    on_loss: OnLoss = lambda lost: None,
    names: Namespace = NO_NAMESPACE,
) -> Iterator[pa.RecordBatch]:
    """The messages of several ranges, one after another, as `open_range` gives them."""
    for queue_range in ranges:
        yield from open_range(
            routes,
            storages,
            queue_range,
            fail_on_data_loss=fail_on_data_loss,
            columns=columns,
            tags=tags,
            sql=sql,
            body_type=body_type,
            on_loss=on_loss,
            names=names,
        )


def open_range(
    routes: RouteSource,
    storages: StorageClients,
    queue_range: OffsetRange,
    *,
    fail_on_data_loss: bool,
    columns: Sequence[str] | None = None,
    tags: frozenset[str] = frozenset(),
    sql: str | None = None,
    body_type: BodyType = "binary",
    on_loss: OnLoss = lambda lost: None,
    names: Namespace = NO_NAMESPACE,
) -> Iterator[pa.RecordBatch]:
    """The messages of one range, in order, with the columns of `raymq.kernels.columns.SCHEMA`, or these `columns` of
    them, and copied bodies. Without `body` among the columns no body is read or copied. `tags`: only messages with one
    of them, all if empty; others are left out by the codes in the queue, before their records are read. `sql`: only
    messages that pass this filter expression, too; of others only the properties are read.

    DataLossError when some of the range is gone; without `fail_on_data_loss` the rest of it is read instead, a warning
    says what was left out, and `on_loss` is told. InvalidArgumentError for columns that there are not. The range's
    topic, and that of the messages, are names in the namespace `names`.
    """
    wanted = schema_with(body_type, columns).names
    read = [*wanted, "tags"] if tags and "tags" not in wanted else wanted
    tag_codes = frozenset(map(java_hash, tags)) if tags else None
    chosen = text_array(sorted(tags))
    stored = replace(queue_range, topic=names.wrap(queue_range.topic))

    def lost(some: OffsetRange) -> None:
        on_loss(replace(some, topic=names.unwrap(some.topic)))

    for chunk in _open_chunks(routes, storages, stored, tag_codes, sql, fail_on_data_loss, lost):
        for starts in _slices(chunk, BATCH_BYTES if "body" in wanted else BATCH_BYTES_WITHOUT_BODY):
            batch = decode_columns(
                chunk.data, starts, broker_name=queue_range.broker_name, body_type=body_type, columns=read
            )
            if tags:  # two tags may have one code
                batch = batch.filter(pc.is_in(batch.column("tags"), value_set=chosen)).select(wanted)
            if batch.num_rows:
                yield shown_batch(batch, names)


def _open_chunks(
    routes: RouteSource,
    storages: StorageClients,
    queue_range: OffsetRange,
    tag_codes: frozenset[int] | None,
    sql: str | None,
    fail_on_data_loss: bool,
    on_loss: OnLoss,
) -> Iterator[RecordsChunk]:
    """The records of a range, but for those that are gone if that is no failure."""
    queue, position, end = queue_range.queue, queue_range.start_offset, queue_range.end_offset
    while position < end:
        try:
            for chunk in RangeReader(routes, storages).read(queue, position, end, tag_codes, sql):
                yield chunk
                position = chunk.next_offset
            return
        except DataLossError as error:
            kept = bounds_of(routes, storages, queue).min_offset
            if fail_on_data_loss or kept <= position:
                raise
            kept = min(kept, end)
            logger.warning("%s: offsets %d to %d are gone: %s", queue, position, kept - 1, error)
            on_loss(OffsetRange(queue.topic, queue.broker_name, queue.queue_id, position, kept))
            position = kept


def _slices(chunk: RecordsChunk, max_bytes: int) -> Iterator[NDArray[np.int64]]:
    """The starts of neighbouring records, `max_bytes` of them at a time but one at least: a chunk may be large, and
    Spark copies."""
    ends = np.cumsum(chunk.sizes)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + max_bytes, side="right")))
        yield chunk.starts[first:last]
        first = last
