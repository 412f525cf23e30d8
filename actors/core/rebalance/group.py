"""The Rebalance actor's decisions about the queues that each member of a consumer group holds.

This module answers heartbeats, and has the rules for moving a queue. HEARTBEAT_STEPS defines the answer to each kind of
heartbeat.

The group has two maps. `target` is the member that should hold each queue, by the group's strategy
(actors.core.rebalance.target). It is computed again when members, their requests or routes change, and every
RETARGET_INTERVAL_S. `holder` is the member that consumes the queue now, according to that member's heartbeats. A queue
is granted to its target only while no other member holds it. So two members never hold one queue. The price is that a
queue waits until its old holder has released it or is considered dead (raymq.common.protocol.membership).

No state survives the process. A new instance gets the holders from the members' heartbeats. It grants no queue that
another member might hold until every member of the old instance has had time to send a heartbeat. If the caller does
not report an earlier instance, the new instance detects it by a heartbeat with a generation of the earlier instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from actors.core.rebalance.target import GroupMembership, MemberRequest, Target, disagreements, make_target
from raymq.common.message import MessageQueue
from raymq.common.protocol.membership import GroupAssignment, GroupHeartbeat, GroupRefusal, SteadyHeartbeat

RETARGET_INTERVAL_S: Final = 20.0
"""Time, in seconds, after which a heartbeat computes the targets of the group's queues again without a change."""


class HeartbeatSender(Enum):
    """Result of comparing a heartbeat's session with the session of the member of the same name. Several processes may
    use one member's name, one after another."""

    STRANGER = "the heartbeat has no session, or a session that has ended"
    INVITED = "the heartbeat has the session that was offered to its sender, for the first time"
    MEMBER = "the heartbeat has the session of the member"


class HeartbeatKind(Enum):
    """Result of comparing a heartbeat with the newest earlier heartbeat of its session: newer, equal or older (late).
    Heartbeats of members that leave the group are a kind of their own."""

    NEXT = "the heartbeat is newer than all others of its session, or the first"
    REPEATED = "the newest heartbeat of the session arrived a second time"
    LATE = "a newer heartbeat of the session has arrived before"
    LEAVING = "the member leaves the group, and no newer heartbeat has arrived before"


class HeartbeatStep(Enum):
    """The possible reactions of a consumer group to a member's heartbeat."""

    INVITE = "answer with a new session, and change nothing else"
    ACCEPT = "store the request and the held queues, free all other queues of the member, and grant queues"
    REPEAT = "as ACCEPT, but free no queue: the answer to the first of two equal heartbeats may have granted more"
    IGNORE = "change nothing, because no process still waits for the answer"
    REMOVE = "remove the member, and free its queues"


HEARTBEAT_STEPS: Final[Mapping[HeartbeatSender, Mapping[HeartbeatKind, HeartbeatStep]]] = {
    HeartbeatSender.STRANGER: {
        HeartbeatKind.NEXT: HeartbeatStep.INVITE,
        HeartbeatKind.LEAVING: HeartbeatStep.INVITE,
    },
    HeartbeatSender.INVITED: {
        HeartbeatKind.NEXT: HeartbeatStep.ACCEPT,
        HeartbeatKind.LEAVING: HeartbeatStep.REMOVE,
    },
    HeartbeatSender.MEMBER: {
        HeartbeatKind.NEXT: HeartbeatStep.ACCEPT,
        HeartbeatKind.REPEATED: HeartbeatStep.REPEAT,
        HeartbeatKind.LATE: HeartbeatStep.IGNORE,
        HeartbeatKind.LEAVING: HeartbeatStep.REMOVE,
    },
}
"""The group's reaction to a heartbeat, by the heartbeat's sender and kind. A heartbeat is repeated or late only
compared with earlier heartbeats of its session. Only a member has sent such heartbeats, so these two kinds exist only
for members."""


@dataclass(slots=True)
class _Member:
    """One member of the group. `session`: the session of the process that uses the member's name. `sequence`: the
    number of the member's newest heartbeat.

    `settled`: the group's state in the last answer to the member, if the member holds exactly the queues assigned to
    it; else None.
    """

    session: int
    request: MemberRequest
    last_seen_s: float
    sequence: int
    settled: tuple[int, int, int] | None = None


