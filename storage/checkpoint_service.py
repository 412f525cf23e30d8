"""The store's regular flush of the consume queues, followed by the snapshot and the checkpoint.

When queues are flushed, and what the checkpoint and the snapshot may promise, belongs here. Once a second
(flush_interval_consume_queue_ms) the service flushes the queues that have enough dirty pages. It flushes all queues
with each snapshot, once a minute (flush_consume_queue_thorough_interval_ms), and at a clean stop. Recovery relies on
the order: the checkpoint never promises more than is in the queues' files, the progress of deliveries and the snapshot.

The service has a thread of its own, beside the log's flush thread: a store with thousands of queues needs a flush for
each queue, and an append that waits for the log must not wait for the queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from raymq.common.errors import DataLossError
from storage.append.appender import Appender
from storage.append.write_gate import WriteGate
from storage.files import disk
from storage.files.disk_usage import NoRoomError, is_want_of_space
from storage.index.index_service import IndexService
from storage.parts import StoreParts
from storage.recovery.checkpoint import Checkpoint, write_checkpoint
from storage.recovery.snapshot import SNAPSHOT_FILE, QueueRow, take_snapshot, write_snapshot
from storage.stats import StoreStats

logger = logging.getLogger(__name__)

STORE_SNAPSHOT_INTERVAL_BYTES: Final = 32 << 20
STORE_SNAPSHOT_INTERVAL_S: Final = 10.0
QUEUE_FLUSH_STOP_TIMEOUT_S: Final = 60.0


class CheckpointService:
    """Flushes the consume queues of one store and keeps its snapshot and checkpoint up to date. Thread-safe.

    Its thread runs from the construction until `close`. After an OSError it closes the write gate and stops. On a full
    disk it goes on; recovery then begins at the previous snapshot.
    """

    def __init__(
        self,
        parts: StoreParts,
        gate: WriteGate,
        appender: Appender,
        index: IndexService | None,
        stats: StoreStats,
        checkpoint: Checkpoint,
    ) -> None:
        """Start the thread. `checkpoint` is the checkpoint that was found when the store was opened."""
        self._parts, self._gate, self._appender, self._index, self._stats = parts, gate, appender, index, stats
        settings = parts.settings
        self._root = settings.store_path_root_dir
        self._settings = settings
        # The checkpoint in the file.
        self._checkpoint = checkpoint
        # Held for a whole flush, so that flushes run one at a time.
        self._run_lock = threading.Lock()
        # The log's end in the newest snapshot, and when it was taken (time.monotonic).
        self._snapshot_end, self._snapshot_s = -1, -STORE_SNAPSHOT_INTERVAL_S
        # When all queues were last flushed (time.monotonic).
        self._thorough_s = time.monotonic()
        # True while the disk has no room for a snapshot.
        self._is_out_of_room = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raymq-queue-flush", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Idempotent. Nothing is flushed: queues stay dirty until `flush_queues` is called."""
        self._stop.set()
        self._thread.join(QUEUE_FLUSH_STOP_TIMEOUT_S)

    def flush_queues(self, *, thorough: bool = True) -> None:
        """Flush the queues' files, then record how far log and queues are on disk; take a snapshot if one is due.

        After a `thorough` flush every unit that was written before the call is on disk, whichever flush wrote it. A
        flush that is not thorough becomes thorough when one is due. OSError: the disk failed; recovery uses what was
        recorded before. NoRoomError: the disk is full; the queues are flushed.
        """
        self._stats.take_sample(time.monotonic())
        self._stats.save_days(time.monotonic())
        with self._run_lock:
            interval_s = self._settings.flush_consume_queue_thorough_interval_ms / 1000
            self._flush(thorough=thorough or time.monotonic() - self._thorough_s >= interval_s)

    def forget_snapshot(self) -> None:
        """Take the next snapshot soon, because bytes changed that the last snapshot's checksum covers."""
        with self._run_lock:
            self._snapshot_end = -1

    def _run(self) -> None:
        while not self._stop.wait(self._settings.flush_interval_consume_queue_ms / 1000):
            try:
                self.flush_queues(thorough=False)
            except NoRoomError as error:
                if not self._is_out_of_room:
                    logger.error("%s; until there is room, recovery would begin at the previous snapshot", error)
                self._is_out_of_room = True
            except OSError as error:
                logger.error("flushing the consume queues failed: %s", error)
                self._gate.fail(error)
                return

    def _flush(self, *, thorough: bool) -> None:
        parts = self._parts
        with parts.append_lock:
            # Without this commit, units whose records are not committed yet would count as flushed.
            parts.log.commit()
            end, last = parts.log.end_offset, self._appender.last_record_offset
            producers = parts.dedup.rows() if last >= 0 and self._snapshot_is_due(end) else None
            transactions = parts.halves.rows() if producers is not None else {}
            thorough = thorough or producers is not None
            # A queue with fewer dirty pages waits for the next thorough flush.
            least_pages = 0 if thorough else self._settings.flush_consume_queue_least_pages
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
        with self._want_of_room():
            if deliveries is not None:
                # Save before the checkpoint and the snapshot: recovery finds deliveries only in the log after them.
                if not self._gate.wait_flushed(end):
                    return
                parts.deliveries.save(deliveries, parts.config)
            # Write before the checkpoint: if the checkpoint lets recovery start later, the snapshot must hold earlier
            # sequences.
            if producers is not None and self._gate.wait_flushed(end):
                try:
                    snapshot = take_snapshot(
                        parts.reader, end=end, last=last, queues=queues, producers=producers, transactions=transactions
                    )
                    write_snapshot(self._root / SNAPSHOT_FILE, snapshot)
                    self._snapshot_end, self._snapshot_s = end, time.monotonic()
                except DataLossError:
                    logger.info("%s: retention has deleted the newest record; no snapshot is taken", self._root)
            self._write_checkpoint(dispatched_ms)

    @contextmanager
    def _want_of_room(self) -> Iterator[None]:
        """Turn the error of a full disk into NoRoomError while small files are written."""
        try:
            yield
        except OSError as error:
            if not is_want_of_space(error):
                raise
            raise NoRoomError(error.errno, f"{self._root} has no room for its snapshot: {error}") from error
        self._is_out_of_room = False

    def _write_checkpoint(self, dispatched_ms: int) -> None:
        """Write the checkpoint if it has moved.

        `dispatched_ms`: the store time up to which all queues are on disk; 0 if not all were flushed.
        """
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
        """True if the log has grown enough since the last snapshot, or has grown at all and the interval has passed."""
        behind = end_offset - self._snapshot_end
        late = time.monotonic() - self._snapshot_s >= STORE_SNAPSHOT_INTERVAL_S
        return behind >= STORE_SNAPSHOT_INTERVAL_BYTES or (behind > 0 and (late or self._gate.closed))
