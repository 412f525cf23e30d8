"""The command `raymq`: servers, topics, groups, and messages from a shell.

Tables are for people; every command takes `--json` for machines. Exit codes: 0 done, 1 refused or failed (one line on
standard error says why and what to do), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import click
from rich.console import Console
from rich.table import Table

from raymq.errors import InvalidArgumentError, RaymqError

JOIN_S: Final = 15.0

_out = Console()
_err = Console(stderr=True, soft_wrap=True)

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_address_option = click.option("--address", help="Ray cluster to use, host:port. Default: the one on this machine.")


def main() -> NoReturn:
    """The console script."""
    # Ray prints its raylets' messages on `sys.stdout`; what a command answers must not be mixed with them.
    _out.file = sys.stdout
    sys.stdout = sys.stderr
    if not _out.is_terminal:
        _out.width = 200  # there is no width to keep to, and a folded cell is hard to search for
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except RaymqError as error:
        _err.print(f"raymq: {error}", markup=False, highlight=False)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        _err.print("raymq: interrupted", markup=False)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="raymq", prog_name="raymq")
def cli() -> None:
    """A durable message queue inside a Ray cluster.

    \b
    raymq up                                  start it on this machine (or in the Ray cluster that runs)
    raymq topic create orders --queues 8
    echo '{"id": 17}' | raymq send orders --tags paid --key o-17
    raymq consume billing orders --max 10
    """


# Servers


@cli.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings; default: raymq.yaml here, if there is one.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where the stores are kept.")
@click.option("--broker-groups", type=int, help="How many broker groups share the queues.")
@_address_option
@_json_option
def up(
    config: Path | None, data_dir: Path | None, broker_groups: int | None, address: str | None, as_json: bool
) -> None:
    """Start raymq. Starts Ray on this machine first when none runs. Running it again changes nothing.

    Example: raymq up --data-dir /var/lib/raymq --broker-groups 2
    """
    from raymq.local_server import up as start

    with _steps(as_json) as progress:
        actors = start(config, data_dir, broker_groups, address, progress)
    _print(as_json, {"actors": actors}, lambda: _out.print(f"raymq is up: {', '.join(actors)}"))


@cli.command()
@_address_option
@_json_option
def down(address: str | None, as_json: bool) -> None:
    """Stop raymq, stores last; and Ray, if `raymq up` started it. Messages stay on disk.

    Example: raymq down
    """
    from raymq.local_server import down as stop

    with _steps(as_json) as progress:
        actors = stop(address, progress)
    _print(as_json, {"stopped": actors}, lambda: _out.print(f"raymq is down: stopped {', '.join(actors) or 'nothing'}"))


@cli.command()
@_address_option
@_json_option
def status(address: str | None, as_json: bool) -> None:
    """Show broker groups, stores, and the consumer groups that are connected.

    Exit code 1 when something that should run does not answer. Example: raymq status --json
    """
    from raymq.local_server import status as ask

    report = ask(address)
    broken = [
        entry for kind in ("brokers", "stores", "groups", "instances") for entry in report[kind] if entry["error"]
    ]
    _print(as_json, report, lambda: _print_status(report))
    if broken:
        raise click.exceptions.Exit(1)


@cli.command()
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the store here; a second run reopens it.")
@click.option("--kill/--no-kill", default=True, help="Kill one storage process while producing (default: yes).")
def demo(keep: Path | None, kill: bool) -> None:
    """Send the 336,776 flights of 2013 through raymq and check every figure against the file.

    Starts everything on this machine, kills a storage process in between, and leaves nothing behind.
    Example: raymq demo --keep /tmp/flights
    """
    from raydp_jobs.demo import run

    if not run(keep, kill=kill, console=_out):
        raise click.exceptions.Exit(1)


# Topics


@cli.group()
def topic() -> None:
    """Create, list, describe and delete topics."""


@topic.command("create")
@click.argument("name")
@click.option("--queues", type=int, default=4, show_default=True, help="Queues in all, shared by the broker groups.")
@_address_option
@_json_option
def topic_create(name: str, queues: int, address: str | None, as_json: bool) -> None:
    """Create a topic. Example: raymq topic create orders --queues 8"""
    with _client(address) as client:
        client.admin.create_topic(name, queues)
    _print(as_json, {"topic": name, "queues": queues}, lambda: _out.print(f"topic {name} has {queues} queues"))


@topic.command("list")
@_address_option
@_json_option
def topic_list(address: str | None, as_json: bool) -> None:
    """List topics. Example: raymq topic list --json"""
    with _client(address) as client:
        topics = client.admin.list_topics()
    _print(as_json, {"topics": topics}, lambda: _table(["topic"], [[name] for name in topics]))


@topic.command("describe")
@click.argument("name")
@_address_option
@_json_option
def topic_describe(name: str, address: str | None, as_json: bool) -> None:
    """Show a topic's queues and the offsets they hold. Example: raymq topic describe orders"""
    with _client(address) as client:
        queues = client.admin.describe_topic(name)
    rows = [[q.queue.broker_name, q.queue.queue_id, q.min_offset, q.max_offset, q.messages] for q in queues]
    names = ["broker", "queue", "min_offset", "max_offset", "messages"]
    _print_rows(as_json, "queues", names, rows, total=4)


