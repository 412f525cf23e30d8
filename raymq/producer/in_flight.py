"""Batches on their way from a producer to a store; their acknowledgements reach the sender of each message."""

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
    """A batch on its way, encoded once. `queue` stores it: for delayed messages, the queue in which they wait.

    `deadline_s` is the earliest of those of its entries that still wait; `expired`: the time of some others is up.
    """

    queue: MessageQueue
    entries: list[PendingMessage]
    encoded: EncodedBatch
    deadline_s: float
    expired: bool = False

    def waiting(self) -> list[PendingMessage]:
        """The entries whose senders still wait."""
        return [entry for entry in self.entries if not entry.outcome.done()] if self.expired else self.entries

    def acknowledge(self, result: AppendResult, store_host: tuple[str, int]) -> list[PendingMessage]:
        """Give each entry that still waits its SendResult; returns these entries."""
        count = len(self.entries)
        waiting = self.waiting()
        # The store lists the offsets of each record only where they do not follow each other.
        queue_offsets = result.queue_offsets or range(result.queue_offset, result.queue_offset + count)
        physical_offsets: Sequence[int] = result.physical_offsets or ()
        if not physical_offsets:
            ends = np.cumsum(self.encoded.sizes, dtype=np.int64)
            physical_offsets = (result.physical_offset + ends - self.encoded.sizes).tolist()
        for entry, message_id, queue_offset, physical_offset in zip(
            self.entries, self.encoded.message_ids, queue_offsets, physical_offsets, strict=True
        ):
            if self.expired and entry.outcome.done():
                continue
            offset_id = offset_message_id(*store_host, physical_offset)
            entry.outcome.set_result(SendResult(result.status, message_id, offset_id, self.queue, queue_offset))
        return waiting
