"""Checks of the gateway, which serves clients of RocketMQ 5."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from raymq.common.names import WEBHOOK_GROUP
from raymq.tools.doctor.facts import DoctorSnapshot
from raymq.tools.doctor.findings import HERE, Check, Finding, fail, ok, warn

CERTIFICATE_DAYS_FEW: Final = 14
"""The number of days before the end of a certificate from which the doctor warns."""
WEBHOOK_WAIT_MAX_MS: Final = 10 * 60_000
"""Age in ms of an end of a task, above which the doctor warns that its web hook has not been called."""
DAY_S: Final = 86_400
RENEW: Final = "renew it: the gateway uses changed files at once, without a restart"


def port(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that the gateway's port is free on this machine, if `raymq up` starts a gateway and none runs."""
    if snapshot.gateway_port_error:
        return [
            fail(
                f"a gateway cannot listen at {snapshot.gateway_port_error}",
                "set gateway.port and gateway.http_port to free ports, or stop the program that uses it (ss -tlnp)",
                HERE,
            )
        ]
    return [ok("free, or not needed", HERE)]


def answers(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that each gateway that this machine can reach answers a client's first question."""
    asked = [one for one in snapshot.gateways if one.asked]
    found = [
        fail(
            f"{one.address}: {one.error}",
            "`raymq gateway status`, and the log of the actor in Ray's session",
            one.actor,
        )
        for one in asked
        if one.error
    ]
    return found or [ok(f"{len(asked)} of {len(snapshot.gateways)} gateways were asked, and answer")]


def certificates(snapshot: DoctorSnapshot, now_s: Callable[[], float] = time.time) -> list[Finding]:
    """Check that no gateway's certificate ends soon."""
    found, dated = [], 0
    for one in snapshot.gateways:
        if one.certificate_ends_s is None:
            continue
        dated += 1
        days = (one.certificate_ends_s - now_s()) / DAY_S
        if days < 0:
            found.append(fail("its certificate has ended", RENEW, one.actor))
        elif days < CERTIFICATE_DAYS_FEW:
            found.append(warn(f"its certificate ends in {days:.0f} days", RENEW, one.actor))
    return found or [ok(f"{dated} certificates end later than in {CERTIFICATE_DAYS_FEW} days")]


def webhooks(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that gateways can sign the calls of web hooks, and that no end of a task waits long for its call."""
    found = [
        fail(one.webhook_error, "correct the file: the gateway reads it again at the next call", one.actor)
        for one in snapshot.gateways
        if one.webhook_error
    ]
    groups = () if snapshot.cluster is None else snapshot.cluster.groups
    for group in groups:
        if group.group == WEBHOOK_GROUP and group.lag and group.lag_ms > WEBHOOK_WAIT_MAX_MS:
            seen = f"the oldest end of a task in {group.slowest_topic} waits for {group.lag_ms / 60_000:.0f} min"
            runs = "see the log of the gateways: receivers fail" if snapshot.gateways else "`raymq gateway start`"
            found.append(warn(seen, f"{runs}; gateway.webhook_hosts must name their hosts", WEBHOOK_GROUP))
    return found or [ok("no web hook waits long")]


GATEWAY_CHECKS: Final = (
    Check("gateway port", "machine", port),
    Check("gateways answer", "cluster", answers),
    Check("gateway certificates", "cluster", certificates),
    Check("web hooks", "cluster", webhooks),
)
