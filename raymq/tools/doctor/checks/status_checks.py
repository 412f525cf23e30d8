"""Checks of the report of `raymq status`: the servers, the stores and the replicas of a running raymq.

`raymq status`, `raymq doctor` and the console show the findings of these checks. So they name the same object, fault
and remedy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from raymq.common.protocol.status import ClusterStatus, StoreReport
from raymq.tools.doctor.findings import Finding, State, fail, ok, warn

Judge = Callable[[ClusterStatus], list[Finding]]
DELAY_LATE_MS: Final = 5000
MAKE_ROOM: Final = "make room on the disk, or see the store's log"


def servers(status: ClusterStatus) -> list[Finding]:
    """Check that every server answers. If a storage actor answers, but its store is closed, the check `stores_open`
    reports this instead."""
    closed = {store.actor for store in status.stores if store.closed}
    entries = [entry for entry in status.servers if entry.actor not in closed]
    silent = [
        fail(
            f"does not answer: {entry.error}",
            f"see the log of {entry.actor} in Ray's session; Ray restarts it",
            entry.actor,
        )
        for entry in entries
        if entry.error
    ]
    return silent or [ok(f"{len(entries)} servers answer")]


def shown(status: ClusterStatus) -> list[Finding]:
    """Check that this user may see the state of every server."""
    if status.refused:
        return [
            warn(f"not shown to this user: {', '.join(status.refused)}", "run the command as a super user (RAYMQ_USER)")
        ]
    return [ok("no server refuses this user")]


def brokers_ready(status: ClusterStatus) -> list[Finding]:
    """Check that every broker has loaded its state."""
    entries = [broker for broker in status.brokers if not broker.error]
    waiting = [
        fail(
            f"is not ready: {entry.waiting_for}",
            "see its store, from which the broker reads its state",
            entry.actor,
        )
        for entry in entries
        if not entry.ready
    ]
    return waiting or [ok(f"{len(entries)} brokers are ready")]


def stores_open(status: ClusterStatus) -> list[Finding]:
    """Check that every storage actor has opened its store."""
    closed = [
        fail(f"the store is closed: {store.error}", _disk_advice(status, store), store.actor)
        for store in status.stores
        if store.closed
    ]
    return closed or [ok(f"{len(status.stores)} stores are open")]


def _disk_advice(status: ClusterStatus, store: StoreReport) -> str:
    """Return advice about a disk that cannot be used. The advice depends on whether another replica of the disk's store
    is in sync."""
    look = (
        "look for disk errors in the kernel's log (dmesg); the store opens by itself as soon as its directory is "
        "readable and writable"
    )
    for group in status.replica_groups:
        if group.broker == store.broker_name and any(str(one) != store.replica for one in group.in_sync):
            nodes = {str(one.replica): one.node for one in group.replicas}
            drain = f"raymq drain {nodes.get(store.replica) or 'NODE'}"
            return f"{look}; to replace the disk, move its replicas away first: {drain}"
    return f"{look}; no other replica is in sync, so keep the store's directory"


def stores_on_disk(status: ClusterStatus) -> list[Finding]:
    """Check that every store directory on the nodes' disks has a running storage actor. Only nodes with at least one
    running store are searched."""
    do = "`raymq down` and `raymq up` without broker_groups start it; if it is not needed, move its directory away"
    stopped = [
        warn(f"{one.directory} holds a store that does not run", do, one.broker) for one in status.stopped_stores
    ]
    return stopped or [ok("every store on disk runs")]


def _replicas_ok(status: ClusterStatus, seen: str) -> list[Finding]:
    """Return the doctor's finding for a check of replicas that found no fault. The finding's text is `seen`, or
    "nothing is replicated" if the cluster has no replicas."""
    return [ok(seen if status.replica_groups else "nothing is replicated")]


def masters(status: ClusterStatus) -> list[Finding]:
    """Check that every broker group with several replicas has a master."""
    groups = status.replica_groups
    do = "start the nodes with its replicas; `raymq status` shows them"
    leaderless = [fail(group.reason, do, group.broker) for group in groups if group.reason]
    return leaderless or _replicas_ok(status, f"replicated broker groups with a master: {len(groups)}")


def stores_writable(status: ClusterStatus) -> list[Finding]:
    """Check that every master's store accepts messages, and that no disk has failed."""
    stores = [store for store in status.stores if not store.error]
    following = {"SLAVE", "LEARNER"}
    refusing = [
        fail(
            f"takes no messages: {store.not_writable_reason}",
            _disk_advice(status, store) if store.disk_failure else MAKE_ROOM,
            store.actor,
        )
        for store in stores
        if store.disk_failure or (not store.writable and store.role not in following)
    ]
    return refusing or [ok(f"{len(stores)} stores")]


