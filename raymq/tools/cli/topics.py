"""`raymq topic`: topics, their queues, permissions and statistics."""

from __future__ import annotations

from typing import Final

import click

from raymq.common.delay import parse_delay_levels
from raymq.common.protocol.attributes import CLEANUP_POLICY, MESSAGE_TYPE, RESERVE_TIME, QueueType, TopicMessageType
from raymq.common.protocol.route import PERM_READ, PERM_WRITE, QUEUES
from raymq.tools.cli.known_names import completes, gone, saw, saw_all
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Group,
    address_option,
    client_of,
    json_option,
    print_rows,
    print_stats,
    print_value,
    quiet_option,
    say,
    table,
)
from raymq.tools.cli.terminal.progress import steps

_PERMISSIONS: Final = {"R": PERM_READ, "W": PERM_WRITE}

_SHOWN: Final = (MESSAGE_TYPE, RESERVE_TIME, CLEANUP_POLICY)
"""The attributes that a list of topics shows."""

type_option = click.option(
    "--type",
    "message_type",
    type=click.Choice([str(one).lower() for one in TopicMessageType], case_sensitive=False),
    help="The messages that it takes; unspecified and mixed take all.",
)

retention_option = click.option(
    "--retention", help="How long its messages are kept, such as 90m, 12h or 7d; 0 for the store's own time."
)


def _seconds(retention: str | None) -> float | None:
    return None if retention is None else 0.0 if retention == "0" else parse_delay_levels(retention)[0] / 1000


queue_type_option = click.option(
    "--queue-type",
    type=click.Choice([one.name.lower() for one in QueueType], case_sensitive=False),
    help="batch: messages that are sent together are stored as one record.",
)


@click.group(cls=Group)
def topic() -> None:
    """Create, list, describe, change and delete topics."""


