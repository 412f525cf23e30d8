"""StoredSequences: queries the masters of broker groups to find which rows of a producer are already stored."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from raymq.client.producer.senders.encoder import ProducerIdentity
from raymq.common.message import MessageQueue
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

SEQUENCES_CALL_TIMEOUT_S: Final = 5.0
"""Timeout in seconds of one query for stored sequences. After the timeout, the next query looks up the master
again."""


class StoredSequences:
    """Reads the stored sequences of one producer from the brokers of `topic`."""

    def __init__(
        self,
        topic: str,
        identity: ProducerIdentity,
        routes: RouteSource,
        storages: StorageClients,
        names: Namespace = NO_NAMESPACE,
    ) -> None:
        self._topic, self._identity, self._names = names.wrap(topic), identity, names
        self._routes, self._storages = routes, storages

    def ask(self, queues: Iterable[MessageQueue], timeout_s: float) -> dict[MessageQueue, int]:
        """Return for each queue the sequence number that follows this producer's last stored row; 0 if the queue stores
        no row. Makes one call per broker group.

        If a broker group has no master, waits for a master. Raises ServiceNotAvailableError or RequestTimeoutError
        after `timeout_s`. Raises ClientStateError if an instance of the producer with a newer epoch has written.
        """
        by_broker: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            by_broker.setdefault(queue.broker_name, []).append(queue)
        found: dict[MessageQueue, int] = {}
        for broker_name, asked in by_broker.items():
            # Find the master by the topic's route. The system queues in which the topic's delayed messages wait have
            # the same master.
            leader = MessageQueue(self._topic, broker_name, 0)
            call = partial(self._call, [(self._names.wrap(queue.topic), queue.queue_id) for queue in asked])
            sequences = call_master(self._routes, self._storages, leader, timeout_s, call)
            found.update(zip(asked, sequences, strict=True))
        return found

    def _call(self, names: list[tuple[str, int]], storage: StorageClient, left_s: float) -> list[int]:
        return storage.next_sequences(*self._identity, names, min(left_s, SEQUENCES_CALL_TIMEOUT_S))
