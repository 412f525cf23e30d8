"""`raymq store`: the runtime figures of stores, and deleting old messages by hand."""

from __future__ import annotations

import click

from raymq.tools.cli.known_names import completes, saw_all
from raymq.tools.cli.terminal.output import (
    Group,
    address_option,
    client_of,
    json_option,
    print_rows,
    print_value,
    say,
    table,
)
from raymq.tools.cli.terminal.progress import steps


@click.group(cls=Group)
def store() -> None:
    """Show a store's figures, and have it delete old messages now."""


@store.command("stats")
@click.argument("broker_name", metavar="BROKER", shell_complete=completes("brokers"))
@address_option
@json_option
def store_stats(broker_name: str, address: str | None, as_json: bool) -> None:
    """Show RocketMQ's runtime figures of a broker group's store. Example: raymq store stats broker-a"""
    with client_of(address) as client:
        statistics = client.admin.store_statistics(broker_name)
    value = {"runtime": statistics.runtime, "put_latency_buckets": list(statistics.put_latency_buckets)}
    print_value(as_json, value, lambda: table(["figure", "value"], [list(row) for row in statistics.runtime.items()]))


@store.command("list")
@address_option
@json_option
def store_list(address: str | None, as_json: bool) -> None:
    """List the broker groups and their stores. Example: raymq store list"""
    with client_of(address) as client:
        brokers = client.admin.brokers()
    saw_all("brokers", brokers)
    rows = [[name, storage] for name, data in brokers.items() for _, storage in sorted(data.storages.items())]
    print_rows(as_json, "stores", ["broker", "store"], rows)


@store.command("clean")
@click.argument("broker_name", metavar="BROKER", shell_complete=completes("brokers"))
@address_option
def store_clean(broker_name: str, address: str | None) -> None:
    """Delete messages that are older than file_reserved_time_hours now, whatever the hour.

    Example: raymq store clean broker-a
    """
    with client_of(address) as client:
        client.admin.clean_store(broker_name)
    say(f"{broker_name} deletes what is older than its settings keep; see `raymq status`")


@store.command("close")
@address_option
@json_option
def store_close(address: str | None, as_json: bool) -> None:
    """Close the stores on this machine, before it is shut down: they open without recovery.

    They answer nothing until Ray starts their actors again, on this machine's return. Example: raymq store close
    """
    from raymq.client.cluster.local_server import close_stores

    with steps() as progress:
        closed = close_stores(address, progress)
    print_value(
        as_json, {"closed": closed}, lambda: say(f"closed: {', '.join(closed) or 'nothing is on this machine'}")
    )
