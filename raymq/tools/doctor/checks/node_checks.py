"""Checks that compare the nodes of a Ray cluster with each other."""

from __future__ import annotations

from collections import Counter
from typing import Final

from raymq.tools.doctor.facts import DoctorSnapshot
from raymq.tools.doctor.findings import Check, Finding, fail, ok, warn

SKEW_WARN_MS: Final = 500.0
SKEW_FAIL_MS: Final = 10_000.0


def answers(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that each node can run a Ray task."""
    return [
        fail(node.error, "see the node's raylet.log; `ray status` shows if it is overloaded", node.ip)
        if node.machine is None
        else ok(f"{node.machine.host} answers", node.ip)
        for node in snapshot.nodes
    ]


def same_versions(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that all nodes and this machine have the same versions of Python, Ray and raymq."""
    head = next((node.machine for node in snapshot.nodes if node.is_head and node.machine), None)
    head = head or snapshot.nodes[0].machine or snapshot.machine
    wanted = (head.python, head.ray, head.raymq)
    machines = [(snapshot.machine, "here"), *((node.machine, node.ip) for node in snapshot.nodes if node.machine)]
    found = []
    for machine, where in machines:
        has = (machine.python, machine.ray, machine.raymq)
        if has == wanted:
            found.append(ok(f"as on the head: raymq {machine.raymq}", where))
            continue
        differs = [
            f"{name} {mine}, on the head {theirs}"
            for name, mine, theirs in zip(("Python", "Ray", "raymq"), has, wanted, strict=True)
            if mine != theirs
        ]
        found.append(fail("; ".join(differs), "install the same version on it, and restart Ray on it", where))
    return found


def same_token(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that all nodes and this machine have the same Ray token."""
    digests = [(node.ip, node.machine.token_digest) for node in snapshot.nodes if node.machine]
    here = snapshot.machine.token_digest
    most = Counter(digest for _, digest in digests).most_common(1)[0][0] if digests else here
    found = [
        ok("the same token" if most else "no token anywhere", ip)
        if digest == most
        else fail(
            "another token than most nodes" if digest else "no token",
            "copy ~/.ray/auth_token from the head: Ray will refuse the node at its next start",
            ip,
        )
        for ip, digest in digests
    ]
    if here and most and here != most:
        found.append(
            warn("this machine's token is not the cluster's", "copy the cluster's token to ~/.ray/auth_token", "here")
        )
    return found


def clocks(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that the nodes' clocks agree with the head node's clock. Delays, retention and the times in messages depend
    on the clocks."""
    found = []
    for node in snapshot.nodes:
        if node.skew_ms is None:
            continue
        seen = f"{node.skew_ms:+,.0f} ms against the head, ± {node.skew_error_ms:,.0f} ms"
        surely_ms = max(abs(node.skew_ms) - node.skew_error_ms, 0.0)
        do = "start an NTP client on the node (chrony): delays, retention and times in messages depend on its clock"
        if surely_ms > SKEW_FAIL_MS:
            found.append(fail(seen, do, node.ip))
        elif surely_ms > SKEW_WARN_MS:
            found.append(warn(seen, do, node.ip))
        else:
            found.append(ok(seen, node.ip))
    return found


def lanes(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that each node can open a lane (direct socket connection) to every server."""
    found = []
    for node in snapshot.nodes:
        if not node.lanes:
            continue
        closed = [lane for lane in node.lanes if lane.error]
        none = sorted(lane.server for lane in closed if not lane.has_tcp)
        broken = [lane for lane in closed if lane.has_tcp]
        if broken:
            named = "; ".join(f"{lane.server} on {lane.server_node}: {lane.error}" for lane in broken[:3])
            do = "open the nodes' ports to each other (Ray uses any above 1023): messages travel over lanes only"
            found.append(fail(f"{len(broken)} of {len(node.lanes)} lanes do not open: {named}", do, node.ip))
        elif none:
            found.append(
                fail(
                    f"no lane for other nodes: {', '.join(none)}",
                    "start Ray on the node's address, not only on loopback, and name TLS files that can be read",
                    node.ip,
                )
            )
        else:
            found.append(ok(f"{len(node.lanes)} lanes open", node.ip))
    return found


NODE_CHECKS: Final = (
    Check("nodes answer", "nodes", answers),
    Check("same versions", "nodes", same_versions),
    Check("same token", "nodes", same_token),
    Check("clocks", "nodes", clocks),
    Check("lanes", "nodes", lanes),
)
