"""Computes a group's lag in a topic from the group's committed offsets and the end offsets of the topic's
queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raymq.common.protocol.group import QueueOffset
from raymq.common.protocol.store import QueueBounds


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a group in a topic: the number of `messages` that the group has not committed.

    `queue_id` is the queue with the most uncommitted messages; they begin at `offset`.
    """

    messages: int
    queue_id: int = -1
    offset: int = 0


def lag_in(committed: Mapping[int, int], bounds: Mapping[int, QueueBounds]) -> Lag:
    """Compute a group's lag in the queues of one topic. `committed` has the group's committed offsets, and `bounds` the
    queues' bounds; both map queue ids.

    In a queue without a committed offset, all messages count. Deleted messages do not count.
    """
    total, most, queue_id, at = 0, 0, -1, 0
    for number, held in bounds.items():
        following = max(committed.get(number, 0), held.min_offset)
        lag = max(held.max_offset - following, 0)
        total += lag
        if lag > most:
            most, queue_id, at = lag, number, following
    return Lag(total, queue_id, at)


class Unread(NamedTuple):
    """The number of messages of a topic that a group has not committed, and the first uncommitted message of each
    queue, as (queue id, offset)."""

    messages: int
    firsts: list[tuple[int, int]]


def unread_in(committed: Mapping[int, QueueOffset], bounds: Sequence[tuple[int, int]]) -> Unread:
    """Count the unread messages of a group in a topic, as `lag_in` does. `bounds`: the first and the end offset of the
    topic's queues 0, 1 ….

    Also returns the first unread message of each queue.
    """
    total, firsts = 0, []
    for queue_id, (first, end) in enumerate(bounds):
        if first == end:
            continue
        known = committed.get(queue_id)
        following = first if known is None else max(known.queue_offset, first)
        if following < end:
            total += end - following
            firsts.append((queue_id, following))
    return Unread(total, firsts)
