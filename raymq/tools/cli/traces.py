"""`raymq trace`: the life of one message."""

from __future__ import annotations

from dataclasses import asdict

import click

from raymq.common.names import TRACE_TOPIC
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    client_of,
    iso,
    json_option,
    print_value,
    say,
    table,
)
from raymq.tools.cli.terminal.progress import steps


@click.command(cls=Command)
@click.argument("message_id")
@click.option(
    "--topic",
    "topic_name",
    metavar="TOPIC",
    shell_complete=completes("topics"),
    help="The message's topic, if it was not traced.",
)
@click.option("--trace-topic", default=TRACE_TOPIC, show_default=True, help="The topic of the records.")
@address_option
@json_option
def trace(message_id: str, topic_name: str | None, trace_topic: str, address: str | None, as_json: bool) -> None:
    """Show the life of a message: sent and stored where, delivered to whom, tried how often, dead or done.

    Clients that connect with trace=True write the records. With --topic also a message without records is found, and
    by its offset message id, too.

    Example: raymq trace 0A0000011A2B18B4AAC23B9ACA000005
    """
    with client_of(address) as client, steps() as progress:
        progress(f"looking in {trace_topic}")
        found = client.admin.trace(message_id, topic=topic_name, trace_topic=trace_topic)
    events = found.events()
    value = {
        "message_id": found.message_id,
        "topic": found.topic,
        "events": [asdict(event) for event in events],
        "groups": [asdict(track) for track in found.tracks],
    }

    def show() -> None:
        say(f"message {found.message_id} of topic {found.topic}")
        table(["time", "event", "group", "detail"], [[iso(e.time_ms), e.event, e.who, e.detail] for e in events])
        if found.tracks:
            names = ["group", "state", "retries", "detail"]
            table(names, [[one.group, one.state, one.retries, one.detail] for one in found.tracks])

    print_value(as_json, value, show)
