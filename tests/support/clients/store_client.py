"""Makes producers that write to a real store in the test's process. The store has a topic "orders", and a topic
"batched" of queue type "batch"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raymq.client.producer.producer import Producer
from raymq.client.producer.settings import ProducerSettings
from raymq.common.errors import RequestTimeoutError
from raymq.common.protocol.attributes import QueueType, TopicAttributes
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch, LoneRecord
from raymq.remoting.storage_client import StorageDescription
from storage.message_store import MessageStore
from tests.support.clients.fakes import FakeRoutes, description, topic_route

BATCH = replace(topic_route("batched", a=1), attributes=TopicAttributes(queue_type=QueueType.BATCH))


class StoreClient:
    """A producer's StorageClient that calls a store in this process. The store executes the first `lost` calls, but
    their answers are lost."""

    def __init__(self, store: MessageStore, lost: int = 0, **described: Any) -> None:
        self.store, self.lost, self.calls = store, lost, 0
        self._description = replace(description(), **described)

    def describe(self, timeout_s: float = 5.0) -> StorageDescription:
        return self._description

    def append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> list[AppendResult]:
        self.calls += 1
        results = self.store.append(batches)
        if self.calls <= self.lost:
            raise RequestTimeoutError("append", timeout_s)
        return results

    def append_one(self, record: LoneRecord, timeout_s: float) -> AppendResult:
        return self.append([record.batch()], timeout_s)[0]


def producer_of(client: StoreClient, **settings) -> Producer:
    return Producer(
        "g",
        routes=FakeRoutes(BATCH, topic_route("orders", a=1)),
        storage=lambda name: client,
        born_host=("127.0.0.1", 5000),
        settings=ProducerSettings(**settings),
    )
