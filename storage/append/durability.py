"""Which appends wait until they are as durable as the settings promise: RocketMQ's WAIT (spec/storage.md §6, §11.1).

A batch that does not wait is acknowledged once it is written. In one append with others that do, it returns with them,
and what they are told of a slow disk, or of slow replicas, does not concern it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raymq.message import SendStatus
from raymq.protocol.store import AppendResult
from raymq.record.encode import EncodedBatch


def must_wait(batches: Sequence[EncodedBatch]) -> bool:
    """Whether the append of `batches` waits."""
    return any(batch.wait_store_msg_ok for batch in batches)


def degraded(
    results: Sequence[AppendResult], batches: Sequence[EncodedBatch], status: SendStatus
) -> list[AppendResult]:
    """The results of `batches`, with `status` for those that waited in vain."""
    return [
        replace(result, status=status) if batch.wait_store_msg_ok else result
        for result, batch in zip(results, batches, strict=True)
    ]
