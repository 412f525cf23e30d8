"""Batches of messages that a store passes to its hooks.

The setting `store.put_hooks` names functions that the store calls with each PutBatch before it stores the batch.
`store.consume_hooks` names functions that the store calls with each FetchedBatch that a fetch returns.

A batch is decoded when the first hook reads its messages or columns, once for all hooks. A batch is a copy of the
store's bytes, so a hook may keep it. The module has no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageExt
from raymq.common.numbers import checked
from raymq.records.format.check import find_starts
from raymq.records.format.inner_batch import split_inner_batch
from raymq.records.format.inner_batch_encode import is_inner_batch
from raymq.records.format.layout import RecordError
from raymq.records.kernels.messages import read_messages

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


class HookedBatch:
    """Messages of one queue, passed to a hook. `topic` and `queue_id` name the queue to which the messages were sent.
    This is also true for delayed messages and half messages, which are stored in other queues until they are due or
    committed."""

    def __init__(self, broker_name: str, topic: str, queue_id: int, records: bytes) -> None:
        """Create a batch; only a store creates batches. `records`: whole records, one after another."""
        self.broker_name, self.topic, self.queue_id = broker_name, topic, queue_id
        self._given = records

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def size_bytes(self) -> int:
        """The total size of the messages' records in bytes. It is slightly more than the size of bodies and
        properties."""
        return len(self._given)

    @cached_property
    def messages(self) -> list[MessageExt]:
        """The messages of the batch, in order. An unreadable message is included; its `body_error` has the
        reason."""
        decoded = read_messages(self._records, self._starts, broker_name=self.broker_name)
        return [self._as_sent(message) for message in decoded]

    def columns(self, names: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return the messages as a RecordBatch with one row per message and the columns of
        raymq.records.kernels.columns. With `names`, only the named columns are decoded and returned. Raises
        InvalidArgumentError for an unknown column."""
        # import Arrow here, so that a store without hooks does not load it
        import pyarrow as pa

        from raymq.records.kernels.columns import decode_columns

        table = decode_columns(self._records, self._starts, broker_name=self.broker_name, columns=names)
        for name, value in (("topic", self.topic), ("queue_id", self.queue_id)):
            at = table.schema.get_field_index(name)
            if at >= 0:
                column = pa.repeat(pa.scalar(value, table.schema.field(at).type), len(table))
                table = table.set_column(at, table.schema.field(at), column)
        return table

    @cached_property
    def _records(self) -> bytes:
        """Return the bytes of the batch with one record per message. An inner batch, which is always sent alone, is
        split into its messages. A damaged inner batch counts as one message."""
        if not is_inner_batch(self._given):
            return self._given
        try:
            return b"".join(split_inner_batch(self._given))
        except RecordError:
            return self._given

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Return the position of each message's record in the bytes of the batch (`_records`)."""
        return find_starts(self._records)

    def _as_sent(self, message: MessageExt) -> MessageExt:
        if message.topic == self.topic and message.queue_id == self.queue_id:
            return message
        return message._in_queue(self.topic, self.queue_id)


class PutBatch(HookedBatch):
    """Messages that the store is about to append. Their queue offset, physical offset and store time are 0.

    `producer_id`: the id of the producer instance; empty if the messages have no producer sequence.
    """

    def __init__(self, broker_name: str, topic: str, queue_id: int, records: bytes, producer_id: str = "") -> None:
        """Create a batch of messages that the store is about to append, as in HookedBatch. `producer_id`: the id of the
        producer instance."""
        super().__init__(broker_name, topic, queue_id, records)
        self.producer_id = producer_id
        self.refusals: dict[int, str] = {}
        """The reason of each refused message, by the message's index in the batch."""

    @checked
    def refuse(self, index: int, reason: str) -> None:
        """Refuse message `index`: its sender gets MessageRefusedError with `reason`, one line of text. The other
        messages are stored: their producer resends them automatically, and the store calls this hook for them again.
        Raises InvalidArgumentError if `index` is out of range or `reason` is empty."""
        if not 0 <= index < len(self):
            raise InvalidArgumentError(f"message {index} does not exist: the batch has {len(self)} messages")
        if not reason.strip():
            raise InvalidArgumentError("a hook that refuses a message must pass a reason for the producer")
        self.refusals.setdefault(index, reason)


class FetchedBatch(HookedBatch):
    """Messages that a fetch returns to a consumer, from queue offset `queue_offset` on. The consumer's next fetch
    starts at queue offset `next_offset`."""

    def __init__(
        self,
        broker_name: str,
        topic: str,
        queue_id: int,
        records: bytes,
        *,
        queue_offset: int,
        next_offset: int,
    ) -> None:
        """Create a batch of fetched messages. `queue_offset` and `next_offset`: the offset range of the fetch. The
        other arguments are as in HookedBatch."""
        super().__init__(broker_name, topic, queue_id, records)
        self.queue_offset, self.next_offset = queue_offset, next_offset
