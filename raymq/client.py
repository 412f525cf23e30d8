"""A program's connection to raymq: where producers, consumers and administration come from."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import ray

from raymq.attach import attach_ray
from raymq.compression import Compression
from raymq.config import ClusterSettings, load_settings
from raymq.embedded import EmbeddedCluster
from raymq.errors import ClientStateError, ClusterNotFoundError
from raymq.group_info import StartOffsetQuery
from raymq.launcher import Progress
from raymq.message import ConsumeFromWhere
from raymq.names import NAMESPACE, NameServerName
from raymq.producer import MAX_BUFFERED_BYTES, SEND_TIMEOUT_S, Producer
from raymq.routes import Routes
from raymq.storages import Storages

if TYPE_CHECKING:
    from raymq.admin import Admin
    from raymq.pull_consumer import PullConsumer
    from raymq.push_consumer import PushConsumer

NAME_SERVERS_MAX: Final = 3

T = TypeVar("T")


def connect(
    address: str | None = None,
    *,
    embedded: bool = False,
    config: str | Path | None = None,
    data_dir: str | Path | None = None,
    broker_groups: int | None = None,
    progress: Progress = lambda step: None,
) -> Client:
    """Connect to the raymq of a Ray cluster, or start one on this machine.

    Without `embedded`: uses the Ray this process is connected to, else connects to the one at `address`, else to this
    machine's (raymq.attach); ClusterNotFoundError when no Ray or no raymq is there.

    With `embedded=True`: starts a local Ray unless this process has one, and the servers, from the settings in `config`
    (default: `raymq.yaml` here, if any) with `data_dir` and `broker_groups` on top; closing the client stops what was
    started. Messages stay in `data_dir`. Raises ConfigError, StoreLockedError or StoreError before any of it remains,
    and ClientStateError where a raymq runs already.
    `progress` is told each step.
    """
    if not embedded:
        if config is not None or data_dir is not None or broker_groups is not None:
            raise ClientStateError(
                "config, data_dir and broker_groups start a raymq: pass embedded=True, or leave them out"
            )
        return Client(_attach(address))
    if address is not None:
        raise ClientStateError("embedded=True starts raymq on this machine; leave address out, or leave embedded out")
    settings: ClusterSettings = load_settings(config, data_dir=data_dir, broker_groups=broker_groups)
    if ray.is_initialized() and _nameservers():
        raise ClientStateError(
            "this Ray cluster runs a raymq already: use it with raymq.connect(), without embedded=True"
        )
    cluster = EmbeddedCluster(settings)
    cluster.start(progress)
    try:
        return Client(cluster.stop)
    except BaseException:
        cluster.stop()
        raise


def _attach(address: str | None) -> Callable[[], None]:
    attached = attach_ray(address)
    if not _nameservers():
        if attached:
            ray.shutdown()
        raise ClusterNotFoundError(
            "this Ray cluster runs no raymq: start it with `raymq up`, or use raymq.connect(embedded=True)"
        )
    return ray.shutdown if attached else lambda: None


def _nameservers() -> list[NameServerName]:
    """The NameServers that exist."""
    found = []
    for index in range(NAME_SERVERS_MAX):
        name = NameServerName(index)
        try:
            ray.get_actor(str(name), namespace=NAMESPACE)
        except ValueError:
            continue
        found.append(name)
    return found


class Client:
    """What `connect` returns. Close it, or use it in a `with`: that closes its producers and consumers too."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._open: dict[int, Any] = {}
        self._closed = False
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self._born_host = (ray.util.get_node_ip_address(), 0)
        self.routes = Routes(_nameservers())
        self.storages = Storages(self.node_id)
        self._pid = os.getpid()
        atexit.register(self.close)

    @property
    def admin(self) -> Admin:
        """Topics and groups."""
        from raymq.admin import Admin

        self._check_open()
        return Admin(self.routes, self.storages)

    def producer(
        self,
        group: str = "default",
        *,
        send_timeout_s: float = SEND_TIMEOUT_S,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        compression: Compression | None = None,
    ) -> Producer:
        """A producer. `send_timeout_s`: how long a send is tried; `max_buffered_bytes`: what may wait in memory;
        `compression`: for bodies of 4 KiB and more, zstd by default."""
        self._check_open()
        producer = Producer(
            group,
            routes=self.routes,
            storage=self.storages.get,
            born_host=self._born_host,
            send_timeout_s=send_timeout_s,
            max_buffered_bytes=max_buffered_bytes,
            compression=compression,
            on_close=self._forget,
        )
        return self._track(producer)

    def pull_consumer(
        self,
        group: str,
        *,
        consume_from: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
        consume_timestamp_ms: int = 0,
        auto_commit: bool = True,
    ) -> PullConsumer:
        """A consumer in this process, read with `poll`. `consume_from` counts where the group has not committed yet;
        `auto_commit` commits, at each poll, what earlier polls returned."""
        from raymq.pull_consumer import PullConsumer

        self._check_open()
        consumer = PullConsumer(
            group,
            routes=self.routes,
            storages=self.storages,
            start=StartOffsetQuery(consume_from, consume_timestamp_ms),
            auto_commit=auto_commit,
            on_close=self._forget,
        )
        return self._track(consumer)

    def push_consumer(
        self,
        group: str,
        *,
        consume_from: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
        consume_timestamp_ms: int = 0,
        threads: int = 20,
    ) -> PushConsumer:
        """A consumer in the cluster that calls a listener: subscribe, give it a listener, start it."""
        from raymq.push_consumer import PushConsumer

        self._check_open()
        return PushConsumer(
            group,
            routes=self.routes,
            start=StartOffsetQuery(consume_from, consume_timestamp_ms),
            threads=threads,
            track=self._track,
            on_close=self._forget,
        )

    def close(self) -> None:
        """Close producers and consumers (a producer flushes), then the connection. Idempotent."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            opened = list(self._open.values())
        atexit.unregister(self.close)
        failures: list[Exception] = []
        for item in opened:
            try:
                item.close()
            except Exception as error:  # close the rest all the same, then say so
                failures.append(error)
        self.storages.close()
        self._release()
        if failures:
            raise failures[0]

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq client cannot be pickled: call raymq.connect() where it is used")

    def _check_open(self) -> None:
        if self._closed:
            raise ClientStateError("this client is closed; call raymq.connect() again")

    def _track(self, item: T) -> T:
        with self._lock:
            self._open[id(item)] = item
        return item

    def _forget(self, item: Any) -> None:
        with self._lock:
            self._open.pop(id(item), None)
