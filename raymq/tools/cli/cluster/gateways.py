"""`raymq gateway`: start, stop and show the servers for clients of RocketMQ 5 outside Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raymq.tools.cli.entry import cli
from raymq.tools.cli.options import config_option
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.cli.terminal.output import Table

if TYPE_CHECKING:
    from raymq.client.cluster.launcher import ProgressCallback
    from raymq.common.protocol.status import GatewayReport


@cli.group()
def gateway() -> None:
    """Serve programs outside Ray: clients of RocketMQ 5 (Java, Go, C++, C#, Rust, Node, PHP, Python), and HTTP."""


@command(gateway)
@config_option
def start(address: str | None, progress: ProgressCallback, config: Path | None) -> CommandResult:
    """Start the gateway with the settings of raymq.yaml, and print its addresses. A second run changes nothing.

    Gateway processes with other settings are started again, and their clients reconnect. Example: raymq gateway start
    """
    from raymq.client.cluster.local_server import start_gateways

    found = start_gateways(config, address, progress)
    rows = [
        [one["actor"], one["node"], one["listens"], one["http"] or "no", _on(one["tls"]), one["pid"]] for one in found
    ]
    return CommandResult({"gateways": found}, Table(["gateway", "node", "listens at", "HTTP", "TLS", "pid"], rows))


@command(gateway)
def stop(address: str | None, progress: ProgressCallback) -> CommandResult:
    """Stop all gateway processes. Calls that run may end within 5 s. Example: raymq gateway stop"""
    from raymq.client.cluster.local_server import stop_gateways

    stopped = stop_gateways(address, progress)
    return CommandResult(
        {"stopped": stopped}, f"stopped {', '.join(stopped)}" if stopped else "no gateway runs, so nothing was stopped"
    )


@command(gateway)
def status(address: str | None) -> CommandResult:
    """Show the gateway processes: where they listen, and how many clients of each language they have.

    Exit code 1 if no gateway runs, or if one does not serve. Example: raymq gateway status
    """
    from raymq.client.cluster.local_server import status as cluster_status

    found = cluster_status(address)
    value: dict[str, Any] = {"gateways": found.report["gateways"]}
    if not found.gateways:
        return CommandResult(value, "no gateway runs: start it with `raymq gateway start`", failed=True)
    table = Table(["gateway", "node", "state", "HTTP", "TLS", "clients", "streams"], _rows(found.gateways))
    return CommandResult(value, table, failed=any(one.error for one in found.gateways))


def _rows(gateways: Sequence[GatewayReport]) -> list[list[Any]]:
    return [
        [
            *(one.actor, one.node, one.error or f"listens at {one.listens}", one.http or "no"),
            *(_on(one.tls), _clients(one), one.streams),
        ]
        for one in gateways
    ]


def _clients(report: GatewayReport) -> str:
    return ", ".join(f"{count} {language}" for language, count in report.clients.items()) or "0"


def _on(value: bool) -> str:
    return "yes" if value else "no"
