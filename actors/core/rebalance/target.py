"""Computes the member that should hold each queue of a group, by applying a strategy to the whole group.

This module chooses a group's strategy, and handles a strategy that fails.

All members should request the same strategy. If they do not, the strategy of the member that joined first applies, and
the group reports the difference (`disagreements`). If a strategy rejects its input, for example because a broker has no
machine room, the topic's plan stays unchanged (spec/messaging.md §5.2). STICKY divides all topics at once, so if it
fails, all plans stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from actors.core.rebalance.allocation import (
    Shares,
    allocate_averagely,
    allocate_by_circle,
    allocate_by_config,
    allocate_by_consistent_hash,
    allocate_by_machine_room,
    allocate_nearby,
)
from actors.core.rebalance.sticky import allocate_sticky
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.common.protocol.membership import ALL_MESSAGES, AllocateStrategy, Allocation

Target = dict[MessageQueue, str]


@dataclass(frozen=True, slots=True)
class MemberRequest:
    """The request of one group member: its topics, message filters, strategy, and machine room ("" if the member named
    no room)."""

    topics: frozenset[str]
    allocation: Allocation = field(default_factory=Allocation)
    room: str = ""
    expressions: Mapping[str, str] = field(default_factory=dict)
    """The filter expression by topic, for topics from which the member wants only some messages."""

    def expression(self, topic: str) -> str:
        """Return the filter expression of the member's subscription to a topic."""
        return self.expressions.get(topic, ALL_MESSAGES)


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """The input of a strategy: the members of a group, their requests, and the queues.

    `requests`: by member, in the order of joining. `queues`: by topic, for the topics whose route is known.
    `broker_rooms`: broker name to machine room. `holders`: queue to the member that consumes it now. `target`: the last
    plan (queue to member).
    """

    requests: Mapping[str, MemberRequest]
    queues: Mapping[str, tuple[MessageQueue, ...]]
    broker_rooms: Mapping[str, str]
    holders: Mapping[MessageQueue, str]
    target: Mapping[MessageQueue, str]

    @property
    def allocation(self) -> Allocation:
        """The strategy of the group: the one requested by the member that joined first."""
        return next(iter(self.requests.values())).allocation if self.requests else Allocation()

    def subscribers(self, topic: str) -> list[str]:
        """Return the members that subscribe to a topic, sorted."""
        return sorted(member for member, request in self.requests.items() if topic in request.topics)

    def topics(self) -> list[str]:
        """Return the topics to which at least one member of the group subscribes, sorted."""
        return sorted({topic for request in self.requests.values() for topic in request.topics})


def make_target(view: GroupMembership) -> tuple[Target, dict[str, str]]:
    """Compute the member that should hold each queue. Also returns, by topic, the reason why the strategy failed and
    the topic's plan stayed unchanged.

    The second result is empty if no strategy failed. A topic without a known route also keeps its plan, but does not
    count as a failure.
    """
    target: Target = {}
    failures: dict[str, str] = {}
    for topics, share in _steps(view):
        try:
            target.update({queue: member for member, queues in share().items() for queue in queues})
        except InvalidArgumentError as error:
            failures.update(dict.fromkeys(topics, str(error)))
            target.update(_kept(view, topics))
    target.update(_kept(view, [topic for topic in view.topics() if topic not in view.queues]))
    return target, failures


@dataclass(frozen=True, slots=True)
class _ShareTopic:
    """Callable that divides the queues of one topic, for a strategy that takes one topic at a time."""

    view: GroupMembership
    topic: str

    def __call__(self) -> Shares:
        view, allocation = self.view, self.view.allocation
        queues, members = view.queues[self.topic], view.subscribers(self.topic)
        match allocation.strategy:
            case AllocateStrategy.AVG_BY_CIRCLE:
                return allocate_by_circle(queues, members)
            case AllocateStrategy.CONFIG:
                requested = {member: view.requests[member].allocation.queues for member in members}
                return allocate_by_config(queues, members, requested, {**view.target, **view.holders})
            case AllocateStrategy.MACHINE_ROOM:
                return allocate_by_machine_room(queues, members, allocation.machine_rooms)
            case AllocateStrategy.MACHINE_ROOM_NEARBY:
                rooms = {member: view.requests[member].room for member in members}
                return allocate_nearby(queues, members, view.broker_rooms, rooms)
            case AllocateStrategy.CONSISTENT_HASH:
                return allocate_by_consistent_hash(queues, members)
            case _:
                return allocate_averagely(queues, members)


@dataclass(frozen=True, slots=True)
class _ShareAll:
    """Callable that divides the queues of all topics at once, for the strategy STICKY."""

    view: GroupMembership
    topics: list[str]

    def __call__(self) -> Shares:
        view = self.view
        queues = {topic: view.queues[topic] for topic in self.topics}
        subscribers = {topic: view.subscribers(topic) for topic in self.topics}
        return allocate_sticky(queues, subscribers, view.holders, view.target)


def _steps(view: GroupMembership) -> Iterator[tuple[list[str], _ShareTopic | _ShareAll]]:
    """Yield lists of topics, each with the callable that divides the queues of these topics among the group's members.
    Topics without queues are left out."""
    topics = [topic for topic in view.topics() if view.queues.get(topic)]
    if view.allocation.strategy is AllocateStrategy.STICKY:
        yield topics, _ShareAll(view, topics)
    else:
        yield from (([topic], _ShareTopic(view, topic)) for topic in topics)


def _kept(view: GroupMembership, topics: list[str]) -> Target:
    return {queue: member for queue, member in view.target.items() if queue.topic in topics}


def disagreements(view: GroupMembership) -> list[str]:
    """Describe, in one sentence for each, the requests of group members that the group does not fulfil, such as the
    request for another strategy."""
    said: list[str] = []
    if not view.requests:
        return said
    first, allocation = next(iter(view.requests)), view.allocation
    for member, request in sorted(view.requests.items()):
        other = request.allocation
        if other.strategy is not allocation.strategy:
            said.append(
                f"member {member} requests {other.strategy.value}; the group uses {allocation.strategy.value}, "
                f"because member {first} joined first"
            )
        elif other.machine_rooms != allocation.machine_rooms:
            said.append(
                f"member {member} requests machine rooms {sorted(other.machine_rooms)}; the group uses "
                f"{sorted(allocation.machine_rooms)}, because member {first} joined first"
            )
    if allocation.strategy is AllocateStrategy.CONFIG:
        said += _config_disagreements(view)
    return said


def _config_disagreements(view: GroupMembership) -> list[str]:
    askers: dict[MessageQueue, list[str]] = {}
    for member, request in sorted(view.requests.items()):
        for queue in request.allocation.queues:
            askers.setdefault(queue, []).append(member)
    said = []
    for queue, members in sorted(askers.items()):
        if len(members) > 1:
            said.append(
                f"queue {queue} is configured for several members ({', '.join(members)}); the queue goes to "
                f"{view.target.get(queue, 'no member')}"
            )
        elif view.target.get(queue) != members[0]:
            said.append(f"queue {queue} is configured for member {members[0]}, which does not subscribe to its topic")
    return said
