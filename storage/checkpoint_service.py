"""Flushes the consume queues at regular intervals, and writes the snapshot and the checkpoint after the flush.

This module decides when queues are flushed, and what the checkpoint and the snapshot may contain. Once a second
(flush_interval_consume_queue_ms) the service flushes the queues that have enough dirty pages. It flushes all queues
with each snapshot, once a minute (flush_consume_queue_thorough_interval_ms), and at a clean stop. Recovery relies on
the order of the writes: the checkpoint never claims more than the queue files, the delivery progress and the snapshot
contain.

The service has its own thread, separate from the log's flush thread. A store with thousands of queues needs one flush
per queue, and an append that waits for the log must not wait for the queues.
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
from storage.files.damage import DamageNotes
from storage.files.disk_usage import NoRoomError, is_want_of_space
from storage.index.index_service import IndexService
from storage.parts import StoreParts
from storage.recovery.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from storage.recovery.snapshot import SNAPSHOT_FILE, QueueRow, read_snapshot, take_snapshot, write_snapshot
from storage.stats import StoreStats

logger = logging.getLogger(__name__)

STORE_SNAPSHOT_INTERVAL_BYTES: Final = 32 << 20
STORE_SNAPSHOT_INTERVAL_S: Final = 10.0
QUEUE_FLUSH_STOP_TIMEOUT_S: Final = 60.0


class CheckpointService:
    """Flushes the consume queues of one store and keeps the store's snapshot and checkpoint up to date. Thread-safe.

    The service's thread runs from construction until `close`. After an OSError the thread closes the write gate and
    stops. If the disk is full the thread continues; a recovery would then start at the previous snapshot.
    """

    def __init__(
        self,
        parts: StoreParts,
        gate: WriteGate,
        appender: Appender,
        index: IndexService | None,
        stats: StoreStats,
        checkpoint: Checkpoint,
        *,
        replicated: bool = False,
    ) -> None:
        """Start the checkpoint thread. `checkpoint` is the checkpoint that was read when the store was opened.
        `replicated`: True if other replicas have copies of the log, so that a failover may cut its end off."""
        self._parts, self._gate, self._appender, self._index, self._stats = parts, gate, appender, index, stats
        settings = parts.settings
        self._root = settings.store_path_root_dir
        self._settings = settings
        self._replicated = replicated
        # The end of the log when the store was opened. Consumers see the log up to this offset at once, although it may
        # not be confirmed.
        self._opened_end = parts.log.end_offset
        if replicated and not self._opened_end:
            parts.deliveries.begin_confirmed()
        # The values that the checkpoint file contains now.
        self._checkpoint, self._wrote_checkpoint = checkpoint, False
        # Lock that is held during a whole flush of the queues, so that only one flush runs at a time.
        self._run_lock = threading.Lock()
        # The end of the log in the newest snapshot, and the time of that snapshot (time.monotonic).
        self._snapshot_end, self._snapshot_s = -1, -STORE_SNAPSHOT_INTERVAL_S
        # Time at which all consume queues were last flushed (time.monotonic).
        self._thorough_s = time.monotonic()
        # True while the disk has no space for a snapshot.
        self._is_out_of_room = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raymq-queue-flush", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the checkpoint thread. Idempotent. Flushes nothing: queues stay dirty until `flush_queues` is
        called."""
        self._stop.set()
        self._thread.join(QUEUE_FLUSH_STOP_TIMEOUT_S)

    def flush_queues(self, *, thorough: bool = True) -> None:
        """Flush the queue files. Then write the checkpoint: the store times and log offsets up to which the log and the
        queues are on disk. Take a snapshot if one is due.

        A `thorough` flush puts every unit on disk that was written before the call. This includes the units of queues
        that an earlier flush skipped. A flush that is not thorough becomes thorough if a thorough flush is due. Raises
        OSError if the disk fails; recovery then uses the previous checkpoint. Raises NoRoomError if the disk is full;
        the queues are flushed all the same.
        """
        self._stats.take_sample(time.monotonic())
        self._stats.save_days(time.monotonic())
        with self._run_lock:
            interval_s = self._settings.flush_consume_queue_thorough_interval_ms / 1000
            self._flush(thorough=thorough or time.monotonic() - self._thorough_s >= interval_s)

    def forget_snapshot(self) -> None:
        """Make the next snapshot soon. Called after a change of log bytes that the last snapshot's checksum covers,
        because the checksum no longer matches."""
        with self._run_lock:
            self._snapshot_end = -1

    def damaged_files(self) -> list[Path]:
        """Return which of the two files, the checkpoint and the snapshot, the disk has damaged since they were written.
        A file that does not exist yet is not damaged."""
        checkpoint, snapshot = self._root / "checkpoint", self._root / SNAPSHOT_FILE
        with self._run_lock:
            in_checkpoint, in_snapshot = DamageNotes(logs=False), DamageNotes(logs=False)
            differs = read_checkpoint(checkpoint, in_checkpoint) != self._checkpoint
            read_snapshot(snapshot, in_snapshot)
            damaged = {
                checkpoint: bool(in_checkpoint.texts) or (differs and self._wrote_checkpoint),
                snapshot: bool(in_snapshot.texts),
            }
            return [path for path, is_damaged in damaged.items() if is_damaged]

    def rewrite(self) -> None:
        """Write the checkpoint and the snapshot again, from memory. Raises OSError if the disk fails or is full."""
        with self._run_lock:
            self._snapshot_end, self._snapshot_s = -1, -STORE_SNAPSHOT_INTERVAL_S
            try:
                # Also a checkpoint that was read when the store was opened, and has not changed since.
                write_checkpoint(self._root / "checkpoint", self._checkpoint)
                self._wrote_checkpoint = True
                self._flush(thorough=True)
            except OSError as error:
                if not is_want_of_space(error):
                    self._gate.fail(error)
                raise

    def _run(self) -> None:
        while not self._stop.wait(self._settings.flush_interval_consume_queue_ms / 1000):
            try:
                self.flush_queues(thorough=False)
            except NoRoomError as error:
                if not self._is_out_of_room:
                    logger.error(
                        "%s; until the disk has space again, recovery would begin at the previous snapshot", error
                    )
                self._is_out_of_room = True
            except OSError as error:
                logger.error("flushing the consume queues failed: %s", error)
                self._gate.fail(error)
                return

    def _flush(self, *, thorough: bool) -> None:
        parts = self._parts
        with parts.append_lock:
            # Commit the log first. Otherwise queue units would count as flushed although the log records to which they
            # point are not committed.
            parts.log.commit()
            end, last = parts.log.end_offset, self._appender.last_record_offset
            producers = parts.dedup.rows() if last >= 0 and self._snapshot_is_due(end) else None
            transactions = parts.halves.rows() if producers is not None else {}
            thorough = thorough or producers is not None
            # Skip a queue with fewer than `least_pages` dirty pages; the next flush without such a limit writes these
            # pages.
            least_pages = 0 if thorough else self._settings.flush_consume_queue_least_pages
            dirty: set[Path] = set().union(*(queue.take_dirty(least_pages) for queue in parts.queues))
            dispatched_ms = self._appender.last_store_timestamp_ms if not least_pages else 0
            visible = parts.visibility.visible_offset
            if self._replicated and visible > self._opened_end:
                parts.deliveries.note_end(end, visible)
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
                # Save the delivery progress before the checkpoint and the snapshot: recovery finds deliveries only in
                # the part of the log after the checkpoint.
                if not self._gate.wait_flushed(end):
                    return
                parts.deliveries.save(deliveries, parts.config, end)
            # Write the snapshot before the checkpoint. With the new checkpoint, recovery no longer scans the earlier
            # part of the log. It then finds the producers' earlier sequence numbers only in the snapshot.
            if producers is not None and self._gate.wait_flushed(end):
                try:
                    snapshot = take_snapshot(
                        parts.reader, end=end, last=last, queues=queues, producers=producers, transactions=transactions
                    )
                    write_snapshot(self._root / SNAPSHOT_FILE, snapshot)
                    self._snapshot_end, self._snapshot_s = end, time.monotonic()
                except DataLossError:
                    logger.info(
                        "%s: no snapshot is written, because retention has deleted the newest record", self._root
                    )
            self._write_checkpoint(dispatched_ms)

    @contextmanager
    def _want_of_room(self) -> Iterator[None]:
        """Context manager for writing small files. Raises NoRoomError if the disk is full."""
        try:
            yield
        except OSError as error:
            if not is_want_of_space(error):
                raise
            raise NoRoomError(
                error.errno, f"the disk of {self._root} has no space for the recovery snapshot: {error}"
            ) from error
        self._is_out_of_room = False

    def _write_checkpoint(self, dispatched_ms: int) -> None:
        """Write the checkpoint file if the checkpoint has changed.

        `dispatched_ms`: the store time up to which all queues are on disk; 0 if some queues were not flushed.
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
            self._checkpoint, self._wrote_checkpoint = checkpoint, True

    def _snapshot_is_due(self, end_offset: int) -> bool:
        """Return True if a snapshot is due. It is due if the log has grown enough since the last snapshot, or if it has
        grown at all and the snapshot interval has passed."""
        behind = end_offset - self._snapshot_end
        late = time.monotonic() - self._snapshot_s >= STORE_SNAPSHOT_INTERVAL_S
        return behind >= STORE_SNAPSHOT_INTERVAL_BYTES or (behind > 0 and (late or self._gate.closed))
