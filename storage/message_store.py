"""The message store: the parts of this package put together, and the one of them that others call.

What is on disk, and what of it survives a crash, is told in the package's docstring.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from raymq.config import FlushDiskType, StoreSettings
from raymq.errors import (
    InvalidArgumentError,
    ServiceNotAvailableError,
    StoreError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.log_reader import LogReader
from raymq.message import PullStatus, SendStatus
from raymq.record import EncodedBatch, dispatch_view, encode_host
from raymq.store_api import AppendResult, FetchRequest, FetchResult, QueueBounds, StoreStatus
from storage.append import Appender
from storage.checkpoint import read_checkpoint, write_checkpoint
from storage.commit_log import CommitLog
from storage.config_files import ConfigFiles
from storage.consume_queue import ConsumeQueue
from storage.dedup import DedupTable
from storage.flush import FlushService
from storage.lock import DirectoryLock
from storage.long_polls import LongPolls
from storage.mapped_file import flush_path, sync_directory
from storage.queue_flush import QueueFlushService
from storage.queue_table import QueueTable
from storage.recovery import Recovery
from storage.snapshot import QueueRow, read_snapshot, take_snapshot, write_snapshot
from storage.visibility import Visibility

_SNAPSHOT: Final = "dedup"
_SNAPSHOT_INTERVAL_BYTES: Final = 32 << 20
_SNAPSHOT_INTERVAL_S: Final = 10.0

logger = logging.getLogger(__name__)

_MEMORY_BYTES: Final = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def system_clock_ms() -> int:
    """The wall clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


