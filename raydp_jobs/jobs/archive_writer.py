"""Writes the Parquet files of an archive into the staging directory of one run, in Spark tasks.

A task gets an offset range of one queue and writes the range's messages in order: one file for each day, or several for
a day with many messages. Each file's Parquet metadata describes the file's content; pages have checksums. A file gets
its name in the staging directory after it is complete and flushed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydp_jobs.jobs.archive_files import ArchiveFile
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import StoreCorruptError

ARCHIVE_FILE_BYTES: Final = 512 * 1024 * 1024
"""Approximate maximum number of message bytes in one archive file, before compression."""
ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
"""Number of message bytes that a task collects in memory before it writes a row group."""
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = date(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Written:
    """A complete file in the staging directory: its archive entry (`piece`), its number of messages, and its size in
    bytes."""

    piece: ArchiveFile
    rows: int
    bytes: int


def metadata_of(topic: str, piece: ArchiveFile, rows: int) -> dict[str, str]:
    """Return the metadata of an archive's Parquet file: the number of rows, and the topic, queue, offset range and day
    that the file's name contains."""
    return {
        "raymq.topic": topic,
        "raymq.broker_name": piece.broker_name,
        "raymq.queue_id": str(piece.queue_id),
        "raymq.start_offset": str(piece.start_offset),
        "raymq.end_offset": str(piece.end_offset),
        "raymq.day": piece.day,
        "raymq.rows": str(rows),
    }


def write_range(
    item: OffsetRange, batches: Iterable[pa.RecordBatch], staging: Path, *, file_bytes: int = ARCHIVE_FILE_BYTES
) -> list[Written]:
    """Write the messages of an offset range, in offset order, as files in `staging`. Returns the files in order.

    Together the files cover the range. If no message has an offset, the offset is covered by the file before it;
    offsets before the first message are covered by the first file. If the range contains no message, no file is
    written. Raises FileNotFoundError if `staging` was deleted.
    """
    written: list[Written] = []
    current: _OpenFile | None = None
    position = item.start_offset
    for batch in batches:
        for day, some in _days(batch):
            first = some.column("queue_offset")[0].as_py()
            if first < position:
                raise StoreCorruptError(f"queue {item.queue}: offset {first} was read after offset {position - 1}")
            if current is not None and (current.day != day or current.bytes >= file_bytes):
                written.append(current.close(first))
                current = None
            if current is None:
                start = written[-1].piece.end_offset if written else item.start_offset
                current = _OpenFile(item, day, start, staging, some.schema)
            current.write(some)
            position = some.column("queue_offset")[-1].as_py() + 1
    if current is not None:
        written.append(current.close(item.end_offset))
    return written


def _days(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Split a batch by day: yield each run of consecutive messages that were stored on the same day, with the day.

    A damaged message has no store time. It gets the day of the message before it. If the batch has no message before
    it, it gets the day of the next message.
    """
    times = batch.column("store_timestamp").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    if times.null_count:
        times = pc.fill_null(pc.fill_null_backward(pc.fill_null_forward(times)), 0)
    days = times.to_numpy(zero_copy_only=False) // _DAY_US
    edges = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
    for start, end in pairwise(edges):
        if start < end:
            yield (_EPOCH + timedelta(days=int(days[start]))).isoformat(), batch.slice(start, end - start)


@dataclass(slots=True)
class _OpenFile:
    """An archive file that is being written. It has a unique name, because another attempt of the same Spark task may
    write the same messages."""

    item: OffsetRange
    day: str
    start: int
    staging: Path
    schema: pa.Schema
    bytes: int = 0
    rows: int = 0
    _path: Path = field(init=False)
    _writer: pq.ParquetWriter = field(init=False)
    _held: list[pa.RecordBatch] = field(init=False, default_factory=list)
    _held_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._path = self.staging / f".{uuid.uuid4().hex}.partial"
        self._writer = pq.ParquetWriter(self._path, self.schema, compression="zstd", write_page_checksum=True)

    def write(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        self.bytes += batch.nbytes
        self.rows += batch.num_rows
        if self._held_bytes >= ROW_GROUP_BYTES:
            self._write_held()

    def close(self, end: int) -> Written:
        """Finish the Parquet file, which covers the queue offsets before `end`. Rename it to its final name in the
        staging directory."""
        self._write_held()
        piece = ArchiveFile(self.item.broker_name, self.item.queue_id, self.start, end, self.day)
        self._writer.add_key_value_metadata(metadata_of(self.item.topic, piece, self.rows))
        self._writer.close()
        size = flush_file(self._path)
        target = self.staging / piece.path
        # If the staging directory is missing, do not create it: it was deleted when its archive run ended, and must not
        # exist again.
        target.parent.mkdir(exist_ok=True)
        os.replace(self._path, target)
        return Written(piece, self.rows, size)

    def _write_held(self) -> None:
        if self._held:
            self._writer.write_table(pa.Table.from_batches(self._held))
        self._held, self._held_bytes = [], 0


def flush_file(path: Path) -> int:
    """Flush a file's content, or a directory's entries, to disk. Returns the size of the file or directory in
    bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
