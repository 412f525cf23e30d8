"""What a member of a consumer group and the group's Rebalance actor say to each other.

A member sends a `GroupHeartbeat` about once a second and gets a `GroupAssignment`. The protocol is cooperative
(design §5, promise 4): a member reports the queues it *holds*; a queue that the assignment no longer names must be
stopped and committed, and only then is left out of the next heartbeat. Only after that does anyone else get it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from raymq.message import MessageQueue

HEARTBEAT_INTERVAL_S: Final = 1.0
SESSION_TIMEOUT_S: Final = 15.0
"""A member silent for longer is dead: its queues go to others. The member itself stops before that."""


@dataclass(frozen=True, slots=True)
class GroupHeartbeat:
    """`topics` the member subscribes to; `holding` the queues it still reads, delivers or has not yet committed.

    `sequence` grows from one heartbeat of a member to the next, also over a restart of the member. One that arrives
    behind a newer one says what is no longer so, and is not heeded.
    """

    member: str
    topics: frozenset[str]
    holding: frozenset[MessageQueue]
    leaving: bool = False
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """The queues the member may hold. `generation` grows with each change of the group's target."""

    generation: int
    queues: frozenset[MessageQueue]
    members: int
