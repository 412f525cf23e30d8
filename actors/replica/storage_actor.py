"""Storage: the actor that serves one replica's store directory to the cluster.

This module has the remote methods of the actor, and their threads.

The only replica of a broker group is always the master (actors.replica.sole_replica). One of several replicas executes
the Controller's orders: it is the master, or it follows a master through a Replicator (actors.replica.replica).

The actor is the data plane of a broker group. It is pinned to the node whose disk has the directory. Producers,
consumers and other servers call it over lanes (direct socket connections, actors.replica.data_plane). The actor methods
`append`, `fetch` and `queue_bounds` are for programs that call the actor by its handle; they have the same meaning.

Every acknowledged message survives a crash. The store is recovered from its directory when Ray restarts the actor
(storage.recovery.recovery). All reads, and appends that have a producer sequence, are safe to repeat.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import ray

from actors.access.authenticated_server import lane_guard, lane_meter, lane_users
from actors.actor_class import actor_class
from actors.core.replica.append_limit import AppendLimit
from actors.core.replica.deleted_topics import DeletedTopics, topics_of_state
from actors.core.replica.orders import MASTER_LEASE_S, Following, Order, ReplicaState
from actors.core.replica.rules import ReplicaRules
from actors.core.replica.topic_bounds import TopicBounds
from actors.metrics_thread import MetricsThread
from actors.options import PERSISTENT
from actors.replica.data_plane import DataPlane
from actors.replica.failed_disk import BusErrors, FailedDisk
from actors.replica.live_settings import LIVE_SETTINGS_FILE, StoreLiveSettings
from actors.replica.log_lanes import LogLanes
from actors.replica.replica import Replica
from actors.replica.sole_replica import SoleReplica
from actors.replica.storage_metrics import StorageMetrics
from actors.threads import take_turns_quickly
from raymq.common.config.cluster import ReplicationOptions, path_here
from raymq.common.config.metrics import MetricsSettings
from raymq.common.config.store import StoreSettings
from raymq.common.config.values import SettingValue
from raymq.common.errors import InvalidArgumentError, RaymqError, StoreError
from raymq.common.names import STATE_TOPIC, StorageName, is_light_queue, is_system_topic
from raymq.common.protocol.bounds import BoundedTopic, TopicBacklog
from raymq.common.protocol.stats import RequestFigures
from raymq.common.protocol.store import (
    AppendResult,
    Boundary,
    DelayedInStore,
    DeletedRange,
    FetchRequest,
    FetchResult,
    Hole,
    LightQueue,
    QueryResult,
    QueueBounds,
    QueuePosition,
    QueueSpan,
    RepairState,
    StoreDamage,
    StoreStatistics,
    StoreVerification,
)
from raymq.common.protocol.transactions import CheckRound, TransactionFigures
from raymq.records.format.encode import EncodedBatch
from raymq.remoting.lane.frames import PAYLOAD_MAX
from raymq.remoting.lane.server import Handler, allow_descriptors
from raymq.remoting.storage_client import StorageDescription
from storage.files.config_files import ConfigFiles
from storage.files.lock import stores_below
from storage.message_store import MessageStore
from storage.queue.topic_attributes import TOPICS_FILE, parse_attributes
from storage.replication.epochs import EpochHistory, ReplicaMembers, SyncStateSet
from storage.retention.cleaner import HOLDS_FILE

FRAME_OVERHEAD_BYTES: Final = 16 << 20
"""Number of bytes that a frame of a lane (direct socket connection) may have in addition to the bodies or records. The
settings limit the size of the bodies or records."""
APPEND_THREADS: Final = 8
FETCH_THREADS: Final = 32
CONTROL_THREADS: Final = 4
ORDER_THREADS: Final = 4
OPEN_PAUSE_FACTOR: Final = 4
"""Factor for the pause after a failed attempt to open the store: the pause is this factor times the duration of the
attempt."""
REPLICATE_THREADS: Final = 12
"""Number of threads for calls of Replicators: the long poll of the replica's own Replicator, and damage repairs by up
to eight followers' Replicators."""

