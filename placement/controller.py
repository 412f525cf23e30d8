"""Elects the master of each broker group of several replicas, sends orders to the replicas, and runs their repair.

The module has the Controller's remote methods, threads and journal. placement.election decides when a replica is
elected as master, and which. placement.repair decides which replicas start on other nodes.

The Controller has one thread per replica. About three times a second, the thread calls the replica with its next order,
and the call returns the replica's report. A replica that does not answer does not delay other replicas. Each decision
is written to the journal before an order is sent. While the journal cannot be written, the Controller decides nothing,
the leases expire, and `status` shows the reason.

The journal survives the Controller's death. A journal that is damaged in both copies is kept under another name. Then,
as without a journal, each group's record is rebuilt when all its replicas answer (placement.election). Ray restarts the
Controller on its head node; masters continue while their leases are valid. Every call is safe to repeat.

The Controller waits for Storage actors, but no actor waits for the Controller. The Controller notifies a Broker of a
new master, and the Broker also polls the Controller every few seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import ray

from actors.access.authenticated_server import access_for
from actors.actor_class import actor_class
from actors.core.replica.candidates import describe_lack
from actors.core.replica.orders import Follow, GroupLeader, Order, Renew, ReplicaState
from actors.metrics_thread import MetricsThread
from actors.options import PERSISTENT
from actors.replica.replicator_actor import ReplicatorActor
from placement.controller_metrics import ControllerMetrics, SkewEstimate
from placement.election import GroupControl, Record
from placement.inventory import running
from placement.membership import describe
from placement.reconciler import Reconciler
from placement.repair import ReplicaGroupView
from placement.specs import ControllerSettings
from raymq.common.config.cluster import ReplicationOptions, path_here
from raymq.common.errors import InvalidArgumentError, RaymqError, StoreCorruptError, StoreError
from raymq.common.names import CONTROLLER, ReplicatorName, StorageName
from raymq.remoting.actor_ref import ActorRef
from storage.files.journal import Journal, set_journal_aside
from storage.replication.epochs import ReplicaMembers, SyncStateSet

PING_INTERVAL_S: Final = 0.3
PING_TIMEOUT_S: Final = 1.0
DRAINING: Final = "draining"
"""The journal's key for the ids of nodes that are being drained. All other keys are broker groups."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _WatchedReplica:
    """A replica that a thread of the Controller calls regularly. `order`: the next order for the replica. `error`: the
    error of the last call. `skew`: how far the clock of the replica's node is ahead of the Controller's clock."""

    name: StorageName
    actor: ActorRef
    wake: threading.Event
    order: Order | None = None
    error: str = "no report requested yet"
    skew: SkewEstimate = field(default_factory=SkewEstimate)


