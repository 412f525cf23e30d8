"""`raymq replay`: messages of a topic, sent again to a topic or to one group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

import click

from raymq.common.numbers import POSITIVE
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType, RateType
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    client_of,
    json_option,
    print_value,
    quiet_option,
    say,
)
from raymq.tools.cli.terminal.progress import counting


@click.command(cls=Command)
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option("--to-topic", metavar="TOPIC", shell_complete=completes("topics"), help="Where to: another topic.")
@click.option(
    "--to-group",
    metavar="GROUP",
    shell_complete=completes("groups"),
    help="Or the one group that gets the messages again.",
)
@click.option("--key", help="The messages with this key.")
@click.option("--id", "ids", multiple=True, help="The message with this id; may be given several times.")
@click.option("--from", "begin", metavar="TIME", help="Messages stored from then on: ISO 8601, or -2h ago.")
@click.option("--to", "end", metavar="TIME", help="Messages stored before then.")
@click.option("--name", default="", help="Another name makes another replay of the same messages.")
@click.option("--rate", type=RateType(), help="At most so many per second.")
@click.option(
    "--max", "limit", type=NumberType(POSITIVE), default=100_000, show_default=True, help="At most so many now."
)
@click.option("--dry-run", is_flag=True, help="Only count.")
@address_option
@json_option
@quiet_option
def replay(
    topic_name: str,
    to_topic: str | None,
    to_group: str | None,
    key: str | None,
    ids: Sequence[str],
    begin: str | None,
    end: str | None,
    name: str,
    rate: float | None,
    limit: int,
    dry_run: bool,
    address: str | None,
    as_json: bool,
) -> None:
    """Send copies of messages of TOPIC again, to another topic or to one group only.

    Run again with the same choice, it goes on and sends nothing twice. `raymq job replay` sends Parquet files, such as
    an archive, to a topic; `raymq dlq replay` brings back what a group could not consume.

    Example: raymq replay orders --from -2h --to -1h --to-group billing
    """
    from raymq.common.delay import parse_time

    now_ms = time.time_ns() // 1_000_000
    with client_of(address) as client, counting("replaying", talks=False) as counter:
        done = client.admin.replay(
            topic_name,
            key=key,
            ids=ids,
            begin_ms=None if begin is None else parse_time(begin, now_ms),
            end_ms=None if end is None else parse_time(end, now_ms),
            to_topic=to_topic,
            to_group=to_group,
            name=name,
            max_messages=limit,
            rate=rate,
            dry_run=dry_run,
            progress=counter.advance,
        )
    more = "" if done.complete else "; there are more: run it again"
    unreadable = f", {done.unreadable} cannot be read" if done.unreadable else ""
    text = f"{done.chosen} chosen, {done.sent} sent to {done.target}, {done.sent_before} sent before{unreadable}{more}"
    print_value(as_json, {**asdict(done), "dry_run": dry_run}, lambda: say(text))
