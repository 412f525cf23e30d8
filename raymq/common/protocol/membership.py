"""The heartbeats of a consumer group's members, and the assignments from the group's Rebalance actor.

A member sends a `GroupHeartbeat` about once a second and gets a `GroupAssignment`. The protocol is cooperative (design
§5, promise 4): a member reports the queues that it *holds*. If its assignment no longer names a queue, the member first
stops reading the queue and commits. Then it omits the queue from its next heartbeat. Only after that heartbeat does
another member get the queue.

While neither the member's state nor its assignment changes, the member sends a `SteadyHeartbeat` and gets
SteadyAnswer.SAME. Most heartbeats are of this kind; their cost does not depend on the number of queues and topics.

A few Rebalance actors serve all groups. A group's name determines its slot, and one actor at a time holds the slot
(actors.core.rebalance.slot_lease); all other actors answer with `OtherServer`. A program sends the heartbeats of all
its members at one actor in one call (raymq.client.consumer.rebalance_client).
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
"""Seconds without a heartbeat after which a member counts as dead and other members get its queues. The member itself
stops reading earlier."""


ALL_MESSAGES: Final = "*"
"""The filter expression of a member that subscribes to all messages of a topic."""


def slot_of(group: str) -> int:
    """Return the slot of a consumer group. A slot is a share of all groups that one Rebalance actor manages. The number
    is a hash of the group's name that is equal in every process."""
    return zlib.crc32(group.encode()) % REBALANCE_SLOTS


class AllocateStrategy(Enum):
    """The rule that divides a topic's queues among a group's members (spec/messaging.md §5.2). STICKY is as balanced as
    AVG, and moves the fewest queues."""

    AVG = "AVG"
    AVG_BY_CIRCLE = "AVG_BY_CIRCLE"
    CONFIG = "CONFIG"
    MACHINE_ROOM = "MACHINE_ROOM"
    MACHINE_ROOM_NEARBY = "MACHINE_ROOM_NEARBY"
    CONSISTENT_HASH = "CONSISTENT_HASH"
    STICKY = "STICKY"


@dataclass(frozen=True, slots=True)
class Allocation:
    """A member's choice of the rule that divides the group's queues. All members of a group should choose the same
    rule.

    `queues`, for CONFIG: the queues that this member always gets. `machine_rooms`, for MACHINE_ROOM: only the queues of
    these machine rooms are divided. In a broker's name, the machine room precedes the `@`.
    """

    strategy: AllocateStrategy = AllocateStrategy.AVG
    queues: frozenset[MessageQueue] = frozenset()
    machine_rooms: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GroupHeartbeat:
    """A member's full heartbeat. RebalanceClient sets `session`, `sequence` and `generation`.

    `topics`: the subscribed topics. `expressions`: maps a topic to its filter expression, for topics from which the
    member does not want all messages. `holding`: the queues that the member still reads or delivers, or has not yet
    committed. `node`: the member's Ray node, for MACHINE_ROOM_NEARBY.

    `session`: the number that the Rebalance actor gave to the process that uses the member's name; 0 requests a number.
    With this number, a delayed heartbeat of a dead process does not count for its successor. `sequence` grows with each
    heartbeat of a session. A heartbeat that arrives after a newer heartbeat is ignored, and a repeated heartbeat
    changes nothing. `generation`: the newest generation that the member has received (0: none). A new Rebalance actor
    reads its predecessor's generation from this field.
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
    """A short heartbeat that repeats the member's previous heartbeat in the same session. The member sends it only if
    the previous answer named exactly the queues that the member holds. The fields have the same meaning as in
    GroupHeartbeat."""

    member: str
    session: int
    sequence: int
    generation: int


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """The queues that a member of a consumer group may hold.

    `generation` grows with each change of the group's target assignment, also across restarts of the Rebalance actor. A
    member sends the generation with its commits. After the owner of a newer generation has begun to read a queue,
    brokers refuse commits of older generations. The generation of a queue is the generation of the last assignment that
    *named* the queue. If a newer assignment does not name the queue, the member must not commit in the queue with the
    newer generation.

    `offsets_version` changes when offsets of the group were reset: each member then queries the brokers about its
    queues. `session`: if it differs from the heartbeat's session, the heartbeat was ignored, and RebalanceClient
    repeats it with this session. `incomplete`: the queues of at least one of the member's topics are not known yet; the
    next heartbeat should follow soon.
    """

    generation: int
    queues: frozenset[MessageQueue]
    members: int
    offsets_version: int = 0
    session: int = 0
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class OtherServer:
    """A Rebalance actor's answer to a heartbeat of a group that another actor serves. The other actor holds the group's
    slot, which is a share of the groups. `holder`: the actor that holds the slot, or empty if unknown. If the answering
    actor is waiting for the slot, `holder` is this actor itself."""

    holder: str


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """The answer to one failed heartbeat in a call with several heartbeats. The other heartbeats of the call are not
    affected."""

    error: str


class GroupRefusal(NamedTuple):
    """The answer to a member that subscribes to a topic with another filter expression than the group's earlier
    members. The member's heartbeat was ignored."""

    topic: str
    expression: str
    other_member: str
    other_expression: str


class SteadyAnswer(Enum):
    """The Rebalance actor's answer to a SteadyHeartbeat: SAME if the assignment is unchanged, or TELL if the member
    must send a full GroupHeartbeat at once."""

    SAME = "the answer is as before"
    TELL = "the heartbeat was not heeded: it is to be said in full, at once"


Heartbeat = GroupHeartbeat | SteadyHeartbeat
HeartbeatAnswer = GroupAssignment | OtherServer | GroupFailure | GroupRefusal | SteadyAnswer
