"""Checks of the metrics: each node's metrics port, the gauges, the Grafana dashboard and the alert rules."""

from __future__ import annotations

from typing import Final

from raymq.tools.doctor.facts import DoctorSnapshot
from raymq.tools.doctor.findings import Check, Finding, ok, warn

REPORTING_PREFIXES: Final = ("broker-", "storage-")
"""Name prefixes of the actors that always report the gauge `raymq_up`."""


def ports(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that each node's metrics port answers."""
    return [
        warn(f"port {port.port}: {port.error}", "open it for Prometheus, or restart Ray on the node", port.ip)
        if port.error
        else ok(f"port {port.port} answers", port.ip)
        for port in snapshot.ports
    ]


def gauges(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that every broker and store has set its gauges in the last 20 s."""
    if not snapshot.metrics_enable:
        return [ok("switched off in the settings (`metrics`)")]
    wanted = {
        name
        for name in (snapshot.cluster.status.actors if snapshot.cluster else ())
        if name.startswith(REPORTING_PREFIXES)
    }
    seen = frozenset[str]().union(*(port.servers for port in snapshot.ports))
    silent = sorted(wanted - seen)
    if silent:
        do = "`metrics: {enable: true}` and a running node agent; a silent server is busy or has stopped"
        return [warn(f"no fresh raymq_up of {', '.join(silent)}", do)]
    return [ok(f"{len(wanted)} servers report")]


def board(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that raymq's Grafana dashboard is installed in this Ray session."""
    looked = [node for node in snapshot.nodes if node.board is not None]
    if not looked:
        return [warn("the head node did not report it", "`raymq metrics install`")]
    return [
        ok("installed for this session", node.ip)
        if node.board
        else warn("not installed for this session", "`raymq metrics install`: Ray empties the folder at start", node.ip)
        for node in looked
    ]


def rules(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that the Prometheus server given by --prometheus has raymq's alert rules."""
    prometheus = snapshot.prometheus
    assert prometheus is not None, "the runner skips this check without a Prometheus"
    if prometheus.error:
        return [
            warn(
                f"{prometheus.url}: {prometheus.error}", "start it, or name another one: --prometheus http://HOST:9090"
            )
        ]
    ours = sorted(name for name in prometheus.rules if name.lower().startswith("raymq"))
    if not ours:
        return [
            warn(
                f"{prometheus.url} has no rule of raymq",
                "run `raymq metrics export DIR`, and add alerts.yml to rule_files",
            )
        ]
    return [ok(f"{len(ours)} alert rules")]


METRICS_CHECKS: Final = (
    Check("metrics ports", "nodes", ports),
    Check("gauges", "cluster", gauges),
    Check("Grafana board", "cluster", board),
    Check("alert rules", "prometheus", rules),
)
