"""The strategies that divide one topic's queues among the members of a group (spec/messaging.md §5.2).

A strategy is a pure function: it maps queues, members and its own settings to a list of queues per member. No queue has
two owners, and the order of the arguments does not matter. STICKY is in sticky.py; target.py selects the strategy of a
group.

    strategy               owners             shares of the members
    AVG                    every queue        differ by one at most; blocks of neighbours
    AVG_BY_CIRCLE          every queue        differ by one at most; every n-th queue
    CONFIG                 configured queues  as configured
    MACHINE_ROOM           the rooms' queues  differ by one at most
    MACHINE_ROOM_NEARBY    every queue        differ by one at most within each room

CONSISTENT_HASH places queues and members on one ring, so that a member that joins or leaves moves only its own queues.

See spec/messaging.md §5.2. Each member has several positions on the ring (virtual nodes) `member-0`, `member-1`, …. A
queue belongs to the first member position at or after its own position; after the last position the search continues at
the first. A position is the first four bytes of an MD5, big-endian. The members' shares may differ a lot, because
nothing balances them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue

VIRTUAL_NODES: Final = 10


def ring_position(key: str) -> int:
    """Return the position of a key on the consistent-hash ring, 0 to 2**32 - 1."""
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def queue_key(queue: MessageQueue) -> str:
    """Return a queue's key on the consistent-hash ring: the string that RocketMQ's Java client prints for the
    queue."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


def allocate_by_consistent_hash(
    queues: Iterable[MessageQueue], members: Iterable[str], virtual_nodes: int = VIRTUAL_NODES
) -> Shares:
    """The strategy CONSISTENT_HASH: divide the queues among the members by positions on a hash ring. Each member has
    `virtual_nodes` positions. Raises the errors of `check_shareable`, and InvalidArgumentError if `virtual_nodes` is
    less than 1."""
    queues, members = check_shareable(queues, members)
    if virtual_nodes < 1:
        raise InvalidArgumentError(f"virtual_nodes must be at least 1, not {virtual_nodes}")
    # If several members have the same position on the ring, the position belongs to the member whose name comes last.
    owners = {ring_position(f"{member}-{node}"): member for member in members for node in range(virtual_nodes)}
    positions = sorted(owners)
    shares: Shares = {member: [] for member in members}
    for queue in queues:
        index = bisect_left(positions, ring_position(queue_key(queue)))
        shares[owners[positions[index % len(positions)]]].append(queue)
    return shares


Shares = dict[str, list[MessageQueue]]
"""The result of an allocation strategy: the queues of every member."""

ROOM_MARK: Final = "@"
"""A broker named `room@broker` is in the machine room `room`."""


def check_shareable(
    queues: Iterable[MessageQueue], members: Iterable[str]
) -> tuple[tuple[MessageQueue, ...], tuple[str, ...]]:
    """Sort queues and members. Raises InvalidArgumentError if there are no queues or no members, or if a member's name
    is blank (golden fact 10 of spec/messaging.md)."""
    queues, members = tuple(sorted(queues)), tuple(sorted(members))
    if not members:
        raise InvalidArgumentError("cannot share queues, because the list of members is empty")
    if not all(member.strip() for member in members):
        raise InvalidArgumentError(f"the name of a member is blank: {list(members)}")
    if not queues:
        raise InvalidArgumentError("cannot share queues, because the list of queues is empty")
    return queues, members


def allocate_averagely(queues: Iterable[MessageQueue], members: Iterable[str]) -> Shares:
    """The strategy AVG: each member gets a block of neighbouring queues, and the first members get the larger blocks.
    Ten queues for four members: 3, 3, 2, 2.

    Raises InvalidArgumentError as `check_shareable` does. So do all strategies except CONFIG.
    """
    queues, members = check_shareable(queues, members)
    size, rest = divmod(len(queues), len(members))
    shares: Shares = {}
    start = 0
    for index, member in enumerate(members):
        end = start + size + (index < rest)
        shares[member] = list(queues[start:end])
        start = end
    return shares


def allocate_by_circle(queues: Iterable[MessageQueue], members: Iterable[str]) -> Shares:
    """The strategy AVG_BY_CIRCLE: deal the queues to the members in turn, like cards."""
    queues, members = check_shareable(queues, members)
    return {member: list(queues[index :: len(members)]) for index, member in enumerate(members)}


def allocate_by_config(
    queues: Iterable[MessageQueue],
    members: Iterable[str],
    requests: Mapping[str, Collection[MessageQueue]],
    present: Mapping[MessageQueue, str],
) -> Shares:
    """The strategy CONFIG: each member gets exactly the queues that it requests, if they exist. No request is rejected.

    If several members request a queue, it stays with its current owner (`present`) if the owner is among them.
    Otherwise the queue goes to the first of these members by name.
    """
    shares: Shares = {member: [] for member in sorted(members)}
    for queue in sorted(queues):
        askers = [member for member in shares if queue in requests.get(member, ())]
        if askers:
            present_owner = present.get(queue)
            shares[present_owner if present_owner in askers else askers[0]].append(queue)
    return shares


def allocate_by_machine_room(queues: Iterable[MessageQueue], members: Iterable[str], rooms: Collection[str]) -> Shares:
    """The strategy MACHINE_ROOM: divide the queues of brokers named `room@broker` whose room is in `rooms`. Other
    queues have no owner.

    With n queues and c members each member gets a block of n // c queues. The remaining n mod c queues go to the first
    members, one queue each.
    """
    queues, members = check_shareable(queues, members)
    in_rooms = [queue for queue in queues if _room_by_name(queue.broker_name) in rooms]
    size, rest = divmod(len(in_rooms), len(members))
    left_over = in_rooms[size * len(members) :]
    return {
        member: in_rooms[index * size : (index + 1) * size] + left_over[index : index + (index < rest)]
        for index, member in enumerate(members)
    }


def _room_by_name(broker_name: str) -> str | None:
    parts = broker_name.split(ROOM_MARK)
    return parts[0] if len(parts) == 2 else None


def allocate_nearby(
    queues: Iterable[MessageQueue],
    members: Iterable[str],
    broker_rooms: Mapping[str, str],
    member_rooms: Mapping[str, str],
) -> Shares:
    """The strategy MACHINE_ROOM_NEARBY with AVG: divide the queues of a machine room among the members in that room.

    The queues of a room without members are divided among all members. `broker_rooms`: broker name to room;
    `member_rooms`: member to room. Raises InvalidArgumentError if a broker or a member has no room.
    """
    queues, members = check_shareable(queues, members)
    queues_by_room: dict[str, list[MessageQueue]] = defaultdict(list)
    for queue in queues:
        queues_by_room[_room_of("broker", queue.broker_name, broker_rooms)].append(queue)
    members_by_room: dict[str, list[str]] = defaultdict(list)
    for member in members:
        members_by_room[_room_of("member", member, member_rooms)].append(member)
    shares: Shares = {member: [] for member in members}
    for room, room_queues in sorted(queues_by_room.items()):
        for member, share in allocate_averagely(room_queues, members_by_room.get(room) or members).items():
            shares[member] += share
    return shares


def _room_of(kind: str, name: str, rooms: Mapping[str, str]) -> str:
    room = rooms.get(name, "")
    if not room.strip():
        raise InvalidArgumentError(
            f"{kind} {name} has no machine room: MACHINE_ROOM_NEARBY needs the Ray node of each {kind}"
        )
    return room
