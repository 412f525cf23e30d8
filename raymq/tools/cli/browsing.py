"""`raymq browse`, `tail`, `track`, `trace`, `delayed` and `transactions`: commands that show messages without a
consumer group."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from raymq.common.names import TRACE_TOPIC
from raymq.common.numbers import TIME_S, NumberRange
from raymq.common.protocol.store import BROWSE_MAX_MESSAGES, BROWSE_MAX_SCANNED
from raymq.tools.cli.entry import cli
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.options import TIME, max_option, number_option, queue_of, queue_option, topic_argument
from raymq.tools.cli.terminal.command import CommandResult, command, rows_result
from raymq.tools.cli.terminal.output import Table, err, is_quiet, iso, message_dict, message_line, out, say_note

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.client.cluster.launcher import ProgressCallback
    from raymq.common.message import MessageQueue


@command(cli)
@topic_argument
@click.option(
    "--from", "begin_ms", type=TIME, help="Only messages stored at this time or later: ISO 8601, or -2h, -30m."
)
@click.option("--to", "end_ms", type=TIME, help="Only messages stored before this time.")
@queue_option
@click.option("--oldest", is_flag=True, help="Show the oldest messages first, instead of the newest.")
@click.option(
    "--tags", default="*", show_default=True, help='Only messages with these tags, for example "paid || refunded".'
)
@click.option("--contains", default="", help="Only messages with this text in the body.")
@max_option("Maximum number of messages on a page.", NumberRange(1, BROWSE_MAX_MESSAGES), 50)
@number_option(
    "--max-scanned", NumberRange(1, BROWSE_MAX_SCANNED), "Maximum number of records that the command reads.", 10_000
)
@click.option("--cursor", help="Continue after an earlier page, which ended with this cursor.")
def browse(
    admin: Admin,
    topic_name: str,
    begin_ms: int | None,
    end_ms: int | None,
    queue: MessageQueue | None,
    oldest: bool,
    tags: str,
    contains: str,
    limit: int,
    max_scanned: int,
    cursor: str | None,
) -> CommandResult:
    """Show messages of a topic or of one queue, newest first, without a group.

    Example: raymq browse orders --from -2h --contains o-17
    """
    page = admin.browse(
        topic_name,
        queue=queue_of(topic_name, queue),
        begin_ms=begin_ms,
        end_ms=end_ms,
        newest_first=not oldest,
        tags=tags,
        contains=contains,
        limit=limit,
        max_scanned=max_scanned,
        cursor=cursor,
    )
    cut = ", cut off" if page.truncated else ""
    more = f"; continue with --cursor {page.cursor}" if page.cursor else ""
    return CommandResult(
        {
            "messages": [message_dict(message) for message in page.messages],
            "scanned": page.scanned,
            "truncated": page.truncated,
            "cursor": page.cursor,
        },
        *(message_line(message, False) for message in page.messages),
        f"{len(page.messages)} messages of {page.scanned} records read{cut}{more}",
    )


@command(cli, quiet=True)
@topic_argument
@max_option("Stop after this number of messages. Default: continue until ctrl-C.")
@number_option("--timeout", TIME_S, "Stop after this number of seconds without a new message.")
@number_option("--interval", NumberRange(0.1, 60.0), "Seconds between two reads.", 0.5)
def tail(
    admin: Admin, topic_name: str, limit: int | None, timeout: float | None, interval: float, as_json: bool
) -> None:
    """Print the messages that are sent to a topic from now on, without a group, until ctrl-C.

    If more messages arrive between two reads than one read returns, the command skips the oldest and prints their
    number on standard error.

    Example: raymq tail orders, or raymq tail orders --max 1 --json
    """
    from raymq.client.admin.messages import TAIL_MESSAGES_MAX

    positions = admin.tail(topic_name).positions
    if err.is_terminal and not is_quiet():
        say_note(f"waiting for new messages of topic {topic_name}; ctrl-C ends")
    left, quiet_since_s = limit, time.monotonic()
    while left is None or left > 0:
        arrived = admin.tail(topic_name, positions, max_messages=TAIL_MESSAGES_MAX)
        positions = arrived.positions
        if arrived.skipped:
            say_note(f"skipped {arrived.skipped} messages: they arrived faster than this command reads")
        for message in arrived.messages[:left]:
            click.echo(message_line(message, as_json), file=out.file)
        if arrived.messages:
            quiet_since_s = time.monotonic()
            left = None if left is None else left - len(arrived.messages)
        elif timeout is not None and time.monotonic() - quiet_since_s >= timeout:
            return
        if left is None or left > 0:
            time.sleep(interval)


@command(cli)
@topic_argument
@click.argument("message_id")
def track(admin: Admin, topic_name: str, message_id: str) -> CommandResult:
    """Show a message's state in each group: consumed, not yet, retrying, dead, filtered out.

    Exit code 1 if the topic has no such message. Example: raymq track orders 0A000001000000000000000000000017
    """
    messages = admin.query_by_id(topic_name, message_id)
    rows = [
        [f"{m.broker_name}:{m.queue_id}:{m.queue_offset}", one.group, one.state.value, one.retries, one.detail]
        for m in messages
        for one in admin.message_track(m)
    ]
    return rows_result("tracks", ["place", "group", "state", "retries", "detail"], rows, failed=not messages)


@command(cli)
@click.option(
    "--from", "begin_ms", type=TIME, default=0, help="Only messages due at this time or later: ISO 8601, or +2h, +30m."
)
@click.option("--to", "end_ms", type=TIME, help="Only messages due before this time.")
@max_option("Maximum number of messages to list.", NumberRange(1, 1000), 20)
def delayed(admin: Admin, begin_ms: int, end_ms: int | None, limit: int) -> CommandResult:
    """Show the delayed messages: counts by level, and the messages that are due next.

    The error of a message is the reason why it cannot be read. Example: raymq delayed --to +1h
    """
    times = (begin_ms,) if end_ms is None else (begin_ms, end_ms)
    found = admin.delayed(*times, limit=limit)
    rows = [
        [iso(one.due_ms), one.topic, one.level, one.message.message_id, error and str(error)]
        for one in found.next_due
        for error in [one.message.body_error]
    ]
    due = Table(["due", "topic", "level", "message_id", "error"], rows)
    return CommandResult(
        {
            "levels": found.levels,
            "hours": list(found.hours),
            "late_ms": found.late_ms,
            "next_due": due.objects(),
            "truncated": found.truncated,
        },
        Table(["waits for", "messages"], [[name, count] for name, count in sorted(found.levels.items())]),
        due,
        f"{found.late_ms} ms late" + ("; more messages exist" if found.truncated else ""),
    )


@command(cli)
@click.argument("message_id")
@click.option(
    "--topic",
    "topic_name",
    metavar="TOPIC",
    shell_complete=completes("topics"),
    help="The message's topic, if the message was not traced.",
)
@click.option("--trace-topic", default=TRACE_TOPIC, show_default=True, help="The topic with the trace records.")
def trace(
    admin: Admin, progress: ProgressCallback, message_id: str, topic_name: str | None, trace_topic: str
) -> CommandResult:
    """Show the history of a message: where it was sent and stored, its consumers, its attempts and their outcome.

    Clients that connect with trace=True write the records. With --topic the command also finds a message without
    records, and finds messages by their offset message ids.

    Example: raymq trace 0A0000011A2B18B4AAC23B9ACA000005
    """
    progress(f"searching {trace_topic}")
    found = admin.trace(message_id, topic=topic_name, trace_topic=trace_topic)
    events = found.events()
    states = [[one.group, one.state, one.retries, one.detail] for one in found.tracks]
    return CommandResult(
        {
            "message_id": found.message_id,
            "topic": found.topic,
            "events": [asdict(event) for event in events],
            "groups": [asdict(one) for one in found.tracks],
        },
        f"message {found.message_id} of topic {found.topic}",
        Table(["time", "event", "group", "detail"], [[iso(e.time_ms), e.event, e.who, e.detail] for e in events]),
        *([Table(["group", "state", "retries", "detail"], states)] if states else []),
    )


@cli.group()
def transactions() -> None:
    """Show the open transactions, which have neither been committed nor rolled back."""


@command(transactions, "list")
def transactions_list(admin: Admin) -> CommandResult:
    """Show the number of open transactions by topic and producer group, and the age of the oldest in seconds.

    Example: raymq transactions list
    """
    figures = admin.transactions()
    now_ms = time.time_ns() // 1_000_000
    names = ["broker", "topic", "group", "waiting", "oldest_s"]
    rows = [
        [broker, row.topic, row.producer_group, row.waiting, max(now_ms - row.oldest_born_timestamp_ms, 0) // 1000]
        for broker, found in figures.items()
        for row in found.waiting
    ]
    counts = {broker: {k: v for k, v in asdict(found).items() if k != "waiting"} for broker, found in figures.items()}
    return CommandResult(
        {"transactions": Table(names, rows).objects(), "since_start": counts},
        Table(names, [[str(cell) for cell in row] for row in rows]),
    )