def places(status: ClusterStatus) -> list[Finding]:
    """Check that the replicas of a broker group are on different machines."""
    found = []
    for group in status.replica_groups:
        nodes = Counter(replica.node for replica in group.replicas if replica.node)
        shared = [node for node, count in nodes.items() if count > 1]
        if shared:
            found.append(
                warn(
                    f"several replicas are on {', '.join(shared)}",
                    "add nodes and set `spread`: now one broken machine takes all these replicas",
                    group.broker,
                )
            )
    return found or _replicas_ok(status, "all replicas of a group are on different machines")


def undamaged(status: ClusterStatus) -> list[Finding]:
    """Check that no commit log has damaged records, and that no store found a damaged file when it opened or when it
    verified its files."""
    do = (
        "check the disk; raymq replaces the damaged bytes by the intact bytes of another replica; until then each "
        "reader gets an error for the damaged message, and continues with the next message"
    )
    found = []
    do_replace = (
        "check the disk; with several replicas, replace it (`raymq drain`): the new replica is filled from the master"
    )
    do_file = "check the disk, which has changed bytes of a file; the store has corrected or rebuilt the file"
    for store in status.stores:
        for hole in store.holes:
            seen = f"{hole.size} damaged bytes at {hole.offset} of its log: {hole.reason}"
            found.append(fail(seen, do, store.actor))
        for text in store.damaged_files:
            found.append(warn(text, do_file, store.actor))
        for text in store.scrub.unrepaired:
            found.append(fail(text, do_replace, store.actor))
    return found or [ok("no damage was found")]


def nothing_lost(status: ClusterStatus) -> list[Finding]:
    """Check that no elected master lacks acknowledged messages, and that no recovery has cut off the end of a commit
    log."""
    do_elected = "the group has lost messages: see docs/cluster.md, 'When a replica has lost messages'"
    found = [fail(f"elected although {one.loss}", do_elected, one.broker) for one in status.replica_groups if one.loss]
    for store in status.stores:
        if store.cut_bytes:
            seen = f"{store.cut_bytes:,} bytes were cut off the end of its log when it was opened"
            do = "usual after a crash: nobody had an acknowledgement. Else check the disk; its lost+cut/ has the bytes"
            found.append(warn(seen, do, store.actor))
    return found or [ok("no message was lost")]


def followers(status: ClusterStatus) -> list[Finding]:
    """Check that no replica refuses to follow its master."""
    do = (
        "only this replica has these messages: see docs/cluster.md, 'Messages that only one replica has', to keep or "
        "delete them"
    )
    refusing = [fail(store.refusal, do, store.actor) for store in status.stores if store.refusal]
    return refusing or _replicas_ok(status, "no replica refuses to follow")


def copies(status: ClusterStatus) -> list[Finding]:
    """Check that each message is stored on more than one disk."""
    replicated = {group.broker for group in status.replica_groups if len(group.replicas) > 1}
    brokers = {broker.actor for broker in status.brokers}
    single = sorted(brokers - replicated)
    if single:
        return [
            warn(
                f"one copy only: {', '.join(single)}",
                "`replication: {replicas: 3, min_in_sync_replicas: 2}` on three machines: a lost disk loses messages",
            )
        ]
    return [ok(f"{len(replicated)} broker groups have several copies")]


