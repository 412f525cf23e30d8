"""`raymq receive`: messages received for a time and acknowledged one by one, as a simple consumer does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from raymq.common.numbers import TIME_S
from raymq.common.protocol.pop import INVISIBLE, RECEIVE_MESSAGES
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    client_of,
    json_option,
    message_dict,
    print_rows,
    print_value,
    quiet_option,
    say,
)
from raymq.tools.cli.terminal.progress import steps


@click.command(cls=Command)
@click.argument("group_name", metavar="GROUP", shell_complete=completes("groups"))
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option("--tags", default="*", show_default=True, help='Tags to receive, for example "paid || refunded".')
@click.option("--sql", "condition", help="""Condition on properties, for example "price > 5 AND region = 'eu'".""")
@click.option(
    "--max", "most", type=NumberType(RECEIVE_MESSAGES), default=32, show_default=True, help="The most messages."
)
@click.option(
    "--invisible", type=NumberType(INVISIBLE), default=60.0, show_default=True, help="Seconds without them for others."
)
@click.option(
    "--wait", type=NumberType(TIME_S), default=5.0, show_default=True, help="Seconds to wait for the first message."
)
@click.option("--keep", is_flag=True, help="Do not acknowledge them: they come again unless --ack comes in time.")
@click.option("--ack", "handles", multiple=True, metavar="HANDLE", help="Only acknowledge what --keep has printed.")
@click.option(
    "--from",
    "start",
    type=click.Choice(["first", "last"]),
    default="last",
    show_default=True,
    help="Where a new group starts.",
)
@address_option
@json_option
@quiet_option
def receive(
    group_name: str,
    topic_name: str,
    tags: str,
    condition: str | None,
    most: int,
    invisible: float,
    wait: float,
    keep: bool,
    handles: Sequence[str],
    start: str,
    address: str | None,
    as_json: bool,
) -> None:
    """Receive messages as a simple consumer of GROUP, once: print them, then acknowledge them.

    All members of a group subscribe alike: what --tags or --sql excludes is acknowledged for the whole group.

    Example: raymq receive renderers frames --max 10 --invisible 30

    Example: raymq receive renderers frames --keep, then raymq receive renderers frames --ack HANDLE
    """
    from raymq.common.message import ConsumeFromWhere
    from raymq.records.filters.sql import sql

    if condition is not None and tags != "*":
        raise click.UsageError("--tags and --sql exclude each other: write TAGS = 'paid' in the condition")
    if handles and keep:
        raise click.UsageError("--ack and --keep exclude each other: --ack receives nothing")
    where = (
        ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET if start == "first" else ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    )
    with client_of(address) as client, client.simple_consumer(group_name, consume_from=where) as consumer:
        if handles:
            count = consumer.ack_handles(topic_name, handles)
            text = f"acknowledged {count} of {len(handles)}; the others were settled, or handed out again"
            print_value(as_json, {"acknowledged": count}, lambda: say(text))
            return
        consumer.subscribe(topic_name, tags if condition is None else sql(condition))
        with steps() as progress:
            progress(f"receiving from {topic_name}")
            messages = consumer.receive(most, invisible, wait_s=wait)
        _print(messages, as_json=as_json, keep=keep)
        if not keep:
            consumer.ack(messages)


def _print(messages: Sequence[Any], *, as_json: bool, keep: bool) -> None:
    if as_json:
        found = [{**message_dict(m), "attempt": m.attempt, "handle": m.handle} for m in messages]
        print_value(True, {"messages": found}, lambda: None)
        return
    names = ["queue", "offset", "attempt", "tags", "body", *(["handle"] if keep else [])]
    rows = []
    for m in messages:
        fields = message_dict(m)
        row = [fields["queue"], m.queue_offset, m.attempt, fields["tags"] or "-", fields["body"]]
        rows.append([*row, m.handle] if keep else row)
    print_rows(False, "messages", names, rows)
