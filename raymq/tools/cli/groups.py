"""`raymq group`: commands that manage consumer groups: their offsets, configuration, members and statistics."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from raymq.common.delay import parse_time
from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import number_of_text
from raymq.common.protocol.group import ORDERED, RETRY_MAX_TIMES, RETRY_QUEUE_NUMS, intervals_text, parse_intervals
from raymq.tools.cli.entry import cli
from raymq.tools.cli.known_names import completes, forget_name, remember_all_names, remember_name
from raymq.tools.cli.options import (
    ParsedType,
    given_options,
    group_argument,
    number_option,
    queue_of,
    queue_option,
    topic_argument,
)
from raymq.tools.cli.terminal.command import CommandResult, command, rows_result, stats_result
from raymq.tools.cli.terminal.output import Table, duration

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.client.admin.groups import NewOffsets
    from raymq.common.message import MessageQueue
    from raymq.common.protocol.group import GroupConfig

dry_run_option = click.option("--dry-run", is_flag=True, help="Only show the offsets before and after.")


def settings_options(function: Any) -> Any:
    """Add the options for the settings of a group (GroupConfig). An option that the user does not give is None."""
    for add in (
        click.option(
            "--broadcast/--no-broadcast",
            "consume_broadcast_enable",
            default=None,
            help="Allow or forbid consumers with BROADCASTING.",
        ),
        click.option("--consume/--no-consume", "consume_enable", default=None, help="Allow or forbid all consumption."),
        number_option(
            "--retry-queues",
            RETRY_QUEUE_NUMS,
            "Number of queues of the retry topic per broker group.",
            name="retry_queue_nums",
        ),
        number_option(
            "--retry-max-times", RETRY_MAX_TIMES, "Maximum number of retries before a message becomes a dead letter."
        ),
        click.option(
            "--retry-intervals",
            "retry_intervals_s",
            type=ParsedType("times", parse_intervals),
            metavar="TIMES",
            help="Time before each retry: a list such as 10s,30s,5m, whose last time repeats; 1s*2..10m, which "
            "doubles up to 10m; or default.",
        ),
        click.option(
            "--ordered",
            type=click.Choice(list(ORDERED)),
            default=None,
            help="Order mode of simple consumers; by-topic (default): in topics of message type FIFO.",
        ),
    ):
        function = add(function)
    return function


@cli.group()
def group() -> None:
    """Create, list, describe, change and delete consumer groups, and move their offsets."""


@command(group, "create")
@click.argument("group_name", metavar="GROUP")
@settings_options
def group_create(admin: Admin, group_name: str, **settings: Any) -> CommandResult:
    """Create a consumer group before its first consumer starts, for example if brokers create no groups by themselves.

    Example: raymq group create billing --retry-max-times 5
    """
    admin.create_group(group_name, **_given(**settings))
    remember_name("groups", group_name)
    return _config_result(admin.group_config(group_name))


@command(group, "list")
def group_list(admin: Admin) -> CommandResult:
    """List consumer groups. Example: raymq group list"""
    groups = admin.list_groups()
    remember_all_names("groups", groups)
    return CommandResult({"groups": groups}, Table(["group"], [[name] for name in groups]))


@command(group, "describe")
@group_argument
def group_describe(admin: Admin, group_name: str) -> CommandResult:
    """Show a group's offset and lag in each queue, its waiting retries, and its dead letters.

    `behind` is the age of the oldest message that the group has not consumed. `in_flight` is the number of messages
    that simple consumers have received and not acknowledged.

    Example: raymq group describe billing
    """
    summary = admin.group_summary(group_name)
    remember_name("groups", group_name)
    rows = [
        [p.queue.topic, p.queue.broker_name, p.queue.queue_id, p.committed, p.max_offset, p.lag, p.in_flight, p.lag_ms]
        for p in summary.queues
    ]
    names = ["topic", "broker", "queue", "committed", "max_offset", "lag", "in_flight", "lag_ms"]
    in_flight = sum(p.in_flight for p in summary.queues)
    text = [[*row[:-1], duration(p.lag_ms)] for row, p in zip(rows, summary.queues, strict=True)]
    footer = ["total", "", "", "", "", summary.lag, in_flight, duration(summary.lag_ms)]
    return CommandResult(
        {
            "queues": Table(names, rows).objects(),
            "lag": summary.lag,
            "lag_ms": summary.lag_ms,
            "retry_lag": summary.retry_lag,
            "dead_letters": summary.dead_letters,
        },
        Table([*names[:-1], "behind"], text, footer if rows else None),
        f"{summary.retry_lag} messages wait for a retry, {summary.dead_letters} dead letters",
    )


def _reset_arguments(text: str) -> dict[str, Any]:
    """Convert the value of the option `--to` into keyword arguments of Admin.reset_offsets."""
    if text in ("earliest", "latest"):
        return {"to": text}
    if text.isdecimal():
        return {"offset": number_of_text("--to", text)}
    try:
        return {"timestamp_ms": parse_time(text, time.time_ns() // 1_000_000)}
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}, earliest, latest or an offset") from None


@command(group, "reset-offset")
@group_argument
@topic_argument
@click.option(
    "--to",
    "target",
    required=True,
    type=ParsedType("target", _reset_arguments),
    metavar="TARGET",
    help="earliest, latest, an offset, or a time: ISO 8601, or -2h, -30m.",
)
@queue_option
@dry_run_option
def group_reset_offset(
    admin: Admin,
    group_name: str,
    topic_name: str,
    target: dict[str, Any],
    queue: MessageQueue | None,
    dry_run: bool,
) -> CommandResult:
    """Move a group's offsets in a topic, also while the group's consumers run.

    Example: raymq group reset-offset billing orders --to -2h
    """
    queue = queue_of(topic_name, queue)
    return _moved(admin.reset_offsets(group_name, topic_name, queue=queue, dry_run=dry_run, **target))


@command(group, "clone-offsets")
@click.argument("source", metavar="FROM", shell_complete=completes("groups"))
@click.argument("target", metavar="TO", shell_complete=completes("groups"))
@topic_argument
@dry_run_option
def group_clone_offsets(admin: Admin, source: str, target: str, topic_name: str, dry_run: bool) -> CommandResult:
    """Copy the offsets of group FROM in a topic to group TO. The consumers of TO may run.

    Example: raymq group clone-offsets billing billing-2 orders --dry-run
    """
    return _moved(admin.clone_offsets(source, target, topic_name, dry_run=dry_run))


def _moved(offsets: NewOffsets) -> CommandResult:
    rows = [[one.broker_name, one.queue_id, offsets.old[one], offset] for one, offset in sorted(offsets.items())]
    return rows_result("queues", ["broker", "queue", "old", "offset"], rows)


@command(group, "delete-offsets")
@group_argument
@topic_argument
@click.option("--dry-run", is_flag=True, help="Only show the offsets that would be deleted.")
def group_delete_offsets(admin: Admin, group_name: str, topic_name: str, dry_run: bool) -> CommandResult:
    """Delete a group's offsets in a topic that the group no longer consumes, so that the group has no lag there.

    Brokers refuse the deletion while a consumer of the group subscribes to the topic. They delete offsets by themselves
    after they have deleted the messages up to these offsets.

    Example: raymq group delete-offsets billing orders --dry-run
    """
    offsets = admin.delete_offsets(group_name, topic_name, dry_run=dry_run)
    rows = [[one.broker_name, one.queue_id, offset] for one, offset in sorted(offsets.items())]
    return rows_result("queues", ["broker", "queue", "dropped"], rows)


@command(group, "forbid")
@group_argument
@click.argument("topic_name", metavar="[TOPIC]", required=False, shell_complete=completes("topics"))
def group_forbid(admin: Admin, group_name: str, topic_name: str | None) -> CommandResult:
    """Forbid a group to read a topic, until `raymq group allow`. Without a topic, list the forbidden topics.

    The group's consumers commit the messages that they have consumed, and stop soon after.

    Example: raymq group forbid billing orders
    """
    if topic_name is not None:
        admin.forbid(group_name, topic_name)
    return _forbidden(admin, group_name)


@command(group, "allow")
@group_argument
@topic_argument
def group_allow(admin: Admin, group_name: str, topic_name: str) -> CommandResult:
    """Allow a group to read a topic again. The group's consumers continue at their committed offsets.

    Example: raymq group allow billing orders
    """
    admin.allow(group_name, topic_name)
    return _forbidden(admin, group_name)


def _forbidden(admin: Admin, group_name: str) -> CommandResult:
    topics = admin.forbidden_topics(group_name)
    text = f"may not read {', '.join(topics)}" if topics else "may read every topic"
    return CommandResult({"group": group_name, "forbidden": topics}, f"group {group_name} {text}")


@command(group, "update")
@group_argument
@settings_options
def group_update(admin: Admin, group_name: str, **changes: Any) -> CommandResult:
    """Change a group's configuration; without a change, show the configuration.

    Example: raymq group update billing --retry-max-times 5 --retry-intervals 10s,1m,10m
    """
    wanted = _given(**changes)
    config = admin.update_group(group_name, **wanted) if wanted else admin.group_config(group_name)
    return _config_result(config)


def _given(ordered: str | None, **settings: Any) -> Any:
    """Return the settings of a group that the user gave. The value None of `ordered` is a setting, too."""
    given = given_options(**settings)
    return given if ordered is None else {**given, "ordered": ORDERED[ordered]}


def _config_result(config: GroupConfig) -> CommandResult:
    fields = asdict(config)
    ordered = next(name for name, value in ORDERED.items() if value is config.ordered)
    shown = {**fields, "retry_intervals_s": intervals_text(config.retry_intervals_s), "ordered": ordered}
    return CommandResult(fields, Table(["field", "value"], [list(field) for field in shown.items()]))


@command(group, "members")
@group_argument
def group_members(admin: Admin, group_name: str) -> CommandResult:
    """Show a group's consumers, the hosts where they run, their libraries, and their mode: "queue" if the members share
    the group's queues, "share" if they share all messages.

    Example: raymq group members billing
    """
    names = ["client", "member", "host", "pid", "language", "version", "type", "mode", "model", "silent_s"]
    rows = [
        [
            *(c.client_id, c.consumer.member, c.host, c.pid, c.language, c.version),
            *(c.consumer.consume_type, c.consumer.consume_mode, c.consumer.message_model.value, round(c.silent_s, 1)),
        ]
        for c in admin.consumer_connections(group_name)
    ]
    return rows_result("members", names, rows)


@command(group, "stats")
@group_argument
def group_stats(admin: Admin, group_name: str) -> CommandResult:
    """Show how many messages a group consumes and sends back, by topic. Example: raymq group stats billing"""
    return stats_result(
        counter
        for topic, one in admin.group_stats(group_name).items()
        for counter in ((f"{topic} consumed", one.messages), (f"{topic} sent back", one.sent_back))
    )


@command(group, "delete")
@group_argument
@click.confirmation_option(prompt="Delete the group and its offsets?")
def group_delete(admin: Admin, group_name: str) -> CommandResult:
    """Delete a group and its offsets. Example: raymq group delete billing --yes"""
    admin.delete_group(group_name)
    forget_name("groups", group_name)
    return CommandResult({"deleted": group_name}, f"group {group_name} is deleted")
