"""`raymq broker`: orders for one broker group."""

from __future__ import annotations

import click

from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.output import Group, address_option, client_of, json_option, print_value, say


@click.group(cls=Group)
def broker() -> None:
    """Give orders to a broker group."""


@broker.command("writable")
@click.argument("state", type=click.Choice(["on", "off"]))
@click.argument("broker_name", metavar="BROKER", shell_complete=completes("brokers"))
@address_option
@json_option
def broker_writable(state: str, broker_name: str, address: str | None, as_json: bool) -> None:
    """Have messages sent to a broker group, or to the others only, also after restarts; what it holds can be read.

    Messages whose sharding key means one of its queues are refused. Example: raymq broker writable off broker-b
    """
    with client_of(address) as client:
        client.admin.set_broker_writable(broker_name, state == "on")
    text = f"{broker_name} {'takes messages' if state == 'on' else 'takes no messages; producers see it within 30 s'}"
    print_value(as_json, {"broker": broker_name, "writable": state == "on"}, lambda: say(text))
