"""`raymq store`, `broker` and `check`: commands about single broker groups and their stores.

`raymq store` shows runtime figures and deletes old messages by hand, `raymq broker` takes write permission or gives it
back, and `raymq check` times messages to every broker group and back.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from raymq.common.message import MAX_MESSAGE_SIZE_BYTES
from raymq.common.numbers import NumberRange
from raymq.tools.cli.known_names import completes, saw_all
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Group,
    address_option,
    client_of,
    json_option,
    print_rows,
    print_value,
    quiet_option,
    say,
    table,
)
from raymq.tools.cli.terminal.progress import steps


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


@click.group(cls=Group)
def check() -> None:
    """Check that every broker group takes messages and gives them back."""


@check.command("send")
@click.option("--topic", "topic_name", help="A topic to send to. Default: raymq-check, which is made.")
@click.option("--broker", shell_complete=completes("brokers"), help="Only this broker group. Default: all.")
@click.option(
    "--count", type=NumberType(NumberRange(1, 10_000)), default=20, show_default=True, help="Messages to each."
)
@click.option(
    "--size",
    type=NumberType(NumberRange(1, MAX_MESSAGE_SIZE_BYTES)),
    default=128,
    show_default=True,
    help="Bytes of each body.",
)
@address_option
@json_option
@quiet_option
def check_send(
    topic_name: str | None, broker: str | None, count: int, size: int, address: str | None, as_json: bool
) -> None:
    """Send messages to a queue of each broker group, one after another, read each back, and show the times.

    Exit code 1 when one fails. Example: raymq check send --count 100
    """
    from raymq.client.admin.upkeep.send_check import check_queue

    with client_of(address) as client, steps() as progress, client.producer("raymq-cli") as producer:
        results = []
        for queue in client.admin.check_queues(topic_name, broker):
            progress(f"sending {count} messages to {queue}")

            def pull(queue: Any, offset: int) -> Any:  # a MessageQueue, a PullResult
                return client.admin.pull(queue, offset, max_messages=1)

            results.append(check_queue(queue, producer.send, pull, count=count, size_bytes=size))
    names = ["broker", "sent", "failed", "send_ms", "send_max_ms", "round_trip_ms", "round_trip_max_ms", "error"]
    rows = [
        [round(value, 2) if isinstance(value, float) else value for value in asdict(one).values()] for one in results
    ]
    print_rows(as_json, "checks", names, rows)
    if any(one.failed for one in results):
        raise click.exceptions.Exit(1)
