"""A stand-in for a broker group's storage actor. It recognises repeated batches with the real store's deduplication
table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raymq.client.producer.producer import Producer
from raymq.client.producer.repeatable.stored import StoredSequences
from raymq.client.producer.repeatable.writer import RepeatableWriter
from raymq.client.producer.senders.encoder import ProducerIdentity
from raymq.client.producer.settings import ProducerSettings
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, Message, MessageQueue, SendStatus
from raymq.common.protocol.route import TopicRoute
from raymq.common.protocol.store import AppendResult
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import EncodedBatch
from raymq.remoting.storage_client import StorageDescription
from storage.dispatch.dedup import DedupTable
from tests.support.clients.fakes import FakeRoutes, description
from tests.support.clients.producers import NoPause


class DedupStore:
    """A store in memory with the queues of one broker group, which recognises repeated batches.

    `script` holds one step per append. A step is one of: None; an error to raise before anything is stored; ("lost",
    error) to store the batches and raise the error afterwards; or a callable that takes the batches and returns one of
    these steps.
    """

    def __init__(self, name: str = "storage-a-0", *, producers_max: int = 20_000) -> None:
        self.name = name
        self.table = DedupTable(producers_max)
        self.queues: dict[tuple[str, int], list[Message]] = {}
        self.script: list[Any] = []
        self.asks: list[Any] = []
        self.appends = 0
        self.max_message_size_bytes = MAX_MESSAGE_SIZE_BYTES
        self.invisible = 0
        """Number of messages at the end of each queue that the store does not yet show to consumers."""
        self.lock = threading.RLock()

    def describe(self, timeout_s: float = 5.0) -> StorageDescription:
        return replace(description(), max_message_size_bytes=self.max_message_size_bytes)

    def append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> list[AppendResult]:
        with self.lock:
            self.appends += 1
            step = self.script.pop(0) if self.script else None
        if callable(step):
            step = step(batches)
        if isinstance(step, Exception):
            raise step
        with self.lock:
            found = [self.table.stored_prefix(b.producer, b.topic, b.queue_id, len(b)) for b in batches]
            results = [self._store(batch, stored) for batch, stored in zip(batches, found, strict=True)]
        if isinstance(step, tuple):
            raise step[1]
        return results

    def next_sequences(
        self, producer_id: str, epoch: int, queues: Sequence[tuple[str, int]], timeout_s: float
    ) -> list[int]:
        step = self.asks.pop(0) if self.asks else None
        if step is not None:
            raise step
        with self.lock:
            return [
                self.table.next_sequence(
                    producer_id, epoch, topic, queue_id, len(self.queues.get((topic, queue_id), ())) - self.invisible
                )
                for topic, queue_id in queues
            ]

    def bodies(self, topic: str = "orders") -> dict[int, list[bytes]]:
        """Return the message bodies in each queue of a topic, by queue id, in the order of their offsets."""
        return {
            queue_id: [message.body for message in messages]
            for (name, queue_id), messages in sorted(self.queues.items())
            if name == topic
        }

    def _store(self, batch: EncodedBatch, stored: list[int]) -> AppendResult:
        messages = self.queues.setdefault((batch.topic, batch.queue_id), [])
        new = decode_records(batch.records, broker_name="a")[len(stored) :]
        offset = len(messages)
        messages += new
        if new:
            sequence = replace(batch.producer, first_sequence=batch.producer.first_sequence + len(stored))
            self.table.record_messages(sequence, batch.topic, batch.queue_id, len(new), offset)
        offsets = (*stored, *range(offset, offset + len(new)))
        return AppendResult(
            *(SendStatus.SEND_OK, offsets[0], 0, 1_700_000_000_000, not new),
            physical_offsets=tuple(range(len(offsets))),
            queue_offsets=offsets,
        )


class Writers:
    """Makes writers that can repeat their writes without duplicates. One DedupStore stands for each broker group.
    `close` closes all writers."""

    def __init__(self, route: TopicRoute, *stores: DedupStore, clock: Callable[[], float] | None = None) -> None:
        self.stores = {store.name: store for store in stores}
        self.route = route
        self._clock = {} if clock is None else {"clock": clock}
        self._made: list[RepeatableWriter] = []

    def get(self, name: str) -> DedupStore:
        return self.stores[name]

    def make(
        self,
        producer_id: str = "load/0",
        epoch: int = 0,
        *,
        queues: Sequence[MessageQueue] | None = None,
        first_queue: int = 0,
        now_ms: int | None = None,
        **settings: Any,
    ) -> RepeatableWriter:
        identity, routes = ProducerIdentity(producer_id, epoch), FakeRoutes(self.route)

        def producer() -> Producer:
            return Producer(
                "default",
                routes=routes,
                storage=self.stores.__getitem__,
                born_host=("127.0.0.1", 0),
                settings=ProducerSettings(retry_when_not_store_ok=True, **settings),
                identity=identity,
                pauses=NoPause,
                **self._clock,
            )

        writer = RepeatableWriter(
            self.route.topic,
            self.route.all_queues if queues is None else queues,
            stored=StoredSequences(self.route.topic, identity, routes, self),
            routes=routes,
            producer=producer,
            first_queue=first_queue,
            now_ms=now_ms,
        )
        self._made.append(writer)
        return writer

    def close(self) -> None:
        for store in self.stores.values():
            store.script.clear()
        for writer in self._made:
            writer.close()
