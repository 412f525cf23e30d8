"""How a topic's queues are shared among the members of a group (spec/messaging.md §5.2).

A strategy is a function of sorted queues and sorted members to a list of queues per member. The rules: every queue has
exactly one owner; the order in which members joined does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from raymq.errors import InvalidArgumentError
from raymq.message import MessageQueue


def allocate_averagely(queues: Sequence[MessageQueue], members: Sequence[str]) -> dict[str, list[MessageQueue]]:
    """AVG: contiguous blocks whose sizes differ by at most one, the first members taking the larger ones.

    `members` must not be empty. Ten queues and four members give 3, 3, 2, 2 (golden fact 1).
    """
    if not members:
        raise InvalidArgumentError("queues cannot be shared among no members")
    queues, members = sorted(queues), sorted(members)
    size, rest = divmod(len(queues), len(members))
    shares: dict[str, list[MessageQueue]] = {}
    start = 0
    for index, member in enumerate(members):
        end = start + size + (index < rest)
        shares[member] = list(queues[start:end])
        start = end
    return shares