logger = logging.getLogger(__name__)


class Storage:
    """The actor that serves one replica's store directory to the cluster."""

    def __init__(
        self,
        name: StorageName,
        settings: StoreSettings,
        store_host: tuple[str, int],
        replication: ReplicationOptions | None = None,
        metrics: MetricsSettings | None = None,
    ) -> None:
        take_turns_quickly()
        self._name = name
        self._replication = replication if replication is not None and replication.has_controller else None
        root = settings.store_path_root_dir
        self._settings = settings.model_copy(update={"store_path_root_dir": path_here(root, root.parent)})
        self._store_host = store_host
        self._node_id = ray.get_runtime_context().get_node_id()
        self._host = str(ray.util.get_node_ip_address())
        self._lock = threading.Lock()
        self._lanes: DataPlane | None = None
        self._replica: SoleReplica | None = None
        """The replica whose store is open; None before the store was opened."""
        self._append_limit = AppendLimit(settings.send_queue_capacity)
        self._failed_disk = FailedDisk(str(name))
        self._bus_errors = BusErrors(self._settings.store_path_root_dir)
        # The reason why the store could not be opened (None if it is open), and the time (time.monotonic) of the next
        # attempt.
        self._not_open: RaymqError | None = None
        self._open_again_s = 0.0
        self._live = StoreLiveSettings(self._settings, replication, None if metrics is None else metrics.options)
        self._metrics: MetricsThread | None = None
        self._bounds = TopicBounds(self._bounded_topics, self._has_stored, lambda: self._open().require_master())
        self._deleted: DeletedTopics  # the deleted topics, read from the store's directory when the store opens
        try:
            self._open()
        except RaymqError as error:
            # Do not raise an error of opening the store: an error in the constructor would make the actor dead
            # permanently. Instead each later call tries to open the store again, and raises the reason if this fails.
            logger.error("storage actor %s cannot open its store: %s", name, error)
        figures = StorageMetrics(lambda: self._open().any_store, lambda: self._append_limit.under_way, self._requests)
        self._metrics = MetricsThread(
            metrics, "storage", str(name), figures.report, broker=name.broker_name, storage=str(name)
        )
        self._metrics.limit(self._live.now.metrics.per_topic_max, self._live.now.metrics.per_group_max)

    def _open(self) -> SoleReplica:
        """Return the open replica, whatever its role. Raises the reason if the store cannot be opened."""
        with self._lock:
            if self._lanes is None:
                self._open_source()
                self._deleted = DeletedTopics(self._read_config_file, self._write_config_file)
                self._live.read(self._read_config_file(LIVE_SETTINGS_FILE))
                self._lanes = self._open_lanes()
                self._follow_settings()
            assert self._replica is not None
            return self._replica

    def _open_source(self) -> None:
        """Open the store, or the replica, unless it is already open.

        After a slow failure the store is not opened again for a while: recovery reads much of the log, and every call
        of the actor would read it again.
        """
        if self._replica is not None:
            return
        started_s = time.monotonic()
        if self._not_open is not None and started_s < self._open_again_s:
            raise self._not_open
        try:
            root = self._settings.store_path_root_dir
            self._bus_errors.require_readable([root, *self._settings.log_directories_elsewhere])
            if self._replication is None:
                self._replica = SoleReplica(self._open_store(None))
                self._replica.any_store.schedule.start_delivery()
            else:
                self._replica = self._open_replica(self._replication)
            self._replica.call_on_failure(self._failed_disk.note_failure)
        except RaymqError as error:
            self._not_open, took_s = error, time.monotonic() - started_s
            self._open_again_s = time.monotonic() + OPEN_PAUSE_FACTOR * took_s
            raise

    def _open_lanes(self) -> DataPlane:
        assert self._replica is not None
        allow_descriptors()
        longest = max(self._settings.max_append_bytes, self._settings.max_message_size_bytes)
        return DataPlane(
            str(self._name),
            self._replica,
            deleted=self._deleted,
            limit=self._append_limit,
            methods={
                "queue_bounds": self.queue_bounds,
                "bounds_of_queues": self.bounds_of_queues,
                "queue_bounds_many": self._queue_bounds_many,
                "stored_times": self._stored_times,
                "bytes_of_spans": self._bytes_of_spans,
                "offset_by_time": self._offset_by_time,
                "next_sequences": self._next_sequences,
                "query_by_unique_ids": self._query_by_unique_ids,
                "report_damage": self._report_damage,
            },
            bounds=self._bounds,
            frame_max_bytes=min(longest + FRAME_OVERHEAD_BYTES, PAYLOAD_MAX),
            queues=self._settings,
            more=self._log_handlers,
            users=lane_users(),
            guard=lane_guard(),
            meter=lane_meter(),
        )

    def _log_handlers(self, plane: DataPlane) -> Mapping[int, Handler]:
        return LogLanes(plane, self._replica).handlers if isinstance(self._replica, Replica) else {}

    @property
    def _present_store(self) -> MessageStore:
        """Return the store that is open now. In a group of several replicas, a replica may close its store and open it
        again."""
        assert self._replica is not None
        return self._replica.any_store

    def _requests(self) -> Sequence[RequestFigures]:
        """Return metrics of the requests that wait for a thread of the lanes (direct socket connections)."""
        lanes = self._lanes
        return [] if lanes is None else lanes.requests()

    def _read_config_file(self, name: str) -> str | None:
        return self._present_store.read_config(name)

    def _write_config_file(self, name: str, text: str) -> None:
        self._present_store.write_config(name, text)

    def _open_store(self, on_stored: Callable[[int], None] | None) -> MessageStore:
        return MessageStore.open(
            self._settings, broker_name=self._name.broker_name, store_host=self._store_host, on_stored=on_stored
        )

    def _open_replica(self, options: ReplicationOptions) -> Replica:
        try:
            return self._make_replica(options)
        except OSError as error:
            if isinstance(error, RaymqError):
                # Raise a RaymqError unchanged. It can be an OSError, too: RequestTimeoutError also inherits from
                # TimeoutError.
                raise
            raise StoreError(
                f"storage actor {self._name} cannot open its store: {error}; check the disk of "
                f"{self._settings.store_path_root_dir}"
            ) from error

    def _make_replica(self, options: ReplicationOptions) -> Replica:
        rules = ReplicaRules(
            MASTER_LEASE_S,
            options.in_sync_replicas,
            options.min_in_sync_replicas,
            options.all_ack_in_sync_state_set and options.broker_role is None,
            options.slave_timeout_ms / 1000,
            options.ha_max_time_slave_not_catchup_ms / 1000,
            options.slave_read_enable,
            options.broker_role is not None,
            options.ha_max_gap_not_in_sync_bytes,
            options.enable_elect_unclean_master,
        )
        config = ConfigFiles(self._settings.store_path_root_dir)
        if config.read(HOLDS_FILE) is None:
            # As long as this store has no snapshot of the broker's state, retention must keep all state records.
            config.write(HOLDS_FILE, json.dumps({STATE_TOPIC: {"0": 0}}))
        name, learner = self._name, self._name.replica in options.learner_numbers
        return Replica(name.broker_name, name.replica, self._settings, rules, self._open_store, learner=learner)

    def _master_store(self) -> MessageStore:
        """Return the store, for calls that only a master answers. Raises NotMasterError if this replica is not the
        master."""
        replica = self._open()
        replica.require_master()
        return replica.store

    def _require_replica(self) -> Replica:
        replica = self._open()
        if not isinstance(replica, Replica):
            raise InvalidArgumentError(f"storage actor {self._name} is the only replica of its broker group")
        return replica

    @ray.method(concurrency_group="append")
    def append(self, batches: Sequence[EncodedBatch]) -> list[AppendResult]:
        """Store batches. Returns when they are as durable as the flush setting promises (SoleReplica.append).

        Raises TopicNotExistError if a topic was deleted and not created again, and SystemBusyError if too many appends
        wait. After these errors no message of the batches becomes visible to consumers.
        """
        replica = self._open()
        with self._append_limit.enter():
            self._deleted.check(batches)
            results = self._bounds.append(batches, replica.epoch, time.monotonic(), lambda: replica.append(batches))
            # Check the topics a second time, because a topic may have been deleted during the append. Consumers will
            # never see the messages of a deleted topic.
            self._deleted.check(batches)
            return results

    @ray.method(concurrency_group="control")
    def limit_topics(self, bounds: Sequence[BoundedTopic]) -> list[TopicBacklog]:
        """Measure the backlogs of all bounded topics, and accept messages for them up to their limits from now on
        (TopicBounds.change). Topics that are not among `bounds` have no limit.

        The broker calls this method about twice a second. Safe to repeat, also with older offsets: a limit is then
        reached earlier, never exceeded. Raises NotMasterError unless this replica is the master.
        """
        store, epoch = self._master_store(), self._open().epoch
        counters = self._bounds.counters(epoch)
        backlogs = store.queues.backlogs(bounds)
        return self._bounds.change(bounds, backlogs, counters, epoch, time.monotonic())

    def _bounded_topics(self) -> list[str]:
        """Return the topics that have a bound according to config/topics.json, which may be some seconds old."""
        attributes = parse_attributes(self._read_config_file(TOPICS_FILE))
        return [topic for topic, values in attributes.items() if values.bound is not None]

    def _has_stored(self, batch: EncodedBatch) -> bool:
        """Return True if the store has all messages of a batch, which a producer then sends for the second time."""
        producer = batch.producer
        if producer is None:
            return False
        queue = (batch.topic, batch.queue_id)
        [following] = self._open().store.queues.next_sequences(producer.producer_id, producer.epoch, [queue])
        return following >= producer.first_sequence + len(batch)

    @ray.method(concurrency_group="control")
    def check_transactions(self, groups: Sequence[str], start_ms: int) -> CheckRound:
        """Run a part of a round of transaction checks (TransactionService.check). Raises NotMasterError if this replica
        is not the master."""
        return self._master_store().transactions.check(groups, start_ms)

    @ray.method(concurrency_group="control")
    def transactions(self) -> TransactionFigures:
        """Return metrics of the open transactions (TransactionService.figures). Raises NotMasterError unless this
        replica is the master."""
        return self._master_store().transactions.figures()

    @ray.method(concurrency_group="fetch")
    def fetch(self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float) -> list[FetchResult]:
        """Read from several queues. If they have no messages, wait up to `wait_s` for the first message
        (SoleReplica.fetch)."""
        return self._open().fetch(requests, max_bytes=max_bytes, wait_s=wait_s)

    @ray.method(concurrency_group="control")
    def queue_bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """Return the first and the next visible offset of a queue."""
        return self._master_store().queues.bounds(topic, queue_id)

    @ray.method(concurrency_group="control")
    def bounds_of_queues(self, queues: Sequence[tuple[str, int]]) -> list[QueueBounds]:
        """Return the first and the next visible offset of each of several queues, given as (topic, queue id)."""
        known = self._master_store().queues
        return [known.bounds(topic, queue_id) for topic, queue_id in queues]

    def _queue_bounds_many(self, topics: Sequence[tuple[str, int]]) -> list[list[tuple[int, int]]]:
        """Return the first and the next visible offset of all queues of several topics
        (QueueQueries.bounds_of_topics)."""
        return self._master_store().queues.bounds_of_topics(topics)

    def _stored_times(self, positions: Sequence[QueuePosition]) -> list[int]:
        """Return the store times of the messages at queue offsets (QueueQueries.stored_times)."""
        return self._master_store().queues.stored_times(positions)

    def _bytes_of_spans(self, spans: Sequence[QueueSpan]) -> list[list[int]]:
        """Divide each span (offset range) of a queue into equal parts, and return the size of each part's records in
        bytes (QueueQueries.bytes_of_span)."""
        known = self._master_store().queues
        return [known.bytes_of_span(span) for span in spans]

    def _next_sequences(self, producer_id: str, epoch: int, queues: Sequence[tuple[str, int]]) -> list[int]:
        """Return a producer's next sequence number in each of several queues. The producer's messages with lower
        numbers are stored (QueueQueries.next_sequences)."""
        return self._master_store().queues.next_sequences(producer_id, epoch, queues)

    def _offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> int:
        """Return the offset of the first message stored at or after a time; with UPPER, the offset of the last message
        stored at or before that time."""
        return self._master_store().queues.offset_by_time(topic, queue_id, timestamp_ms, boundary)

    def _query_by_unique_ids(self, topic: str, message_ids: Sequence[str], since_ms: int) -> QueryResult:
        """Return the messages with one of several unique ids (StoreQueries.by_unique_ids). Raises NotMasterError if
        this replica is not the master."""
        return self._master_store().queries.by_unique_ids(topic, message_ids, since_ms)

    def _report_damage(self, positions: Sequence[QueuePosition]) -> list[RepairState]:
        """Check the records that a reader found damaged, and return what this store can do for each of them
        (SoleReplica.report_damage)."""
        return self._open().report_damage(positions)

    @ray.method(concurrency_group="control")
    def query_by_key(self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int) -> QueryResult:
        """Return the newest messages with a key (StoreQueries.by_key)."""
        return self._open().store.queries.by_key(topic, key, max_num, begin_ms, end_ms)

    @ray.method(concurrency_group="control")
    def query_by_unique_id(self, topic: str, message_id: str) -> QueryResult:
        """Return the messages with a unique id (StoreQueries.by_unique_id)."""
        return self._open().store.queries.by_unique_id(topic, message_id)

    @ray.method(concurrency_group="control")
    def record_at(self, physical_offset: int) -> bytes:
        """Return the record at the physical offset that an offset message id names
        (StoreQueries.by_physical_offset)."""
        return self._open().store.queries.by_physical_offset(physical_offset)

    @ray.method(concurrency_group="control")
    def delete_topic(self, topic: str) -> None:
        """Remove a topic's queues, and reject messages for the topic until `open_topics`.

        The topic's records stay on disk until their log files are deleted. Raises NotMasterError, before any change,
        unless this replica is the master.
        """
        store = self._master_store()
        self._deleted.add(topic)
        store.topics.delete(topic)

    @ray.method(concurrency_group="control")
    def open_topics(self, topics: Sequence[str]) -> None:
        """Accept messages for topics that are about to be created, and remove the queues of deleted topics of the same
        names.

        Raises NotMasterError, before any change, unless this replica is the master.
        """
        store, has_followers = self._master_store(), self._open().has_followers
        # In a group of several replicas, delete the queues of every named topic. Some of these topics may have been
        # deleted while another replica was the master, and this replica has not recorded these deletions.
        deleted = [topic for topic in topics if topic in self._deleted or has_followers]
        for topic in deleted:
            store.topics.delete(topic)
        self._deleted.remove(deleted)

    @ray.method(concurrency_group="control")
    def agree_on_topics(self, existing: Sequence[str]) -> None:
        """Accept messages for the `existing` topics, and reject messages for all other topics that have queues in this
        store (DeletedTopics.agree).

        The broker calls this method when this replica becomes the master. It passes the topics of the state that it
        read from this replica's log.
        """
        known = self._open().any_store.topics.queue_ids()
        stored = [topic for topic in known if not is_system_topic(topic) and not is_light_queue(topic)]
        self._deleted.agree(frozenset(existing), stored)

    @ray.method(concurrency_group="control")
    def read_config(self, name: str) -> str | None:
        """Return the text of a file in `config/`; None if the file does not exist."""
        return self._open().any_store.read_config(name)

    @ray.method(concurrency_group="control")
    def write_config(self, name: str, text: str) -> None:
        """Replace a file in `config/`, and its second copy (ConfigFiles.write)."""
        replica = self._open()
        replica.any_store.write_config(name, text)
        if name == TOPICS_FILE and replica.has_followers:
            # Delete the topics that are missing in the broker's snapshot. The log does not record deletions of topics,
            # so a slave finds them only in the snapshot.
            replica.delete_topics_before(*topics_of_state(text))

    @ray.method(concurrency_group="control")
    def change_settings(self, changes: Mapping[str, SettingValue]) -> None:
        """Replace all changes of live settings, given by full name. Every setting that is not in `changes` gets its
        value from raymq.yaml.

        The broker calls this method on every replica when settings have changed, and when the replica becomes the
        master. On return the changes are stored in `config/` and in effect, except that a waiting thread first finishes
        its current wait. Safe to repeat.
        """
        self._open()
        with self._lock:
            self._live.store(changes, self._write_config_file)
            self._follow_settings()

    def _follow_settings(self) -> None:
        """Pass the changed live settings to the parts of this actor that have their own copies of these settings. The
        caller holds the lock."""
        now = self._live.now
        self._append_limit.capacity = now.store.send_queue_capacity
        if self._lanes is not None:
            self._lanes.limit(now.store)
        assert self._replica is not None
        self._replica.any_store.follow_settings()
        self._replica.change_slave_timeout(now.replication.slave_timeout_ms / 1000)
        if self._metrics is not None:
            self._metrics.limit(now.metrics.per_topic_max, now.metrics.per_group_max)

    @ray.method(concurrency_group="control")
    def describe(self) -> StorageDescription:
        """Return the description of this storage actor, with the address of its lane (direct socket connection). If the
        store could not be opened, raises the error that prevented it."""
        self._open()
        assert self._lanes is not None
        return StorageDescription(
            name=str(self._name),
            broker_name=self._name.broker_name,
            node_id=self._node_id,
            pid=os.getpid(),
            root=str(self._settings.store_path_root_dir),
            commit_log_file_size=self._settings.mapped_file_size_commit_log_bytes,
            consume_queue_file_size=self._settings.mapped_file_size_consume_queue_bytes,
            store_host=self._store_host,
            lane=self._lanes.server.open_to_nodes(self._host),
            max_message_size_bytes=self._settings.max_message_size_bytes,
            consume_queue_ext_file_size=self._settings.mapped_file_size_consume_queue_ext_bytes,
            commit_log_directories=tuple(map(str, self._settings.commit_log_directories)),
            light_queues=self._settings.enable_lmq and self._settings.enable_multi_dispatch,
            in_place=not self._settings.consume_hooks,
        )

    @ray.method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """Return the store's counters and state, and its role among the replicas, for `raymq status`."""
        replica = self._open()
        store = replica.any_store
        return {
            **asdict(store.status()),
            "requests": [one._asdict() for one in self._requests()],
            "transactions": asdict(store.transactions.figures()),
            "beside": [path.name for path in stores_below(self._settings.store_path_root_dir.parent)],
            **replica.status(),
        }

    @ray.method(concurrency_group="control")
    def verify(self) -> int:
        """Begin a verification of all files of this store at full speed (Scrubber.verify_now). Returns the number of
        the verification, for `StoreVerification.is_complete`."""
        return self._open().any_store.scrubber.verify_now()

    @ray.method(concurrency_group="control")
    def verification(self) -> StoreVerification:
        """Return the progress and the result of the verification of this store's files."""
        status = self._open().any_store.status()
        return StoreVerification(status.scrub, status.holes)

    # Methods that replicas, Replicators and the Controller call (actors.replica.replica)

    @ray.method(concurrency_group="orders")
    def obey(
        self, order: Order | None, newest: SyncStateSet | None, members: ReplicaMembers | None = None
    ) -> ReplicaState:
        """Let this actor's replica store `newest`, the Controller's newest sync-state set, and `members`, the replicas
        of the broker group. Then let the replica execute `order`, the Controller's order. An argument may be None.
        Returns the replica's state report. The replica does not execute an outdated order."""
        return self._require_replica().obey(order, newest, members)

    @ray.method(concurrency_group="replicate")
    def following(self, wait_s: float) -> Following | None:
        """Return the master that this replica follows, and the next offset to read (Replica.following)."""
        return self._require_replica().following(wait_s)

    @ray.method(concurrency_group="replicate")
    def history(self, epoch: int) -> EpochHistory:
        """Return the epochs of a master's log (Replica.history)."""
        return self._require_replica().history(epoch)

    @ray.method(concurrency_group="replicate")
    def align(self, epoch: int, master: EpochHistory) -> int:
        """Cut the end of this log that differs from the master's log (Replica.align)."""
        return self._require_replica().align(epoch, master)

    @ray.method(concurrency_group="replicate")
    def log_holes(self) -> tuple[Hole, ...]:
        """Return the damaged ranges of this log (Replica.holes)."""
        return self._require_replica().holes

    @ray.method(concurrency_group="replicate")
    def log_part(self, epoch: int, physical_offset: int, size: int) -> tuple[int, bytes] | None:
        """Return the first intact records in a range of this log, for another replica whose log is damaged in this
        range (Replica.read_part)."""
        return self._require_replica().read_part(epoch, physical_offset, size)

    @ray.method(concurrency_group="replicate")
    def mend_log(self, epoch: int, physical_offset: int, data: bytes) -> None:
        """Replace damaged bytes of this log with another replica's bytes (Replica.mend)."""
        self._require_replica().mend(epoch, physical_offset, data)

    @ray.method(concurrency_group="replicate")
    def note_lacking(self, epoch: int, replica: int, physical_offset: int) -> None:
        """Record that another replica cannot repair a damaged range of this log (Replica.note_lacking)."""
        self._require_replica().note_lacking(epoch, replica, physical_offset)

    @ray.method(concurrency_group="replicate")
    def report_log(self, epoch: int, physical_offset: int, size: int) -> None:
        """Check a range of this log whose records a follower refused (Replica.report_log)."""
        self._require_replica().report_log(epoch, physical_offset, size)

    @ray.method(concurrency_group="control")
    def light_queues(self) -> list[LightQueue]:
        """Return the light queues of this store (StoreTopics.light_queues)."""
        return self._open().any_store.topics.light_queues()

    @ray.method(concurrency_group="control")
    def delayed(self, begin_ms: int, end_ms: int, limit: int) -> DelayedInStore:
        """Return the delayed messages that wait in this store (ScheduleService.waiting)."""
        return self._master_store().schedule.waiting(begin_ms, end_ms, limit)

    @ray.method(concurrency_group="control")
    def damage(self) -> StoreDamage:
        """Return the damaged ranges of this log, and the messages that they hold (SoleReplica.damage)."""
        return self._open().damage()

    @ray.method(concurrency_group="control")
    def damaged_bytes(self, physical_offset: int, size: int) -> bytes:
        """Return bytes of a damaged range of this log as they are on disk (HoleMender.damaged_bytes)."""
        return self._open().any_store.mender.damaged_bytes(physical_offset, size)

    @ray.method(concurrency_group="control")
    def statistics(self) -> StoreStatistics:
        """Return RocketMQ's runtime statistics, and the number of stored messages by topic
        (StoreReports.statistics)."""
        return self._open().any_store.statistics()

    @ray.method(concurrency_group="control")
    def deleted_young(self) -> list[DeletedRange] | None:
        """Return the offset ranges of the messages that were deleted before their retention time, because the disk was
        full (Cleaner.deleted_young)."""
        return self._open().any_store.cleaner.deleted_young()

    @ray.method(concurrency_group="control")
    def clean(self) -> None:
        """Delete expired log files now, regardless of the configured hour (Cleaner.request_run)."""
        self._open().any_store.cleaner.request_run()

    @ray.method(concurrency_group="control")
    def close(self) -> None:
        """Flush the store, write the checkpoint, and release the directory. Later calls raise an error."""
        if self._metrics is not None:
            self._metrics.close()
        if self._lanes is not None:
            self._lanes.close()
        if self._replica is not None:
            self._replica.close()


STORAGE_OPTIONS: Final = {
    **PERSISTENT,
    "concurrency_groups": {
        "append": APPEND_THREADS,
        "fetch": FETCH_THREADS,
        "control": CONTROL_THREADS,
        "orders": ORDER_THREADS,
        "replicate": REPLICATE_THREADS,
    },
}
StorageActor = ray.remote(**STORAGE_OPTIONS)(actor_class(Storage))
