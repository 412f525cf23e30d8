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
from functools import partial
from typing import Final

from raymq.config.store import StoreSettings
from raymq.errors import (
    RaymqError,
    ServiceNotAvailableError,
    StoreError,
    StoreNotWritableError,
)
from raymq.message import SendStatus
from raymq.protocol.store import (
    AppendResult,
    Boundary,
    DeletedRange,
    FetchRequest,
    FetchResult,
    QueryResult,
    QueueBounds,
    StoreStatistics,
    StoreStatus,
)
from raymq.record.encode import EncodedBatch
from raymq.record.layout import IPV6_HOST_BYTES, encode_host
from storage.append.appender import Appender
from storage.append.durability import degraded, must_wait
from storage.append.fit_batch import fit_batch, name_places
from storage.append.write_gate import WriteGate
from storage.checkpoint_service import CheckpointService
from storage.dispatch.delivery_progress import Delivery, Source
from storage.files import disk
from storage.files.disk_usage import disk_usage
from storage.files.lock import DirectoryLock
from storage.index.index_file import IndexShape
from storage.index.index_service import IndexService
from storage.parts import StoreParts
from storage.queue_flush import QueueFlushService
from storage.read.fetch_service import FetchService
from storage.read.long_polls import LongPolls
from storage.read.queries import StoreQueries
from storage.recovery.checkpoint import read_checkpoint
from storage.recovery.recovery import Recovery
from storage.recovery.snapshot import SNAPSHOT_FILE, read_snapshot
from storage.replication.chunk_appender import RawAppender
from storage.replication.log_chunks import read_chunk
from storage.retention.cleaner import Cleaner
from storage.retention.rules import RetentionRules
from storage.running_flags import AGAINST_REPLICATION, RunningFlag, RunningFlags
from storage.schedule.delay_queue_reader import DelayQueueReader
from storage.schedule.schedule_service import ScheduleService
from storage.schedule.scheduler import Scheduler
from storage.stats import StoreStats

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
        on_stored: Callable[[int], None] | None,
        resources: ExitStack,
    ) -> None:
        """Not for callers: use `open`. `resources` gets what has to be released when opening fails, or at `close`."""
        root = settings.store_path_root_dir
        host = encode_host(*store_host)
        with_crc, with_ipv6 = settings.enabled_append_prop_crc, len(host) == IPV6_HOST_BYTES
        fits = partial(fit_batch, property_crc=with_crc, ipv6_store_host=with_ipv6)
        self._fit = fits if with_crc or with_ipv6 else None
        self._settings, self._root, self._broker_name = settings, root, broker_name
        self._resources = resources
        self._close_lock = threading.Lock()
        self._flags = RunningFlags()
        self._stats = StoreStats()
        self._schedule: ScheduleService | None = None
        resources.callback(DirectoryLock(root, settings.log_directories_elsewhere).release)
        self._make_private()
        self._abort = root / "abort"
        parts = StoreParts.open(settings, resources, after_crash=self._abort.exists())
        self._parts, self._config = parts, parts.config
        self._log, self._queues, self._reader = parts.log, parts.queues, parts.reader
        checkpoint = read_checkpoint(root / "checkpoint")
        self._recovered = Recovery(parts, checkpoint, read_snapshot(root / SNAPSHOT_FILE)).run()
        parts.deliveries.fit(parts.queues.plain)
        parts.visibility.advance(parts.log.end_offset)
        disk.write_file(self._abort, str(os.getpid()).encode())
        disk.sync_directory(root)
        self._polls = LongPolls(settings.fetch_waiters_max)
        self._fetcher = FetchService(parts.queues, parts.reader, self._polls, self._stats, self._require_readable)
        self._appender = Appender(parts, self._recovered, store_host=host, clock_ms=clock_ms)
        self._raw_appender = RawAppender(parts, self._appender)
        self._gate = WriteGate(parts, self._flags, self._polls, on_stored)
        self._append_lock = self._gate.lock
        resources.callback(self._gate.close)
        self._index = self._open_index(checkpoint.index_msg_timestamp) if settings.message_index_enable else None
        self._bookkeeper = CheckpointService(parts, self._gate, self._appender, self._index, checkpoint)
        self._start_services()

    def _start_services(self) -> None:
        """What works in the background, and what needs the index."""
        settings, parts = self._settings, self._parts
        self._queries = StoreQueries(
            parts.log,
            parts.reader,
            self._index,
            visible=self._visible_offset,
            max_num=settings.max_msgs_num_batch,
            wait_s=settings.query_wait_index_ms / 1000,
        )
        self._queue_flush = QueueFlushService(
            settings.flush_interval_consume_queue_ms / 1000,
            flush=partial(self._flush_queues, thorough=False),
            on_failed=self._fail,
        )
        self._resources.callback(self._queue_flush.close)
        self._cleaner = Cleaner(
            parts.log,
            parts.queues,
            self._index,
            parts.reader,
            parts.config,
            self._flags,
            RetentionRules.from_settings(settings),
            append_lock=self._append_lock,
            pinned=self.pinned_physical_offset,
            flush_queues=self._flush_queues,
            on_failed=self._fail,
            interval_s=settings.clean_resource_interval_ms / 1000,
        )
        self._resources.callback(self._cleaner.close)

    def _open_index(self, checkpoint_ms: int) -> IndexService:
        index = IndexService(
            self._root,
            IndexShape(self._settings.max_hash_slot_num, self._settings.max_index_num),
            self._log,
            self._reader,
            visible=self._visible_offset,
            after_crash=self._parts.after_crash,
            checkpoint_ms=checkpoint_ms,
            on_writable=self._mark_index,
        )
        self._resources.callback(index.close)
        return index

    def _make_private(self) -> None:
        """Let nobody else read the files, though an older version left them readable."""
        for directory in (self._root, *self._settings.log_directories_elsewhere):
            try:
                disk.make_private(directory)
            except PermissionError as error:
                logger.warning("other users of this machine may be able to read the messages: %s", error)

    def _mark_index(self, error: OSError | None) -> None:
        if error is None:
            self.clear_flag(RunningFlag.INDEX_ERROR)
        else:
            self.set_flag(RunningFlag.INDEX_ERROR, f"the index cannot be written: {error}")

    def _visible_offset(self) -> int:
        return self._parts.visibility.visible_offset

    @classmethod
    def open(
        cls,
        settings: StoreSettings,
        *,
        broker_name: str,
        store_host: tuple[str, int] = ("127.0.0.1", 10911),
        clock_ms: Callable[[], int] = system_clock_ms,
        on_stored: Callable[[int], None] | None = None,
    ) -> MessageStore:
        """Open the store directory of `settings`, making it if there is none, and recover it (spec/storage.md §5).

        With `on_stored` the store is one of several replicas: what is stored from now on is told there, with its end,
        and consumers see it when `show` says so. The call must not wait for anything.
        StoreLockedError: another process, named by its pid, has it open. StoreCorruptError: the files do not form a
        store; nothing was changed. StoreError: the directory cannot be written.
        """
        root = settings.store_path_root_dir
        try:
            disk.make_directory(root)
            with ExitStack() as resources:
                store = cls(
                    settings,
                    broker_name=broker_name,
                    store_host=store_host,
                    clock_ms=clock_ms,
                    on_stored=on_stored,
                    resources=resources,
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

        With SYNC_FLUSH returns once all are on disk, unless none of them waits (wait_store_msg_ok); after `timeout_s`
        (default: sync_flush_timeout_ms) the status is FLUSH_DISK_TIMEOUT: stored, not known to be on disk. With
        ASYNC_FLUSH returns at once: what is stored survives this process, not a power cut.

        Raised before anything is written: MessageIllegalError, ClientStateError (a fenced producer), SystemBusyError
        (other appends took longer than `timeout_s`), ServiceNotAvailableError (closed), StoreNotWritableError (disk
        full, or an earlier failure). StoreFailedError when the disk fails now: then it is unknown what is stored, and
        the store takes no more appends.
        """
        return self.append_with_end(batches, timeout_s=timeout_s)[0]

    def append_with_end(
        self, batches: Sequence[EncodedBatch], *, timeout_s: float | None = None
    ) -> tuple[list[AppendResult], int]:
        """`append`, and a physical offset before which all of it is."""
        start_s = time.monotonic()
        try:
            sent = batches
            if self._fit is not None:
                batches = [self._fit(batch) for batch in sent]
            checked = self._appender.check(batches)
            results, end_offset, on_disk = self._gate.write(
                partial(self._appender.append, checked), timeout_s, wait=must_wait(batches)
            )
            if self._fit is not None:
                results = [name_places(*row) for row in zip(results, sent, batches, strict=True)]
        except RaymqError:
            self._stats.put_failed()
            raise
        took_s = time.monotonic() - start_s
        self._stats.put([(batch.topic, len(batch), len(batch.records)) for batch in batches], took_s)
        if not on_disk:
            results = degraded(results, batches, SendStatus.FLUSH_DISK_TIMEOUT)
        return results, end_offset

    def _deliver(self, source: Source, deliveries: Sequence[Delivery]) -> None:
        """Store what waited in `source`. Raises as `append` does."""
        start_s = time.monotonic()
        self._gate.write(partial(self._appender.deliver, source, deliveries))
        took_s = time.monotonic() - start_s
        self._stats.put([(item.topic, 1, len(item.record)) for item in deliveries], took_s)

    def fetch(
        self, requests: Sequence[FetchRequest], *, max_bytes: int, wait_s: float, patient: bool = False
    ) -> list[FetchResult]:
        """Read from several queues; one result per request, in order.

        Returns as soon as one request has a message, or an illegal offset, and after `wait_s` at the latest. About
        `max_bytes` of records in all, 128 MiB at most, shared among the queues that have some; if there is a message,
        at least one is returned. A fetch that asks for tags also returns when it has looked through
        `max_filter_message_size_bytes` of a queue: with no message, and where to go on. With `max_bytes` 0 only offsets
        are returned (see `LogReader.fetch`). `patient`: an offset that the queue does not hold is waited for, as if it
        were the next to come.

        SystemBusyError when too many fetches wait already, ServiceNotAvailableError once the store closes,
        DataLossError when a file was deleted under it.
        """
        return self._fetcher.fetch(requests, max_bytes=max_bytes, wait_s=wait_s, patient=patient)

    def queue_bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """What consumers may read of a queue; zeros for a queue that does not exist."""
        self._require_readable()
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return QueueBounds(0, 0, 0)
        min_offset, max_offset = queue.min_offset, queue.visible_offset
        first_in_memory = queue.first_at_or_after(max(self._first_in_memory, 0))
        return QueueBounds(min_offset, max_offset, min(max(first_in_memory, min_offset), max_offset))

    @property
    def _first_in_memory(self) -> int:
        """Where what is likely still in memory begins in the log."""
        return self._log.end_offset - _MEMORY_BYTES * self._settings.access_message_in_memory_max_ratio // 100

    def in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Whether a queue's messages from an offset on are likely in memory (access_message_in_memory_max_ratio)."""
        if self._first_in_memory <= self._log.min_offset:
            return True
        queue = self._queues.get(topic, queue_id)
        return queue is None or queue_offset >= min(
            queue.first_at_or_after(self._first_in_memory), queue.visible_offset
        )

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> int:
        """The queue offset that a time stands for, always within the queue's bounds (StoreQueries.offset_by_time)."""
        self._require_readable()
        queue = self._queues.get(topic, queue_id)
        return 0 if queue is None else self._queries.offset_by_time(queue, timestamp_ms, boundary)

    def query_by_key(
        self, topic: str, key: str, max_num: int = 32, begin_ms: int = 0, end_ms: int = 2**63 - 1
    ) -> QueryResult:
        """The newest messages of `topic` that have `key` (StoreQueries.by_key)."""
        self._require_readable()
        return self._queries.by_key(topic, key, max_num, begin_ms, end_ms)

    def query_by_unique_id(self, topic: str, message_id: str) -> QueryResult:
        """The messages of `topic` with a unique id (StoreQueries.by_unique_id)."""
        self._require_readable()
        return self._queries.by_unique_id(topic, message_id)

    def record_at(self, physical_offset: int) -> bytes:
        """The record that starts at a physical offset, as an offset message id names it
        (StoreQueries.by_physical_offset)."""
        self._require_readable()
        return self._queries.by_physical_offset(physical_offset)

    def earliest_store_time_ms(self) -> int:
        """When the oldest record that is still there was stored, whatever its queue; -1 for an empty log."""
        self._require_readable()
        return self._queries.earliest_store_time_ms()

    def topics(self) -> dict[str, list[int]]:
        """The ids of the queues that exist, by topic."""
        self._require_open()
        return self._queues.topics()

    def delete_topic(self, topic: str) -> None:
        """Delete the queues of `topic`, if it has any; on return that is on disk. A topic made anew starts at offset 0.

        The messages leave the disk with the log files they are in. StoreNotWritableError when the disk fails: it is
        unknown then whether the topic is deleted, and the store takes no more appends.
        """
        with self._append_lock:
            self._gate.require_writable()
            end_offset, min_offset = self._log.end_offset, self._cleaner.log_start_on_disk
            try:
                queues = self._queues.delete_topic(topic, end_offset=end_offset, min_offset=min_offset)
            except OSError as error:
                self._fail(error)
                raise StoreNotWritableError(
                    f"{self._gate.failure}; it is unknown whether topic {topic!r} is deleted"
                ) from error
            self._parts.dedup.forget_topic(topic)
        for queue in queues:
            self._polls.wake((topic, queue.queue_id))

    def start_delivery(self) -> None:
        """Deliver delayed messages from here on, until the store is closed. Only a master may. Idempotent."""
        with self._close_lock:
            self._require_open()
            if self._schedule is None:
                self._schedule = ScheduleService(self._make_scheduler())

    def _make_scheduler(self) -> Scheduler:
        levels_ms, deliveries = self._settings.delay_levels_ms, self._parts.deliveries
        waiting = DelayQueueReader(self._append_lock, self._appender, self._queues, deliveries, self._reader, levels_ms)
        return Scheduler(waiting, self._deliver, levels_ms)

    def pinned_physical_offset(self) -> int:
        """Where the first delayed message starts that still waits, which retention must keep; the log's end if none."""
        with self._append_lock:
            first = self._parts.deliveries.pinned_physical_offset(self._queues.plain)
            return self._log.end_offset if first is None else first

    def read_config(self, name: str) -> str | None:
        """The text of config file `name`, None if there is none (ConfigFiles.read)."""
        self._require_open()
        return self._config.read(name)

    def write_config(self, name: str, text: str) -> None:
        """Replace the text of config file `name`; on return it is on disk (ConfigFiles.write).

        StoreNotWritableError when the disk fails: the file then holds the text before, or the new one.
        """
        self._require_open()
        try:
            self._config.write(name, text)
        except OSError as error:
            raise StoreNotWritableError(
                f"cannot write {self._root}/config/{name}: {error}; it is unknown which text the file holds"
            ) from error

    def stop_delivery(self) -> None:
        """Deliver no more delayed messages: this store is no master any more. Idempotent."""
        with self._close_lock:
            schedule, self._schedule = self._schedule, None
        if schedule is not None:
            schedule.close()

    @property
    def min_offset(self) -> int:
        """Where the log begins."""
        return self._log.min_offset

    @property
    def end_offset(self) -> int:
        """The end of what is written."""
        return self._log.end_offset

    @property
    def stored_offset(self) -> int:
        """The end of what is as durable as the settings promise."""
        return self._gate.stored_offset

    @property
    def visible_offset(self) -> int:
        """The end of what consumers see."""
        return self._visible_offset()

    def show(self, physical_offset: int) -> None:
        """Let consumers see what is stored before an offset; for a store that was opened with `on_stored`."""
        self._gate.show(physical_offset)

    def flush_all(self) -> int:
        """Have all that is written now on disk; returns its end. ServiceNotAvailableError if the disk is too slow."""
        end_offset = self._log.end_offset
        if not self._gate.wait_flushed(end_offset):
            raise ServiceNotAvailableError(f"the disk of {self._root} is too slow, or has failed: nothing was changed")
        return end_offset

    def begin_at(self, physical_offset: int) -> None:
        """Let an empty log begin at an offset, where a file of another replica's begins. InvalidArgumentError."""
        with self._append_lock:
            self._log.begin_at(physical_offset)

    def read_log(self, physical_offset: int, max_bytes: int, limit: int | None = None) -> bytes:
        """Raw bytes of the log from a record's start on: whole records of one file, about `max_bytes`, and empty at
        `limit` (raw_log.read_chunk), which is by default the end of what consumers see."""
        self._require_readable()
        limit = self._visible_offset() if limit is None else limit
        return read_chunk(self._reader, self._log.min_offset, physical_offset, limit, max_bytes)

    def append_log(self, physical_offset: int, data: bytes, *, wait: bool = True) -> bool:
        """Append what `read_log` of another replica gave, at the log's end (RawAppender.append); then as `append`.

        True if it is as durable as the settings promise, False if the disk was too slow for that or, without `wait`,
        was only asked for it. A fenced store takes it too.
        """
        write = partial(self._raw_appender.append, physical_offset, data)
        puts, _, on_disk = self._gate.write(write, against=AGAINST_REPLICATION, wait=wait)
        self._stats.put(puts, None)
        return on_disk

    def set_flag(self, flag: RunningFlag, reason: str) -> None:
        """Forbid reading or writing, for a reason that callers are told, until `clear_flag` (spec §9)."""
        if self._flags.set(flag, reason):
            logger.warning("%s: %s", self._root, reason)

    def fence(self, reason: str) -> None:
        """Take nothing but what a master sends, until FENCED is cleared; appends under way are written on return."""
        self.set_flag(RunningFlag.FENCED, reason)
        with self._append_lock:
            pass

    def clear_flag(self, flag: RunningFlag) -> None:
        """Take a reason of `set_flag` away."""
        self._flags.clear(flag)

    def clean(self) -> None:
        """Delete expired log files now, whatever the hour, and what only leads to them (Cleaner.request)."""
        self._require_open()
        self._cleaner.request()

    def deleted_young(self) -> list[DeletedRange] | None:
        """Per queue the messages that a full disk took before their time (Cleaner.deleted_young)."""
        return self._cleaner.deleted_young()

    def statistics(self) -> StoreStatistics:
        """A snapshot of what the store counts: RocketMQ's runtime keys, puts by topic, latencies."""
        retention = self._cleaner.status()
        runtime = self._stats.runtime(time.monotonic(), system_clock_ms())
        runtime |= {
            "dispatchMaxBuffer": str(self._index_behind()),
            "commitLogDiskRatio": f"{retention.disk_ratio:.2f}",
            "consumeQueueDiskRatio": f"{disk_usage(self._queues.directory):.2f}",
            "commitLogYoungFilesDeleted": str(retention.young_files_deleted),
            "commitLogMinOffset": str(self._log.min_offset),
            "commitLogMaxOffset": str(self._log.end_offset),
        }
        return StoreStatistics(runtime, self._stats.topics(), self._stats.latency_buckets())

    def _index_behind(self) -> int:
        return 0 if self._index is None else max(self._parts.visibility.visible_offset - self._index.position, 0)

    def status(self) -> StoreStatus:
        """A snapshot of counts, offsets and health; of a closed store too."""
        reason = "the store is closed" if self._gate.closed else self._gate.failure or self._flags.not_writable_reason
        return StoreStatus(
            pid=os.getpid(),
            root=str(self._root),
            broker_name=self._broker_name,
            topics=len(self._queues.topics()),
            queues=len(self._queues),
            min_physical_offset=self._log.min_offset,
            max_physical_offset=self._log.end_offset,
            flushed_physical_offset=self._log.flushed_offset,
            visible_physical_offset=self._parts.visibility.visible_offset,
            messages_appended=self._appender.messages_appended,
            duplicates_dropped=self._appender.duplicates_dropped,
            waiting_fetches=len(self._polls),
            known_producers=len(self._parts.dedup),
            recovered=self._recovered.text,
            cut_bytes=self._recovered.cut_bytes,
            writable=not reason,
            not_writable_reason=reason,
            schedule=self._schedule.status() if self._schedule is not None else None,
            running_flags=self._flags.bits | (RunningFlag.NOT_WRITABLE if self._gate.failure else 0),
            index_files=0 if self._index is None else len(self._index),
            index_behind_bytes=self._index_behind(),
            retention=self._cleaner.status(),
        )

    def close(self) -> None:
        """Stop cleanly: flush, write the checkpoint, remove `abort`, release the lock. Idempotent.

        Appends under way end first; waiting fetches get ServiceNotAvailableError. After a failure of the disk nothing
        is flushed and `abort` stays, so that the next open recovers as after a crash.
        """
        with self._close_lock:
            if self._gate.closed:
                return
            if self._schedule is not None:
                self._schedule.close()
            with self._append_lock:
                self._gate.closed = True
            self._polls.wake_all()
            with self._resources:
                self._cleaner.close()
                self._queue_flush.close()
                self._gate.close()
                if not self._gate.failure:
                    try:
                        indexed = self._index is None or self._index.close()
                        self._flush_queues()
                        if not indexed:
                            logger.warning("%s: the index has not caught up; recovery will see to it", self._root)
                            return
                        disk.unlink(self._abort)
                        disk.sync_directory(self._root)
                    except OSError as error:
                        self._fail(error)

    def _require_open(self) -> None:
        if self._gate.closed:
            raise ServiceNotAvailableError(f"the store {self._root} is closed")

    def _require_readable(self) -> None:
        self._require_open()
        if not self._flags.readable:
            raise ServiceNotAvailableError(f"the store {self._root} must not be read now")

    def _fail(self, error: OSError) -> None:
        self._gate.fail(error)

    def _flush_queues(self, *, thorough: bool = True) -> None:
        """What is done each second, and then not always `thorough` (Bookkeeper.run)."""
        self._stats.sample(time.monotonic())
        self._bookkeeper.run(thorough=thorough)
