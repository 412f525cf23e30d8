"""Storage: one replica's store directory, served to the cluster.

The data plane of a broker group. It is pinned to the node whose disk holds the directory; producers and consumers call
it directly, over lanes (raymq.lane) or as an actor, with the same meaning.

What survives its death: everything acknowledged. The store is recovered from its directory when Ray starts the actor
again (storage.recovery). Safe to repeat: all reads, and appends that carry a producer sequence.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import ray

from actors.core.append_turns import AppendTurns
from actors.core.deleted_topics import DeletedTopics
from actors.options import PERSISTENT
from actors.shell import shell
from raymq.config import StoreSettings
from raymq.errors import RaymqError
from raymq.lane import LaneServer
from raymq.names import StorageName
from raymq.record import EncodedBatch
from raymq.storage_client import StorageDescription
from raymq.store_api import AppendResult, Boundary, FetchRequest, FetchResult, QueryResult, QueueBounds, StoreStatistics
from storage.message_store import MessageStore

APPEND_THREADS: Final = 8
FETCH_THREADS: Final = 32
CONTROL_THREADS: Final = 4

_log = logging.getLogger(__name__)


class Storage:
    """The shell around one MessageStore."""

    def __init__(self, name: StorageName, settings: StoreSettings, store_host: tuple[str, int]) -> None:
        self._name = name
        self._settings = settings
        self._store_host = store_host
        self._node_id = ray.get_runtime_context().get_node_id()
        self._lock = threading.Lock()
        self._lane: LaneServer | None = None
        self._store: MessageStore | None = None
        self._turns = AppendTurns(settings.send_queue_capacity)
        self._deleted: DeletedTopics  # from the store's directory, once it is open
        try:
            self._open()
        except RaymqError as error:
            # An actor whose constructor raises is dead for good. Instead each call tries again, and raises the reason.
            _log.error("%s cannot open its store: %s", name, error)

    def _open(self) -> MessageStore:
        with self._lock:
            if self._store is None:
                self._store = MessageStore.open(
                    self._settings, broker_name=self._name.broker_name, store_host=self._store_host
                )
                self._deleted = DeletedTopics(self._store.read_config, self._store.write_config)
                # The only replica is the master.
                self._store.start_delivery()
                methods = {"append": self.append, "fetch": self.fetch, "queue_bounds": self.queue_bounds}
                self._lane = LaneServer({**methods, "offset_by_time": self.offset_by_time}, str(self._name))
            return self._store

    @ray.method(concurrency_group="append")
    def append(self, batches: Sequence[EncodedBatch]) -> list[AppendResult]:
        """Store batches; returns when they are as durable as the flush setting promises (MessageStore.append).

        TopicNotExistError for a topic that was deleted and not created again. SystemBusyError when too many appends
        wait. Nothing was stored then, or nothing that anybody will see.
        """
        store = self._open()
        with self._turns.take():
            self._deleted.check(batches)
            results = store.append(batches)
            self._deleted.check(batches)  # it may have been deleted meanwhile, and then nobody will see them
            return results

    @ray.method(concurrency_group="fetch")
    def fetch(self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float) -> list[FetchResult]:
        """Read from several queues, waiting for the first message (MessageStore.fetch)."""
        return self._open().fetch(requests, max_bytes=max_bytes, wait_s=wait_s)

    @ray.method(concurrency_group="control")
    def queue_bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """First and next visible offset of a queue."""
        return self._open().queue_bounds(topic, queue_id)

    @ray.method(concurrency_group="control")
    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> int:
        """First offset stored at or after a time, or with UPPER the last one at or before."""
        return self._open().offset_by_time(topic, queue_id, timestamp_ms, boundary)

    @ray.method(concurrency_group="control")
    def query_by_key(self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int) -> QueryResult:
        """The newest messages with a key (MessageStore.query_by_key)."""
        return self._open().query_by_key(topic, key, max_num, begin_ms, end_ms)

    @ray.method(concurrency_group="control")
    def query_by_unique_id(self, topic: str, message_id: str) -> QueryResult:
        """The messages with a unique id (MessageStore.query_by_unique_id)."""
        return self._open().query_by_unique_id(topic, message_id)

    @ray.method(concurrency_group="control")
    def record_at(self, physical_offset: int) -> bytes:
        """The record that an offset message id names (MessageStore.record_at)."""
        return self._open().record_at(physical_offset)

    @ray.method(concurrency_group="control")
    def delete_topic(self, topic: str) -> None:
        """Remove a topic's queues, and take no messages for it until `open_topic`. What is in the log leaves the disk
        with its files."""
        store = self._open()
        self._deleted.add(topic)
        store.delete_topic(topic)

    @ray.method(concurrency_group="control")
    def open_topic(self, topic: str) -> None:
        """Take messages for a topic that is about to be created; what was left of one of its name is gone."""
        store = self._open()
        if topic in self._deleted:
            store.delete_topic(topic)
            self._deleted.remove(topic)

    @ray.method(concurrency_group="control")
    def read_config(self, name: str) -> str | None:
        """The text of a file in `config/`, or None."""
        return self._open().read_config(name)

    @ray.method(concurrency_group="control")
    def write_config(self, name: str, text: str) -> None:
        """Replace a file in `config/`, keeping the one before as `.bak`."""
        self._open().write_config(name, text)

    @ray.method(concurrency_group="control")
    def describe(self) -> StorageDescription:
        """Who this is and where its lane is; raises why the store did not open, if it did not."""
        self._open()
        assert self._lane is not None
        return StorageDescription(
            name=str(self._name),
            broker_name=self._name.broker_name,
            node_id=self._node_id,
            pid=os.getpid(),
            root=str(self._settings.store_path_root_dir),
            commit_log_file_size=self._settings.mapped_file_size_commit_log_bytes,
            consume_queue_file_size=self._settings.mapped_file_size_consume_queue_bytes,
            store_host=self._store_host,
            lane=self._lane.address,
            max_message_size_bytes=self._settings.max_message_size_bytes,
        )

    @ray.method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """The store's counters and state, for `raymq status`."""
        return asdict(self._open().status())

    @ray.method(concurrency_group="control")
    def statistics(self) -> StoreStatistics:
        """RocketMQ's runtime keys and the puts by topic (MessageStore.statistics)."""
        return self._open().statistics()

    @ray.method(concurrency_group="control")
    def clean(self) -> None:
        """Delete expired log files now, whatever the hour (MessageStore.clean)."""
        self._open().clean()

    @ray.method(concurrency_group="control")
    def close(self) -> None:
        """Clean stop: flush, checkpoint, give the directory free. Later calls answer that the store is closed."""
        if self._lane is not None:
            self._lane.close()
        if self._store is not None:
            self._store.close()


OPTIONS: Final = {
    **PERSISTENT,
    "concurrency_groups": {"append": APPEND_THREADS, "fetch": FETCH_THREADS, "control": CONTROL_THREADS},
}
StorageActor = ray.remote(**OPTIONS)(shell(Storage))
