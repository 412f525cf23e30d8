"""RangesDatasource and TopicDatasource: fixed offset ranges of topics as read tasks of Ray Data.

driver   fixes the ranges when the datasource is created, so every execution reads the same offsets task     connects
once per worker process; then, for each of its ranges, reads record bytes from mapped files (on
         the storage actor's node) or over a lane (direct socket connection), decodes them into Arrow columns, and
         returns blocks of at most the size `target_max_block_size` of Ray Data's context
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
from ray.data import DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raymq.client.client import Client
from raymq.client.consumer.subscription import ALL, Subscription
from raymq.client.scan.batches import check_unreadable, open_ranges
from raymq.client.scan.queue_bounds import ClusterQueues
from raymq.client.scan.ranges import NO_CREATIONS, Creations, OffsetRange, ScanSource, text_of
from raymq.common import identity
from raymq.common.errors import RequestTimeoutError
from raymq.common.identity import Identity
from raymq.common.numbers import LONGEST_TIME_S, POSITIVE, NumberRange, bounded, checked
from raymq.data.columns import SCHEMA, needed_of, schema_of, to_block
from raymq.data.offsets import EARLIEST, LATEST, Offsets, SizedRange, at_most, divide, resolve_ranges, sized
from raymq.data.shared_client import driver_client, worker_client
from raymq.records.filters.sql import SqlFilter
from raymq.records.kernels.columns import Unreadable

ROW_BYTES: Final = 200
"""Estimated size, in bytes, of a message in memory without its body. Ray uses the estimate for planning."""
_BLOCK_BYTES: Final = 128 * 1024 * 1024

TASK_TIMEOUT_MS: Final = NumberRange(1, int(LONGEST_TIME_S) * 1000)
"""Allowed range of a read task's `timeout_ms`."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options that the driver passes to read tasks. If `tags` is empty and `sql` is None, no message is filtered out.
    `rows_per_block`, `timeout_s`: limits of a block's rows and of a task's duration; None for no limit. `unreadable`:
    how a block represents an unreadable message."""

    tags: frozenset[str]
    sql: str | None
    columns: tuple[str, ...]
    fail_on_data_loss: bool
    rows_per_block: int | None
    timeout_s: float | None
    unreadable: Unreadable = "null"


def read_options(
    tags: str,
    expression: SqlFilter | None,
    columns: Sequence[str] | None,
    fail_on_data_loss: bool,
    rows_per_block: int | None,
    timeout_ms: int | None,
    unreadable: Unreadable = "null",
) -> ReadOptions:
    """Check the options of `read_topic` and return them as ReadOptions. Raises InvalidArgumentError if an option is
    invalid."""
    wanted = tuple(SCHEMA.names if columns is None else columns)
    schema_of(wanted)

    check_unreadable(unreadable)
    return ReadOptions(
        tags=Subscription.parse("any", tags).tags,
        sql=text_of(expression),
        columns=wanted,
        fail_on_data_loss=fail_on_data_loss,
        rows_per_block=rows_per_block,
        timeout_s=None if timeout_ms is None else timeout_ms / 1000,
        unreadable=unreadable,
    )


class RangesDatasource(Datasource):
    """Ray Data datasource that reads the messages of `ranges`. `source` provides the size of the ranges in bytes;
    `options` has the columns and filters."""

    def __init__(
        self,
        source: ScanSource,
        ranges: Sequence[OffsetRange],
        options: ReadOptions,
        namespace: str = "",
        creations: Creations = NO_CREATIONS,
    ) -> None:
        """Estimate the ranges' sizes, and record the current user, in whose name the tasks read. `creations`: the
        creation ids of the topics when the ranges were planned."""
        super().__init__()
        self._creations = creations
        self._namespace = namespace
        self._projection_map: dict[str, str] | None = None
        self._options = options
        self._pieces = tuple(sized(ranges, source.range_bytes(ranges) if ranges else []))
        self.ranges: tuple[OffsetRange, ...] = tuple(ranges)
        self._user = identity.present()
        """The user in whose name the planning program is authenticated. The read tasks act in the name of the same
        user."""

    def get_name(self) -> str:
        """Return the name that Ray's progress bars show for this read."""
        return "Topic"

    def estimate_inmemory_data_size(self) -> int:
        """Estimate the size in bytes of all rows in memory, with only the columns that are read."""
        return sum(_memory_bytes(piece, self._columns) for piece in self._pieces)

    def supports_projection_pushdown(self) -> bool:
        """Return True: Ray Data may restrict the read to the columns that a plan needs."""
        return True

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """Return about `parallelism` read tasks, each with about the same number of bytes to read. There are fewer
        tasks if there are fewer messages, and more tasks if `rows_per_block` limits the rows of a task."""
        context = data_context or DataContext.get_current()
        block_bytes = context.target_max_block_size or _BLOCK_BYTES
        options = replace(self._options, columns=self._columns)
        parts = divide(self._pieces, parallelism)
        # Limit the rows of each read task, not only of its blocks, because Ray combines a task's small blocks.
        if options.rows_per_block is not None:
            parts = at_most(parts, options.rows_per_block)
        # If there are no messages to read, make one read task without offset ranges. It returns the dataset's columns
        # without rows.
        parts = parts or [[]]
        whose = self._user, self._namespace, self._creations
        return [_read_task(part, options, block_bytes, per_task_row_limit, *whose) for part in parts]

    @property
    def _columns(self) -> tuple[str, ...]:
        """The columns that the read tasks read: those requested columns that Ray Data's plan needs."""
        projected = self._get_data_columns()
        return self._options.columns if projected is None else tuple(projected)