@topic.command("delete")
@click.argument("name")
@click.confirmation_option(prompt="Delete the topic and all its messages?")
@_address_option
def topic_delete(name: str, address: str | None) -> None:
    """Delete a topic and its messages. Example: raymq topic delete orders --yes"""
    with _client(address) as client:
        client.admin.delete_topic(name)
    _out.print(f"topic {name} is deleted")


# Messages


@cli.command()
@click.argument("topic_name", metavar="TOPIC")
@click.argument("body", required=False)
@click.option("--tags", help="The message's tag.")
@click.option("--key", "keys", multiple=True, help="A business key; may be given several times.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="A user property.")
@click.option("--sharding-key", help="Messages of one key go to one queue, in order.")
@click.option("--delay-level", type=click.IntRange(0), default=0, help="Deliver it later: 1 is 1 s, 18 is 2 h.")
@click.option("--deliver-at", metavar="TIME", help="Deliver it then: ISO 8601, or +30s, +5m, +2h, +1d from now on.")
@_address_option
@_json_option
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
    from raymq.delay import parse_deliver_at
    from raymq.message import Message

    due_ms = None if deliver_at is None else parse_deliver_at(deliver_at, time.time_ns() // 1_000_000)
    user = dict(_pair(text) for text in properties)
    bodies = [body.encode()] if body is not None else (line for raw in sys.stdin.buffer if (line := raw.rstrip(b"\n")))
    with _client(address) as client, client.producer("raymq-cli") as producer:
        futures = [
            producer.send_async(
                Message(topic_name, text, tags, tuple(keys), user, delay_level=delay_level, deliver_at_ms=due_ms),
                sharding_key=sharding_key,
            )
            for text in bodies
        ]
        results = [future.result() for future in futures]
    names = ["queue", "offset", "message_id", "status"]
    rows = [[str(r.queue), r.queue_offset, r.message_id, r.status.value] for r in results]
    _print_rows(as_json, "sent", names, rows)


@cli.command()
@click.argument("group_name", metavar="GROUP")
@click.argument("topic_name", metavar="TOPIC")
@click.option("--tags", default="*", show_default=True, help='Tags to consume, for example "paid || refunded".')
@click.option(
    "--max", "limit", type=click.IntRange(1), help="Stop after so many messages. Default: go on until ctrl-C."
)
@click.option("--timeout", type=click.FloatRange(0), help="Stop when no message came for so many seconds.")
@click.option(
    "--from",
    "start",
    type=click.Choice(["first", "last"]),
    default="last",
    show_default=True,
    help="Where a new group starts.",
)
@_address_option
@_json_option
def consume(
    group_name: str,
    topic_name: str,
    tags: str,
    limit: int | None,
    timeout: float | None,
    start: str,
    address: str | None,
    as_json: bool,
) -> None:
    """Consume a topic as a member of GROUP: a line per message, committed after it was printed.

    Example: raymq consume billing orders --tags "paid || refunded" --timeout 5
    """
    from raymq.message import ConsumeFromWhere

    where = (
        ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET if start == "first" else ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    )
    left = limit
    # Joining the group takes a moment of its own, which a short timeout must not cut off.
    quiet_until_s = time.monotonic() + JOIN_S + (timeout or 0.0)
    with (
        _client(address) as client,
        client.pull_consumer(group_name, consume_from=where, auto_commit=False) as consumer,
    ):
        consumer.subscribe(topic_name, tags)
        while left is None or left > 0:
            messages = consumer.poll(min(left or 500, 500), 1.0 if timeout is None else max(timeout, 0.1))
            if messages:
                for message in messages:
                    click.echo(_message_line(message, as_json), file=_out.file)
                consumer.commit()
                left = None if left is None else left - len(messages)
            elif timeout is not None and (consumer.assignment() or time.monotonic() > quiet_until_s):
                break


@cli.command()
@click.argument("topic_name", metavar="TOPIC")
@click.option("--key", help="Messages with this key, the newest ones.")
@click.option("--id", "message_id", help="The message with this id: a unique id or an offset message id.")
@click.option("--offset", "place", metavar="QUEUE:OFFSET", help="The message at a place, for example broker-a:3:1700.")
@click.option("--max", "limit", type=click.IntRange(1), default=32, show_default=True, help="With --key: how many.")
@_address_option
@_json_option
def query(
    topic_name: str,
    key: str | None,
    message_id: str | None,
    place: str | None,
    limit: int,
    address: str | None,
    as_json: bool,
) -> None:
    """Show messages by key, by id, or at a place. Exit code 1 when there is none.

    Example: raymq query orders --key o-17, or raymq query orders --offset broker-a:3:1700
    """
    if sum(choice is not None for choice in (key, message_id, place)) != 1:
        raise click.UsageError("give one of --key, --id and --offset")
    at = None if place is None else _parse_place(topic_name, place)
    with _client(address) as client:
        if key is not None:
            messages = client.admin.query_by_key(topic_name, key, max_messages=limit)
        elif at is not None:
            messages = [_message_at(client, *at, place or "")]
        else:
            messages = client.admin.query_by_id(topic_name, message_id or "")
    found = [_message_dict(message) for message in messages]
    if key is not None:
        _print(as_json, {"messages": found}, lambda: _print_messages(found))
    elif found:
        _print(as_json, found[0], lambda: _table(["field", "value"], [[k, v] for k, v in found[0].items()]))
    if not found:
        raise InvalidArgumentError(
            f"topic {topic_name} has no message with {'key' if key else 'id'} {key or message_id}"
        )


def _parse_place(topic_name: str, place: str) -> tuple[Any, int]:
    """The queue and offset of BROKER:QUEUE:OFFSET."""
    from raymq.message import MessageQueue

    parts = place.split(":")
    if len(parts) != 3 or not parts[1].isdigit() or not parts[2].isdigit():
        raise InvalidArgumentError(f"{place!r} is not a place; write BROKER:QUEUE:OFFSET, for example broker-a:3:1700")
    return MessageQueue(topic_name, parts[0], int(parts[1])), int(parts[2])


def _message_at(client: Any, queue: Any, offset: int, place: str) -> Any:
    result = client.admin.pull(queue, offset, max_messages=1)
    if not result.messages:
        raise InvalidArgumentError(f"no message is at {place} yet: the queue's next offset is {result.max_offset}")
    return result.messages[0]


def _print_messages(found: list[dict[str, Any]]) -> None:
    names = ["queue", "queue_offset", "tags", "keys", "stored", "message_id", "body"]
    if found:
        _table(names, [[" ".join(m[name]) if name == "keys" else m[name] for name in names] for m in found])


# Groups


@cli.group()
def group() -> None:
    """List, describe and delete consumer groups."""


@group.command("list")
@_address_option
@_json_option
def group_list(address: str | None, as_json: bool) -> None:
    """List consumer groups. Example: raymq group list"""
    with _client(address) as client:
        groups = client.admin.list_groups()
    _print(as_json, {"groups": groups}, lambda: _table(["group"], [[name] for name in groups]))


@group.command("describe")
@click.argument("name")
@_address_option
@_json_option
def group_describe(name: str, address: str | None, as_json: bool) -> None:
    """Show how far a group is in each queue. Example: raymq group describe billing"""
    with _client(address) as client:
        progress = client.admin.describe_group(name)
    rows = [[p.queue.topic, p.queue.broker_name, p.queue.queue_id, p.committed, p.max_offset, p.lag] for p in progress]
    _print_rows(as_json, "queues", ["topic", "broker", "queue", "committed", "max_offset", "lag"], rows, total=5)


@group.command("delete")
@click.argument("name")
@click.confirmation_option(prompt="Forget the group and its offsets?")
@_address_option
def group_delete(name: str, address: str | None) -> None:
    """Forget a group and its offsets. Example: raymq group delete billing --yes"""
    with _client(address) as client:
        client.admin.delete_group(name)
    _out.print(f"group {name} is deleted")


# Helpers of the commands


@contextmanager
def _client(address: str | None) -> Iterator[Any]:
    from raymq.client import connect

    with connect(address) as client:
        yield client


@contextmanager
def _steps(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error that tells the step."""
    if quiet:
        yield lambda step: None
        return
    with _err.status("…") as spinner:
        yield lambda step: spinner.update(f"{step} …")


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise InvalidArgumentError(f"property {text!r} must be NAME=VALUE")
    return name, value


def _print(as_json: bool, value: Any, otherwise: Callable[[], None]) -> None:
    if as_json:
        click.echo(json.dumps(value, ensure_ascii=False), file=_out.file)
    else:
        otherwise()


def _print_rows(
    as_json: bool, key: str, names: Sequence[str], rows: Sequence[Sequence[Any]], total: int | None = None
) -> None:
    def show() -> None:
        footer = None if total is None or not rows else ["total", *[""] * (len(names) - 2), sum(r[total] for r in rows)]
        _table(names, rows, footer)

    _print(as_json, {key: [dict(zip(names, row, strict=True)) for row in rows]}, show)


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]], footer: Sequence[Any] | None = None) -> None:
    table = Table(show_footer=footer is not None)
    for index, name in enumerate(names):
        numeric = bool(rows) and all(isinstance(row[index], int) or row[index] is None for row in rows)
        table.add_column(
            name, _cell(footer[index]) if footer else "", justify="right" if numeric else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*[_cell(value) for value in row])
    _out.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _print_status(report: dict[str, Any]) -> None:
    _table(
        ["broker", "state", "topics", "groups"],
        [
            [
                b["actor"],
                b["error"] or ("ready" if b["ready"] else b["waiting_for"]),
                *map(len, (b["topics"], b["groups"])),
            ]
            if not b["error"]
            else [b["actor"], b["error"], None, None]
            for b in report["brokers"]
        ],
    )
    _table(
        ["store", "state", "queues", "log bytes", "not flushed", "directory"],
        [
            [
                s["actor"],
                "writable" if s["writable"] else s["not_writable_reason"],
                s["queues"],
                s["max_physical_offset"] - s["min_physical_offset"],
                s["max_physical_offset"] - s["flushed_physical_offset"],
                s["root"],
            ]
            if not s["error"]
            else [s["actor"], s["error"], None, None, None, "-"]
            for s in report["stores"]
        ],
    )
    if report["groups"]:
        _table(
            ["group", "generation", "members", "queues held"],
            [
                [g["group"], g["generation"], len(g["members"]), len(g["holders"])]
                if not g["error"]
                else [g["actor"], None, None, g["error"]]
                for g in report["groups"]
            ],
        )
    if report["instances"]:
        _table(
            ["instance", "queues", "buffered", "consumed", "failures"],
            [
                [i["instance"], len(i["holding"]), i["buffered"], i["consumed"], i["failures"]]
                if not i["error"]
                else [i["actor"], None, None, None, i["error"]]
                for i in report["instances"]
            ],
        )


def _message_dict(message: Any) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "queue": f"{message.broker_name}:{message.queue_id}",
        "queue_offset": message.queue_offset,
        "tags": message.tags,
        "keys": list(message.keys),
        "properties": dict(message.properties),
        "message_id": message.message_id,
        "offset_message_id": message.offset_message_id,
        "born": _iso(message.born_timestamp_ms),
        "stored": _iso(message.store_timestamp_ms),
        "body": message.body.decode(errors="replace"),
    }


def _message_line(message: Any, as_json: bool) -> str:
    fields = _message_dict(message)
    if as_json:
        return json.dumps(fields, ensure_ascii=False)
    return f"{fields['queue']}:{fields['queue_offset']}  {fields['tags'] or '-'}  {fields['body']}"


def _iso(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
