"""A storage client of a store in the test's process. The client maps the store's files and can watch the end offsets of
queues."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from types import SimpleNamespace

from actors.replica.sole_replica import SoleReplica
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult, QueueBounds, QueueEnds, QueuePosition, RepairState
from raymq.records.logfiles.log_reader import LogReader, StoreFiles
from raymq.remoting.storage_client import FoundInPlace
from storage.message_store import MessageStore
from tests.support.clients.fakes import WAIT_S

LOOK_S = 0.05
"""Interval, in seconds, at which the watch's thread checks whether the watch was closed."""


class StoreWatch:
    """A watch of queue ends (EndsWatch) over a MessageStore. A thread answers each watch request with the store's own
    long poll."""

    def __init__(self, store: MessageStore, pull_from: str = "") -> None:
        self.asks: list[list[FetchRequest]] = []
        self.reads: list[int] = []
        self.pull_from = pull_from
        self._store = store
        self._here, self._there = socket.socketpair()
        self._here.settimeout(WAIT_S)
        self._changed = threading.Condition()
        self._asked: list[FetchRequest] | None = None
        self._answer: list[QueueEnds] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._here.fileno()

    def ask(self, requests: Sequence[FetchRequest], wait_s: float) -> None:
        with self._changed:
            if self._closed:
                raise ConnectionResetError("the watch is cut")
            if self._answer is not None:
                self._answer = None
                self._here.recv(1)
            self._asked = list(requests)
            self.asks.append(self._asked)
            self._changed.notify_all()

    def receive(self) -> list[QueueEnds]:
        if not self._here.recv(1):
            raise EOFError
        with self._changed:
            answer, self._answer = self._answer, None
            assert answer is not None
            return answer

    def count_read(self, messages: int) -> None:
        self.reads.append(messages)

    def close(self) -> None:
        self.cut()
        self._thread.join(WAIT_S)
        self._here.close()

    def cut(self) -> None:
        """Break the watch's connection from the store's side, as a failing store would."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._there.close()
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked is not None or self._closed)
                if self._closed:
                    return
                asked = self._asked
            assert asked is not None
            results = self._store.fetch(asked, max_bytes=0, wait_s=LOOK_S)
            news = any(
                result.max_offset > request.queue_offset
                or not result.min_offset <= request.queue_offset
                or request.queue_offset > result.max_offset
                for request, result in zip(asked, results, strict=True)
            )
            with self._changed:
                if news and self._asked is asked and not self._closed:
                    self._asked = None
                    self._answer = [QueueEnds(one.min_offset, one.max_offset, self.pull_from) for one in results]
                    self._there.send(b"!")


class MappedStorage:
    """A StorageClient of a MessageStore in this process. `find` returns references to records in the store's files;
    `fetch` returns copies of the records."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store
        self.watches: list[StoreWatch] = []
        self.fetched: list[FetchRequest] = []
        self.refused: Exception | None = None
        self.pull_from = ""
        settings = store._settings
        self._files = StoreFiles(
            str(settings.store_path_root_dir),
            settings.mapped_file_size_commit_log_bytes,
            settings.mapped_file_size_consume_queue_bytes,
        )
        self._reader = LogReader(
            self._files.root,
            commit_log_file_size=self._files.commit_log_file_size,
            consume_queue_file_size=self._files.consume_queue_file_size,
        )

    def reader(self) -> LogReader | None:
        return self._reader

    def open_watch(self) -> StoreWatch | None:
        if self.refused is not None:
            raise self.refused
        self.watches.append(StoreWatch(self.store, self.pull_from))
        return self.watches[-1]

    def fetch(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        if self.refused is not None:
            raise self.refused
        self.fetched += requests
        return self.store.fetch(requests, max_bytes=max_bytes, wait_s=min(wait_s, LOOK_S))

    def describe(self) -> SimpleNamespace:
        return SimpleNamespace(broker_name="a", node_id="node-1")

    def find(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        """Find the requested records as `fetch` does, but return references to the records in the store's files instead
        of copies."""
        results = self.fetch(requests, 0, wait_s, timeout_s)
        for index, (request, result) in enumerate(zip(requests, results, strict=True)):
            if result.status is PullStatus.FOUND:
                mapped, next_offset = self._reader.find(request, result.max_offset, max_bytes)
                count = sum(len(part.starts) for part in mapped)
                places = (next_offset, result.min_offset, result.max_offset, b"", count)
                results[index] = FoundInPlace(result.status, *places, mapped=tuple(mapped), files=self._files)
        return results

    def report_damage(self, positions: Sequence[QueuePosition], timeout_s: float) -> list[RepairState]:
        return SoleReplica(self.store).report_damage(positions)

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> QueueBounds:
        return self.store.queues.bounds(topic, queue_id)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, timeout_s: float) -> int:
        return self.store.queues.offset_by_time(topic, queue_id, timestamp_ms)