class TopicDatasource(RangesDatasource):
    """Datasource for `ray.data.read_datasource` that reads topics. It has the same arguments and errors as
    `raymq.data.read_topic`. The constructor fixes the offset ranges (`ranges`)."""

    @checked
    @bounded(rows_per_block=POSITIVE, timeout_ms=TASK_TIMEOUT_MS)
    def __init__(
        self,
        topics: str | Sequence[str],
        *,
        address: str | None = None,
        start_offset: Offsets = EARLIEST,
        end_offset: Offsets = LATEST,
        tags: str = ALL,
        expression: SqlFilter | None = None,
        columns: Sequence[str] | None = None,
        fail_on_data_loss: bool = True,
        rows_per_block: int | None = None,
        timeout_ms: int | None = None,
        namespace: str | None = None,
        unreadable: Unreadable = "null",
    ) -> None:
        options = read_options(tags, expression, columns, fail_on_data_loss, rows_per_block, timeout_ms, unreadable)
        with driver_client(address, namespace) as client:
            source = ClusterQueues(client.routes, client.storages, client.names)
            ranges = resolve_ranges(source, topics, start_offset, end_offset, lenient=not fail_on_data_loss)
            super().__init__(source, ranges, options, client.names.name, present_creations(source, ranges))


def present_creations(source: ClusterQueues, ranges: Sequence[OffsetRange]) -> Creations:
    """Return the current creation ids of the topics of the given ranges."""
    return source.creations(sorted({one.topic for one in ranges})) if ranges else NO_CREATIONS


def _read_task(
    part: Sequence[SizedRange],
    options: ReadOptions,
    block_bytes: int,
    row_limit: int | None,
    user: Identity | None,
    namespace: str,
    creations: Creations,
) -> ReadTask:
    ranges = [piece.range for piece in part]
    # The task yields exactly one row per offset if no filter excludes messages and every lost message is an error. Only
    # then is the number of rows known before the read.
    is_exact = not options.tags and options.sql is None and options.fail_on_data_loss
    metadata = BlockMetadata(
        num_rows=sum(one.size for one in ranges) if is_exact else None,
        size_bytes=sum(_memory_bytes(piece, options.columns) for piece in part),
        input_files=[f"raymq://{one.topic}/{one.broker_name}/{one.queue_id}" for one in ranges],
        exec_stats=None,
    )

    def read() -> Iterator[pa.Table]:
        has_rows = False
        if ranges:
            with worker_client().use(user, namespace) as client:
                for block in read_blocks(client, ranges, options, block_bytes, creations):
                    has_rows = True
                    yield block
        if not has_rows:  # yield an empty block, because Ray Data gets the columns' names and types only from a block
            yield schema_of(options.columns).empty_table()

    return ReadTask(read, metadata, schema=schema_of(options.columns), per_task_row_limit=row_limit)


def _memory_bytes(piece: SizedRange, columns: Sequence[str]) -> int:
    """Estimate the size in bytes of the Arrow rows of an offset range. If bodies are read, the estimate is the size of
    the records: the other columns of a row take about as much memory as the record's header. Without bodies, the
    estimate is ROW_BYTES per offset, but at most the size of the records. The result is never 0, because Ray Data
    interprets 0 as no rows."""
    return piece.size_bytes if "value" in columns else min(piece.size_bytes, piece.range.size * ROW_BYTES)


def read_blocks(
    client: Client,
    ranges: Sequence[OffsetRange],
    options: ReadOptions,
    block_bytes: int,
    creations: Creations = NO_CREATIONS,
) -> Iterator[pa.Table]:
    """Yield the messages of offset ranges, in order, as tables of about `block_bytes`.

    Raises the errors of `raymq.client.scan.batches.open_ranges`, and RequestTimeoutError if the read exceeds
    `options.timeout_s`.
    """
    deadline_s = None if options.timeout_s is None else time.monotonic() + options.timeout_s
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in _batches(client, ranges, options, creations):
        if deadline_s is not None and time.monotonic() > deadline_s:
            assert options.timeout_s is not None
            raise RequestTimeoutError(f"the read task of {len(ranges)} range(s)", options.timeout_s)
        waiting.append(batch)
        waiting_bytes += batch.nbytes
        if waiting_bytes >= block_bytes:
            yield pa.Table.from_batches(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _batches(
    client: Client, ranges: Sequence[OffsetRange], options: ReadOptions, creations: Creations
) -> Iterator[pa.RecordBatch]:
    batches = open_ranges(
        client.routes,
        client.storages,
        ranges,
        fail_on_data_loss=options.fail_on_data_loss,
        columns=needed_of(options.columns),
        tags=options.tags,
        sql=options.sql,
        names=client.names,
        creations=creations,
        unreadable=options.unreadable,
    )
    for batch in batches:
        yield to_block(batch, options.columns)
