"""Makes half messages (prepared messages of a transaction) in the form in which a transaction producer sends them to a
store. Also makes the requests by which transactions are ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raymq.client.transactions.checks import half_message
from raymq.common.message import PROPERTY_INNER_MULTI_DISPATCH, Message
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest, LocalTransactionState
from raymq.records.format.encode import EncodedBatch, ProducerSequence, WaitingBatch, encode_batch
from storage.message_store import MessageStore

GROUP = "payments"


class Clock:
    """A store's clock that a test sets."""

    def __init__(self) -> None:
        self.now_ms = time.time_ns() // 1_000_000

    def __call__(self) -> int:
        return self.now_ms


def half_batch(
    messages: Sequence[Message],
    *,
    ids: Sequence[str],
    group: str = GROUP,
    immunity_s: int | None = None,
    born_ms: int | None = None,
    queue_id: int = 3,
    producer: ProducerSequence | None = None,
    light_queues: str = "",
) -> EncodedBatch:
    """Return the batch of half messages that a transaction producer encodes for queue `queue_id`."""
    return encode_batch(
        [half_message(message, group, immunity_s) for message in messages],
        0,
        born_host=("127.0.0.1", 5000),
        born_timestamp_ms=time.time_ns() // 1_000_000 if born_ms is None else born_ms,
        message_ids=list(ids),
        producer=producer,
        extra_properties={PROPERTY_INNER_MULTI_DISPATCH: light_queues} if light_queues else None,
        waiting=WaitingBatch(HALF_TOPIC, [queue_id] * len(messages)),
    )


@dataclass
class Transaction:
    """A transaction whose half message is stored, with requests to commit it or roll it back."""

    store: MessageStore
    transaction_id: str
    queue_offset: int
    physical_offset: int

    def order(self, state: int, **changes: Any) -> EndTransactionRequest:
        values: dict[str, Any] = {
            "producer_group": GROUP,
            "queue_offset": self.queue_offset,
            "physical_offset": self.physical_offset,
            "commit_or_rollback": int(state),
            "transaction_id": self.transaction_id,
        }
        return EndTransactionRequest(**{**values, **changes})

    def commit(self, **changes: Any) -> EndResult:
        return self.store.transactions.end(self.order(LocalTransactionState.COMMIT_MESSAGE, **changes))

    def rollback(self, **changes: Any) -> EndResult:
        return self.store.transactions.end(self.order(LocalTransactionState.ROLLBACK_MESSAGE, **changes))


def begin(
    store: MessageStore, body: bytes = b"x", *, name: str = "", clock: Callable[[], int] | None = None, **changes: Any
) -> Transaction:
    """Store one half message. Its transaction id is `name`, or derived from the body."""
    message_id = name or f"T-{body.hex()}"
    message = Message("orders", body, tags="paid", keys=["k"], properties={"a": "b"})
    if clock is not None:
        changes.setdefault("born_ms", clock())
    [result] = store.append([half_batch([message], ids=[message_id], **changes)])
    return Transaction(store, message_id, result.queue_offset, result.physical_offset)
