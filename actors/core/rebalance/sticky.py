"""STICKY: queues stay with their members as far as balance allows. This is raymq's own strategy.

The strategy divides all topics of a group at once, with these promises; an earlier promise has priority over a later
one:

1. Per topic, the subscribers' shares differ by one at most, as with AVG.
2. Over all topics, the members' totals are as even as possible (the least sum of squares). AVG does not: its
   first members take the larger share of every topic.
3. As many queues as possible stay with the member that has them.
4. Among equally good plans, the earlier plan stays, so that a queue that is being moved is not redirected.

By promise 1, a topic of n queues and c subscribers gives each of them n // c queues, and n mod c of them one more
queue. The only choice is which members take these *extra* queues. The choice is a flow from topics to members. It has a
convex cost for a member's total (promise 2), and a gain if an extra queue lets a member keep a queue (promise 3). A
choice is best if and only if no cycle of exchanges reduces its cost. So `_Extras` starts from a good choice and
exchanges extra queues until no such cycle exists.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from actors.core.rebalance.allocation import Shares, check_shareable
from raymq.common.message import MessageQueue

_ALL: Final = ("all",)
"""A node of the exchange graph, which stands for all topics together. The arcs at this node change a member's total
number of queues."""

_Node = tuple[str, ...]


def allocate_sticky(
    queues: Mapping[str, Iterable[MessageQueue]],
    subscribers: Mapping[str, Iterable[str]],
    present: Mapping[MessageQueue, str],
    planned: Mapping[MessageQueue, str],
) -> Shares:
    """Divide the queues of all topics among the topics' subscribers. `queues` and `subscribers` are by topic.

    `present`: for each consumed queue, the member that consumes it now. `planned`: the last result of this function.
    Raises InvalidArgumentError as `check_shareable` does, for any of the topics.
    """
    topics = {
        topic: _Topic(*check_shareable(queues[topic], subscribers.get(topic, ())), present, planned)
        for topic in sorted(queues)
    }
    extras = _Extras(topics)
    extras.improve()
    shares: Shares = {member: [] for topic in topics.values() for member in topic.members}
    for name, topic in topics.items():
        for member, share in topic.share_out(extras.chosen[name]).items():
            shares[member] += share
    return {member: sorted(share) for member, share in sorted(shares.items())}


class _Topic:
    """One topic that the strategy STICKY divides: its queues and its subscribers. For each queue, also the member that
    has it now, and the member to which the last plan assigned it."""

    def __init__(
        self,
        queues: tuple[MessageQueue, ...],
        members: tuple[str, ...],
        present: Mapping[MessageQueue, str],
        planned: Mapping[MessageQueue, str],
    ) -> None:
        self.queues, self.members = queues, members
        self.size, self.extras = divmod(len(queues), len(members))
        self._planned = {queue: planned.get(queue) for queue in queues}
        self._held: dict[str, list[MessageQueue]] = {member: [] for member in members}
        for queue in queues:
            holder = present.get(queue)
            if holder in self._held:
                self._held[holder].append(queue)
        planned_counts = Counter(self._planned.values())
        self.planned_extra = {member: planned_counts[member] > self.size for member in members}
        self.keeps_more = {member: len(held) > self.size for member, held in self._held.items()}

    def share_out(self, with_extra: set[str]) -> dict[str, list[MessageQueue]]:
        """Divide the topic's queues among the topic's subscribers. Each member gets first queues that it already has,
        then queues planned for it, then any other queues. Members in `with_extra` get one more queue than the others.
        """
        shares: dict[str, list[MessageQueue]] = {}
        for member, held in self._held.items():
            held.sort(key=lambda queue, member=member: (self._planned[queue] != member, queue))  # type: ignore[misc]
            shares[member] = held[: self._share_size(member, with_extra)]
        kept = {queue for share in shares.values() for queue in share}
        unplaced = []
        for queue in self.queues:
            if queue in kept:
                continue
            planned = self._planned[queue]
            if planned in shares and len(shares[planned]) < self._share_size(planned, with_extra):
                shares[planned].append(queue)
            else:
                unplaced.append(queue)
        for member, share in shares.items():
            missing = self._share_size(member, with_extra) - len(share)
            share.extend(unplaced[:missing])
            del unplaced[:missing]
        return shares

    def _share_size(self, member: str, with_extra: set[str]) -> int:
        return self.size + (member in with_extra)


class _Extras:
    """For each topic, the members that get one queue more than the other members (extra queues), because the queues
    cannot be divided equally. `chosen`: these members, by topic."""

    def __init__(self, topics: Mapping[str, _Topic]) -> None:
        self._topics = topics
        self._totals: Counter[str] = Counter()
        for topic in topics.values():
            self._totals.update(dict.fromkeys(topic.members, topic.size))
        # The weight of the members' total numbers of queues in the cost of a plan. It is larger than the weight of all
        # queues that members could keep, so even totals have priority over kept queues.
        self._total_weight = 1 + sum(len(topic.members) for topic in topics.values())
        self.chosen = {name: self._start(topic) for name, topic in topics.items()}

    def _start(self, topic: _Topic) -> set[str]:
        """Choose the members that get an extra queue of a topic. Members with an extra queue in the last plan come
        first. Next come members that can keep a queue by this choice, then members with the fewest queues."""
        ranked = sorted(
            topic.members,
            key=lambda name: (not topic.planned_extra[name], not topic.keeps_more[name], self._totals[name], name),
        )
        chosen = set(ranked[: topic.extras])
        self._totals.update(chosen)
        return chosen

    def improve(self) -> None:
        """Let members exchange extra queues until no exchange lowers the cost of the plan. A member has an extra queue
        of a topic if it has one queue more of the topic than other members. The cost is an integer and falls with each
        exchange, so the loop ends."""
        while cycle := _negative_cycle(self._arcs()):
            for tail, head in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
                if tail[0] == "member" and head[0] == "topic":
                    self.chosen[head[1]].remove(tail[1])
                    self._totals[tail[1]] -= 1
                elif tail[0] == "topic":
                    self.chosen[tail[1]].add(head[1])
                    self._totals[head[1]] += 1

    def _arcs(self) -> list[tuple[_Node, _Node, int]]:
        """Return the arcs of the exchange graph, each with its cost. An extra queue of a topic is one queue more than
        other members get of the topic. Members may exchange extra queues; each cycle of arcs is a possible exchange.

        There are three kinds of arcs. A member gives up an extra queue of a topic. A topic gives an extra queue to a
        member. Or the total number of a member's queues changes by one.
        """
        arcs: list[tuple[_Node, _Node, int]] = []
        for name, topic in self._topics.items():
            if not topic.extras:
                continue
            chosen = self.chosen[name]
            for member in topic.members:
                kept = int(topic.keeps_more[member])
                if member in chosen:
                    arcs.append((("member", member), ("topic", name), kept))
                else:
                    arcs.append((("topic", name), ("member", member), -kept))
        for member, total in sorted(self._totals.items()):
            arcs.append((("member", member), _ALL, self._total_weight * (2 * total + 1)))
            arcs.append((_ALL, ("member", member), -self._total_weight * (2 * total - 1)))
        return arcs


def _negative_cycle(arcs: list[tuple[_Node, _Node, int]]) -> list[_Node]:
    """Return the nodes of a cycle with a negative sum of costs; empty if no such cycle exists (Bellman-Ford)."""
    distance: dict[_Node, int] = defaultdict(int)
    before: dict[_Node, _Node] = {}
    changed = True
    while changed:
        changed = False
        for tail, head, cost in arcs:
            if distance[tail] + cost < distance[head]:
                distance[head] = distance[tail] + cost
                before[head] = tail
                changed = True
        if changed and (cycle := _cycle_of(before)):
            return cycle
    return []


def _cycle_of(before: Mapping[_Node, _Node]) -> list[_Node]:
    """Find a cycle in the links from each node to its predecessor. Returns the cycle's nodes in the direction of the
    arcs."""
    seen: set[_Node] = set()
    for start in before:
        path: dict[_Node, None] = {}
        node: _Node | None = start
        while node is not None and node not in seen:
            seen.add(node)
            path[node] = None
            node = before.get(node)
        if node is not None and node in path:
            nodes = list(path)
            return nodes[nodes.index(node) :][::-1]
    return []
