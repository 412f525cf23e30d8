"""StateRecords appends the records of a broker's changes to the log of its group's master.

A change of how a record of the state is encoded, or of how often its append is tried, belongs here. A batch is encoded
once. After a failure the very same bytes go to the store that leads then, with the same producer sequence, so each
record is stored once, also when another replica leads meanwhile.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from raymq.client.producer.retry_policy import another_broker_helps, given_up, may_be_stored
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
"""The timeout of one append: if the store stands still, another replica leads long before."""

_COMPRESSION: Final = Compression(CompressionType.ZSTD)


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """The queue offsets of a stored batch, [`queue_offset`, `next_offset`). Records of others may lie between its own.

    `durable`: it is on every disk that the settings ask for, so no failover forgets it."""

    queue_offset: int
    next_offset: int
    durable: bool


class StateRecords:
    """Appends records to the state topic's queue. Used by one thread at a time.

    `master` returns the store that leads now; `born_host` is an IP address and a port.
    """

    def __init__(self, master: Callable[[], StorageClient], born_host: tuple[str, int]) -> None:
        self._master, self._born_host = master, born_host
        self._ids = UniqueIdGenerator(born_host[0])
        self._producer_id = secrets.token_hex(8)
        self._next_sequence = 0

    def append(self, bodies: Sequence[bytes]) -> StoredRecords:
        """Store records with these bodies, in one batch, and return their offsets.

        RequestTimeoutError when it is unknown, after STORE_TIMEOUT_S, whether they are stored. They are surely not
        stored after any other error: ServiceNotAvailableError when no store took them in that time, or the error of a
        store that cannot take them. StoreNotWritableError comes at once: a full disk stays full for longer.
        """
        return self.store(self.encode(bodies))

    def store(self, batch: EncodedBatch, *, in_doubt: bool = False) -> StoredRecords:
        """As `append`, for records that `encode` made. `in_doubt`: it is unknown if they are stored already."""
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
                    raise RequestTimeoutError(f"{storage.name}, to store a change,", STORE_TIMEOUT_S) from error
                if another_broker_helps(error):
                    raise given_up(error, STORE_TIMEOUT_S) from error
                raise

    def encode(self, bodies: Sequence[bytes]) -> EncodedBatch:
        """A batch of the bodies. Its sequences are never used again: a store expects gaps."""
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
    """The place of `count` records, by the store's answer."""
    offsets = result.queue_offsets or (result.queue_offset, result.queue_offset + count - 1)
    return StoredRecords(offsets[0], offsets[-1] + 1, result.status is SendStatus.SEND_OK)
