"""A group's lag in a topic, from its committed offsets and the ends of the topic's queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raymq.common.protocol.group import QueueOffset
from raymq.common.protocol.store import QueueBounds


@dataclass(frozen=True, slots=True)
class Lag:
    """The `messages` that a group has not committed. Most of them are in queue `queue_id`, from `offset` on."""

    messages: int
    queue_id: int = -1
    offset: int = 0


def lag_in(committed: Mapping[int, int], bounds: Mapping[int, QueueBounds]) -> Lag:
    """Compute the lag over the queues of a topic; both arguments are by queue id.

    If a queue has no committed offset, all of its messages count; deleted messages do not.
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
    """The number of `messages` that a group has not committed, and the first of them by queue id and offset."""

    messages: int
    firsts: list[tuple[int, int]]


def unread_in(committed: Mapping[int, QueueOffset], bounds: Sequence[tuple[int, int]]) -> Unread:
    """Compute the unread messages, as `lag_in`, from the first and end offsets of a topic's queues 0, 1 ….

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
