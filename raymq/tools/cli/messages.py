"""`raymq send`, `consume`, `receive`, `query` and `recall`: commands that send and read messages from a shell.

`raymq receive` acknowledges messages one by one, as a simple consumer does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from raymq.common.errors import InvalidArgumentError, MessageIllegalError, RaymqError
from raymq.common.message import DELAY_LEVELS_MAX, MAX_MESSAGE_SIZE_BYTES, PRIORITY_MAX
from raymq.common.numbers import TIME_S, NumberRange
from raymq.common.protocol.pop import INVISIBLE, RECEIVE_MESSAGES
from raymq.tools.cli.entry import cli
from raymq.tools.cli.options import (
    POSITION,
    TIME,
    RenamedOption,
    consume_from,
    group_argument,
    max_option,
    number_option,
    start_option,
    subscription,
    subscription_options,
    topic_argument,
)
from raymq.tools.cli.terminal.command import CommandResult, command, fields_result, rows_result
from raymq.tools.cli.terminal.output import Table, message_dict, message_line, out, shown_body
from raymq.tools.cli.terminal.progress import counting, steps

if TYPE_CHECKING:
    from concurrent.futures import Future

    from raymq.client.admin.admin import Admin
    from raymq.client.client import Client
    from raymq.client.cluster.launcher import ProgressCallback
    from raymq.common.message import MessageQueue, SendResult

JOIN_S: Final = 15.0
"""Seconds that `consume --timeout` adds to the user's timeout, for joining the group and getting the first
queues."""


@command(cli, quiet=True)
@topic_argument
@click.argument("body", required=False, type=click.UNPROCESSED)  # the body may have any bytes, not only UTF-8
@click.option("--tags", help="The message's tag.")
@click.option("--key", "keys", multiple=True, help="A key of the message; repeatable.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="A user property; repeatable.")
@click.option("--sharding-key", help="Sharding key: messages with the same sharding key go to one queue, in order.")
@number_option("--delay-level", NumberRange(0, DELAY_LEVELS_MAX), "Delay the delivery: 1 is 1 s, 18 is 2 h.", 0)
@click.option(
    "--deliver-at", "due_ms", type=TIME, help="Deliver at this time: ISO 8601, or +30s, +5m, +2h, +1d from now."
)
@number_option("--priority", NumberRange(0, PRIORITY_MAX), "For a topic of the type priority; 9 is the highest.")
def send(
    client: Client,
    topic_name: str,
    body: str | None,
    tags: str | None,
    keys: Sequence[str],
    properties: Sequence[str],
    sharding_key: str | None,
    delay_level: int,
    due_ms: int | None,
    priority: int | None,
) -> CommandResult:
    """Send BODY, or each line of standard input as a separate message, without its line end (LF or CRLF).

    Blank lines are skipped. Exit code 1 if a line is not stored; the command then prints the stored lines, and the
    number of the first line that is not stored.

    Example: raymq send orders '{"id": 17}' --tags paid --key o-17
    """
    from raymq.common.message import Message

    user = dict(_property(text) for text in properties)
    lines = iter([(1, os.fsencode(body))]) if body is not None else _lines(sys.stdin.buffer)
    typed = body is None and sys.stdin.isatty()
    failed: tuple[int, RaymqError] | None = None
    with counting("sending", talks=typed) as counter, client.producer("raymq-cli") as producer:
        sent: list[tuple[int, Future[SendResult]]] = []
        try:
            for number, text in lines:
                if len(text) > MAX_MESSAGE_SIZE_BYTES:
                    raise MessageIllegalError(
                        f"the line has more than {MAX_MESSAGE_SIZE_BYTES} bytes; split it, or send a reference to it"
                    )
                message = Message(
                    topic_name,
                    text,
                    tags,
                    tuple(keys),
                    user,
                    delay_level=delay_level,
                    deliver_at_ms=due_ms,
                    priority=priority,
                )
                future = producer.send_async(message, sharding_key=sharding_key)
                future.add_done_callback(lambda _: counter.advance())
                sent.append((number, future))
        except RaymqError as error:
            if not sent:
                raise
            # `number` is defined here, because `sent` is not empty: an earlier line was already sent
            failed = number, error
        counter.expect(len(sent))
        results = []
        for number, future in sent:
            try:
                results.append(future.result())
            except RaymqError as error:
                failed = min(failed or (number, error), (number, error), key=itemgetter(0))
    if failed is not None and body is not None:
        raise failed[1]
    names = ["queue", "offset", "message_id", "status"]
    rows = [[str(r.queue), r.queue_offset, r.message_id, r.status.value] for r in results]
    if due_ms is not None:
        names = [*names, "recall_handle"]
        rows = [[*row, result.recall_handle or ""] for row, result in zip(rows, results, strict=True)]
    errors = [] if failed is None else [f"line {failed[0]} was not stored, {len(rows)} lines were: {failed[1]}"]
    return rows_result("sent", names, rows, errors=errors, failed=failed is not None)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of `stream` that are not blank, each with its number from 1 on and without its line end.

    If a line is too long for a message, only its beginning is read. This beginning, which is also too long for a
    message, is yielded as the last line.
    """
    longest = MAX_MESSAGE_SIZE_BYTES + len(b"\r\n")
    for number in count(1):
        line = stream.readline(longest + 1)
        if not line:
            return
        text = line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line
        if text:
            yield number, text
        if len(line) > longest:
            return


