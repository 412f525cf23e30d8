"""Batches for the hooks of a store.

The setting `store.put_hooks` names functions that are called with each PutBatch before it is stored;
`store.consume_hooks` names functions that are called with each FetchedBatch that a fetch returns.

A batch is decoded when a hook reads its messages or columns, once for all hooks. It is a copy of the store's bytes, so
a hook may keep it. The module has no state.
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
    """Messages of one queue, for a hook. `topic` and `queue_id`: the queue to which they were sent, even for delayed
    messages and messages of a transaction, which are in other queues until they are due or committed."""

    def __init__(self, broker_name: str, topic: str, queue_id: int, records: bytes) -> None:
        """A store creates batches, hooks do not. `records`: whole records, back to back."""
        self.broker_name, self.topic, self.queue_id = broker_name, topic, queue_id
        self._given = records

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def size_bytes(self) -> int:
        """The bytes of the messages' records, about as many as of bodies and properties."""
        return len(self._given)

    @cached_property
    def messages(self) -> list[MessageExt]:
        """The messages, in order, including unreadable messages with their `body_error`."""
        decoded = read_messages(self._records, self._starts, broker_name=self.broker_name)
        return [self._as_sent(message) for message in decoded]

    def columns(self, names: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return the messages as a RecordBatch with one row each, and with the columns of
        raymq.records.kernels.columns, or only the columns `names`, which saves decoding the others. Raises
        InvalidArgumentError for an unknown column."""
        # imported here: a store without hooks loads no Arrow
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
        """Return a record for each message. An inner batch, which is sent alone, is one record of many messages. A
        damaged inner batch counts as one message."""
        if not is_inner_batch(self._given):
            return self._given
        try:
            return b"".join(split_inner_batch(self._given))
        except RecordError:
            return self._given

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Return the position of each message's record."""
        return find_starts(self._records)

    def _as_sent(self, message: MessageExt) -> MessageExt:
        if message.topic == self.topic and message.queue_id == self.queue_id:
            return message
        return message._in_queue(self.topic, self.queue_id)


class PutBatch(HookedBatch):
    """Messages that are about to be stored. Their queue offset, physical offset and store time are 0.

    `producer_id`: the producer's instance; empty for messages without a producer's sequence.
    """

    def __init__(self, broker_name: str, topic: str, queue_id: int, records: bytes, producer_id: str = "") -> None:
        """As in HookedBatch."""
        super().__init__(broker_name, topic, queue_id, records)
        self.producer_id = producer_id
        self.refusals: dict[int, str] = {}
        """The reason for each refused message, by its index."""

    @checked
    def refuse(self, index: int, reason: str) -> None:
        """Refuse message `index`: its sender gets MessageRefusedError with `reason`, a line of text. The other messages
        are stored: their producer sends them again automatically, and this hook gets them again. Raises
        InvalidArgumentError for an index out of range, and for an empty reason."""
        if not 0 <= index < len(self):
            raise InvalidArgumentError(f"there is no message {index} in a batch of {len(self)}")
        if not reason.strip():
            raise InvalidArgumentError("a refusal needs a reason, which the producer is told")
        self.refusals.setdefault(index, reason)


class FetchedBatch(HookedBatch):
    """Messages that a fetch returns to a consumer, from `queue_offset` on; the consumer continues at `next_offset`.
    Offsets count messages of the queue."""

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
        """As in HookedBatch."""
        super().__init__(broker_name, topic, queue_id, records)
        self.queue_offset, self.next_offset = queue_offset, next_offset
