"""The cluster as a write to a topic uses it: in the driver, and in Spark's workers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from raydp_jobs.sink.partitions import Writers
from raydp_jobs.worker_client import ClusterAddress, address_of_cluster, worker_client
from raymq.client.client import Client, connect
from raymq.client.producer.repeatable.writer import RepeatableWriter
from raymq.client.producer.settings import ProducerSettings
from raymq.common.message import MessageQueue


class Connection(Protocol):
    """A cluster with a topic, seen from the driver."""

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The topic's queues now. TopicNotExistError, NoPermissionError, ServiceNotAvailableError."""
        ...

    def writers(self, topic: str, queues: tuple[MessageQueue, ...], now_ms: int | None) -> Writers:
        """The maker of the tasks' writers."""
        ...


@dataclass(frozen=True)
class ClusterConnection(Connection):
    """The raymq of the Ray cluster that this process is connected to. `client` None: each use connects. `settings` are
    those of ProducerSettings. InvalidArgumentError."""

    client: Client | None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ProducerSettings(**self.settings)  # refuses here, before any job, what the tasks could not use

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        with nullcontext(self.client) if self.client is not None else connect() as client:
            return client.write_queues(topic)

    def writers(self, topic: str, queues: tuple[MessageQueue, ...], now_ms: int | None) -> Writers:
        with nullcontext(self.client) if self.client is not None else connect() as client:
            address = address_of_cluster(client)
        return ClusterWriters(address, topic, queues, now_ms, dict(self.settings))


@dataclass(frozen=True)
class ClusterWriters(Writers):
    """Makes writers in a worker of the Ray cluster at `address`."""

    address: ClusterAddress
    topic: str
    queues: tuple[MessageQueue, ...]
    now_ms: int | None
    settings: Mapping[str, Any]

    def open(self, producer_id: str, epoch: int, first_queue: int) -> RepeatableWriter:
        return worker_client(self.address).repeatable_writer(
            self.topic,
            producer_id=producer_id,
            epoch=epoch,
            queues=self.queues,
            first_queue=first_queue,
            now_ms=self.now_ms,
            **self.settings,
        )
