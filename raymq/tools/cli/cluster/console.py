"""`raymq console`: starts the web console, and says where it is."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

import click

from raymq.tools.cli.terminal.output import Command, address_option, json_option, print_value, say
from raymq.tools.cli.terminal.progress import steps


@click.command(cls=Command)
@click.option("--config", type=click.Path(path_type=Path), help="Settings; default: raymq.yaml here, if there is one.")
@click.option("--open", "show", is_flag=True, help="Also open it in this machine's browser.")
@click.option("--stop", is_flag=True, help="End the console instead.")
@address_option
@json_option
def console(config: Path | None, show: bool, stop: bool, address: str | None, as_json: bool) -> None:
    """Start the web console on the head node and print its address. Running it again changes nothing.

    Log in with the cluster's token, `ray get-auth-token`. Example: raymq console --open
    """
    from raymq.client.cluster.local_server import start_console, stop_console

    if stop:
        ended = stop_console(address)
        print_value(as_json, {"stopped": ended}, lambda: say("the console has ended" if ended else "no console runs"))
        return
    with steps() as progress:
        found = start_console(config, address, progress)
    print_value(as_json, found, lambda: _print_address(found))
    if show:
        webbrowser.open(found["url"])


def _print_address(found: dict[str, Any]) -> None:
    say(found["url"])
    if not found["loopback"]:
        return
    port = found["port"]
    say(f"from elsewhere: ssh -L {port}:127.0.0.1:{port} HEAD_NODE, then http://127.0.0.1:{port}/")
    say(f"            or: ray dashboard cluster.yaml --port {port} --remote-port {port}")
    say(f"            or: kubectl port-forward HEAD_POD {port}:{port}")
