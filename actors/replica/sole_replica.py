"""The only replica of a broker group: a store that is always the master, and has no followers.

The lanes (direct socket connections) and the actor methods of a storage actor use a replica only through the methods of
this class. `actors.replica.replica` overrides the methods that differ in a group of several replicas. This module does
not use Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from actors.core.replica.read_routing import ReadRouting
from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.store import (
    REPORT_MAX,
    AppendResult,
    FetchRequest,
    FetchResult,
    Hole,
    QueueEnds,
    QueuePosition,
    ReadsInPlace,
    RepairState,
    StoreDamage,
)
from raymq.common.protocol.transactions import EndTransactionRequest
from raymq.records.format.encode import EncodedBatch
from storage.append.durability import ReplicaAcks, StartedAppend
from storage.message_store import MessageStore
from storage.read.long_polls import LongPolls
from storage.scrub.reported_damage import Verdict

ALONE: Final = ReadRouting(is_master=True)

_STATES: Final = {
    Verdict.INTACT: RepairState.INTACT,
    Verdict.CHECKING: RepairState.PENDING,
    Verdict.NONE: RepairState.LOST,
}

T = TypeVar("T")


class SoleReplica:
    """The replica of a broker group that has only one replica, with its store. The class of a replica with followers
    inherits from this class. Thread-safe."""

    has_followers = False

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    @property
    def any_store(self) -> MessageStore:
        """Return the open store, also if this replica is not the master. Used for calls that every replica answers, for
        example about status and config files."""
        return self._store

    @property
    def store(self) -> MessageStore:
        """The store, for reads. Raises ServiceNotAvailableError while consumers must not read from this
        replica."""
        return self._store

    @property
    def epoch(self) -> int:
        """The newest epoch that this replica has; 0 in a group of one replica."""
        return 0

    def require_master(self) -> None:
        """Raise NotMasterError unless this replica is the master. A master with an expired lease counts as the
        master."""

    def call_on_failure(self, callback: Callable[[], None]) -> None:
        """Register `callback`, which any thread calls when the disk has failed. If the disk has already failed, it is
        called at once.

        The callback must not block, and may be called more than once.
        """
        self._store.gate.call_on_failure(callback)

    def add_progress_listener(self, callback: Callable[[], None]) -> None:
        """Register `callback`. It is called each time that started appends may have completed.

        This is the case after a flush that appends wait for, after a failure of the disk, and after other replicas have
        received copies. Any thread may call the callback. It must not block.
        """
        self._store.gate.progress.add_listener(callback)

    def change_slave_timeout(self, timeout_s: float) -> None:
        """Set how long appends wait for their copies on other replicas (slave_timeout_ms, a live setting)."""

    def delete_topics_before(self, existing: Collection[str], position: int) -> None:
        """On a slave, delete the queues of topics that the broker's state does not have (StoreTopics.delete_before).

        On any other replica, do nothing.
        """

    # Methods that append messages

    def append(self, batches: Sequence[EncodedBatch], epoch: int | None = None) -> list[AppendResult]:
        """Store batches as AppendService.append does, and wait until as many replicas have the batches as the rules
        require.

        If no batch waits for storing (wait_store_msg_ok), the number of replicas in sync does not matter.
        NotMasterError and InSyncReplicasError are raised before anything is written. The status is FLUSH_SLAVE_TIMEOUT
        if other replicas were too slow. Raises ServiceNotAvailableError if another replica became the master during the
        wait. In that case it is unknown whether the batches stay stored, and sending them again is safe.
        """
        return self._append(epoch, lambda store, acks: store.append(batches, acks=acks))

    def start_append(self, batches: Sequence[EncodedBatch], epoch: int | None = None) -> StartedAppend:
        """Start an append, and return without waiting until it is durable (AppendService.start_append); see `append`.
        The progress listeners are called again each time that other replicas have received copies."""
        return self._append(epoch, lambda store, acks: store.start_append(batches, acks=acks))

    def start_end(self, end: EndTransactionRequest, *, require_topic: Callable[[str], None]) -> StartedAppend:
        """Start to end a transaction, and return without waiting until the end is durable
        (TransactionService.start_end). Also raises the errors of `append`."""
        return self._append(
            None, lambda store, acks: store.transactions.start_end(end, require_topic=require_topic, acks=acks)
        )

    def _append(self, epoch: int | None, append: Callable[[MessageStore, ReplicaAcks | None], T]) -> T:
        """Call `append` with the store and a ReplicaAcks object, which shows when the other replicas have copied the
        append. The object is None if there are no followers."""
        return append(self._store, None)

    # Methods that read messages

    def fetch(self, requests: Sequence[FetchRequest], *, max_bytes: int, wait_s: float) -> list[FetchResult]:
        """Return the records of several queues, and the storage actor from which to read each queue next
        (FetchService.fetch).

        Raises NotMasterError if this replica is a slave, unless slave_read_enable is on.
        """
        routing, store = self._read_routing()
        results = store.fetch(requests, max_bytes=max_bytes, wait_s=wait_s, patient=not routing.is_master)
        # If there are no other storage actors to read from, return now. Only the choice of another storage actor needs
        # to know if the next message is in memory.
        if not routing.others:
            return results
        return [
            routing.route(
                request, result, in_memory=store.queues.in_memory(request.topic, request.queue_id, result.next_offset)
            )
            for request, result in zip(requests, results, strict=True)
        ]

    def ends(self, positions: Sequence[QueuePosition]) -> tuple[list[QueueEnds], bool]:
        """Return the end offsets of several queues, each with the storage actor to read from, and whether a queue has
        messages to read (FetchService.ends). Raises the errors of `fetch`."""
        routing, store = self._read_routing()
        ends, news = store.fetches.ends(positions, patient=not routing.is_master)
        if not routing.others:
            return ends, news
        routed = []
        for (topic, queue_id, offset), (first, end, _) in zip(positions, ends, strict=True):
            in_memory = store.queues.in_memory(topic, queue_id, offset)
            routed.append(QueueEnds(first, end, routing.pull_from(queue_id, offset, first, end, in_memory=in_memory)))
        return routed, news

    def _read_routing(self) -> tuple[ReadRouting, MessageStore]:
        """Return the object that decides from which replica a reader reads (ReadRouting), and the store to read from.
        Raises the errors of `fetch`."""
        return ALONE, self._store

    def count_reads(self, reads: ReadsInPlace) -> None:
        """Add the messages that clients have read directly from memory-mapped files to the store's read statistics
        ("gets")."""
        self.store.stats.count_reads(reads.found, reads.messages)

    # Methods about damaged records

    def report_damage(self, positions: Sequence[QueuePosition]) -> list[RepairState]:
        """Note that a reader found the records at these queue positions damaged, and return what this replica can do
        for each of them. A repeated call returns the new states.

        The report is not believed: the store checks the records itself, later and in another thread (ReportedDamage).
        Does not wait for this check. Raises InvalidArgumentError for more than REPORT_MAX positions, and
        ServiceNotAvailableError if the store must not be read now.
        """
        if len(positions) > REPORT_MAX:
            raise InvalidArgumentError(f"one call can report {REPORT_MAX} damaged records, not {len(positions)}")
        states = []
        for verdict, hole in self.store.reported.report(positions):
            if hole is not None:
                states.append(RepairState.PENDING if self._may_be_mended(hole) else RepairState.LOST)
            else:
                states.append(_STATES[verdict])
        return states

    def damage(self) -> StoreDamage:
        """Return the damage of this replica's log, and which of it no replica in contact can repair."""
        store = self.any_store
        ranges = tuple(
            replace(one, lost=not self._may_be_mended(Hole(one.offset, one.size, one.reason)))
            for one in store.mender.damaged_ranges()
        )
        status = store.status()
        return StoreDamage(ranges, status.found_holes, status.mended_holes, status.mended_bytes)

    def _may_be_mended(self, hole: Hole) -> bool:
        """Return True if another replica may have intact bytes for a hole (damaged range) of this replica's log."""
        return False

    @property
    def polls(self) -> LongPolls:
        """The fetches that wait for new messages of this replica's store, by queue. Raises the same errors as `store`,
        for example if the store is not open."""
        return self.store.polls

    def status(self) -> dict[str, Any]:
        """Return the replication status for `raymq status`: role, epoch, sync-state set and lag. It is empty, because a
        sole replica has no followers."""
        return {}

    def close(self) -> None:
        """Close the store cleanly. Idempotent."""
        self._store.close()
