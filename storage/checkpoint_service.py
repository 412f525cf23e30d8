"""The store's regular bookkeeping: queues to the disk, then the files that say how far everything is there.

Once a second (flush_interval_consume_queue_ms) for queues that have some pages to flush, and for all of them where one
of those files is to say so: with a snapshot, once a minute, and at a clean stop. The order is what recovery relies on:
the checkpoint never says more than what the queues' files, the progress of deliveries and the snapshot hold.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from raymq.errors import DataLossError
from storage.append.appender import Appender
from storage.append.write_gate import WriteGate
from storage.files import disk
from storage.index.index_service import IndexService
from storage.parts import StoreParts
from storage.recovery.checkpoint import Checkpoint, write_checkpoint
from storage.recovery.snapshot import SNAPSHOT_FILE, QueueRow, take_snapshot, write_snapshot

logger = logging.getLogger(__name__)

STORE_SNAPSHOT_INTERVAL_BYTES: Final = 32 << 20
STORE_SNAPSHOT_INTERVAL_S: Final = 10.0


class CheckpointService:
    """Brings the queues of one store to the disk, and the checkpoint and the snapshot up to date. Thread-safe."""

    def __init__(
        self,
        parts: StoreParts,
        gate: WriteGate,
        appender: Appender,
        index: IndexService | None,
        checkpoint: Checkpoint,
    ) -> None:
        self._parts, self._gate, self._appender, self._index = parts, gate, appender, index
        settings = parts.settings
        self._root = settings.store_path_root_dir
        self._least_pages = settings.flush_consume_queue_least_pages
        self._thorough_interval_s = settings.flush_consume_queue_thorough_interval_ms / 1000
        self._checkpoint = checkpoint
        self._run_lock = threading.Lock()
        self._snapshot_end, self._snapshot_s = -1, -STORE_SNAPSHOT_INTERVAL_S
        self._thorough_s = time.monotonic()

    def run(self, *, thorough: bool) -> None:
        """Flush the queues' files and write down how far log and queues are on disk; now and then take a snapshot.

        If it is to be `thorough`, on return every unit that was written before is on disk, whoever flushed it; else
        that is so only when it is time for it. OSError: the disk failed; what recovery finds is what was written down
        before.
        """
        with self._run_lock:
            self._run(thorough=thorough or time.monotonic() - self._thorough_s >= self._thorough_interval_s)

    def _run(self, *, thorough: bool) -> None:
        parts = self._parts
        with self._gate.lock:
            # Units that wait for their records' commit would count as flushed.
            parts.log.commit()
            end, last = parts.log.end_offset, self._appender.last_record_offset
            producers = parts.dedup.rows() if last >= 0 and self._snapshot_is_due(end) else None
            thorough = thorough or producers is not None
            least_pages = 0 if thorough else self._least_pages
            dirty: set[Path] = set().union(*(queue.take_dirty(least_pages) for queue in parts.queues))
            dispatched_ms = self._appender.last_store_timestamp_ms if not least_pages else 0
            deliveries = parts.deliveries.unsaved()
            queues = [
                QueueRow(queue.topic, queue.queue_id, queue.next_offset) for queue in parts.queues if queue.exists
            ]
        for path in dirty:
            disk.flush_path(path)
        if thorough:
            self._thorough_s = time.monotonic()
        if deliveries is not None:
            # Before the checkpoint and the snapshot: recovery learns only from the log behind them what was delivered.
            if not self._gate.wait_flushed(end):
                return
            parts.deliveries.save(deliveries, parts.config)
        # Before the checkpoint: where that lets recovery start later, the snapshot knows who sent what before.
        if producers is not None and self._gate.wait_flushed(end):
            try:
                snapshot = take_snapshot(parts.reader, end=end, last=last, queues=queues, producers=producers)
                write_snapshot(self._root / SNAPSHOT_FILE, snapshot)
                self._snapshot_end, self._snapshot_s = end, time.monotonic()
            except DataLossError:
                logger.info("%s: the newest record is gone by its age; no snapshot is taken", self._root)
        self._write_checkpoint(dispatched_ms)

    def _write_checkpoint(self, dispatched_ms: int) -> None:
        known = self._checkpoint
        indexed_ms = 0 if self._index is None else self._index.flushed_timestamp_ms
        checkpoint = replace(
            known,
            physic_msg_timestamp=self._parts.log.flushed_store_timestamp_ms or known.physic_msg_timestamp,
            logics_msg_timestamp=dispatched_ms or known.logics_msg_timestamp,
            index_msg_timestamp=indexed_ms or known.index_msg_timestamp,
        )
        if checkpoint != known:
            write_checkpoint(self._root / "checkpoint", checkpoint)
            self._checkpoint = checkpoint

    def _snapshot_is_due(self, end_offset: int) -> bool:
        behind = end_offset - self._snapshot_end
        late = time.monotonic() - self._snapshot_s >= STORE_SNAPSHOT_INTERVAL_S
        return behind >= STORE_SNAPSHOT_INTERVAL_BYTES or (behind > 0 and (late or self._gate.closed))
