"""`raymq group connections` and `raymq producers`: who is connected, by the clients' heartbeats."""

from __future__ import annotations

import time

import click

from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    client_of,
    duration,
    iso,
    json_option,
    print_value,
    table,
)


@click.command("connections", cls=Command)
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@address_option
@json_option
def group_connections(name: str, address: str | None, as_json: bool) -> None:
    """Show a group's live members: client, node, version, subscriptions, and since when.

    Example: raymq group connections billing
    """
    with client_of(address) as client:
        found = client.admin.consumer_connections(name)
    rows = [
        {
            "client": one.client_id,
            "member": one.consumer.member,
            "host": one.host,
            "node": one.node,
            "pid": one.pid,
            "language": one.language,
            "version": one.version,
            "type": one.consumer.consume_type,
            "model": one.consumer.message_model.value,
            "consume_from": one.consumer.consume_from.name,
            "subscriptions": dict(one.consumer.subscriptions),
            "since": iso(one.consumer.since_ms) if one.consumer.since_ms else None,
            "silent_s": round(one.silent_s, 1),
        }
        for one in found
    ]

    def show() -> None:
        now_ms = time.time_ns() // 1_000_000
        names = ["client", "member", "node", "raymq", "type", "model", "subscriptions", "for", "silent_s"]
        text = [
            [
                *(row["client"], row["member"], str(row["node"])[:8], f"{row['language']} {row['version']}"),
                *(row["type"], row["model"]),
                "; ".join(f"{topic}: {what}" for topic, what in sorted(one.consumer.subscriptions.items())),
                duration(max(0, now_ms - one.consumer.since_ms)) if one.consumer.since_ms else "",
                row["silent_s"],
            ]
            for one, row in zip(found, rows, strict=True)
        ]
        table(names, text)

    print_value(as_json, {"group": name, "connections": rows}, show)


@click.command("producers", cls=Command)
@click.argument("name", metavar="[GROUP]", required=False)
@address_option
@json_option
def producers(name: str | None, address: str | None, as_json: bool) -> None:
    """Show the live producers of a producer group, or of all: client, node, version.

    Example: raymq producers shop
    """
    with client_of(address) as client:
        found = client.admin.producer_connections(name)
    names = ["group", "client", "host", "node", "pid", "language", "version", "silent_s"]
    rows = [
        [one.group, one.client_id, one.host, one.node, one.pid, one.language, one.version, round(one.silent_s, 1)]
        for one in sorted(found, key=lambda one: (one.group, one.client_id))
    ]

    def show() -> None:
        table(names, [[*row[:3], str(row[3])[:8], *row[4:]] for row in rows])

    print_value(as_json, {"producers": [dict(zip(names, row, strict=True)) for row in rows]}, show)
