"""A store in this process as a cluster that Spark's Python workers read in place, without Ray.

The driver has a client around the open store. A worker gets a file's path as the cluster's address: that file says
where the store is and what its queues hold, and `tests.support.spark.daemon` makes clients of it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raydp_jobs.source.reader import spare_collections
from raymq.logfiles.log_reader import LogReader
from raymq.protocol.route import TopicRoute
from raymq.protocol.store import QueueBounds, QueueSpan
from storage.message_store import MessageStore
from tests.support.clients.fakes import FakeRoutes, topic_route


class Routes(FakeRoutes):
    """Every topic of the store, each with `queues` queues in broker group `a`."""

    def __init__(self, queues: int, topics: list[str]) -> None:
        super().__init__(topic_route(a=queues))
        self._queues, self._topics = queues, topics

    def wait(self, topic: str, timeout_s: float) -> TopicRoute:
        return self.get(topic)

    def topics(self) -> list[str]:
        return self._topics


class NearStore:
    """The storage client of an open store, and its cluster's client; `describe` writes the file for workers."""

    def __init__(self, store: MessageStore, path: Path, queues: int) -> None:
        self._store, self.path, self._queues = store, path, queues
        self.routes = Routes(queues, sorted(store.topics()))
        self.storages = SimpleNamespace(get=lambda name: self)
        self.describe()

    def describe(self) -> None:
        """Have workers know what the queues hold now."""
        topics = self._store.topics()
        bounds = {
            f"{topic}:{queue_id}": [self.queue_bounds(topic, queue_id, 1.0).min_offset, 0]
            for topic, ids in topics.items()
            for queue_id in ids
        }
        settings = self._store._parts.settings
        said = {
            "root": self._store.status().root,
            "commit_log_file_size": settings.mapped_file_size_commit_log_bytes,
            "consume_queue_file_size": settings.mapped_file_size_consume_queue_bytes,
            "queues": self._queues,
            "bounds": bounds,
        }
        self.path.write_text(json.dumps(said))

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> QueueBounds:
        return self._store.queue_bounds(topic, queue_id)

    def bounds_of_queues(self, queues: list[tuple[str, int]], timeout_s: float) -> list[QueueBounds]:
        return [self._store.queue_bounds(topic, queue_id) for topic, queue_id in queues]

    def bytes_of_spans(self, spans: list[QueueSpan], timeout_s: float) -> list[list[int]]:
        return [self._store.bytes_of_span(span) for span in spans]

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, timeout_s: float) -> int:
        return self._store.offset_by_time(topic, queue_id, timestamp_ms)


class WorkerStorage:
    """The storage client of a worker: it reads in place; what it is asked, the file answers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        said = json.loads(path.read_text())
        self._reader = LogReader(
            said["root"],
            commit_log_file_size=said["commit_log_file_size"],
            consume_queue_file_size=said["consume_queue_file_size"],
        )
        self.queues: int = said["queues"]

    def reader(self) -> LogReader:
        return self._reader

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> QueueBounds:
        low, high = json.loads(self._path.read_text())["bounds"][f"{topic}:{queue_id}"]
        return QueueBounds(low, high, 0)


@lru_cache(maxsize=8)
def worker_client(address: str) -> Any:
    """The client of a worker, by the path of the file that describes the store."""
    spare_collections()
    storage = WorkerStorage(Path(address))
    return SimpleNamespace(routes=Routes(storage.queues, []), storages=SimpleNamespace(get=lambda name: storage))
