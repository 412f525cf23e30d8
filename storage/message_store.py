"""The message store: makes the parts of one store directory, opens and closes them in order, and gives access to them.

The work of each part belongs in the part's own module. The interface of an open store, and the order in which it opens
and closes, belong here. The package's docstring describes the files on disk, and which of them survive a crash.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np

from raymq.common.config.store import StoreSettings
from raymq.common.delay import is_waiting_topic
from raymq.common.errors import (
    RaymqError,
    ServiceNotAvailableError,
    StoreError,
    StoreNotWritableError,
)
from raymq.common.names import STATE_TOPIC, TRANSACTION_TOPICS, is_light_queue, is_system_topic
from raymq.common.protocol.attributes import TopicMessageType
from raymq.common.protocol.store import (
    AppendResult,
    Boundary,
    FetchRequest,
    FetchResult,
    Hole,
    LightQueue,
    QueueBounds,
    QueueEnds,
    QueuePosition,
    QueueSpan,
    ReadsInPlace,
    StoreStatistics,
    StoreStatus,
)
from raymq.common.protocol.transactions import EndTransactionRequest
from raymq.records.format.compression import admit_bodies_of
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.layout import IPV6_HOST_BYTES, encode_host
from raymq.records.logfiles.span_bytes import span_bytes
from storage.append.durability import (
    ReplicaAcks,
    SettledAppend,
    StartedAppend,
    WriteBatches,
    Written,
    waits_for,
)
from storage.append.fit_batch import FittedWrite
from storage.append.inner_batches import message_count
from storage.append.multi_dispatch_appender import open_appender
from storage.append.write_gate import WriteGate
from storage.checkpoint_service import CheckpointService
from storage.compaction.compaction_service import CompactionService
from storage.files import disk
from storage.files.disk_usage import NoRoomError, disk_free_bytes, disk_usage
from storage.files.lock import DirectoryLock
from storage.hooks.store_hooks import CarryOutFetches, HookedFetches, HookedWrite, open_hooks
from storage.index.index_file import IndexShape
from storage.index.index_service import IndexService
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.topic_attributes import StoredAttributes
from storage.read.fetch_service import FetchService
from storage.read.long_polls import LongPolls
from storage.read.queries import StoreQueries
from storage.read.unit_repair import mend_units
from storage.recovery.checkpoint import Checkpoint, read_checkpoint
from storage.recovery.recovery import Recovery
from storage.recovery.snapshot import SNAPSHOT_FILE, read_snapshot
from storage.replication.log_chunks import LogChunks
from storage.replication.mend import mend_part
from storage.retention.cleaner import Cleaner
from storage.running_flags import AGAINST_APPENDS, AGAINST_STATE, RunningFlag, RunningFlags
from storage.schedule.schedule_service import ScheduleService
from storage.stats import DAY_TOTALS_FILE, DayTotalsFile, StoreStats
from storage.transactions.service import TransactionService

logger = logging.getLogger(__name__)

_MEMORY_BYTES: Final = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def system_clock_ms() -> int:
    """Return the wall clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


def _open_remedy(error: OSError) -> str:
    """Return advice about an error that keeps a store directory from being opened."""
    if error.errno in (errno.EIO, errno.EROFS):
        return "the disk fails: see the kernel's log (dmesg). The store opens by itself once the disk works"
    return (
        f"check that it is on a disk with free space and that user {os.getuid()} may write there, or set "
        "store_path_root_dir"
    )


