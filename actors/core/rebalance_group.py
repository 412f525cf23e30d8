"""Who in a consumer group holds which queue: the decisions of the Rebalance actor.

Two maps. `target`: the member each queue should go to, by the strategy, recomputed when members, subscriptions or
routes change. `holder`: the member that has the queue in its hands, as its own heartbeats say. A queue is granted to
its target only while nobody else holds it. So two members never hold one queue, at the price that a queue waits until
its old holder has let go or is known dead (raymq.membership).

Nothing survives: a new instance learns the holders from the members' heartbeats, and grants nothing that might be held
until every member of the old instance has had the time to say so (`grace_s`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actors.core.allocation import allocate_averagely
from raymq.membership import GroupAssignment, GroupHeartbeat
from raymq.message import MessageQueue


@dataclass(slots=True)
class _Member:
    topics: frozenset[str]
    last_seen_s: float
    sequence: int


class RebalanceGroup:
    """One consumer group. `session_timeout_s`: silence after which a member is dead."""

    def __init__(self, started_s: float, *, session_timeout_s: float, grace_s: float) -> None:
        self._session_timeout_s = session_timeout_s
        self._grants_from_s = started_s + grace_s
        self._members: dict[str, _Member] = {}
        self._queues: dict[str, tuple[MessageQueue, ...]] = {}
        self._target: dict[MessageQueue, str] = {}
        self._holder: dict[MessageQueue, str] = {}
        self.generation = 0

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(sorted(self._members))

    @property
    def topics(self) -> frozenset[str]:
        """All topics that some member subscribes to."""
        return frozenset(topic for member in self._members.values() for topic in member.topics)

    def holders(self) -> dict[MessageQueue, str]:
        return dict(self._holder)

    def set_queues(self, topic: str, queues: Iterable[MessageQueue]) -> None:
        """Take the queues of a topic from its route."""
        queues = tuple(sorted(queues))
        if self._queues.get(topic) != queues:
            self._queues[topic] = queues
            self._retarget()

    def heartbeat(self, heartbeat: GroupHeartbeat, now_s: float) -> GroupAssignment:
        """Hear one member and answer what it may hold. The first heartbeat joins, `leaving` leaves."""
        self.expire(now_s)
        name = heartbeat.member
        member = self._members.get(name)
        if member is not None and heartbeat.sequence < member.sequence:
            return GroupAssignment(self.generation, frozenset(), len(self._members))  # late: its sender waits no more
        if heartbeat.leaving:
            self._remove(name)
            return GroupAssignment(self.generation, frozenset(), len(self._members))
        if member is None or member.topics != heartbeat.topics:
            self._members[name] = _Member(heartbeat.topics, now_s, heartbeat.sequence)
            self._retarget()
        else:
            member.last_seen_s, member.sequence = now_s, heartbeat.sequence
        self._note_holding(name, heartbeat.holding)
        return GroupAssignment(self.generation, self._grant(name, heartbeat.holding, now_s), len(self._members))

    def expire(self, now_s: float) -> list[str]:
        """Drop the members that were silent for too long; returns their names."""
        silent = [
            name for name, member in self._members.items() if now_s - member.last_seen_s > self._session_timeout_s
        ]
        for name in silent:
            self._remove(name)
        return silent

    def _note_holding(self, name: str, holding: frozenset[MessageQueue]) -> None:
        for queue in [queue for queue, holder in self._holder.items() if holder == name and queue not in holding]:
            del self._holder[queue]
        for queue in holding:
            # A queue that someone else was granted meanwhile stays theirs: this member was dead to us and comes back.
            self._holder.setdefault(queue, name)

    def _grant(self, name: str, holding: frozenset[MessageQueue], now_s: float) -> frozenset[MessageQueue]:
        granted = set()
        for queue, target in self._target.items():
            if target != name:
                continue
            holder = self._holder.get(queue)
            if holder == name or (holder is None and now_s >= self._grants_from_s):
                self._holder[queue] = name
                granted.add(queue)
        return frozenset(granted)

    def _remove(self, name: str) -> None:
        if self._members.pop(name, None) is None:
            return
        for queue in [queue for queue, holder in self._holder.items() if holder == name]:
            del self._holder[queue]
        self._retarget()

    def _retarget(self) -> None:
        target: dict[MessageQueue, str] = {}
        for topic in sorted(self.topics):
            subscribers = [name for name, member in self._members.items() if topic in member.topics]
            shares = allocate_averagely(self._queues.get(topic, ()), subscribers)
            target.update({queue: member for member, queues in shares.items() for queue in queues})
        if target != self._target:
            self._target = target
            self.generation += 1
