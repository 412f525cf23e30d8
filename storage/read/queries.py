"""Finds messages by key, by unique id, by position in the log, and by time.

Queries change nothing in the store. A record to which the index points is read from the log and compared with the key.
Damaged records are not hidden: a record whose body fails its CRC is returned unchanged, and the reader reports the
damage. For some records only the physical offset is returned: the record cannot be parsed, or does not have the key
under which the index lists it. The third case is that the record's queue has another record at the record's queue
offset.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from raymq.common.errors import BodyUnreadableError, DataLossError, InvalidArgumentError
from raymq.common.names import check_topic
from raymq.common.protocol.store import Boundary, QueryResult
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.hashing import index_key_hash
from raymq.records.format.inner_batch import inner_keys, split_inner_batch
from raymq.records.format.layout import (
    BLANK_MAGIC,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    SYS_FLAG_INNER_BATCH,
    RecordError,
    read_header,
)
from raymq.records.format.walk import is_blank
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE, LogReader
from storage.dispatch.queue_check import leads_to_own
from storage.dispatch.record_blocks import is_queued
from storage.index.index_service import IndexService
from storage.log.commit_log import CommitLog
from storage.log.log_walk import resume_behind
from storage.queue.batch_consume_queue import BatchConsumeQueue
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import AnyQueue, QueueTable

UNIQUE_ID_MAX_NUM: Final = 32
"""Maximum number of messages that a query by unique id returns (spec/storage.md §3)."""
SETTLE_MAX_S: Final = 0.5
"""Maximum time in seconds that a query by several ids waits for messages to become visible. The query
occupies a reading thread for this time."""
SETTLE_POLL_S: Final = 0.001
"""Time in seconds after which a query that waits for messages to become visible looks again."""
_DAMAGED_MAX: Final = 1000
"""Maximum number of consecutive damaged records that a query by time skips."""
_DAMAGED: Final = "the length fields or the header of the record are damaged"
_MISPLACED: Final = "the record's queue has another record at this offset"


def _has_id(message_id: str, view: DispatchView) -> bool:
    return view.message_id == message_id


class StoreQueries:
    """Queries for the messages of one store. `visible` is a function that returns the physical offset up to which
    consumers may see messages. Thread-safe."""

    def __init__(
        self,
        commit_log: CommitLog,
        reader: LogReader,
        queues: QueueTable,
        index: IndexService | None,
        *,
        visible: Callable[[], int],
        max_num: int,
        wait_s: float,
    ) -> None:
        self._log, self._reader, self._queues, self._index = commit_log, reader, queues, index
        self._visible = visible
        self._max_num, self._wait_s = max_num, wait_s
        self.on_damage: Callable[[int, int], None] = lambda physical_offset, size: None
        """Function that is called with the physical offset and the size of a damaged record that a query has found. It
        must not block."""

    def limit(self, max_num: int, wait_s: float) -> None:
        """Set two limits of queries: the maximum number of returned messages, and the maximum time in seconds to wait
        for the index."""
        self._max_num, self._wait_s = max_num, wait_s

    def by_key(
        self, topic: str, key: str, max_num: int = 32, begin_ms: int = 0, end_ms: int = 2**63 - 1
    ) -> QueryResult:
        """Find the newest messages of `topic` that have `key` among their keys, stored in [`begin_ms`, `end_ms`].

        Waits a bounded time until the index contains all messages that are visible now. The index rounds times to
        seconds. Raises InvalidArgumentError if the key is blank, or the store keeps no index.
        """
        return self._find(topic, key, min(max_num, self._max_num), begin_ms, end_ms, lambda view: key in view.keys)

    def by_unique_id(self, topic: str, message_id: str) -> QueryResult:
        """Find the messages of `topic` whose unique id is `message_id`. There are several if the producer sent the
        message again."""
        return self._find(topic, message_id, UNIQUE_ID_MAX_NUM, 0, 2**63 - 1, partial(_has_id, message_id))

    def by_unique_ids(self, topic: str, message_ids: Sequence[str], since_ms: int = 0) -> QueryResult:
        """Find the messages of `topic` with one of these unique ids that were stored at or after `since_ms`, among all
        messages that are in the log at the time of the call.

        Waits a bounded time until consumers may see all these messages. If a message stays invisible for longer, the
        result is not complete: the message may have one of the ids, and a failover may lose the message. Raises
        InvalidArgumentError if the store keeps no index.
        """
        end, until_s = self._log.end_offset, time.monotonic() + min(self._wait_s, SETTLE_MAX_S)
        while self._visible() < end and time.monotonic() < until_s:
            time.sleep(SETTLE_POLL_S)
        visible = self._visible()
        is_complete = self._indexed(visible) and visible >= end
        records: list[bytes] = []
        damaged: set[int] = set()
        for message_id in message_ids:
            accept = partial(_has_id, message_id)
            some, unread = self._found(topic, message_id, UNIQUE_ID_MAX_NUM, since_ms, 2**63 - 1, accept, visible)
            records += some
            damaged |= unread
        return QueryResult(b"".join(records), len(records), is_complete, tuple(sorted(damaged)))

    def by_physical_offset(self, physical_offset: int) -> bytes:
        """Return the record that starts at a physical offset. Does not check the CRC of the record's body.

        Raises InvalidArgumentError if no record starts at the offset, DataLossError if the record was deleted, and
        BodyUnreadableError if the record is damaged.
        """
        end = self._visible()
        if physical_offset < 0 or physical_offset > end - MIN_RECORD_SIZE:
            raise InvalidArgumentError(f"physical offset {physical_offset} has no message: the log ends at {end}")
        if physical_offset < self._log.min_offset:
            raise DataLossError(
                f"the message at physical offset {physical_offset} was deleted; the log starts at "
                f"{self._log.min_offset}"
            )
        view = self._record_at(physical_offset, end)
        if view is not None and not self._has_its_place(view):
            self.on_damage(physical_offset, view.size)
            raise BodyUnreadableError("an unknown queue", -1, physical_offset, _MISPLACED, True)
        if view is not None:
            if not self._body_holds(view):
                self.on_damage(physical_offset, view.size)
            return self._bytes_of(view)
        if self._is_damaged(physical_offset, end):
            self.on_damage(physical_offset, 1)
            raise BodyUnreadableError("an unknown queue", -1, physical_offset, _DAMAGED, True)
        raise InvalidArgumentError(f"no message starts at physical offset {physical_offset}")

    def offset_by_time(self, queue: AnyQueue, timestamp_ms: int, boundary: Boundary) -> int:
        """Return the queue offset for a store time, always in [min, max] of the queue (spec §2).

        LOWER: the first message stored at or after `timestamp_ms`; the queue's end if no such message exists. UPPER:
        the last message stored at or before `timestamp_ms`; the queue's first offset if no such message exists.
        """
        if isinstance(queue, BatchConsumeQueue):
            return queue.offset_by_time(timestamp_ms, boundary)
        low, high = first, end = queue.min_offset, queue.visible_offset
        while low < high:
            middle = (low + high) // 2
            # If the record of a queue offset is lost or damaged, use the store time of the next record.
            stored_ms = self._stored_ms_from(queue, middle, high)
            if stored_ms < timestamp_ms or (stored_ms == timestamp_ms and boundary is Boundary.UPPER):
                low = middle + 1
            else:
                high = middle
        return low if boundary is Boundary.LOWER else min(max(low - 1, first), end)

    def stored_ms(self, queue: AnyQueue, queue_offset: int) -> int:
        """Return the store time of the message at a queue offset. If this message is deleted or damaged, return the
        store time of the queue's next existing message; 0 if the queue has none."""
        start, end = max(queue_offset, queue.first_readable_offset), queue.visible_offset
        if start >= end:
            return 0
        if isinstance(queue, BatchConsumeQueue):
            holder = queue.holder_of(start)
            return 0 if holder is None else holder.store_timestamp_ms
        stored_ms = self._stored_ms_from(queue, start, end)
        return 0 if stored_ms == math.inf else int(stored_ms)

    def earliest_store_time_ms(self) -> int:
        """Return the store time of the first intact record in the log; -1 for an empty log."""
        start, end = self._log.min_offset, self._visible()
        while start < end:
            view = self._record_at(start, end) or self._record_behind(start, end)
            if view is not None:
                return view.store_timestamp_ms
            start += self._log.file_size  # Skip this log file: it contains only a BLANK (end-of-file marker).
        return -1

    def _find(
        self,
        topic: str,
        key: str,
        max_num: int,
        begin_ms: int,
        end_ms: int,
        accept: Callable[[DispatchView], bool],
    ) -> QueryResult:
        check_topic(topic)
        if not key.strip() or max_num < 1 or begin_ms > end_ms:
            raise InvalidArgumentError(
                f"a query needs a key, max_num of at least 1, and begin_ms not after end_ms; got {key!r}, "
                f"{max_num} and {begin_ms} to {end_ms} ms"
            )
        visible = self._visible()
        complete = self._indexed(visible)
        records, damaged = self._found(topic, key, max_num, begin_ms, end_ms, accept, visible)
        return QueryResult(b"".join(records), len(records), complete, tuple(sorted(damaged)))

    def _indexed(self, physical_offset: int) -> bool:
        """Wait a bounded time until the index contains all messages before an offset. Returns False if it does not.
        Raises InvalidArgumentError if the store keeps no index."""
        if self._index is None:
            raise InvalidArgumentError("this store has no index (message_index_enable is off): query by offset")
        return self._index.wait_for(physical_offset, self._wait_s)

    def _found(
        self,
        topic: str,
        key: str,
        max_num: int,
        begin_ms: int,
        end_ms: int,
        accept: Callable[[DispatchView], bool],
        visible: int,
    ) -> tuple[list[bytes], set[int]]:
        """Return the records before the physical offset `visible` that the index lists under a key and that `accept`
        accepts, and the physical offsets of damaged records."""
        assert self._index is not None
        found: dict[int, list[bytes]] = {}
        damaged: set[int] = set()
        for physical_offset in self._index.find(topic, key, begin_ms, end_ms):
            if physical_offset not in found and physical_offset not in damaged:
                view = self._record_at(physical_offset, visible)
                try:
                    records = [] if view is None or view.topic != topic else self._accepted(view, accept)
                    changed = view is not None and not self._fits(view, topic, key, is_wanted=bool(records))
                except RecordError:
                    records, view, changed = [], None, False
                if changed or (view is None and self._is_damaged(physical_offset, visible)):
                    damaged.add(physical_offset)
                    self.on_damage(physical_offset, 1)
                elif records:
                    found[physical_offset] = records
                    if view is not None and not self._body_holds(view):
                        self.on_damage(physical_offset, view.size)
                if len(found) + len(damaged) == max_num:
                    break
        return [record for offset in sorted(found) for record in found[offset]], damaged

    def _accepted(self, view: DispatchView, accept: Callable[[DispatchView], bool]) -> list[bytes]:
        """Return a list with the record of `view` if `accept` returns True for it; otherwise an empty list.

        The record may be an inner batch with several messages. Then `accept` is called for each message, and the list
        has one record for each accepted message. If `accept` accepts only the batch itself, the list has the records of
        all its messages. Raises RecordError if the inner batch is damaged.
        """
        if not view.sys_flag & SYS_FLAG_INNER_BATCH:
            return [self._bytes_of(view)] if accept(view) else []
        messages = split_inner_batch(self._bytes_of(view))
        return [record for record in messages if accept(dispatch_view(record))] or (messages if accept(view) else [])

    def _fits(self, view: DispatchView, topic: str, key: str, *, is_wanted: bool) -> bool:
        """Check a record that the index lists under `topic` and `key`. Returns False if the disk has changed the
        record, so that the index entry does not belong to it.

        `is_wanted`: True if the record has this topic and this key. Raises RecordError if the record is a damaged inner
        batch.
        """
        if is_wanted:
            return self._has_its_place(view)
        # Compare hashes, not keys: the index may list the record because another of its keys has the same hash.
        inner = inner_keys(self._bytes_of(view)) if view.sys_flag & SYS_FLAG_INNER_BATCH else []
        wanted = index_key_hash(topic, key)
        return any(index_key_hash(view.topic, one) == wanted for one in (*view.keys, *inner))

    def _has_its_place(self, view: DispatchView) -> bool:
        """Return False if this record is certainly not the record at its queue offset. The consume queue then has
        another record at this offset, or does not reach the offset yet.

        Return True in the other cases. If the queue no longer contains the offset, or the queue's unit is damaged, it
        is unknown which record belongs to the offset.
        """
        topic, queue_id, offset = view.topic, view.queue_id, view.queue_offset
        if not is_queued(view.sys_flag) or view.sys_flag & SYS_FLAG_INNER_BATCH:
            return True
        if self._queues.was_deleted_after((topic, queue_id), view.physical_offset):
            return True
        if self._queues.holds_batches(topic, queue_id):
            return True
        queue = self._queues.get_plain(topic, queue_id)
        if queue is None or not 0 <= offset < queue.next_offset:
            return False
        units = queue.units(max(offset, queue.first_offset), 1)
        if offset < queue.first_offset or not len(units) or units[0]["size"] == PRE_BLANK_SIZE:
            return True
        leads_here = bool(units[0]["physical_offset"] == view.physical_offset)
        return leads_here or not leads_to_own(queue, offset, self._reader)

    def _body_holds(self, view: DispatchView) -> bool:
        """Return True if the body of a record matches its CRC, and the record its property CRC if it has one."""
        return check_record(self._reader.log_bytes(view.physical_offset, view.physical_offset + view.size)).ok

    def _bytes_of(self, view: DispatchView) -> bytes:
        return bytes(self._reader.log_bytes(view.physical_offset, view.physical_offset + view.size))

    def _record_at(self, physical_offset: int, end: int) -> DispatchView | None:
        """Return the record at `physical_offset`. Return None if the record was deleted from the log, does not contain
        this offset, or has inconsistent fields (see `_held_record`)."""
        try:
            return self._held_record(physical_offset, end)
        except DataLossError:
            return None

    def _held_record(self, physical_offset: int, end: int) -> DispatchView | None:
        """Return the record at `physical_offset`. Return None if the record does not contain this offset, or if its
        fields are not consistent.

        Does not check the record's CRC. Raises DataLossError if the record was deleted.
        """
        data = self._log_from(physical_offset, end)
        size, good = check_record(data, check_crc=False)
        if not good or size <= 0:
            return None
        try:
            view = dispatch_view(data)
        except RecordError:
            return None
        return view if view.physical_offset == physical_offset else None

    def _record_behind(self, physical_offset: int, end: int) -> DispatchView | None:
        """Return the next record after damaged bytes at `physical_offset`, in the same log file; None if no record
        follows."""
        file_start = physical_offset - physical_offset % self._log.file_size
        try:
            data = self._reader.log_bytes(file_start, min(file_start + self._log.file_size, end))
        except DataLossError:
            return None
        position = physical_offset - file_start
        if len(data) - position < MIN_RECORD_SIZE or is_blank(data, position):
            return None
        found = resume_behind(data, file_start, position)
        return None if found is None else self._record_at(file_start + found, end)

    def _is_damaged(self, physical_offset: int, end: int) -> bool:
        """True if a damaged record begins at `physical_offset`. This is so if the bytes there contain a record's magic
        and this offset. It is also so if their size field leads to the next record, to `end` or to the end of the file.

        False for an offset inside a record, in the blank end of a log file, or in the deleted part of the log.
        """
        try:
            data = self._log_from(physical_offset, end)
            header = read_header(data)
        except (DataLossError, RecordError):
            return False
        if header.magic == BLANK_MAGIC:
            return False
        if header.magic in (MAGIC_V1, MAGIC_V2) and header.physical_offset == physical_offset:
            return True
        following = physical_offset + header.total_size
        if not MIN_RECORD_SIZE <= header.total_size <= len(data):
            return False
        return following == end or header.total_size == len(data) or self._record_at(following, end) is not None

    def _log_from(self, physical_offset: int, end: int) -> memoryview:
        """Return the bytes of the log from `physical_offset` to the end of the log file, or to `end`. Raises
        DataLossError if this part of the log was deleted."""
        file_end = physical_offset - physical_offset % self._log.file_size + self._log.file_size
        return self._reader.log_bytes(physical_offset, min(file_end, end))

    def _stored_ms_from(self, queue: ConsumeQueue, start: int, end: int) -> float:
        """Return the store time of the first consistent record in the queue offsets from `start` to before `end`.

        Checks at most the first _DAMAGED_MAX records, and returns infinity if none of them is consistent. Raises
        DataLossError if a record was deleted.
        """
        for offset in range(start, min(end, start + _DAMAGED_MAX)):
            units = queue.next_unit(offset, end)
            if not len(units):
                break
            position = int(units[0]["physical_offset"])
            try:
                view = self._held_record(position, self._visible())
            except DataLossError:
                if 0 <= position < self._log.min_offset:
                    raise
                view = None  # The queue unit is damaged, and points to no record.
            if view is not None:
                return view.store_timestamp_ms
        return math.inf
