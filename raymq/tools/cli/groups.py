"""`raymq group`: consumer groups, their offsets, configuration, members and statistics."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from raymq.common.delay import parse_time
from raymq.common.numbers import number_of_text
from raymq.common.places import parse_queue
from raymq.common.protocol.group import RETRY_MAX_TIMES, RETRY_QUEUE_NUMS
from raymq.tools.cli.known_names import completes, gone, saw, saw_all
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Group,
    address_option,
    client_of,
    duration,
    json_option,
    print_fields,
    print_rows,
    print_stats,
    print_value,
    say,
    table,
)


@click.group(cls=Group)
def group() -> None:
    """List, describe, change and delete consumer groups, and move their offsets."""


@group.command("list")
@address_option
@json_option
def group_list(address: str | None, as_json: bool) -> None:
    """List consumer groups. Example: raymq group list"""
    with client_of(address) as client:
        groups = client.admin.list_groups()
    saw_all("groups", groups)
    print_value(as_json, {"groups": groups}, lambda: table(["group"], [[name] for name in groups]))


@group.command("describe")
@click.argument("name", shell_complete=completes("groups"))
@address_option
@json_option
def group_describe(name: str, address: str | None, as_json: bool) -> None:
    """Show a group's offset and lag in each queue, its retries that wait, and its dead letters.

    `behind` is how long ago the first message was stored that is not consumed yet; `in_flight` counts the messages that
    simple consumers have received and not acknowledged.

    Example: raymq group describe billing
    """
    with client_of(address) as client:
        summary = client.admin.group_summary(name)
    saw("groups", name)
    rows = [
        [p.queue.topic, p.queue.broker_name, p.queue.queue_id, p.committed, p.max_offset, p.lag, p.in_flight, p.lag_ms]
        for p in summary.queues
    ]
    names = ["topic", "broker", "queue", "committed", "max_offset", "lag", "in_flight", "lag_ms"]
    value = {
        "queues": [dict(zip(names, row, strict=True)) for row in rows],
        "lag": summary.lag,
        "lag_ms": summary.lag_ms,
        "retry_lag": summary.retry_lag,
        "dead_letters": summary.dead_letters,
    }

    def show() -> None:
        text = [[*row[:-1], duration(row[-1])] for row in rows]
        in_flight = sum(p.in_flight for p in summary.queues)
        footer = ["total", "", "", "", "", summary.lag, in_flight, duration(summary.lag_ms)]
        table([*names[:-1], "behind"], text, footer if rows else None)
        say(f"{summary.retry_lag} wait to be tried again, {summary.dead_letters} dead letters")

    print_value(as_json, value, show)


@group.command("reset-offset")
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option("--to", "target", required=True, help="earliest, latest, an offset, or a time: ISO 8601, or -2h, -30m.")
@click.option("--queue", "queue_text", metavar="BROKER:QUEUE", help="Only this queue, for example broker-a:3.")
@click.option("--dry-run", is_flag=True, help="Only show the offsets before and after.")
@address_option
@json_option
def group_reset_offset(
    name: str, topic_name: str, target: str, queue_text: str | None, dry_run: bool, address: str | None, as_json: bool
) -> None:
    """Have a group go on from another offset in a topic, also while its consumers run.

    Example: raymq group reset-offset billing orders --to -2h
    """
    arguments = _reset_arguments(target)
    queue = None if queue_text is None else parse_queue(topic_name, queue_text)
    with client_of(address) as client:
        offsets = client.admin.reset_offsets(name, topic_name, queue=queue, dry_run=dry_run, **arguments)
    rows = [
        [queue.broker_name, queue.queue_id, offsets.old[queue], offset] for queue, offset in sorted(offsets.items())
    ]
    print_rows(as_json, "queues", ["broker", "queue", "old", "offset"], rows)


@group.command("clone-offsets")
@click.argument("source", metavar="FROM", shell_complete=completes("groups"))
@click.argument("target", metavar="TO", shell_complete=completes("groups"))
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option("--dry-run", is_flag=True, help="Only show the offsets before and after.")
@address_option
@json_option
def group_clone_offsets(
    source: str, target: str, topic_name: str, dry_run: bool, address: str | None, as_json: bool
) -> None:
    """Have the group TO go on in a topic from the offsets of the group FROM, also while its consumers run.

    Example: raymq group clone-offsets billing billing-2 orders --dry-run
    """
    with client_of(address) as client:
        offsets = client.admin.clone_offsets(source, target, topic_name, dry_run=dry_run)
    rows = [[one.broker_name, one.queue_id, offsets.old[one], offset] for one, offset in sorted(offsets.items())]
    print_rows(as_json, "queues", ["broker", "queue", "old", "offset"], rows)


@group.command("delete-offsets")
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option("--dry-run", is_flag=True, help="Only show the offsets that would be dropped.")
@address_option
@json_option
def group_delete_offsets(name: str, topic_name: str, dry_run: bool, address: str | None, as_json: bool) -> None:
    """Drop what a group has committed in a topic that it consumes no more, so that it has no lag there.

    It is refused while a consumer of the group subscribes to the topic. Brokers do it by themselves once the messages
    behind the offsets are deleted.

    Example: raymq group delete-offsets billing orders --dry-run
    """
    with client_of(address) as client:
        offsets = client.admin.delete_offsets(name, topic_name, dry_run=dry_run)
    rows = [[one.broker_name, one.queue_id, offset] for one, offset in sorted(offsets.items())]
    print_rows(as_json, "queues", ["broker", "queue", "dropped"], rows)


@group.command("forbid")
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@click.argument("topic_name", metavar="[TOPIC]", required=False, shell_complete=completes("topics"))
@address_option
@json_option
def group_forbid(name: str, topic_name: str | None, address: str | None, as_json: bool) -> None:
    """Forbid a group to read a topic, until `raymq group allow`; without a topic, show what is forbidden.

    Its consumers commit what they have consumed of the topic and stop soon after.

    Example: raymq group forbid billing orders
    """
    with client_of(address) as client:
        if topic_name is not None:
            client.admin.forbid(name, topic_name)
        _print_forbidden(as_json, name, client.admin.forbidden_topics(name))


@group.command("allow")
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@address_option
@json_option
def group_allow(name: str, topic_name: str, address: str | None, as_json: bool) -> None:
    """Allow a group to read a topic again; its consumers go on where they stopped.

    Example: raymq group allow billing orders
    """
    with client_of(address) as client:
        client.admin.allow(name, topic_name)
        _print_forbidden(as_json, name, client.admin.forbidden_topics(name))


def _print_forbidden(as_json: bool, name: str, topics: list[str]) -> None:
    said = f"group {name} may not read {', '.join(topics)}" if topics else f"group {name} may read every topic"
    print_value(as_json, {"group": name, "forbidden": topics}, lambda: say(said))


@group.command("update")
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@click.option(
    "--retry-max-times", type=NumberType(RETRY_MAX_TIMES), help="Deliveries after the first, before a dead letter."
)
@click.option(
    "--retry-queues",
    "retry_queue_nums",
    type=NumberType(RETRY_QUEUE_NUMS),
    help="Queues of its retry topic per broker.",
)
@click.option("--consume/--no-consume", "consume_enable", default=None, help="Whether it may consume at all.")
@click.option(
    "--broadcast/--no-broadcast",
    "consume_broadcast_enable",
    default=None,
    help="Whether it may consume in BROADCASTING.",
)
@address_option
@json_option
def group_update(name: str, address: str | None, as_json: bool, **changes: Any) -> None:
    """Change a group's configuration; without a change, show it.

    Example: raymq group update billing --retry-max-times 5
    """
    wanted = {key: value for key, value in changes.items() if value is not None}
    with client_of(address) as client:
        config = client.admin.update_group(name, **wanted) if wanted else client.admin.group_config(name)
    print_fields(as_json, asdict(config))


@group.command("members")
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@address_option
@json_option
def group_members(name: str, address: str | None, as_json: bool) -> None:
    """Show a group's consumers and where they run. Example: raymq group members billing"""
    with client_of(address) as client:
        connections = client.admin.consumer_connections(name)
    rows = [
        [c.client_id, c.host, c.pid, c.consumer.consume_type, c.consumer.message_model.value, round(c.silent_s, 1)]
        for c in connections
    ]
    print_rows(as_json, "members", ["client", "host", "pid", "type", "model", "silent_s"], rows)


