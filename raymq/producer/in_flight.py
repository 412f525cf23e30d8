"""A batch on its way from a producer to a store, and how its acknowledgement reaches each message's sender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raymq.message import MessageQueue, SendResult
from raymq.producer.encoder import PendingMessage
from raymq.protocol.store import AppendResult
from raymq.record.encode import EncodedBatch
from raymq.record.message_id import offset_message_id


@dataclass(slots=True)
class InFlightBatch:
    """A batch on its way, encoded once. `queue` is where it is stored: for delayed messages, where they wait.

    `deadline_s` is the next one of its entries; `expired`: some are over.
    """

    queue: MessageQueue
    entries: list[PendingMessage]
    batch: EncodedBatch
    deadline_s: float
    expired: bool = False

    def waiting(self) -> list[PendingMessage]:
        """The entries whose senders still wait."""
        return [entry for entry in self.entries if not entry.outcome.done()] if self.expired else self.entries

    def acknowledge(self, result: AppendResult, store_host: tuple[str, int]) -> list[PendingMessage]:
        """Tell those who wait where their messages are; returns them."""
        count = len(self.entries)
        waiting = self.waiting()
        queue_offsets = result.queue_offsets or range(result.queue_offset, result.queue_offset + count)
        positions: Sequence[int] = result.physical_offsets or ()
        if not positions:
            ends = np.cumsum(self.batch.sizes, dtype=np.int64)
            positions = (result.physical_offset + ends - self.batch.sizes).tolist()
        for entry, message_id, queue_offset, position in zip(
            self.entries, self.batch.message_ids, queue_offsets, positions, strict=True
        ):
            if self.expired and entry.outcome.done():
                continue
            place = offset_message_id(*store_host, position)
            entry.outcome.set_result(SendResult(result.status, message_id, place, self.queue, queue_offset))
        return waiting
