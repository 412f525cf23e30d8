"""`raymq browse`, `track`, `trace`, `delayed` and `transactions`: views of messages, without a group."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from raymq.common.delay import parse_time
from raymq.common.names import TRACE_TOPIC
from raymq.common.numbers import NumberRange
from raymq.common.places import parse_queue
from raymq.common.protocol.store import BROWSE_MAX_MESSAGES, BROWSE_MAX_SCANNED
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Command,
    Group,
    address_option,
    client_of,
    iso,
    json_option,
    message_dict,
    message_line,
    print_rows,
    print_value,
    say,
    table,
)
from raymq.tools.cli.terminal.progress import steps


@click.command(cls=Command)
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option("--from", "begin", metavar="TIME", help="Stored from then on: ISO 8601, or -2h, -30m.")
@click.option("--to", "end", metavar="TIME", help="Stored before then.")
@click.option("--queue", "queue_text", metavar="BROKER:QUEUE", help="Only this queue, for example broker-a:3.")
@click.option("--oldest", is_flag=True, help="The oldest first, not the newest.")
@click.option("--tags", default="*", show_default=True, help='Only these tags, "paid || refunded".')
@click.option("--contains", default="", help="Only messages with this text in the body.")
@click.option(
    "--max",
    "limit",
    type=NumberType(NumberRange(1, BROWSE_MAX_MESSAGES)),
    default=50,
    show_default=True,
    help="How many.",
)
@click.option(
    "--max-scanned",
    type=NumberType(NumberRange(1, BROWSE_MAX_SCANNED)),
    default=10_000,
    show_default=True,
    help="Records to look at.",
)
@click.option("--cursor", help="Go on behind an earlier page.")
@address_option
@json_option
def browse(
    topic_name: str,
    begin: str | None,
    end: str | None,
    queue_text: str | None,
    oldest: bool,
    tags: str,
    contains: str,
    limit: int,
    max_scanned: int,
    cursor: str | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Show a topic's messages, or those of one queue, newest first, without a group.

    Example: raymq browse orders --from -2h --contains o-17
    """
    now_ms = time.time_ns() // 1_000_000
    with client_of(address) as client:
        page = client.admin.browse(
            topic_name,
            queue=None if queue_text is None else parse_queue(topic_name, queue_text),
            begin_ms=None if begin is None else parse_time(begin, now_ms),
            end_ms=None if end is None else parse_time(end, now_ms),
            newest_first=not oldest,
            tags=tags,
            contains=contains,
            limit=limit,
            max_scanned=max_scanned,
            cursor=cursor,
        )

    def show() -> None:
        for message in page.messages:
            say(message_line(message, False))
        cut = ", cut off" if page.truncated else ""
        more = f"; go on with --cursor {page.cursor}" if page.cursor else ""
        say(f"{len(page.messages)} messages of {page.scanned} looked at{cut}{more}")

    rows = [message_dict(message) for message in page.messages]
    value = {"messages": rows, "scanned": page.scanned, "truncated": page.truncated, "cursor": page.cursor}
    print_value(as_json, value, show)


@click.command(cls=Command)
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.argument("message_id")
@address_option
@json_option
def track(topic_name: str, message_id: str, address: str | None, as_json: bool) -> None:
    """Show per group how far it is with a message: consumed, not yet, retrying, dead, filtered out.

    Exit code 1 when there is no such message. Example: raymq track orders 0A000001000000000000000000000017
    """
    with client_of(address) as client:
        messages = client.admin.query_by_id(topic_name, message_id)
        rows = [
            [f"{m.broker_name}:{m.queue_id}:{m.queue_offset}", one.group, one.state.value, one.retries, one.detail]
            for m in messages
            for one in client.admin.message_track(m)
        ]
    print_rows(as_json, "tracks", ["place", "group", "state", "retries", "detail"], rows)
    if not messages:
        raise click.exceptions.Exit(1)


@click.command(cls=Command)
@click.option("--from", "begin", metavar="TIME", help="Due from then on: ISO 8601, or +2h, +30m.")
@click.option("--to", "end", metavar="TIME", help="Due before then.")
@click.option(
    "--max", "limit", type=NumberType(NumberRange(1, 1000)), default=20, show_default=True, help="How many to list."
)
@address_option
@json_option
def delayed(begin: str | None, end: str | None, limit: int, address: str | None, as_json: bool) -> None:
    """Show the messages that wait for their time: counts by level, and the next ones.

    Example: raymq delayed --to +1h
    """
    now_ms = time.time_ns() // 1_000_000
    first_ms = 0 if begin is None else parse_time(begin, now_ms)
    with client_of(address) as client:
        if end is None:
            found = client.admin.delayed(first_ms, limit=limit)
        else:
            found = client.admin.delayed(first_ms, parse_time(end, now_ms), limit=limit)
    rows = [
        {"due": iso(one.due_ms), "topic": one.topic, "level": one.level, "message_id": one.message.message_id}
        for one in found.next_due
    ]

    def show() -> None:
        table(["waits for", "messages"], [[name, count] for name, count in sorted(found.levels.items())])
        table(["due", "topic", "level", "message_id"], [list(row.values()) for row in rows])
        say(f"{found.late_ms} ms late" + ("; there are more" if found.truncated else ""))

    value = {
        "levels": found.levels,
        "hours": list(found.hours),
        "late_ms": found.late_ms,
        "next_due": rows,
        "truncated": found.truncated,
    }
    print_value(as_json, value, show)


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