class Controller:
    """The Controller actor's class, with one GroupControl per broker group."""

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failure = ""
        self._notified_epochs: dict[str, int] = {}
        self._journal = _open_journal(path_here(settings.journal, settings.data_dir))
        self._groups: dict[str, GroupControl] = {}
        self._watched: dict[StorageName, _WatchedReplica] = {}
        self._running_replicas = _running_replicas() if settings.groups.keys() - self._journal.values.keys() else {}
        """The replicas whose storage actors ran when this Controller started, by broker group; empty if the journal has
        an entry of each group."""
        for group, replicas in settings.groups.items():
            self._control(group, replicas)
        self._figures = ControllerMetrics()
        self._reconciler = Reconciler(
            settings,
            self._group_views,
            self.draining,
            self.designate,
            lambda group, replica: self.change_replicas(group, None, replica),
        )
        threading.Thread(target=self._reconciler.run, args=(self._stopping,), name="repair", daemon=True).start()
        report = partial(self._figures.report, status=self.status)
        self._metrics = MetricsThread(settings.metrics, "controller", CONTROLLER, report)

    def _control(self, group: str, replicas: frozenset[int]) -> None:
        settings = self._settings
        planned = [storage.replication for storage in settings.storages if storage.name.broker_name == group]
        options = planned[0] if planned else ReplicationOptions()
        control = GroupControl(
            group,
            replicas,
            settings.rules,
            settings.priorities.get(group, {}),
            settings.learners.get(group, frozenset()),
            planned_min_in_sync=options.min_in_sync_replicas,
            in_sync_replicas=options.in_sync_replicas,
            running=self._running_replicas.get(group, frozenset()),
        )
        known = self._journal.values.get(group)
        if known is not None:
            control.resume(_record(group, known), time.monotonic())
        self._groups[group] = control
        self._watch_members(control)

    def _watch_members(self, control: GroupControl) -> None:
        """Start a thread for each replica of a broker group that has none. The threads of removed replicas end by
        themselves. The caller holds the lock, or is the constructor."""
        replicas = control.replicas
        if control.record is None:
            # The journal has no entry of the group, so replicas that the plan does not name may belong to it. Their
            # reports have the group's members.
            replicas |= control.running
        for replica in sorted(replicas):
            name = StorageName(control.group, replica)
            if name not in self._watched:
                watched = _WatchedReplica(name, ActorRef(str(name)), threading.Event())
                self._watched[name] = watched
                threading.Thread(target=self._watch_replica, args=(watched,), name=str(name), daemon=True).start()
        for name in [name for name in self._watched if name.broker_name == control.group]:
            if name.replica not in replicas:
                self._watched.pop(name).wake.set()

    def settings(self) -> ControllerSettings:
        """Return the settings with which the Controller was started."""
        return self._settings

    def leader(self, group: str) -> GroupLeader:
        """Return the current master of a broker group. Raises InvalidArgumentError if the group does not have several
        replicas."""
        with self._lock:
            control = self._require(group)
            record = control.record
            replicas = tuple(sorted(control.replicas))
            stores = frozenset() if record is None else frozenset(record.sync_state_set.stores.values())
            if record is None or record.master is None or control.reason:
                epoch = 0 if record is None else record.epoch
                return GroupLeader(group, None, epoch, control.reason, replicas, stores, control.ordered)
            return GroupLeader(group, record.master, record.epoch, "", replicas, stores, control.ordered)

    def designate(self, group: str, replica: int) -> None:
        """Make a replica the master as soon as it is in sync, without losing an append (`raymq balance`)."""
        with self._lock:
            control = self._require(group)
            if replica not in control.able:
                raise InvalidArgumentError(f"broker group {group!r} has no replica {replica} that may lead")
            control.designate(replica, time.monotonic())

    def change_replicas(self, group: str, count: int | None, replace_one: int | None = None) -> None:
        """Start a change of a broker group's replicas (`raymq broker replicas`): to `count` replicas (None for the
        present number). A new replica replaces the replica `replace_one`.

        The order is durable on return, and the Controller executes it step by step (placement.membership). Repeating an
        order that has been executed changes nothing, except for `replace_one`. Raises InvalidArgumentError if another
        change has not ended, or if the change is not possible, and StoreError if the journal cannot be written.
        """
        with self._lock:
            control = self._require(group)
            wanted = len(control.members.staying) if count is None else count
            self._order_members(control, lambda: control.change_replicas(wanted, replace_one))

    def change_min_in_sync(self, group: str, least: int) -> None:
        """Change the minimum number of replicas in sync with which a broker group accepts messages (`raymq broker
        replicas --min-in-sync`).

        The order is durable on return, and the master follows it within a second. Repeating an order changes nothing.
        Raises InvalidArgumentError if the replicas are being changed, or if fewer replicas are in sync, and StoreError
        if the journal cannot be written.
        """
        with self._lock:
            control = self._require(group)
            self._order_members(control, lambda: control.change_min_in_sync(least))

    def cancel_change(self, group: str) -> None:
        """Cancel the change of a broker group's replicas: the replicas that it added leave again. The order is durable
        on return.

        Raises InvalidArgumentError if there is no change, or if a replica has already left, and StoreError if the
        journal cannot be written.
        """
        with self._lock:
            control = self._require(group)
            self._order_members(control, control.cancel_change)

    def _order_members(self, control: GroupControl, decide: Callable[[], Record]) -> None:
        """Let a group decide an order about its replicas, and write the decision to the journal. The caller holds the
        lock."""
        before = control.record
        record = decide()
        if record == before:
            return
        if not self._write(record):
            control.record = before
            raise StoreError(f"the Controller's journal cannot be written: {self._failure}")
        self._watch_members(control)

    def balance(self) -> dict[str, int]:
        """Make the replica with the highest priority the master of each group. Returns these replicas by group, but
        only for groups in which another replica is the master now.

        A replica that is not in sync is returned too, but the Controller does not wait for it. Calling the method again
        later is safe.
        """
        with self._lock:
            wanted: dict[str, int] = {}
            for group, control in self._groups.items():
                staying = control.able & control.members.staying
                first = min(staying, key=lambda replica: (control.priorities.get(replica, replica), replica))
                if control.record is None or control.record.master != first:
                    wanted[group] = first
                    control.designate(first, time.monotonic())
            return wanted

    def drain(self, node_id: str, drained: bool = True) -> None:
        """Move all replicas away from a node (`raymq drain`). With `drained` False, allow replicas on the node again.

        The order is durable on return; the replicas move one after another. Raises StoreError if the journal cannot be
        written.
        """
        with self._lock:
            others = set(self._journal.values.get(DRAINING, ())) - {node_id}
            self._journal.put(DRAINING, sorted(others | {node_id} if drained else others))

    def draining(self) -> frozenset[str]:
        """Return the ids of the nodes that are being drained."""
        with self._lock:
            return frozenset(self._journal.values.get(DRAINING, ()))

    def homes(self) -> dict[StorageName, str]:
        """Return the node id of each running replica, by the name of its storage actor."""
        return dict(self._reconciler.node_ids)

    def status(self) -> dict[str, Any]:
        """Return each group's master, epoch and sync-state set, each replica's report, and the reasons of current
        problems."""
        with self._lock:
            error = self._failure or self._reconciler.error
            return {"error": error, "groups": [self._group_status(group) for group in sorted(self._groups)]}

    def close(self) -> None:
        """Stop making decisions. Masters stop leading when their leases expire."""
        self._stopping.set()
        self._metrics.close()
        for watched in self._watched.values():
            watched.wake.set()

    def _group_views(self) -> dict[str, ReplicaGroupView]:
        with self._lock:
            return {group: _view(control) for group, control in self._groups.items()}

    def _require(self, group: str) -> GroupControl:
        control = self._groups.get(group)
        if control is None:
            raise InvalidArgumentError(
                f"broker group {group!r} does not exist, or has only one replica and no Controller; see "
                "replication.enable_controller_mode"
            )
        return control

    def _group_status(self, group: str) -> dict[str, Any]:
        control, now_s = self._groups[group], time.monotonic()
        record, alive = control.record, control.alive(now_s)
        master = None if record is None else record.master
        leading = None if master is None else alive.get(master)
        in_sync = frozenset() if record is None else record.sync_state_set.members
        if leading is not None and control.rules.fixed_master is not None:
            in_sync |= leading.in_sync
        return {
            "broker": group,
            "master": master,
            "epoch": None if record is None else record.epoch,
            "in_sync": sorted(in_sync),
            "learners": sorted(self._settings.learners.get(group, ())),
            "members": control.members.to_plain(),
            "change": _describe_change(control),
            "min_in_sync_replicas": control.min_in_sync,
            "reason": control.reason,
            "loss": "" if record is None else record.loss,
            "replicas": [
                self._replica_status(watched, alive.get(watched.name.replica), leading)
                for watched in self._watched.values()
                if watched.name.broker_name == group
            ],
        }

    def _replica_status(
        self, watched: _WatchedReplica, state: ReplicaState | None, leading: ReplicaState | None
    ) -> dict[str, Any]:
        note, skew = self._reconciler.notes.get(watched.name, ""), watched.skew.best()
        about = {
            "replica": watched.name.replica,
            "node_id": self._reconciler.node_ids.get(watched.name),
            "note": note,
            "clock_skew_s": None if skew is None else skew.skew_s,
            "clock_error_s": None if skew is None else skew.error_s,
            **_lag(watched.name.replica, leading),
        }
        if state is None:
            return {**about, "role": "SILENT", "error": watched.error}
        return {
            **about,
            "role": state.role.value,
            "epoch": state.epoch,
            "end_offset": state.end_offset,
            "confirm_offset": state.confirm_offset,
            "error": state.failed or state.refusal or describe_lack(state),
        }

    # Methods that call the replicas, with one thread per replica

    def _watch_replica(self, watched: _WatchedReplica) -> None:
        while not self._stopping.is_set():
            with self._lock:
                if self._watched.get(watched.name) is not watched:
                    return  # the replica has left its broker group
                order, watched.order = watched.order, None
                control = self._groups[watched.name.broker_name]
                newest, members = control.set_in_force, None if control.record is None else control.record.members
            asked_s, asked_ms = time.monotonic(), _wall_ms()
            state, watched.error = self._send_order(watched, order, newest, members)
            if state is not None and state.wall_ms:
                watched.skew.note(state.wall_ms, asked_ms, _wall_ms())
            self._decide(watched.name.broker_name, state, asked_s)
            watched.wake.wait(PING_INTERVAL_S)
            watched.wake.clear()

    def _send_order(
        self,
        watched: _WatchedReplica,
        order: Order | None,
        newest: SyncStateSet | None,
        members: ReplicaMembers | None,
    ) -> tuple[ReplicaState | None, str]:
        try:
            state: ReplicaState = watched.actor.call("obey", order, newest, members, timeout_s=PING_TIMEOUT_S)
        except RaymqError as error:
            return None, str(error)
        return state, ""

    def _decide(self, group: str, state: ReplicaState | None, asked_s: float) -> None:
        """Process one report of a replica: record the report, write the group's decisions to the journal, and assign
        the orders. `asked_s`: the time at which the report was requested. `state` is None if the replica did not
        answer."""
        with self._lock:
            control, now_s = self._groups[group], time.monotonic()
            if state is not None:
                control.note_account(state, now_s, asked_s)
            before = control.record
            for action in control.tick(now_s):
                if isinstance(action, Record):
                    if not self._write(action):
                        control.record = before
                        return
                    self._figures.note(before, action)
                    if action.loss and (before is None or action.epoch > before.epoch):
                        logger.error(
                            "broker group %s: a master was elected although %s; no answering replica has more messages",
                            group,
                            action.loss,
                        )
                else:
                    self._assign_order(action)
            self._watch_members(control)
            record = control.record
            new = record is not None and not control.reason and self._notified_epochs.get(group) != record.epoch
            if new and record is not None:
                self._notified_epochs[group] = record.epoch
        if new:
            self._notify_broker(group)

    def _write(self, record: Record) -> bool:
        try:
            self._journal.put(record.group, _fields(record))
        except StoreError as error:
            self._failure = str(error)
            logger.error("the Controller cannot decide about masters: %s", error)
            return False
        self._failure = ""
        in_sync = sorted(record.sync_state_set.members)
        logger.warning(
            "broker group %s: epoch %d, master %s, in sync %s, %s",
            *(record.group, record.epoch, record.master, in_sync),
            "replicas as in raymq.yaml" if record.members is None else f"members {record.members.to_plain()}",
        )
        return True

    def _assign_order(self, order: Order) -> None:
        """Replace a replica's pending order. The replica's thread sends the order with its next call. The thread is
        woken at once, except for a lease renewal."""
        watched = self._watched.get(StorageName(order.group, order.replica))
        if watched is None:
            return  # the replica has just joined or left: the order is repeated if it is still needed
        watched.order = order
        if isinstance(order, Follow):
            name = ReplicatorName(order.group, order.replica)
            ReplicatorActor.options(name=str(name), get_if_exists=True).remote(watched.name, **access_for(str(name)))
        if not isinstance(order, Renew):
            watched.wake.set()

    def _notify_broker(self, group: str) -> None:
        """Notify the group's broker to look up its new master now. Without the notification, the broker looks up the
        master every few seconds."""
        try:
            ActorRef(group).tell("look_for_master")
        except RaymqError as error:
            logger.info("broker %s could not be notified of its new master: %s", group, error)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _lag(replica: int, leading: ReplicaState | None) -> dict[str, float | None]:
    """Return a replica's lag in bytes and in seconds, according to its master's report; None for each value if the lag
    is unknown."""
    if leading is not None and leading.replica == replica:
        return {"lag_bytes": 0, "lag_s": 0.0}
    lag = None if leading is None else leading.lags.get(replica)
    return {"lag_bytes": None, "lag_s": None} if lag is None else {"lag_bytes": lag.lag_bytes, "lag_s": lag.lag_s}


