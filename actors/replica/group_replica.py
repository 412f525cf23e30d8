"""One replica of a group of several, in any role: its store, its readers, and the confirmed end of its log.

This module has the code that a master, a slave and a fenced replica share. It does not use Ray.
`actors.replica.replica` explains how replicas work together.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from actors.core.replica.hole_reports import HoleReports
from actors.core.replica.orders import (
    ReplicaRole,
)
from actors.core.replica.read_routing import ReadRouting
from actors.core.replica.role import ReplicaRoleState
from actors.core.replica.rules import ReplicaRules
from actors.core.replica.sync_state import MasterSyncState
from actors.replica.sole_replica import SoleReplica
from raymq.common.config.store import StoreSettings
from raymq.common.errors import (
    NotMasterError,
    RaymqError,
    ServiceNotAvailableError,
    StoreNotWritableError,
)
from raymq.common.names import StorageName
from storage.files.disk_usage import is_want_of_space
from storage.message_store import MessageStore
from storage.replication.epoch_file import ConfirmFile, EpochFile
from storage.replication.epochs import (
    ConfirmFloor,
)
from storage.replication.replica_files import ReplicaFiles

MASTER_SILENT_AFTER_S: Final = 4.0
"""If a slave has received no chunk for this many seconds, it counts as cut off from its master. The master would have
sent two empty chunks in this time."""


class GroupReplica(SoleReplica):
    """One replica of a broker group, whose role may change. Thread-safe.

    `open_store` opens the store described by `settings`. It gets a callback, which the store calls at each flush with
    the end offset on disk.
    """

    has_followers = True

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
        # `_order_lock`: while a thread holds it, no other thread executes an order or appends data from a master.
        # `_changed` is held only briefly. No thread may hold it around a call that takes the store's append lock: the
        # store holds this lock when it calls `_on_stored`, which takes `_changed`.
        self._order_lock = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        self._notified_offset = -1
        self._on_progress: list[Callable[[], None]] = []
        self._on_log: Callable[[], None] | None = None
        self._on_failure: Callable[[], None] = lambda: None
        """Callback that is called when the store's disk fails."""
        # The store calls `_on_stored` as soon as it is open, and also when it closes after an error below.
        self._sync: MasterSyncState | None = None
        super().__init__(self._open())
        try:
            config = self._store.config
            self._epochs = EpochFile(settings.store_path_root_dir, config)
            self._files = ReplicaFiles(config)
            self._confirm_file = ConfirmFile(settings.store_path_root_dir, config.damage)
        except BaseException:
            # close the store after an error: if it stayed open, no process could open its directory again
            self._store.close()
            raise
        self._confirm_turn = threading.Lock()
        """Lock that is held during a write of the confirm file. The condition `_changed` is not held during such a
        write, so that methods that need the condition do not wait for the disk."""
        self._confirmed = ConfirmFloor(0, 0)
        """The highest confirm offset that this process has received while it led or followed, and the epoch in which it
        received the offset."""
        self._caught_up = False
        """True if this process has been the master, or if its log has contained every message that its master had
        confirmed."""
        self._shared_holes: frozenset[int] = frozenset()
        """The offsets of the damaged log ranges (holes) that this replica's master could not repair."""
        self._hole_reports = HoleReports(replica, 0.0)
        """The reports of other replicas about damaged ranges in this replica's log; used while this replica is the
        master."""
        self._refusal = ""
        """The reason why this replica refuses to follow its master; empty if it does not refuse."""
        self._role = ReplicaRoleState(broker_name, replica, self._epochs.last_epoch)
        self._shown_from = self._store.gate.stored_offset
        self._aligned = False
        self._last_chunk_s = -math.inf
        self._closed = False

    def _open(self) -> MessageStore:
        store = self._open_store(self._on_stored)
        store.fence(f"replica {self._replica} of broker group {self._broker_name!r} is not the master")
        for callback in self._on_progress:
            store.gate.progress.add_listener(callback)
        store.gate.on_written = self._note_log
        store.gate.call_on_failure(self._on_failure)
        return store

    def call_on_failure(self, callback: Callable[[], None]) -> None:
        self._on_failure = callback
        super().call_on_failure(callback)

    @property
    def disk_failure(self) -> str:
        """The error with which the disk failed; empty while the disk works, and after the store is reopened."""
        return self._store.gate.failure

    @property
    def _may_acknowledge(self) -> bool:
        """True if this replica is the master, holds a lease, and its disk works. False after this replica has reported
        a disk failure."""
        return self._role.leads(self._clock_s()) and not self._store.gate.failure

    @property
    def store(self) -> MessageStore:
        with self._changed:
            shows = self._role.role is ReplicaRole.MASTER or (self._aligned and self._shown_from < 0)
            if self._closed or not shows:
                raise ServiceNotAvailableError(
                    f"replica {self._replica} of broker group {self._broker_name!r} has no master yet; see "
                    "`raymq status`"
                )
            return self._store

    def change_slave_timeout(self, timeout_s: float) -> None:
        self._rules = replace(self._rules, slave_timeout_s=timeout_s)

    def _read_routing(self) -> tuple[ReadRouting, MessageStore]:
        with self._changed:
            return self._routing(), self.store

    def _routing(self) -> ReadRouting:
        if self._sync is not None:
            slaves = self._sync.in_sync(self._clock_s()) - {self._replica} if self._rules.slave_read_enable else ()
            return ReadRouting(True, [str(StorageName(self._broker_name, slave)) for slave in sorted(slaves)])
        if self._role.role is ReplicaRole.SLAVE and not self._rules.slave_read_enable:
            raise NotMasterError(self._broker_name, self._role.epoch)
        master = self._role.master
        if master is None or self._clock_s() - self._last_chunk_s >= MASTER_SILENT_AFTER_S:
            return ReadRouting(False)
        return ReadRouting(False, [str(StorageName(self._broker_name, master))])

    @property
    def epoch(self) -> int:
        return self._role.epoch

    def require_master(self) -> None:
        with self._changed:
            if self._role.role is not ReplicaRole.MASTER:
                raise NotMasterError(self._broker_name, self._role.epoch)

    def add_progress_listener(self, callback: Callable[[], None]) -> None:
        self._on_progress.append(callback)
        super().add_progress_listener(callback)

    def call_on_log(self, callback: Callable[[], None]) -> None:
        """Register `callback`, which is called when the log may have grown. Any thread may call it, so it must not
        block.

        A change of the replica's role does not call `callback`; see `add_progress_listener`.
        """
        self._on_log = callback

    def _note_log(self) -> None:
        """Call the registered callback, because the log may have grown. Any thread may call this method. The calling
        thread must hold no lock, or only the lock `_changed`."""
        if self._on_log is not None:
            self._on_log()

    def _on_stored(self, end_offset: int) -> None:
        """Record that the log is on this replica's disk up to `end_offset`. Called by the store's flush thread."""
        with self._changed:
            if self._sync is not None:
                self._sync.flushed(end_offset, self._clock_s())
                self._show_confirmed()
            self._note_log()

    def _show_confirmed(self) -> None:
        """Let consumers see the messages that enough replicas have, and wake the appends that wait for copies."""
        if self._sync is None:
            return
        if self._may_acknowledge:
            self._note_confirmed(self._sync.confirm_offset)
            self._store.show(self._sync.confirm_offset)
        if not self._rules.all_ack_in_sync_state_set or self._sync.confirm_offset > self._notified_offset:
            self._notified_offset = self._sync.confirm_offset
            self._store.gate.progress.notify()

    def _wake_all(self) -> None:
        """Wake all waiting calls, because the role of this replica has changed."""
        self._changed.notify_all()
        self._store.gate.progress.notify()
        self._store.polls.wake_all()

    def _remember_confirmed(self) -> None:
        """Write this replica's highest confirm offset to disk, if the offset has grown.

        If the disk fails, the replica's next report contains the failure and the previous confirm offset. A full disk
        does not count as a failure: the next report then contains only the previous confirm offset.
        """
        with self._confirm_turn:
            with self._changed:
                confirmed = self._confirmed
            try:
                self._confirm_file.raise_to(*confirmed)
            except OSError as error:
                if not is_want_of_space(error):
                    self._store.gate.fail(error)

    def _give_up_confirmed(self, epoch: int, physical_offset: int) -> None:
        """Record that messages from `physical_offset` on no longer count as confirmed, because in `epoch` the group
        continues without them. Raises OSError if the file cannot be written."""
        with self._confirm_turn:
            with self._changed:
                self._confirmed = ConfirmFloor(epoch, physical_offset)
            self._confirm_file.reset(self._confirmed)

    def _note_confirmed(self, physical_offset: int) -> None:
        """Record the confirm offset, with the epoch in which this replica now leads or follows."""
        if physical_offset > self._confirmed.offset:
            self._confirmed = ConfirmFloor(self._role.epoch, physical_offset)

    def _refuse_without_room(self, error: OSError) -> None:
        """Raise StoreNotWritableError if `error` means that the disk is full. A full disk is not a disk
        failure."""
        if is_want_of_space(error):
            root = self._settings.store_path_root_dir
            raise StoreNotWritableError(f"the disk of {root} has no space for a small file: {error}") from error

    @contextmanager
    def _failing_on_disk_errors(self) -> Iterator[None]:
        """Context manager for writing files other than the log. If a write fails, record that the disk has failed.

        Raises ServiceNotAvailableError if the disk failed, and StoreNotWritableError if the disk is full.
        """
        try:
            yield
        except OSError as error:
            if isinstance(error, RaymqError):
                # RequestTimeoutError is a RaymqError, but also an OSError (through TimeoutError). It does not mean that
                # the disk has failed, so raise it unchanged.
                raise
            self._refuse_without_room(error)
            self._store.gate.fail(error)
            raise ServiceNotAvailableError(
                f"replica {self._replica} of broker group {self._broker_name!r} cannot follow: "
                f"{self._store.gate.failure}"
            ) from error

    def _begin_epoch(self, epoch: int, start_offset: int) -> None:
        """Write a new epoch to the epoch file, and drop the epochs whose records retention has deleted."""
        self._epochs.begin_epoch(epoch, start_offset)
        self._epochs.forget_before(self._store.log.min_offset - 1)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._wake_all()
        self._remember_confirmed()
        with self._order_lock:
            self._store.close()
