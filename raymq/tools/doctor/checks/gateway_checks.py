"""Checks of the gateway, which serves clients of RocketMQ 5."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from raymq.tools.doctor.facts import DoctorSnapshot
from raymq.tools.doctor.findings import HERE, Check, Finding, fail, ok, warn

CERTIFICATE_DAYS_FEW: Final = 14
"""The number of days before the end of a certificate from which the doctor warns."""
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


GATEWAY_CHECKS: Final = (
    Check("gateway port", "machine", port),
    Check("gateways answer", "cluster", answers),
    Check("gateway certificates", "cluster", certificates),
)
