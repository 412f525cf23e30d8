"""`raymq topic`: commands that manage topics, their queues, permissions and statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from raymq.common.delay import parse_duration_ms
from raymq.common.protocol.attributes import CLEANUP_POLICY, MESSAGE_TYPE, RESERVE_TIME, QueueType, TopicMessageType
from raymq.common.protocol.bounds import (
    BACKLOG_MAX_BYTES,
    BACKLOG_MAX_MESSAGES,
    MAX_BACKLOG,
    MAX_BACKLOG_BYTES,
    BacklogPolicy,
)
from raymq.common.protocol.route import PERM_READ, PERM_WRITE, QUEUES
from raymq.tools.cli.entry import cli
from raymq.tools.cli.known_names import forget_name, remember_all_names, remember_name
from raymq.tools.cli.options import ParsedType, given_options, number_option, topic_argument
from raymq.tools.cli.terminal.command import CommandResult, command, rows_result, stats_result
from raymq.tools.cli.terminal.output import Table

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.client.cluster.launcher import ProgressCallback

_PERMISSIONS: Final = {"R": PERM_READ, "W": PERM_WRITE}

_SHOWN: Final = (MESSAGE_TYPE, RESERVE_TIME, CLEANUP_POLICY, BACKLOG_MAX_MESSAGES, BACKLOG_MAX_BYTES)
"""The topic attributes that `raymq topic list` shows."""

type_option = click.option(
    "--type",
    "message_type",
    type=click.Choice([str(one).lower() for one in TopicMessageType], case_sensitive=False),
    help="The messages that the topic accepts; unspecified and mixed accept all.",
)


def _retention(text: str) -> str:
    """Return the value of the option --retention, if it is a length of time or 0. Raises InvalidArgumentError."""
    _seconds(text)
    return text


def _seconds(retention: str | None) -> float | None:
    """Convert the value of the option --retention to seconds. Raises InvalidArgumentError if it is no length of
    time."""
    return None if retention is None else 0.0 if retention == "0" else parse_duration_ms(retention) / 1000


retention_option = click.option(
    "--retention",
    type=ParsedType("time", _retention),
    metavar="TIME",
    help="How long messages are kept, such as 90m, 12h or 7d; 0 for the store's retention time.",
)


def bound_options(function: Any) -> Any:
    """Add the options for a topic's bound. The command's function gets them as `max_backlog`, `max_backlog_bytes`,
    `backlog_policy` and `backlog_groups`."""
    options = [
        number_option("--max-backlog", MAX_BACKLOG, "Limit of unconsumed messages in the topic; 0 for no limit."),
        number_option("--max-backlog-bytes", MAX_BACKLOG_BYTES, "The same limit in bytes of records; 0 for no limit."),
        click.option(
            "--backlog-policy",
            type=click.Choice([str(one) for one in BacklogPolicy], case_sensitive=False),
            help="At the limit: producers wait (block, the default), sends fail (refuse), or groups skip their oldest "
            "messages (drop).",
        ),
        click.option(
            "--backlog-groups",
            metavar="GROUP,GROUP",
            help="The consumer groups whose backlogs count. Without groups all stored messages count.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _groups(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


@cli.group()
def topic() -> None:
    """Create, list, describe, change and delete topics."""


@command(topic, "create")
@click.argument("topic_name", metavar="TOPIC")
@number_option(
    "--queues",
    QUEUES,
    "Number of queues in total, over all broker groups. Default: 4; for --type priority, 10 in each broker group.",
)
@type_option
@click.option(
    "--queue-type",
    type=click.Choice([one.name.lower() for one in QueueType], case_sensitive=False),
    help="batch: messages that are sent together are stored as one record.",
)
@retention_option
@click.option(
    "--cleanup", type=click.Choice(["delete", "compaction"]), help="compaction: keep the newest message of each key."
)
@bound_options
@click.option(
    "--brokers", help="Create queues only on these broker groups, such as broker-a,broker-b. Default: on all."
)
def topic_create(
    admin: Admin,
    topic_name: str,
    queues: int | None,
    message_type: str | None,
    queue_type: str | None,
    retention: str | None,
    cleanup: str | None,
    max_backlog: int | None,
    max_backlog_bytes: int | None,
    backlog_policy: str | None,
    backlog_groups: str | None,
    brokers: str | None,
) -> CommandResult:
    """Create a topic. Example: raymq topic create orders --queues 8 --type fifo --retention 12h"""
    options = given_options(
        message_type=message_type,
        queue_type=queue_type,
        reserve_time_s=_seconds(retention),
        cleanup_policy=cleanup,
        max_backlog=max_backlog,
        max_backlog_bytes=max_backlog_bytes,
        backlog_policy=backlog_policy,
        backlog_groups=_groups(backlog_groups),
        brokers=None if brokers is None else [name.strip() for name in brokers.split(",") if name.strip()],
    )
    admin.create_topic(topic_name, queues, **options)
    route = admin.topic_route(topic_name)
    attributes, count = route.attributes.mapping(), sum(route.queue_counts().values())
    remember_name("topics", topic_name)
    text = "".join(f", {key} {value}" for key, value in attributes.items())
    return CommandResult(
        {"topic": topic_name, "queues": count, "attributes": attributes},
        f"topic {topic_name} has {count} queues{text}",
    )


@command(topic, "list")
@click.option("--internal", is_flag=True, help="Also list retry, dead-letter and system topics.")
def topic_list(admin: Admin, internal: bool) -> CommandResult:
    """List topics. Example: raymq topic list --json"""
    topics = admin.list_topics(internal=internal)
    remember_all_names("topics", topics)
    attributes = {name: values.mapping() for name, values in admin.topic_attributes(topics).items()}
    rows = [[name, *(attributes.get(name, {}).get(key, "") for key in _SHOWN)] for name in topics]
    value = {"topics": topics, "attributes": {name: found for name, found in attributes.items() if found}}
    return CommandResult(value, Table(["topic", *_SHOWN], rows))


@command(topic, "describe")
@topic_argument
def topic_describe(admin: Admin, topic_name: str) -> CommandResult:
    """Show the offsets of each of a topic's queues. Example: raymq topic describe orders"""
    queues = admin.describe_topic(topic_name)
    remember_name("topics", topic_name)
    attributes = admin.topic_route(topic_name).attributes.mapping()
    rows = [[q.queue.broker_name, q.queue.queue_id, q.min_offset, q.max_offset, q.messages] for q in queues]
    names = ["broker", "queue", "min_offset", "max_offset", "messages"]
    result = rows_result("queues", names, rows, total=4, more={"attributes": attributes})
    return CommandResult(result.value, *(f"{key} {text}" for key, text in attributes.items()), *result.shown)