class MessageStore:
    """One open store directory. Thread-safe. Make one with `open`, end it with `close`."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        broker_name: str,
        store_host: tuple[str, int],
        clock_ms: Callable[[], int],
        resources: ExitStack,
    ) -> None:
        """Not for callers: use `open`. `resources` gets what has to be released when opening fails, or at `close`."""
        root = settings.store_path_root_dir
        self._settings, self._root, self._broker_name = settings, root, broker_name
        self._sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._resources = resources
        self._append_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False
        self._failure = ""
        resources.callback(DirectoryLock(root).release)
        self._reader = LogReader(
            root,
            commit_log_file_size=settings.mapped_file_size_commit_log_bytes,
            consume_queue_file_size=settings.mapped_file_size_consume_queue_bytes,
            max_mapped_bytes=settings.max_mapped_bytes,
            max_mapped_files=settings.max_mapped_files,
        )
        resources.callback(self._reader.close)
        self._config = ConfigFiles(root)
        self._log = CommitLog(root, settings.mapped_file_size_commit_log_bytes)
        resources.callback(self._log.close)
        self._queues = QueueTable(root, settings, self._reader, self._config)
        resources.callback(self._queues.close)
        self._dedup = DedupTable(settings.dedup_producers_max)
        self._abort = root / "abort"
        self._checkpoint = read_checkpoint(root / "checkpoint")
        self._recovered = Recovery(
            self._log,
            self._queues,
            self._dedup,
            self._reader,
            self._checkpoint,
            read_snapshot(root / _SNAPSHOT),
            after_crash=self._abort.exists(),
            check_crc=settings.check_crc_on_recover,
        ).run()
        self._visibility = Visibility(self._log.end_offset)
        self._polls = LongPolls(settings.fetch_waiters_max)
        self._appender = Appender(
            self._log,
            self._queues,
            self._dedup,
            self._visibility,
            self._reader,
            max_message_size_bytes=settings.max_message_size_bytes,
            store_host=encode_host(*store_host),
            clock_ms=clock_ms,
            last_store_timestamp_ms=self._recovered.last_store_timestamp_ms,
            last_record_offset=self._recovered.last_record_offset,
        )
        self._snapshot_end, self._snapshot_s = -1, -_SNAPSHOT_INTERVAL_S
        self._abort.write_text(str(os.getpid()))
        sync_directory(root)
        self._flush = FlushService(self._log, settings, on_flushed=self._on_flushed, on_failed=self._fail)
        resources.callback(self._flush.close)
        self._queue_flush = QueueFlushService(
            settings.flush_interval_consume_queue_ms / 1000, flush=self._flush_queues, on_failed=self._fail
        )
        resources.callback(self._queue_flush.close)

    @classmethod
    def open(
        cls,
        settings: StoreSettings,
        *,
        broker_name: str,
        store_host: tuple[str, int] = ("127.0.0.1", 10911),
        clock_ms: Callable[[], int] = system_clock_ms,
    ) -> MessageStore:
        """Open the store directory of `settings`, making it if there is none, and recover it (spec/storage.md §5).

        StoreLockedError: another process, named by its pid, has it open. StoreCorruptError: the files do not form a
        store; nothing was changed. StoreError: the directory cannot be written.
        """
        root = settings.store_path_root_dir
        try:
            root.mkdir(parents=True, exist_ok=True)
            with ExitStack() as resources:
                store = cls(
                    settings, broker_name=broker_name, store_host=store_host, clock_ms=clock_ms, resources=resources
                )
                store._resources = resources.pop_all()
                return store
        except OSError as error:
            raise StoreError(
                f"cannot open the store directory {root}: {error}; check that it is on a disk with room and that user "
                f"{os.getuid()} may write there, or set store_path_root_dir"
            ) from error

    def append(self, batches: Sequence[EncodedBatch], *, timeout_s: float | None = None) -> list[AppendResult]:
        """Store batches of any queues, in order; one result each. A batch sent before is recognised, not stored again.

        With SYNC_FLUSH returns once all are on disk; after `timeout_s` (default: sync_flush_timeout_ms) the status is
        FLUSH_DISK_TIMEOUT: stored, not known to be on disk. With ASYNC_FLUSH returns at once: what is stored survives
        this process, not a power cut.

        Raised before anything is written: MessageIllegalError, ClientStateError (a fenced producer), SystemBusyError
        (other appends took longer than `timeout_s`), ServiceNotAvailableError (closed), StoreNotWritableError (disk
        full, or an earlier failure). StoreNotWritableError is raised too when the disk fails now: then it is unknown
        what is stored, and the store takes no more appends.
        """
        timeout_s = self._settings.sync_flush_timeout_ms / 1000 if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        records = [self._appender.check(batch) for batch in batches]
        if not self._append_lock.acquire(timeout=max(timeout_s, 0)):
            raise SystemBusyError(f"the store did not get to this append within {timeout_s:g} s; nothing was stored")
        try:
            self._require_writable()
            try:
                results = self._appender.append(batches, records)
            except OSError as error:
                self._fail(error)
                raise self._outcome_unknown() from error
            end_offset = self._log.end_offset
            if not self._sync:
                self._show(end_offset)
        finally:
            self._append_lock.release()
        if self._sync and not self._flush.wait_for(end_offset, deadline_s - time.monotonic()):
            if self._failure:
                raise self._outcome_unknown()
            results = [replace(result, status=SendStatus.FLUSH_DISK_TIMEOUT) for result in results]
        return results

    def fetch(self, requests: Sequence[FetchRequest], *, max_bytes: int, wait_s: float) -> list[FetchResult]:
        """Read from several queues; one result per request, in order.

        Returns as soon as one request has a message, or an illegal offset, and after `wait_s` at the latest. About
        `max_bytes` of records in all, shared among the queues that have some; if there is a message, at least one is
        returned. With `max_bytes` 0 only offsets are returned (see `LogReader.fetch`). SystemBusyError when too many
        fetches wait already, ServiceNotAvailableError once the store closes, DataLossError when a file was deleted
        under it.
        """
        if max_bytes < 0 or any(request.max_messages <= 0 for request in requests):
            raise InvalidArgumentError("max_bytes must not be negative, and max_messages must be positive")
        results = self._fetch_now(requests, max_bytes)
        if wait_s <= 0 or _has_news(results):
            return results
        deadline_s = time.monotonic() + wait_s
        with self._polls.waiting((request.topic, request.queue_id) for request in requests) as event:
            while True:
                # What the tags excluded is not looked at again.
                following = [
                    replace(request, queue_offset=result.next_offset)
                    for request, result in zip(requests, results, strict=True)
                ]
                results = self._fetch_now(following, max_bytes)
                if _has_news(results) or not event.wait(max(deadline_s - time.monotonic(), 0)):
                    break
                event.clear()
        return [
            replace(result, status=PullStatus.NO_MATCHED_MESSAGE)
            if result.status is PullStatus.NO_NEW_MESSAGE and result.next_offset > request.queue_offset
            else result
            for request, result in zip(requests, results, strict=True)
        ]

    def queue_bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """What consumers may read of a queue; zeros for a queue that does not exist."""
        self._require_open()
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return QueueBounds(0, 0, 0)
        in_memory = _MEMORY_BYTES * self._settings.access_message_in_memory_max_ratio // 100
        min_offset, max_offset = queue.min_offset, queue.visible_offset
        first_in_memory = queue.first_at_or_after(max(self._log.end_offset - in_memory, 0))
        return QueueBounds(min_offset, max_offset, min(max(first_in_memory, min_offset), max_offset))

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The first queue offset stored at or after `timestamp_ms`; the end of the queue if there is none (spec §2)."""
        self._require_open()
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return 0
        low, high = queue.min_offset, queue.visible_offset
        while low < high:
            middle = (low + high) // 2
            if self._store_timestamp_ms(queue, middle) < timestamp_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def topics(self) -> dict[str, list[int]]:
        """The ids of the queues that exist, by topic."""
        self._require_open()
        return self._queues.topics()

    def delete_topic(self, topic: str) -> None:
        """Delete the queues of `topic`, if it has any; on return that is on disk. A topic made anew starts at offset 0.

        The messages leave the disk with the log files they are in.
        """
        with self._append_lock:
            self._require_writable()
            queues = self._queues.delete_topic(topic, end_offset=self._log.end_offset, min_offset=self._log.min_offset)
            self._dedup.forget_topic(topic)
        for queue in queues:
            self._polls.wake((topic, queue.queue_id))

    def read_config(self, name: str) -> str | None:
        """The text of config file `name`, None if there is none (ConfigFiles.read)."""
        self._require_open()
        return self._config.read(name)

    def write_config(self, name: str, text: str) -> None:
        """Replace the text of config file `name`; on return it is on disk (ConfigFiles.write)."""
        self._require_open()
        self._config.write(name, text)

    def status(self) -> StoreStatus:
        """A snapshot of counts, offsets and health; of a closed store too."""
        reason = "the store is closed" if self._closed else self._failure
        return StoreStatus(
            pid=os.getpid(),
            root=str(self._root),
            broker_name=self._broker_name,
            topics=len(self._queues.topics()),
            queues=len(self._queues),
            min_physical_offset=self._log.min_offset,
            max_physical_offset=self._log.end_offset,
            flushed_physical_offset=self._log.flushed_offset,
            visible_physical_offset=self._visibility.visible_offset,
            messages_appended=self._appender.messages_appended,
            duplicates_dropped=self._appender.duplicates_dropped,
            waiting_fetches=len(self._polls),
            known_producers=len(self._dedup),
            recovered=self._recovered.text,
            cut_bytes=self._recovered.cut_bytes,
            writable=not reason,
            not_writable_reason=reason,
        )

    def close(self) -> None:
        """Stop cleanly: flush, write the checkpoint, remove `abort`, release the lock. Idempotent.

        Appends under way end first; waiting fetches get ServiceNotAvailableError. After a failure of the disk nothing
        is flushed and `abort` stays, so that the next open recovers as after a crash.
        """
        with self._close_lock:
            if self._closed:
                return
            with self._append_lock:
                self._closed = True
            self._polls.wake_all()
            with self._resources:
                self._queue_flush.close()
                self._flush.close()
                if not self._failure:
                    try:
                        self._flush_queues()
                        self._abort.unlink(missing_ok=True)
                        sync_directory(self._root)
                    except OSError as error:
                        self._fail(error)

    def _require_open(self) -> None:
        if self._closed:
            raise ServiceNotAvailableError(f"the store {self._root} is closed")

    def _require_writable(self) -> None:
        self._require_open()
        if self._failure:
            raise StoreNotWritableError(f"{self._failure}; the store takes no more appends until it is opened again")

    def _outcome_unknown(self) -> StoreNotWritableError:
        return StoreNotWritableError(f"{self._failure}; it is unknown whether this append is stored")

    def _fail(self, error: OSError) -> None:
        """The disk failed: what is on it is not known any more, so nothing may be acknowledged from here on."""
        if not self._failure:
            self._failure = f"the disk of {self._root} failed: {error}"
            logger.error("%s; no more appends are taken", self._failure)

    def _on_flushed(self, end_offset: int) -> None:
        if self._sync:
            self._show(end_offset)

    def _show(self, end_offset: int) -> None:
        for queue in self._visibility.advance(end_offset):
            self._polls.wake((queue.topic, queue.queue_id))

    def _fetch_now(self, requests: Sequence[FetchRequest], max_bytes: int) -> list[FetchResult]:
        self._require_open()
        bounds = [self._readable(request) for request in requests]
        ready = sum(end > request.queue_offset for request, (_, end) in zip(requests, bounds, strict=True))
        results, room = [], max_bytes
        for request, (min_offset, max_offset) in zip(requests, bounds, strict=True):
            if max_offset > request.queue_offset >= min_offset and max_bytes and room <= 0:
                nothing = FetchResult(PullStatus.NO_NEW_MESSAGE, request.queue_offset, min_offset, max_offset, b"", 0)
                results.append(nothing)
                continue
            share = max(room // max(ready, 1), 1) if max_bytes else 0
            result = self._reader.fetch(request, min_offset, max_offset, share)
            ready -= max_offset > request.queue_offset
            room -= len(result.records)
            results.append(result)
        return results

    def _readable(self, request: FetchRequest) -> tuple[int, int]:
        queue = self._queues.get(request.topic, request.queue_id)
        return (0, 0) if queue is None else (queue.min_offset, queue.visible_offset)

    def _store_timestamp_ms(self, queue: ConsumeQueue, queue_offset: int) -> int:
        [record] = self._reader.views(queue.units(queue_offset, 1))
        return dispatch_view(record).store_timestamp_ms

    def _flush_queues(self) -> None:
        """Flush the queues' files and write down how far log and queues are on disk; now and then take a snapshot."""
        with self._append_lock:
            dirty: set[Path] = set().union(*(queue.take_dirty() for queue in self._queues))
            dispatched_ms = self._appender.last_store_timestamp_ms
            end, last = self._log.end_offset, self._appender.last_record_offset
            producers = self._dedup.rows() if last >= 0 and self._snapshot_is_due(end) else None
            queues = [
                QueueRow(queue.topic, queue.queue_id, queue.next_offset) for queue in self._queues if queue.exists
            ]
        for path in dirty:
            flush_path(path)
        # Before the checkpoint: where that lets recovery start later, the snapshot knows who sent what before.
        if producers is not None and self._flush.wait_for(end, self._settings.sync_flush_timeout_ms / 1000):
            snapshot = take_snapshot(self._reader, end=end, last=last, queues=queues, producers=producers)
            write_snapshot(self._root / _SNAPSHOT, snapshot)
            self._snapshot_end, self._snapshot_s = end, time.monotonic()
        checkpoint = replace(
            self._checkpoint,
            physic_msg_timestamp=self._log.flushed_store_timestamp_ms or self._checkpoint.physic_msg_timestamp,
            logics_msg_timestamp=dispatched_ms or self._checkpoint.logics_msg_timestamp,
        )
        if checkpoint != self._checkpoint:
            write_checkpoint(self._root / "checkpoint", checkpoint)
            self._checkpoint = checkpoint

    def _snapshot_is_due(self, end_offset: int) -> bool:
        behind = end_offset - self._snapshot_end
        late = time.monotonic() - self._snapshot_s >= _SNAPSHOT_INTERVAL_S
        return behind >= _SNAPSHOT_INTERVAL_BYTES or (behind > 0 and (late or self._closed))


def _has_news(results: Sequence[FetchResult]) -> bool:
    return any(result.status in (PullStatus.FOUND, PullStatus.OFFSET_ILLEGAL) for result in results)
