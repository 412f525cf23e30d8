"""Checks the disk at intervals, and deletes the files that storage/retention/rules.py selects.

This module decides how files are deleted; the rules decide which files are deleted.

On disk
    config/retentionHolds.json      {"TOPIC": {"QUEUE": offset}}: a server keeps the messages of its own topics from
                                    there on

The queues are flushed before anything is deleted. Log files are deleted first, one by one from the oldest on, so that a
crash leaves no gap. The first offset of each queue is raised before the files are deleted. So a later read gets the new
first offset, and a reader that has already mapped a file can still read the file's bytes. After the log files, the
queue and index files that point only to deleted records are deleted. Waiting delayed messages, and messages in
config/retentionHolds.json, are still needed. The log keeps the records of these messages, and all later records.

A wrong clock deletes nothing early. A record is old enough if the wall clock says so, and if the record has been in
this store for its reserved time by the store's age clock (storage.files.age_marks).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.store import DeletedRange, RetentionStatus
from storage.files import disk
from storage.files.age_marks import AgeMarks
from storage.files.config_files import parse_fastjson
from storage.files.disk_usage import UNKNOWN_USAGE, NoRoomError, disk_free_bytes, disk_usage
from storage.index.index_service import IndexService
from storage.parts import StoreParts
from storage.retention.rules import LogFile, RetentionRules, decide, is_full
from storage.retention.topic_times import TopicTimes
from storage.running_flags import RunningFlag, RunningFlags

logger = logging.getLogger(__name__)

HOLDS_FILE: Final = "retentionHolds.json"
FIRST_RUN_S: Final = 60.0
RUNS_BY_HAND: Final = 20
DELETE_PAUSE_S: Final = 0.1
CLEANER_STOP_TIMEOUT_S: Final = 30.0
LOGGED_MAX: Final = 10
"""Maximum number of queues that one log message of the retention thread names."""


class LogReservations(Protocol):
    """Protocol of an object that reports the parts of the log that compaction needs.

    Retention always keeps the log from `held_from` on. It keeps the log from `reserved_from` on unless the disk is
    nearly full. No change of the master can truncate the log before `settled_offset`.
    """

    def settled_offset(self) -> int: ...

    def held_from(self) -> int: ...

    def reserved_from(self) -> int: ...


class Cleaner:
    """Deletes the old files of one store, in its own thread, which runs every clean_resource_interval_ms.

    It deletes nothing in the first minute. The constructor measures the disk usage before it returns. Thread-safe.
    After a power cut, no deleted file before `log_start_on_disk` exists again.
    """

    def __init__(
        self,
        parts: StoreParts,
        index: IndexService | None,
        flags: RunningFlags,
        holds: LogReservations,
        ages: AgeMarks,
        *,
        flush_queues: Callable[[], None],
        on_failed: Callable[[OSError], None],
    ) -> None:
        """Start the cleaner's thread. `holds` returns the parts of the log that compaction still needs.
        `ages` tells how old the log's bytes are at least, whatever the clock shows.

        `flush_queues` flushes the entries (units) of all consume queues to disk, or raises OSError. `on_failed` is
        called if the disk fails in the thread, which then ends.
        """
        settings = parts.settings
        self._root = settings.store_path_root_dir
        self._parts, self._log, self._queues = parts, parts.log, parts.queues
        # The key index; None in a store without an index. The cleaner deletes index files after the log files.
        self._index = index
        # The store's running flags. The cleaner sets and clears DISK_FULL and DISK_CRITICAL in them.
        self._flags = flags
        self._settings = settings
        self._holds, self._ages = holds, ages
        # Advances the first offsets of queues whose topics have their own reserved time (reserve.time).
        self._topic_times = TopicTimes(parts)
        self._flush_queues, self._on_failed = flush_queues, on_failed
        # Lock that is held during a whole run of the cleaner, so that only one run happens at a time.
        self._run_lock = threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        # The number of cleaner runs that `request_run` has requested and that have not happened yet.
        self._by_hand = 0
        # The used share of the fullest disk at the cleaner's last run, from 0 to 1.
        self._usage = UNKNOWN_USAGE
        # Counters since the store was opened: deleted log files, deleted log bytes, and log files deleted before their
        # reserved time had passed.
        self._files_deleted = self._bytes_deleted = self._young_files_deleted = 0
        # Messages that were deleted before their reserved time had passed, because the disk was full, by topic and
        # queue id.
        self._deleted_young: dict[tuple[str, int], DeletedRange] = {}
        # Physical offset before which all log files are certainly deleted on disk. The log's `min_offset` moves first,
        # and this offset shortly after it.
        self.log_start_on_disk = parts.log.min_offset
        # The reason for the most recent deletion of log files; empty before the first deletion.
        self._last_reason = ""
        ages.save_if_cut(parts.log.min_offset)
        self.look_at_disk()
        self._thread = threading.Thread(target=self._run, name="raymq-clean", daemon=True)
        self._thread.start()

    def request_run(self) -> None:
        """Request that expired files are deleted now, at any hour. The next 20 runs of the cleaner delete them in small
        portions.

        Raises ServiceNotAvailableError if the store is closed.
        """
        if self._stop.is_set():
            raise ServiceNotAvailableError(f"the store {self._root} is closed")
        self._by_hand = RUNS_BY_HAND
        self._wake.set()

    def pinned_physical_offset(self) -> int:
        """Return the physical offset of the first message that waits for its delivery time or for the end of its
        transaction.

        Retention keeps the log from that offset on. Returns the log's end if no message waits.
        """
        with self._parts.append_lock:
            pins = (
                self._parts.deliveries.pinned_physical_offset(self._queues.plain),
                self._parts.halves.pinned_physical_offset(),
            )
            return min([pin for pin in pins if pin is not None], default=self._log.end_offset)

    def run_once(self, now: datetime) -> int:
        """Measure the disk usage once, and delete the files that the rules select. Advance the first offsets of queues
        past messages older than their topic's reserved time.

        Returns the number of deleted log files. Raises OSError if the disk fails.
        """
        rules = RetentionRules.from_settings(self._settings)
        with self._run_lock:
            usages = self._measure()
            self._note_age()
            now_ms = int(now.timestamp() * 1000)
            for path in self._topic_times.trim(now_ms, self._holds.settled_offset(), self._ages.old_until):
                self._unlink(path)
            decision = decide(
                self._log_files(),
                rules,
                now_ms=now_ms,
                local_hour=now.hour,
                usages=usages,
                by_hand=self._by_hand > 0,
                disk_full=self._is_marked_full,
                keep_from=min(self.pinned_physical_offset(), self._held_from(), self._holds.held_from()),
                reserved_from=min(
                    self._topic_times.reserved_from(now_ms, rules.reserved_ms, self._ages.old_until),
                    self._holds.reserved_from(),
                    self._ages.old_until(rules.reserved_ms),
                ),
            )
            self._by_hand = max(self._by_hand - 1, 0)
            self._mark_disk(full=decision.disk_full, critical=decision.disk_critical)
            if decision.delete:
                self._last_reason = decision.reason
                return self._delete_log_files(decision.delete[-1].end, decision.reason, decision.young_from)
            return 0

    def look_at_disk(self) -> None:
        """Determine whether the disk is too full for appends. Deletes nothing."""
        with self._run_lock:
            rules, fullest = RetentionRules.from_settings(self._settings), max(self._measure())
            self._note_age()
            full, critical = is_full(fullest, rules, disk_full=self._is_marked_full)
            self._mark_disk(full=full, critical=critical)

    def _note_age(self) -> None:
        """Mark the log's end, so that the age of its records is known later. Raises OSError if the disk fails."""
        self._ages.observe(self._log.end_offset)
        self._ages.save_if_due(self._log.min_offset)

    def _measure(self) -> list[float]:
        """Return the used shares of the log's disk and of the queues' disk."""
        # If the log is on several disks, the log's used share is that of the disk with the smallest used share.
        of_log = min(disk_usage(directory) for directory in self._log.paths.directories)
        usages = [of_log, disk_usage(self._queues.directory)]
        self._usage = max(usages)
        return usages

    @property
    def _is_marked_full(self) -> bool:
        return bool(self._flags.bits & RunningFlag.DISK_FULL)

    def status(self) -> RetentionStatus:
        """Return the disk usage, and the numbers of files and bytes deleted since the store was opened."""
        of_log = max(disk_free_bytes(directory) for directory in self._log.paths.directories)
        return RetentionStatus(
            self._usage,
            self._files_deleted,
            self._bytes_deleted,
            self._last_reason,
            self._by_hand,
            self._young_files_deleted,
            min(of_log, disk_free_bytes(self._queues.directory)),
        )

    def deleted_young(self) -> list[DeletedRange] | None:
        """Return, by queue, the messages that were deleted before their reserved time had passed, because the disk was
        full. Counts from the opening of the store.

        Returns None if the settings do not allow these deletions (clean_file_forcibly_enable).
        """
        return list(self._deleted_young.copy().values()) if self._settings.clean_file_forcibly_enable else None

    def close(self) -> None:
        """Stop the cleaner's thread after it has deleted the current file. Idempotent."""
        self._stop.set()
        self._wake.set()
        self._thread.join(CLEANER_STOP_TIMEOUT_S)

    def _run(self) -> None:
        first_run_s = time.monotonic() + FIRST_RUN_S
        while True:
            self._wake.wait(self._settings.clean_resource_interval_ms / 1000)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                if self._by_hand or time.monotonic() >= first_run_s:
                    self.run_once(datetime.now())
                else:
                    self.look_at_disk()
            except OSError as error:
                logger.error("deleting old files failed; retention stops: %s", error)
                self._on_failed(error)
                return

    def _log_files(self) -> list[LogFile]:
        files = []
        for start in self._log.starts:
            modified_ms = self._log.path(start).stat().st_mtime_ns // 1_000_000
            files.append(LogFile(start, start + self._log.file_size, modified_ms))
        return files

    def _held_from(self) -> int:
        """Return the physical offset of the first record that must be kept because of an entry in
        config/retentionHolds.json. Return the log's end if no entry requires a record."""
        end_offset = self._log.end_offset
        text = self._parts.config.read(HOLDS_FILE)
        for topic, queues in parse_fastjson(text).items() if text else ():
            for queue_id, offset in queues.items():
                queue = self._queues.get_plain(topic, int(queue_id))
                if queue is not None:
                    for unit in queue.units(max(int(offset), queue.min_offset), 1):
                        end_offset = min(end_offset, int(unit["physical_offset"]))
        return end_offset

    def _mark_disk(self, *, full: bool, critical: bool) -> None:
        reason = (
            f"the disk of {self._log.paths} is {self._usage:.0%} full, over disk_space_warning_level_ratio; free some "
            "space, or delete topics and shorten file_reserved_time_hours"
        )
        if critical:
            self._flags.set_flag(RunningFlag.DISK_CRITICAL, reason)
        else:
            self._flags.clear_flag(RunningFlag.DISK_CRITICAL)
        if full:
            if self._flags.set_flag(RunningFlag.DISK_FULL, reason):
                logger.error("%s; appends are refused", reason)
            return
        self._parts.space.make()
        if self._flags.clear_flag(RunningFlag.DISK_FULL):
            logger.info("the disk of %s has space again; appends are accepted", self._log.paths)

    def _delete_log_files(self, limit: int, reason: str, young_from: int | None = None) -> int:
        """Delete the log files that end at or before `limit`, and the queue and index files that point only into them.

        Returns the number of deleted log files. `young_from`: the physical offset from which the deleted files are
        younger than their reserved time; None if no file is younger.
        """
        # Flush the entries (units) of the consume queues before the log files are deleted. After a queue's records are
        # deleted, the queue's next offset is known only from its entries. Ignore NoRoomError: the entries are flushed
        # even if it is raised, and deleting files frees space.
        with suppress(NoRoomError):
            self._flush_queues()
        with self._parts.append_lock:
            doomed = self._log.drop_files_before(limit)
        if not doomed:
            return 0
        min_offset = self._log.min_offset
        queue_files: list[Path] = []
        lost: list[DeletedRange] = []
        for queue in self._queues:
            with self._parts.append_lock:
                if self._queues.get(queue.topic, queue.queue_id) is queue:
                    young = None if young_from is None else queue.first_at_or_after(young_from)
                    queue.correct_min_offset(min_offset)
                    queue_files += queue.drop_files_before_min()
                    if young is not None and young < queue.min_offset:
                        lost.append(DeletedRange(queue.topic, queue.queue_id, young, queue.min_offset))
                    self._queues.sweep_light_queue(queue)
        logger.info("deleting %d log files before physical offset %d: %s", len(doomed), min_offset, reason)
        if young_from is not None:
            self._note_young(lost, (min_offset - young_from) // self._log.file_size)
        for path in doomed:
            self._unlink(path)
            self._files_deleted += 1
            self._bytes_deleted += self._log.file_size
            self._stop.wait(DELETE_PAUSE_S)
        self.log_start_on_disk = min_offset
        for path in queue_files:
            self._unlink(path)
        if self._index is not None:
            self._index.delete_before(min_offset)
        return len(doomed)

    def _note_young(self, lost: list[DeletedRange], files: int) -> None:
        """Log the messages that are deleted before their reserved time has passed, and record them for
        `deleted_young`."""
        self._young_files_deleted += files
        for one in lost:
            key = (one.topic, one.queue_id)
            known = self._deleted_young.get(key, one)
            self._deleted_young[key] = replace(one, begin_offset=min(known.begin_offset, one.begin_offset))
        named = ", ".join(
            f"{one.topic}:{one.queue_id} {one.begin_offset} to {one.end_offset - 1}" for one in lost[:LOGGED_MAX]
        )
        logger.warning(
            "the disk is full: %d log files with %d messages of %d queues are deleted before their time "
            "(clean_file_forcibly_enable): %s%s",
            files,
            sum(one.end_offset - one.begin_offset for one in lost),
            len(lost),
            named,
            ", …" if len(lost) > LOGGED_MAX else "",
        )

    def _unlink(self, path: Path) -> None:
        """Delete one file. The deletion is on disk on return: a power cut must not bring back an old file without the
        later files."""
        disk.unlink(path)
        disk.sync_directory(path.parent)
        self._parts.reader.maps.drop_map(str(path))
