"""`raymq check`: messages to every broker group and back, timed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from raymq.common.message import MAX_MESSAGE_SIZE_BYTES
from raymq.common.numbers import NumberRange
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import Group, address_option, client_of, json_option, print_rows, quiet_option
from raymq.tools.cli.terminal.progress import steps


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
