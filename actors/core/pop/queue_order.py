"""Decides the order in which a receive reads its queues: high priorities first, and no level starves.

A receive leases messages queue by queue until it has enough, so the order decides which messages wait. The rules, for
the queues of one broker:

    ordinary topic     Its queues by their ids, from a random queue on.
    PRIORITY topic     Its queues are levels, and the receives of a group count turns (raymq.client.consumer.levels): in
                       a strict turn, the levels are read from the highest to the lowest, in a fair turn, one lower
                       level is read first.
    retry topic        Its queues are read first in one receive of five, except in fair turns, and last otherwise.

Only receives that lease messages count as turns. With ten levels, each level is read first in at least one of 36
consecutive receives of a group. The highest level that has messages is read first in at least three receives of four,
apart from retries.

In a receive of several topics, the queues of all topics start at a random queue. The queues of a PRIORITY topic keep
their places among the queues of the other topics, and are read there by level. Another topic may then fill the receive,
so a level is first among the queues of its topic only.

The turns are counts in the memory of the broker. After a restart of the broker, or if very many groups receive, a count
begins again, at a random turn.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from actors.core.pop.receive import TopicQueue
from raymq.client.consumer.levels import FIRST_TURNS, Draw, fair_place
from raymq.common.names import retry_topic

COUNTS_MAX: Final = 4096
"""Maximum number of groups and topics whose turns are counted. The count that was not used for the longest time is
forgotten first."""
RETRIES_FIRST: Final = 5
"""One receive in this number reads the retry topic first (popFromRetryProbability)."""


class QueueOrder:
    """Decides the order of the queues of each receive at one broker, and counts the turns. Not thread-safe."""

    def __init__(self, draw: Draw = random.randrange) -> None:
        self._draw = draw
        self._turns: OrderedDict[tuple[str, str], int] = OrderedDict()
        """By group and topic, the number of the present turn."""

    def order(self, group: str, queues: Sequence[TopicQueue], leveled: Collection[str]) -> list[TopicQueue]:
        """Return the queues of a receive of `group` in the order in which to read them. `queues`: the queues by topic
        and id. `leveled`: the topics of the type PRIORITY. Repeated calls without `leased` are the same turn."""
        retry = retry_topic(group)
        retries = [queue for queue in queues if queue[0] == retry]
        others = [queue for queue in queues if queue[0] != retry]
        start = self._draw(len(others)) if others else 0
        others = others[start:] + others[:start]
        is_fair = False
        for topic in leveled:
            levels = sorted((queue for queue in others if queue[0] == topic), reverse=True)
            place = fair_place(self._turn(group, topic), len(levels))
            if place is not None:
                is_fair = True
                levels.insert(0, levels.pop(place))
            in_order = iter(levels)
            others = [next(in_order) if queue[0] == topic else queue for queue in others]
        return retries + others if not is_fair and self._draw(RETRIES_FIRST) == 0 else others + retries

    def leased(self, group: str, leveled: Iterable[str]) -> None:
        """Go on to the next turn of `group` in each of the topics `leveled`, after a receive has leased messages."""
        for topic in leveled:
            self._turns[group, topic] = self._turn(group, topic) + 1
            if len(self._turns) > COUNTS_MAX:
                self._turns.popitem(last=False)

    def _turn(self, group: str, topic: str) -> int:
        """Return the number of the present turn, and mark the count as used."""
        turn = self._turns.setdefault((group, topic), self._draw(FIRST_TURNS))
        self._turns.move_to_end((group, topic))
        return turn
