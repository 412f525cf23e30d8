"""The follower's side of a replica: aligns its log with the master's log, and appends the master's chunks.

This module does not use Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from actors.core.replica.orders import (
    Copied,
    Following,
    ReplicaRole,
)
from actors.replica.group_replica import GroupReplica
from raymq.common.errors import (
    InvalidArgumentError,
    ServiceNotAvailableError,
    StoreCorruptError,
    StoreError,
)
from storage.dispatch.delivery_progress import DELIVERY_FILES
from storage.files import disk
from storage.index.mended_keys import MENDED_KEYS_FILE
from storage.log.holes import HOLES_FILE
from storage.recovery.snapshot import SNAPSHOT_FILE
from storage.replication.epochs import (
    EpochHistory,
    LogChunk,
    common_end,
    first_lost_offset,
)
from storage.replication.log_chunks import truncate_log

_REFILLED: Final = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "compaction", "index")

LOGGED_TOPICS_MAX: Final = 10
"""Maximum number of deleted topics that one log message names."""

logger = logging.getLogger(__name__)


class FollowerSide(GroupReplica):
    """The methods of a replica that follows a master. Thread-safe: a lock (the order lock) lets only one method at a
    time change the log."""

    def following(self, wait_s: float) -> Following | None:
        """Return the master that this replica follows, and the next offset to read. Returns None if the replica follows
        no master even after `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._role.role is ReplicaRole.SLAVE or self._closed, wait_s)
            if self._role.role is not ReplicaRole.SLAVE or self._role.master is None:
                return None
            position = self._store.gate.stored_offset if self._aligned else None
            return Following(self._role.master, self._role.epoch, self._files.store_id, position, self._learner)

    def align(self, epoch: int, master: EpochHistory) -> int:
        """Cut off the end of this slave's log if it differs from the master's log. Returns the physical offset from
        which the slave must read the master's log next.

        Raises NotMasterError if this replica does not follow the master of `epoch`. Raises StoreCorruptError, and
        changes nothing, if the cut would remove acknowledged messages that the master lacks.

        If the two logs have nothing in common, this store is emptied and begins at the start of the master's log.
        """
        with self._order_lock, self._failing_on_disk_errors():
            self._role.check_chunk(epoch)
            if not self._aligned:
                end = self._store.gate.flush_all()
                common = common_end(self._epochs.entries, end, master.entries, master.end_offset)
                self._check_confirmed(epoch, end, common or 0, master)
                if common is None and (end or master.min_offset):
                    self._refill_from(master.min_offset)
                elif common is not None and common < end:
                    self._reopen(partial(self._cut, common))
                else:
                    # Drop the epochs that begin at the end of this log. If this replica was the master in an epoch and
                    # wrote no record in it, the new master's history does not contain this epoch.
                    self._epochs.truncate_from(end)
                with self._changed:
                    self._aligned, self._shown_from, self._refusal = True, self._store.gate.stored_offset, ""
            return self._store.gate.stored_offset

    def _check_confirmed(self, epoch: int, end: int, common: int, master: EpochHistory) -> None:
        """Raise StoreCorruptError if cutting this log to the `common` part would lose confirmed messages that the
        master lacks.

        `end` is the end of this log. No error is raised if this log also lacks the messages, or if the settings allow
        losing them. In these cases the group continues without the messages.
        """
        floor = self._confirm_file.floor
        lost_from = first_lost_offset(floor, master.entries, master.end_offset)
        if lost_from is None:
            return
        kept = min(end, floor.offset)
        if common < kept and not self._rules.may_lose_confirmed:
            self._refusal = (
                f"replica {self._replica} of broker group {self._broker_name!r} does not follow replica "
                f"{self._role.master}, which lacks acknowledged messages: all messages before physical offset "
                f"{floor.offset} were confirmed, but the log of replica {self._role.master} continues from "
                f"{lost_from} without them. Nothing was cut on replica {self._replica}. See docs/cluster.md, "
                "'Messages that only one replica has'"
            )
            logger.error("%s", self._refusal)
            raise StoreCorruptError(self._refusal)
        logger.error(
            "broker group %s, replica %d: the acknowledged messages from physical offset %d to %d are lost, "
            "because the master lacks them; %d bytes of them were on this replica",
            *(self._broker_name, self._replica, lost_from, floor.offset, max(kept - common, 0)),
        )
        self._give_up_confirmed(epoch, lost_from)

    def _cut(self, physical_offset: int) -> None:
        cut_bytes = truncate_log(self._settings, physical_offset)
        self._epochs.truncate_from(physical_offset)
        logger.warning(
            "broker group %s, replica %d: cut %d bytes at physical offset %d",
            self._broker_name,
            self._replica,
            cut_bytes,
            physical_offset,
        )

    def _refill_from(self, physical_offset: int) -> None:
        known = self._files.sync_state_set
        if (
            known is not None
            and known.stores.get(self._replica) == self._files.store_id
            and self._store.gate.stored_offset
        ):
            raise StoreCorruptError(
                f"replica {self._replica} of broker group {self._broker_name!r} is in the sync-state set, but its "
                "log has nothing in common with the master's log. Keep the directories of both replicas, and "
                "check them by hand"
            )
        logger.warning(
            "broker group %s, replica %d: the empty log is filled again from physical offset %d",
            self._broker_name,
            self._replica,
            physical_offset,
        )
        self._reopen(self._empty)
        self._store.chunks.begin_at(physical_offset)

    def _empty(self) -> None:
        root = self._settings.store_path_root_dir
        for directory in (*self._settings.commit_log_directories, *(root / name for name in _REFILLED)):
            disk.remove_tree(directory)
        names = [*(f"config/{name}" for name in DELIVERY_FILES), SNAPSHOT_FILE, HOLES_FILE, MENDED_KEYS_FILE]
        for name in names:
            for path in (root / f"{name}.bak", root / name):
                disk.unlink(path)
        disk.unlink(root / "checkpoint")
        self._epochs.truncate_from(0)

    def _reopen(self, change: Callable[[], None]) -> None:
        closed = self._store
        closed.close()
        try:
            change()
            self._store = self._open()
        except (OSError, StoreError) as error:
            # The store could not be opened again, so this process has no open store. Only a new process can open the
            # store, with the state on disk.
            closed.gate.fail(error)
            raise

    def start_append_log(self, epoch: int, chunk: LogChunk) -> Copied:
        """Append a chunk of the master's log without waiting for the disk. The chunk is on disk after `copied` returns
        an offset for its end.

        Raises NotMasterError unless this replica follows in `epoch`. Raises InvalidArgumentError if the chunk does not
        continue this log, and ServiceNotAvailableError if this replica is changing its role or its log; in both cases
        nothing is written.
        """
        if not self._order_lock.acquire(blocking=False):
            raise ServiceNotAvailableError(
                f"replica {self._replica} of broker group {self._broker_name!r} is changing its role, so nothing "
                "was written; read its role again, then retry"
            )
        try:
            with self._failing_on_disk_errors():
                self._append_chunk(epoch, chunk)
                self._show_chunk(chunk)
                return self._copied(chunk)
        finally:
            self._order_lock.release()

    def _copied(self, chunk: LogChunk) -> Copied:
        """Build the answer (Copied) to a request that appends a chunk of the master's log to this slave's log."""
        return Copied(self._store.chunks.append_offset, self._store.gate.stored_offset, len(chunk.data))

    def copied(self, epoch: int, end_offset: int) -> int | None:
        """Return the end of this replica's log on disk, if the log is on disk up to `end_offset` or further; else None.

        Raises NotMasterError if this replica does not follow the master of `epoch`, and StoreFailedError if the disk
        failed.
        """
        with self._changed:
            self._role.check_chunk(epoch)
            store = self._store
        return store.gate.stored_offset if store.chunks.is_durable(end_offset) else None

    def _append_chunk(self, epoch: int, chunk: LogChunk) -> None:
        """Append a chunk of the master's log, and request its flush. Raises the errors of `start_append_log`."""
        self._role.check_chunk(epoch)
        end = self._store.log.end_offset
        if not self._aligned or (chunk.hole is None and chunk.physical_offset != end):
            raise InvalidArgumentError(
                f"the chunk begins at physical offset {chunk.physical_offset}, but the log ends at {end}"
            )
        if not chunk.data:
            return
        if chunk.entry is not None and chunk.entry.epoch > self._epochs.last_epoch:
            self._begin_epoch(*chunk.entry)
        if chunk.hole is None:
            self._store.chunks.append_chunk(chunk.physical_offset, chunk.data, wait=False)
            return
        self._store.chunks.append_hole(chunk.physical_offset, chunk.data, chunk.hole)
        if chunk.hole.left == 0:
            with self._changed:
                self._shared_holes |= {end}

    def _show_chunk(self, chunk: LogChunk) -> None:
        """Make messages visible to consumers up to the master's confirm offset, which the chunk contains."""
        with self._changed:
            self._last_chunk_s = self._clock_s()
            if chunk.confirm_offset >= self._shown_from:
                self._shown_from = -1
            stored = self._store.gate.stored_offset
            self._note_confirmed(min(chunk.confirm_offset, stored))
            self._caught_up = self._caught_up or stored >= chunk.confirm_offset
            self._store.show(chunk.confirm_offset)

    def delete_topics_before(self, existing: Collection[str], position: int) -> None:
        with self._order_lock:
            if self._role.role is not ReplicaRole.SLAVE or not self._aligned:
                return
            gone = self._store.topics.delete_before(existing, position)
        if gone:
            logger.info(
                "broker group %s, replica %d: deleted %d topics that the master has deleted: %s",
                *(self._broker_name, self._replica, len(gone), ", ".join(gone[:LOGGED_TOPICS_MAX])),
            )
