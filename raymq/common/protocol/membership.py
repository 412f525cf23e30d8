"""The heartbeats of a consumer group's members, and the assignments from the group's Rebalance actor.

A member sends a `GroupHeartbeat` about once a second and gets a `GroupAssignment`. The protocol is cooperative
(design §5, promise 4): a member reports the queues it *holds*; a queue that the assignment no longer names must be
stopped and committed, and only then is left out of the next heartbeat. Only after that does anyone else get it.

While nothing changes at either side, a member says so in a `SteadyHeartbeat`, and is answered with SteadyAnswer.SAME.
Most heartbeats are of that kind, and cost little, however many queues and topics the member has.

A few Rebalance actors serve all groups. A group belongs to a slot by its name, and one actor at a time holds the slot
(actors.core.rebalance.slot_lease); another one answers with `OtherServer`. A program sends the heartbeats of all its
members that belong to one actor in one call (raymq.client.consumer.rebalance_client).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from raymq.common.message import MessageQueue
from raymq.common.names import REBALANCE_SLOTS

MEMBER_HEARTBEAT_INTERVAL_S: Final = 1.0
SESSION_TIMEOUT_S: Final = 15.0
"""A member silent for longer is dead: its queues go to others. The member itself stops before that."""


ALL_MESSAGES: Final = "*"
"""The expression of a member that wants all messages of a topic."""


def slot_of(group: str) -> int:
    """The slot of a group, by a hash that is the same in every process."""
    return zlib.crc32(group.encode()) % REBALANCE_SLOTS


class AllocateStrategy(Enum):
    """The rule by which a topic's queues are divided among a group's members (spec/messaging.md §5.2), and STICKY: as
    balanced as AVG, moving the fewest queues."""

    AVG = "AVG"
    AVG_BY_CIRCLE = "AVG_BY_CIRCLE"
    CONFIG = "CONFIG"
    MACHINE_ROOM = "MACHINE_ROOM"
    MACHINE_ROOM_NEARBY = "MACHINE_ROOM_NEARBY"
    CONSISTENT_HASH = "CONSISTENT_HASH"
    STICKY = "STICKY"


@dataclass(frozen=True, slots=True)
class Allocation:
    """A member's wish for the division of the group's queues. All members of a group should have the same.

    `queues` is for CONFIG: those that this member always gets. `machine_rooms` is for MACHINE_ROOM: the machine rooms
    whose queues are divided, by the part before `@` in their broker names.
    """

    strategy: AllocateStrategy = AllocateStrategy.AVG
    queues: frozenset[MessageQueue] = frozenset()
    machine_rooms: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GroupHeartbeat:
    """A member's heartbeat: `topics` that it subscribes to; `holding`, the queues that it still reads, delivers or has
    not yet committed; `node`, the Ray node that it runs on, for MACHINE_ROOM_NEARBY; `expressions`, by topic, where it
    does not want all messages.

    RebalanceClient fills in the last three. `session`: which process speaks under the member's name, as the Rebalance
    actor has named it; 0 asks for that. So nothing that a dead process has left on its way speaks for the one that
    follows it. `sequence` grows from one heartbeat of a session to the next: one that arrives behind a newer one says
    what is no longer so, and is not heeded; the same one again changes nothing. `generation`: the newest that the
    member was told (0: none yet), by which a Rebalance actor learns of an instance before it.
    """

    member: str
    topics: frozenset[str]
    holding: frozenset[MessageQueue]
    leaving: bool = False
    allocation: Allocation = field(default_factory=Allocation)
    node: str = ""
    session: int = 0
    sequence: int = 0
    generation: int = 0
    expressions: Mapping[str, str] = field(default_factory=dict)


class SteadyHeartbeat(NamedTuple):
    """The heartbeat of a member that says what it said in the one before, of the same session, which was answered with
    the very queues that it holds. The rest is as in GroupHeartbeat."""

    member: str
    session: int
    sequence: int
    generation: int


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """The queues the member may hold.

    `generation` grows with each change of the group's target, also over restarts of the Rebalance actor. A member takes
    it along to the brokers, which refuse what an owner of an older generation commits once a newer one has begun with
    a queue. For each queue that is the generation of the last assignment that *named* the queue: a member that hears of
    a newer one in which the queue is another's must not commit with that. `offsets_version` changes when somebody has
    reset offsets of the group: each member then asks the brokers about the queues it holds. Where `session` is not that
    of the heartbeat, the heartbeat was not heeded: it is to be said again with this session (RebalanceClient does).
    `incomplete`: the queues of one of the member's topics are not known yet; the next heartbeat should follow soon.
    """

    generation: int
    queues: frozenset[MessageQueue]
    members: int
    offsets_version: int = 0
    session: int = 0
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class OtherServer:
    """The answer of a Rebalance actor that may not speak for the group. `holder`: the actor that may, as far as is
    known; this actor's own name while it must wait itself, and empty where none is known."""

    holder: str


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """The answer to one heartbeat of several that could not be dealt with; the others are not concerned."""

    error: str


class GroupRefusal(NamedTuple):
    """The answer to a member that wants other messages of a topic than the members before it; the heartbeat was not
    heeded."""

    topic: str
    expression: str
    other_member: str
    other_expression: str


class SteadyAnswer(Enum):
    """The answer to a SteadyHeartbeat."""

    SAME = "the answer is as before"
    TELL = "the heartbeat was not heeded: it is to be said in full, at once"


Heartbeat = GroupHeartbeat | SteadyHeartbeat
HeartbeatAnswer = GroupAssignment | OtherServer | GroupFailure | GroupRefusal | SteadyAnswer
