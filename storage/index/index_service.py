"""The index of a store: files that map keys to records, and the thread that builds these files from the log.

On disk
    index/20261120180926228        files in the order they were made (index_file.py); the last one takes entries

The index follows the log: the index thread adds the keys of the records that consumers may see, thousands at a time,
outside the append lock. Appends pass the ids of their batches to the index (appended_batches.py). The index reads all
other keys from the log, and also the batches' ids if it has fallen far behind. In memory it keeps only these batches
and its position in the log. So even an index that is far behind takes little memory, and no append waits for it. A
query that needs the newest messages waits for the index.

The disk may damage a file. A file that does not match its checksum (index_sums.py) is rebuilt, with all later files.

After a crash, files whose end_timestamp is not in the checkpoint are deleted (spec/storage.md §3, Load). After any
stop, files with records that the log no longer has are deleted. Indexing continues at the end of the last remaining
file, so deleted last files are rebuilt. To find a gap between two files, the index searches the log for the first
record with a key after the earlier file. The files after the gap are then rebuilt too.

If the disk is full, or the process has no free file descriptor, the thread retries until it succeeds, and then catches
up.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np

from raymq.common.errors import DataLossError
from raymq.records.format.check import check_record
from raymq.records.format.hashing import index_key_hash
from raymq.records.format.layout import RecordError
from raymq.records.logfiles.log_reader import LogReader
from storage.files import disk
from storage.files.damage import DamageNotes
from storage.index.appended_batches import AppendedBatches, index_entries_of
from storage.index.index_file import (
    FoundEntry,
    IndexEntries,
    IndexFile,
    IndexHeader,
    IndexShape,
    find_entries,
    join_entries,
    read_header,
)
from storage.index.index_keys import index_entries
from storage.index.index_sums import VERIFY_MAX_BYTES, IndexSums
from storage.index.mended_keys import MendedKey, MendedKeys
from storage.log.commit_log import CommitLog
from storage.log.log_walk import WalkedRecords, walk_log

logger = logging.getLogger(__name__)

INDEX_DIR: Final = "index"
INDEX_CHUNK_BYTES: Final = 2 << 20
INDEX_ENTRIES_AT_A_TIME: Final = 1 << 14
INDEX_INTERVAL_S: Final = 0.1
INDEX_TRIES: Final = 3
INDEX_RETRY_S: Final = 1.0
DRAIN_S: Final = 5.0
INDEX_STOP_TIMEOUT_S: Final = 60.0
_NAME_DIGITS: Final = 17
_PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})
"""Error numbers for resources that may become free again, so that the index retries. Any other error means that the
disk is broken."""


class IndexService:
    """The index of one store. Thread-safe.

    The index thread adds files; retention deletes the oldest files, but never the last. So the list of files changes
    only under the lock, and its last file changes only in the index thread.

    `on_writable(error)` is called with an error if the index cannot be written, and with None once it can be written
    again. After the disk has failed, the index cannot be written again.
    """

    def __init__(
        self,
        root: Path,
        shape: IndexShape,
        commit_log: CommitLog,
        reader: LogReader,
        appended: AppendedBatches,
        *,
        damage: DamageNotes,
        visible: Callable[[], int],
        after_crash: bool,
        checkpoint_ms: int,
        on_writable: Callable[[OSError | None], None],
    ) -> None:
        self.directory = root / INDEX_DIR
        self._scratch = root / "index.new"
        self._shape, self._log, self._reader = shape, commit_log, reader
        self._appended, self._visible, self._on_writable = appended, visible, on_writable
        disk.make_directory(self.directory)
        disk.unlink(self._scratch)
        self._sums, self._damage = IndexSums(root, shape, damage), damage
        self._mended = MendedKeys(root, commit_log.min_offset, commit_log.end_offset, damage)
        self._files = self._load(after_crash=after_crash, checkpoint_ms=checkpoint_ms)
        """The index files, oldest first. The list is replaced by a new list, never changed in place."""
        self._after_crash = after_crash
        self._current: IndexFile | None = None
        """The last index file, if entries are still added to it; otherwise None."""
        self._rebuilt_from: Path | None = None
        """The first index file that must be rebuilt; None if none must be."""
        self.position = commit_log.min_offset
        """Physical offset up to which all records are indexed."""
        self.flushed_timestamp_ms = 0
        """The end time in ms of the newest index file that is certainly on disk. The checkpoint contains this time. 0
        if no file was flushed since the store was opened."""
        self.entries_put = 0
        """Number of index entries added since the store was opened."""
        self._changed = threading.Condition()
        """Condition that is notified when `position`, `_wanted`, `_stuck`, `_rebuilt_from`, or one of the flags
        `_stopping`, `_ended` and `_failed` changes."""
        self._wanted = 0
        """The highest physical offset that any call of `wait_for` was given. Such a call waits until the index contains
        every record before its offset."""
        self._stopping = self._ended = self._failed = False
        self._stuck: OSError | DataLossError | None = None
        """The error after which the index thread waits and retries; None while the thread works normally."""
        self._thread = threading.Thread(target=self._run, name="raymq-index", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._files)

    def wait_for(self, physical_offset: int, timeout_s: float) -> bool:
        """Wait until every record before `physical_offset` is indexed.

        Returns False after `timeout_s`, after a failure of the index, or while the index waits to retry after an error.
        """
        with self._changed:
            self._wanted = max(self._wanted, physical_offset)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._stuck or self.position >= physical_offset, timeout_s)
            return self.position >= physical_offset

    def find(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Yield physical offsets of records that may have `key` and were stored in [`begin_ms`, `end_ms`]. Newest index
        files come first.

        The caller must check each record: hashes collide, and times are rounded down to a second. An offset may occur
        twice.
        """
        key_hash = index_key_hash(topic, key)
        mended = self._mended.find(key_hash, begin_ms, end_ms)
        if not mended:
            yield from self._find_in_files(key_hash, begin_ms, end_ms)
            return
        for physical_offset in self._find_in_files(key_hash, begin_ms, end_ms):
            while mended and mended[0] > physical_offset:
                yield mended.pop(0)
            yield physical_offset
        yield from mended

    def put_mended(self, data: bytes, starts: Sequence[int], physical_offset: int) -> None:
        """Index repaired records, which were damaged when the index thread first read them. The new entries are on disk
        on return.

        The records are at `starts` of `data`, whose first byte is at `physical_offset` in the log. Only one thread at a
        time may call this method. Raises OSError if the disk fails.
        """
        entries = index_entries(np.frombuffer(data, np.uint8), np.array(starts, np.int64), physical_offset)
        columns = entries.key_hashes, entries.physical_offsets, entries.store_timestamps
        keys = [MendedKey(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        if keys:
            self._mended.add(keys)

    def _find_in_files(self, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        for path in reversed(self._files.copy()):
            try:
                data = self._reader.maps.get(str(path), at_random=True).data
            except FileNotFoundError:
                continue  # Skip the index file: retention has deleted it.
            header = read_header(data)
            if begin_ms <= header.end_timestamp and end_ms >= header.begin_timestamp:
                yield from _offsets(find_entries(data, self._shape, key_hash, begin_ms, end_ms))
            if header.begin_timestamp < begin_ms:
                return

    def sealed(self) -> list[tuple[Path, int, int]]:
        """Return the index files that take no more entries and have a checksum: the file, the number of bytes that the
        checksum covers, and the checksum."""
        current, found = self._current, []
        for path in self._files:
            stored = self._sums.of_file(path)
            if stored is not None and (current is None or current.path != path):
                entries, crc = stored
                found.append((path, self._shape.entry_at(min(max(entries, 0), self._shape.entries)), crc))
        return found

    def rebuild_from(self, path: Path) -> None:
        """Let the index thread drop the damaged index file `path` and all later files, and build them again from the
        log. Until then, queries miss the records of these files, and wait for them as for new records."""
        self._damage.note(
            f"index file {path} does not match its checksum: this file and the later index files are rebuilt from "
            "the log"
        )
        with self._changed:
            self._rebuilt_from = path if self._rebuilt_from is None else min(self._rebuilt_from, path)
            self._changed.notify_all()

    def delete_before(self, physical_offset: int) -> int:
        """Delete the index files that contain only records before `physical_offset`, but never the last file. Returns
        the number of deleted files."""
        with self._changed:
            files = self._files
            doomed = [path for path in files[:-1] if self._header(path).end_physical_offset < physical_offset]
            self._files = [path for path in files if path not in doomed]
        for path in doomed:
            disk.unlink(path)
            self._reader.maps.drop_map(str(path))
        return len(doomed)

    def close(self) -> bool:
        """Index the remaining records, for at most DRAIN_S seconds, flush the index and stop its thread. Idempotent.

        Returns True if all records are indexed and the index is on disk; `flushed_timestamp_ms` then covers the last
        file. If it returns False, the next open must treat the store as crashed.
        """
        # `_ended` is True if the index is closed already or has failed.
        caught_up = self._ended or self.wait_for(self._visible(), DRAIN_S)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(INDEX_STOP_TIMEOUT_S)
        return caught_up and self._ended and not self._failed

    def _load(self, *, after_crash: bool, checkpoint_ms: int) -> list[Path]:
        """Find the index files of the store. Return the files to keep, and delete the files that cannot be
        trusted."""
        files: list[Path] = []
        for path in sorted(self.directory.iterdir()):
            if not path.name.isdecimal():
                logger.warning("file %s is not an index file and is ignored", path)
                continue
            reason = self._reason_to_drop(path, checkpoint_ms if after_crash else None)
            if reason:
                if after_crash:
                    logger.info("index file %s %s; the file is rebuilt", path, reason)
                else:
                    self._damage.note(f"index file {path} {reason}; the file is rebuilt from the log")
                disk.unlink(path)
            else:
                files.append(path)
        return files

    def _reason_to_drop(self, path: Path, checkpoint_ms: int | None) -> str:
        size = path.stat().st_size
        if size != self._shape.file_size:
            return f"has {size} bytes, but index files of this store have {self._shape.file_size}"
        header = self._header(path)
        if checkpoint_ms is not None and header.end_timestamp > checkpoint_ms:
            return "may not have been on disk at the crash"
        if header.end_physical_offset >= self._log.end_offset:
            return "contains records after the log's end"
        if not (1 < header.next_entry <= self._shape.entries and 0 <= header.slots_used <= self._shape.slots):
            return "has no entries, or an impossible header"
        return ""

    def _header(self, path: Path) -> IndexHeader:
        return read_header(self._reader.maps.get(str(path), at_random=True).data)

    def _run(self) -> None:
        try:
            self._retry_until_closed(self._prepare)
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._stopping or self._rebuilt_from or self._wanted > self.position, INDEX_INTERVAL_S
                    )
                    if self._stopping:
                        break
                self._drop_rebuilt()
                self._retry_until_closed(self._catch_up)
            self._finish_current()
        except OSError as error:
            logger.error("the index in %s failed: %s", self.directory, error)
            self._failed = True
            self._on_writable(error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _retry_until_closed(self, work: Callable[[], None]) -> None:
        """Run `work`, a step of the index thread, until it succeeds or the index is closed. It is repeated while the
        disk is full or a log file is damaged."""
        while not self._stopping:
            try:
                work()
            except (OSError, DataLossError) as error:
                if isinstance(error, OSError) and error.errno not in _PASSING:
                    raise
                self._report_stuck(error)
            else:
                self._report_unstuck()
                return
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, INDEX_RETRY_S)

    def _report_stuck(self, error: OSError | DataLossError) -> None:
        """Record the error after which the index waits and retries (is stuck), and log it once."""
        if self._stuck is None:
            logger.error(
                "the index in %s cannot continue at physical offset %d, retrying: %s",
                self.directory,
                self.position,
                error,
            )
        if isinstance(error, OSError):
            self._on_writable(error)
        with self._changed:
            self._stuck = error
            self._changed.notify_all()

    def _report_unstuck(self) -> None:
        """Log once that the index continues after it was stuck."""
        if self._stuck is not None:
            logger.warning("the index in %s continues", self.directory)
            self._stuck = None
            self._on_writable(None)

    def _prepare(self) -> None:
        """Find the log position at which indexing continues. If a record with a key is in no index file, drop all index
        files after this record."""
        position = self._log.min_offset
        self._drop_damaged()
        for path in self._files:
            try:
                header = self._header(path)
            except FileNotFoundError:
                continue  # Skip the index file: retention has deleted it.
            first = self._first_with_key(position, header.begin_physical_offset)
            if first is not None:
                logger.warning(
                    "index file %s is rebuilt, because the record with a key at physical offset %d is not in "
                    "any index file",
                    path,
                    first,
                )
                for doomed in self._remove_from(path):
                    disk.unlink(doomed)
                break
            position = max(position, header.end_physical_offset)
            if header.next_entry < self._shape.entries and not self._after_crash:
                # An index file that still has space contains all keys of its last record. If the file is full, the last
                # record may have further keys, which belong into the next file.
                position = max(position, self._end_of_record(header.end_physical_offset))
        if self._files and self._header(self._files[-1]).next_entry < self._shape.entries:
            self._current = IndexFile(self._files[-1], self._shape)
        self._advance(position)

    def _drop_damaged(self) -> None:
        """Drop the first index file that the disk has damaged, and all later files, so that they are rebuilt from the
        log.

        Checks only the newest files, at most VERIFY_MAX_BYTES in total.
        """
        damaged, left_bytes = None, VERIFY_MAX_BYTES
        for path in reversed(self._files):
            try:
                header, data = self._header(path), self._reader.maps.get(str(path), at_random=True).data
            except FileNotFoundError:
                continue  # Skip the index file: retention has deleted it.
            left_bytes -= self._sums.used_bytes(header)
            if left_bytes < 0 or self._stopping:
                break
            may_have_grown = self._after_crash and path == self._files[-1]
            if self._sums.is_damaged(path, header, data, may_have_grown=may_have_grown):
                damaged = path
        if damaged is not None:
            for doomed in self._remove_from(damaged):
                self._reader.maps.drop_map(str(doomed))
                disk.unlink(doomed)

    def _drop_rebuilt(self) -> None:
        """Drop the index files that must be rebuilt, and continue at the end of the last remaining file."""
        with self._changed:
            path, self._rebuilt_from = self._rebuilt_from, None
        if path is None or path not in self._files:
            return
        if self._current is not None:
            self._current.close()
            self._current = None
        for doomed in self._remove_from(path):
            self._reader.maps.drop_map(str(doomed))
            disk.unlink(doomed)
        # The last remaining file is full. Its last record may have further keys, which belong into the next file.
        position = self._header(self._files[-1]).end_physical_offset if self._files else 0
        self._advance(max(position, self._log.min_offset))

    def _remove_from(self, path: Path) -> list[Path]:
        """Remove the index files from `path` on from the list of files, and return the removed files."""
        with self._changed:
            forgotten = [file for file in self._files if file >= path]
            self._files = [file for file in self._files if file < path]
        return forgotten

    def _advance(self, position: int) -> None:
        with self._changed:
            self.position = position
            self._changed.notify_all()

    def _end_of_record(self, physical_offset: int) -> int:
        """Return the physical offset at which the record at `physical_offset` ends. Return `physical_offset` itself if
        the log no longer has the record."""
        try:
            return physical_offset + int.from_bytes(self._reader.log_bytes(physical_offset, physical_offset + 4))
        except DataLossError:
            if physical_offset >= self._log.min_offset:
                raise
            return physical_offset

    def _first_with_key(self, position: int, limit: int) -> int | None:
        """Return the physical offset of the first record in (`position`, `limit`) that has a key, and so belongs in the
        index."""
        position = max(position, self._log.min_offset)
        behind = position if position == self._log.min_offset else position + 1
        while position < limit and not self._stopping:
            chunk = self._walk(position, limit)
            if chunk is None:
                position = self._log.min_offset
                continue
            offsets = _entries(chunk).physical_offsets
            offsets = offsets[(offsets >= behind) & (offsets < limit)]
            if len(offsets):
                return int(offsets[0])
            position = chunk.end_offset
        return None

    def _catch_up(self) -> None:
        limit = self._visible()
        while self.position < limit and not self._stopping:
            if self._put_appended(limit):
                continue
            # Scan the log from the index's position up to the next batch whose message ids are already known. The
            # append passed these ids to the index.
            until = self._appended.next_start()
            chunk = self._walk(self.position, limit if until is None else min(until, limit))
            if chunk is None:
                self._advance(self._log.min_offset)
            else:
                self._put_entries(_entries(chunk), chunk.end_offset)

    def _put_appended(self, limit: int) -> bool:
        """Index the appended batches from `position` to at most `limit`, if the log confirms their keys.

        Returns False if the index must read these records from the log instead.
        """
        columns: list[IndexEntries] = []
        entries, end = 0, self.position
        while entries < INDEX_ENTRIES_AT_A_TIME and (run := self._appended.take_run(end, limit)):
            found = index_entries_of(run, self._reader)
            if found is None:
                break
            columns.append(found)
            entries, end = entries + len(found), run[-1].end_offset
        if columns:
            self._put_entries(join_entries(columns), end)
        return bool(columns)

    def _walk(self, position: int, limit: int) -> WalkedRecords | None:
        """Scan the log from `position` on, and return the records found. Return None if retention has deleted this part
        of the log."""
        try:
            return walk_log(self._reader, position, limit, INDEX_CHUNK_BYTES)
        except DataLossError:
            if position >= self._log.min_offset:
                raise
            return None

    def _put_entries(self, entries: IndexEntries, end_offset: int) -> None:
        """Add the index entries of the log records from `position` to `end_offset`."""
        if self._files and len(entries):
            # Leave out the entries of all records before the last record in the last index file (spec §3), because the
            # file already has them. The last record's entries stay: if the file is full, it may lack some keys of this
            # record.
            end = self._header(self._files[-1]).end_physical_offset
            entries = entries.from_entry(int(np.searchsorted(entries.physical_offsets, end)))
        while len(entries):
            file = self._current or self._next_file()
            put = file.put_entries(entries)
            self.entries_put += put
            entries = entries.from_entry(put)
            if file.is_full:
                self._finish_current()
        self._advance(end_offset)

    def _next_file(self) -> IndexFile:
        """Create a new index file, named after the current time, or after a slightly later time because names must
        ascend. Raises OSError if several attempts fail."""
        previous = self._header(self._files[-1]) if self._files else None
        now = datetime.now()
        number = int(f"{now:%Y%m%d%H%M%S}{now.microsecond // 1000:03d}")
        if self._files:
            number = max(number, int(self._files[-1].name) + 1)
        path = self.directory / f"{number:0{_NAME_DIGITS}d}"
        for tries_left in reversed(range(INDEX_TRIES)):
            try:
                self._current = IndexFile.create(path, self._shape, previous, scratch=self._scratch)
                break
            except OSError as error:
                if not tries_left:
                    raise
                logger.warning("cannot create the index file %s, retrying: %s", path, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, INDEX_RETRY_S)
        assert self._current is not None
        with self._changed:
            self._files = [*self._files, path]
        return self._current

    def _finish_current(self) -> None:
        """Flush and close the last index file, because it is full or the store closes. The checkpoint relies on this
        flush."""
        if self._current is not None:
            try:
                self._current.flush()
            except OSError:
                self._discard_current()
                raise
            path, header = self._current.path, self._current.header
            try:
                data = self._reader.maps.get(str(path), at_random=True).data
            except FileNotFoundError:
                logger.warning(
                    "the index file %s was deleted while the store had the file open; the file is rebuilt", path
                )
            else:
                self._sums.write_down(path, header, data, self._files)
            self.flushed_timestamp_ms = header.end_timestamp
            self._current.close()
            self._current = None

    def _discard_current(self) -> None:
        """Delete the current index file, which could not be flushed, and index its records again. It is unknown which
        part of the file is on disk."""
        assert self._current is not None
        path, begin = self._current.path, self._current.header.begin_physical_offset
        self._current.close()
        self._current = None
        self._remove_from(path)
        self._reader.maps.drop_map(str(path))
        self._advance(max(begin, self._log.min_offset))
        disk.unlink(path)


def _offsets(entries: Iterator[FoundEntry]) -> Iterator[int]:
    for entry in entries:
        yield entry.physical_offset


def _entries(chunk: WalkedRecords) -> IndexEntries:
    """Return the index entries of the records of a log chunk. Records that were damaged after the scan checked them are
    left out."""
    try:
        return index_entries(chunk.data, chunk.starts, chunk.physical_offset)
    except RecordError:
        # The chunk's bytes are a memory map of the log, and a record in the map may change after its check. So copy the
        # bytes before checking the records and computing their index entries.
        data = chunk.data.copy()
        good = [start for start in chunk.starts.tolist() if check_record(data.data, start, check_crc=False).ok]
        logger.error(
            "%d damaged records after physical offset %d are not in the index",
            len(chunk.starts) - len(good),
            chunk.physical_offset,
        )
        return index_entries(data, np.array(good, np.int64), chunk.physical_offset)
