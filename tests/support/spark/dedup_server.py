"""A server that gives other processes access to a DedupStore of this process over a socket. Writers in Spark's Python
workers append to the store without Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any

from raymq.client.producer.repeatable.writer import RepeatableWriter
from raymq.common.errors import TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.common.protocol.route import TopicRoute
from tests.support.clients.dedup_store import DedupStore, Writers

_KEY = b"tests"


class StoreServer:
    """Serves a DedupStore to other processes.

    `on_append` is called before each append with two arguments: the append's number, from 1 on, and the sender's
    process id. If `on_append` raises an error, the client receives the error.
    """

    def __init__(self, store: DedupStore) -> None:
        self.store = store
        self.on_append: Any = None
        self._appends = 0
        self._listener = Listener(("127.0.0.1", 0), backlog=64, authkey=_KEY)
        self.address: tuple[str, int] = self._listener.address
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (EOFError, ConnectionError, AuthenticationError):  # the client process died while it connected
                continue
            except OSError:  # `accept` fails because `close` has closed the listening socket
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Any) -> None:
        with connection:
            while True:
                try:
                    pid, method, args = connection.recv()
                    answer = self._call(pid, method, args)
                    connection.send(answer)
                except (EOFError, OSError):
                    return

    def _call(self, pid: int, method: str, args: Sequence[Any]) -> tuple[bool, Any]:
        try:
            if method == "append" and self.on_append is not None:
                self._appends += 1
                self.on_append(self._appends, pid)
            return True, getattr(self.store, method)(*args)
        except Exception as error:
            return False, error


class FarStore:
    """A storage client that forwards its calls to a StoreServer."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.name = "storage-a-0"
        self._connection = Client(address, authkey=_KEY)
        self._lock = threading.Lock()

    def describe(self, timeout_s: float = 5.0) -> Any:
        return self._call("describe")

    def append(self, batches: Any, timeout_s: float) -> Any:
        return self._call("append", batches, timeout_s)

    def next_sequences(self, producer_id: str, epoch: int, queues: Any, timeout_s: float) -> Any:
        return self._call("next_sequences", producer_id, epoch, queues, timeout_s)

    def _call(self, method: str, *args: Any) -> Any:
        with self._lock:
            self._connection.send((os.getpid(), method, args))
            done, result = self._connection.recv()
        if not done:
            raise result
        return result


@lru_cache(maxsize=1)
def _far_store(address: tuple[str, int], pid: int) -> FarStore:
    return FarStore(address)


@dataclass(frozen=True)
class FarConnection:
    """Stand-in for raydp_jobs.sink.partitions.TopicConnection, the connection of Spark's sink. It sends to a
    StoreServer and has one topic."""

    address: tuple[str, int]
    route: TopicRoute
    send_timeout_s: float = 30.0

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        if topic != self.route.topic:
            raise TopicNotExistError(topic)
        return self.route.all_queues

    def writers(self, topic: str, queues: tuple[MessageQueue, ...], now_ms: int | None) -> FarWriters:
        return FarWriters(self.address, self.route, self.send_timeout_s, queues, now_ms)


@dataclass(frozen=True)
class FarWriters:
    """Makes writers to a StoreServer in a Spark worker."""

    address: tuple[str, int]
    route: TopicRoute
    send_timeout_s: float
    queues: tuple[MessageQueue, ...]
    now_ms: int | None

    def open(self, producer_id: str, epoch: int, first_queue: int) -> RepeatableWriter:
        store: Any = _far_store(self.address, os.getpid())
        writers = Writers(self.route, store)
        places = {"queues": self.queues, "first_queue": first_queue, "now_ms": self.now_ms}
        return writers.make(producer_id, epoch, **places, send_timeout_s=self.send_timeout_s)