@topic.command("create")
@click.argument("name")
@click.option(
    "--queues",
    type=NumberType(QUEUES),
    default=4,
    show_default=True,
    help="Queues in all, shared by the broker groups.",
)
@type_option
@queue_type_option
@retention_option
@click.option(
    "--cleanup", type=click.Choice(["delete", "compaction"]), help="compaction: the newest of each key stays."
)
@click.option("--brokers", help="Only on these broker groups, such as broker-a,broker-b. Default: on all.")
@address_option
@json_option
def topic_create(
    name: str,
    queues: int,
    message_type: str | None,
    queue_type: str | None,
    retention: str | None,
    cleanup: str | None,
    brokers: str | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Create a topic. Example: raymq topic create orders --queues 8 --type fifo --retention 12h"""
    options = {
        "message_type": message_type,
        "queue_type": queue_type,
        "reserve_time_s": _seconds(retention),
        "cleanup_policy": cleanup,
        "brokers": None if brokers is None else [name.strip() for name in brokers.split(",") if name.strip()],
    }
    with client_of(address) as client:
        client.admin.create_topic(name, queues, **{key: value for key, value in options.items() if value is not None})
        attributes = client.admin.topic_route(name).attributes.mapping()
    saw("topics", name)
    text = "".join(f", {key} {value}" for key, value in attributes.items())
    value = {"topic": name, "queues": queues, "attributes": attributes}
    print_value(as_json, value, lambda: say(f"topic {name} has {queues} queues{text}"))


@topic.command("list")
@click.option("--internal", is_flag=True, help="Also retry, dead-letter and system topics.")
@address_option
@json_option
def topic_list(internal: bool, address: str | None, as_json: bool) -> None:
    """List topics. Example: raymq topic list --json"""
    with client_of(address) as client:
        topics = client.admin.list_topics(internal=internal)
        saw_all("topics", topics)
        attributes = {name: values.mapping() for name, values in client.admin.topic_attributes(topics).items()}
    rows = [[name, *(attributes.get(name, {}).get(key, "") for key in _SHOWN)] for name in topics]
    value = {"topics": topics, "attributes": {name: found for name, found in attributes.items() if found}}
    print_value(as_json, value, lambda: table(["topic", *_SHOWN], rows))


@topic.command("describe")
@click.argument("name", shell_complete=completes("topics"))
@address_option
@json_option
def topic_describe(name: str, address: str | None, as_json: bool) -> None:
    """Show a topic's queues and the offsets they hold. Example: raymq topic describe orders"""
    with client_of(address) as client:
        queues = client.admin.describe_topic(name)
        saw("topics", name)
        attributes = client.admin.topic_route(name).attributes.mapping()
    rows = [[q.queue.broker_name, q.queue.queue_id, q.min_offset, q.max_offset, q.messages] for q in queues]
    names = ["broker", "queue", "min_offset", "max_offset", "messages"]
    for key, text in () if as_json else attributes.items():
        say(f"{key} {text}")
    print_rows(as_json, "queues", names, rows, total=4, more={"attributes": attributes})


@topic.command("update")
@click.argument("name", shell_complete=completes("topics"))
@click.option(
    "--queues",
    type=NumberType(QUEUES),
    help="Queues in all: more than there are, never fewer.",
)
@click.option("--perm", type=click.Choice(["R", "W", "RW"]), help="What may be done with it.")
@type_option
@retention_option
@address_option
@json_option
def topic_update(
    name: str,
    queues: int | None,
    perm: str | None,
    message_type: str | None,
    retention: str | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Give a topic more queues, or change what it takes. Example: raymq topic update orders --queues 16 --type fifo"""
    given = {"queues": queues, "perm": perm, "type": message_type, "retention": retention}
    changed = {key: value for key, value in given.items() if value is not None}
    if not changed:
        raise click.UsageError("say what to change: --queues, --perm, --type or --retention")
    bits = None if perm is None else sum(_PERMISSIONS[letter] for letter in perm)
    reserve_time_s = _seconds(retention)
    options = {"queues": queues, "perm": bits, "message_type": message_type, "reserve_time_s": reserve_time_s}
    with client_of(address) as client:
        client.admin.update_topic(name, **{key: value for key, value in options.items() if value is not None})
    text = ", ".join(f"{key} {value}" for key, value in changed.items())
    print_value(as_json, {"topic": name, **given}, lambda: say(f"topic {name} has {text} now"))


@topic.command("order")
@click.argument("name", shell_complete=completes("topics"))
@click.argument("config", required=False)
@click.option("--clear", is_flag=True, help="Make it an ordinary topic again.")
@address_option
@json_option
def topic_order(name: str, config: str | None, clear: bool, address: str | None, as_json: bool) -> None:
    """Show, set or clear the queues that an order topic is written to, also while one of the brokers is away.

    Example: raymq topic order orders "broker-a:4;broker-b:4"
    """
    if config is not None and clear:
        raise click.UsageError("give CONFIG or --clear, not both")
    with client_of(address) as client:
        if config is not None or clear:
            client.admin.set_order_config(name, config)
        now = client.admin.order_config(name)
    text = f"topic {name} is written to {now}" if now else f"topic {name} is no order topic"
    print_value(as_json, {"topic": name, "order_config": now}, lambda: say(text))


@topic.command("light-queues")
@click.argument("pattern", default="*")
@address_option
@json_option
def topic_light_queues(pattern: str, address: str | None, as_json: bool) -> None:
    """List the light queues whose names match PATTERN, and the messages that they hold. Consume one as topic
    %LMQ%NAME.

    Example: raymq topic light-queues "alice*"
    """
    with client_of(address) as client:
        rows = list(client.admin.light_queues(pattern).items())
    print_rows(as_json, "light_queues", ["name", "messages"], [list(row) for row in rows], total=1)


@topic.command("stats")
@click.argument("name", shell_complete=completes("topics"))
@address_option
@json_option
def topic_stats(name: str, address: str | None, as_json: bool) -> None:
    """Show how much is sent to a topic. Example: raymq topic stats orders"""
    with client_of(address) as client:
        stats = client.admin.topic_stats(name)
    print_stats(as_json, [("messages", stats.messages), ("bytes", stats.bytes)])


@topic.command("delete")
@click.argument("name", shell_complete=completes("topics"))
@click.confirmation_option(prompt="Delete the topic and all its messages?")
@address_option
@quiet_option
def topic_delete(name: str, address: str | None) -> None:
    """Delete a topic and its messages. Example: raymq topic delete orders --yes"""
    with client_of(address) as client, steps() as progress:
        progress(f"deleting {name}")
        client.admin.delete_topic(name)
    gone("topics", name)
    say(f"topic {name} is deleted")
