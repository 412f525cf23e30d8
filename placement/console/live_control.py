"""The console's cluster when the console belongs to a running raymq: LiveControl implements ClusterControl by
`cluster_status` and by calls to the actors."""

from __future__ import annotations

import logging
from typing import Final

import ray

from placement import operations
from placement.console.audit_log import AuditLog
from placement.console.cluster_view import (
    settings_of,
    topics_to_look_at,
    view_of,
    writable_of,
)
from placement.status import cluster_status
from raymq.client.client import Client
from raymq.common.errors import RaymqError
from raymq.common.names import InstanceName, PullName
from raymq.common.protocol.status import ClusterStatus, PushInstanceReport
from raymq.remoting.actor_ref import ActorRef, find_actor
from raymq.remoting.storage_client import StorageDescription
from raymq.tools.console.cluster import (
    AuditEntry,
    AuditPage,
    ClusterView,
    ConsoleCluster,
    PushInstances,
)

logger = logging.getLogger(__name__)

ACCOUNT_TIMEOUT_S: Final = 2.0
"""Timeout, in seconds, of the console's call to a store for its settings, and of its call to a Pull actor for its
instances."""
CONSOLE_SEND_TIMEOUT_S: Final = 8.0
"""Timeout, in seconds, for sending a message from a console page."""


def live_cluster(client: Client, cluster_name: str) -> ConsoleCluster:
    """Return the cluster to which `client` is connected, in the form that the console uses."""
    producer = client.producer("console", send_timeout_s=CONSOLE_SEND_TIMEOUT_S)
    return ConsoleCluster(client.admin, producer, LiveControl(client, cluster_name))


class LiveControl:
    """The ClusterControl that the console's actor uses. Thread-safe. Every call is limited by the timeouts of the
    administration calls."""

    def __init__(self, client: Client, cluster_name: str) -> None:
        self._admin = client.admin
        self._audit_log = AuditLog(client)
        self._cluster_name = cluster_name
        self._store: StorageDescription | None = None
        """The description of a store with its settings; None until a store has answered."""

    # Methods about the whole cluster

    def cluster(self) -> ClusterView:
        """Return the data about the cluster's servers and stores that the console shows. The servers report
        this data."""
        _, draining = operations.placed_replicas()
        nodes = {node["NodeManagerAddress"]: node["NodeID"] in draining for node in ray.nodes() if node["Alive"]}
        status = cluster_status()
        return view_of(status, self._cluster_name, nodes, self._writable(status), self._settings(status))

    def _writable(self, status: ClusterStatus) -> dict[str, bool]:
        try:
            routes = self._admin.topic_routes(topics_to_look_at(status))
        except RaymqError as error:
            logger.info("cannot check which broker groups accept writes, because no NameServer answered: %s", error)
            return {}
        return writable_of(status, routes.values())

    def _settings(self, status: ClusterStatus) -> dict[str, str]:
        """Return the settings that the servers report. A store is queried only once, because a storage actor keeps the
        settings with which it was started."""
        if self._store is None:
            for name in [broker.storage for broker in status.brokers if not broker.error][:1]:
                try:
                    self._store = ActorRef(name).call("describe", timeout_s=ACCOUNT_TIMEOUT_S)
                except RaymqError as error:
                    logger.info("cannot read the settings of broker %s: %s", name, error)
        return settings_of(status, self._store)

    def drain(self, node: str, *, drained: bool) -> None:
        """Order the drain of a node: all its replicas move to other nodes. With `drained` False, end the drain, so that
        the node may have replicas again."""
        operations.order_drain(node, drained=drained)

    def balance(self) -> None:
        """Order a balance: in each broker group, the replica with the highest priority becomes the master."""
        operations.order_balance()

    # Methods about push consumers

    def push_instances(self, group: str) -> PushInstances:
        """Query the Pull actor of each node for the push-consumer instances of a group."""
        found: list[PushInstanceReport] = []
        nodes: dict[str, str] = {}
        missing: list[str] = []
        for node in ray.nodes():
            name = str(PullName(node["NodeID"]))
            try:
                if find_actor(name) is None:
                    continue
                nodes[name] = node["NodeManagerAddress"]
                answer = ActorRef(name).call("status", timeout_s=ACCOUNT_TIMEOUT_S)
            except RaymqError as error:
                missing.append(f"{name}: {error}")
                continue
            instances = [{"actor": name, **one} for one in answer.get("instances", [])]
            found += [
                one
                for one in ClusterStatus.of({"instances": instances}).instances
                if InstanceName.parse(one.instance).group == group
            ]
        return PushInstances(tuple(found), nodes, tuple(missing))

    # Methods that write and read the audit log

    def record_audit(self, entry: AuditEntry) -> None:
        """Store an entry in the audit log."""
        self._audit_log.write(entry)

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Return a page of audit-log entries, newest first."""
        return self._audit_log.read(limit, cursor)