class RebalanceGroup:
    """The assignment of one consumer group's queues to its members.

    `session_timeout_s`: time without a heartbeat after which a member is dead. `grace`: True if an earlier instance of
    this object may have granted queues. Members may use the queues granted by the earlier instance until
    `old_leases_end_s`, by default one session timeout from now. `first_version`: the first generation and offsets
    version; it must be greater than any version of an earlier instance.
    """

    def __init__(
        self,
        started_s: float,
        *,
        session_timeout_s: float,
        grace: bool,
        first_version: int,
        old_leases_end_s: float | None = None,
    ) -> None:
        self._session_timeout_s = session_timeout_s
        # The time at which the last leases of an earlier Rebalance actor end. Until then, members may consume queues
        # that the earlier actor granted, and that they have not reported to this actor yet.
        self._old_leases_end_s = started_s + session_timeout_s if old_leases_end_s is None else old_leases_end_s
        # The earliest time at which the group grants queues to members.
        self._grants_from_s = self._old_leases_end_s if grace else started_s
        self._members: dict[str, _Member] = {}  # the members of the group by name, in the order of joining
        # member name → (the newest session offered to a process that uses this name, time of the offer)
        self._invited: dict[str, tuple[int, float]] = {}
        self._last_session = first_version
        self._queues: dict[str, tuple[MessageQueue, ...]] = {}  # the queues of each topic, sorted
        self._broker_rooms: dict[str, str] = {}
        self._target: Target = {}
        # time of the last heartbeat that recomputed the assignment plan (`_target`); the plan is computed again after
        # RETARGET_INTERVAL_S
        self._targeted_s = started_s
        # topic → the reason why the allocation strategy failed; the topic then keeps its last assignment plan
        self._failures: dict[str, str] = {}
        self._holder: dict[MessageQueue, str] = {}
        self._first_generation = first_version
        self.generation = first_version
        self.offsets_version = first_version

    @property
    def members(self) -> tuple[str, ...]:
        """Return the names of all members of the group, sorted."""
        return tuple(sorted(self._members))

    @property
    def topics(self) -> frozenset[str]:
        """Return all topics that members subscribe to."""
        return frozenset(topic for member in self._members.values() for topic in member.request.topics)

    def holders(self) -> dict[MessageQueue, str]:
        """Return the member that holds each queue. Queues without a holder are left out."""
        return dict(self._holder)

    def set_queues(
        self, topic: str, queues: Iterable[MessageQueue], broker_rooms: Mapping[str, str] | None = None
    ) -> None:
        """Set the queues of a topic, as its route lists them. `broker_rooms`: the machine room of each broker, by
        broker name."""
        queues, rooms = tuple(sorted(queues)), {**self._broker_rooms, **(broker_rooms or {})}
        if self._queues.get(topic) != queues or self._broker_rooms != rooms:
            self._queues[topic], self._broker_rooms = queues, rooms
            self._retarget()

    def offsets_reset(self) -> int:
        """Record that brokers have reset offsets of the group. Returns the new offsets version, which members receive
        with the next answer to their heartbeats."""
        self.offsets_version += 1
        return self.offsets_version

    def heartbeat(self, heartbeat: GroupHeartbeat, now_s: float) -> GroupAssignment | GroupRefusal:
        """Record a member's heartbeat, and return the queues that the member may hold. The member joins the group with
        its first heartbeat, and leaves it with a heartbeat that sets `leaving`.

        A heartbeat without a session, or with an ended session, changes nothing, and its answer has a new session.
        Heartbeats are safe to repeat: the second of two equal heartbeats frees no queue that was granted to the first.
        A heartbeat is rejected, and changes nothing, if its filter for a topic differs from the filter of another
        member.
        """
        self.expire(now_s)
        name = heartbeat.member
        if (refusal := self.refusal(heartbeat)) is not None:
            return refusal
        self._note_generation(heartbeat.generation)
        sender = self._sender(heartbeat)
        step = HEARTBEAT_STEPS[sender][self._kind(heartbeat, sender)]
        if step is HeartbeatStep.INVITE:
            return self._assignment(self._invite(heartbeat, now_s), frozenset())
        if step is HeartbeatStep.IGNORE:
            return self._assignment(heartbeat.session, frozenset())
        if step is HeartbeatStep.REMOVE:
            self._remove(name)
            return self._assignment(heartbeat.session, frozenset())
        changed = self._note_member(heartbeat, now_s)
        self._note_holding(name, heartbeat.holding, may_free=step is HeartbeatStep.ACCEPT)
        if changed or now_s - self._targeted_s >= RETARGET_INTERVAL_S:
            self._targeted_s = now_s
            self._retarget()
        granted = self._grant(name, now_s)
        if granted == heartbeat.holding and all(q in granted for q, target in self._target.items() if target == name):
            self._members[name].settled = self._answer_versions()
        return self._assignment(heartbeat.session, granted)

    def refusal(self, heartbeat: GroupHeartbeat) -> GroupRefusal | None:
        """Return a refusal if a heartbeat's subscription to a topic has another filter than the subscription of another
        member of the group. Return None if all filters agree."""
        if heartbeat.leaving:
            return None
        request = MemberRequest(heartbeat.topics, expressions=heartbeat.expressions)
        return self.conflict(heartbeat.member, {topic: request.expression(topic) for topic in request.topics})

    def conflict(self, name: str, expressions: Mapping[str, str]) -> GroupRefusal | None:
        """Return the first difference between the filters of the member `name` and the filters of another member.
        Return None if all filters agree. `expressions`: the filters of `name`, by topic."""
        for other, member in self._members.items():
            for topic in () if other == name else sorted(expressions.keys() & member.request.topics):
                if expressions[topic] != (expression := member.request.expression(topic)):
                    return GroupRefusal(topic, expressions[topic], other, expression)
        return None

    def note_steady(self, heartbeat: SteadyHeartbeat, now_s: float) -> bool:
        """Record a short heartbeat, which states that the member's last full heartbeat is unchanged.

        Returns False, and records nothing, if the group's answer to a full heartbeat may differ from its last answer.
        Returns False, too, if a newer heartbeat of the member has already arrived. A member that holds exactly its
        assigned queues keeps them until the group's generation grows. So these checks are enough: if they pass, a full
        heartbeat would have the same result.
        """
        self.expire(now_s)
        member = self._members.get(heartbeat.member)
        if (
            member is None
            or member.session != heartbeat.session
            or heartbeat.sequence <= member.sequence
            or heartbeat.generation != self.generation
            or member.settled != self._answer_versions()
            or now_s - self._targeted_s >= RETARGET_INTERVAL_S
        ):
            return False
        member.last_seen_s, member.sequence = now_s, heartbeat.sequence
        return True

    def topics_of(self, name: str) -> frozenset[str]:
        """Return the topics that a member subscribes to; an empty set for an unknown member."""
        member = self._members.get(name)
        return frozenset() if member is None else member.request.topics

    def _answer_versions(self) -> tuple[int, int, int]:
        """Return the values that every member gets in the answer to its heartbeat: the group's generation, offsets
        version and number of members."""
        return self.generation, self.offsets_version, len(self._members)

    def expire(self, now_s: float) -> list[str]:
        """Drop the members that have sent no heartbeat for too long, and return their names."""
        silent = [
            name for name, member in self._members.items() if now_s - member.last_seen_s > self._session_timeout_s
        ]
        for name in silent:
            self._remove(name)
        late_s = now_s - self._session_timeout_s
        self._invited = {name: invited for name, invited in self._invited.items() if invited[1] >= late_s}
        return silent

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return the group's state for `raymq group describe`, as plain data.

        `strategy`: the strategy in use. `disagreements`: requests of members that are not met. `failures`: by topic,
        the reason why the strategy failed and did not change the topic's targets. `unassigned`: queues without a
        target. For each member: the queues that it holds, the queues that it waits for, and the age of its last
        heartbeat in s.
        """
        view = self._membership()
        known = [queue for topic in view.topics() for queue in self._queues.get(topic, ())]
        return {
            "generation": self.generation,
            "offsets_version": self.offsets_version,
            "strategy": view.allocation.strategy.value,
            "disagreements": disagreements(view),
            "failures": dict(self._failures),
            "unassigned": [str(queue) for queue in known if queue not in self._target],
            "members": [self._describe_member(name, now_s) for name in self.members],
            "holders": {str(queue): member for queue, member in sorted(self._holder.items())},
        }

    def _describe_member(self, name: str, now_s: float) -> dict[str, Any]:
        member = self._members[name]
        held = {queue for queue, holder in self._holder.items() if holder == name}
        promised = {queue for queue, target in self._target.items() if target == name}
        return {
            "member": name,
            "topics": sorted(member.request.topics),
            "expressions": {topic: member.request.expression(topic) for topic in sorted(member.request.topics)},
            "room": member.request.room,
            "strategy": member.request.allocation.strategy.value,
            "queues": [str(queue) for queue in sorted(held)],
            "waits_for": [str(queue) for queue in sorted(promised - held)],
            "last_heartbeat_age_s": round(now_s - member.last_seen_s, 3),
        }

    def _assignment(self, session: int, queues: frozenset[MessageQueue]) -> GroupAssignment:
        return GroupAssignment(self.generation, queues, len(self._members), self.offsets_version, session)

    def _sender(self, heartbeat: GroupHeartbeat) -> HeartbeatSender:
        member = self._members.get(heartbeat.member)
        if member is not None and member.session == heartbeat.session:
            return HeartbeatSender.MEMBER
        session, _ = self._invited.get(heartbeat.member, (0, 0.0))
        return HeartbeatSender.INVITED if 0 < heartbeat.session == session else HeartbeatSender.STRANGER

    def _kind(self, heartbeat: GroupHeartbeat, sender: HeartbeatSender) -> HeartbeatKind:
        newest = self._members[heartbeat.member].sequence if sender is HeartbeatSender.MEMBER else None
        if newest is not None and heartbeat.sequence < newest:
            return HeartbeatKind.LATE
        if heartbeat.leaving:
            return HeartbeatKind.LEAVING
        return HeartbeatKind.REPEATED if heartbeat.sequence == newest else HeartbeatKind.NEXT

    def _invite(self, heartbeat: GroupHeartbeat, now_s: float) -> int:
        """Offer a new session to the sender of a heartbeat, and return the session.

        The session begins when the sender uses it in a heartbeat, which proves that the sender is alive.
        """
        self._last_session = max(self._last_session, heartbeat.session) + 1
        self._invited[heartbeat.member] = (self._last_session, now_s)
        return self._last_session

    def _note_generation(self, generation: int) -> None:
        """Delay new grants of queues if a heartbeat has a generation that an earlier instance of this group issued.
        Members may still use queues that the earlier instance granted."""
        if generation and not self._first_generation <= generation <= self.generation:
            self._grants_from_s = max(self._grants_from_s, self._old_leases_end_s)
        # A generation higher than this group's own was issued by an earlier instance of the group, whose clock was
        # ahead. Continue with a generation above it.
        if generation > self.generation:
            self.generation = generation + 1

    def _note_member(self, heartbeat: GroupHeartbeat, now_s: float) -> bool:
        """Store the request in a member's heartbeat: topics, filters, strategy and node. Returns True if the member is
        new, or its request has changed."""
        request = MemberRequest(heartbeat.topics, heartbeat.allocation, heartbeat.node, heartbeat.expressions)
        before = self._members.get(heartbeat.member)
        # Members are kept in the order in which they joined. A new process with the name of an existing member takes
        # over that member's position in this order.
        self._members[heartbeat.member] = _Member(heartbeat.session, request, now_s, heartbeat.sequence)
        if before is None or before.session != heartbeat.session:
            self._invited.pop(heartbeat.member, None)
        return before is None or before.request != request

    def _note_holding(self, name: str, holding: frozenset[MessageQueue], *, may_free: bool) -> None:
        if may_free:
            for queue in [queue for queue, holder in self._holder.items() if holder == name and queue not in holding]:
                del self._holder[queue]
        for queue in holding:
            # A member may report a queue that another member already holds. The queue then stays with the other member:
            # the group granted it while the reporting member was considered dead.
            self._holder.setdefault(queue, name)

    def _grant(self, name: str, now_s: float) -> frozenset[MessageQueue]:
        topics = self._members[name].request.topics
        granted = set()
        for queue, target in self._target.items():
            # Skip a queue if the member no longer subscribes to the queue's topic. `_target` may still assign such a
            # queue to the member: if the allocation strategy fails, the previous assignment plan stays in force.
            if target != name or queue.topic not in topics:
                continue
            holder = self._holder.get(queue)
            if holder == name or (holder is None and now_s >= self._grants_from_s):
                self._holder[queue] = name
                granted.add(queue)
        # If a topic has no route, the member keeps the topic's queues. Without a route the topic's queues are not
        # assigned to any member, so no other member can own them. This happens after a restart if no NameServer
        # answers.
        granted.update(
            queue
            for queue, holder in self._holder.items()
            if holder == name and queue.topic in topics and queue.topic not in self._queues
        )
        return frozenset(granted)

    def _remove(self, name: str) -> None:
        if self._members.pop(name, None) is None:
            return
        for queue in [queue for queue, holder in self._holder.items() if holder == name]:
            del self._holder[queue]
        self._retarget()

    def _membership(self) -> GroupMembership:
        requests = {name: member.request for name, member in self._members.items()}
        return GroupMembership(requests, self._queues, self._broker_rooms, self._holder, self._target)

    def _retarget(self) -> None:
        target, self._failures = make_target(self._membership())
        if target != self._target:
            self._target = target
            self.generation += 1
