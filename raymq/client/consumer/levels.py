"""Decides in which order a consumer reads the levels of a PRIORITY topic: high priorities first, and no level starves.

A consumer counts turns in each PRIORITY topic: receives at a broker, polls, or tasks of a listener. Each turn reads the
levels in an order, until it has enough messages:

    strict turn    three turns of four: the levels from the highest to the lowest
    fair turn      the fourth turn: one lower level, and then the other levels from the highest to the lowest. The fair
                   turns take all levels below the highest level one after another, from the highest to the lowest.

Only turns that find messages count. So in a topic with n levels, each level is read first in at least one of
4 * (n - 1) consecutive turns, however many messages the other levels have. A count begins at a random turn. Otherwise a
count that often begins again would have strict turns only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeVar

from raymq.common.message import MessageQueue

STRICT_TURNS: Final = 3
"""Number of strict turns before each fair turn."""
FIRST_TURNS: Final = 1 << 20
"""Upper bound of the random turn at which a count begins."""

Draw = Callable[[int], int]
"""Function that returns a random number from 0 to its argument minus 1."""
Item = TypeVar("Item")


def fair_place(turn: int, levels: int) -> int | None:
    """Return the place of the level that is read first in a fair turn, counted from the highest level, whose place is
    0. Returns None for a strict turn, and for a topic with fewer than two levels."""
    round_number, step = divmod(turn, STRICT_TURNS + 1)
    return 1 + round_number % (levels - 1) if step == STRICT_TURNS and levels > 1 else None


class LevelTurns:
    """Counts the turns of one consumer that owns queues, and orders its queues. Not thread-safe.

    A level is all owned queues of a topic with one queue id: there is one in each broker group.
    """

    def __init__(self, draw: Draw = random.randrange) -> None:
        self._draw = draw
        self._turns: dict[str, int] = {}
        """By PRIORITY topic, the number of the present turn."""

    def __bool__(self) -> bool:
        """True if the consumer reads a PRIORITY topic."""
        return bool(self._turns)

    def set(self, topic: str, *, has_levels: bool) -> None:
        """Count the turns of a topic if it has levels; otherwise forget its count."""
        if not has_levels:
            self._turns.pop(topic, None)
        elif topic not in self._turns:
            self._turns[topic] = self._draw(FIRST_TURNS)

    def order(
        self, items: Collection[Item], queue_of: Callable[[Item], MessageQueue], held: Collection[MessageQueue]
    ) -> list[Item]:
        """Return `items`, each of one queue, in the order in which to read them now.

        The items of a PRIORITY topic keep their places among the items of other topics, and are ordered there by level;
        items of one level keep their order. `held`: all queues of the consumer, which decide what the levels are.
        """
        ordered = list(items)
        for topic, turn in self._turns.items():
            places = [place for place, item in enumerate(ordered) if queue_of(item).topic == topic]
            if len(places) < 2:
                continue
            levels = sorted({queue.queue_id for queue in held if queue.topic == topic}, reverse=True)
            place = fair_place(turn, len(levels))
            first = None if place is None else levels[place]
            own = [ordered[place] for place in places]
            own.sort(key=lambda item: (queue_of(item).queue_id != first, -queue_of(item).queue_id))
            for place, item in zip(places, own, strict=True):
                ordered[place] = item
        return ordered

    def took(self, topics: Iterable[str]) -> None:
        """Go on to the next turn of each of the topics, after a turn has found messages of them."""
        for topic in topics:
            if topic in self._turns:
                self._turns[topic] += 1
