"""The work of a replica as master: let appends wait until other replicas have copies, and let followers read the log.
This module does not use Ray."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from actors.core.replica.orders import (
    LogRequest,
)
from actors.replica.group_replica import GroupReplica
from raymq.common.errors import (
    InSyncReplicasError,
    NotMasterError,
    ServiceNotAvailableError,
    StoreCorruptError,
)
from raymq.common.protocol.store import (
    Hole,
)
from storage.append.durability import ReplicaAcks
from storage.message_store import MessageStore
from storage.replication.epochs import (
    EpochHistory,
    LogChunk,
)

T = TypeVar("T")


class MasterSide(GroupReplica):
    """The methods of a replica that is the master. Each method raises NotMasterError unless the replica is the master.
    Thread-safe."""

    def _append(self, epoch: int | None, append: Callable[[MessageStore, ReplicaAcks | None], T]) -> T:
        with self._changed:
            self._role.check_append(epoch, self._clock_s())
            if self._store.gate.failure:
                # The disk of this master has failed, so it gives up its lease. Another replica soon becomes the master,
                # and the client can send the append to it.
                raise NotMasterError(self._broker_name, self._role.epoch)
            assert self._sync is not None
            led, in_sync = self._role.epoch, len(self._sync.in_sync(self._clock_s()))
            store = self._store
            required = self._rules.required_in_sync(self._files.members)
        not_enough = InSyncReplicasError(self._broker_name, in_sync, required) if in_sync < required else None
        has_copies = partial(self._has_copies_in, led)
        return append(store, ReplicaAcks(not_enough, has_copies, self._rules.slave_timeout_s))

    def _has_copies_in(self, epoch: int, end_offset: int) -> bool:
        """Return True if enough replicas have the log up to `end_offset`. Raises ServiceNotAvailableError unless this
        replica is still the master of `epoch`."""
        with self._changed:
            if self._role.epoch != epoch or not self._may_acknowledge or self._closed:
                raise ServiceNotAvailableError(
                    f"replica {self._replica} of broker group {self._broker_name!r} was replaced as master while "
                    "messages waited for their copies; these messages may or may not stay stored"
                )
            return self._has_copies(end_offset)

    def _has_copies(self, end_offset: int) -> bool:
        assert self._sync is not None
        if self._rules.all_ack_in_sync_state_set and self._sync.confirm_offset < end_offset:
            return False
        return self._sync.copies(end_offset) >= self._rules.in_sync_replicas

    def history(self, epoch: int) -> EpochHistory:
        """Return the epochs of this master's log, for a follower. Raises NotMasterError unless this replica is the
        master of `epoch`."""
        with self._changed:
            self._role.check_asked(epoch)
            return EpochHistory(self._epochs.entries, self._store.log.min_offset, self._given_end)

    @property
    def _given_end(self) -> int:
        """The end offset of the part of this master's log that followers may read."""
        return self._store.gate.stored_offset if self._rules.fixed_roles else self._store.log.committed_offset

    def note_request(self, request: LogRequest) -> None:
        """Record which part of the log a follower has on its disk. Raises NotMasterError unless this replica is the
        master of the request's epoch."""
        with self._changed:
            self._role.check_asked(request.epoch)
            assert self._sync is not None
            self._sync.asked(
                request.follower, request.store_id, request.acked_offset, self._clock_s(), learner=request.learner
            )
            self._show_confirmed()

    def log_beyond(self, epoch: int, physical_offset: int) -> int:
        """Return the number of bytes of the log after `physical_offset` that followers may read. Raises NotMasterError
        unless this replica is the master of `epoch`."""
        with self._changed:
            self._role.check_asked(epoch)
            return self._given_end - physical_offset

    def chunk_at(self, epoch: int, physical_offset: int, max_bytes: int) -> LogChunk:
        """Return the chunk of the log at `physical_offset`; at the end of the log, an empty chunk.

        Raises NotMasterError unless this replica is the master of `epoch`. Raises DataLossError if retention has
        deleted the bytes, and StoreCorruptError for damaged bytes that another replica may still repair.
        """
        with self._changed:
            self._role.check_asked(epoch)
            assert self._sync is not None
            entry = self._epochs.entry_at(physical_offset)
            following = [one.start_offset for one in self._epochs.entries if one.start_offset > physical_offset]
            end, confirm = self._given_end, self._sync.confirm_offset
        chunks, limit, hole = self._store.chunks, min([end, *following]), None
        damaged = chunks.hole_at(physical_offset) if physical_offset < limit else None
        if damaged is None:
            data = chunks.read_chunk(physical_offset, max_bytes, limit)
        else:
            self._require_unmendable(damaged)
            data, hole = chunks.read_hole(physical_offset, limit, max_bytes)
        return LogChunk(physical_offset, data, entry, confirm, end, hole)

    def _require_unmendable(self, hole: Hole) -> None:
        """Raise StoreCorruptError if a replica may still be able to repair a hole (damaged range) of this master's log
        (HoleReports)."""
        with self._changed:
            assert self._sync is not None
            now_s = self._clock_s()
            may_have = self._sync.sync_state_set.members | self._sync.in_sync(now_s)
            reason = self._hole_reports.reason_to_wait(hole.offset, may_have, now_s)
        if reason:
            raise StoreCorruptError(
                f"the {hole.size} bytes at physical offset {hole.offset} in the log of replica {self._replica} of "
                f"broker group {self._broker_name!r} are damaged: {hole.reason}; the damaged bytes are not copied "
                f"yet, because {reason}"
            )
