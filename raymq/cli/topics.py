"""`raymq topic`: topics, their queues, permissions and statistics."""

from __future__ import annotations

from typing import Final

import click

from raymq.cli.output import (
    Group,
    address_option,
    client_of,
    json_option,
    print_rows,
    print_stats,
    print_value,
    say,
    table,
)
from raymq.protocol.route import PERM_READ, PERM_WRITE

_PERMISSIONS: Final = {"R": PERM_READ, "W": PERM_WRITE}


@click.group(cls=Group)
def topic() -> None:
    """Create, list, describe, change and delete topics."""


@topic.command("create")
@click.argument("name")
@click.option("--queues", type=int, default=4, show_default=True, help="Queues in all, shared by the broker groups.")
@address_option
@json_option
def topic_create(name: str, queues: int, address: str | None, as_json: bool) -> None:
    """Create a topic. Example: raymq topic create orders --queues 8"""
    with client_of(address) as client:
        client.admin.create_topic(name, queues)
    print_value(as_json, {"topic": name, "queues": queues}, lambda: say(f"topic {name} has {queues} queues"))


@topic.command("list")
@click.option("--internal", is_flag=True, help="Also retry, dead-letter and system topics.")
@address_option
@json_option
def topic_list(internal: bool, address: str | None, as_json: bool) -> None:
    """List topics. Example: raymq topic list --json"""
    with client_of(address) as client:
        topics = client.admin.list_topics(internal=internal)
    print_value(as_json, {"topics": topics}, lambda: table(["topic"], [[name] for name in topics]))


@topic.command("describe")
@click.argument("name")
@address_option
@json_option
def topic_describe(name: str, address: str | None, as_json: bool) -> None:
    """Show a topic's queues and the offsets they hold. Example: raymq topic describe orders"""
    with client_of(address) as client:
        queues = client.admin.describe_topic(name)
    rows = [[q.queue.broker_name, q.queue.queue_id, q.min_offset, q.max_offset, q.messages] for q in queues]
    names = ["broker", "queue", "min_offset", "max_offset", "messages"]
    print_rows(as_json, "queues", names, rows, total=4)


@topic.command("update")
@click.argument("name")
@click.option("--queues", type=int, help="Queues in all: more than there are, never fewer.")
@click.option("--perm", type=click.Choice(["R", "W", "RW"]), help="What may be done with it.")
@address_option
@json_option
def topic_update(name: str, queues: int | None, perm: str | None, address: str | None, as_json: bool) -> None:
    """Give a topic more queues, or another permission. Example: raymq topic update orders --queues 16"""
    if queues is None and perm is None:
        raise click.UsageError("say what to change: --queues or --perm")
    bits = None if perm is None else sum(_PERMISSIONS[letter] for letter in perm)
    with client_of(address) as client:
        client.admin.update_topic(name, queues=queues, perm=bits)
    changed = {"queues": queues, "perm": perm}
    text = ", ".join(f"{key} {value}" for key, value in changed.items() if value is not None)
    print_value(as_json, {"topic": name, **changed}, lambda: say(f"topic {name} has {text} now"))


@topic.command("order")
@click.argument("name")
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


@topic.command("stats")
@click.argument("name")
@address_option
@json_option
def topic_stats(name: str, address: str | None, as_json: bool) -> None:
    """Show how much is sent to a topic. Example: raymq topic stats orders"""
    with client_of(address) as client:
        stats = client.admin.topic_stats(name)
    print_stats(as_json, [("messages", stats.messages), ("bytes", stats.bytes)])


@topic.command("delete")
@click.argument("name")
@click.confirmation_option(prompt="Delete the topic and all its messages?")
@address_option
def topic_delete(name: str, address: str | None) -> None:
    """Delete a topic and its messages. Example: raymq topic delete orders --yes"""
    with client_of(address) as client:
        client.admin.delete_topic(name)
    say(f"topic {name} is deleted")
