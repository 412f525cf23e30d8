"""A broker group of real replicas in one process. The stores and the replication decisions are real, and the replicas
call each other directly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from actors.core.replica.append_limit import AppendLimit
from actors.core.replica.deleted_topics import DeletedTopics
from actors.core.replica.orders import Following
from actors.core.replica.rules import ReplicaRules
from actors.replica.data_plane import DataPlane
from actors.replica.log_carrier import LogCarrier
from actors.replica.log_lanes import LogLanes
from actors.replica.log_mender import mend_both
from actors.replica.replica import Replica
from placement.election import FIXED_MASTER, ControlRules, GroupControl, Record
from raymq.common.config.store import StoreSettings
from raymq.common.errors import InvalidArgumentError, RaymqError, RecordsDamagedError
from raymq.common.message import SendStatus
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane_pool import LANE_NOT_OPENED
from storage.append.durability import StartedAppend
from storage.message_store import MessageStore
from tests.support.history.waiting import eventually
from tests.support.stores.stores import make_batch, small_settings

GROUP = "broker-a"
PATIENT = ReplicaRules(lease_s=60.0, slave_timeout_s=60.0)
"""Timeouts for tests on a busy machine. They are so long that no replica's copy of the log counts as late."""


class LocalCalls:
    """Stand-in for calls of a storage actor's methods that repair damaged logs. It calls a replica in this process
    directly."""

    def __init__(self, group: LocalReplicas, name: int) -> None:
        self._replica, self.name = group.replicas[name], f"{GROUP}-{name}"

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if method == "log_holes":
            return self._replica.holes
        methods: dict[str, Callable[..., Any]] = {
            "log_part": self._replica.read_part,
            "mend_log": self._replica.mend,
            "note_lacking": self._replica.note_lacking,
        }
        return methods[method](*arguments)


