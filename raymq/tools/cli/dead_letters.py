"""`raymq dlq` and `raymq replay`: commands that send messages again.

`raymq dlq` lists and replays dead letters, the messages that a group could not consume. `raymq replay` sends messages
of a topic again, to a topic or to one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import POSITIVE
from raymq.common.places import parse_position
from raymq.tools.cli.entry import cli
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.options import TIME, ParsedType, group_argument, max_option, topic_argument
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.cli.terminal.number_type import RateType
from raymq.tools.cli.terminal.output import Table, message_dict, out, shown_body
from raymq.tools.cli.terminal.progress import counting

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.client.admin.dead_letters import LetterPlace


@cli.group()
def dlq() -> None:
    """List and replay a group's dead letters: messages that failed in all their attempts."""


@command(dlq, "list")
@group_argument
@max_option("Maximum number of dead letters to list.", POSITIVE, 100)
@click.option("--all", "everything", is_flag=True, help="Also list dead letters that were replayed.")
def dlq_list(admin: Admin, group_name: str, limit: int, everything: bool) -> CommandResult:
    """Show dead letters, the oldest first. Example: raymq dlq list billing"""
    letters = admin.dead_letters(group_name).letters(max_messages=limit, replayed=everything)
    found = [_row(letter) for letter in letters]
    names = ["topic", "message_id", "stored", "attempts", "reason", "replayed", "tags", "keys", "body"]
    shown = [{**row, "keys": " ".join(row["keys"]), "body": shown_body(row)} for row in found]
    return CommandResult({"dead_letters": found}, Table(names, [[row[name] for name in names] for row in shown]))


def _place(text: str) -> LetterPlace:
    """Return the position of a dead letter that the text BROKER:QUEUE:OFFSET describes."""
    from raymq.client.admin.dead_letters import LetterPlace

    try:
        queue, offset = parse_position("", text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}; copy the place of a dead letter from `raymq dlq list --json`") from None
    return LetterPlace(queue.broker_name, queue.queue_id, offset)


@command(dlq, "replay", quiet=True)
@group_argument
@click.option(
    "--rate",
    type=RateType(),
    metavar="N",
    help="Maximum number of replays per second, for example 50 or 50/s. Default: no limit.",
)
@max_option("Maximum number of dead letters to replay. Default: all existing dead letters.")
@click.option(
    "--letter",
    "chosen",
    type=ParsedType("letter", _place),
    metavar="BROKER:QUEUE:OFFSET",
    multiple=True,
    help="Replay only this dead letter; repeatable.",
)
def dlq_replay(
    admin: Admin, group_name: str, rate: float | None, limit: int | None, chosen: tuple[LetterPlace, ...], as_json: bool
) -> CommandResult:
    """Send dead letters to the group again, as if the group had never consumed them. Prints one line per dead letter.

    Exit code 1 if a dead letter cannot be sent; the next replay begins with this dead letter.

    Example: raymq dlq replay billing --rate 50/s
    """
    counts = {"replayed": 0, "failed": 0}
    with counting("replaying", talks=out.is_terminal) as counter:
        for result in admin.dead_letters(group_name).replay(rate=rate, max_messages=limit, letters=chosen or None):
            state = "failed" if result.error else "replayed"
            counts[state] += 1
            row = {**_row(result.letter), "state": state, "error": result.error}
            parts = [state, row["topic"], row["message_id"], *([result.error] if result.error else [])]
            CommandResult(row, "  ".join(parts)).print(as_json=as_json)
            counter.advance()
    text = f"{counts['replayed']} replayed, {counts['failed']} failed"
    return CommandResult(counts, text, failed=counts["failed"] > 0)


def _row(letter: Any) -> dict[str, Any]:
    fields = message_dict(letter.message)
    attempts = letter.message.reconsume_times
    return {**fields, "topic": letter.topic, "attempts": attempts, "reason": letter.reason, "replayed": letter.replayed}


@command(cli, quiet=True)
@topic_argument
@click.option("--to-topic", metavar="TOPIC", shell_complete=completes("topics"), help="Send the copies to this topic.")
@click.option(
    "--to-group",
    metavar="GROUP",
    shell_complete=completes("groups"),
    help="Send the copies to this group only.",
)
@click.option("--key", help="Messages with this key.")
@click.option("--id", "ids", multiple=True, help="The message with this id; repeatable.")
@click.option("--from", "begin_ms", type=TIME, help="Messages stored at this time or later: ISO 8601, or -2h ago.")
@click.option("--to", "end_ms", type=TIME, help="Messages stored before this time.")
@click.option("--name", default="", help="Name of the replay: another name sends the same messages again.")
@click.option("--rate", type=RateType(), help="Maximum number of messages per second.")
@max_option("Maximum number of messages in this run.", POSITIVE, 100_000)
@click.option("--dry-run", is_flag=True, help="Only count the messages.")
def replay(
    admin: Admin,
    topic_name: str,
    to_topic: str | None,
    to_group: str | None,
    key: str | None,
    ids: Sequence[str],
    begin_ms: int | None,
    end_ms: int | None,
    name: str,
    rate: float | None,
    limit: int,
    dry_run: bool,
) -> CommandResult:
    """Send copies of messages of TOPIC again, to another topic or to one group only.

    A second run with the same options continues, and sends no message twice. `raymq job replay` sends Parquet files,
    such as an archive, to a topic. `raymq dlq replay` sends a group the messages that it could not consume.

    Example: raymq replay orders --from -2h --to -1h --to-group billing
    """
    with counting("replaying", talks=False) as counter:
        done = admin.replay(
            topic_name,
            key=key,
            ids=ids,
            begin_ms=begin_ms,
            end_ms=end_ms,
            to_topic=to_topic,
            to_group=to_group,
            name=name,
            max_messages=limit,
            rate=rate,
            dry_run=dry_run,
            progress=counter.advance,
        )
    more = "" if done.complete else "; more messages remain: run the command again"
    unreadable = f", {done.unreadable} cannot be read" if done.unreadable else ""
    text = f"{done.chosen} chosen, {done.sent} sent to {done.target}, {done.sent_before} sent before{unreadable}{more}"
    return CommandResult({**asdict(done), "dry_run": dry_run}, text)
