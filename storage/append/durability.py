"""The one place that decides what an append waits for: RocketMQ's WAIT (spec/storage.md §6, §11.1).

An append waits until its batches are as durable as the flush setting promises and, on a master with replicas, until
those have them (`ReplicaAcks`). A batch that does not wait (wait_store_msg_ok) is acknowledged once it is written. In
one append with others that do, it returns with them, and is not told of a slow disk or of slow replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from raymq.errors import InSyncReplicasError
from raymq.message import SendStatus
from raymq.protocol.store import AppendResult
from raymq.record.encode import EncodedBatch

Written = tuple[list[AppendResult], int, bool]
"""The outcome of writing batches: a result with SEND_OK for each, a physical offset before which all of them lie, and
false if the disk was too slow for what the flush setting promises."""


class WriteBatches(Protocol):
    """Writes batches and, if it is to `wait`, waits for the disk as the flush setting says."""

    def __call__(self, batches: Sequence[EncodedBatch], timeout_s: float | None, *, wait: bool) -> Written: ...


class WaitForCopies(Protocol):
    """Waits until enough replicas have the log before `end_offset`; False if they were too slow."""

    def __call__(self, end_offset: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class ReplicaAcks:
    """The copies that an append on a master waits for."""

    # Raised, before anything is written, for an append that waits: too few replicas are in sync. None if enough are.
    not_enough: InSyncReplicasError | None
    # Called once the batches are written.
    wait_for_copies: WaitForCopies


def append_durably(
    write: WriteBatches, batches: Sequence[EncodedBatch], timeout_s: float | None, acks: ReplicaAcks | None
) -> list[AppendResult]:
    """Write `batches`, and wait for the disk and the replicas if one of them waits; one result each.

    A batch that waits has the status FLUSH_DISK_TIMEOUT if the disk was too slow, FLUSH_SLAVE_TIMEOUT if the replicas
    were. InSyncReplicasError is raised before anything is written. Other errors are those of `write` and `acks`.
    """
    waits = any(batch.wait_store_msg_ok for batch in batches)
    if waits and acks is not None and acks.not_enough is not None:
        raise acks.not_enough
    results, end_offset, on_disk = write(batches, timeout_s, wait=waits)
    if not on_disk:
        results = _degraded(results, batches, SendStatus.FLUSH_DISK_TIMEOUT)
    if waits and acks is not None and not acks.wait_for_copies(end_offset):
        results = _degraded(results, batches, SendStatus.FLUSH_SLAVE_TIMEOUT)
    return results


def _degraded(
    results: Sequence[AppendResult], batches: Sequence[EncodedBatch], status: SendStatus
) -> list[AppendResult]:
    """The results of `batches`, with `status` for the batches that waited in vain."""
    return [
        replace(result, status=status) if batch.wait_store_msg_ok else result
        for result, batch in zip(results, batches, strict=True)
    ]
