"""Appends the records of a broker's changes to the log of its group's master.

This module encodes state records and retries appends. A batch is encoded once. After a failure the same bytes, with the
same producer sequence, are sent to the current master. So each record is stored once, even if another replica has
become the master.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from raymq.client.producer.senders.retry_policy import another_broker_helps, given_up, may_be_stored
from raymq.common.errors import RaymqError, RequestTimeoutError, StoreNotWritableError
from raymq.common.message import Message, SendStatus
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import AppendResult
from raymq.common.retry import Backoff, left_s
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.message_id import UniqueIdGenerator
from raymq.remoting.storage_client import StorageClient

STORE_TIMEOUT_S: Final = 20.0
ATTEMPT_TIMEOUT_S: Final = 5.0
"""Timeout, in seconds, of one append. If the store hangs, another replica becomes the master long before this
timeout."""

_COMPRESSION: Final = Compression(CompressionType.ZSTD)


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """The range of queue offsets of a stored batch: [`queue_offset`, `next_offset`). Records of other batches may lie
    in this range, too.

    `durable`: True if the batch is on every disk that the settings require, so that no failover loses it.
    """

    queue_offset: int
    next_offset: int
    durable: bool


class StateRecords:
    """Appends records to the queue of the topic for the broker's state. Only one thread at a time may use a
    StateRecords object.

    `master` returns the storage actor of the current master. `born_host` is an IP address and a port.
    """

    def __init__(self, master: Callable[[], StorageClient], born_host: tuple[str, int]) -> None:
        self._master, self._born_host = master, born_host
        self._ids = UniqueIdGenerator(born_host[0])
        self._producer_id = secrets.token_hex(8)
        self._next_sequence = 0

    def append(self, bodies: Sequence[bytes]) -> StoredRecords:
        """Store records with these bodies in one batch, and return their queue offsets.

        Raises RequestTimeoutError if, after STORE_TIMEOUT_S, it is unknown whether the records are stored. After any
        other error the records are not stored. Raises ServiceNotAvailableError if no store accepted the records within
        STORE_TIMEOUT_S, or the error of a store that cannot accept them. Raises StoreNotWritableError at once, because
        retries do not help against a full disk.
        """
        return self.store(self.encode(bodies))

    def store(self, batch: EncodedBatch, *, in_doubt: bool = False) -> StoredRecords:
        """Store a batch that `encode` returned; see `append`. `in_doubt`: True if it is unknown whether the records are
        already stored."""
        deadline_s = time.monotonic() + STORE_TIMEOUT_S
        backoff = Backoff()
        while True:
            storage = self._master()
            try:
                [result] = storage.append([batch], min(left_s(deadline_s), ATTEMPT_TIMEOUT_S))
                return stored_records(result, len(batch))
            except RaymqError as error:
                in_doubt = in_doubt or may_be_stored(error)
                if isinstance(error, StoreNotWritableError) and not in_doubt:
                    raise
                pause_s = backoff.next()
                if another_broker_helps(error) and time.monotonic() + pause_s < deadline_s:
                    time.sleep(pause_s)
                    continue
                if in_doubt:
                    raise RequestTimeoutError(
                        f"storing a change of the broker's state at {storage.name}", STORE_TIMEOUT_S
                    ) from error
                if another_broker_helps(error):
                    raise given_up(error, STORE_TIMEOUT_S) from error
                raise

    def encode(self, bodies: Sequence[bytes]) -> EncodedBatch:
        """Encode the bodies as one batch. Its producer sequences are never used again, even if the batch is not stored:
        a store accepts gaps."""
        first, self._next_sequence = self._next_sequence, self._next_sequence + len(bodies)
        return encode_batch(
            [Message(STATE_TOPIC, body) for body in bodies],
            0,
            born_host=self._born_host,
            born_timestamp_ms=time.time_ns() // 1_000_000,
            message_ids=self._ids.next_batch(len(bodies)),
            producer=ProducerSequence(self._producer_id, 0, first),
            compression=_COMPRESSION,
        )


def stored_records(result: AppendResult, count: int) -> StoredRecords:
    """Return the queue offsets of `count` records, taken from the store's answer."""
    offsets = result.queue_offsets or (result.queue_offset, result.queue_offset + count - 1)
    return StoredRecords(offsets[0], offsets[-1] + 1, result.status is SendStatus.SEND_OK)
