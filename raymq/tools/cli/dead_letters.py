"""`raymq dlq` and `raymq replay`: messages that are sent again.

`raymq dlq` lists and replays dead letters, the messages that a group could not consume. `raymq replay` sends messages
of a topic again, to a topic or to one group.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import POSITIVE
from raymq.common.places import parse_position
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType, RateType
from raymq.tools.cli.terminal.output import (
    Command,
    Group,
    address_option,
    client_of,
    json_option,
    message_dict,
    out,
    print_value,
    quiet_option,
    say,
    shown_body,
    table,
)
from raymq.tools.cli.terminal.progress import counting


@click.group(cls=Group)
def dlq() -> None:
    """List and replay a group's dead letters: messages that failed in all their attempts."""


@dlq.command("list")
@click.argument("group_name", metavar="GROUP", shell_complete=completes("groups"))
@click.option("--max", "limit", type=NumberType(POSITIVE), default=100, show_default=True, help="How many.")
@click.option("--all", "everything", is_flag=True, help="Also those that were replayed already.")
@address_option
@json_option
def dlq_list(group_name: str, limit: int, everything: bool, address: str | None, as_json: bool) -> None:
    """Show dead letters, the oldest first. Example: raymq dlq list billing"""
    with client_of(address) as client:
        letters = client.admin.dead_letters(group_name).letters(max_messages=limit, replayed=everything)
    rows = [_row(letter) for letter in letters]
    names = ["topic", "message_id", "stored", "attempts", "replayed", "tags", "keys", "body"]
    shown = [{**row, "keys": " ".join(row["keys"]), "body": shown_body(row)} for row in rows]
    text = [[row[name] for name in names] for row in shown]
    print_value(as_json, {"dead_letters": rows}, lambda: table(names, text))


@dlq.command("replay")
@click.argument("group_name", metavar="GROUP", shell_complete=completes("groups"))
@click.option(
    "--rate",
    type=RateType(),
    metavar="N",
    help="At most so many per second, for example 50 or 50/s. Default: no limit.",
)
@click.option("--max", "limit", type=NumberType(POSITIVE), help="At most so many. Default: all there are now.")
@click.option("--letter", "chosen", metavar="BROKER:QUEUE:OFFSET", multiple=True, help="Only this one; repeatable.")
@address_option
@json_option
@quiet_option
def dlq_replay(
    group_name: str, rate: float | None, limit: int | None, chosen: tuple[str, ...], address: str | None, as_json: bool
) -> None:
    """Bring dead letters back to the group, as if it had never tried them; a line for each.

    Exit code 1 when one cannot be brought back; the next replay begins with it.

    Example: raymq dlq replay billing --rate 50/s
    """

    with client_of(address) as client:
        places = [_place(text) for text in chosen] or None
        results = client.admin.dead_letters(group_name).replay(rate=rate, max_messages=limit, letters=places)
        counts = _report(results, as_json)
    print_value(as_json, counts, lambda: say(f"{counts['replayed']} replayed, {counts['failed']} failed"))
    if counts["failed"]:
        raise click.exceptions.Exit(1)


def _report(results: Iterable[Any], as_json: bool) -> dict[str, int]:
    """Print each result as it comes; returns how many were replayed and how many failed."""
    counts = {"replayed": 0, "failed": 0}
    with counting("replaying", talks=out.is_terminal) as counter:
        for result in results:
            state = "failed" if result.error else "replayed"
            counts[state] += 1
            row = {**_row(result.letter), "state": state, "error": result.error}
            parts = [state, row["topic"], row["message_id"], *([result.error] if result.error else [])]
            text = "  ".join(parts)
            print_value(as_json, row, partial(say, text))
            counter.advance()
    return counts


def _row(letter: Any) -> dict[str, Any]:
    fields = message_dict(letter.message)
    attempts = letter.message.reconsume_times
    return {**fields, "topic": letter.topic, "attempts": attempts, "replayed": letter.replayed}


def _place(text: str) -> Any:
    """The place that BROKER:QUEUE:OFFSET names."""
    from raymq.client.admin.dead_letters import LetterPlace

    try:
        queue, offset = parse_position("", text)
    except InvalidArgumentError as error:
        raise click.BadParameter(f"{error}, as `raymq dlq list --json` shows it") from None
    return LetterPlace(queue.broker_name, queue.queue_id, offset)


@click.command(cls=Command)
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option("--to-topic", metavar="TOPIC", shell_complete=completes("topics"), help="Where to: another topic.")
@click.option(
    "--to-group",
    metavar="GROUP",
    shell_complete=completes("groups"),
    help="Or the one group that gets the messages again.",
)
@click.option("--key", help="The messages with this key.")
@click.option("--id", "ids", multiple=True, help="The message with this id; may be given several times.")
@click.option("--from", "begin", metavar="TIME", help="Messages stored from then on: ISO 8601, or -2h ago.")
@click.option("--to", "end", metavar="TIME", help="Messages stored before then.")
@click.option("--name", default="", help="Another name makes another replay of the same messages.")
@click.option("--rate", type=RateType(), help="At most so many per second.")
@click.option(
    "--max", "limit", type=NumberType(POSITIVE), default=100_000, show_default=True, help="At most so many now."
)
@click.option("--dry-run", is_flag=True, help="Only count.")
@address_option
@json_option
@quiet_option
def replay(
    topic_name: str,
    to_topic: str | None,
    to_group: str | None,
    key: str | None,
    ids: Sequence[str],
    begin: str | None,
    end: str | None,
    name: str,
    rate: float | None,
    limit: int,
    dry_run: bool,
    address: str | None,
    as_json: bool,
) -> None:
    """Send copies of messages of TOPIC again, to another topic or to one group only.

    Run again with the same choice, it goes on and sends nothing twice. `raymq job replay` sends Parquet files, such as
    an archive, to a topic; `raymq dlq replay` brings back what a group could not consume.

    Example: raymq replay orders --from -2h --to -1h --to-group billing
    """
    from raymq.common.delay import parse_time

    now_ms = time.time_ns() // 1_000_000
    with client_of(address) as client, counting("replaying", talks=False) as counter:
        done = client.admin.replay(
            topic_name,
            key=key,
            ids=ids,
            begin_ms=None if begin is None else parse_time(begin, now_ms),
            end_ms=None if end is None else parse_time(end, now_ms),
            to_topic=to_topic,
            to_group=to_group,
            name=name,
            max_messages=limit,
            rate=rate,
            dry_run=dry_run,
            progress=counter.advance,
        )
    more = "" if done.complete else "; there are more: run it again"
    unreadable = f", {done.unreadable} cannot be read" if done.unreadable else ""
    text = f"{done.chosen} chosen, {done.sent} sent to {done.target}, {done.sent_before} sent before{unreadable}{more}"
    print_value(as_json, {**asdict(done), "dry_run": dry_run}, lambda: say(text))
