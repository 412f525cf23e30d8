"""The groups of one Rebalance actor (RebalanceServer), in the slots that the actor holds. A slot is a share of all
groups.

A group is created at the first heartbeat of a member, and rebuilt from its members' heartbeats. It is dropped after it
has had no member for IDLE_GROUP_S, or when the actor loses the group's slot. Groups share only the routes of topics.
Each group has its own lock, so a large group delays no other group. An exception in one group affects only the answer
to the heartbeat that caused it.

No clock: the methods get the current time, in seconds, as an argument (`now_s`). Thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from actors.core.rebalance.group import RebalanceGroup
from actors.core.rebalance.slot_lease import VALID_S, SlotLease
from raymq.common.message import MessageQueue
from raymq.common.names import REBALANCE_SLOTS, RebalanceName
from raymq.common.protocol.membership import (
    GroupFailure,
    GroupRefusal,
    Heartbeat,
    HeartbeatAnswer,
    OtherServer,
    SteadyAnswer,
    SteadyHeartbeat,
    slot_of,
)

IDLE_GROUP_S: Final = 120.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TopicQueues:
    """A topic's queues, taken from the topic's route. `rooms`: broker name to machine room."""

    queues: tuple[MessageQueue, ...]
    rooms: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry:
    """One group of a Rebalance actor. `lock` guards `core`. `given`: the topic queues that were passed to
    `core`."""

    core: RebalanceGroup
    last_member_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    given: dict[str, TopicQueues] = field(default_factory=dict)


class RebalanceServer:
    """The groups of one Rebalance actor: number `index` of `servers` actors. `life` is the id of this process
    incarnation."""

    core_class = RebalanceGroup

    def __init__(
        self,
        index: int,
        servers: int,
        life: str,
        *,
        session_timeout_s: float,
        valid_s: float = VALID_S,
        slots: Iterable[int] = range(REBALANCE_SLOTS),
    ) -> None:
        self.name = str(RebalanceName(index))
        self._session_timeout_s = session_timeout_s
        self.leases = {
            slot: SlotLease(
                slot, self.name, life, home=slot % servers == index, lease_s=session_timeout_s, valid_s=valid_s
            )
            for slot in slots
        }
        # for each slot (a share of all groups): the epoch in which this process created the slot's groups
        self._epochs = dict.fromkeys(self.leases, 0)
        # by slot (a share of all groups): the newest version of a group that was dropped
        self._versions = dict.fromkeys(self.leases, 0)
        self._lock = threading.Lock()  # lock that guards every attribute, except the contents of the groups' entries
        self._entries: dict[str, _Entry] = {}
        # topic → its queues; None if no NameServer has answered the request for the topic's queues
        self._topics: dict[str, TopicQueues | None] = {}

    # Methods that answer heartbeats

    def heartbeat(self, group: str, heartbeat: Heartbeat, now_s: float) -> HeartbeatAnswer:
        """Answer a member's heartbeat: a full heartbeat as RebalanceGroup.heartbeat does, a short heartbeat by
        `note_steady`. Never raises an error: a failure is returned as an answer."""
        try:
            entry = self._entry(group, now_s)
            if isinstance(entry, OtherServer):
                return entry
            if isinstance(heartbeat, SteadyHeartbeat):
                return self._answer_steady(entry, heartbeat, now_s)
            with entry.lock:
                unknown = self._give_queues(entry, heartbeat.topics)
                assignment = entry.core.heartbeat(heartbeat, now_s)
                if entry.core.members:
                    entry.last_member_s = now_s
            if isinstance(assignment, GroupRefusal) or not unknown or heartbeat.leaving:
                return assignment
            return replace(assignment, incomplete=True)
        # catch every error: a programming error or an invalid heartbeat must not affect the other consumer groups
        except Exception as error:
            logger.exception("a heartbeat of group %s failed", group)
            return GroupFailure(f"{type(error).__name__}: {error}")

    def _answer_steady(self, entry: _Entry, heartbeat: SteadyHeartbeat, now_s: float) -> SteadyAnswer:
        with entry.lock:
            unknown = self._give_queues(entry, entry.core.topics_of(heartbeat.member))
            if unknown or not entry.core.note_steady(heartbeat, now_s):
                return SteadyAnswer.TELL
            entry.last_member_s = now_s
        return SteadyAnswer.SAME

    def offsets_reset(self, group: str, now_s: float) -> int | OtherServer:
        """Record that brokers have reset offsets of a group.

        Returns the group's new offsets version, or 0 if the group has no member at this server.
        """
        if (other := self.other_server(group, now_s)) is not None:
            return other
        with self._lock:
            entry = self._entries.get(group)
        if entry is None:
            return 0
        with entry.lock:
            return entry.core.offsets_reset()

    def conflict(
        self, group: str, member: str, expressions: Mapping[str, str], now_s: float
    ) -> GroupRefusal | OtherServer | None:
        """Compare a member's filters with the other members' filters; see RebalanceGroup.conflict. Returns None for an
        unknown group."""
        if (other := self.other_server(group, now_s)) is not None:
            return other
        with self._lock:
            entry = self._entries.get(group)
        if entry is None:
            return None
        with entry.lock:
            entry.core.expire(now_s)
            return entry.core.conflict(member, expressions)

    def describe_group(self, group: str, now_s: float) -> dict[str, Any] | OtherServer:
        """Describe one group; see RebalanceGroup.describe. An unknown group is described as a group without
        members."""
        if (other := self.other_server(group, now_s)) is not None:
            return other
        with self._lock:
            entry = self._entries.get(group)
        if entry is None:
            return {"group": group, "generation": 0, "members": [], "holders": {}}
        with entry.lock:
            entry.core.expire(now_s)
            return {"group": group, **entry.core.describe(now_s)}

    def groups(self) -> list[str]:
        """Return the names of this server's groups, sorted."""
        with self._lock:
            return sorted(self._entries)

    def other_server(self, group: str, now_s: float) -> OtherServer | None:
        """Return the answer that redirects a member to the Rebalance actor that holds the group's slot. Returns None if
        this Rebalance actor may answer for the group now."""
        lease = self.leases[slot_of(group)]
        return None if lease.valid(now_s) else OtherServer(lease.holder)

    def _entry(self, group: str, now_s: float) -> _Entry | OtherServer:
        with self._lock:
            if (other := self.other_server(group, now_s)) is not None:
                return other
            self._drop_old_epochs(slot_of(group))
            entry = self._entries.get(group)
            if entry is None:
                lease, slot = self.leases[slot_of(group)], slot_of(group)
                core = self.core_class(
                    now_s,
                    session_timeout_s=self._session_timeout_s,
                    grace=lease.waits_for_old_leases(now_s),
                    first_version=max(lease.claim.version, self._versions[slot] + 1),
                    old_leases_end_s=lease.grants_from_s,
                )
                entry = self._entries[group] = _Entry(core, now_s)
            return entry

    def _give_queues(self, entry: _Entry, topics: Iterable[str]) -> bool:
        """Pass the lists of queues of these topics to a group, unless the group already has the newest lists. Returns
        True if this server has not looked up a topic's queues yet."""
        unknown = False
        for topic in topics:
            known = self._topics.get(topic)
            if known is None:
                unknown = unknown or topic not in self._topics
            elif entry.given.get(topic) is not known:
                entry.given[topic] = known
                entry.core.set_queues(topic, known.queues, known.rooms)
        return unknown

    # Methods for the routes of topics

    def topics(self) -> frozenset[str]:
        """All topics to which members of the server's groups subscribe."""
        with self._lock:
            entries = list(self._entries.values())
        topics: set[str] = set()
        for entry in entries:
            with entry.lock:
                topics |= entry.core.topics
        return frozenset(topics)

    def unknown_topics(self) -> frozenset[str]:
        """Return the subscribed topics whose lists of queues were never requested from a NameServer."""
        return self.topics() - self._topics.keys()

    def set_queues(self, topic: str, queues: TopicQueues | None) -> None:
        """Set a topic's queues. Each consumer group uses the new queues from its next heartbeat on.

        If `queues` is None, the topic has no route now, and the consumer groups keep its earlier queues.
        """
        with self._lock:
            known = self._topics.setdefault(topic, queues)
            if queues is not None and queues != known:
                self._topics[topic] = queues

    def forget_topics(self, used: frozenset[str]) -> None:
        """Forget the queues of all topics that are not in `used`."""
        with self._lock:
            for topic in self._topics.keys() - used:
                del self._topics[topic]

    # Methods that drop expired members and groups, and methods for slots (shares of all groups)

    def sweep(self, now_s: float) -> None:
        """Drop members that have sent no heartbeat for too long, and groups without members. Also drop the groups of
        slots (shares of all groups) that this server has lost."""
        with self._lock:
            for slot in self.leases:
                self._drop_old_epochs(slot)
            entries = list(self._entries.items())
        for group, entry in entries:
            with entry.lock:
                entry.core.expire(now_s)
                idle = not entry.core.members and now_s - entry.last_member_s > IDLE_GROUP_S
            if idle:
                with self._lock:
                    self._drop(group)

    def releasable(self, slot: int) -> bool:
        """Return True if a slot (a share of all groups) may be released: no group of the slot has a member."""
        with self._lock:
            entries = [entry for group, entry in self._entries.items() if slot_of(group) == slot]
        return not any(entry.core.members for entry in entries)

    def _drop_old_epochs(self, slot: int) -> None:
        """Drop the groups of a slot (a share of all groups) from memory if they were created in an earlier epoch of the
        slot. Another actor may have served these groups since then.

        The caller holds the lock.
        """
        lease = self.leases[slot]
        if lease.epoch != self._epochs[slot] or not lease.held:
            for group in [group for group in self._entries if slot_of(group) == slot]:
                self._drop(group)
            self._epochs[slot] = lease.epoch

    def _drop(self, group: str) -> None:
        entry = self._entries.pop(group, None)
        if entry is not None:
            slot = slot_of(group)
            self._versions[slot] = max(self._versions[slot], entry.core.generation, entry.core.offsets_version)
