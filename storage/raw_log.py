"""The log as bytes, for replication: read from an offset, append what another replica has, cut at an offset.

A chunk is what lies between two record boundaries of one file: whole records, and at the file's end its BLANK with what
follows it. So a replica that appends chunk after chunk has the same files, byte for byte, and each step of the way is a
log that recovery accepts. Queues, dedup table and index follow from the records as they do in recovery.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from raymq.config import StoreSettings
from raymq.delay import delivery_source
from raymq.errors import DataLossError, InvalidArgumentError, StoreCorruptError
from raymq.log_reader import LogReader
from raymq.record import DispatchView, RecordError, check_record, dispatch_view
from raymq.record_layout import (
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from storage import disk
from storage.append import Appender
from storage.batch_dispatch import put_batch
from storage.commit_log import CommitLog
from storage.lock import DirectoryLock
from storage.log_walk import walk_records
from storage.parts import StoreParts

CHUNK_MAX_BYTES: Final = 4 << 20
_NOT_QUEUED: Final = (SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK)


def read_chunk(reader: LogReader, min_offset: int, physical_offset: int, limit: int, max_bytes: int) -> bytes:
    """The log's bytes from `physical_offset` on, where a record or a file starts: about `max_bytes`, at least a record.

    Empty at `limit`, the end of what may be read. InvalidArgumentError for an offset beyond it, DataLossError for one
    before `min_offset`, where the log starts.
    """
    if physical_offset > limit:
        raise InvalidArgumentError(f"the log ends at {limit}, before {physical_offset}")
    if physical_offset < min_offset:
        raise DataLossError(f"the log starts at {min_offset}; what was at {physical_offset} was deleted")
    if physical_offset == limit:
        return b""
    chunk = walk_records(reader, physical_offset, limit, min(max(max_bytes, 1), CHUNK_MAX_BYTES))
    # The rest of a file goes along only where the log goes on behind it.
    return bytes(reader.log_bytes(physical_offset, min(chunk.end_offset, limit)))


def parse_chunk(
    data: bytes, physical_offset: int, file_size: int, delay_levels_ms: tuple[int, ...]
) -> list[DispatchView]:
    """The records of a chunk that is to lie at `physical_offset`. InvalidArgumentError unless it is whole and good."""
    views: list[DispatchView] = []
    position, room = 0, file_size - physical_offset % file_size
    if len(data) > room:
        raise InvalidArgumentError(f"a chunk of {len(data)} bytes at {physical_offset} goes over its file's end")
    while position < len(data):
        size, good = check_record(data, position)
        if good and size == 0 and len(data) == room:
            return views
        try:
            view = dispatch_view(data, position, delay_levels_ms=delay_levels_ms) if good and size > 0 else None
        except RecordError:
            view = None
        if view is None or view.physical_offset != physical_offset + position:
            raise InvalidArgumentError(f"the chunk for {physical_offset} has no good record at its byte {position}")
        views.append(view)
        position += size
    return views


class RawAppender:
    """Appends another replica's chunks to a log, and their records to the queues and the dedup table."""

    def __init__(self, parts: StoreParts, appender: Appender) -> None:
        self._log, self._queues, self._dedup, self._deliveries = parts.log, parts.queues, parts.dedup, parts.deliveries
        self._visibility, self._appender = parts.visibility, appender
        self._delay_levels_ms = parts.settings.delay_levels_ms

    def append(self, physical_offset: int, data: bytes) -> None:
        """Write a chunk at the log's end, which must be `physical_offset`. Called under the append lock.

        InvalidArgumentError, and nothing is written, unless the chunk is whole, good, and continues log and queues.
        OSError: the disk failed in the middle.
        """
        if physical_offset != self._log.end_offset:
            raise InvalidArgumentError(f"the log ends at {self._log.end_offset}; a chunk for {physical_offset} came")
        views = parse_chunk(data, physical_offset, self._log.file_size, self._delay_levels_ms)
        batches: list[DispatchView] = []
        by_queue: dict[tuple[str, int], list[DispatchView]] = {}
        for view in views:
            if view.sys_flag & SYS_FLAG_INNER_BATCH:
                batches.append(view)
            elif view.sys_flag & SYS_FLAG_TRANSACTION_MASK not in _NOT_QUEUED:
                by_queue.setdefault((view.topic, view.queue_id), []).append(view)
        queues = {key: self._queues.get_or_create(*key) for key in by_queue}
        for key, queued in by_queue.items():
            queue = queues[key]
            first = queue.next_offset if queue.exists else queued[0].queue_offset
            if [view.queue_offset for view in queued] != list(range(first, first + len(queued))):
                raise InvalidArgumentError(f"the chunk for {physical_offset} does not continue queue {key[0]}:{key[1]}")
        if not data:
            return
        self._log.reserve(physical_offset + len(data) - 1)
        for key, queued in by_queue.items():
            if not queues[key].exists and queued[0].queue_offset:
                queues[key].start_at(queued[0].queue_offset)
            queues[key].reserve(len(queued))
        if views:
            self._appender.last_store_timestamp_ms = views[-1].store_timestamp_ms
            self._appender.last_record_offset = views[-1].physical_offset
        self._log.write(physical_offset, memoryview(data), self._appender.last_store_timestamp_ms)
        for key, queued in by_queue.items():
            rows = np.array([(view.physical_offset, view.size, view.tags_code) for view in queued], np.int64)
            queues[key].append_scattered(rows[:, 0], rows[:, 1].astype(np.int32), rows[:, 2])
            self._visibility.add(self._log.end_offset, queues[key], queues[key].next_offset)
        for view in batches:
            if put_batch(self._queues, view, view.physical_offset, may_fill_gaps=True):
                of_batches = self._queues.get(view.topic, view.queue_id)
                assert of_batches is not None
                self._visibility.add(self._log.end_offset, of_batches, of_batches.next_offset)
        for view in views:
            self._remember_producer(view)

    def _remember_producer(self, view: DispatchView) -> None:
        producer = view.producer
        source = None if producer is None else delivery_source(producer.producer_id)
        if producer is not None and source is not None:
            self._deliveries.advance(source, producer.epoch, producer.first_sequence + 1)
        elif producer is not None:
            self._dedup.record(producer, view.topic, view.queue_id, 1, view.queue_offset)


def truncate_log(settings: StoreSettings, physical_offset: int) -> int:
    """Cut the log of a store that is not open at `physical_offset`; returns how many bytes that took away.

    On return it is on disk; queues, index and dedup table follow when the store is opened. StoreLockedError while it is
    open; InvalidArgumentError, and nothing is changed, unless a record starts or the log ends there.
    """
    root, file_size = settings.store_path_root_dir, settings.mapped_file_size_commit_log_bytes
    lock = DirectoryLock(root)
    try:
        log = CommitLog(root, file_size)
        try:
            _require_boundary(log, physical_offset)
            cut_bytes = log.open_for_append(physical_offset)
            for start in log.starts[-1:]:
                disk.flush_path(log.path(start))
            return cut_bytes
        finally:
            log.close()
    finally:
        lock.release()


def _require_boundary(log: CommitLog, physical_offset: int) -> None:
    start = physical_offset - physical_offset % log.file_size
    position, file = start, _bytes_of(log.path(start)) if start in log.starts else b""
    while position < physical_offset:
        size, good = check_record(file, position - start, check_crc=False)
        if not good or size <= 0:
            break
        position += size
    if position != physical_offset or physical_offset < log.min_offset:
        raise InvalidArgumentError(f"no record of the log in {log.directory} starts or ends at {physical_offset}")


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StoreCorruptError(f"{path} is missing") from None
