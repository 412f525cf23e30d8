"""`raymq send`, `consume`, `receive`, `query` and `recall`: messages from a shell.

`raymq receive` acknowledges messages one by one, as a simple consumer does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click

from raymq.common.delay import DELAY_LEVELS_MAX, parse_time
from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import POSITIVE, TIME_S, NumberRange
from raymq.common.places import parse_position
from raymq.common.protocol.pop import INVISIBLE, RECEIVE_MESSAGES
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    client_of,
    json_option,
    message_dict,
    message_line,
    out,
    print_fields,
    print_rows,
    print_value,
    quiet_option,
    say,
    shown_body,
    table,
)
from raymq.tools.cli.terminal.progress import counting, steps

JOIN_S: Final = 15.0
"""Time that `consume --timeout` allows for joining the group and getting the first queues."""


@click.command(cls=Command)
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.argument("body", required=False)
@click.option("--tags", help="The message's tag.")
@click.option("--key", "keys", multiple=True, help="A business key; may be given several times.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="A user property.")
@click.option("--sharding-key", help="Messages of one key go to one queue, in order.")
@click.option(
    "--delay-level",
    type=NumberType(NumberRange(0, DELAY_LEVELS_MAX)),
    default=0,
    help="Deliver it later: 1 is 1 s, 18 is 2 h.",
)
@click.option("--deliver-at", metavar="TIME", help="Deliver it then: ISO 8601, or +30s, +5m, +2h, +1d from now on.")
@address_option
@json_option
@quiet_option
def send(
    topic_name: str,
    body: str | None,
    tags: str | None,
    keys: Sequence[str],
    properties: Sequence[str],
    sharding_key: str | None,
    delay_level: int,
    deliver_at: str | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Send BODY, or each line of standard input as a message of its own.

    Example: raymq send orders '{"id": 17}' --tags paid --key o-17
    """
    from raymq.common.message import Message

    due_ms = None if deliver_at is None else parse_time(deliver_at, time.time_ns() // 1_000_000)
    user = dict(_property(text) for text in properties)
    bodies = [body.encode()] if body is not None else (line for raw in sys.stdin.buffer if (line := raw.rstrip(b"\n")))
    typed = body is None and sys.stdin.isatty()
    with (
        client_of(address) as client,
        counting("sending", talks=typed) as counter,
        client.producer("raymq-cli") as producer,
    ):
        futures = []
        for text in bodies:
            message = Message(topic_name, text, tags, tuple(keys), user, delay_level=delay_level, deliver_at_ms=due_ms)
            future = producer.send_async(message, sharding_key=sharding_key)
            future.add_done_callback(lambda _: counter.advance())
            futures.append(future)
        counter.expect(len(futures))
        results = [future.result() for future in futures]
    names = ["queue", "offset", "message_id", "status"]
    rows = [[str(r.queue), r.queue_offset, r.message_id, r.status.value] for r in results]
    if due_ms is not None:
        names = [*names, "recall_handle"]
        rows = [[*row, result.recall_handle or ""] for row, result in zip(rows, results, strict=True)]
    print_rows(as_json, "sent", names, rows)


@click.command(cls=Command)
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.argument("handle")
@address_option
@json_option
def recall(topic_name: str, handle: str, address: str | None, as_json: bool) -> None:
    """Take back a message that waits for its time, by the recall handle that `raymq send --deliver-at` printed.

    Exit code 1 when it is too late, or the handle is none; on success the message is never delivered.

    Example: raymq recall orders djEgb3JkZXJzIGJyb2tlci1hIDE4MDAwMDAwMDAwMDAgMEEwMDAwMDExQTJCMThC
    """
    with client_of(address) as client, client.producer("raymq-cli") as producer:
        message_id = producer.recall(topic_name, handle)
    print_value(as_json, {"message_id": message_id}, lambda: say(f"recalled message {message_id}"))


@click.command(cls=Command)
@click.argument("group_name", metavar="GROUP", shell_complete=completes("groups"))
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option("--tags", default="*", show_default=True, help='Tags to consume, for example "paid || refunded".')
@click.option("--sql", "condition", help="""Condition on properties, for example "price > 5 AND region = 'eu'".""")
@click.option(
    "--max", "limit", type=NumberType(POSITIVE), help="Stop after so many messages. Default: go on until ctrl-C."
)
@click.option("--timeout", type=NumberType(TIME_S), help="Stop when no message came for so many seconds.")
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
def consume(
    group_name: str,
    topic_name: str,
    tags: str,
    condition: str | None,
    limit: int | None,
    timeout: float | None,
    start: str,
    address: str | None,
    as_json: bool,
) -> None:
    """Consume a topic as a member of GROUP: a line per message, committed after it was printed.

    Example: raymq consume billing orders --tags "paid || refunded" --timeout 5

    Example: raymq consume billing orders --sql "price > 5 AND region = 'eu'"
    """
    from raymq.common.message import ConsumeFromWhere
    from raymq.records.filters.sql import sql

    if condition is not None and tags != "*":
        raise click.UsageError("--tags and --sql exclude each other: write TAGS = 'paid' in the condition")
    expression = tags if condition is None else sql(condition)
    where = (
        ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET if start == "first" else ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    )
    left = limit
    # Joining the group takes a moment of its own, which a short timeout must not cut off.
    quiet_until_s = time.monotonic() + JOIN_S + (timeout or 0.0)
    with (
        client_of(address) as client,
        client.pull_consumer(group_name, consume_from=where, auto_commit=False) as consumer,
        counting("consuming", limit, talks=out.is_terminal) as counter,
    ):
        consumer.subscribe(topic_name, expression)
        while left is None or left > 0:
            held = bool(consumer.assignment())  # queues that come during the poll have not been quiet for so long
            messages = consumer.poll(min(left or 500, 500), 1.0 if timeout is None else max(timeout, 0.1))
            if messages:
                for message in messages:
                    click.echo(message_line(message, as_json), file=out.file)
                consumer.commit()
                counter.advance(len(messages))
                left = None if left is None else left - len(messages)
            elif timeout is not None and (held or time.monotonic() > quiet_until_s):
                break


@click.command(cls=Command)
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option("--key", help="Messages with this key, the newest ones.")
@click.option("--id", "message_id", help="The message with this id: a unique id or an offset message id.")
@click.option(
    "--offset", "position", metavar="BROKER:QUEUE:OFFSET", help="The message at an offset of a queue: broker-a:3:1700."
)
@click.option("--max", "limit", type=NumberType(POSITIVE), default=32, show_default=True, help="With --key: how many.")
@click.option("--begin", metavar="TIME", help="With --key: stored from then on, ISO 8601, or -2h, -30m.")
@click.option("--end", metavar="TIME", help="With --key: stored until then.")
@address_option
@json_option
@quiet_option
def query(
    topic_name: str,
    key: str | None,
    message_id: str | None,
    position: str | None,
    limit: int,
    begin: str | None,
    end: str | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Show messages by key, by id, or by offset. Exit code 1 when there is none.

    Example: raymq query orders --key o-17 --begin -2h, or raymq query orders --offset broker-a:3:1700
    """
    if sum(choice is not None for choice in (key, message_id, position)) != 1:
        raise click.UsageError("give one of --key, --id and --offset")
    if key is None and (begin or end):
        raise click.UsageError("--begin and --end are for --key: an id or an offset names one message")
    now_ms = time.time_ns() // 1_000_000
    begin_ms = 0 if begin is None else parse_time(begin, now_ms)
    end_ms = 2**63 - 1 if end is None else parse_time(end, now_ms)
    at = None if position is None else parse_position(topic_name, position)
    with client_of(address) as client, steps() as progress:
        progress(f"looking in {topic_name}")
        if key is not None:
            messages = client.admin.query_by_key(topic_name, key, max_messages=limit, begin_ms=begin_ms, end_ms=end_ms)
        elif at is not None:
            messages = [_message_at(client, *at, position or "")]
        else:
            messages = client.admin.query_by_id(topic_name, message_id or "")
    found = [message_dict(message) for message in messages]
    if key is not None:
        print_value(as_json, {"messages": found}, lambda: _print_messages(found))
    elif found:
        print_fields(as_json, found[0])
    if not found:
        raise InvalidArgumentError(
            f"topic {topic_name} has no message with {'key' if key else 'id'} {key or message_id}"
            f"{' of that time' if begin or end else ''}"
        )


def _message_at(client: Any, queue: Any, offset: int, position: str) -> Any:
    """The message at an offset of a queue; `position` names both in the error if there is none."""
    result = client.admin.pull(queue, offset, max_messages=1)
    if not result.messages:
        raise InvalidArgumentError(f"no message is at {position} yet: the queue's next offset is {result.max_offset}")
    return result.messages[0]


def _print_messages(found: list[dict[str, Any]]) -> None:
    names = ["queue", "queue_offset", "tags", "keys", "stored", "message_id", "body"]
    if found:
        shown = [{**fields, "keys": " ".join(fields["keys"]), "body": shown_body(fields)} for fields in found]
        table(names, [[fields[name] for name in names] for fields in shown])


def _property(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise InvalidArgumentError(f"property {text!r} must be NAME=VALUE")
    return name, value


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
