"""The message store: creates the components of one store directory, and opens and closes them in order.

The code of each component belongs in the component's own module. The order in which components open and close belongs
in this module. The docstring of the package describes the files on disk, and which of them survive a crash.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from raymq.common.config.store import StoreSettings
from raymq.common.errors import StoreError, StoreNotWritableError
from raymq.records.format.compression import admit_bodies_of
from raymq.records.format.layout import encode_host
from storage.append.append_service import AppendService
from storage.append.multi_dispatch_appender import open_appender
from storage.append.write_gate import WriteGate
from storage.checkpoint_service import CheckpointService
from storage.compaction.compaction_service import CompactionService
from storage.files import disk
from storage.files.age_marks import AgeMarks, Elapsed, machine_elapsed
from storage.files.config_files import ConfigFiles
from storage.files.disk_usage import NoRoomError
from storage.files.lock import DirectoryLock
from storage.hooks.store_hooks import CarryOutFetches, HookedFetches, HookedWrite, StoreHooks, open_hooks
from storage.index.index_file import IndexShape
from storage.index.index_service import IndexService
from storage.parts import StoreParts
from storage.read.fetch_service import FetchService
from storage.read.long_polls import LongPolls
from storage.read.queries import StoreQueries
from storage.read.queue_queries import QueueQueries
from storage.read.unit_repair import UnitRepair
from storage.recovery.checkpoint import Checkpoint, read_checkpoint
from storage.recovery.delivery_rewind import take_back_lost_deliveries
from storage.recovery.recovery import Recovery
from storage.recovery.snapshot import SNAPSHOT_FILE, finish_write, read_snapshot
from storage.replication.log_chunks import LogChunks
from storage.replication.mend import HoleMender
from storage.reports import StoreReports
from storage.retention.cleaner import Cleaner
from storage.retention.store_topics import StoreTopics
from storage.running_flags import RunningFlag, RunningFlags
from storage.schedule.schedule_service import ScheduleService
from storage.scrub.file_sections import CompactedSection, IndexSection, RecoveryFilesSection
from storage.scrub.inspector import LogInspector
from storage.scrub.log_section import LogSection, Section
from storage.scrub.queue_section import QueueSection
from storage.scrub.reported_damage import ReportedDamage
from storage.scrub.scrubber import Scrubber
from storage.stats import DAY_TOTALS_FILE, DayTotalsFile, StoreStats
from storage.transactions.service import TransactionService

logger = logging.getLogger(__name__)


def system_clock_ms() -> int:
    """Return the wall-clock time, in ms since 1970."""
    return time.time_ns() // 1_000_000


def _open_remedy(error: OSError) -> str:
    """Return advice for an error that prevents opening a store directory."""
    if error.errno in (errno.EIO, errno.EROFS):
        return "the disk has failed: see the kernel's log (dmesg). The store opens by itself once the disk works"
    return (
        f"check that the disk has free space and that user {os.getuid()} may write to the directory, or choose another "
        "data directory (raymq up --data-dir, or data_dir in raymq.yaml)"
    )


class MessageStore:
    """One open store directory. Thread-safe. Create a store with `open`, close it with `close`.

    The attributes are the store's components. Each component's docstring says which lock its methods take:

    - `append`, `start_append`: store batches (AppendService).
    - `gate`: admits writers, and reports how much is durable and whether the disk has failed. `flags`: further reasons
      why the store must not be read or written.
    - `fetch`, `fetches`, `polls`: read messages from queues, the ends of queues, waiting fetches.
    - `queries`: finds messages by key, id, physical offset and time. `queues`: bounds, times and sizes of queues.
      `topics`: names and deletion of topics.
    - `log`: the ends of the log, for reading only. `chunks`: the log as bytes, for other replicas. `mender`: damaged
      ranges of the log and their repair. `inspector`: checks ranges of the log for new damage. `scrubber`: verifies all
      files once in a period, or by command. `reported`: checks the records that readers or replicas report as damaged.
    - `schedule`: delivers delayed messages. `transactions`: ends transactions. `cleaner`: deletes old files.
      `compaction`: keeps the newest message of each key. `ages`: how old the bytes of the log are at least.
    - `status`, `statistics`: reports (StoreReports). `stats`: the counters.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        broker_name: str,
        store_host: tuple[str, int],
        clock_ms: Callable[[], int],
        read_elapsed: Callable[[], Elapsed] | None,
        on_stored: Callable[[int], None] | None,
        resources: ExitStack,
    ) -> None:
        """Use the method `open` to create a store, not this constructor. The exit stack `resources` releases everything
        that was opened, when the store is closed or if opening fails."""
        root = settings.store_path_root_dir
        host = encode_host(*store_host)
        admit_bodies_of(settings.max_message_size_bytes)
        self._settings, self._root = settings, root
        self._resources = resources
        self._close_lock = threading.Lock()
        self.flags = RunningFlags()
        resources.callback(DirectoryLock(root, settings.log_directories_elsewhere).release)
        self._make_private()
        self.stats = StoreStats(file=DayTotalsFile(root / DAY_TOTALS_FILE))
        # The abort file exists while the store is open. If it exists now, the last process crashed.
        self._abort = root / "abort"
        parts = self._parts = StoreParts.open(settings, resources, after_crash=self._abort.exists())
        self.log = parts.log
        checkpoint = read_checkpoint(root / "checkpoint", parts.damage)
        finish_write(root / SNAPSHOT_FILE)
        self._recovered = Recovery(parts, checkpoint, read_snapshot(root / SNAPSHOT_FILE, parts.damage)).run()
        take_back_lost_deliveries(parts)
        parts.deliveries.clamp_to_queues(parts.queues.plain)
        parts.visibility.advance(parts.log.end_offset)
        parts.space.write(lambda: disk.write_file(self._abort, str(os.getpid()).encode()))
        disk.sync_directory(root)
        self.polls = LongPolls(settings.fetch_waiters_max)
        self._appender = open_appender(parts, self._recovered, store_host=host, clock_ms=clock_ms)
        gate = self.gate = WriteGate(parts, self.flags, self.polls, on_stored)
        resources.callback(gate.close)
        # If a master cannot read its log, close its write gate, so that it does not remain master.
        parts.reader.maps.on_failure = gate.fail
        hooks = self._open_paths(broker_name, host, clock_ms)
        # The key index; None in a store without an index (message_index_enable is off).
        self._index = self._open_index(checkpoint.index_msg_timestamp) if settings.message_index_enable else None
        self._start_services(checkpoint, clock_ms, read_elapsed, replicated=on_stored is not None)
        reports = StoreReports(
            parts,
            gate,
            self._appender,
            broker_name=broker_name,
            recovered=self._recovered,
            flags=self.flags,
            stats=self.stats,
            polls=self.polls,
            index=self._index,
            schedule=self.schedule,
            cleaner=self.cleaner,
            hooks=hooks,
            scrubber=self.scrubber,
            reported=self.reported,
        )
        self.status, self.statistics = reports.status, reports.statistics
        self.scrubber.start()

    def _open_paths(self, broker_name: str, host: bytes, clock_ms: Callable[[], int]) -> StoreHooks:
        """Create the components that append and fetch messages, and the hooks that they call. Returns the
        hooks."""
        gate = self.gate
        self._unit_repair = UnitRepair(self._parts, gate.fail)
        self.fetches = FetchService(
            self._parts.queues,
            self._parts.reader,
            self.polls,
            self.stats,
            gate.require_readable,
            self._unit_repair.mend,
        )
        appends = AppendService(
            self._parts, gate, self._appender, flags=self.flags, stats=self.stats, host=host, clock_ms=clock_ms
        )
        self.append, self.start_append = appends.append, appends.start_append
        self.fetch: CarryOutFetches = self.fetches.fetch
        hooks = open_hooks(self._settings, self._resources)
        if hooks.put:
            appends.write = HookedWrite(
                appends.write,
                hooks.put,
                broker_name,
                must_succeed=self._settings.put_hooks_must_succeed,
                on_refused=self.stats.count_failed_put,
            )
        if hooks.consume:
            self.fetch = HookedFetches(self.fetches.fetch, hooks.consume, broker_name)
        return hooks

    def _start_services(
        self,
        checkpoint: Checkpoint,
        clock_ms: Callable[[], int],
        read_elapsed: Callable[[], Elapsed] | None,
        *,
        replicated: bool,
    ) -> None:
        """Create the store's components that depend on all other components, and start their threads."""
        settings, parts, gate, resources = self._settings, self._parts, self.gate, self._resources
        self._queries = StoreQueries(
            parts.log,
            parts.reader,
            parts.queues,
            self._index,
            visible=lambda: self.visible_offset,
            max_num=settings.max_msgs_num_batch,
            wait_s=settings.query_wait_index_ms / 1000,
        )
        self.queues = QueueQueries(parts, self._queries, gate.require_readable)
        self.chunks = LogChunks(parts, gate, self._appender, self.stats)
        self.ages = AgeMarks(parts.config, parts.log.end_offset, read_elapsed or machine_elapsed)
        is_set = clock_ms is system_clock_ms or read_elapsed is not None
        self.schedule = ScheduleService(
            parts, gate, self._appender, self.stats, self.ages if is_set else None, clock_ms
        )
        resources.callback(self.schedule.close)
        self.transactions = TransactionService(parts, gate, self._appender, self.stats, self.ages)
        self._checkpoints = CheckpointService(
            parts, gate, self._appender, self._index, self.stats, checkpoint, replicated=replicated
        )
        resources.callback(self._checkpoints.close)
        self.mender = HoleMender(
            parts,
            gate,
            put_keys=(lambda data, starts, offset: None) if self._index is None else self._index.put_mended,
            forget_snapshot=self._checkpoints.forget_snapshot,
        )
        self.inspector = LogInspector(parts, gate)
        sections: list[Section] = [
            LogSection(parts, self.inspector),
            QueueSection(parts, gate, self._unit_repair),
            *([] if self._index is None else [IndexSection(self._index)]),
            CompactedSection(parts, gate),
            RecoveryFilesSection(self._checkpoints.damaged_files, self._checkpoints.rewrite),
        ]
        self.scrubber = Scrubber(parts, gate, sections, clock_ms=clock_ms)
        resources.callback(self.scrubber.close)
        self.compaction = CompactionService(parts, clock_ms=clock_ms, ages=self.ages, replicated=replicated)
        resources.callback(self.compaction.close)
        self.cleaner = Cleaner(
            parts,
            self._index,
            self.flags,
            self.compaction,
            self.ages,
            flush_queues=self._checkpoints.flush_queues,
            on_failed=gate.fail,
        )
        resources.callback(self.cleaner.close)
        self.topics = StoreTopics(parts, gate, self.cleaner, self.polls, self.stats)
        self.reported = ReportedDamage(parts, self.inspector, self._unit_repair.mend)
        resources.callback(self.reported.close)
        self.chunks.on_damage = self._queries.on_damage = self.transactions.on_damage = self.reported.note
        if replicated:
            parts.reader.state_of = self.reported.state_of

    def _open_index(self, checkpoint_ms: int) -> IndexService:
        index = IndexService(
            self._root,
            IndexShape(self._settings.max_hash_slot_num, self._settings.max_index_num),
            self.log,
            self._parts.reader,
            self._parts.appended,
            damage=self._parts.damage,
            visible=lambda: self.visible_offset,
            after_crash=self._parts.after_crash,
            checkpoint_ms=checkpoint_ms,
            on_writable=self._mark_index,
        )
        self._resources.callback(index.close)
        return index

    def _make_private(self) -> None:
        """Make the store's files accessible to their owner only. An older version allowed other users to read
        them."""
        for directory in (self._root, *self._settings.log_directories_elsewhere):
            try:
                disk.make_private(directory)
            except PermissionError as error:
                logger.warning(
                    "cannot remove the permission of other users of this machine to read the store: %s", error
                )

    def _mark_index(self, error: OSError | None) -> None:
        """Set the running flag which marks that the index cannot be written. If `error` is None, clear the
        flag."""
        if error is None:
            self.flags.clear_flag(RunningFlag.INDEX_ERROR)
        else:
            self._set_flag(RunningFlag.INDEX_ERROR, f"the index cannot be written: {error}")

    def _set_flag(self, flag: RunningFlag, reason: str) -> None:
        if self.flags.set_flag(flag, reason):
            logger.warning("%s: %s", self._root, reason)

    @classmethod
    def open(
        cls,
        settings: StoreSettings,
        *,
        broker_name: str,
        store_host: tuple[str, int] = ("127.0.0.1", 10911),
        clock_ms: Callable[[], int] = system_clock_ms,
        read_elapsed: Callable[[], Elapsed] | None = None,
        on_stored: Callable[[int], None] | None = None,
    ) -> MessageStore:
        """Open the store directory of `settings`, create it if it does not exist, and recover it (spec/storage.md §5).

        `read_elapsed` reads a clock that no step changes (storage.files.age_marks). It shows if `clock_ms` was set. By
        default it is the machine's clock, and a `clock_ms` other than the wall clock counts as never set.

        With `on_stored` the store is one of several replicas. The store calls `on_stored` with the physical offset up
        to which the log is as durable as the settings promise. Consumers then see messages up to the last offset that
        was passed to `show`. `on_stored` must not block.

        Raises StoreLockedError if another process, named by its pid, has the store open. Raises StoreCorruptError if
        the files do not form a store; nothing was changed. Raises StoreError if the directory cannot be written.
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
                    read_elapsed=read_elapsed,
                    on_stored=on_stored,
                    resources=resources,
                )
                store._resources = resources.pop_all()
                return store
        except OSError as error:
            raise StoreError(f"cannot open the store directory {root}: {error}; {_open_remedy(error)}") from error

    def follow_settings(self) -> None:
        """Apply changed live settings (StoreSettings.change) to the components that do not read the settings at each
        use."""
        self.polls.max_waiters = self._settings.fetch_waiters_max
        self._queries.limit(self._settings.max_msgs_num_batch, self._settings.query_wait_index_ms / 1000)

    @property
    def queries(self) -> StoreQueries:
        """Queries by key, unique id, physical offset and time. Raises ServiceNotAvailableError while the store must not
        be read."""
        self.gate.require_readable()
        return self._queries

    @property
    def config(self) -> ConfigFiles:
        """The files in `config/`. Their damage is in the store's status."""
        return self._parts.config

    def read_config(self, name: str) -> str | None:
        """Return the text of config file `name`; None if it does not exist (ConfigFiles.read)."""
        self.gate.require_open()
        return self._parts.config.read(name)

    def write_config(self, name: str, text: str) -> None:
        """Replace the text of config file `name`. On return the new text is on disk (ConfigFiles.write).

        Raises StoreNotWritableError if the disk fails. The file then contains the previous text or the new text.
        """
        self.gate.require_open()
        try:
            self._parts.config.write(name, text)
        except OSError as error:
            raise StoreNotWritableError(
                f"cannot write {self._root}/config/{name}: {error}; the file may have the old or the new text"
            ) from error

    @property
    def visible_offset(self) -> int:
        """Physical offset up to which consumers see the log."""
        return self._parts.visibility.visible_offset

    def show(self, physical_offset: int) -> None:
        """Make the stored messages before a physical offset visible to consumers. Call this method only if the store
        was opened with `on_stored`."""
        self.gate.show(physical_offset)
        self.compaction.note_shown(physical_offset)

    def fence(self, reason: str) -> None:
        """Refuse all writes except a master's log chunks until the flag FENCED is cleared. On return, all appends that
        were running are written."""
        self._set_flag(RunningFlag.FENCED, reason)
        with self._parts.append_lock:
            pass

    def close(self) -> None:
        """Stop the store cleanly: flush, write the checkpoint, remove the `abort` file, release the lock. Idempotent.

        Running appends finish first; waiting fetches raise ServiceNotAvailableError. After a failure of the disk
        nothing is flushed and the `abort` file stays, so that the next open recovers as after a crash.
        """
        with self._close_lock:
            if self.gate.closed:
                return
            self.schedule.close()
            self.scrubber.close()
            self.reported.close()
            with self._parts.append_lock:
                self.gate.closed = True
            self.polls.wake_all()
            with self._resources:
                self.cleaner.close()
                self.compaction.close()
                self._checkpoints.close()
                self.gate.close()
                if not self.gate.failure:
                    try:
                        indexed = self._index is None or self._index.close()
                        self._checkpoints.flush_queues()
                        self.stats.save_days(time.monotonic(), last=True)
                        if not indexed:
                            logger.warning("%s: the index is incomplete; the next open completes the index", self._root)
                            return
                        disk.unlink(self._abort)
                        disk.sync_directory(self._root)
                    except NoRoomError as error:
                        logger.error("%s; the next open recovers the store as after a crash", error)
                    except OSError as error:
                        self.gate.fail(error)
