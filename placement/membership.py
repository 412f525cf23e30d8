"""Changes the replicas of a working broker group, one step at a time. The Controller executes the steps.

A change is ReplicaMembers with joining and leaving replicas (storage.replication.epochs). Each step has the next
version, and the Controller writes it to the journal together with the sync-state set of the step:

    add       the new replica gets a storage actor, follows the master and copies its log; it does not count
    count     the master has proposed the new replica, which has everything up to the confirm offset: it is a member of
              the sync-state set
    shrink    after every new replica counts: the leaving replica leaves the sync-state set. A master first hands over
              to a replica that stays
    remove    after the master has received the smaller set: the replica leaves the group

So a replacement adds the new replica before it removes the old replica, and the number of copies never falls below the
number at the start. A replica that answers may have the last intact copy of a damaged record. So it leaves only after
it has repaired the damage of the master's log, or has reported that it lacks the intact bytes, too. A removed replica's
actors end; its directory stays on disk, and its number is never used again.
A step that is not possible yet is retried, and `ChangeStep.waits` has the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from actors.core.replica.candidates import names
from actors.core.replica.orders import ReplicaState
from raymq.common.errors import InvalidArgumentError
from raymq.common.names import REPLICAS_OF_GROUP_MAX
from storage.replication.epochs import ReplicaMembers


@dataclass(frozen=True, slots=True)
class ChangeStep:
    """The next step of a change.

    `members` and `stores`: the group's members and sync-state set after the step; None if no step is possible now.
    `successor`: the replica to which the master must hand over before the step; None if the master stays. `waits`: why
    the step is not possible now, else "".
    """

    members: ReplicaMembers | None = None
    stores: Mapping[int, str] | None = None
    successor: int | None = None
    waits: str = ""


def begin_change(
    group: str,
    now: ReplicaMembers,
    count: int,
    *,
    replace_one: int | None = None,
    in_sync: Collection[int],
    master: int | None,
    required: int,
) -> ReplicaMembers:
    """Return the members at the start of a change to `count` replicas.

    `replace_one`: the replica that a new replica replaces. If replicas must leave, replicas that are not in sync leave
    first, the master last. `required`: the number of replicas that must stay in sync. Raises InvalidArgumentError if
    another change has not ended, or if the change is not possible.
    """
    _refuse_second_change(group, now)
    if not max(required, 1) <= count <= REPLICAS_OF_GROUP_MAX:
        raise InvalidArgumentError(
            f"broker group {group!r} can have {max(required, 1)} to {REPLICAS_OF_GROUP_MAX} replicas, not {count}"
            + (f": min_in_sync_replicas and in_sync_replicas need {required}" if count < required else "")
        )
    if replace_one is not None and replace_one not in now.replicas:
        raise InvalidArgumentError(
            f"broker group {group!r} has no replica {replace_one}: its replicas are {names(now.replicas)}"
        )
    leaving = frozenset() if replace_one is None else frozenset({replace_one})
    spare = sorted(now.replicas - leaving, key=lambda replica: (replica in in_sync, replica == master, -replica))
    leaving |= frozenset(spare[: max(len(spare) - count, 0)])
    first = now.next_number
    added = frozenset(range(first, first + count - len(now.replicas - leaving)))
    if not added and not leaving:
        return now
    replicas = now.replicas | added
    return replace(now, version=now.version + 1, replicas=replicas, joining=added, leaving=leaving, added=added)


def change_min_in_sync(
    group: str, now: ReplicaMembers, least: int, *, present: int, in_sync: Collection[int]
) -> ReplicaMembers:
    """Return the members with `least` as the minimum number of replicas in sync with which the master accepts messages.

    `present`: this minimum now. `in_sync`: the replicas in sync now. Raises InvalidArgumentError if the replicas are
    being changed, or if the group would refuse messages with a higher minimum.
    """
    _refuse_second_change(group, now)
    if least > max(present, len(in_sync)):
        raise InvalidArgumentError(
            f"broker group {group!r} would refuse messages with min_in_sync_replicas {least}: only replica "
            f"{names(in_sync)} is in sync. See `raymq broker replicas {group}`"
        )
    return now if now.min_in_sync == least else replace(now, version=now.version + 1, min_in_sync=least)


def _refuse_second_change(group: str, now: ReplicaMembers) -> None:
    if now.is_changing:
        raise InvalidArgumentError(
            f"the replicas of broker group {group!r} are already being changed ({describe(now)}): wait until this "
            f"change has ended, or cancel it with `raymq broker replicas {group} --cancel`"
        )


def cancel_change(group: str, now: ReplicaMembers) -> ReplicaMembers:
    """Return the members after the current change is cancelled: the replicas that the change has added leave again.

    Raises InvalidArgumentError if no change is going on, or if the change has already removed a replica.
    """
    if not now.is_changing:
        raise InvalidArgumentError(f"the replicas of broker group {group!r} are not being changed")
    if now.is_final:
        raise InvalidArgumentError(
            f"the change of broker group {group!r} can no longer be cancelled ({describe(now)}): a replica has already "
            "left, or the change is already cancelled. Wait until it has ended, then start another change"
        )
    return replace(
        now, version=now.version + 1, joining=frozenset(), leaving=now.added, added=frozenset(), is_final=True
    )


def next_step(
    now: ReplicaMembers,
    stores: Mapping[int, str],
    master: int,
    answering: Mapping[int, ReplicaState],
    required: int,
) -> ChangeStep:
    """Return the next step of the current change.

    `stores`: the sync-state set, each replica with the id of its directory. `master` leads. `answering`: the reports of
    the replicas that answer. `required`: the number of replicas that must stay in sync.
    """
    if not now.is_changing:
        return ChangeStep()
    counted = now.joining & stores.keys()
    if counted:
        return ChangeStep(replace(now, version=now.version + 1, joining=now.joining - counted), stores)
    if now.joining:
        return ChangeStep(waits=_describe_joining(min(now.joining), master, answering))
    leaving = min(now.leaving, key=lambda replica: (replica in stores, replica == master, -replica))
    late = now.added & now.staying - stores.keys()
    if late:
        return ChangeStep(waits=f"replica {leaving} leaves when replica {names(late)} is in sync again")
    left = {name: store_id for name, store_id in stores.items() if name != leaving}
    state, leading = answering.get(leaving), answering.get(master)
    lackers = None if leading is None else leading.hole_lackers
    if state is not None and not state.failed and lackers is not None and leaving not in lackers | {master}:
        return ChangeStep(
            waits=f"replica {leaving} leaves when it has repaired the damaged log of replica {master}, or has reported "
            "that it lacks the intact bytes, too"
        )
    if leaving in stores and len(left) < max(required, 1):
        return ChangeStep(
            waits=f"replica {leaving} leaves when {max(required, 1)} other replicas are in sync; "
            f"in sync without it: {names(left) or 'none'}"
        )
    if leaving == master:
        able = [name for name in left if name not in now.leaving and _is_whole(answering.get(name))]
        if not able:
            return ChangeStep(waits=f"replica {master} leads, and no other replica that stays can lead yet")
        waits = f"replica {master} hands over to replica {min(able)} before it leaves"
        return ChangeStep(successor=min(able), waits=waits)
    if leaving in stores:
        return ChangeStep(now, left)
    more = now.leaving - {leaving}
    after = replace(
        now,
        version=now.version + 1,
        replicas=now.replicas - {leaving},
        leaving=more,
        added=now.added if more else frozenset(),
        removed=now.removed | {leaving},
        is_final=bool(more),
    )
    return ChangeStep(after, stores)


def describe(now: ReplicaMembers) -> str:
    """Return a clause that names the joining and the leaving replicas; "" if nothing is being changed."""
    parts = [f"replica {names(now.joining)} joins"] if now.joining else []
    parts += [f"replica {names(now.leaving)} leaves"] if now.leaving else []
    return ", ".join(parts)


def _is_whole(state: ReplicaState | None) -> bool:
    return state is not None and not state.failed and state.complete and state.caught_up


def _describe_joining(replica: int, master: int, answering: Mapping[int, ReplicaState]) -> str:
    state, leading = answering.get(replica), answering.get(master)
    if state is None:
        return f"replica {replica} does not answer yet"
    if state.failed or state.refusal:
        return f"replica {replica} cannot follow: {state.failed or state.refusal}"
    lag = None if leading is None else leading.lags.get(replica)
    lacks = "" if lag is None else f"; it lacks {lag.lag_bytes:,} bytes"
    return f"replica {replica} copies the log of replica {master}{lacks}"