@group.command("stats")
@click.argument("name", metavar="GROUP", shell_complete=completes("groups"))
@address_option
@json_option
def group_stats(name: str, address: str | None, as_json: bool) -> None:
    """Show how much a group consumes and gives back, by topic. Example: raymq group stats billing"""
    with client_of(address) as client:
        stats = client.admin.group_stats(name)
    counters = [
        counter
        for topic, one in stats.items()
        for counter in ((f"{topic} consumed", one.messages), (f"{topic} sent back", one.sent_back))
    ]
    print_stats(as_json, counters)


@group.command("delete")
@click.argument("name", shell_complete=completes("groups"))
@click.confirmation_option(prompt="Forget the group and its offsets?")
@address_option
def group_delete(name: str, address: str | None) -> None:
    """Forget a group and its offsets. Example: raymq group delete billing --yes"""
    with client_of(address) as client:
        client.admin.delete_group(name)
    gone("groups", name)
    say(f"group {name} is deleted")


def _reset_arguments(text: str) -> dict[str, Any]:
    """The value of `--to` as arguments of Admin.reset_offsets."""
    if text in ("earliest", "latest"):
        return {"to": text}
    if text.isdecimal():
        return {"offset": number_of_text("--to", text)}
    return {"timestamp_ms": parse_time(text, time.time_ns() // 1_000_000)}
