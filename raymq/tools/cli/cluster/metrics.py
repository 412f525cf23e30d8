"""`raymq metrics`: the Grafana board and the alert rules, where Grafana and Prometheus find them."""

from __future__ import annotations

from pathlib import Path

import click

from raymq.tools.cli.terminal.output import Group, address_option, json_option, print_value, say


@click.group(cls=Group)
def metrics() -> None:
    """Put raymq's board into Grafana, and its alert rules into Prometheus."""


@metrics.command("install")
@click.option("--output", help="Write it to this folder of the head node. Default: where Ray's Grafana provider looks.")
@address_option
@json_option
def install(output: str | None, address: str | None, as_json: bool) -> None:
    """Write the Grafana board on the head node, where Ray's own boards are. `raymq up` does it, too.

    Ray makes that folder anew at each start. Example: raymq metrics install
    """
    from raymq.client.cluster.local_server import install_board

    installed = install_board(output, address)

    def tell() -> None:
        say(f"the board is in {installed['path']} on the head node")
        if not installed["watched"]:
            say("Ray's Grafana provider does not look there: name the folder in one of yours, or import the file")

    print_value(as_json, installed, tell)


@metrics.command("export")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@json_option
def export(folder: Path, as_json: bool) -> None:
    """Write the board, the alert rules, a relabel snippet for RocketMQ's names, a PodMonitor and a PrometheusRule.

    For a Prometheus and a Grafana that are elsewhere; needs no cluster. Example: raymq metrics export monitoring
    """
    from raymq.tools.observability.export import export as write

    paths = [str(path) for path in write(folder)]

    def tell() -> None:
        for path in paths:
            say(path)

    print_value(as_json, {"files": paths}, tell)
