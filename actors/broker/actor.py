"""Broker: the control plane of one broker group.

The broker stores topics, consumer groups and committed offsets (actors.core.broker.state), registers with every
NameServer, and starts the Rebalance and Pull actors that consumers need. Messages do not pass through the broker,
except for `send` and `pull`. These two methods cost a second hop, but let any Ray program produce and consume with
nothing but `ray.get_actor("broker-a", namespace="raymq")`.

This module has the remote methods, except the methods for consumer groups (actors.broker.group_methods) and for simple
consumers (actors.broker.pop). Decisions belong in actors.core.broker.

All of the state survives a crash of the broker, because the broker stores each change as a record in the group's own
log before it answers. A new instance reads the snapshot in `config/` and the later records. Every call except `send` is
safe to repeat.

The broker may wait for its own Storage and for NameServers, never for another Broker, a Rebalance or a Pull actor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raymq
from actors.access.authenticated_server import access_for
from actors.actor_class import actor_class
from actors.broker.broker_metrics import BrokerMetrics, Clients
from actors.broker.direct_appends import DirectAppends
from actors.broker.lane import BrokerLane
from actors.broker.live.methods import SettingsMethods
from actors.broker.live.users import UserMethods
from actors.broker.master_store import MasterStore, OwnRoutes
from actors.broker.monitor import TOPIC_CREATION, BacklogWatch, BrokerMonitor
from actors.broker.plain_answers import plain_errors, plain_pull_result, plain_send_result
from actors.broker.pop.methods import PopMethods
from actors.broker.pop.queue_ends import QueueEndsWatch
from actors.broker.registrar import Registrar
from actors.broker.state_log import DecidedChanges, StateLog
from actors.broker.state_records import STORE_TIMEOUT_S, StateRecords
from actors.core.broker.client_registry import ClientRegistry
from actors.core.broker.state import BrokerState
from actors.members.direct_methods import DirectMethods
from actors.members.methods import QuestionMethods
from actors.metrics_thread import MetricsThread
from actors.options import PERSISTENT
from actors.pull.actor import PullActor
from actors.rebalance import start_rebalance
from actors.register import next_life
from actors.threads import take_turns_quickly
from actors.transactions.methods import TransactionMethods
from raymq.client.consumer.pull_once import pull_messages
from raymq.client.consumer.subscription import Subscription
from raymq.client.producer.producer import Producer
from raymq.client.producer.settings import ProducerSettings
from raymq.common.config.cluster import BrokerSettings
from raymq.common.errors import NoPermissionError, RaymqError, TopicNotExistError
from raymq.common.message import Message
from raymq.common.names import AUTO_CREATE_TOPIC, TRACE_TOPIC, PullName, check_group, is_internal_topic, reply_topic
from raymq.common.protocol.attributes import NO_ATTRIBUTES
from raymq.common.protocol.bounds import BOUND_ATTRIBUTES
from raymq.common.protocol.clients import ClientHeartbeat, ConsumerConnection, ProducerConnection
from raymq.common.protocol.request_reply import REPLY_QUEUES
from raymq.common.protocol.route import (
    MASTER_ID,
    PERM_ALL,
    PERM_INHERIT,
    PERM_WRITE,
    BrokerRegistration,
    NewTopic,
    TopicConfig,
)
from raymq.common.protocol.stats import TopicStats
from raymq.remoting.broker_client import BrokerDescription
from raymq.remoting.storage_clients import StorageClients
from raymq.telemetry.metrics.client_figures import ClientMetrics

BROKER_HEARTBEAT_INTERVAL_S: Final = 2.0
NOT_READY_INTERVAL_S: Final = 0.3
STATE_SNAPSHOT_INTERVAL_S: Final = 10.0
STATS_INTERVAL_S: Final = 10.0
SETTINGS_INTERVAL_S: Final = 10.0
PROTECT_INTERVAL_S: Final = 180.0
AGREE_TIMEOUT_S: Final = 5.0

logger = logging.getLogger(__name__)


class Broker(PopMethods, TransactionMethods, SettingsMethods, UserMethods, QuestionMethods, DirectMethods):
    """The actor that serves the state and the client registry of one broker group.

    Its threads find the group's master, read the state from the master, keep the broker registered, and run the
    housekeeping.
    """

    def __init__(self, settings: BrokerSettings) -> None:
        take_turns_quickly()
        node_id = ray.get_runtime_context().get_node_id()
        self._storages = StorageClients(node_id)
        store = MasterStore(settings.broker_name, settings.replicas, self._storages)
        self._routes = OwnRoutes(settings, store, self._state, self.auto_create_topic)
        self._producer = Producer(
            "broker-send",
            routes=self._routes,
            storage=self._storages.get,
            born_host=(ray.util.get_node_ip_address(), 0),
            settings=ProducerSettings(send_timeout_s=STORE_TIMEOUT_S),
        )
        records = StateRecords(lambda: store.storage, (ray.util.get_node_ip_address(), 0))
        log = StateLog(settings.broker_name, store.storage, records.append)
        monitor = BrokerMonitor(log, lambda: store.storage, settings.options, self.update_group)
        PopMethods.__init__(self, settings, log, store, monitor, QueueEndsWatch(lambda: store.storage))
        TransactionMethods.__init__(self, store, self._make_system_topic)
        SettingsMethods.__init__(self, settings, store, self._storages)
        QuestionMethods.__init__(self, lambda: self._lane.loop)
        DirectMethods.__init__(self, lambda: self._lane.loop, log.state_now)
        self._backlogs = BacklogWatch(settings.broker_name, log, lambda: store.storage, self._change)
        self._read_from = store.present()
        """The storage actor from which this broker read its current state, and the epoch in which that actor was the
        master."""
        self._another_leads = threading.Event()
        self._copied: tuple[list[str], frozenset[str]] = store.replicas, store.stores
        """The replicas, and the directories in the sync-state set, to which the snapshot of the state is written."""
        self._life = next_life(settings.broker_name)
        self._nodes: dict[int, str] = {}
        self._registrar = Registrar(
            settings.broker_name,
            settings.nameservers,
            self._registration,
            settings.options.registration_interval_s,
        )
        self._clients = ClientRegistry(started_s=time.monotonic())
        self._clients_lock = threading.Lock()
        self._client_metrics = _client_metrics(settings)
        self._metrics: MetricsThread | None = None
        self._node_id = node_id
        self._lane = BrokerLane(
            settings.broker_name,
            self,
            self._commit_soon,
            ray.util.get_node_ip_address(),
            {**self._answered_later, "take_questions": self._take_questions_soon, **self._direct_answered_later},
            settings.options,
            self._direct_connection,
        )
        self._direct = DirectAppends(self._lane.loop, records, node_id)
        log.write_by(self._direct)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow_masters, name="broker-master", daemon=True),
            threading.Thread(target=self._read_masters, name="broker-state", daemon=True),
            threading.Thread(target=self._stay_registered, name="broker-registration", daemon=True),
            threading.Thread(target=self._do_housekeeping, name="broker-housekeeping", daemon=True),
            threading.Thread(target=self._do_checks, name="broker-checks", daemon=True),
            threading.Thread(target=self._limit_topics, name="broker-bounds", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        figures = BrokerMetrics(
            log,
            monitor,
            lambda: store.storage,
            self._connections,
            raymq.__version__,
            self._lane.requests,
            self._backlogs,
            self._direct_figures,
        )
        self._metrics = MetricsThread(
            settings.metrics,
            "broker",
            settings.broker_name,
            figures.report,
            figures.report_lags,
            broker=settings.broker_name,
        )
        self._limit_metrics()

    def _state(self) -> BrokerState:
        return self._log.ready()

    # Methods for topics

    def create_topic(
        self,
        topic: str,
        read_queue_nums: int,
        write_queue_nums: int,
        layout: str = "",
        attributes: Mapping[str, str] = NO_ATTRIBUTES,
    ) -> None:
        """Create a topic in this broker group, with the given numbers of queues.

        `layout`: the topic's queues in all broker groups (raymq.common.protocol.route). `attributes`: RocketMQ's topic
        attributes (raymq.common.protocol.attributes). Repeating the call changes nothing. Raises TopicExistsError if
        the topic exists with other numbers or attributes, IllegalNameError if the name is invalid, and
        InvalidArgumentError if another argument is invalid.
        """
        with self._monitor.creations.measure(TOPIC_CREATION):
            self._change(lambda state: state.decide_topic(topic, read_queue_nums, write_queue_nums, layout, attributes))
        self._bound_now(attributes)

    def create_topics(self, topics: Sequence[NewTopic]) -> bool:
        """Create several topics atomically: all of them, or none if an error is raised. Repeating the call changes
        nothing.

        Returns True if every NameServer has the topics on return; otherwise the NameServers get the topics soon. Raises
        the errors of `create_topic`.
        """
        with self._monitor.creations.measure(TOPIC_CREATION):
            known_to_all = self._change(lambda state: state.decide_topics(topics))
        self._bound_now(*(new.attributes for new in topics))
        return known_to_all

    def update_topic(
        self,
        topic: str,
        queue_nums: int | None = None,
        perm: int | None = None,
        order_config: str | None = None,
        layout: str = "",
        attributes: Mapping[str, str] = NO_ATTRIBUTES,
    ) -> None:
        """Change a topic's configuration; arguments that are not given stay unchanged.

        `queue_nums` may only grow. `perm` is the permission. `order_config` sets the queues of an order topic
        (raymq.common.protocol.route). `layout` adds queues in other broker groups. An empty value in `attributes`
        removes the attribute.

        Raises TopicNotExistError if the topic does not exist, IllegalNameError for a system topic, NoPermissionError if
        `perm` is not a valid permission, and InvalidArgumentError if another value is invalid.
        """
        self._change(lambda state: state.decide_topic_update(topic, queue_nums, perm, order_config, layout, attributes))
        self._bound_now(attributes)

    def _bound_now(self, *attributes: Mapping[str, str]) -> None:
        """Put the bounds of topics into force after a change of `attributes`. Does nothing if no attribute is a part of
        a bound.

        Every replica gets the bounds in a snapshot, because it may become the master before the next measurement. If a
        store does not answer, the bounds are in force later.
        """
        if any(name in changed for changed in attributes for name in BOUND_ATTRIBUTES):
            self._try(self._log.snapshot)
            self._try(self._backlogs.measure_backlogs)

    def auto_create_topic(self, topic: str, default_topic_queue_nums: int, layout: str = "") -> None:
        """Create a topic because a message is sent to it (spec/messaging.md §2.5). If the topic already exists, only
        add the queues in `layout` to it.

        Raises TopicNotExistError if auto_create_topic_enable is off, and IllegalNameError if the name is invalid.
        """
        options = self._settings.options
        if not options.auto_create_topic_enable:
            self._log.ready().require_topic(topic)
            return
        most = options.default_topic_queue_nums
        self._change(lambda state: state.decide_auto_topic(topic, default_topic_queue_nums, most, layout))

    def delete_topic(self, topic: str) -> None:
        """Remove a topic, its queues and the offsets committed in it. Raises TopicNotExistError if the topic does not
        exist.

        After the return, the store rejects messages for the topic until the topic is created again.
        """
        try:
            self._change(lambda state: state.decide_topic_delete(topic))
        except TopicNotExistError:
            # This broker does not have the topic, perhaps because it crashed in the middle of an earlier deletion.
            # Delete the topic in the store nevertheless.
            self._store.control("delete_topic", topic)
            raise
        self._store.control("delete_topic", topic)
        self._log.read(lambda state: self._owners.forget(topic=topic))
        self._monitor.forget(topic=topic)
        self._backlogs.forget(topic=topic)

    def topic_config(self, topic: str) -> TopicConfig:
        """Return a topic's configuration in this broker group. Raises TopicNotExistError if the topic does not
        exist."""
        return self._log.ready().require_topic(topic)

    def start_rebalance(self) -> list[str]:
        """Start the Rebalance actors that do not run yet, and return the names of all Rebalance actors."""
        settings = self._settings
        return start_rebalance(settings.rebalance_servers, settings.nameservers, settings.metrics)

    def start_pull(self, node_id: str) -> str:
        """Start the Pull actor of a Ray node if it does not run yet, on that node if possible, and return the actor's
        name."""
        name = str(PullName(node_id))
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=True)
        PullActor.options(name=name, get_if_exists=True, scheduling_strategy=strategy).remote(
            self._settings.nameservers, **access_for(name)
        )
        return name

    # Methods for messages that pass through the broker (two network hops)

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
        """Store one message in a queue of this broker group. Not safe to repeat: each call stores a new message.

        A sharding key selects one of this group's queues. A producer selects among the queues of all groups, and may
        send the same key to another queue. The caller can read the answer and the errors without raymq
        (actors.broker.plain_answers). The answer is a dict with status, message_id, offset_message_id, topic,
        broker_name, queue_id and queue_offset. Raises ValueError if the message breaks a rule. Raises RuntimeError with
        the name of the raymq error otherwise, for example TopicNotExistError (unless auto_create_topic_enable is on) or
        NoPermissionError.
        """
        with plain_errors():
            if not self._settings.options.broker_permission & PERM_WRITE:
                raise NoPermissionError(
                    f"broker group {self._settings.broker_name!r} accepts no messages (broker_permission); send "
                    f"to another broker group, or run `raymq broker writable on {self._settings.broker_name}`"
                )
            # Raise an error now if the state log is not ready. Otherwise the call would occupy its thread until the
            # send timeout.
            self._log.ready()
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
        """Read messages of a queue of this group from `offset`, waiting up to `wait_s` (at most 15 s) for a message.

        The caller can read the answer and the errors without raymq (actors.broker.plain_answers). The answer is a dict
        with status, messages, next_offset, min_offset and max_offset; each message is a dict of MessageExt's fields.
        Raises ValueError if an argument breaks a rule or the queue does not have the offset. Raises RuntimeError with
        the name of the raymq error otherwise, for example TopicNotExistError, or NoPermissionError (the topic may not
        be read, or the group may not consume at all or not this topic).
        """
        with plain_errors():
            check_group(group)
            config = self._log.ready().check_readable(group, topic)
            queue = self._queue(topic, queue_id)
            wanted = Subscription.parse(topic, tags)
            nums = config.read_queue_nums
            result = pull_messages(self._store.storage, queue, nums, wanted, offset, max_messages, wait_s)
            return plain_pull_result(result)

    # Methods about the broker's clients (heartbeats and connections), and about its counters

    def heartbeat(self, heartbeat: ClientHeartbeat) -> ClientMetrics:
        """Replace the producers and consumers that are recorded for a client, and create their groups if they are new.

        Returns the metrics that the client should report.
        """
        known = self._log.ready().groups
        for group in {consumer.group for consumer in heartbeat.consumers if consumer.group not in known}:
            self.ensure_group(group)
        with self._clients_lock:
            self._clients.heartbeat(heartbeat, time.monotonic())
        return self._client_metrics

    def unregister_client(self, client_id: str) -> None:
        """Remove a client that has shut down from the broker's list of clients."""
        with self._clients_lock:
            self._clients.unregister(client_id)
        self._client_has_ended(client_id)

    def knows_client(self, client_id: str) -> bool:
        """Return False if a client is gone: it has unregistered, or its last heartbeat is more than two minutes old.

        Returns True during the first two minutes after the broker's start, because not all clients may have sent a
        heartbeat yet.
        """
        with self._clients_lock:
            return self._clients.knows(client_id, time.monotonic())

    def producer_connections(self, group: str | None = None) -> list[ProducerConnection]:
        """Return the producers of a group, or of all groups, whose clients sent a heartbeat in the last two minutes."""
        with self._clients_lock:
            return self._clients.producers(time.monotonic(), group)

    def consumer_connections(self, group: str | None = None) -> list[ConsumerConnection]:
        """Return the consumers of a group, or of all groups, whose clients sent a heartbeat in the last two minutes."""
        with self._clients_lock:
            return self._clients.consumers(time.monotonic(), group)

    def _connections(self) -> Clients:
        with self._clients_lock:
            now_s = time.monotonic()
            return Clients(self._clients.producers(now_s), self._clients.consumers(now_s))

    def topic_stats(self, topic: str) -> TopicStats:
        """Return how many messages and bytes were stored in a topic in this broker group. Raises TopicNotExistError if
        the topic does not exist."""
        self._log.ready().require_topic(topic)
        return self._monitor.topic_stats(topic)

    # Methods for the broker's description, its status and its shutdown

    def describe(self) -> BrokerDescription:
        """Return the description of this broker, with the address of its lane (direct socket connection)."""
        return BrokerDescription(self._settings.broker_name, self._node_id, self._lane.address)

    def status(self) -> dict[str, Any]:
        """Return the broker's report for `raymq status`: its readiness, topics, groups, request counts and changed
        settings."""
        state = self._log.ready() if self._log.is_ready else BrokerState()
        return {
            "broker": self._settings.broker_name,
            "ready": self._log.is_ready,
            "waiting_for": "" if self._log.is_ready else self._log.waiting_for,
            "topics": sorted(topic for topic in list(state.topics) if not is_internal_topic(topic)),
            "groups": sorted(state.groups),
            "storage": self._store.storage.name,
            "deleted_unread": self._monitor.unread(),
            "requests": [one._asdict() for one in self._lane.requests()],
            "settings": self._differing({**state.settings, **self._ordered()}),
        }

    def look_for_master(self) -> None:
        """Ask the Controller which replica of this group is the master.

        If there is a new master, the broker sends its calls to the new master from now on, and a thread reads that
        master's log. If the group's replicas have changed, the next snapshot of the state is written to all of them.
        Does nothing in a group without a Controller. Raises RaymqError if the Controller does not answer.
        """
        if not self._settings.replication.has_controller:
            return
        if self._store.find():
            self._another_leads.set()
        copied = self._store.replicas, self._store.stores
        if copied != self._copied:
            # A replica has joined or left, or a directory has come into the sync-state set. It may lack the snapshot.
            self._copied = copied
            self._log.change_copies(self._store.copies(self._store.storage))

    def _read_master(self) -> None:
        """Read the broker's state from its store's master, and register with the NameServers, if the master has changed
        since the last read."""
        storage, epoch = self._store.present()
        if self._read_from[1] == epoch and self._log.is_ready:
            return
        # `StateLog.move` waits until a running change of the state has ended, and this change may end only after the
        # next master is found. So this thread cannot search for the next master: a separate thread asks the Controller.
        self._log.move(storage, self._store.copies(storage))
        # Send the existing topics to the new master before any topic can be created. The new master may lack topic
        # deletions, because a store records deletions only while it is the master. This call is not retried. If the new
        # master has crashed, too, another master will follow.
        agree_on_topics = partial(storage.control, "agree_on_topics", timeout_s=AGREE_TIMEOUT_S)
        self._log.load(lambda state: agree_on_topics(list(state.topics)))
        self._read_from = storage, epoch
        self._registrar.register()

    def close(self) -> None:
        """Write the snapshot and unregister from the NameServers. The storage actor must still run during this
        call."""
        if self._metrics is not None:
            self._metrics.close()
        self._receives.close()
        self._direct.close()
        self._lane.close()
        self._stopping.set()
        self._another_leads.set()
        for thread in self._threads:
            thread.join(STORE_TIMEOUT_S)
        self._producer.close()
        self._log.close()
        if self._log.is_ready:
            self._log.snapshot()
        self._registrar.leave()
        self._storages.close()

    # Loops of the broker's threads. No loop may wait for another loop, because a store or a NameServer may hang.

    def _follow_masters(self) -> None:
        """Ask the Controller for the group's current master at intervals."""
        while self._settings.replication.has_controller and not self._stopping.is_set():
            self._try(self.look_for_master)
            self._stopping.wait(BROKER_HEARTBEAT_INTERVAL_S if self._log.is_ready else NOT_READY_INTERVAL_S)

    def _read_masters(self) -> None:
        """Read the state of each new master as soon as the Controller has named it."""
        if not self._settings.replication.has_controller:
            self._log.load_until(self._stopping)
            return
        while not self._stopping.is_set():
            if self._store.epoch:
                self._try(self._read_master)
            self._another_leads.wait(BROKER_HEARTBEAT_INTERVAL_S if self._log.is_ready else NOT_READY_INTERVAL_S)
            self._another_leads.clear()

    def _stay_registered(self) -> None:
        """Send heartbeats to the NameServers at intervals, after the master's state has been read."""
        while not self._stopping.is_set():
            if self._log.is_ready:
                self._try(self._registrar.beat)
            self._stopping.wait(BROKER_HEARTBEAT_INTERVAL_S if self._log.is_ready else NOT_READY_INTERVAL_S)

    def _do_housekeeping(self) -> None:
        """Run the periodic tasks, each at its interval.

        The tasks sample the counters, record losses of unread messages, write the snapshot, and switch off groups that
        lag too far. They also send changed settings to the storage actors, and drop committed offsets that no group can
        use.
        """
        tasks = {
            self._monitor.sample: STATS_INTERVAL_S,
            self._monitor.note_deletions: STATS_INTERVAL_S,
            self._log.snapshot: STATE_SNAPSHOT_INTERVAL_S,
            self._monitor.protect: PROTECT_INTERVAL_S,
            self._keep_settings: SETTINGS_INTERVAL_S,
        }
        self._repeat(
            {
                **{task: partial(float, every_s) for task, every_s in tasks.items()},
                self._sweep_offsets: lambda: self._settings.options.offset_sweep_interval_ms / 1000,
            }
        )

    def _do_checks(self) -> None:
        """Check transactions in a separate thread: a check round may take a minute, and must not delay a
        snapshot."""
        self._repeat({self._check_transactions: lambda: self._settings.options.transaction_check_interval_ms / 1000})

    def _limit_topics(self) -> None:
        """Measure the backlogs of bounded topics in a separate thread: producers that wait for room depend on it."""
        self._repeat({self._backlogs.measure_backlogs: lambda: self._backlogs.interval_s})

    def _repeat(self, tasks: Mapping[Callable[[], None], Callable[[], float]]) -> None:
        """Run each task at its interval in seconds, as long as the broker's state is loaded. An interval may change
        between runs."""
        began_s: dict[Callable[[], None], float] = {}
        while not self._stopping.is_set():
            for task, every_s in tasks.items():
                if self._log.is_ready and (task not in began_s or time.monotonic() >= began_s[task] + every_s()):
                    began_s[task] = time.monotonic()
                    self._try(task)
            due_s = min((began_s.get(task, 0.0) + every_s() for task, every_s in tasks.items()), default=0.0)
            next_s = min(max(due_s - time.monotonic(), 0.0), BROKER_HEARTBEAT_INTERVAL_S)
            self._stopping.wait(next_s if self._log.is_ready else NOT_READY_INTERVAL_S)

    def _try(self, task: Callable[[], None]) -> None:
        """Run a periodic task, and log an exception instead of raising it.

        If an exception ended the thread, the group would never find its next master, or the NameServers would drop the
        broker. So even a programming error does not end the thread.
        """
        try:
            task()
        except RaymqError as error:
            logger.warning("broker %s: %s failed, retrying later: %s", self._settings.broker_name, task.__name__, error)
        except Exception:
            logger.exception("broker %s: %s failed, retrying later", self._settings.broker_name, task.__name__)

    def _change(self, decide: Callable[[BrokerState], DecidedChanges]) -> bool:
        """Apply a change to the broker's state.

        If the change affects topics, all reachable NameServers have the change on return. Returns True if topics
        changed and all NameServers have the change.
        """
        return self._log.change(decide) and self._registrar.register()

    def _take_settings(self, settings: BrokerSettings) -> None:
        """Apply new settings. Only live settings may differ from the current settings."""
        self._settings = settings
        self._monitor.options = settings.options
        self._lane.limit(settings.options)
        self._registrar.interval_s = settings.options.registration_interval_s
        self._client_metrics = _client_metrics(settings)
        self._limit_metrics()

    def _subscriptions(self) -> Mapping[str, Collection[str]] | None:
        with self._clients_lock:
            return self._clients.subscriptions(time.monotonic())

    def _limit_metrics(self) -> None:
        limits = self._settings.metrics.options
        if self._metrics is not None:
            self._metrics.limit(limits.per_topic_max, limits.per_group_max)

    def _make_system_topic(self, topic: str) -> None:
        self._change(partial(BrokerState.decide_group_topic, topic=topic, queue_nums=1))

    def _registration(self) -> BrokerRegistration:
        self._follow_settings()
        storage, epoch = self._read_from
        name = storage.name
        try:
            self._nodes = {MASTER_ID: storage.describe().node_id}
        except RaymqError as error:
            logger.info("cannot get the node of actor %s: %s", name, error)
        topics, version = self._log.read(lambda state: (tuple(state.topics.values()), state.topics_version))
        if self._settings.options.auto_create_topic_enable:
            nums = self._settings.options.default_topic_queue_nums
            topics += (TopicConfig(AUTO_CREATE_TOPIC, nums, nums, PERM_ALL | PERM_INHERIT),)
        topics += (
            TopicConfig(reply_topic(self._settings.cluster), REPLY_QUEUES, REPLY_QUEUES),
            TopicConfig(TRACE_TOPIC, 1, 1),
        )
        forbidden = PERM_ALL & ~self._settings.options.broker_permission
        if forbidden:
            topics = tuple(replace(config, perm=config.perm & ~forbidden) for config in topics)
        return BrokerRegistration(
            self._settings.cluster,
            self._settings.broker_name,
            dict(enumerate([name, *(other for other in self._store.replicas if other != name)])),
            topics,
            replace(version, state_version=epoch),
            dict(self._nodes),
            self._life,
            self._settings.slave_read_enable,
        )


def _client_metrics(settings: BrokerSettings) -> ClientMetrics:
    """Return the metrics that clients should report. The broker sends this value in its answers to heartbeats."""
    metrics, limits = settings.metrics, settings.metrics.options
    return ClientMetrics(metrics.cluster, limits.enable, limits.per_topic_max, limits.per_group_max)


BROKER_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 32}
BrokerActor = ray.remote(**BROKER_OPTIONS)(actor_class(Broker))