class LocalReplicas:
    """Replicas of a broker group in this process, with stores below `root`.

    Each call of `control` runs the Controller, and each call of `copy` runs a Replicator. `start` copies continuously
    in threads. `log_disks`: number of disks of each replica's log. Chunks of the log travel over lanes (direct socket
    connections), which use TCP if `host` is given. A chunk has about `chunk_bytes` bytes.

    `clock_s`: the monotonic clock of the replicas and of the Controller. `dead_after_s`: the time after which the
    Controller counts a silent replica as dead. `away`: the replicas whose processes are stopped. They neither answer
    the Controller nor take part in copying.
    """

    def __init__(
        self,
        root: Path,
        replicas: int = 3,
        rules: ReplicaRules | None = None,
        *,
        log_disks: int = 0,
        host: str = "",
        chunk_bytes: int = 1 << 20,
        clock_s: Callable[[], float] = time.monotonic,
        dead_after_s: float = 60.0,
        **store: Any,
    ) -> None:
        self._root, self._store, self._log_disks, self._host = root, store, log_disks, host
        self._chunk_bytes, self._clock_s = chunk_bytes, clock_s
        self.away: set[int] = set()
        self.planes: dict[int, DataPlane] = {}
        self.rules = rules or PATIENT
        self.replicas: dict[int, Replica] = {}
        self.cut_off: dict[int, Replica] = {}
        """The replicas that `cut_off_master` has separated from the others."""
        self.names = frozenset(range(replicas))
        fixed_master = FIXED_MASTER if self.rules.fixed_roles else None
        control_rules = ControlRules(dead_after_s=dead_after_s, lease_s=self.rules.lease_s, fixed_master=fixed_master)
        # The replicas have just been opened, so none of them holds a lease of a lost decision.
        self.control_state = GroupControl(GROUP, self.names, control_rules, lost_leases_until_s=0.0)
        self.journal: list[Record] = []
        self._stopping = threading.Event()
        self._copying = {name: threading.Lock() for name in self.names}
        self._threads: list[threading.Thread] = []
        for name in self.names:
            self.open(name)

    def directory(self, name: int) -> Path:
        return self._root / f"{GROUP}-{name}"

    def settings(self, name: int) -> StoreSettings:
        root = self.directory(name)
        logs = tuple(self._root / f"disk-{number}" / root.name for number in range(self._log_disks))
        return small_settings(root, store_path_commit_log=logs, **self._store)

    def open(self, name: int) -> Replica:
        settings = self.settings(name)
        store = partial(self._open_store, settings)
        replica = self.replicas[name] = Replica(GROUP, name, settings, self.rules, store, clock_s=self._clock_s)
        self._open_plane(name)
        return replica

    def _open_plane(self, name: int) -> None:
        replica = self.replicas[name]
        self.planes[name] = DataPlane(
            f"{GROUP}-{name}",
            replica,
            deleted=DeletedTopics(replica.any_store.read_config, replica.any_store.write_config),
            limit=AppendLimit(10_000),
            methods={},
            more=lambda plane: LogLanes(plane, replica).handlers,
            host=self._host,
        )

    def restart_lanes(self, name: int) -> LaneAddress:
        """Break all lanes (direct socket connections) of a replica, and serve new lanes at another address. Returns the
        old address.

        The new address is served first, because a Replicator asks for the address again as soon as its lane breaks.
        """
        former = self.planes[name]
        self._open_plane(name)
        former.close()
        return former.address

    @staticmethod
    def _open_store(settings: Any, on_stored: Any) -> MessageStore:
        return MessageStore.open(settings, broker_name=GROUP, on_stored=on_stored)

    def close(self, name: int) -> None:
        self.planes.pop(name).close()
        self.replicas.pop(name).close()

    def control(self, rounds: int = 4) -> None:
        """Run the Controller in `rounds` rounds. In each round it pings all replicas and carries out its
        decisions."""
        orders: dict[int, Any] = {}
        # Run one round more than the test requests. This round is necessary if the replicas' status is too old in the
        # last requested round: the Controller then elects a new master only in the next round.
        for _ in range(rounds + 1):
            for name, replica in list(self.replicas.items()):
                if name in self.away:
                    continue
                state = replica.obey(orders.pop(name, None), self.control_state.set_in_force)
                if name not in self.away:
                    self.control_state.note_account(state, self._clock_s())
            for action in self.control_state.tick(self._clock_s()):
                if isinstance(action, Record):
                    self.journal.append(action)
                else:
                    orders[action.replica] = action
            for name, order in list(orders.items()):
                if name in self.replicas and name not in self.away:
                    self.replicas[name].obey(order, None)
            orders.clear()

    def copy(self, name: int, chunk_bytes: int | None = None) -> None:
        """Copy the master's log to the replica `name`, as its Replicator does, until nothing is left to copy."""
        with self._copying[name]:
            try:
                self._copy(name, chunk_bytes or self._chunk_bytes)
            except RecordsDamagedError:
                raise
            except InvalidArgumentError:
                # The replica asked for the log from its flushed end, before its last chunk was flushed.
                self.replicas[name].any_store.gate.flush_all()
                self._copy(name, chunk_bytes or self._chunk_bytes)

    def _copy(self, name: int, chunk_bytes: int) -> None:
        slave = self.replicas[name]
        following = slave.following(0.0)
        if following is None or following.master not in self.replicas or self.away & {name, following.master}:
            return
        master, epoch = self.replicas[following.master], following.epoch
        position = following.position
        if position is None:
            position = slave.align(epoch, master.history(epoch))
        self.mend(name)
        self._copy_over_lanes(name, following, position, chunk_bytes)

    def mend(self, name: int) -> int:
        """Repair the damaged records of replica `name` and of its master with each other's intact records, as a
        Replicator does. Returns the number of repaired bytes."""
        following = self.replicas[name].following(0.0)
        if following is None or following.master not in self.replicas:
            return 0
        return mend_both(LocalCalls(self, following.master), LocalCalls(self, name), following, name)

    def _copy_over_lanes(self, name: int, following: Following, position: int, chunk_bytes: int) -> None:
        """Copy the master's log to a replica over lanes (direct socket connections) with the Replicator's own
        LogCarrier. Stops at the second empty chunk, because the master has then received all acknowledgements."""
        empty, done = 0, threading.Event()

        def note_copied(copied_bytes: int) -> None:
            nonlocal empty
            empty = 0 if copied_bytes else empty + 1
            if empty == 2:
                done.set()

        with (
            closing(Lane(self.planes[following.master].address)) as master,
            closing(Lane(self.planes[name].address)) as slave,
        ):
            LogCarrier(
                *(master, slave, following, name, position),
                is_followed=lambda: True,
                on_copied=note_copied,
                on_refused=lambda error: self.replicas[following.master].report_log(
                    following.epoch, error.physical_offset, error.size
                ),
                stopping=done,
                chunk_max_bytes=chunk_bytes,
                wait_s=0.0,
            ).run()

    def settle(self) -> None:
        """Copy the log until every running replica has the whole log and is in the sync state set."""
        for _ in range(3):
            self.control(2)
            for name in sorted(self.replicas):
                self.copy(name)
        self.control(2)

    def start(self) -> None:
        """Start a thread per replica that copies the log, so that appends can wait for the copies."""
        for name in self.names:
            self._threads.append(threading.Thread(target=self._run, args=(name,), daemon=True))
            self._threads[-1].start()

    def _run(self, name: int) -> None:
        while not self._stopping.is_set():
            try:
                self.copy(name)
            except (RaymqError, KeyError, *LANE_NOT_OPENED):
                pass  # a replica changed its role or is closed: copy again later, as the Replicator actor does
            self._stopping.wait(0.002)

    def fail_over(self) -> int:
        """Close the master, and run the Controller until it has elected another replica. Returns the number of the
        closed replica, which `open` opens again."""
        old = self._master_number
        self.close(old)
        self._elect(old)
        return old

    def cut_off_master(self) -> int:
        """Separate the master from the Controller and from the other replicas, which then elect a new master.

        Returns the number of the old master. It still considers itself the master, and its clients can still call it:
        `cut_off` has the replica. `rejoin` ends the separation.
        """
        old = self._master_number
        self.cut_off[old] = self.replicas.pop(old)
        self._elect(old)
        return old

    def rejoin(self) -> None:
        """Connect the separated replicas to the Controller and to the other replicas again."""
        self.replicas |= self.cut_off
        self.cut_off.clear()

    def _elect(self, away: int) -> None:
        """Elect a new master without the replica `away`, as if the lease of the old master had expired."""
        self.control_state._lease_until_s = 0.0
        self.control_state._accounts.pop(away)
        self.control(6)
        assert self._master_number != away

    @property
    def _master_number(self) -> int:
        record = self.control_state.record
        assert record is not None
        assert record.master is not None
        return record.master

    @property
    def master(self) -> Replica:
        return self.replicas[self._master_number]

    def end(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(10.0)
        self.rejoin()
        for name in list(self.replicas):
            self.close(name)


@contextmanager
def filled_groups(root: Path, bodies: list[bytes], **defaults: Any) -> Iterator[Callable[..., LocalReplicas]]:
    """Yield a function that creates a broker group. Before the function returns the new group, it stores a message for
    each of `bodies`, and all replicas confirm these messages. At the end of the `with` block all created groups are
    closed.

    The function takes the arguments of LocalReplicas except `root`. `defaults`: default values of these arguments.
    """
    groups: list[LocalReplicas] = []

    def build(*arguments: Any, **options: Any) -> LocalReplicas:
        group = LocalReplicas(root, *arguments, **(defaults | options))
        groups.append(group)
        group.settle()
        append(group, bodies)
        return group

    yield build
    for group in groups:
        group.end()


def append(group: LocalReplicas, bodies: list[bytes]) -> None:
    """Append each body as a record that all replicas acknowledge. Returns after every replica has copied the whole log
    and reported its status to the Controller."""
    for body in bodies:
        settle_append(group, make_batch([body]))
    group.settle()


def settle_append(group: LocalReplicas, batch: EncodedBatch) -> None:
    """Append a batch, and check that all running replicas acknowledge the batch."""
    started = group.master.start_append([batch])
    [result] = eventually(lambda: _settled(group, started), "copies")
    assert result.status is SendStatus.SEND_OK


def give_up(started: StartedAppend) -> list[AppendResult]:
    """Return the results of a started append as if all its deadlines had passed. An append that has not enough copies
    yet gets the status FLUSH_SLAVE_TIMEOUT."""
    # The first call can end the wait for the disk, and the second call ends the wait for the copies.
    return started.settle(started.deadline_s) or started.settle(started.deadline_s) or []


def _settled(group: LocalReplicas, started: StartedAppend) -> list[AppendResult] | None:
    for name in sorted(group.replicas):
        group.copy(name)
    return started.settle(time.monotonic())