def spare_replicas(status: ClusterStatus) -> list[Finding]:
    """Check that each broker group still accepts messages if it loses one replica."""
    found = []
    for group in status.replica_groups:
        able = len(group.replicas) - len(group.learners)
        if able > 1 and group.min_in_sync_replicas >= able:
            seen = f"min_in_sync_replicas is {able}, the number of replicas"
            found.append(warn(seen, "reduce it by one: now one lost replica stops all sends", group.broker))
    return found or _replicas_ok(status, "the loss of one replica stops no broker group")


def in_sync(status: ClusterStatus) -> list[Finding]:
    """Check that every replica is in sync with its master."""
    found = []
    for group in status.replica_groups:
        able = [one.replica for one in group.replicas if one.replica not in group.learners]
        behind = sorted(set(able) - set(group.in_sync))
        if not behind:
            continue
        seen = f"{len(group.in_sync)} of {len(able)} in sync; behind: {', '.join(map(str, behind))}"
        do = "a running replica catches up by itself; the replicas of a lost node are replaced after `replace_after_s`"
        is_short = len(group.in_sync) < group.min_in_sync_replicas
        found.append((fail if is_short else warn)(seen, do, group.broker))
    return found or _replicas_ok(status, "all replicas are in sync")


def delayed(status: ClusterStatus) -> list[Finding]:
    """Check that delayed messages are delivered in time."""
    found = []
    for store in status.stores:
        schedule = store.schedule
        if schedule and schedule.late_ms > DELAY_LATE_MS:
            seen = f"delivered {schedule.late_ms / 1000:,.0f} s late, {sum(schedule.pending.values()):,} wait"
            found.append(
                warn(seen, "the disk or the machine is too slow: see its load and the time of a flush", store.actor)
            )
    return found or [ok("delayed messages are delivered in time")]


def deleted_unread(status: ClusterStatus) -> list[Finding]:
    """Check that no store with a full disk has deleted messages that a consumer group had not read."""
    found = [
        fail(
            f"{entry.messages:,} messages of {entry.topic} were deleted unread",
            "use a larger disk, or set `clean_file_forcibly_enable: false`",
            entry.group,
        )
        for broker in status.brokers
        for entry in broker.deleted_unread
    ]
    return found or [ok("nothing was deleted before its time")]


def verified(status: ClusterStatus) -> list[Finding]:
    """Check that every store was verified completely within one and a half periods."""
    do = "raise `scrub_rate_max_bytes`, or run `raymq store verify --now`: unread damage is found too late"
    late = [
        warn(f"its files were last verified {store.scrub.age_ms / 86_400_000:.1f} days ago", do, store.actor)
        for store in status.stores
        if store.scrub.overdue
    ]
    return late or [ok(f"{len(status.stores)} stores are verified in time")]


PROBLEM_CHECKS: Final[Mapping[str, Judge]] = {
    "servers answer": servers,
    "stores open": stores_open,
    "brokers ready": brokers_ready,
    "masters": masters,
    "stores take messages": stores_writable,
    "stores on disk": stores_on_disk,
    "stores undamaged": undamaged,
    "nothing lost": nothing_lost,
    "replicas follow": followers,
    "in sync": in_sync,
}
"""The checks for faults and damage in the report of `raymq status`, by name."""
ADVICE_CHECKS: Final[Mapping[str, Judge]] = {
    "servers shown": shown,
    "replicas apart": places,
    "copies": copies,
    "a replica to spare": spare_replicas,
    "delayed messages": delayed,
    "deleted unread": deleted_unread,
    "stores verified": verified,
}
"""The checks that give advice about the cluster's settings and load, by name."""


def problems_of(status: ClusterStatus) -> list[Finding]:
    """Run the checks for faults and damage on the status of a cluster. Returns the findings that are not OK, failures
    first; empty if all checks passed."""
    found = [
        replace(one, check=name)
        for name, judge in PROBLEM_CHECKS.items()
        for one in judge(status)
        if one.state is not State.OK
    ]
    return sorted(found, key=lambda one: one.state is not State.FAIL)
