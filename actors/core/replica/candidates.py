"""Chooses a broker group's next master from the state reports of its replicas.

This module decides which replica may become the master, and how long the Controller waits for other replicas.
placement.election decides when the group needs a new master.

The sync-state set names the replicas that had every acknowledged message. A disk can lose messages afterwards: a
damaged record at the log's end is cut off like a torn record, and a damaged record in the middle leaves a hole (a
damaged range that is kept). So a member of the sync-state set is

    short       if its log ends before the highest confirm offset that any answering member remembers
    damaged     if its log is not short, but has holes
    proven      if it is neither, and its process had everything confirmed: a running process loses nothing
    complete    otherwise: its log may have lost what was confirmed after the offset on its disk was written

The choice, in this order:

    1. the best proven member, at once
    2. if a member is complete: the best member that is not short, after each member has answered or been silent for
       the grace period
    3. the best of all replicas, after all members have answered and none is complete. This choice may lose messages,
       and reports the lost offsets

The "best" replica has the longest log, by epoch first, then by offset; then the fewest damaged bytes; then the higher
priority. Length counts before damage, because a master cuts every longer log, but repairs its holes from the other
replicas. A complete log that is shorter than a damaged log may have lost acknowledged messages at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from actors.core.replica.orders import ReplicaState


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica to elect as master, or None if no replica may be elected now. `reason`: why no replica is elected.

    `loss`: the acknowledged messages that the elected replica lacks. `reason` and `loss` are "" if there is nothing to
    report.
    """

    elected: ReplicaState | None
    reason: str = ""
    loss: str = ""


@dataclass(frozen=True, slots=True)
class Electorate:
    """The replicas of a group at the time when its master is chosen.

    `stores`: the members of the sync-state set, each with the id of its directory. `accounts`: the reports of the
    replicas that answer. `fresh`: the replicas that were queried after a master was needed; an older report may come
    from a process that has ended since the report. `able`: the replicas that are allowed to become the master.
    `silent`: the replicas that have not answered during the whole grace period. The election no longer waits for them.
    `unclean`: True if a master may be chosen although a member does not answer, so that messages may be lost.
    """

    replicas: frozenset[int]
    able: frozenset[int]
    stores: Mapping[int, str]
    accounts: Mapping[int, ReplicaState]
    fresh: frozenset[int]
    priorities: Mapping[int, int]
    silent: frozenset[int]
    unclean: bool

    def choose(self) -> Choice:
        """Return the replica to elect, or the reason why no replica may be elected now."""
        able = [state for replica, state in self.accounts.items() if replica in self.able]
        members = [state for state in able if self.stores.get(state.replica) == state.store_id]
        proven = [state for state in members if state.complete and state.caught_up]
        if proven:
            return Choice(self._best(proven))
        if not able or not (members or self.unclean):
            return Choice(None, self._nobody_answers())
        absent = self.stores.keys() - self.fresh
        if absent - self.silent:
            return Choice(None, _waiting(absent, members))
        able = [state for state in able if state.replica in self.fresh]
        members = [state for state in members if state.replica in self.fresh]
        # Messages before a confirm offset were acknowledged. So the highest confirm offset that any member has stored
        # applies to all members.
        floor = max((state.confirm_floor for state in members), default=0)
        members = [_with_floor(state, floor) for state in members]
        if any(state.complete for state in members):
            # A shorter log without damage may have lost its end without a trace. So a longer log leads, although it is
            # damaged. Its master cuts no other member, and the other members' intact bytes repair the damage.
            reaching = [state for state in members if state.reaches_floor]
            return Choice(self.accounts[self._best(reaching).replica])
        unknown = self.stores.keys() - {state.replica for state in members}
        if unknown and not self.unclean:
            return Choice(None, _undecided(members, unknown))
        others = self.replicas - self.fresh
        if others - self.silent:
            return Choice(None, _waiting(others, members))
        if not able:
            return Choice(None, self._nobody_answers())
        best = self._best(able)
        return Choice(best, loss=describe_lack(_with_floor(best, floor)))

    def _best(self, states: Iterable[ReplicaState]) -> ReplicaState:
        return min(states, key=self._order)

    def _order(self, state: ReplicaState) -> tuple[int, int, int, int, int]:
        epoch, end_offset = state.rank
        return -epoch, -end_offset, state.hole_bytes, self.priorities.get(state.replica, 2**31 - 1), state.replica

    def _nobody_answers(self) -> str:
        return (
            f"no replica that has every acknowledged message answers (replica {names(self.stores)}); the "
            f"answering replicas are: {names(self.accounts) or 'none'}. Bring back replica {names(self.stores)}, "
            "or allow losing messages with enable_elect_unclean_master"
        )


def _with_floor(state: ReplicaState, floor: int) -> ReplicaState:
    """Return a replica's report with a confirm offset of at least `floor`. A lower confirm offset is raised to `floor`,
    because everything before `floor` was confirmed."""
    return replace(state, confirm_floor=max(state.confirm_floor, floor))


def against_fixed_master(state: ReplicaState, absent: frozenset[int], *, graced: bool) -> str:
    """Return the reason why a group's fixed master must not lead while other replicas are `absent`; empty if it may
    lead."""
    if absent and not state.caught_up and not graced:
        return _waiting(absent, [state])
    absent -= {state.replica}
    return _undecided([state], absent) if absent and not state.complete else ""


def describe_lack(state: ReplicaState) -> str:
    """Return a sentence about the acknowledged messages that a replica is known to lack. Empty if the replica is not
    known to lack any."""
    if state.end_offset < state.confirm_floor:
        return (
            f"replica {state.replica} lacks acknowledged messages: its log ends at physical offset "
            f"{state.end_offset}, but all messages before {state.confirm_floor} were confirmed"
        )
    if state.hole_bytes:
        return f"replica {state.replica} has {state.hole_bytes} damaged bytes in its log"
    return ""


def names(replicas: Iterable[int]) -> str:
    """Format replicas as text for a sentence: their numbers in ascending order, separated by commas."""
    return ", ".join(str(replica) for replica in sorted(replicas))


def _waiting(absent: Collection[int], members: Iterable[ReplicaState]) -> str:
    answering = [state.replica for state in members]
    return (
        f"replica {names(absent)} does not answer yet and may have messages that {_or_nobody(answering)} lacks: "
        "the election waits for a few seconds"
    )


def _or_nobody(replicas: Collection[int]) -> str:
    return f"replica {names(replicas)}" if replicas else "another replica"


def _undecided(members: Iterable[ReplicaState], unknown: Collection[int]) -> str:
    lacks = "".join(f"{lack}; " for lack in map(describe_lack, members) if lack)
    return (
        f"{lacks}replica {names(unknown)} may have all messages, but does not answer with its directory: no "
        "master is elected until it answers. Bring this replica back, or allow losing messages with "
        "enable_elect_unclean_master"
    )
