"""Commands about the live members of groups.

`raymq group connections` and `raymq producers` list who is connected, by the clients' heartbeats. `raymq group
running-info` and `consume-directly` ask live members of a group.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from raymq.common.errors import InvalidArgumentError, TopicNotExistError
from raymq.common.numbers import NumberRange
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    client_of,
    duration,
    iso,
    json_option,
    print_fields,
    print_value,
    say,
    table,
)

if TYPE_CHECKING:
    from raymq.common.members.questions import RunningInfo


@click.command("connections", cls=Command)
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@address_option
@json_option
def group_connections(name: str, address: str | None, as_json: bool) -> None:
    """Show a group's live members: client, node, version, subscriptions, and since when.

    Example: raymq group connections billing
    """
    with client_of(address) as client:
        found = client.admin.consumer_connections(name)
    rows = [
        {
            "client": one.client_id,
            "member": one.consumer.member,
            "host": one.host,
            "node": one.node,
            "pid": one.pid,
            "language": one.language,
            "version": one.version,
            "type": one.consumer.consume_type,
            "model": one.consumer.message_model.value,
            "consume_from": one.consumer.consume_from.name,
            "subscriptions": dict(one.consumer.subscriptions),
            "since": iso(one.consumer.since_ms) if one.consumer.since_ms else None,
            "silent_s": round(one.silent_s, 1),
        }
        for one in found
    ]

    def show() -> None:
        now_ms = time.time_ns() // 1_000_000
        names = ["client", "member", "node", "raymq", "type", "model", "subscriptions", "for", "silent_s"]
        text = [
            [
                *(row["client"], row["member"], str(row["node"])[:8], f"{row['language']} {row['version']}"),
                *(row["type"], row["model"]),
                "; ".join(f"{topic}: {what}" for topic, what in sorted(one.consumer.subscriptions.items())),
                duration(max(0, now_ms - one.consumer.since_ms)) if one.consumer.since_ms else "",
                row["silent_s"],
            ]
            for one, row in zip(found, rows, strict=True)
        ]
        table(names, text)

    print_value(as_json, {"group": name, "connections": rows}, show)


@click.command("producers", cls=Command)
@click.argument("name", metavar="[GROUP]", required=False)
@address_option
@json_option
def producers(name: str | None, address: str | None, as_json: bool) -> None:
    """Show the live producers of a producer group, or of all: client, node, version.

    Example: raymq producers shop
    """
    with client_of(address) as client:
        found = client.admin.producer_connections(name)
    names = ["group", "client", "host", "node", "pid", "language", "version", "silent_s"]
    rows = [
        [one.group, one.client_id, one.host, one.node, one.pid, one.language, one.version, round(one.silent_s, 1)]
        for one in sorted(found, key=lambda one: (one.group, one.client_id))
    ]

    def show() -> None:
        table(names, [[*row[:3], str(row[3])[:8], *row[4:]] for row in rows])

    print_value(as_json, {"producers": [dict(zip(names, row, strict=True)) for row in rows]}, show)


_QUEUE_COLUMNS = ["queue", "state", "fetch", "consumed", "committed", "buffered", "bytes", "in_flight", "trouble"]


@click.command("running-info", cls=Command)
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@click.argument("member", required=False)
@click.option("--stacks", is_flag=True, help="Also the stacks of the threads of the members' processes.")
@click.option(
    "--timeout",
    type=NumberType(NumberRange(0.1, 30.0)),
    default=10.0,
    show_default=True,
    help="Seconds to wait for each.",
)
@address_option
@json_option
def group_running_info(
    name: str, member: str | None, stacks: bool, timeout: float, address: str | None, as_json: bool
) -> None:
    """Ask a group's live members what they do: queues, process queues, offsets, rates, threads.

    MEMBER is a member's name or a client's id, as `raymq group connections` shows them; without it all are asked, and
    the trouble of one that does not answer says why.

    Example: raymq group running-info billing --stacks
    """
    with client_of(address) as client:
        infos = client.admin.running_info(name, member, stacks=stacks, timeout_s=timeout)
    value = {"group": name, "members": [_as_json(info) for info in infos]}

    def show() -> None:
        for info in infos:
            _print_info(info)
        if not infos:
            say(f"group {name} has no live members")

    print_value(as_json, value, show)


@click.command("consume-directly", cls=Command)
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@click.argument("message_id", metavar="MESSAGE_ID")
@click.option("--member", help="The member whose listener is called; by default the first push consumer by name.")
@click.option("--topic", "topic_name", help="The message's topic; by default those that the group subscribes to.")
@address_option
@json_option
def group_consume_directly(
    name: str, message_id: str, member: str | None, topic_name: str | None, address: str | None, as_json: bool
) -> None:
    """Have a push consumer of a group call its listener with one message; nothing is committed or sent back.

    Exit code 1 when the listener has failed, or there is no such message or member.

    Example: raymq group consume-directly billing 0A000001000000000000000000000017
    """
    with client_of(address) as client:
        topics = [topic_name] if topic_name else _subscribed(client, name)
        message = _message_of(client, topics, message_id)
        outcome = client.admin.consume_directly(name, message, member)
    print_fields(as_json, {"topic": message.topic, "message_id": message.message_id, **asdict(outcome)})
    if outcome.status != "CONSUME_SUCCESS":
        raise click.exceptions.Exit(1)


def _subscribed(client: Any, name: str) -> list[str]:
    """The topics that the live members of a group subscribe to, and its retries."""
    from raymq.common.names import retry_topic

    found = {topic for one in client.admin.consumer_connections(name) for topic in one.consumer.subscriptions}
    return [*sorted(found), retry_topic(name)]


def _message_of(client: Any, topics: list[str], message_id: str) -> Any:
    for topic in topics:
        try:
            found = client.admin.query_by_id(topic, message_id)
        except TopicNotExistError:
            if len(topics) == 1:
                raise
            continue  # the retry topic of a group that has had none
        if found:
            return found[0]
    raise InvalidArgumentError(f"no message {message_id} is in {', '.join(topics)}; say --topic")


def _as_json(info: RunningInfo) -> dict[str, Any]:
    value = asdict(info)
    for queue, row in zip(info.queues, value["queues"], strict=True):
        row["queue"] = str(queue.queue)
    return value


def _print_info(info: RunningInfo) -> None:
    state = " suspended" if info.suspended else ""
    say(f"{info.member or info.client_id}: {info.consume_type} {info.message_model}{state}, client {info.client_id}")
    if info.trouble:
        say(f"  trouble: {info.trouble.strip()}")
    if info.consumed is not None:
        say(f"  {info.consumed} consumed, {info.failures} failed")
    if info.queues:
        rows = [
            [
                *(str(one.queue), one.state, one.fetch_offset, one.commit_offset, one.committed_offset),
                *(one.buffered, one.buffered_bytes, one.in_flight, one.trouble.strip().rpartition("\n")[2]),
            ]
            for one in info.queues
        ]
        table(_QUEUE_COLUMNS, rows)
    if info.rates:
        names = sorted({name for figures in info.rates.values() for name in figures})
        figures = [[topic, *(round(of.get(name, 0.0), 1) for name in names)] for topic, of in info.rates.items()]
        table(["topic", *names], figures)
    for stack in info.stacks:
        say(f"  thread {stack.name}")
        for frame in stack.frames:
            say(f"    {frame}")
