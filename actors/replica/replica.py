"""One replica of a broker group of several: a store that leads, follows, or is fenced.

What a replica does with its store in a role belongs here; the decisions about roles and copies are in
actors.core.replica. Free of Ray: `actors.replica.storage_actor` is the actor around it.

    master     append ──┬─▶ flush ──────────────────────────────────────▶ both are there ──▶ acknowledge
                        └─▶ chunks for the followers, who flush them and say so ──┘
    slave      align with the master's epochs (cut what differs) ──▶ append its chunks, ask for more

Followers get what the master has written, so that all disks flush at the same time. So after a power cut a master may
have less than its followers. That is safe for three reasons: a message is acknowledged and shown only when the master's
own disk has it, too; a restarted master never continues to lead in its epoch (actors.core.replica.role), and a follower
cuts what the next epoch's master does not have; and in one epoch no follower cuts anything, because it never has more
than its master gives. With fixed roles followers get only what is on the master's disk: there a copy that is longer
than the master's log shows that its disk has lost messages (placement.election).

A replica whose disk has failed stops leading, whatever its lease: it acknowledges and shows nothing, answers appends
with NotMasterError, and reports the failure, so that the Controller elects another replica at once. Its process is
restarted soon (actors.replica.failed_disk): then only what recovery reads from the disk counts.

Consumers see messages up to the confirm offset, which every member of the sync-state set has
(actors.core.replica.sync_state). Between a start and the first order, the replica is fenced: it neither appends nor
shows messages.

These survive a crash, on disk beside the store: the epochs and the highest confirm offset
(storage.replication.epoch_file), the directory's id and the newest sync-state set that it knows
(storage.replication.replica_files). An epoch is on disk before its master accepts the first append, and a confirm
offset before it is reported. A log that ends before that offset lacks acknowledged messages: the replica reports this,
and is elected only if no other replica has them. A replica also refuses to be cut below that offset by a master that
lacks acknowledged messages: it keeps its bytes, does not follow, and reports the reason.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from actors.core.replica.hole_reports import HoleReports
from actors.core.replica.orders import (
    Copied,
    Drain,
    Follow,
    Following,
    Lead,
    LogRequest,
    Order,
    Renew,
    ReplicaRole,
    ReplicaState,
)
from actors.core.replica.read_routing import ReadRouting
from actors.core.replica.role import ReplicaRoleState
from actors.core.replica.rules import ReplicaRules
from actors.core.replica.sync_state import MasterSyncState
from raymq.common.config.store import StoreSettings
from raymq.common.errors import (
    InSyncReplicasError,
    InvalidArgumentError,
    NotMasterError,
    RaymqError,
    ServiceNotAvailableError,
    StoreCorruptError,
    StoreError,
    StoreNotWritableError,
)
from raymq.common.names import StorageName
from raymq.common.protocol.store import (
    AppendResult,
    FetchRequest,
    FetchResult,
    Hole,
    QueueEnds,
    QueuePosition,
    ReadsInPlace,
)
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest
from raymq.records.format.encode import EncodedBatch
from storage.append.durability import ReplicaAcks, StartedAppend
from storage.files.config_files import ConfigFiles
from storage.files.disk_usage import is_want_of_space
from storage.index.mended_keys import MENDED_KEYS_FILE
from storage.log.holes import HOLES_FILE
from storage.message_store import MessageStore
from storage.read.long_polls import LongPolls
from storage.replication.epoch_file import ConfirmFile, EpochFile
from storage.replication.epochs import (
    ConfirmFloor,
    EpochEntry,
    EpochHistory,
    LogChunk,
    SyncStateSet,
    common_end,
    first_lost_offset,
)
from storage.replication.log_chunks import truncate_log
from storage.replication.replica_files import ReplicaFiles
from storage.running_flags import RunningFlag

_REFILLED: Final = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "compaction", "index")

ORDER_WAIT_S: Final = 0.3
UNFLUSHED_MAX_BYTES: Final = 16 << 20
"""The most bytes that a slave far behind may have written and not flushed."""
MASTER_SILENT_AFTER_S: Final = 4.0
"""A slave that gets no chunk for this time is cut off from its master, which would have sent two empty ones."""

LOGGED_TOPICS_MAX: Final = 10
"""The most deleted topics that one log message names."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Replica:
    """One of a broker group's stores. Thread-safe.

    `open_store` opens the store in `settings` with a callback for each flush, which gets the end offset on disk.
    """

    def __init__(
        self,
        broker_name: str,
        replica: int,
        settings: StoreSettings,
        rules: ReplicaRules,
        open_store: Callable[[Callable[[int], None]], MessageStore],
        *,
        learner: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker_name, self._replica, self._learner = broker_name, replica, learner
        self._settings, self._rules = settings, rules
        self._open_store, self._clock_s = open_store, clock_s
        # Orders and what comes from a master are carried out one at a time; `_changed` is held for moments only, and
        # never around a call that takes the store's append lock, under which the store calls `_on_stored`.
        self._order_lock = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        self._notified_offset = -1
        self._on_progress: list[Callable[[], None]] = []
        self._on_log: Callable[[], None] | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._readers = 0
        """The number of calls that wait for the log to grow."""
        self._store = self._open()
        try:
            self._epochs = EpochFile(settings.store_path_root_dir)
            self._files = ReplicaFiles(ConfigFiles(settings.store_path_root_dir))
            self._confirm_file = ConfirmFile(settings.store_path_root_dir)
        except BaseException:
            self._store.close()  # otherwise no process could open the directory again
            raise
        self._confirm_turn = threading.Lock()
        """Held around a write of the confirm file, during which `_changed` is free."""
        self._confirmed = ConfirmFloor(0, 0)
        """The highest confirm offset that this process has received while it led or followed, and the epoch then."""
        self._caught_up = False
        """True once this process has led, or has had everything that its master had confirmed."""
        self._shared_holes: frozenset[int] = frozenset()
        """The offsets of the damaged ranges that this replica's master could not mend."""
        self._hole_reports = HoleReports(replica, 0.0)
        """The reports of the other replicas about this master's damaged ranges."""
        self._refusal = ""
        """The reason why this replica does not follow its master; empty if there is none."""
        self._role = ReplicaRoleState(broker_name, replica, self._last_epoch())
        self._sync: MasterSyncState | None = None
        self._shown_from = self._store.stored_offset
        self._aligned = False
        self._last_chunk_s = -math.inf
        self._closed = False

    def _open(self) -> MessageStore:
        store = self._open_store(self._on_stored)
        store.fence(f"replica {self._replica} of {self._broker_name} is not its master")
        for callback in self._on_progress:
            store.add_progress_listener(callback)
        store.call_on_write(self._note_log)
        store.call_on_failure(self._on_failure)
        return store

    def call_on_failure(self, callback: Callable[[], None]) -> None:
        """Register `callback`, called by any thread once the disk has failed; at once if it has.

        It must not block, and may be called more than once.
        """
        self._on_failure = callback
        self._store.call_on_failure(callback)

    @property
    def disk_failure(self) -> str:
        """The failure of the disk; empty while the disk works, and again after the store is reopened."""
        return self._store.failure

    @property
    def _may_acknowledge(self) -> bool:
        """True if this replica leads, with a lease, and its disk works. False after a report with `failed`."""
        return self._role.leads(self._clock_s()) and not self._store.failure

    @property
    def store(self) -> MessageStore:
        """The store, for reads. ServiceNotAvailableError while this replica may show no messages."""
        with self._changed:
            shows = self._role.role is ReplicaRole.MASTER or (self._aligned and self._shown_from < 0)
            if self._closed or not shows:
                raise ServiceNotAvailableError(
                    f"replica {self._replica} of {self._broker_name} has no master yet; see `raymq status`"
                )
            return self._store

    def change_slave_timeout(self, timeout_s: float) -> None:
        """Set how long appends wait for their copies (slave_timeout_ms, a live setting)."""
        self._rules = replace(self._rules, slave_timeout_s=timeout_s)

    @property
    def any_store(self) -> MessageStore:
        """Return the store, for its status and its config files, in any role."""
        return self._store

    def fetch(self, requests: Sequence[FetchRequest], *, max_bytes: int, wait_s: float) -> list[FetchResult]:
        """The records of several queues, and the storage actor to read each from next (MessageStore.fetch).

        NotMasterError of a slave, unless slave_read_enable is on.
        """
        with self._changed:
            routing, store = self._read_routing(), self.store
        results = store.fetch(requests, max_bytes=max_bytes, wait_s=wait_s, patient=not routing.is_master)
        if not routing.others:  # without other storage actors, no answer depends on what is in memory
            return results
        return [
            routing.route(
                request, result, in_memory=store.in_memory(request.topic, request.queue_id, result.next_offset)
            )
            for request, result in zip(requests, results, strict=True)
        ]

    def count_reads(self, reads: ReadsInPlace) -> None:
        """Count what clients have read in the mapped files among the store's gets."""
        self.store.count_reads(reads)

    def ends(self, positions: Sequence[QueuePosition]) -> tuple[list[QueueEnds], bool]:
        """The ends of several queues, the storage actor to read each from, and if there is something to read
        (MessageStore.ends). Errors as of `fetch`."""
        with self._changed:
            routing, store = self._read_routing(), self.store
        ends, news = store.ends(positions, patient=not routing.is_master)
        if not routing.others:
            return ends, news
        routed = []
        for (topic, queue_id, offset), (first, end, _) in zip(positions, ends, strict=True):
            in_memory = store.in_memory(topic, queue_id, offset)
            routed.append(QueueEnds(first, end, routing.pull_from(queue_id, offset, first, end, in_memory=in_memory)))
        return routed, news

    @property
    def polls(self) -> LongPolls:
        """The waiting fetches of the store, by queue; errors as of `store`."""
        return self.store.polls

    def _read_routing(self) -> ReadRouting:
        if self._sync is not None:
            slaves = self._sync.in_sync(self._clock_s()) - {self._replica} if self._rules.slave_read_enable else ()
            return ReadRouting(True, [str(StorageName(self._broker_name, slave)) for slave in sorted(slaves)])
        if self._role.role is ReplicaRole.SLAVE and not self._rules.slave_read_enable:
            raise NotMasterError(self._broker_name, self._role.epoch)
        master = self._role.master
        if master is None or self._clock_s() - self._last_chunk_s >= MASTER_SILENT_AFTER_S:
            return ReadRouting(False)
        return ReadRouting(False, [str(StorageName(self._broker_name, master))])

    def require_master(self) -> None:
        """NotMasterError unless this replica leads, or did before its lease ended."""
        with self._changed:
            if self._role.role is not ReplicaRole.MASTER:
                raise NotMasterError(self._broker_name, self._role.epoch)

    def account(self) -> ReplicaState:
        """Return this replica's state report for the Controller. The confirm offset in it is on disk on return."""
        self._remember_confirmed()
        with self._changed:
            end = self._store.stored_offset
            return ReplicaState(
                replica=self._replica,
                store_id=self._files.store_id,
                incarnation=self._files.incarnation,
                clock_s=self._clock_s(),
                role=self._role.role,
                epoch=self._role.epoch,
                master=self._role.master,
                log_epoch=self._epoch_at(end),
                end_offset=end,
                confirm_offset=min(self._confirm_offset(), self._confirm_file.floor.offset),
                sync_state_set=self._files.sync_state_set,
                draining=self._role.draining,
                proposal=self._proposal(),
                lags={} if self._sync is None else self._sync.lags(self._clock_s()),
                in_sync=frozenset() if self._sync is None else self._sync.in_sync(self._clock_s()),
                failed=self._store.failure,
                confirm_floor=self._confirm_file.floor.offset,
                hole_bytes=self._hole_bytes(),
                caught_up=self._caught_up,
                refusal=self._refusal,
            )

    def _remember_confirmed(self) -> None:
        """Write the highest confirm offset to disk, if it has moved.

        If the disk fails, the report has the failure and the previous offset. On a full disk, which has not failed, the
        report also has the previous offset.
        """
        with self._confirm_turn:
            with self._changed:
                confirmed = self._confirmed
            try:
                self._confirm_file.raise_to(*confirmed)
            except OSError as error:
                if not is_want_of_space(error):
                    self._store.fail(error)

    def _give_up_confirmed(self, epoch: int, physical_offset: int) -> None:
        """Forget that messages from an offset on were confirmed: in `epoch` the group continues without them.
        OSError.
        """
        with self._confirm_turn:
            with self._changed:
                self._confirmed = ConfirmFloor(epoch, physical_offset)
            self._confirm_file.reset(self._confirmed)

    def _note_confirmed(self, physical_offset: int) -> None:
        """Record the confirm offset of the epoch in which this replica leads or follows."""
        if physical_offset > self._confirmed.offset:
            self._confirmed = ConfirmFloor(self._role.epoch, physical_offset)

    def _proposal(self) -> SyncStateSet | None:
        if self._sync is None or not self._may_acknowledge:
            return None
        return self._sync.propose(self._clock_s())

    # Orders of the Controller

    def obey(self, order: Order | None, newest: SyncStateSet | None) -> ReplicaState:
        """Carry out an order, unless it is outdated, and store the set. Returns the state report afterwards.

        While the log is being aligned, which may take long, Lead and Follow are left out: the Controller repeats them.
        """
        try:
            with self._changed:
                if newest is not None:
                    self._files.note_set(newest)
            self._carry_out(order)
        except NotMasterError as error:
            logger.info("%s replica %d does not carry out %s: %s", self._broker_name, self._replica, order, error)
        except OSError as error:
            # A set or an epoch is not on disk: report that this replica has failed.
            self._refuse_without_room(error)
            self._store.fail(error)
        return self.account()

    def _refuse_without_room(self, error: OSError) -> None:
        """Raise StoreNotWritableError if `error` means a full disk, which has not failed."""
        if is_want_of_space(error):
            root = self._settings.store_path_root_dir
            raise StoreNotWritableError(f"the disk of {root} has no room for a small file: {error}") from error

    def _carry_out(self, order: Order | None) -> None:
        if isinstance(order, (Lead, Follow)):
            if not self._order_lock.acquire(timeout=ORDER_WAIT_S):
                return
            try:
                if isinstance(order, Lead):
                    self._lead(order)
                else:
                    self._follow(order)
            finally:
                self._order_lock.release()
        elif isinstance(order, Renew):
            with self._changed:
                self._role.renew(order.sync_state_set.epoch, order.clock_s + self._rules.lease_s)
                if self._sync is not None:
                    self._sync.silent(order.dead)
                    self._sync.decided(order.sync_state_set)
                    self._files.note_set(self._sync.sync_state_set)
                self._show_confirmed()
                self._store.notify_progress()  # the lease or the set may have changed
        elif isinstance(order, Drain):
            with self._changed:
                self._role.drain(order.epoch)

    def _lead(self, order: Lead) -> None:
        """Become master. On return the epoch is on disk, and appends are accepted."""
        first = order.sync_state_set
        elected = first.stores.get(self._replica), order.incarnation
        if elected != (self._files.store_id, self._files.incarnation):
            raise NotMasterError(self._broker_name, self._role.epoch)
        if first.epoch > self._role.epoch:
            end = self._store.flush_all()
            floor = self._confirm_file.floor.offset
            if end < floor:
                logger.error(
                    "%s replica %d leads in epoch %d without the acknowledged messages from %d to %d, which no replica "
                    "that answered has",
                    *(self._broker_name, self._replica, first.epoch, end, floor),
                )
                self._give_up_confirmed(first.epoch, end)
            self._epochs.truncate_from(end)
            self._begin_epoch(first.epoch, end)
        with self._changed:
            self._files.note_set(first)
            if not self._role.lead(first.epoch, order.clock_s + self._rules.lease_s):
                return
            end = self._store.stored_offset
            self._caught_up, self._refusal = True, ""
            self._note_confirmed(end)
            self._sync = self._rules.begin(self._replica, first, end, self._clock_s())
            self._hole_reports = HoleReports(self._replica, self._clock_s(), self._rules.hole_wait_s)
            self._store.show(end)
            self._notified_offset = -1
            self._wake_all()
        logger.warning("%s replica %d leads epoch %d from %d", self._broker_name, self._replica, first.epoch, end)
        self._store.flags.clear_flag(RunningFlag.FENCED)
        self._store.schedule.start_delivery()

    def _follow(self, order: Follow) -> None:
        """Become slave. On return only chunks of the master are appended."""
        with self._changed:
            if not self._role.follow(order.epoch, order.master):
                return
            self._sync, self._aligned, self._last_chunk_s, self._refusal = None, False, -math.inf, ""
            self._shared_holes = frozenset()
            self._wake_all()
        logger.warning(
            "%s replica %d follows %d in epoch %d", self._broker_name, self._replica, order.master, order.epoch
        )
        self._store.schedule.stop_delivery()
        self._store.fence(f"replica {self._replica} of {self._broker_name} is not its master")

    # The master's side

    def append(self, batches: Sequence[EncodedBatch], epoch: int | None = None) -> list[AppendResult]:
        """Store batches as MessageStore.append does, and wait until as many replicas have them as the rules require.

        If none of them waits (wait_store_msg_ok), the number of replicas in sync does not matter. NotMasterError and
        InSyncReplicasError are raised before anything is written. The status is FLUSH_SLAVE_TIMEOUT if other replicas
        were too slow. ServiceNotAvailableError: this replica was replaced during the wait; it is unknown whether the
        batches stay stored, and sending them again is safe.
        """
        return self._append(epoch, lambda store, acks: store.append(batches, acks=acks))

    def start_append(self, batches: Sequence[EncodedBatch], epoch: int | None = None) -> StartedAppend:
        """Start an append as `append` does, without waiting (MessageStore.start_append). Arriving copies are
        progress.
        """
        return self._append(epoch, lambda store, acks: store.start_append(batches, acks=acks))

    def start_end(self, end: EndTransactionRequest, *, require_topic: Callable[[str], None]) -> StartedAppend:
        """End a transaction (TransactionService.start_end) without waiting. Errors as of `append`, too."""
        return self._append(
            None, lambda store, acks: store.transactions.start_end(end, require_topic=require_topic, acks=acks)
        )

    def end_transaction(self, end: EndTransactionRequest, *, require_topic: Callable[[str], None]) -> EndResult:
        """End a transaction as `start_end` does, and wait."""
        return self._append(
            None, lambda store, acks: store.transactions.end(end, require_topic=require_topic, acks=acks)
        )

    def _append(self, epoch: int | None, append: Callable[[MessageStore, ReplicaAcks], T]) -> T:
        with self._changed:
            self._role.check_append(epoch, self._clock_s())
            if self._store.failure:
                # Its lease is given up: another replica leads soon, and takes this append.
                raise NotMasterError(self._broker_name, self._role.epoch)
            assert self._sync is not None
            led, in_sync = self._role.epoch, len(self._sync.in_sync(self._clock_s()))
            store = self._store
            required = self._rules.required_in_sync
        not_enough = InSyncReplicasError(self._broker_name, in_sync, required) if in_sync < required else None
        has_copies = partial(self._has_copies_in, led)
        return append(store, ReplicaAcks(not_enough, has_copies, self._rules.slave_timeout_s))

    def add_progress_listener(self, callback: Callable[[], None]) -> None:
        """Register `callback`, called when started appends may have become settled
        (MessageStore.add_progress_listener).
        """
        self._on_progress.append(callback)
        self._store.add_progress_listener(callback)

    def _has_copies_in(self, epoch: int, end_offset: int) -> bool:
        """True if enough replicas have the log before `end_offset`. ServiceNotAvailableError unless this one still
        leads `epoch`."""
        with self._changed:
            if not self._leads(epoch):
                raise ServiceNotAvailableError(
                    f"replica {self._replica} of {self._broker_name} was replaced as master while messages waited for "
                    "their copies; it is unknown whether they stay stored"
                )
            return self._has_copies(end_offset)

    def _leads(self, epoch: int) -> bool:
        return self._role.epoch == epoch and self._may_acknowledge and not self._closed

    def _has_copies(self, end_offset: int) -> bool:
        assert self._sync is not None
        if self._rules.all_ack_in_sync_state_set and self._sync.confirm_offset < end_offset:
            return False
        return self._sync.copies(end_offset) >= self._rules.in_sync_replicas

    def history(self, epoch: int) -> EpochHistory:
        """The epochs of this master's log, for a follower. NotMasterError unless it leads `epoch`."""
        with self._changed:
            self._role.check_asked(epoch)
            return EpochHistory(self._epochs.entries, self._store.min_offset, self._given_end)

    @property
    def _given_end(self) -> int:
        """Return the end of what followers get."""
        return self._store.stored_offset if self._rules.fixed_roles else self._store.written_offset

    def read_log(self, request: LogRequest, max_bytes: int, wait_s: float) -> LogChunk:
        """Return the chunk of the log that a follower requests, after waiting up to `wait_s` for records.

        NotMasterError unless this replica leads the request's epoch; DataLossError for what retention has deleted;
        StoreCorruptError for damaged bytes that a replica may still mend.
        """
        self.note_request(request)
        epoch, physical_offset = request.epoch, request.next_offset
        with self._changed:
            self._readers += 1
            try:
                self._changed.wait_for(
                    lambda: self._role.epoch != epoch or self._given_end > physical_offset or self._closed, wait_s
                )
            finally:
                self._readers -= 1
        return self.chunk_at(epoch, physical_offset, max_bytes)

    def note_request(self, request: LogRequest) -> None:
        """Record what a follower has on its disk. NotMasterError unless this replica leads the request's epoch."""
        with self._changed:
            self._role.check_asked(request.epoch)
            assert self._sync is not None
            self._sync.asked(
                request.follower, request.store_id, request.acked_offset, self._clock_s(), learner=request.learner
            )
            self._show_confirmed()

    def log_beyond(self, epoch: int, physical_offset: int) -> int:
        """Return the bytes of the log that a follower at an offset lacks. NotMasterError unless this replica leads
        `epoch`.
        """
        with self._changed:
            self._role.check_asked(epoch)
            return self._given_end - physical_offset

    def chunk_at(self, epoch: int, physical_offset: int, max_bytes: int) -> LogChunk:
        """The chunk of the log at an offset, empty at its end. Errors as of `read_log`."""
        with self._changed:
            self._role.check_asked(epoch)
            assert self._sync is not None
            entry = self._entry_at(physical_offset)
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
        """StoreCorruptError while a replica may still mend a hole of this master (HoleReports)."""
        with self._changed:
            assert self._sync is not None
            now_s = self._clock_s()
            may_have = self._sync.sync_state_set.members | self._sync.in_sync(now_s)
            reason = self._hole_reports.reason_to_wait(hole.offset, may_have, now_s)
        if reason:
            raise StoreCorruptError(
                f"the {hole.size} bytes at {hole.offset} in the log of replica {self._replica} of {self._broker_name} "
                f"are damaged: {hole.reason}; they are not copied yet, because {reason}"
            )

    def call_on_log(self, callback: Callable[[], None]) -> None:
        """Register `callback`, called by any thread when the log may have grown. It must not block.

        A change of the role is progress (`add_progress_listener`).
        """
        self._on_log = callback

    def _note_log(self) -> None:
        """Note that the log may have grown. Called by any thread, under no lock but `_changed`."""
        if self._on_log is not None:
            self._on_log()
        if self._readers:
            with self._changed:
                self._changed.notify_all()

    def _on_stored(self, end_offset: int) -> None:
        """Note that this disk has everything before `end_offset`. Called by the store's flush thread."""
        with self._changed:
            if self._sync is not None:
                self._sync.flushed(end_offset, self._clock_s())
                self._show_confirmed()
            self._note_log()

    def _show_confirmed(self) -> None:
        """Show consumers the messages that have their copies, and wake the appends that wait for copies."""
        if self._sync is None:
            return
        if self._may_acknowledge:
            self._note_confirmed(self._sync.confirm_offset)
            self._store.show(self._sync.confirm_offset)
        if not self._rules.all_ack_in_sync_state_set or self._sync.confirm_offset > self._notified_offset:
            self._notified_offset = self._sync.confirm_offset
            self._store.notify_progress()

    def _wake_all(self) -> None:
        """Wake all waiting calls: the role has changed."""
        self._changed.notify_all()
        self._store.notify_progress()
        self._store.polls.wake_all()

    # The follower's side

    def following(self, wait_s: float) -> Following | None:
        """Return the master that this replica follows, and the next offset to read; None if there is none within
        `wait_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._role.role is ReplicaRole.SLAVE or self._closed, wait_s)
            if self._role.role is not ReplicaRole.SLAVE or self._role.master is None:
                return None
            position = self._store.stored_offset if self._aligned else None
            return Following(self._role.master, self._role.epoch, self._files.store_id, position, self._learner)

    def align(self, epoch: int, master: EpochHistory) -> int:
        """Cut the end that differs from the master's log. Returns the next offset to read.

        NotMasterError unless this replica follows in `epoch`. StoreCorruptError: the master lacks acknowledged messages
        that would be cut here; nothing has changed.

        If the two logs have nothing in common, this store is emptied and begins where the master's log does.
        """
        with self._order_lock, self._failing_on_disk_errors():
            self._role.check_chunk(epoch)
            if not self._aligned:
                end = self._store.flush_all()
                common = common_end(self._epochs.entries, end, master.entries, master.end_offset)
                self._check_confirmed(epoch, end, common or 0, master)
                if common is None and (end or master.min_offset):
                    self._refill_from(master.min_offset)
                elif common is not None and common < end:
                    self._reopen(partial(self._cut, common))
                else:
                    # An epoch that this replica began, and wrote nothing in, is not in the master's history.
                    self._epochs.truncate_from(end)
                with self._changed:
                    self._aligned, self._shown_from, self._refusal = True, self._store.stored_offset, ""
            return self._store.stored_offset

    def _check_confirmed(self, epoch: int, end: int, common: int, master: EpochHistory) -> None:
        """Refuse to cut this log, which ends at `end`, to the `common` part if the master lacks confirmed messages.

        If this log lacks them, too, or the settings allow losing them, they are given up: the group continues without
        them.
        """
        floor = self._confirm_file.floor
        lost_from = first_lost_offset(floor, master.entries, master.end_offset)
        if lost_from is None:
            return
        kept = min(end, floor.offset)
        if common < kept and not self._rules.may_lose_confirmed:
            self._refusal = (
                f"replica {self._replica} of {self._broker_name} does not follow replica {self._role.master}, which "
                f"lacks acknowledged messages: everything before {floor.offset} was confirmed, and its log goes on "
                f"from {lost_from} without them. Nothing was cut here. See docs/cluster.md, 'Messages that only one "
                "replica has'"
            )
            logger.error("%s", self._refusal)
            raise StoreCorruptError(self._refusal)
        logger.error(
            "%s replica %d gives up the acknowledged messages from %d to %d, which its master lacks; %d bytes of them "
            "were here",
            *(self._broker_name, self._replica, lost_from, floor.offset, max(kept - common, 0)),
        )
        self._give_up_confirmed(epoch, lost_from)

    def _cut(self, physical_offset: int) -> None:
        cut_bytes = truncate_log(self._settings, physical_offset)
        self._epochs.truncate_from(physical_offset)
        logger.warning("%s replica %d cut %d bytes at %d", self._broker_name, self._replica, cut_bytes, physical_offset)

    def _refill_from(self, physical_offset: int) -> None:
        known = self._files.sync_state_set
        if known is not None and known.stores.get(self._replica) == self._files.store_id and self._store.stored_offset:
            raise StoreCorruptError(
                f"replica {self._replica} of {self._broker_name} is in its group's sync-state set and has nothing in "
                "common with its master: neither may be emptied; keep both directories and look at them"
            )
        logger.warning("%s replica %d is filled anew from %d", self._broker_name, self._replica, physical_offset)
        self._reopen(self._empty)
        self._store.chunks.begin_at(physical_offset)

    def _empty(self) -> None:
        root = self._settings.store_path_root_dir
        for directory in (*self._settings.commit_log_directories, *(root / name for name in _REFILLED)):
            shutil.rmtree(directory, ignore_errors=True)
        (root / "dedup").unlink(missing_ok=True)
        (root / "checkpoint").unlink(missing_ok=True)
        (root / HOLES_FILE).unlink(missing_ok=True)
        (root / MENDED_KEYS_FILE).unlink(missing_ok=True)
        self._epochs.truncate_from(0)

    def _reopen(self, change: Callable[[], None]) -> None:
        closed = self._store
        closed.close()
        try:
            change()
            self._store = self._open()
        except (OSError, StoreError) as error:
            # There is no open store now: only a new process begins again with what is on disk.
            closed.fail(error)
            raise

    @contextmanager
    def _failing_on_disk_errors(self) -> Iterator[None]:
        """Record a failure of the disk if a file beside the log cannot be written in the block.

        ServiceNotAvailableError: the disk failed. StoreNotWritableError: the disk has no space.
        """
        try:
            yield
        except OSError as error:
            if isinstance(error, RaymqError):
                raise  # RequestTimeoutError is an OSError by way of TimeoutError
            self._refuse_without_room(error)
            self._store.fail(error)
            raise ServiceNotAvailableError(
                f"replica {self._replica} of {self._broker_name} cannot follow: {self._store.failure}"
            ) from error

    def append_log(self, epoch: int, chunk: LogChunk) -> Copied:
        """Append a chunk of the master's log.

        On return the chunk is on disk if it reached the master's end; otherwise its flush continues while the next
        chunk is read.

        NotMasterError unless it follows in `epoch`. InvalidArgumentError: the chunk does not continue this log; nothing
        is written. ServiceNotAvailableError: this disk is too slow.
        """
        with self._order_lock, self._failing_on_disk_errors():
            more = chunk.physical_offset + len(chunk.data) < chunk.end_offset
            wait = not more or self._store.end_offset - self._store.stored_offset >= UNFLUSHED_MAX_BYTES
            if not self._append_chunk(epoch, chunk, wait=wait) and wait:
                self._store.flush_all()
            self._show_chunk(chunk)
            return self._copied(chunk)

    def start_append_log(self, epoch: int, chunk: LogChunk) -> Copied:
        """Append a chunk as `append_log` does, without waiting: the chunk is on disk once `copied` returns its end.

        ServiceNotAvailableError: this replica is changing its role, or its log; nothing is written.
        """
        if not self._order_lock.acquire(blocking=False):
            raise ServiceNotAvailableError(
                f"replica {self._replica} of {self._broker_name} changes its role now: nothing was written, ask it "
                "again whom it follows"
            )
        try:
            with self._failing_on_disk_errors():
                self._append_chunk(epoch, chunk, wait=False)
                self._show_chunk(chunk)
                return self._copied(chunk)
        finally:
            self._order_lock.release()

    def _copied(self, chunk: LogChunk) -> Copied:
        """Build the answer to an appended chunk."""
        return Copied(self._store.chunks.append_offset, self._store.stored_offset, len(chunk.data))

    def copied(self, epoch: int, end_offset: int) -> int | None:
        """Return the end of the log on disk, if everything before `end_offset` is on disk; else None.

        NotMasterError unless it follows in `epoch`. StoreFailedError: the disk failed.
        """
        with self._changed:
            self._role.check_chunk(epoch)
            store = self._store
        return store.stored_offset if store.chunks.is_durable(end_offset) else None

    def _append_chunk(self, epoch: int, chunk: LogChunk, *, wait: bool) -> bool:
        """Append a chunk; errors as of `append_log`. Returns True if it is on disk, or empty.

        Without `wait` the flush is only requested.
        """
        self._role.check_chunk(epoch)
        end = self._store.end_offset
        if not self._aligned or (chunk.hole is None and chunk.physical_offset != end):
            raise InvalidArgumentError(f"a chunk for {chunk.physical_offset} came to a log that ends at {end}")
        if not chunk.data:
            return True
        if chunk.entry is not None and chunk.entry.epoch > self._last_epoch():
            self._begin_epoch(*chunk.entry)
        if chunk.hole is None:
            return self._store.chunks.append_chunk(chunk.physical_offset, chunk.data, wait=wait)
        self._store.chunks.append_hole(chunk.physical_offset, chunk.data, chunk.hole)
        if chunk.hole.left == 0:
            with self._changed:
                self._shared_holes |= {end}
        return False

    def _show_chunk(self, chunk: LogChunk) -> None:
        """Show consumers the messages that the chunk's master has confirmed."""
        with self._changed:
            self._last_chunk_s = self._clock_s()
            if chunk.confirm_offset >= self._shown_from:
                self._shown_from = -1
            stored = self._store.stored_offset
            self._note_confirmed(min(chunk.confirm_offset, stored))
            self._caught_up = self._caught_up or stored >= chunk.confirm_offset
            self._store.show(chunk.confirm_offset)

    def delete_topics_before(self, existing: Collection[str], position: int) -> None:
        """As a slave, delete the queues of topics that the broker's state lacks (MessageStore.delete_topics_before).

        Any other replica does nothing.
        """
        with self._order_lock:
            if self._role.role is not ReplicaRole.SLAVE or not self._aligned:
                return
            gone = self._store.delete_topics_before(existing, position)
        if gone:
            logger.info(
                "%s replica %d deleted %d topics that its master has deleted: %s",
                *(self._broker_name, self._replica, len(gone), ", ".join(gone[:LOGGED_TOPICS_MAX])),
            )

    # Damage

    @property
    def holes(self) -> tuple[Hole, ...]:
        """The damaged ranges of this log, ascending."""
        return self._store.holes

    def _hole_bytes(self) -> int:
        """Return the damaged bytes that another replica may have; bytes that its own master lacks are not counted."""
        return sum(hole.size for hole in self._store.holes if hole.offset not in self._shared_holes)

    def read_part(self, epoch: int, physical_offset: int, size: int) -> tuple[int, bytes] | None:
        """Return the offset and bytes of the first intact records in a range of the log; None if there are none.

        For a replica whose log is damaged there (LogChunks.read_part). NotMasterError unless this log is that of the
        epoch's master.
        """
        with self._changed:
            self._check_same_log(epoch)
            store = self._store
        return store.chunks.read_part(physical_offset, size)

    def mend(self, epoch: int, physical_offset: int, data: bytes) -> None:
        """Replace damaged bytes by another replica's bytes. They are on disk when this returns.

        NotMasterError unless this log is that of the epoch's master; other errors as of MessageStore.mend.
        """
        with self._order_lock, self._failing_on_disk_errors():
            with self._changed:
                self._check_same_log(epoch)
                store = self._store
            store.mend(physical_offset, data)

    def note_lacking(self, epoch: int, replica: int, physical_offset: int) -> None:
        """Record that another replica has no intact bytes for the hole at an offset.

        If the other replica is its master, a slave records that both lack these bytes. A master sends its damaged bytes
        to slaves once every replica in sync has reported the hole. NotMasterError unless this log is that of the
        epoch's master.
        """
        with self._order_lock, self._changed:
            self._check_same_log(epoch)
            if self._role.role is ReplicaRole.MASTER:
                self._hole_reports.note_lacking(replica, physical_offset)
            elif replica == self._role.master:
                self._shared_holes |= {physical_offset}

    def _check_same_log(self, epoch: int) -> None:
        """Raise NotMasterError unless this replica leads in `epoch`, or follows in it with an aligned log."""
        if self._role.role is ReplicaRole.SLAVE and self._aligned:
            self._role.check_chunk(epoch)
        else:
            self._role.check_asked(epoch)

    # Both

    def close(self) -> None:
        """Close the store cleanly. Idempotent."""
        with self._changed:
            self._closed = True
            self._wake_all()
        self._remember_confirmed()
        with self._order_lock:
            self._store.close()

    def _confirm_offset(self) -> int:
        return self._store.visible_offset if self._sync is None else self._sync.confirm_offset

    def _begin_epoch(self, epoch: int, start_offset: int) -> None:
        """Write an epoch to the epoch file, and drop those whose records retention has deleted."""
        self._epochs.begin_epoch(epoch, start_offset)
        self._epochs.forget_before(self._store.min_offset - 1)

    def _last_epoch(self) -> int:
        return self._epochs.entries[-1].epoch if self._epochs.entries else 0

    def _entry_at(self, physical_offset: int) -> EpochEntry | None:
        return next((e for e in reversed(self._epochs.entries) if e.start_offset <= physical_offset), None)

    def _epoch_at(self, end_offset: int) -> int:
        """Return the epoch of the last record before `end_offset`; 0 if there is none, or it was stored without an
        epoch.
        """
        entry = self._entry_at(end_offset - 1)
        return 0 if entry is None else entry.epoch

    def status(self) -> dict[str, Any]:
        """Return role, epoch, set and lag, for `raymq status`."""
        account = self.account()
        newest = account.sync_state_set
        in_sync = account.in_sync or (newest.members if newest is not None else ())
        return {
            "replica": self._replica,
            "role": account.role.value,
            "epoch": account.epoch,
            "master": account.master,
            "in_sync": sorted(in_sync),
            "end_offset": account.end_offset,
            "confirm_offset": account.confirm_offset,
            "refusal": account.refusal,
            "damaged_bytes": sum(hole.size for hole in self.holes),
            "lag_bytes": {follower: lag.lag_bytes for follower, lag in account.lags.items()},
            "lag_s": {follower: lag.lag_s for follower, lag in account.lags.items()},
        }