class MessageStore:
    """One open store directory. Thread-safe. Make one with `open`, end it with `close`.

    The store itself appends, fetches and answers questions about its queues. Its parts do the rest: `queries` finds
    messages by key, id, physical offset and time, `schedule` delivers delayed messages, `transactions` ends
    transactions, `chunks` serves the log to other replicas, `cleaner` deletes old files, `compaction` keeps the newest
    message of each key, `flags` holds the reasons why the store must not be read or written, and `stats` holds the
    counters.
    """

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
        """Do not call this: use `open`. `resources` releases what was opened, if opening fails or at `close`."""
        root = settings.store_path_root_dir
        host = encode_host(*store_host)
        admit_bodies_of(settings.max_message_size_bytes)
        self._settings, self._root, self._broker_name = settings, root, broker_name
        self._clock_ms = clock_ms
        self._resources = resources
        self._close_lock = threading.Lock()
        self.flags = RunningFlags()
        resources.callback(DirectoryLock(root, settings.log_directories_elsewhere).release)
        self._make_private()
        self.stats = self._stats = StoreStats(file=DayTotalsFile(root / DAY_TOTALS_FILE))
        # This file exists while the store is open. If it exists now, the last process crashed.
        self._abort = root / "abort"
        parts = self._parts = StoreParts.open(settings, resources, after_crash=self._abort.exists())
        self._log, self._queues = parts.log, parts.queues
        self._attributes = StoredAttributes(parts.config)
        checkpoint = read_checkpoint(root / "checkpoint", parts.damage)
        self._recovered = Recovery(parts, checkpoint, read_snapshot(root / SNAPSHOT_FILE, parts.damage)).run()
        parts.deliveries.clamp_to_queues(parts.queues.plain)
        parts.visibility.advance(parts.log.end_offset)
        parts.space.write(lambda: disk.write_file(self._abort, str(os.getpid()).encode()))
        disk.sync_directory(root)
        self._polls = LongPolls(settings.fetch_waiters_max)
        self._fetcher = FetchService(
            parts.queues, parts.reader, self._polls, self._stats, self._require_readable, self._mend_units
        )
        self._appender = open_appender(parts, self._recovered, store_host=host, clock_ms=clock_ms)
        self._gate = WriteGate(parts, self.flags, self._polls, on_stored)
        resources.callback(self._gate.close)
        # A master that cannot read must not keep leading.
        parts.reader.maps.on_failure = self._gate.fail
        self._hooks = open_hooks(settings, resources)
        self._write = self._choose_write(host)
        self._fetch = self._choose_fetch()
        # None in a store without an index (message_index_enable).
        self._index = self._open_index(checkpoint.index_msg_timestamp) if settings.message_index_enable else None
        self._start_services(checkpoint, clock_ms, replicated=on_stored is not None)

    def _start_services(self, checkpoint: Checkpoint, clock_ms: Callable[[], int], *, replicated: bool) -> None:
        """Make the parts that depend on all others, and start their threads."""
        settings, parts, resources = self._settings, self._parts, self._resources
        self._queries = StoreQueries(
            parts.log,
            parts.reader,
            parts.queues,
            self._index,
            visible=self._visible_offset,
            max_num=settings.max_msgs_num_batch,
            wait_s=settings.query_wait_index_ms / 1000,
        )
        self.chunks = LogChunks(parts, self._gate, self._appender, self._stats, require_readable=self._require_readable)
        self.schedule = ScheduleService(parts, self._gate, self._appender, self._stats)
        resources.callback(self.schedule.close)
        self.transactions = TransactionService(parts, self._gate, self._appender, self._stats)
        self._checkpoints = CheckpointService(parts, self._gate, self._appender, self._index, self._stats, checkpoint)
        resources.callback(self._checkpoints.close)
        self.compaction = CompactionService(parts, clock_ms=clock_ms, replicated=replicated)
        resources.callback(self.compaction.close)
        self.cleaner = Cleaner(
            parts,
            self._index,
            self.flags,
            self.compaction,
            flush_queues=self._checkpoints.flush_queues,
            on_failed=self._gate.fail,
        )
        resources.callback(self.cleaner.close)

    def _open_index(self, checkpoint_ms: int) -> IndexService:
        index = IndexService(
            self._root,
            IndexShape(self._settings.max_hash_slot_num, self._settings.max_index_num),
            self._log,
            self._parts.reader,
            self._parts.appended,
            damage=self._parts.damage,
            visible=self._visible_offset,
            after_crash=self._parts.after_crash,
            checkpoint_ms=checkpoint_ms,
            on_writable=self._mark_index,
        )
        self._resources.callback(index.close)
        return index

    def _choose_write(self, host: bytes) -> WriteBatches:
        """Return the function that writes batches, as the settings and the store's own address require."""
        property_crc, ipv6_store_host = self._settings.enabled_append_prop_crc, len(host) == IPV6_HOST_BYTES
        write: WriteBatches = self._write_checked
        if property_crc or ipv6_store_host:
            write = FittedWrite(
                self._write_checked,
                property_crc=property_crc,
                ipv6_store_host=ipv6_store_host,
                on_refused=self._stats.count_failed_put,
            )
        if not self._hooks.put:
            return write
        return HookedWrite(
            write,
            self._hooks.put,
            self._broker_name,
            must_succeed=self._settings.put_hooks_must_succeed,
            on_refused=self._stats.count_failed_put,
        )

    def _choose_fetch(self) -> CarryOutFetches:
        """Return the function that fetches, as the settings require."""
        if not self._hooks.consume:
            return self._fetcher.fetch
        return HookedFetches(self._fetcher.fetch, self._hooks.consume, self._broker_name)

    def _make_private(self) -> None:
        """Remove other users' rights to read the files, which an older version granted."""
        for directory in (self._root, *self._settings.log_directories_elsewhere):
            try:
                disk.make_private(directory)
            except PermissionError as error:
                logger.warning("other users of this machine may be able to read the messages: %s", error)

    def _mark_index(self, error: OSError | None) -> None:
        """Set the flag that the index cannot be written, or with None clear it."""
        if error is None:
            self.flags.clear_flag(RunningFlag.INDEX_ERROR)
        else:
            self._set_flag(RunningFlag.INDEX_ERROR, f"the index cannot be written: {error}")

    def _set_flag(self, flag: RunningFlag, reason: str) -> None:
        if self.flags.set_flag(flag, reason):
            logger.warning("%s: %s", self._root, reason)

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
        """Open the store directory of `settings`, making it if it does not exist, and recover it (spec/storage.md §5).

        With `on_stored` the store is one of several replicas: `on_stored` is called with the end of all that is stored,
        and consumers see messages up to the end that `show` was called with. `on_stored` must not block.
        StoreLockedError: another process, named by its pid, has the store open. StoreCorruptError: the files do not
        form a store; nothing was changed. StoreError: the directory cannot be written.
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
            raise StoreError(f"cannot open the store directory {root}: {error}; {_open_remedy(error)}") from error

    def follow_settings(self) -> None:
        """Apply live settings (StoreSettings.change) to the parts that do not read them at each use."""
        self._polls.max_waiters = self._settings.fetch_waiters_max
        self._queries.limit(self._settings.max_msgs_num_batch, self._settings.query_wait_index_ms / 1000)

    def append(
        self, batches: Sequence[EncodedBatch], *, timeout_s: float | None = None, acks: ReplicaAcks | None = None
    ) -> list[AppendResult]:
        """Store batches of any queues, in order, and return one result for each. A batch sent before is not stored
        again.

        With SYNC_FLUSH returns once all are on disk, unless none of them waits (wait_store_msg_ok); after `timeout_s`
        (default: sync_flush_timeout_ms) the status is FLUSH_DISK_TIMEOUT: stored, not known to be on disk. With
        ASYNC_FLUSH returns at once: stored messages survive the end of this process, but not a power cut. `acks`: the
        copies on other replicas that the append then waits for (storage.append.durability).

        Raised before anything is written: MessageIllegalError, ClientStateError (a fenced producer), SystemBusyError
        (other appends took longer than `timeout_s`), ServiceNotAvailableError (closed), StoreNotWritableError (disk
        full, or an earlier failure), InSyncReplicasError (`acks`). StoreFailedError: the disk failed during the append;
        it is unknown which batches are stored, and the store takes no more appends.
        """
        started = self.start_append(batches, timeout_s=timeout_s, acks=acks)
        return self._gate.progress.wait_settled(started)

    def start_append(
        self, batches: Sequence[EncodedBatch], *, timeout_s: float | None = None, acks: ReplicaAcks | None = None
    ) -> StartedAppend:
        """Append as `append` does, but do not wait for the disk and the copies.

        On return the batches are written. `StartedAppend.settle` returns the results, or raises the errors of the wait.
        This call may wait for the append lock, for at most wait_time_in_send_queue_ms.
        """
        start_s, gate = time.monotonic(), self._gate
        if timeout_s is None:
            timeout_s = gate.timeout_s
        waits = (gate.is_sync or acks is not None) and waits_for(batches, acks)
        written = self._write(batches, timeout_s)
        # Collect these now: the next append of a lane overwrites the records.
        puts = [(batch.topic, message_count(batch), len(batch.records)) for batch in batches]
        for batch in batches:
            if is_waiting_topic(batch.topic):
                self._count_delays(batch)
        if waits and gate.is_sync:
            count = partial(self._count_puts, puts, start_s)
            return StartedAppend(written, batches, gate, acks, deadline_s=start_s + timeout_s, on_disk=count)
        now_s = time.monotonic()
        self._count_puts(puts, start_s, now_s)
        if waits and acks is not None:
            return StartedAppend(written, batches, None, acks, deadline_s=now_s + acks.timeout_s)
        return SettledAppend(written[0], now_s)

    def start_end(self, end: EndTransactionRequest, *, require_topic: Callable[[str], None]) -> StartedAppend:
        """End a transaction (TransactionService.start_end) without waiting for the disk, like `start_append`."""
        return self.transactions.start_end(end, require_topic=require_topic)

    def add_progress_listener(self, callback: Callable[[], None]) -> None:
        """Register `callback`, called each time that started appends may have become settled.

        Any thread may call it: after a flush that appends wait for, after a failure of the disk, and after
        `notify_progress`. It must not block.
        """
        self._gate.progress.add_listener(callback)

    def call_on_write(self, callback: Callable[[], None]) -> None:
        """Register `callback`, called by any thread after each write. It must not block.

        With a transient store pool the written bytes are in the files only once they are stored.
        """
        self._gate.on_written = callback

    def call_on_failure(self, callback: Callable[[], None]) -> None:
        """Register `callback`, called by any thread once `failure` is set; at once if it is set already. It must not
        block.
        """
        self._gate.on_failure = callback
        if self._gate.failure:
            callback()

    @property
    def failure(self) -> str:
        """The failure of the disk, after which nothing is appended until the store is reopened; empty without a
        failure.
        """
        return self._gate.failure

    def fail(self, error: OSError | StoreError) -> None:
        """Take no more appends, because a file beside the log could not be written (WriteGate.fail)."""
        self._gate.fail(error)

    def notify_progress(self) -> None:
        """Make appends that wait for copies (`acks`) check for the copies again."""
        self._gate.progress.notify()

    def _write_checked(self, batches: Sequence[EncodedBatch], timeout_s: float) -> Written:
        """Check batches and write them, or count the failure."""
        against = AGAINST_APPENDS
        if self.flags.any_set and all(batch.topic == STATE_TOPIC for batch in batches):
            against = AGAINST_STATE
        try:
            return self._gate.write(self._appender.prepare(batches), timeout_s, against)
        except RaymqError:
            self._stats.count_failed_put()
            raise

    def _count_delays(self, batch: EncodedBatch) -> None:
        """Count the delays of a batch of delayed messages. In a topic of delayed messages the tag codes are times."""
        self._stats.delays.add_many(np.maximum(batch.tag_codes - self._clock_ms(), 0) / 1000)

    def _count_puts(self, puts: Sequence[tuple[str, int, int]], start_s: float, end_s: float | None) -> None:
        """Count an append that began at `start_s` and ended at `end_s`, durable as promised or too late.

        The time counts up to the flush, not up to the replicas. `end_s` is None if the disk failed. `puts`: topic,
        messages and bytes of each batch.
        """
        if end_s is None:
            self._stats.count_failed_put()
            return
        took_s: float | None = end_s - start_s
        for topic, messages, size in puts:
            self._stats.count_put(topic, messages, size, took_s)
            took_s = None  # count each append once

    def fetch(
        self, requests: Sequence[FetchRequest], *, max_bytes: int, wait_s: float, patient: bool = False
    ) -> list[FetchResult]:
        """Read from several queues; one result per request, in order.

        Returns as soon as one request has a message, or an illegal offset, and after `wait_s` at the latest. About
        `max_bytes` of records in all, 128 MiB at most, shared among the queues that have some; if there is a message,
        at least one is returned. A fetch with a tag filter also returns after it has searched
        `max_filter_message_size_bytes` of a queue: without a message, but with the offset to continue at. With
        `max_bytes` 0 only offsets are returned (see `LogReader.fetch`). `patient`: wait for an offset that the queue
        does not hold, as if the next message had it.

        SystemBusyError: too many fetches wait already. ServiceNotAvailableError: the store closes. DataLossError: a
        file of the store was deleted.
        """
        return self._fetch(requests, max_bytes=max_bytes, wait_s=wait_s, patient=patient)

    def count_reads(self, reads: ReadsInPlace) -> None:
        """Add the reads of clients in the mapped files to the count of gets."""
        self._stats.count_reads(reads.found, reads.messages)

    def ends(self, positions: Sequence[QueuePosition], *, patient: bool = False) -> tuple[list[QueueEnds], bool]:
        """Return the first and the visible end offset of several queues, and whether one of them is ready.

        A queue is ready if it has something after the offset of its position, or does not hold that offset. `patient`:
        an offset that the queue does not hold does not make it ready.

        Does not block, and reads no messages. ServiceNotAvailableError: the store closes.
        """
        return self._fetcher.ends(positions, patient=patient)

    @property
    def polls(self) -> LongPolls:
        """The waiting fetches of this store, by queue."""
        return self._polls

    def queue_bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """Return the offsets of a queue that consumers may read; zeros for a queue that does not exist."""
        self._require_readable()
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return QueueBounds(0, 0, 0)
        min_offset, max_offset = queue.first_readable_offset, queue.visible_offset
        first_in_memory = queue.first_at_or_after(max(self._first_in_memory, 0))
        return QueueBounds(min_offset, max_offset, min(max(first_in_memory, min_offset), max_offset))

    def queue_bounds_many(self, topics: Sequence[tuple[str, int]]) -> list[list[tuple[int, int]]]:
        """Return the first and the next visible offset of the queues 0, 1 … of several topics.

        `topics` gives each topic with its number of queues. Zeros for a queue that does not exist. Cheap: reads no
        files.
        """
        self._require_readable()
        get, bounds = self._queues.get, []
        for topic, queues in topics:
            found = [get(topic, queue_id) for queue_id in range(queues)]
            bounds.append([(0, 0) if q is None else (q.first_readable_offset, q.visible_offset) for q in found])
        return bounds

    def stored_times(self, positions: Sequence[QueuePosition]) -> list[int]:
        """Return when the messages at positions of queues were stored, in ms since 1970.

        If retention has deleted a message, the first existing message of its queue counts. 0 if there is none.
        """
        queries, times = self.queries, []
        for topic, queue_id, offset in positions:
            queue = self._queues.get(topic, queue_id)
            times.append(0 if queue is None else queries.stored_ms(queue, offset))
        return times

    def next_sequences(self, producer_id: str, epoch: int, queues: Sequence[tuple[str, int]]) -> list[int]:
        """Return, for each queue (topic, queue id), the sequence after the last one that a producer has stored there.

        Counts only messages that consumers may read, because later ones could still be lost
        (`DedupTable.next_sequence`).

        ClientStateError: an instance with a newer epoch has written to one of the queues.
        """
        self._require_readable()
        found = []
        with self._parts.append_lock:
            for topic, queue_id in queues:
                queue = self._queues.get(topic, queue_id)
                visible = 0 if queue is None else queue.visible_offset
                found.append(self._parts.dedup.next_sequence(producer_id, epoch, topic, queue_id, visible))
        return found

    @property
    def _first_in_memory(self) -> int:
        """Return the physical offset from which the log is likely in memory."""
        return self._log.end_offset - _MEMORY_BYTES * self._settings.access_message_in_memory_max_ratio // 100

    def in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """True if a queue's messages from an offset on are likely in memory (access_message_in_memory_max_ratio)."""
        if self._first_in_memory <= self._log.min_offset:
            return True
        queue = self._queues.get(topic, queue_id)
        return queue is None or queue_offset >= min(
            queue.first_at_or_after(self._first_in_memory), queue.visible_offset
        )

    @property
    def queries(self) -> StoreQueries:
        """The queries by key, unique id, physical offset and time. ServiceNotAvailableError while the store must not be
        read.
        """
        self._require_readable()
        return self._queries

    def bytes_of_span(self, span: QueueSpan) -> list[int]:
        """The bytes of records in equal parts of a span of a queue (raymq.records.logfiles.own_records)."""
        self._require_readable()
        return span_bytes(self._parts.reader, *span)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> int:
        """Return the queue offset that belongs to a time, always within the queue's bounds
        (StoreQueries.offset_by_time).
        """
        queries, queue = self.queries, self._queues.get(topic, queue_id)
        if queue is None:
            return 0
        offset = queries.offset_by_time(queue, timestamp_ms, boundary)
        if isinstance(queue, ConsumeQueue) and queue.compacted is not None and offset == queue.min_offset:
            return min(offset, queue.compacted.offset_by_time(timestamp_ms, boundary))
        return offset

    def topics(self) -> dict[str, list[int]]:
        """Return the ids of the existing queues, by topic."""
        self._require_open()
        return self._queues.topics()

    def fifo_topics(self) -> frozenset[str]:
        """Return the topics whose type is FIFO, according to the broker's file config/topics.json.

        Only one thread at a time may call this.
        """
        self._require_open()
        return frozenset(
            topic for topic, one in self._attributes.read().items() if one.message_type is TopicMessageType.FIFO
        )

    def light_queues(self) -> list[LightQueue]:
        """Return the light queues that have messages, or had messages that were not swept yet, sorted by name."""
        self._require_open()
        light = [queue for queue in self._queues if is_light_queue(queue.topic) and queue.exists]
        return sorted(LightQueue(queue.topic, queue.min_offset, queue.visible_offset) for queue in light)

    def delete_topic(self, topic: str) -> None:
        """Delete the queues of `topic`, if it has any; on return the deletion is on disk. A topic created again starts
        at offset 0.

        The messages leave the disk with the log files they are in. StoreNotWritableError: the disk failed; it is
        unknown whether the topic is deleted, and the store takes no more appends.
        """
        with self._parts.append_lock:
            self._gate.require_writable(AGAINST_STATE)  # deleting frees room on a full disk
            self._delete_queues(topic, self._log.end_offset)

    def _delete_queues(self, topic: str, end_offset: int) -> None:
        """Delete the queues of a topic whose messages lie before `end_offset`. Called under the append lock."""
        try:
            queues = self._queues.delete_topic(topic, end_offset=end_offset, min_offset=self.cleaner.log_start_on_disk)
        except OSError as error:
            self._gate.fail(error)
            raise StoreNotWritableError(
                f"{self._gate.failure}; it is unknown whether topic {topic!r} is deleted"
            ) from error
        self._parts.dedup.forget_topic(topic)
        self._stats.forget_topic(topic)
        for queue in queues:
            self._polls.wake_queue((topic, queue.queue_id))

    def delete_topics_before(self, existing: Collection[str], position: int) -> list[str]:
        """Delete the queues of topics that a broker's state does not have, and return their names.

        For a replica that follows: its master deleted the topics, and the log does not record that.

        `existing`: the topics of the state before record `position` of STATE_TOPIC. Does nothing while this log lacks
        the record before `position`. A topic with a later message stays, because it may have been created again. Topics
        of the server and light queues stay. StoreNotWritableError as of `delete_topic`.
        """
        gone: list[str] = []
        states = self._queues.get_plain(STATE_TOPIC, 0)
        if states is None or not states.min_offset < position <= states.next_offset:
            return gone
        [last] = states.units(position - 1, 1)
        last_offset = int(last["physical_offset"])
        for topic in self._queues.topics():
            if topic in existing or is_system_topic(topic) or topic in TRANSACTION_TOPICS or is_light_queue(topic):
                continue
            with self._parts.append_lock:
                if all(one.max_physical_offset <= last_offset for one in self._queues if one.topic == topic):
                    # Use the log's end: a snapshot of this store that lists the queues may have been taken since.
                    self._delete_queues(topic, self._log.end_offset)
                    gone.append(topic)
        return gone

    def read_config(self, name: str) -> str | None:
        """Return the text of config file `name`; None if it does not exist (ConfigFiles.read)."""
        self._require_open()
        return self._parts.config.read(name)

    def write_config(self, name: str, text: str) -> None:
        """Replace the text of config file `name`; on return it is on disk (ConfigFiles.write).

        StoreNotWritableError: the disk failed; the file holds the previous text, or the new one.
        """
        self._require_open()
        try:
            self._parts.config.write(name, text)
        except OSError as error:
            raise StoreNotWritableError(
                f"cannot write {self._root}/config/{name}: {error}; it is unknown which text the file holds"
            ) from error

    @property
    def holes(self) -> tuple[Hole, ...]:
        """The damaged ranges of the log that recovery has found, ascending. Intact records follow each range."""
        return self._parts.holes.from_offset(self._log.min_offset)

    def mend(self, offset: int, data: bytes) -> None:
        """Replace the bytes of a hole, or a part of it from a physical offset on, by another replica's intact bytes.

        On return the bytes are on disk, the hole is smaller or gone, and the records can be found by their keys.

        InvalidArgumentError: `data` does not consist of whole, intact records for exactly this place; nothing has
        changed. StoreNotWritableError: the disk failed.
        """
        with self._parts.append_lock:
            self._require_open()
            try:
                mend_part(self._parts, offset, data, self._put_mended_keys)
            except OSError as error:
                self._gate.fail(error)
                raise StoreNotWritableError(f"{self._gate.failure}; the hole at {offset} was not mended") from error
        self._checkpoints.forget_snapshot()

    def _put_mended_keys(self, data: bytes, starts: Sequence[int], offset: int) -> None:
        if self._index is not None:
            self._index.put_mended(data, starts, offset)

    def _mend_units(self, queue: ConsumeQueue, from_offset: int, end_offset: int) -> int:
        """Rewrite the units between two offsets of a queue that do not lead to their records. Returns how many were
        wrong.
        """
        with self._parts.append_lock:
            try:
                return mend_units(self._parts, queue, from_offset, end_offset)
            except OSError as error:
                self._gate.fail(error)
                return 0

    @property
    def min_offset(self) -> int:
        """The physical offset at which the log begins."""
        return self._log.min_offset

    @property
    def end_offset(self) -> int:
        """The end of the written part of the log."""
        return self._log.end_offset

    @property
    def stored_offset(self) -> int:
        """The log offset up to which everything is as durable as the settings promise."""
        return self._gate.stored_offset

    @property
    def written_offset(self) -> int:
        """The end of the log that can be read from the files. With SYNC_FLUSH some of it may not be on disk."""
        return self._log.committed_offset

    @property
    def visible_offset(self) -> int:
        """The end of the log that consumers see."""
        return self._visible_offset()

    def show(self, physical_offset: int) -> None:
        """Let consumers see the stored messages before an offset; for a store that was opened with `on_stored`."""
        self._gate.show(physical_offset)
        self.compaction.note_shown(physical_offset)

    def flush_all(self) -> int:
        """Flush everything written so far, and return its end. ServiceNotAvailableError: the disk is too slow, or
        failed.
        """
        end_offset = self._log.end_offset
        if not self._gate.wait_flushed(end_offset):
            raise ServiceNotAvailableError(f"the disk of {self._root} is too slow, or has failed: nothing was changed")
        return end_offset

    def fence(self, reason: str) -> None:
        """Take only a master's chunks until the flag FENCED is cleared. On return the running appends are written."""
        self._set_flag(RunningFlag.FENCED, reason)
        with self._parts.append_lock:
            pass

    def statistics(self) -> StoreStatistics:
        """Return the store's current counters: RocketMQ's runtime keys, puts by topic, latencies."""
        retention = self.cleaner.status()
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
        """Return a snapshot of counts, offsets and health; also of a closed store."""
        reason = self._gate.failure or self.flags.not_writable_reason
        if not reason and disk_free_bytes(self._root) < self._log.file_size:
            reason = self._appender.no_space
        if self._gate.closed:
            reason = "the store is closed"
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
            schedule=self.schedule.status(),
            running_flags=int(self.flags.bits | (RunningFlag.NOT_WRITABLE if self._gate.failure else 0)),
            index_files=0 if self._index is None else len(self._index),
            index_behind_bytes=self._index_behind(),
            retention=self.cleaner.status(),
            hooks=self._hooks.figures(),
            disk_failure=self._gate.failure,
            holes=self.holes,
            mended_bytes=self._parts.holes.mended_bytes,
            mended_holes=self._parts.holes.mended_holes,
            damaged_files=self._parts.damage.texts,
        )

    def close(self) -> None:
        """Stop cleanly: flush, write the checkpoint, remove `abort`, release the lock. Idempotent.

        Running appends end first; waiting fetches raise ServiceNotAvailableError. After a failure of the disk nothing
        is flushed and `abort` stays, so that the next open recovers as after a crash.
        """
        with self._close_lock:
            if self._gate.closed:
                return
            self.schedule.close()
            with self._parts.append_lock:
                self._gate.closed = True
            self._polls.wake_all()
            with self._resources:
                self.cleaner.close()
                self.compaction.close()
                self._checkpoints.close()
                self._gate.close()
                if not self._gate.failure:
                    try:
                        indexed = self._index is None or self._index.close()
                        self._checkpoints.flush_queues()
                        self._stats.save_days(time.monotonic(), last=True)
                        if not indexed:
                            logger.warning("%s: the index has not caught up; the next open completes it", self._root)
                            return
                        disk.unlink(self._abort)
                        disk.sync_directory(self._root)
                    except NoRoomError as error:
                        logger.error("%s; the next open recovers the store as after a crash", error)
                    except OSError as error:
                        self._gate.fail(error)

    def _require_open(self) -> None:
        if self._gate.closed:
            raise ServiceNotAvailableError(f"the store {self._root} is closed")

    def _require_readable(self) -> None:
        self._require_open()
        if not self.flags.readable:
            raise ServiceNotAvailableError(f"the store {self._root} must not be read now")
