"""Reports about one open store: its state, and RocketMQ's counters."""

from __future__ import annotations

import os
import time

from raymq.common.protocol.store import StoreStatistics, StoreStatus
from storage.append.appender import Appender
from storage.append.write_gate import WriteGate
from storage.files.disk_usage import disk_free_bytes, disk_usage
from storage.hooks.store_hooks import StoreHooks
from storage.index.index_service import IndexService
from storage.parts import StoreParts
from storage.read.long_polls import LongPolls
from storage.recovery.recovery import Recovered
from storage.retention.cleaner import Cleaner
from storage.running_flags import RunningFlag, RunningFlags
from storage.schedule.schedule_service import ScheduleService
from storage.scrub.reported_damage import ReportedDamage
from storage.scrub.scrubber import Scrubber
from storage.stats import StoreStats


class StoreReports:
    """Creates the reports about one store. Thread-safe; takes no lock of the store."""

    def __init__(
        self,
        parts: StoreParts,
        gate: WriteGate,
        appender: Appender,
        *,
        broker_name: str,
        recovered: Recovered,
        flags: RunningFlags,
        stats: StoreStats,
        polls: LongPolls,
        index: IndexService | None,
        schedule: ScheduleService,
        cleaner: Cleaner,
        hooks: StoreHooks,
        scrubber: Scrubber,
        reported: ReportedDamage,
    ) -> None:
        self._parts, self._gate, self._appender = parts, gate, appender
        self._broker_name, self._recovered = broker_name, recovered
        self._flags, self._stats, self._polls, self._index = flags, stats, polls, index
        self._schedule, self._cleaner, self._hooks = schedule, cleaner, hooks
        self._scrubber, self._reported = scrubber, reported

    def statistics(self) -> StoreStatistics:
        """Return the current counters of the store: RocketMQ's runtime keys, puts by topic, latencies."""
        retention, log = self._cleaner.status(), self._parts.log
        runtime = self._stats.runtime(time.monotonic(), time.time_ns() // 1_000_000)
        runtime |= {
            "dispatchMaxBuffer": str(self._index_behind()),
            "commitLogDiskRatio": f"{retention.disk_ratio:.2f}",
            "consumeQueueDiskRatio": f"{disk_usage(self._parts.queues.directory):.2f}",
            "commitLogYoungFilesDeleted": str(retention.young_files_deleted),
            "commitLogMinOffset": str(log.min_offset),
            "commitLogMaxOffset": str(log.end_offset),
        }
        return StoreStatistics(runtime, self._stats.topics(), self._stats.latency_buckets())

    def status(self) -> StoreStatus:
        """Return the store's current counts, offsets and health. Also works for a closed store."""
        parts, log, root = self._parts, self._parts.log, self._parts.settings.store_path_root_dir
        reason = self._gate.failure or self._flags.not_writable_reason
        if not reason and disk_free_bytes(root) < log.file_size:
            reason = self._appender.no_space
        if self._gate.closed:
            reason = "the store is closed"
        return StoreStatus(
            pid=os.getpid(),
            root=str(root),
            broker_name=self._broker_name,
            topics=len(parts.queues.topics()),
            queues=len(parts.queues),
            min_physical_offset=log.min_offset,
            max_physical_offset=log.end_offset,
            flushed_physical_offset=log.flushed_offset,
            visible_physical_offset=parts.visibility.visible_offset,
            messages_appended=self._appender.messages_appended,
            duplicates_dropped=self._appender.duplicates_dropped,
            waiting_fetches=len(self._polls),
            known_producers=len(parts.dedup),
            recovered=self._recovered.text,
            cut_bytes=self._recovered.cut_bytes,
            writable=not reason,
            not_writable_reason=reason,
            schedule=self._schedule.status(),
            running_flags=int(self._flags.bits | (RunningFlag.NOT_WRITABLE if self._gate.failure else 0)),
            index_files=0 if self._index is None else len(self._index),
            index_behind_bytes=self._index_behind(),
            retention=self._cleaner.status(),
            hooks=self._hooks.figures(),
            disk_failure=self._gate.failure,
            holes=parts.holes.from_offset(log.min_offset),
            mended_bytes=parts.holes.mended_bytes,
            mended_holes=parts.holes.mended_holes,
            damaged_files=parts.damage.texts,
            scrub=self._scrubber.status(),
            found_holes=parts.holes.found_holes,
            damage_reports=self._reported.count,
        )

    def _index_behind(self) -> int:
        return 0 if self._index is None else max(self._parts.visibility.visible_offset - self._index.position, 0)
