"""The deliveries of leased messages as simple consumers recorded them, and the check that no message had two holders at
the same time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from tests.support.history.listener_notes import ListenerNotes


@dataclass
class Deliveries:
    """The deliveries of one message, as the consumers recorded them: each attempt, with the start and the end of its
    invisible time. `acked` and `changed`: the attempts that a consumer acknowledged, or whose invisible time it
    changed."""

    given: list[tuple[int, int, int]] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)

    def faults(self) -> list[str]:
        """Return a sentence for each violation: an attempt that two consumers got, an attempt that began while the
        message was invisible, and an attempt after an acknowledgement."""
        given = sorted(self.given)
        found = []
        for (attempt, _, until_ms), (following, pop_ms, _) in pairwise(given):
            if following == attempt:
                found.append(f"attempt {attempt} was handed out twice")
            elif pop_ms < until_ms and attempt not in self.changed:
                found.append(f"attempt {following} began {until_ms - pop_ms} ms early")
        if len(self.acked) > 1 or (self.acked and self.acked[0] != given[-1][0]):
            found.append(f"attempts {self.acked} were acknowledged, and {given[-1][0]} was handed out")
        return found


def deliveries_of(notes: ListenerNotes) -> dict[str, Deliveries]:
    """Parse the lines that consumers wrote, and return the deliveries of each message by its body.

    A line has the fields `KIND BODY ATTEMPT POP_MS INVISIBLE_UNTIL_MS`. The kind is G for a message that a consumer
    got, A for an acknowledgement, C for a change of the invisible time. Raises AssertionError if a line is an error
    (kind E).
    """
    found: dict[str, Deliveries] = defaultdict(Deliveries)
    for line in notes.lines():
        kind, body, *numbers = line.split(" ")
        assert kind != "E", line
        attempt, pop_ms, until_ms = map(int, numbers)
        one = found[body]
        if kind == "G":
            one.given.append((attempt, pop_ms, until_ms))
        elif kind == "A":
            one.acked.append(attempt)
        else:
            one.changed.add(attempt)
    return found
