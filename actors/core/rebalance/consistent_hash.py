"""CONSISTENT_HASH: queues and members on one ring, so that a joining or leaving member moves only its own queues.

See spec/messaging.md §5.2. Each member has several positions on the ring (virtual nodes) `member-0`, `member-1`, …. A
queue belongs to the first position at or after its own; after the last position the first one follows. A position is
the first four bytes of an MD5, big-endian. Shares may differ a lot: hashing spreads the queues, and nothing balances
them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from actors.core.rebalance.allocation import Shares, check_shareable
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue

VIRTUAL_NODES: Final = 10


def ring_position(key: str) -> int:
    """Return the position of a key on the ring, 0 to 2**32 - 1."""
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def queue_key(queue: MessageQueue) -> str:
    """Return a queue's key: the text that Java prints for it."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


def allocate_by_consistent_hash(
    queues: Iterable[MessageQueue], members: Iterable[str], virtual_nodes: int = VIRTUAL_NODES
) -> Shares:
    """Share the queues by the ring. InvalidArgumentError as `check_shareable`, and for less than one virtual node."""
    queues, members = check_shareable(queues, members)
    if virtual_nodes < 1:
        raise InvalidArgumentError(f"virtual_nodes must be at least 1, not {virtual_nodes}")
    # If two members have the same position, the last by name gets it.
    owners = {ring_position(f"{member}-{node}"): member for member in members for node in range(virtual_nodes)}
    positions = sorted(owners)
    shares: Shares = {member: [] for member in members}
    for queue in queues:
        index = bisect_left(positions, ring_position(queue_key(queue)))
        shares[owners[positions[index % len(positions)]]].append(queue)
    return shares
