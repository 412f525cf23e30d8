"""A store of this process that Spark's Python workers read like a cluster. They use the store's files and do not need
Ray.

The driver has a client around the open store. For a worker, the cluster's address is the path of a file. The file
contains the store's directory and the offset bounds of its queues. `tests.support.spark.daemon` makes the workers'
clients from the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raydp_jobs.worker_client import spare_collections
from raymq.common.namespaces import NO_NAMESPACE
from raymq.common.protocol.route import TopicRoute
from raymq.common.protocol.store import FetchRequest, FetchResult, QueueBounds, QueueSpan
from raymq.records.logfiles.log_reader import LogReader
from storage.message_store import MessageStore
from tests.support.clients.fakes import FakeRoutes, topic_route


class Routes(FakeRoutes):
    """Routes of the topics of a store. Each topic has `queues` queues in broker group `a`."""

    def __init__(self, queues: int, topics: Iterable[str]) -> None:
        super().__init__(*[topic_route(topic, a=queues) for topic in topics])

    def topics(self) -> list[str]:
        return sorted(self.routes)

    def read(self, topics: Sequence[str]) -> dict[str, TopicRoute]:
        return {topic: self.routes[topic] for topic in topics if topic in self.routes}


class NearStore:
    """Stand-in for the storage client of an open store, and for the client of the store's cluster. Spark workers learn
    the queues' offset bounds from the file that `describe` writes."""

    def __init__(self, store: MessageStore, path: Path, queues: int) -> None:
        self._store, self.path, self._queues = store, path, queues
        self.names = NO_NAMESPACE
        self.routes = Routes(queues, store.topics.queue_ids())
        self.storages = SimpleNamespace(get=lambda name: self)
        self.describe()

    def describe(self) -> None:
        """Write the current offset bounds of the queues into the file from which Spark workers read them."""
        topics = self._store.topics.queue_ids()
        bounds = {
            f"{topic}:{queue_id}": [found.min_offset, found.max_offset]
            for topic, ids in topics.items()
            for queue_id in ids
            for found in [self.queue_bounds(topic, queue_id, 1.0)]
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
        return self._store.queues.bounds(topic, queue_id)

    def bounds_of_queues(self, queues: list[tuple[str, int]], timeout_s: float) -> list[QueueBounds]:
        return [self._store.queues.bounds(topic, queue_id) for topic, queue_id in queues]

    def bytes_of_spans(self, spans: list[QueueSpan], timeout_s: float) -> list[list[int]]:
        return [self._store.queues.bytes_of_span(span) for span in spans]

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, timeout_s: float) -> int:
        return self._store.queues.offset_by_time(topic, queue_id, timestamp_ms)


class WorkerStorage:
    """The storage client of a Spark worker. It reads records from the store's files. It answers all other calls from
    the file that describes the store."""

    def __init__(self, path: Path) -> None:
        self._path = path
        said = json.loads(path.read_text())
        self._reader = LogReader(
            said["root"],
            commit_log_file_size=said["commit_log_file_size"],
            consume_queue_file_size=said["consume_queue_file_size"],
        )
        self.routes = Routes(said["queues"], {name.split(":")[0] for name in said["bounds"]})

    def reader(self) -> LogReader:
        return self._reader

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> QueueBounds:
        low, high = json.loads(self._path.read_text())["bounds"][f"{topic}:{queue_id}"]
        return QueueBounds(low, high, 0)

    def fetch(self, requests: list[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float) -> list[FetchResult]:
        answers = []
        for request in requests:
            bounds = self.queue_bounds(request.topic, request.queue_id, timeout_s)
            answers.append(self._reader.fetch(request, bounds.min_offset, bounds.max_offset, max_bytes))
        return answers


@lru_cache(maxsize=8)
def worker_client(address: str) -> Any:
    """Return the client that a Spark worker uses. `address`: path of the file that describes the store."""
    spare_collections()
    storage = WorkerStorage(Path(address))
    storages = SimpleNamespace(get=lambda name: storage)
    return SimpleNamespace(routes=storage.routes, storages=storages, names=NO_NAMESPACE)
