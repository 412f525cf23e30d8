"""`raymq dlq`: lists and replays dead letters, the messages that a group could not consume."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import click

from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import POSITIVE
from raymq.common.places import parse_position
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType, RateType
from raymq.tools.cli.terminal.output import (
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