@command(topic, "update")
@topic_argument
@number_option("--queues", QUEUES, "Number of queues in total; it cannot shrink.")
@click.option("--perm", type=click.Choice(["R", "W", "RW"]), help="Allow reads (R), writes (W) or both.")
@type_option
@retention_option
@bound_options
def topic_update(
    admin: Admin,
    topic_name: str,
    queues: int | None,
    perm: str | None,
    message_type: str | None,
    retention: str | None,
    max_backlog: int | None,
    max_backlog_bytes: int | None,
    backlog_policy: str | None,
    backlog_groups: str | None,
) -> CommandResult:
    """Add queues to a topic, or change what it accepts. Example: raymq topic update orders --queues 16 --type fifo"""
    bound: dict[str, Any] = {
        "max_backlog": max_backlog,
        "max_backlog_bytes": max_backlog_bytes,
        "backlog_policy": backlog_policy,
        "backlog_groups": backlog_groups,
    }
    given = {"queues": queues, "perm": perm, "type": message_type, "retention": retention, **bound}
    changed = given_options(**given)
    if not changed:
        raise click.UsageError(
            "nothing to change: pass at least one of --queues, --perm, --type, --retention and --max-backlog"
        )
    bits = None if perm is None else sum(_PERMISSIONS[letter] for letter in perm)
    bound["backlog_groups"] = _groups(backlog_groups)
    options = given_options(
        queues=queues, perm=bits, message_type=message_type, reserve_time_s=_seconds(retention), **bound
    )
    admin.update_topic(topic_name, **options)
    text = ", ".join(f"{key} {value}" for key, value in changed.items())
    return CommandResult({"topic": topic_name, **given}, f"topic {topic_name} has {text} now")


@command(topic, "order")
@topic_argument
@click.argument("config", required=False)
@click.option("--clear", is_flag=True, help="Make the topic an ordinary topic again.")
def topic_order(admin: Admin, topic_name: str, config: str | None, clear: bool) -> CommandResult:
    """Show, set or clear the queues of an order topic. Producers use these queues even while a broker is down.

    Example: raymq topic order orders "broker-a:4;broker-b:4"
    """
    if config is not None and clear:
        raise click.UsageError("pass either CONFIG or --clear")
    if config is not None or clear:
        admin.set_order_config(topic_name, config)
    now = admin.order_config(topic_name)
    text = f"topic {topic_name} is written to {now}" if now else f"topic {topic_name} is not an order topic"
    return CommandResult({"topic": topic_name, "order_config": now}, text)


@command(topic, "light-queues")
@click.argument("pattern", default="*")
def topic_light_queues(admin: Admin, pattern: str) -> CommandResult:
    """List the light queues whose names match PATTERN, with their numbers of messages.

    Consume a light queue as topic %LMQ%NAME. Example: raymq topic light-queues "alice*"
    """
    return rows_result("light_queues", ["name", "messages"], admin.light_queues(pattern).items(), total=1)


@command(topic, "stats")
@topic_argument
def topic_stats(admin: Admin, topic_name: str) -> CommandResult:
    """Show how many messages and bytes are sent to a topic. Example: raymq topic stats orders"""
    stats = admin.topic_stats(topic_name)
    return stats_result([("messages", stats.messages), ("bytes", stats.bytes)])


@command(topic, "delete")
@topic_argument
@click.confirmation_option(prompt="Delete the topic and all its messages?")
def topic_delete(admin: Admin, progress: ProgressCallback, topic_name: str) -> CommandResult:
    """Delete a topic and its messages. Example: raymq topic delete orders --yes"""
    progress(f"deleting {topic_name}")
    admin.delete_topic(topic_name)
    forget_name("topics", topic_name)
    return CommandResult({"deleted": topic_name}, f"topic {topic_name} is deleted")