def _property(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise click.UsageError(f"property {text[:80]!r} must be NAME=VALUE")
    return name, value


@command(cli)
@topic_argument
@click.argument("handle")
def recall(client: Client, topic_name: str, handle: str) -> CommandResult:
    """Recall a delayed message by the recall handle that `raymq send --deliver-at` printed.

    Exit code 1 if it is too late, or if HANDLE is not a recall handle. After success the message is never delivered.

    Example: raymq recall orders djEgb3JkZXJzIGJyb2tlci1hIDE4MDAwMDAwMDAwMDAgMEEwMDAwMDExQTJCMThC
    """
    with client.producer("raymq-cli") as producer:
        message_id = producer.recall(topic_name, handle)
    return CommandResult({"message_id": message_id}, f"recalled message {message_id}")


@command(cli, quiet=True)
@group_argument
@topic_argument
@subscription_options("consume")
@max_option("Stop after this number of messages. Default: continue until ctrl-C.")
@number_option("--timeout", TIME_S, "Stop after this number of seconds without a message.")
@start_option
def consume(
    client: Client,
    group_name: str,
    topic_name: str,
    tags: str,
    condition: str | None,
    limit: int | None,
    timeout: float | None,
    start: str,
    as_json: bool,
) -> None:
    """Consume a topic as a member of GROUP: print a line for each message, then commit the message.

    Example: raymq consume billing orders --tags "paid || refunded" --timeout 5

    Example: raymq consume billing orders --sql "price > 5 AND region = 'eu'"
    """
    expression = subscription(tags, condition)
    left = limit
    # A short --timeout must not expire while the consumer is still joining the group.
    quiet_until_s = time.monotonic() + JOIN_S + (timeout or 0.0)
    with (
        client.pull_consumer(group_name, consume_from=consume_from(start), auto_commit=False) as consumer,
        counting("consuming", limit, talks=out.is_terminal) as counter,
    ):
        consumer.subscribe(topic_name, expression)
        while left is None or left > 0:
            # `held`: True if the consumer already had queues when the poll began. A queue that is assigned only during
            # the poll may have been polled for a moment only. Then an empty result does not show that the queue is
            # empty.
            held = bool(consumer.assignment())
            messages = consumer.poll(min(left or 500, 500), 1.0 if timeout is None else max(timeout, 0.1))
            if messages:
                for message in messages:
                    click.echo(message_line(message, as_json), file=out.file)
                consumer.commit()
                counter.advance(len(messages))
                left = None if left is None else left - len(messages)
            elif timeout is not None and (held or time.monotonic() > quiet_until_s):
                break


@command(cli)
@topic_argument
@click.option("--key", help="The newest messages with this key.")
@click.option("--id", "message_id", help="The message with this id: a unique id or an offset message id.")
@click.option(
    "--offset",
    "position",
    type=POSITION,
    metavar="BROKER:QUEUE:OFFSET",
    help="The message at an offset of a queue: broker-a:3:1700.",
)
@max_option("With --key: maximum number of messages.", default=32)
@click.option(
    "--from",
    "begin_ms",
    cls=RenamedOption,
    former=["--begin"],
    type=TIME,
    help="With --key: only messages stored at this time or later, ISO 8601, or -2h, -30m.",
)
@click.option(
    "--to",
    "end_ms",
    cls=RenamedOption,
    former=["--end"],
    type=TIME,
    help="With --key: only messages stored until this time.",
)
def query(
    admin: Admin,
    progress: ProgressCallback,
    topic_name: str,
    key: str | None,
    message_id: str | None,
    position: tuple[MessageQueue, int] | None,
    limit: int,
    begin_ms: int | None,
    end_ms: int | None,
    as_json: bool,
) -> CommandResult:
    """Show messages by key, by id, or by offset. Exit code 1 if no message is found.

    Example: raymq query orders --key o-17 --from -2h, or raymq query orders --offset broker-a:3:1700
    """
    if sum(choice is not None for choice in (key, message_id, position)) != 1:
        raise click.UsageError("pass exactly one of --key, --id and --offset")
    in_a_time = begin_ms is not None or end_ms is not None
    if key is None and in_a_time:
        raise click.UsageError("--from and --to are for --key: an id or an offset names one message")
    progress(f"searching {topic_name}")
    if position is not None:
        return fields_result(message_dict(_message_at(admin, topic_name, *position)))
    if key is None:
        messages = admin.query_by_id(topic_name, message_id or "")
        if messages:
            return fields_result(message_dict(messages[0]))
        raise InvalidArgumentError(f"topic {topic_name!r} has no message with id {message_id}")
    messages = admin.query_by_key(
        topic_name, key, max_messages=limit, begin_ms=begin_ms or 0, end_ms=2**63 - 1 if end_ms is None else end_ms
    )
    found = [message_dict(message) for message in messages]
    if found:
        return CommandResult({"messages": found}, _table_of(found))
    CommandResult({"messages": []}).print(as_json=as_json)
    raise InvalidArgumentError(
        f"topic {topic_name!r} has no message with key {key!r}{(' in this time range' if in_a_time else '')}"
    )


def _message_at(admin: Admin, topic_name: str, queue: MessageQueue, offset: int) -> Any:
    """Return the message at an offset of a topic's queue. `queue` has no topic. Raises InvalidArgumentError if the
    offset has no message yet."""
    result = admin.pull(replace(queue, topic=topic_name), offset, max_messages=1)
    if not result.messages:
        raise InvalidArgumentError(
            f"offset {queue.broker_name}:{queue.queue_id}:{offset} has no message yet: the queue's next offset is "
            f"{result.max_offset}"
        )
    return result.messages[0]


def _table_of(found: Sequence[dict[str, Any]]) -> Table:
    names = ["queue", "queue_offset", "tags", "keys", "stored", "message_id", "body"]
    shown = [{**fields, "keys": " ".join(fields["keys"]), "body": shown_body(fields)} for fields in found]
    return Table(names, [[fields[name] for name in names] for fields in shown])


@command(cli, quiet=True)
@group_argument
@topic_argument
@subscription_options("receive")
@max_option("Maximum number of messages to receive.", RECEIVE_MESSAGES, 32)
@number_option("--invisible", INVISIBLE, "Seconds in which no other consumer receives the messages.", 60.0)
@number_option("--timeout", TIME_S, "Seconds to wait for the first message.", 5.0, name="wait", former=["--wait"])
@click.option("--keep", is_flag=True, help="Do not acknowledge the messages: they are delivered again unless --ack.")
@click.option(
    "--ack", "handles", multiple=True, metavar="HANDLE", help="Only acknowledge messages that --keep printed."
)
@start_option
def receive(
    client: Client,
    group_name: str,
    topic_name: str,
    tags: str,
    condition: str | None,
    limit: int,
    invisible: float,
    wait: float,
    keep: bool,
    handles: Sequence[str],
    start: str,
    as_json: bool,
) -> CommandResult | None:
    """Receive messages as a simple consumer of GROUP, once: print them, then acknowledge them.

    All members of a group must use the same --tags or --sql: messages that they exclude are acknowledged for the group.

    Example: raymq receive renderers frames --max 10 --invisible 30

    Example: raymq receive renderers frames --keep, then raymq receive renderers frames --ack HANDLE
    """
    expression = subscription(tags, condition)
    if handles and keep:
        raise click.UsageError("--ack and --keep exclude each other: with --ack the command receives no messages")
    with client.simple_consumer(group_name, consume_from=consume_from(start)) as consumer:
        if handles:
            count = consumer.ack_handles(topic_name, handles)
            text = f"acknowledged {count} of {len(handles)}; the other handles have expired or were acknowledged before"
            return CommandResult({"acknowledged": count}, text)
        consumer.subscribe(topic_name, expression)
        with steps() as progress:
            progress(f"receiving from {topic_name}")
            messages = consumer.receive(limit, invisible, wait_s=wait)
        # Print the messages before they are acknowledged, so that a failed print loses no message.
        _received(messages, keep=keep).print(as_json=as_json)
        if not keep:
            consumer.ack(messages)
    return None


def _received(messages: Sequence[Any], *, keep: bool) -> CommandResult:
    names = ["queue", "offset", "attempt", "tags", "body", *(["handle"] if keep else [])]
    found = [{**message_dict(m), "attempt": m.attempt, "handle": m.handle} for m in messages]
    rows = [
        [fields["queue"], fields["queue_offset"], fields["attempt"], fields["tags"] or "-", fields["body"]]
        + ([fields["handle"]] if keep else [])
        for fields in found
    ]
    return CommandResult({"messages": found}, Table(names, rows))
