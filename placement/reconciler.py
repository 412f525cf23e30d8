"""Executes the decisions of placement.repair: lists the storage actors, and starts and ends storage actors.

One thread works in rounds. A round takes an inventory of the nodes only if a replica has no actor or a node is being
drained. No state is stored on disk. A failed round is retried, and `error` has the reason of the failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from placement.actor_lifecycle import end_actor, start_storage
from placement.inventory import inventory, running
from placement.repair import Moves, Repair, ReplicaGroupView
from placement.replica_nodes import Node
from placement.specs import ControllerSettings
from raymq.common.errors import RaymqError
from raymq.common.names import ReplicatorName, StorageName
from raymq.remoting.actor_ref import ActorRef

RECONCILE_INTERVAL_S: Final = 1.0
RECONCILE_INVENTORY_TIMEOUT_S: Final = 10.0
RECONCILE_DESCRIBE_TIMEOUT_S: Final = 2.0

logger = logging.getLogger(__name__)


class Reconciler:
    """Keeps every replica's storage actor running on its node.

    `groups` returns each broker group's master and in-sync replicas. `draining` returns the ids of the nodes that are
    being drained. `designate` makes another replica of a broker group the master. `substitute` starts the replacement
    of a replica of a broker group by a new replica.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        groups: Callable[[], Mapping[str, ReplicaGroupView]],
        draining: Callable[[], frozenset[str]],
        designate: Callable[[str, int], None],
        substitute: Callable[[str, int], None],
    ) -> None:
        self._data_dir, self._node_label = settings.data_dir, settings.node_label
        self._planned = {plan.name: plan for plan in settings.storages}
        self._plans = dict(self._planned)
        """The plan of each replica that the cluster has now."""
        self._groups, self._draining = groups, draining
        self._designate, self._substitute = designate, substitute
        options = settings.storages[0].replication
        self._repair = Repair(
            list(self._plans),
            spread=options.spread,
            replace_after_s=options.replace_after_s,
            min_in_sync=max(options.min_in_sync_replicas, options.in_sync_replicas),
        )
        self.node_ids: dict[StorageName, str] = {}
        """The id of the node on which each replica's storage actor runs; empty if the node is unknown."""
        self.notes: Mapping[StorageName, str] = {}
        """By replica, the reason why the replica has no storage actor, or why it is still on a node that is being
        drained."""
        self.error = ""

    def run(self, stopping: threading.Event) -> None:
        """Run rounds that repair the cluster's replicas, one after another, until `stopping` is set."""
        while not stopping.wait(RECONCILE_INTERVAL_S):
            try:
                self._round()
                self.error = ""
            except RaymqError as error:
                self.error = f"repair: {error}"
                logger.warning("the repair of replicas failed, retrying: %s", error)
            # Catch every exception, because Ray raises exceptions of its own. An uncaught exception would end this
            # thread, and no replica would be repaired again.
            except Exception as error:
                self.error = f"repair: {error!r}"
                logger.exception("the repair of replicas failed, retrying")

    def _round(self) -> None:
        running_actors = set(running())
        groups = self._groups()
        self._follow_members(groups, running_actors)
        self.node_ids = {name: node for name, node in self.node_ids.items() if str(name) in running_actors}
        present = {name: self._node_id(name) for name in self._plans if str(name) in running_actors}
        draining = self._draining()
        moves = Moves()
        if len(present) < len(self._plans) or draining:
            nodes = inventory(self._data_dir, draining, RECONCILE_INVENTORY_TIMEOUT_S, self._node_label)
            moves = self._repair.decide(nodes, present, groups, time.monotonic())
        self.notes = moves.notes
        for name, node in moves.start.items():
            self._start(name, node)
        for name, other in moves.hand_over.items():
            logger.warning(
                "broker group %s: the master hands over to replica %d, because its node is drained", name, other
            )
            self._designate(name.broker_name, other)
        if moves.substitute is not None:
            logger.warning("%s is replaced by a new replica, because its node is drained or lost", moves.substitute)
            self._substitute(moves.substitute.broker_name, moves.substitute.replica)
        if moves.vacate is not None:
            logger.warning("%s is stopped, because its node is drained", moves.vacate)
            end_actor(str(moves.vacate))

    def _follow_members(self, groups: Mapping[str, ReplicaGroupView], running_actors: set[str]) -> None:
        """Plan the replicas that were added to broker groups, and end the actors of replicas that have left. The
        directories of these replicas stay on their disks."""
        for group, view in groups.items():
            if view.members is None:
                continue
            template = next(plan for name, plan in self._planned.items() if name.broker_name == group)
            mine = {StorageName(group, replica) for replica in view.members.replicas}
            others = {name: plan for name, plan in self._plans.items() if name.broker_name != group}
            own = {name: self._planned.get(name) or template.for_replica(name.replica) for name in mine}
            self._plans = {**others, **own}
            for replica in sorted(view.members.removed):
                for actor in (str(ReplicatorName(group, replica)), str(StorageName(group, replica))):
                    if actor in running_actors:
                        logger.warning("%s ends, because replica %d has left broker group %s", actor, replica, group)
                        end_actor(actor)
        self._repair.replicas = sorted(self._plans)

    def _start(self, name: StorageName, node: Node) -> None:
        logger.warning("%s is started on %s (%s)", name, node.ip, node.node_id)
        start_storage(self._plans[name].on(node))
        self.node_ids[name] = node.node_id

    def _node_id(self, name: StorageName) -> str:
        if name not in self.node_ids:
            try:
                described = ActorRef(str(name)).call("describe", timeout_s=RECONCILE_DESCRIBE_TIMEOUT_S)
                self.node_ids[name] = described.node_id
            except RaymqError as error:
                logger.info("cannot get the node of actor %s: %s", name, error)
        return self.node_ids.get(name, "")