def _running_replicas() -> dict[str, frozenset[int]]:
    """Return the replicas that have a storage actor, by broker group."""
    found: dict[str, frozenset[int]] = {}
    for text in running():
        if text.startswith("storage-"):
            name = StorageName.parse(text)
            found[name.broker_name] = found.get(name.broker_name, frozenset()) | {name.replica}
    return found


def _describe_change(control: GroupControl) -> str:
    """Return a sentence about the current change of a group's replicas and what it waits for; "" without a change."""
    if not control.members.is_changing:
        return ""
    waits = f"the group has no master: {control.reason}" if control.reason else control.change_waits
    return describe(control.members) + (f": {waits}" if waits else "")


def _open_journal(path: Path) -> Journal:
    """Open the journal. If both copies are damaged, begin an empty journal, and keep the damaged copies under other
    names."""
    try:
        return Journal(path)
    except StoreCorruptError as error:
        logger.error(
            "%s; each broker group has no master until all its replicas answer, and draining nodes must be named again "
            "(raymq drain)",
            error,
        )
        set_journal_aside(path)
        return Journal(path)


def _view(control: GroupControl) -> ReplicaGroupView:
    record = control.record
    members = None if control.rules.fixed_master is not None or control.learners else control.members
    if record is None:
        return ReplicaGroupView(None, frozenset(), members)
    return ReplicaGroupView(None if control.reason else record.master, record.sync_state_set.members, members)


