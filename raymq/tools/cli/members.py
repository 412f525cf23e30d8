"""Commands about the live members of consumer and producer groups.

`raymq group connections` and `raymq producers` list the clients that send heartbeats. `raymq group running-info` and
`consume-directly` call live members of a group.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from raymq.common.errors import InvalidArgumentError, TopicNotExistError
from raymq.common.names import retry_topic
from raymq.common.numbers import NumberRange
from raymq.tools.cli.entry import cli
from raymq.tools.cli.groups import group
from raymq.tools.cli.options import group_argument, number_option
from raymq.tools.cli.terminal.command import CommandResult, command, fields_result
from raymq.tools.cli.terminal.output import Table, duration, iso

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.common.members.questions import RunningInfo


@command(group, "connections")
@group_argument
def group_connections(admin: Admin, group_name: str) -> CommandResult:
    """Show a group's live members: client, node, library, subscriptions, and start time.

    Example: raymq group connections billing
    """
    found = admin.consumer_connections(group_name)
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
            "mode": one.consumer.consume_mode,
            "model": one.consumer.message_model.value,
            "consume_from": one.consumer.consume_from.name,
            "subscriptions": dict(one.consumer.subscriptions),
            "since": iso(one.consumer.since_ms) if one.consumer.since_ms else None,
            "silent_s": round(one.silent_s, 1),
        }
        for one in found
    ]
    now_ms = time.time_ns() // 1_000_000
    names = ["client", "member", "node", "library", "type", "mode", "model", "subscriptions", "for", "silent_s"]
    cells = [
        [
            *(row["client"], row["member"], str(row["node"])[:8], f"{row['language']} {row['version']}"),
            *(row["type"], row["mode"], row["model"]),
            "; ".join(f"{topic}: {what}" for topic, what in sorted(one.consumer.subscriptions.items())),
            duration(max(0, now_ms - one.consumer.since_ms)) if one.consumer.since_ms else "",
            row["silent_s"],
        ]
        for one, row in zip(found, rows, strict=True)
    ]
    return CommandResult({"group": group_name, "connections": rows}, Table(names, cells))


@command(cli)
@click.argument("name", metavar="[GROUP]", required=False)
def producers(admin: Admin, name: str | None) -> CommandResult:
    """Show the live producers of a producer group, or of all groups: client, node, version.

    Example: raymq producers shop
    """
    names = ["group", "client", "host", "node", "pid", "language", "version", "silent_s"]
    rows = [
        [one.group, one.client_id, one.host, one.node, one.pid, one.language, one.version, round(one.silent_s, 1)]
        for one in sorted(admin.producer_connections(name), key=lambda one: (one.group, one.client_id))
    ]
    return CommandResult(
        {"producers": Table(names, rows).objects()},
        Table(names, [[*row[:3], str(row[3])[:8], *row[4:]] for row in rows]),
    )


_QUEUE_COLUMNS: Final = (
    *("queue", "state", "fetch", "consumed", "committed"),
    *("buffered", "bytes", "in_flight", "trouble"),
)


@command(group, "running-info")
@group_argument
@click.argument("member", required=False)
@click.option("--stacks", is_flag=True, help="Also show the stacks of the threads of the members' processes.")
@number_option("--timeout", NumberRange(0.1, 30.0), "Seconds to wait for each member.", 10.0)
def group_running_info(
    admin: Admin, group_name: str, member: str | None, stacks: bool, timeout: float
) -> CommandResult:
    """Show the live state of a group's members: queues, process queues, offsets, rates, threads.

    MEMBER is a member's name or a client's id, as `raymq group connections` shows them. Without MEMBER the command
    calls all members. If a member does not answer, its `trouble` gives the reason.

    Example: raymq group running-info billing --stacks
    """
    infos = admin.running_info(group_name, member, stacks=stacks, timeout_s=timeout)
    value = {"group": group_name, "members": [_as_json(info) for info in infos]}
    shown = [part for info in infos for part in _shown(info)] or [f"group {group_name} has no live members"]
    return CommandResult(value, *shown)


@command(group, "consume-directly")
@group_argument
@click.argument("message_id", metavar="MESSAGE_ID")
@click.option("--member", help="The member whose listener is called. Default: the first push consumer by name.")
@click.option("--topic", "topic_name", help="The message's topic. Default: the topics that the group subscribes to.")
def group_consume_directly(
    admin: Admin, group_name: str, message_id: str, member: str | None, topic_name: str | None
) -> CommandResult:
    """Call a push consumer's listener with one message. The call commits nothing and sends nothing back.

    Exit code 1 if the listener has failed, or if the message or the member does not exist.

    Example: raymq group consume-directly billing 0A000001000000000000000000000017
    """
    if topic_name:
        topics = [topic_name]
    else:
        members = admin.consumer_connections(group_name)
        subscribed = {topic for one in members for topic in one.consumer.subscriptions}
        topics = [*sorted(subscribed), retry_topic(group_name)]
    message = _message_of(admin, topics, message_id)
    outcome = admin.consume_directly(group_name, message, member)
    fields = {"topic": message.topic, "message_id": message.message_id, **asdict(outcome)}
    return fields_result(fields, failed=outcome.status != "CONSUME_SUCCESS")


def _message_of(admin: Admin, topics: list[str], message_id: str) -> Any:
    for topic in topics:
        try:
            found = admin.query_by_id(topic, message_id)
        except TopicNotExistError:
            if len(topics) == 1:
                raise
            continue  # a group without retries has no retry topic
        if found:
            return found[0]
    raise InvalidArgumentError(
        f"message {message_id} is not in topic {', '.join(topics)}; name the message's topic with --topic"
    )


def _as_json(info: RunningInfo) -> dict[str, Any]:
    value = asdict(info)
    for queue, row in zip(info.queues, value["queues"], strict=True):
        row["queue"] = str(queue.queue)
    return value


def _shown(info: RunningInfo) -> list[str | Table]:
    """Return the live state of a consumer group's member as texts and tables."""
    state = " suspended" if info.suspended else ""
    shown: list[str | Table] = [
        f"{info.member or info.client_id}: {info.consume_type} {info.message_model}{state}, client {info.client_id}"
    ]
    if info.trouble:
        shown.append(f"  trouble: {info.trouble.strip()}")
    if info.consumed is not None:
        shown.append(f"  {info.consumed} consumed, {info.failures} failed")
    if info.queues:
        rows = [
            [
                *(str(one.queue), one.state, one.fetch_offset, one.commit_offset, one.committed_offset),
                *(one.buffered, one.buffered_bytes, one.in_flight, one.trouble.strip().rpartition("\n")[2]),
            ]
            for one in info.queues
        ]
        shown.append(Table(_QUEUE_COLUMNS, rows))
    if info.rates:
        names = sorted({name for figures in info.rates.values() for name in figures})
        figures = [[topic, *(round(of.get(name, 0.0), 1) for name in names)] for topic, of in info.rates.items()]
        shown.append(Table(["topic", *names], figures))
    for stack in info.stacks:
        shown += [f"  thread {stack.name}", *(f"    {frame}" for frame in stack.frames)]
    return shown
