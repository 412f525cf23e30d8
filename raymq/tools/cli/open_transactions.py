"""`raymq transactions`: the transactions that have no outcome yet."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from raymq.tools.cli.terminal.output import Group, address_option, client_of, json_option, print_value, table


@click.group(cls=Group)
def transactions() -> None:
    """Show the transactions that wait for their outcome."""


@transactions.command("list")
@address_option
@json_option
def transactions_list(address: str | None, as_json: bool) -> None:
    """Show how many transactions wait, by topic and producer group, and how old the oldest is, in seconds.

    Example: raymq transactions list
    """
    with client_of(address) as client:
        figures = client.admin.transactions()
    now_ms = time.time_ns() // 1_000_000
    rows = [
        {
            "broker": broker,
            "topic": row.topic,
            "group": row.producer_group,
            "waiting": row.waiting,
            "oldest_s": max(now_ms - row.oldest_born_timestamp_ms, 0) // 1000,
        }
        for broker, found in figures.items()
        for row in found.waiting
    ]
    counts = {broker: {k: v for k, v in asdict(found).items() if k != "waiting"} for broker, found in figures.items()}
    names = ["broker", "topic", "group", "waiting", "oldest_s"]
    print_value(
        as_json,
        {"transactions": rows, "since_start": counts},
        lambda: table(names, [[str(row[name]) for name in names] for row in rows]),
    )