def _to_plain(stores: Mapping[int, str]) -> dict[str, str]:
    """Return the ids of replicas' directories as the journal has them: the keys of JSON are texts."""
    return {str(replica): store_id for replica, store_id in stores.items()}


def _from_plain(stores: Mapping[str, str]) -> dict[int, str]:
    return {int(replica): store_id for replica, store_id in stores.items()}


def _fields(record: Record) -> dict[str, Any]:
    one = record.sync_state_set
    stores = _to_plain(one.stores)
    fields: dict[str, Any] = {"epoch": record.epoch, "master": record.master, "set": [one.epoch, one.version, stores]}
    fields |= {"from": _to_plain(record.elected_from), "incarnation": record.incarnation, "loss": record.loss}
    if record.shrunk_from:
        fields["shrunk"] = _to_plain(record.shrunk_from)
    return fields if record.members is None else {**fields, "members": record.members.to_plain()}


def _record(group: str, fields: Mapping[str, Any]) -> Record:
    epoch, version, stores = fields["set"]
    before, shrunk = _from_plain(fields.get("from", {})), _from_plain(fields.get("shrunk", {}))
    one = SyncStateSet(epoch, version, _from_plain(stores))
    incarnation, loss = fields.get("incarnation", 0), fields.get("loss", "")
    members = ReplicaMembers.from_plain(fields["members"]) if "members" in fields else None
    return Record(group, fields["epoch"], fields["master"], one, before, incarnation, loss, members, shrunk)


CONTROLLER_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 8}
ControllerActor = ray.remote(**CONTROLLER_OPTIONS)(actor_class(Controller))
