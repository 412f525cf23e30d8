"""LiveControl: the console's ClusterControl on a live cluster, by the administration and `cluster_status`.

Lists take one call for each broker group, whatever the number of topics and groups (admin.readings). The application
keeps them for some seconds, so pages do not multiply calls.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray

from placement import operations
from placement.console.audit_log import AuditLog
from placement.console.cluster_view import (
    group_parts,
    group_rows,
    settings_of,
    shown_perm,
    topic_groups,
    topic_parts,
    topic_rows,
    topics_to_look_at,
    view_of,
    writable_of,
)
from placement.status import cluster_status
from raymq.client.client import Client
from raymq.common.errors import InvalidArgumentError, RaymqError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.names import InstanceName, PullName
from raymq.common.protocol.route import MASTER_ID
from raymq.common.protocol.stats import BrokerReadings
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.storage_client import StorageDescription
from raymq.tools.console.backend.cluster import AuditEntry, AuditPage, ClusterFigures, ClusterView, Listing, NoAnswer
from raymq.tools.console.backend.groups import GroupInstance, GroupQueue, GroupRow, GroupView, MemberRow, OffsetMove
from raymq.tools.console.backend.topics import RouteRow, TopicQueue, TopicRow, TopicView
from raymq.tools.console.cluster import ConsoleCluster

logger = logging.getLogger(__name__)

ACCOUNT_TIMEOUT_S: Final = 2.0
"""Bounds the question to a store for its settings, and to a Pull actor for its instances."""
BROKER_READINGS_TIMEOUT_S: Final = 3.0
"""Bounds the question to each broker for its figures; a page waits for 5 s."""
CONSOLE_SEND_TIMEOUT_S: Final = 8.0
"""Bounds the send of a message from a page."""
NO_ANSWER: Final = f"it gave no figures in {BROKER_READINGS_TIMEOUT_S:g} s; see `raymq status`"


def live_cluster(client: Client, cluster_name: str) -> ConsoleCluster:
    """Return the cluster of a client as the console shows it."""
    producer = client.producer("console", send_timeout_s=CONSOLE_SEND_TIMEOUT_S)
    return ConsoleCluster(client.admin, producer, LiveControl(client, cluster_name))


class LiveControl:
    """The ClusterControl of the console's actor. Thread-safe; the administration's timeouts bound every call."""

    def __init__(self, client: Client, cluster_name: str) -> None:
        self._admin = client.admin
        self._audit_log = AuditLog(client)
        self._cluster_name = cluster_name
        self._store: StorageDescription | None = None
        """A store's account of itself, once one has answered."""

    # The cluster

    def cluster(self) -> ClusterView:
        """The servers and stores."""
        _, draining = operations.placed_replicas()
        nodes = {node["NodeManagerAddress"]: node["NodeID"] in draining for node in ray.nodes() if node["Alive"]}
        report = cluster_status()
        return view_of(report, self._cluster_name, nodes, self._writable(report), self._settings(report))

    def _writable(self, report: Mapping[str, Any]) -> dict[str, bool]:
        try:
            routes = self._admin.topic_routes(topics_to_look_at(report))
        except RaymqError as error:
            logger.info("no NameServer tells which broker groups take writes: %s", error)
            return {}
        return writable_of(report, routes.values())

    def _settings(self, report: Mapping[str, Any]) -> dict[str, str]:
        """The settings that servers tell. A store is asked for its own until one has answered: they are those that its
        actor was started with."""
        if self._store is None:
            for name in [entry["storage"] for entry in report["brokers"] if not entry["error"]][:1]:
                try:
                    self._store = ActorRef(name).call("describe", timeout_s=ACCOUNT_TIMEOUT_S)
                except RaymqError as error:
                    logger.info("%s does not tell its settings: %s", name, error)
        return settings_of(report, self._store)

    def figures(self) -> ClusterFigures:
        """The counters of the whole cluster, now. ServiceNotAvailableError if a broker does not answer: sums without it
        would look like a restart."""
        answers, missing = self._readings(with_pairs=False)
        if missing:
            raise ServiceNotAvailableError(f"{missing[0].server}: {missing[0].reason}")
        topics, groups = topic_parts(answers), group_parts(answers)
        now_ms = time.time_ns() // 1_000_000
        return ClusterFigures(
            now_ms,
            sum(one.messages for parts in topics.values() for one in parts),
            sum(one.consumed for parts in groups.values() for one in parts),
            sum(one.bytes for parts in topics.values() for one in parts),
            sum(one.dead_letters for parts in groups.values() for one in parts),
            sum(self._admin.delayed(now_ms, now_ms, limit=1).levels.values()),
            {topic: sum(one.messages for one in parts) for topic, parts in topics.items()},
            {group: sum(one.lag for one in parts) for group, parts in groups.items()},
        )

    def _readings(self, *, with_pairs: bool = True) -> tuple[list[BrokerReadings], tuple[NoAnswer, ...]]:
        """The readings of the brokers that answer, and those that do not."""
        found = self._admin.readings(BROKER_READINGS_TIMEOUT_S, with_pairs=with_pairs)
        silent = tuple(NoAnswer(name, NO_ANSWER) for name, one in sorted(found.items()) if one is None)
        return [one for one in found.values() if one is not None], silent

    def drain(self, node: str, *, drained: bool) -> None:
        """Order that a node be emptied, or may have replicas again."""
        operations.order_drain(node, drained=drained)

    def balance(self) -> None:
        """Order that the first replicas by priority lead."""
        operations.order_balance()

    def clean_store(self, broker_name: str) -> None:
        """Have a broker group's store delete expired messages now."""
        self._admin.clean_store(broker_name)

    def set_write_permission(self, broker_name: str, *, writable: bool) -> int:
        """Take writes off a broker group, or give them back."""
        change = self._admin.add_write_perm if writable else self._admin.wipe_write_perm
        return change(broker_name)

    # Topics

    def topics(self) -> Listing[TopicRow]:
        """All topics but internal ones, sorted, in one call for each broker group."""
        answers, missing = self._readings()
        attributes = self._admin.topic_attributes({name for one in answers for name in one.topics})
        return Listing(topic_rows(answers, attributes), missing)

    def topic(self, topic: str) -> TopicView:
        """One topic."""
        route = self._admin.topic_route(topic)
        answers, silent = self._readings()
        missing = [f"{one.server}: {one.reason}" for one in silent]
        members: Counter[str] = Counter()
        parts = topic_parts(answers).get(topic, [])
        try:
            since = self._admin.kept_since(topic)
            queues = tuple(
                TopicQueue(one.queue, one.min_offset, one.max_offset, since.get(one.queue))
                for one in self._admin.describe_topic(topic)
            )
            members.update(one.consumer.group for one in self._admin.consumer_connections())
        except RaymqError as error:
            queues = tuple(TopicQueue(queue, error=str(error)) for queue in route.subscribe_queues)
            missing.append(str(error))
        masters = {name: data.storages.get(MASTER_ID, "") for name, data in route.brokers.items()}
        routes = tuple(
            RouteRow(
                data.broker_name,
                data.read_queue_nums,
                data.write_queue_nums,
                shown_perm(data.perm),
                masters.get(data.broker_name, ""),
            )
            for data in route.queues
        )
        perm = shown_perm(route.queues[0].perm) if route.queues else ""
        return TopicView(
            topic,
            perm,
            queues,
            topic_groups(answers, topic, members),
            routes,
            dict(route.attributes.mapping()),
            route.order_config or "",
            sum(one.rate for one in parts) if parts else None,
            sum(one.bytes_rate for one in parts) if parts else None,
            tuple(missing),
        )

    def create_topic(
        self,
        topic: str,
        queues: int,
        *,
        message_type: str | None = None,
        reserve_time_s: float | None = None,
        cleanup_policy: str | None = None,
    ) -> None:
        """As Admin.create_topic."""
        self._admin.create_topic(
            topic,
            queues,
            message_type=message_type,
            reserve_time_s=reserve_time_s,
            cleanup_policy=cleanup_policy,
        )

    def update_topic(
        self,
        topic: str,
        *,
        queues: int | None = None,
        perm: int | None = None,
        message_type: str | None = None,
        reserve_time_s: float | None = None,
    ) -> None:
        """As Admin.update_topic."""
        self._admin.update_topic(
            topic, queues=queues, perm=perm, message_type=message_type, reserve_time_s=reserve_time_s
        )

    def set_order_config(self, topic: str, config: str | None) -> None:
        """As Admin.set_order_config."""
        self._admin.set_order_config(topic, config)

    def delete_topic(self, topic: str) -> None:
        """As Admin.delete_topic."""
        self._admin.delete_topic(topic)

    # Groups

    def groups(self) -> Listing[GroupRow]:
        """All groups, sorted, in two calls for each broker group."""
        answers, missing = self._readings()
        return Listing(group_rows(answers, self._admin.consumer_connections()), missing)

    def group(self, group: str) -> GroupView:
        """One group."""
        config = self._admin.group_config(group)
        summary = self._admin.group_summary(group)
        connections = self._admin.consumer_connections(group)
        members = tuple(
            MemberRow(
                one.client_id,
                one.host,
                one.pid,
                one.consumer.consume_type,
                one.consumer.message_model.value,
                tuple(f"{topic}: {tags}" for topic, tags in sorted(one.consumer.subscriptions.items())),
                one.silent_s,
            )
            for one in connections
        )
        instances, owners, missing = self._instances(group)
        queues = tuple(
            GroupQueue(
                one.queue,
                owners.get(str(one.queue), ""),
                one.committed,
                one.max_offset,
                one.lag,
                one.lag_ms,
                one.in_flight,
            )
            for one in summary.queues
        )
        return GroupView(
            config,
            members,
            queues,
            instances,
            summary.lag,
            summary.lag_ms,
            summary.retry_lag,
            summary.dead_letters,
            missing,
        )

    def _instances(self, group: str) -> tuple[tuple[GroupInstance, ...], dict[str, str], tuple[str, ...]]:
        """The group's push-consumer instances, the owners of queues by queue, and who did not answer."""
        rows: list[GroupInstance] = []
        owners: dict[str, str] = {}
        missing: list[str] = []
        for node in ray.nodes():
            name = str(PullName(node["NodeID"]))
            try:
                ray.get_actor(name, namespace="raymq")
            except ValueError:
                continue
            try:
                answer = ActorRef(name).call("status", timeout_s=ACCOUNT_TIMEOUT_S)
            except RaymqError as error:
                missing.append(f"{name}: {error}")
                continue
            for one in answer.get("instances", []):
                if InstanceName.parse(one["instance"]).group != group:
                    continue
                owners |= {str(queue): one["instance"] for queue in one["holding"]}
                rows.append(
                    GroupInstance(
                        one["instance"],
                        node["NodeManagerAddress"],
                        len(one["holding"]),
                        one["buffered"],
                        one["consumed"],
                        one["failures"],
                        str(one.get("last_error") or ""),
                        int(one.get("stuck_threads") or 0),
                    )
                )
        return tuple(rows), owners, tuple(missing)

    def reset_offsets(
        self,
        group: str,
        topic: str,
        to: str | None = None,
        *,
        timestamp_ms: int | None = None,
        offset: int | None = None,
        queue: MessageQueue | None = None,
        dry_run: bool = False,
    ) -> Sequence[OffsetMove]:
        """As Admin.reset_offsets."""
        if to not in (None, "earliest", "latest"):
            raise InvalidArgumentError(f'reset to "earliest" or "latest", not {to!r}')
        moves = self._admin.reset_offsets(
            group,
            topic,
            "earliest" if to == "earliest" else "latest" if to == "latest" else None,
            timestamp_ms=timestamp_ms,
            offset=offset,
            queue=queue,
            dry_run=dry_run,
        )
        return [OffsetMove(one, moves.old[one], moves[one]) for one in sorted(moves)]

    def clone_offsets(self, source: str, target: str, topic: str, *, dry_run: bool = False) -> Sequence[OffsetMove]:
        """As Admin.clone_offsets."""
        moves = self._admin.clone_offsets(source, target, topic, dry_run=dry_run)
        return [OffsetMove(one, moves.old[one], moves[one]) for one in sorted(moves)]

    def update_group(
        self, group: str, *, consume_enable: bool | None = None, retry_max_times: int | None = None
    ) -> None:
        """As Admin.update_group; None leaves as it is."""
        if consume_enable is not None:
            self._admin.update_group(group, consume_enable=consume_enable)
        if retry_max_times is not None:
            self._admin.update_group(group, retry_max_times=retry_max_times)

    def delete_group(self, group: str, *, dead_letters: bool = False) -> None:
        """As Admin.delete_group."""
        self._admin.delete_group(group, dead_letters=dead_letters)

    # The audit log

    def record_audit(self, entry: AuditEntry) -> None:
        """Store an entry in the audit log."""
        self._audit_log.write(entry)

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Return entries of the audit log, newest first."""
        return self._audit_log.read(limit, cursor)
