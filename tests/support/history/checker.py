"""Decides the result of a chaos test: compares the history of the sends with the messages in the queues
afterwards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raymq.common.message import MessageQueue
from tests.support.history.history import Operation, Outcome, Sent


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of messages in a chaos test. The first three counts describe the run; all others must be 0.

    `recovered`: the send's outcome was unknown, and the message is stored. `lost`: acknowledged, but not stored.
    `duplicated`: stored more than once. `unexpected`: stored although never sent, or although the send failed.
    `misplaced`: acknowledged with a wrong queue offset. `reordered`: stored after a later message of the same producer
    in the same queue.
    """

    acknowledged: int
    unknown: int
    recovered: int
    lost: int = 0
    duplicated: int = 0
    unexpected: int = 0
    misplaced: int = 0
    reordered: int = 0

    @property
    def violations(self) -> dict[str, int]:
        names = ("lost", "duplicated", "unexpected", "misplaced", "reordered")
        return {name: count for name in names if (count := getattr(self, name))}


def check(history: Iterable[Operation], queues: Mapping[MessageQueue, Sequence[Sent]]) -> Report:
    """Compare a history of sends with the stored messages, and return the counts. `queues`: all messages of each queue
    from offset 0 on."""
    by_outcome: dict[Outcome, dict[Sent, Operation]] = defaultdict(dict)
    for operation in history:
        by_outcome[operation.outcome][operation.sent] = operation
    acknowledged, unknown = by_outcome[Outcome.OK], by_outcome[Outcome.UNKNOWN]
    stored = Counter(sent for messages in queues.values() for sent in messages)
    return Report(
        acknowledged=len(acknowledged),
        unknown=len(unknown),
        recovered=sum(1 for sent in unknown if sent in stored),
        lost=sum(1 for sent in acknowledged if sent not in stored),
        duplicated=sum(count - 1 for count in stored.values()),
        unexpected=sum(1 for sent in stored if sent not in acknowledged and sent not in unknown),
        misplaced=sum(1 for operation in acknowledged.values() if not _is_in_place(operation, queues)),
        reordered=sum(_reordered(messages) for messages in queues.values()),
    )


def _is_in_place(operation: Operation, queues: Mapping[MessageQueue, Sequence[Sent]]) -> bool:
    assert operation.queue is not None
    messages = queues.get(operation.queue, ())
    return operation.queue_offset < len(messages) and messages[operation.queue_offset] == operation.sent


def _reordered(messages: Sequence[Sent]) -> int:
    count = 0
    latest: dict[int, int] = {}
    for sent in messages:
        count += sent.sequence < latest.get(sent.producer, -1)
        latest[sent.producer] = max(latest.get(sent.producer, -1), sent.sequence)
    return count
