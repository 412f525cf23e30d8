"""Broker: the control plane of one broker group.

It keeps topics, consumer groups and committed offsets (actors.core.broker_state), registers with every NameServer, and
starts what consumers need in the cluster (Rebalance and Pull actors). Messages do not pass through it, except for
`send` and `pull`: plain methods at the price of a second hop, so that any Ray program can produce and consume with
nothing but `ray.get_actor("broker-a", namespace="raymq")`.

What survives its death: all of the state, because each change is a record in the group's own log before it is answered.
A new instance reads the snapshot in `config/` and the records behind it. Safe to repeat: everything except `send`.

May wait for: its own Storage, NameServers. Never for another Broker, Rebalance or Pull.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import ray

from actors.core import broker_state
from actors.core.broker_state import STATE_TOPIC, BrokerState, Change
from actors.options import PERSISTENT
from actors.pull import PullActor
from actors.rebalance import RebalanceActor
from actors.shell import shell
from raymq.config import BrokerSettings
from raymq.errors import RaymqError, RequestTimeoutError, SendUnknownError, ServiceNotAvailableError, TopicNotExistError
from raymq.group_info import GroupQueueProgress, StartOffsetQuery
from raymq.message import ConsumeFromWhere, Message, MessageQueue, PullResult, SendResult
from raymq.names import PullName, RebalanceName, StorageName, check_group
from raymq.producer import Producer
from raymq.pulling import pull_messages
from raymq.push_settings import PushSettings
from raymq.ray_calls import ActorRef
from raymq.record import decode_records
from raymq.route import MASTER_ID, BrokerData, BrokerRegistration, QueueData, TopicConfig, TopicRoute
from raymq.storage_client import StorageClient, persist_until
from raymq.store_api import FetchRequest
from raymq.subscription import Subscription
from storage.cleaner import HOLDS_FILE
from storage.config_files import parse_fastjson

HEARTBEAT_INTERVAL_S: Final = 2.0
SNAPSHOT_INTERVAL_S: Final = 10.0
STORE_TIMEOUT_S: Final = 20.0
READY_WAIT_S: Final = 10.0
REPLAY_BATCH: Final = 1000

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Broker:
    """The shell around one BrokerState, and around the thread that keeps it registered and snapshotted."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._node_id = ray.get_runtime_context().get_node_id()
        self._storage_name = str(StorageName(settings.broker_name, MASTER_ID))
        self._storage = StorageClient(self._storage_name, self._node_id)
        self._nameservers = [ActorRef(str(name)) for name in settings.nameservers]
        self._lock = threading.Lock()
        self._state = BrokerState()
        self._position = 0
        self._snapshot_position = 0
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._waiting_for = f"{self._storage_name} to open its store"
        self._producer = self._make_producer("broker-send", allow_system_topics=False)
        self._state_producer = self._make_producer("broker-state", allow_system_topics=True)
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)
        self._thread.start()

    def _make_producer(self, group: str, *, allow_system_topics: bool) -> Producer:
        return Producer(
            group,
            routes=self,
            storage=lambda name: self._storage,
            born_host=(ray.util.get_node_ip_address(), 0),
            send_timeout_s=STORE_TIMEOUT_S,
            allow_system_topics=allow_system_topics,
        )

    # What a Producer asks for: this broker sends to its own queues only.

    def get(self, topic: str) -> TopicRoute:
        """The part of a topic's route that lies in this broker group."""
        config = TopicConfig(topic, 1, 1) if topic == STATE_TOPIC else self._ready_state().require_topic(topic)
        name = self._settings.broker_name
        data = BrokerData(self._settings.cluster, name, {MASTER_ID: self._storage_name})
        return TopicRoute(
            topic, {name: data}, (QueueData(name, config.read_queue_nums, config.write_queue_nums, config.perm),)
        )

    def forget(self, topic: str) -> None:
        """Nothing is cached here."""

    # Topics

    def create_topic(self, topic: str, read_queue_nums: int, write_queue_nums: int) -> None:
        """Create a topic with so many queues in this group. Repeating it changes nothing; TopicExistsError if it
        exists with other numbers."""
        self._change(lambda state: state.decide_topic(topic, read_queue_nums, write_queue_nums))
        self._register()

    def delete_topic(self, topic: str) -> None:
        """Remove a topic, its queues and the offsets committed in it; TopicNotExistError."""
        try:
            self._change(lambda state: state.decide_topic_delete(topic))
        except TopicNotExistError:
            # This broker may have died between the two steps of an earlier attempt.
            self._store_control("delete_topic", topic)
            raise
        self._register()
        self._store_control("delete_topic", topic)

    def topic_config(self, topic: str) -> TopicConfig:
        """A topic as this group holds it; TopicNotExistError."""
        return self._ready_state().require_topic(topic)

    # Consumer groups

    def ensure_group(self, group: str) -> None:
        """Make a consumer group known; IllegalNameError."""
        self._change(lambda state: state.decide_group(group))

    def delete_group(self, group: str) -> None:
        """Forget a group and its offsets; GroupNotExistError."""
        self._change(lambda state: state.decide_group_delete(group))

    def groups(self) -> list[str]:
        """All groups known here, sorted."""
        return sorted(self._ready_state().groups)

    def commit_offsets(self, group: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Commit, per topic and queue id, the offset of the next message to consume. Durable on return.

        TopicNotExistError for a topic that is gone; the others' offsets are committed then.
        """
        missing: TopicNotExistError | None = None
        for topic, table in offsets.items():
            try:
                self._change(partial(BrokerState.decide_offsets, group=group, topic=topic, offsets=table))
            except TopicNotExistError as error:
                missing = error
        if missing is not None:
            raise missing

    def committed_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Committed offset per queue id of this group's queues; queues without one are absent."""
        return self._ready_state().committed(group, topic)

    def start_offset(self, group: str, queue: MessageQueue, query: StartOffsetQuery) -> int:
        """Where the group starts in a queue (spec/messaging.md §2.9, §5.4): the committed offset, else by `query`.

        CONSUME_FROM_LAST_OFFSET starts at 0 while the queue is young (its first message is still in memory).
        """
        committed = self.committed_offsets(group, queue.topic).get(queue.queue_id)
        if committed is not None:
            return committed
        bounds = self._read(lambda left_s: self._storage.queue_bounds(queue.topic, queue.queue_id, left_s))
        if query.where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET:
            return bounds.min_offset
        if query.where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
            return self._read(
                lambda left_s: self._storage.offset_by_time(queue.topic, queue.queue_id, query.timestamp_ms, left_s)
            )
        young = bounds.min_offset == 0 and bounds.first_in_memory == 0
        return 0 if young else bounds.max_offset

    def group_topics(self, group: str) -> list[str]:
        """Topics in whose queues here the group has committed; GroupNotExistError."""
        state = self._ready_state()
        state.require_group(group)
        return state.group_topics(group)

    def group_progress(self, group: str, topic: str) -> list[GroupQueueProgress]:
        """The group's committed offset and the end of every queue of a topic here; TopicNotExistError."""
        state = self._ready_state()
        committed = state.committed(group, topic)
        progress = []
        for queue_id in range(state.require_topic(topic).read_queue_nums):
            bounds = self._read(partial(self._storage.queue_bounds, topic, queue_id))
            queue = MessageQueue(topic, self._settings.broker_name, queue_id)
            progress.append(
                GroupQueueProgress(group, queue, committed.get(queue_id), bounds.min_offset, bounds.max_offset)
            )
        return progress

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
    ) -> SendResult:
        """Store one message in a queue of this group. Not safe to repeat: each call is a new message."""
        message = Message(
            topic,
            body,
            tags,
            tuple([keys] if isinstance(keys, str) else keys),
            dict(properties or {}),
            delay_level=delay_level,
            deliver_at_ms=deliver_at_ms,
        )
        return self._producer.send(message, sharding_key=sharding_key)

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
    ) -> PullResult:
        """Read a queue of this group from `offset`, waiting up to `wait_s` (at most 15 s) for a message."""
        check_group(group)
        config = self._ready_state().require_topic(topic)
        queue = MessageQueue(topic, self._settings.broker_name, queue_id)
        subscription = Subscription.parse(topic, tags)
        return pull_messages(self._storage, queue, config.read_queue_nums, subscription, offset, max_messages, wait_s)

    # Life

    def status(self) -> dict[str, Any]:
        """Counts, for `raymq status`."""
        ready = self._ready.is_set()
        with self._lock:
            return {
                "broker": self._settings.broker_name,
                "ready": ready,
                "waiting_for": "" if ready else self._waiting_for,
                "topics": sorted(self._state.topics),
                "groups": sorted(self._state.groups),
                "storage": self._storage_name,
            }

    def close(self) -> None:
        """Write the snapshot and leave the NameServers. The storage actor must still run."""
        self._stopping.set()
        self._changed.set()
        self._thread.join(STORE_TIMEOUT_S)
        self._producer.close()
        self._state_producer.close()
        if self._ready.is_set():
            self._snapshot()
        for server in self._nameservers:
            self._tell(server, "unregister_broker", self._settings.broker_name)
        self._storage.close()

    def _run(self) -> None:
        while not self._stopping.is_set() and not self._ready.is_set():
            try:
                self._load()
                self._ready.set()
            except RaymqError as error:
                self._waiting_for = str(error)
                _log.warning("%s waits for its state: %s", self._settings.broker_name, error)
                self._stopping.wait(0.5)
        snapshot_at_s = time.monotonic() + SNAPSHOT_INTERVAL_S
        while not self._stopping.is_set():
            for server in self._nameservers:
                if not self._tell(server, "broker_heartbeat", self._settings.broker_name, self._state.topics_version):
                    self._tell(server, "register_broker", self._registration())
            if time.monotonic() >= snapshot_at_s:
                self._try_snapshot()
                snapshot_at_s = time.monotonic() + SNAPSHOT_INTERVAL_S
            self._changed.wait(HEARTBEAT_INTERVAL_S)
            self._changed.clear()

    def _load(self) -> None:
        """Snapshot, then the records behind it."""
        state, position = broker_state.load_snapshot(
            lambda name: self._storage.control("read_config", name, timeout_s=STORE_TIMEOUT_S), parse_fastjson
        )
        # Before anything is changed: retention keeps the state's records from here on until a snapshot has them.
        if self._storage.control("read_config", HOLDS_FILE, timeout_s=STORE_TIMEOUT_S) is None:
            self._hold(position)
        # A snapshot may be behind a log whose start was deleted by retention: what is missing then is in the snapshot.
        position = max(position, self._storage.queue_bounds(STATE_TOPIC, 0, STORE_TIMEOUT_S).min_offset)
        snapshot_position = position
        while True:
            request = FetchRequest(STATE_TOPIC, 0, position, REPLAY_BATCH)
            [result] = self._storage.fetch([request], 4 << 20, 0.0, STORE_TIMEOUT_S)
            if not result.count:
                break
            records = decode_records(result.records, broker_name=self._settings.broker_name)
            broker_state.replay(state, [(record.body, record.store_timestamp_ms) for record in records])
            position = result.next_offset
        with self._lock:
            self._state, self._position, self._snapshot_position = state, position, snapshot_position

    def _ready_state(self) -> BrokerState:
        if not self._ready.wait(READY_WAIT_S):
            raise ServiceNotAvailableError(f"{self._settings.broker_name} is starting and waits: {self._waiting_for}")
        return self._state

    def _change(self, decide: Callable[[BrokerState], Change | None]) -> None:
        """Decide, store, apply: in this order and one change at a time, so that the log's order is the state's."""
        self._ready_state()
        with self._lock:
            change = decide(self._state)
            if change is None:
                return
            try:
                result = self._state_producer.send(Message(STATE_TOPIC, broker_state.encode_change(change)))
            except SendUnknownError:
                # Stored or not, storing the same change again does no harm: the caller may try again.
                raise RequestTimeoutError(f"{self._storage_name}, to store a change,", STORE_TIMEOUT_S) from None
            self._state.apply(change, time.time_ns() // 1_000_000)
            self._position = result.queue_offset + 1

    def _register(self) -> None:
        """Tell every NameServer now, so that a created topic can be used at once."""
        registration = self._registration()
        for server in self._nameservers:
            self._tell(server, "register_broker", registration)

    def _registration(self) -> BrokerRegistration:
        with self._lock:
            return BrokerRegistration(
                self._settings.cluster,
                self._settings.broker_name,
                {MASTER_ID: self._storage_name},
                tuple(self._state.topics.values()),
                self._state.topics_version,
            )

    def _tell(self, server: ActorRef, method: str, *args: Any) -> Any:
        """A call to a NameServer that may be away: it asks again by itself when it is back."""
        try:
            return server.call(method, *args, timeout_s=5.0)
        except RaymqError as error:
            _log.info("%s: %s did not take %s: %s", self._settings.broker_name, server.name, method, error)
            return True

    def _try_snapshot(self) -> None:
        try:
            self._snapshot()
        except RaymqError as error:
            _log.warning("%s: no snapshot now, the log has everything: %s", self._settings.broker_name, error)

    def _snapshot(self) -> None:
        with self._lock:
            position = self._position
            files = broker_state.dump_snapshot(self._state, position)
        if position == self._snapshot_position:
            return
        for name, text in files.items():
            self._store_control("write_config", name, text)
        # Not from this one's position: the files' .bak, which may be needed, are the snapshot before.
        self._hold(self._snapshot_position)
        self._snapshot_position = position

    def _hold(self, position: int) -> None:
        """Let retention delete the state's records before `position`, which snapshots have, and no others."""
        self._store_control("write_config", HOLDS_FILE, json.dumps({STATE_TOPIC: {"0": position}}))

    def _store_control(self, method: str, *args: Any) -> Any:
        return self._read(lambda left_s: self._storage.control(method, *args, timeout_s=left_s))

    def _read(self, call: Callable[[float], T]) -> T:
        """A call to the store that is safe to repeat, over a restart of its actor."""
        return persist_until(time.monotonic() + STORE_TIMEOUT_S, call)


OPTIONS: Final = {**PERSISTENT, "max_concurrency": 32}
BrokerActor = ray.remote(**OPTIONS)(shell(Broker))
