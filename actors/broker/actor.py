"""Broker: the control plane of one broker group.

It keeps topics, consumer groups and committed offsets (actors.core.broker.state), registers with every NameServer, and
starts what consumers need in the cluster (Rebalance and Pull actors). Messages do not pass through it, except for
`send` and `pull`: plain methods at the price of a second hop, so that any Ray program can produce and consume with
nothing but `ray.get_actor("broker-a", namespace="raymq")`.

What survives its death: all of the state, because each change is a record in the group's own log before it is answered.
A new instance reads the snapshot in `config/` and the records behind it. Safe to repeat: everything except `send`.

May wait for: its own Storage, NameServers. Never for another Broker, Rebalance or Pull.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import ray

from actors.actor_class import actor_class
from actors.broker.monitor import BrokerMonitor
from actors.broker.plain_answers import plain_errors, plain_pull_result, plain_send_result
from actors.broker.registrar import Registrar
from actors.broker.state_log import STORE_TIMEOUT_S, DecidedChanges, StateLog
from actors.core.broker.client_registry import ClientRegistry
from actors.core.broker.offsets import Owners, TopicCommits
from actors.core.broker.send_back import Returned, ReturnWriter, read_replayed, read_returned
from actors.core.broker.state import STATE_TOPIC, BrokerState, Change
from actors.core.broker.stats import GROUP_GET_NUMS, SNDBCK_PUT_NUMS
from actors.core.replica.orders import GroupLeader
from actors.options import PERSISTENT
from actors.pull.actor import PullActor
from actors.rebalance import RebalanceActor
from raymq.config.cluster import BrokerSettings
from raymq.consumer.pull_once import pull_messages
from raymq.consumer.push.settings import PushSettings
from raymq.consumer.subscription import Subscription
from raymq.errors import NoPermissionError, RaymqError, TopicNotExistError
from raymq.message import ConsumeFromWhere, Message, MessageQueue
from raymq.names import (
    AUTO_CREATE_TOPIC,
    CONTROLLER,
    RETRY_PREFIX,
    PullName,
    RebalanceName,
    StorageName,
    check_group,
    dlq_topic,
    is_internal_topic,
    retry_topic,
)
from raymq.producer.producer import Producer
from raymq.producer.settings import ProducerSettings
from raymq.protocol.clients import ClientHeartbeat, ConsumerConnection, ProducerConnection
from raymq.protocol.group import (
    CommitAnswer,
    GroupConfig,
    GroupQueueProgress,
    OffsetCommit,
    QueueOffset,
    SendBackAnswer,
    StartOffsetQuery,
)
from raymq.protocol.route import (
    MASTER_ID,
    PERM_ALL,
    PERM_INHERIT,
    PERM_READ,
    BrokerData,
    BrokerRegistration,
    QueueData,
    TopicConfig,
    TopicRoute,
)
from raymq.protocol.stats import GroupStats, TopicStats
from raymq.protocol.store import QueueBounds
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.storage_clients import StorageClients
from raymq.retry import persist_until

BROKER_HEARTBEAT_INTERVAL_S: Final = 2.0
LOOK_AGAIN_S: Final = 0.3
STATE_SNAPSHOT_INTERVAL_S: Final = 10.0
STATS_INTERVAL_S: Final = 10.0
PROTECT_INTERVAL_S: Final = 180.0
APPEND_TIMEOUT_S: Final = 5.0
AGREE_TIMEOUT_S: Final = 5.0
LEADER_TIMEOUT_S: Final = 2.0

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Broker:
    """The shell around one broker group's state and client registry, and around the thread that keeps it registered,
    snapshotted and counted."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._node_id = ray.get_runtime_context().get_node_id()
        self._storages = StorageClients(self._node_id)
        self._replicas = [str(StorageName(settings.broker_name, index)) for index in range(settings.replicas)]
        self._master_lock = threading.Lock()
        self._storage_name, self._epoch = self._replicas[0], 0
        self._storage = self._storages.get(self._storage_name)
        self._read_from = self._storage, 0
        """The store whose state is the present one, and the epoch in which it led then."""
        self._another_leads = threading.Event()
        self._life = time.time_ns()
        self._nodes: dict[int, str] = {}
        self._producer = self._make_producer("broker-send", allow_system_topics=False)
        self._state_producer = self._make_producer("broker-state", allow_system_topics=True)
        self._log = StateLog(settings.broker_name, self._storage, self._state_producer.send_batch)
        self._registrar = Registrar(
            settings.broker_name,
            settings.nameservers,
            self._registration,
            settings.options.registration_interval_s,
        )
        self._owners = Owners()
        self._returns = ReturnWriter(f"send-back-{secrets.token_hex(8)}", secrets.randbelow)
        self._returns_lock = threading.Lock()
        self._clients = ClientRegistry()
        self._clients_lock = threading.Lock()
        self._watch = BrokerMonitor(self._log, lambda: self._storage, settings.options, self.update_group)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._look, name="broker-master", daemon=True),
            threading.Thread(target=self._follow, name="broker-state", daemon=True),
            threading.Thread(target=self._register, name="broker-registration", daemon=True),
            threading.Thread(target=self._keep, name="broker-housekeeping", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _make_producer(self, group: str, *, allow_system_topics: bool) -> Producer:
        return Producer(
            group,
            routes=self,
            storage=self._storages.get,
            born_host=(ray.util.get_node_ip_address(), 0),
            settings=ProducerSettings(send_timeout_s=STORE_TIMEOUT_S),
            allow_system_topics=allow_system_topics,
        )

    # What a Producer asks for: this broker sends to its own queues only.

    def get(self, topic: str) -> TopicRoute:
        """The part of a topic's route that lies in this broker group; NoPermissionError where it may not be written."""
        config = TopicConfig(topic, 1, 1) if topic == STATE_TOPIC else self._log.ready().require_topic(topic)
        name = self._settings.broker_name
        data = BrokerData(self._settings.cluster, name, {MASTER_ID: self._storage_name})
        queues = QueueData(name, config.read_queue_nums, config.write_queue_nums, config.perm)
        return TopicRoute(topic, {name: data}, (queues,)).require_writable()

    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute:
        """`get`, after creating the topic where auto_create_topic_enable is on."""
        if topic != STATE_TOPIC and topic not in self._log.ready().topics:
            self.auto_create_topic(topic, default_topic_queue_nums)
        return self.get(topic)

    def forget(self, topic: str) -> None:
        """Nothing is cached here."""

    # Topics

    def create_topic(self, topic: str, read_queue_nums: int, write_queue_nums: int, layout: str = "") -> None:
        """Create a topic with so many queues in this group, and with the queues in all groups that `layout` says
        (raymq.protocol.route). Repeating it changes nothing; TopicExistsError if it exists with other numbers."""
        self._change(lambda state: state.decide_topic(topic, read_queue_nums, write_queue_nums, layout))

    def update_topic(
        self,
        topic: str,
        queue_nums: int | None = None,
        perm: int | None = None,
        order_config: str | None = None,
        layout: str = "",
    ) -> None:
        """Change what is given: more queues (never fewer), the permission, the queues of an order topic
        (raymq.protocol.route), or more queues in other groups (`layout`).

        TopicNotExistError, IllegalNameError, NoPermissionError (no permission), InvalidArgumentError.
        """
        self._change(lambda state: state.decide_topic_update(topic, queue_nums, perm, order_config, layout))

    def auto_create_topic(self, topic: str, default_topic_queue_nums: int, layout: str = "") -> None:
        """Create a topic that somebody sends to (spec/messaging.md §2.5); of one that exists, only the layout grows.

        TopicNotExistError where auto_create_topic_enable is off, IllegalNameError.
        """
        options = self._settings.options
        if not options.auto_create_topic_enable:
            self._log.ready().require_topic(topic)
            return
        most = options.default_topic_queue_nums
        self._change(lambda state: state.decide_auto_topic(topic, default_topic_queue_nums, most, layout))

    def delete_topic(self, topic: str) -> None:
        """Remove a topic, its queues and the offsets committed in it; TopicNotExistError.

        On return its store refuses messages for it, until it is created again.
        """
        try:
            self._change(lambda state: state.decide_topic_delete(topic))
        except TopicNotExistError:
            # This broker may have died between the two steps of an earlier attempt.
            self._store_control("delete_topic", topic)
            raise
        self._store_control("delete_topic", topic)
        self._log.read(lambda state: self._owners.forget(topic=topic))
        self._watch.forget(topic=topic)

    def topic_config(self, topic: str) -> TopicConfig:
        """A topic as this group holds it; TopicNotExistError."""
        return self._log.ready().require_topic(topic)

    # Consumer groups

    def ensure_group(self, group: str) -> None:
        """Make a consumer group known, and its retry topic. IllegalNameError; GroupNotExistError for a new one where
        auto_create_subscription_group is off."""
        auto_create = self._settings.options.auto_create_subscription_group
        self._change(lambda state: state.decide_group(group, auto_create=auto_create))

    def group_config(self, group: str) -> GroupConfig:
        """A group's configuration here; GroupNotExistError."""
        return self._log.ready().require_group(group)

    def check_broadcast(self, group: str) -> None:
        """NoPermissionError for a group that may not consume in BROADCASTING; one not known here may."""
        self._log.ready().check_broadcast(group)

    def update_group(self, config: GroupConfig) -> None:
        """Set a group's configuration, making the group if it is new. IllegalNameError, InvalidArgumentError."""
        self._change(lambda state: state.decide_group_config(config))

    def delete_group(self, group: str, dead_letters: bool = False) -> None:
        """Forget a group, its offsets and its retry topic, with `dead_letters` also those; GroupNotExistError."""
        self._change(lambda state: state.decide_group_delete(group))
        self._log.read(lambda state: self._owners.forget(group=group))
        self._watch.forget(group=group)
        for topic in [retry_topic(group)] + ([dlq_topic(group)] if dead_letters else []):
            with suppress(TopicNotExistError):
                self.delete_topic(topic)

    def groups(self) -> list[str]:
        """All groups known here, sorted."""
        return sorted(self._log.ready().groups)

    def commit_offsets(self, group: str, commits: Mapping[str, Mapping[int, OffsetCommit]]) -> CommitAnswer:
        """Commit, per topic and queue id, the offset of the next message to consume. Durable on return.

        The answer names the queues whose commits do not count, and why. In a group that may not consume (any more) they
        count, and all queues are answered as fenced. GroupNotExistError, InvalidArgumentError.
        """
        verdicts: dict[str, TopicCommits] = {}
        gone: list[str] = []
        before: dict[str, dict[int, int]] = {}

        def decide(state: BrokerState) -> list[Change]:
            nonlocal verdicts, gone, before
            changes, verdicts, gone = state.decide_commits(self._owners, group, commits)
            before = {topic: state.offsets.committed(group, topic) for topic in verdicts}
            return changes

        self._change(decide)
        self._count_gets(group, before, verdicts)
        stopped = not self.group_config(group).consume_enable
        fenced = {topic: commits[topic] if stopped else verdict.fenced for topic, verdict in verdicts.items()}
        return CommitAnswer(
            {self._queue(topic, q): at for topic, verdict in verdicts.items() for q, at in verdict.reset.items()},
            frozenset(self._queue(topic, q) for topic, queue_ids in fenced.items() for q in queue_ids),
            frozenset(self._queue(topic, q) for topic in gone for q in commits[topic]),
        )

    def _count_gets(
        self, group: str, before: Mapping[str, Mapping[int, int]], verdicts: Mapping[str, TopicCommits]
    ) -> None:
        for topic, verdict in verdicts.items():
            got = sum(max(at - before[topic].get(q, at), 0) for q, at in verdict.offsets.items())
            self._watch.count(GROUP_GET_NUMS, f"{topic}@{group}", got)

    def reset_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Set offsets outright, per queue id, also back; members hear of it with their next commit or question.

        Durable on return. GroupNotExistError, TopicNotExistError, InvalidArgumentError.
        """
        self._change(lambda state: state.decide_reset(group, topic, offsets))

    def committed_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Committed offset per queue id of this group's queues; queues without one are absent."""
        return self._log.ready().offsets.committed(group, topic)

    def start_offset(self, group: str, queue: MessageQueue, query: StartOffsetQuery, generation: int) -> QueueOffset:
        """Where the group starts in a queue (spec/messaging.md §2.9, §5.4): the committed offset, else by `query`.

        A member of the group asks with the generation of its assignment: where nothing is committed the start is,
        durably, so that a member that dies at once skips nothing; and commits of older generations are fenced from
        then on. Generation 0 only asks. CONSUME_FROM_LAST_OFFSET starts at 0 while the queue is young (its first
        message is still in memory), and so does a retry topic. TopicNotExistError, GroupNotExistError, and
        NoPermissionError where the group's consume_enable is off or the topic may not be read.
        """
        topic, queue_id = queue.topic, queue.queue_id
        known = self._log.ready()
        self._check_readable(known, group, topic)
        # Another replica's state may be the present one by the time that this is found out.
        offset = 0 if known.offsets.get(group, topic, queue_id) else self._first_offset(queue, query)

        def decide(state: BrokerState) -> Change | None:
            change = state.decide_start(group, topic, queue_id, offset)
            self._owners.note(group, topic, queue_id, generation)
            return change

        def committed(state: BrokerState) -> QueueOffset:
            table = state.offsets
            return table.get(group, topic, queue_id) or QueueOffset(offset, table.version(group, topic, queue_id))

        if generation:
            self._change(decide)
        return self._log.read(committed)

    def _first_offset(self, queue: MessageQueue, query: StartOffsetQuery) -> int:
        bounds = self._bounds(queue.topic, queue.queue_id)
        if query.where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET or queue.topic.startswith(RETRY_PREFIX):
            return bounds.min_offset
        if query.where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
            return self._read(
                lambda left_s: self._storage.offset_by_time(queue.topic, queue.queue_id, query.timestamp_ms, left_s)
            )
        young = bounds.min_offset == 0 and bounds.first_in_memory == 0
        return 0 if young else bounds.max_offset

    def _check_readable(self, state: BrokerState, group: str, topic: str) -> TopicConfig:
        config = state.require_topic(topic)
        if not config.perm & PERM_READ:
            raise NoPermissionError(
                f"topic {topic!r} may not be read (its permission has no R); see admin.update_topic"
            )
        if group in state.groups and not state.groups[group].consume_enable:
            raise NoPermissionError(
                f"group {group!r} may not consume: its consume_enable is off; see admin.update_group"
            )
        return config

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self._settings.broker_name, queue_id)

    def send_back(
        self, group: str, records: bytes, *, delay_level: int = 0, max_reconsume_times: int = -1
    ) -> SendBackAnswer:
        """Take back messages that the group could not consume, whole records as consumed, back to back.

        Each is delivered again from `%RETRY%group`, the later the more often it was given back, or after `delay_level`;
        after `max_reconsume_times` returns (negative: the group's retry_max_times), and with a negative `delay_level`,
        it goes to `%DLQ%group` instead (spec/messaging.md §5.9). Durable on return; a call that is repeated may do it
        twice. GroupNotExistError, InvalidArgumentError (damaged records), MessageIllegalError (properties too long).
        """
        config = self._log.ready().require_group(group)
        returned, answer = read_returned(
            records, config, delay_level=delay_level, max_reconsume_times=max_reconsume_times
        )
        topics = ([retry_topic(group)] if answer.retried else []) + ([dlq_topic(group)] if answer.dead else [])
        for topic in topics:
            nums = config.retry_queue_nums if topic == retry_topic(group) else 1
            self._change(partial(BrokerState.decide_group_topic, topic=topic, queue_nums=nums))
        self._store_returned(config, returned)
        for item in returned:
            self._watch.count(SNDBCK_PUT_NUMS, f"{item.parts.topic}@{group}", 1)
        return answer

    def replay(self, group: str, records: bytes) -> None:
        """Have the group consume dead letters again, whole records of `%DLQ%group` back to back, as if for the first
        time. Durable on return; a call that is repeated may do it twice. Raises as `send_back` does.
        """
        config = self._log.ready().require_group(group)
        self._store_returned(config, read_replayed(records))

    def _store_returned(self, config: GroupConfig, returned: Sequence[Returned]) -> None:
        with self._returns_lock:
            self._returns.store_host_ipv6 = ":" in self._storage.describe().store_host[0]
            batches = self._returns.batches(config.group, returned, config.retry_queue_nums)
            if batches:
                self._read(lambda left_s: self._storage.append(batches, min(left_s, APPEND_TIMEOUT_S)))

    def group_topics(self, group: str) -> list[str]:
        """Topics in whose queues here the group has committed; GroupNotExistError."""
        state = self._log.ready()
        state.require_group(group)
        return state.offsets.topics(group)

    def group_progress(self, group: str, topic: str) -> list[GroupQueueProgress]:
        """The group's committed offset, the end and the lag of every queue of a topic here; TopicNotExistError."""
        state = self._log.ready()
        committed = state.offsets.committed(group, topic)
        progress = []
        for queue_id in range(state.require_topic(topic).read_queue_nums):
            bounds = self._bounds(topic, queue_id)
            offset = committed.get(queue_id)
            following = max(offset or 0, bounds.min_offset)
            message = self._watch.message_at(topic, queue_id, following) if following < bounds.max_offset else None
            lag_ms = 0 if message is None else max(time.time_ns() // 1_000_000 - message.store_timestamp_ms, 0)
            queue = self._queue(topic, queue_id)
            progress.append(GroupQueueProgress(group, queue, offset, bounds.min_offset, bounds.max_offset, lag_ms))
        return progress

    def _bounds(self, topic: str, queue_id: int) -> QueueBounds:
        return self._read(lambda left_s: self._storage.queue_bounds(topic, queue_id, left_s))

    def open_group(self, group: str) -> str:
        """Make sure that the group's Rebalance actor runs; returns its name."""
        check_group(group)
        name = str(RebalanceName(group))
        RebalanceActor.options(name=name, get_if_exists=True).remote(group, self._settings.nameservers)
        return name

    def start_pull(self, settings: PushSettings, listener: Any) -> str:
        """Start a Pull actor for one push-consumer instance, under the first free name; returns it."""
        index = 0
        while True:
            name = str(PullName(settings.group, index))
            try:
                PullActor.options(name=name).remote(name, settings, self._settings.nameservers, listener)
                return name
            except ValueError:  # the name is taken
                index += 1

    # Messages, in two hops

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        tags: str | None = None,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        delay_level: int = 0,
        deliver_at_ms: int | None = None,
        wait_store_msg_ok: bool = True,
    ) -> dict[str, Any]:
        """Store one message in a queue of this group. Not safe to repeat: each call is a new message.

        A sharding key chooses among this group's queues only: not the queue that a producer, which counts all groups,
        sends it to. The answer and the errors need no raymq where they are read (actors.broker.plain_answers): a dict
        with status, message_id, offset_message_id, topic, broker_name, queue_id and queue_offset; ValueError for a
        message that breaks a rule, RuntimeError named TopicNotExistError (unless auto_create_topic_enable is on),
        NoPermissionError…
        """
        with plain_errors():
            self._log.ready()  # or calls of a broker that starts would hold its threads for the whole send timeout
            message = Message(
                topic,
                body,
                tags,
                tuple([keys] if isinstance(keys, str) else keys),
                dict(properties or {}),
                delay_level=delay_level,
                deliver_at_ms=deliver_at_ms,
                wait_store_msg_ok=wait_store_msg_ok,
            )
            return plain_send_result(self._producer.send(message, sharding_key=sharding_key))

    def pull(
        self,
        group: str,
        topic: str,
        *,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        tags: str = "*",
        wait_s: float = 0.0,
    ) -> dict[str, Any]:
        """Read a queue of this group from `offset`, waiting up to `wait_s` (at most 15 s) for a message.

        The answer and the errors need no raymq where they are read (actors.broker.plain_answers): a dict with status,
        messages, next_offset, min_offset and max_offset, each message a dict of MessageExt's fields; ValueError for an
        argument that breaks a rule and an offset the queue has not, RuntimeError named TopicNotExistError,
        NoPermissionError (a topic that may not be read, a group that may not consume)…
        """
        with plain_errors():
            check_group(group)
            config = self._check_readable(self._log.ready(), group, topic)
            queue = self._queue(topic, queue_id)
            wanted = Subscription.parse(topic, tags)
            nums = config.read_queue_nums
            result = pull_messages(self._storage, queue, nums, wanted, offset, max_messages, wait_s)
            return plain_pull_result(result)

    # Clients and counters

    def heartbeat(self, heartbeat: ClientHeartbeat) -> None:
        """Hear a client: what it says it has replaces what it said before. Its groups become known here."""
        for group in {consumer.group for consumer in heartbeat.consumers} - set(self._log.ready().groups):
            self.ensure_group(group)
        with self._clients_lock:
            self._clients.heartbeat(heartbeat, time.monotonic())

    def unregister_client(self, client_id: str) -> None:
        """Forget a client that ends."""
        with self._clients_lock:
            self._clients.unregister(client_id)

    def producer_connections(self, group: str | None = None) -> list[ProducerConnection]:
        """The clients that produce in a group, or in any, as they said in the last two minutes."""
        with self._clients_lock:
            return self._clients.producers(time.monotonic(), group)

    def consumer_connections(self, group: str | None = None) -> list[ConsumerConnection]:
        """The consumers of a group, or of all, as their clients said in the last two minutes."""
        with self._clients_lock:
            return self._clients.consumers(time.monotonic(), group)

    def topic_stats(self, topic: str) -> TopicStats:
        """What was put into a topic here; TopicNotExistError."""
        self._log.ready().require_topic(topic)
        return self._watch.topic_stats(topic)

    def group_stats(self, group: str) -> dict[str, GroupStats]:
        """What a group got and gave back here, by topic; GroupNotExistError."""
        self._log.ready().require_group(group)
        return self._watch.group_stats(group)

    # Life

    def status(self) -> dict[str, Any]:
        """Counts, for `raymq status`."""
        state = self._log.ready() if self._log.is_ready else BrokerState()
        return {
            "broker": self._settings.broker_name,
            "ready": self._log.is_ready,
            "waiting_for": "" if self._log.is_ready else self._log.waiting_for,
            "topics": sorted(topic for topic in list(state.topics) if not is_internal_topic(topic)),
            "groups": sorted(state.groups),
            "storage": self._storage_name,
            "deleted_unread": self._watch.unread(),
        }

    def look_for_master(self) -> None:
        """Find out who leads this group's replicas: what is under way goes there from now on, and its log is read by a
        thread. Nothing to do where there is only one."""
        if self._settings.replicas == 1:
            return
        leader: GroupLeader = ActorRef(CONTROLLER).call(
            "leader", self._settings.broker_name, timeout_s=LEADER_TIMEOUT_S
        )
        with self._master_lock:
            if leader.master is None or leader.epoch <= self._epoch:
                return
            logger.warning("%s: replica %d leads epoch %d", self._settings.broker_name, leader.master, leader.epoch)
            name = str(StorageName(self._settings.broker_name, leader.master))
            self._storage, self._storage_name, self._epoch = self._storages.get(name), name, leader.epoch
        self._another_leads.set()

    def _read_master(self) -> None:
        """Go on from the master's state, if it is another one than was read last, and say so to the NameServers."""
        with self._master_lock:
            storage, epoch = self._storage, self._epoch
        if self._read_from[1] == epoch and self._log.is_ready:
            return
        # Nobody who looks for the next master waits here: a change that is under way may need it in order to end.
        self._log.move(storage, [self._storages.get(name) for name in self._replicas if name != storage.name])
        # Once only: where the new master has died, too, there will be another. Which topics were deleted is known where
        # it led then; before it is told, none is created.
        tell = partial(storage.control, "agree_on_topics", timeout_s=AGREE_TIMEOUT_S)
        self._log.load(lambda state: tell(list(state.topics)))
        self._read_from = storage, epoch
        self._registrar.register()

    def close(self) -> None:
        """Write the snapshot and leave the NameServers. The storage actor must still run."""
        self._stopping.set()
        self._another_leads.set()
        for thread in self._threads:
            thread.join(STORE_TIMEOUT_S)
        self._producer.close()
        self._state_producer.close()
        if self._log.is_ready:
            self._log.snapshot()
        self._registrar.leave()
        self._storages.close()

    # Threads, each for what must not wait for the others: a store or a NameServer may stand still.

    def _look(self) -> None:
        """Find the master, and the next one."""
        while self._settings.replicas > 1 and not self._stopping.is_set():
            self._try(self.look_for_master)
            self._stopping.wait(BROKER_HEARTBEAT_INTERVAL_S if self._log.is_ready else LOOK_AGAIN_S)

    def _follow(self) -> None:
        """Read the master's state, and the next one's."""
        if self._settings.replicas == 1:
            self._log.load_until(self._stopping)
            return
        while not self._stopping.is_set():
            if self._epoch:
                self._try(self._read_master)
            self._another_leads.wait(BROKER_HEARTBEAT_INTERVAL_S if self._log.is_ready else LOOK_AGAIN_S)
            self._another_leads.clear()

    def _register(self) -> None:
        """Stay known to the NameServers. Before the master's state is read there is nothing to tell."""
        while not self._stopping.is_set():
            if self._log.is_ready:
                self._try(self._registrar.beat)
            self._stopping.wait(BROKER_HEARTBEAT_INTERVAL_S if self._log.is_ready else LOOK_AGAIN_S)

    def _keep(self) -> None:
        """Count, write the snapshot, and protect the store."""
        tasks = {
            self._watch.sample: STATS_INTERVAL_S,
            self._watch.note_deletions: STATS_INTERVAL_S,
            self._log.snapshot: STATE_SNAPSHOT_INTERVAL_S,
            self._watch.protect: PROTECT_INTERVAL_S,
        }
        due_s = dict.fromkeys(tasks, 0.0)
        while not self._stopping.is_set():
            for task, every_s in tasks.items():
                if self._log.is_ready and time.monotonic() >= due_s[task]:
                    due_s[task] = time.monotonic() + every_s
                    self._try(task)
            self._stopping.wait(BROKER_HEARTBEAT_INTERVAL_S if self._log.is_ready else LOOK_AGAIN_S)

    def _try(self, task: Callable[[], None]) -> None:
        """A task that comes again by itself: a failure now is only noted. Without its thread the group would never find
        its next master, or be forgotten, so even a fault of the program does not end it."""
        try:
            task()
        except RaymqError as error:
            logger.warning(
                "%s: %s failed and is tried again later: %s", self._settings.broker_name, task.__name__, error
            )
        except Exception:
            logger.exception("%s: %s failed and is tried again later", self._settings.broker_name, task.__name__)

    def _change(self, decide: Callable[[BrokerState], DecidedChanges]) -> None:
        """Carry a change out. If it concerns topics, the NameServers are told before it is answered."""
        if self._log.change(decide):
            self._registrar.register()

    def _registration(self) -> BrokerRegistration:
        storage, epoch = self._read_from
        name = storage.name
        try:
            self._nodes = {MASTER_ID: storage.describe().node_id}
        except RaymqError as error:
            logger.info("%s does not say where it is: %s", name, error)
        topics, version = self._log.read(lambda state: (tuple(state.topics.values()), state.topics_version))
        if self._settings.options.auto_create_topic_enable:
            nums = self._settings.options.default_topic_queue_nums
            topics += (TopicConfig(AUTO_CREATE_TOPIC, nums, nums, PERM_ALL | PERM_INHERIT),)
        return BrokerRegistration(
            self._settings.cluster,
            self._settings.broker_name,
            dict(enumerate([name, *(other for other in self._replicas if other != name)])),
            topics,
            replace(version, state_version=epoch),
            dict(self._nodes),
            self._life,
            self._settings.slave_read_enable,
        )

    def _store_control(self, method: str, *args: Any) -> Any:
        return self._read(lambda left_s: self._storage.control(method, *args, timeout_s=left_s))

    def _read(self, call: Callable[[float], T]) -> T:
        """A call to the store that is safe to repeat, over a restart of its actor."""
        return persist_until(time.monotonic() + STORE_TIMEOUT_S, call)


BROKER_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 32}
BrokerActor = ray.remote(**BROKER_OPTIONS)(actor_class(Broker))
