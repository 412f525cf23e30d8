"""A job that shows why and when messages became dead letters, counted by consumer group, reason, topic and time.

The reason is the message's property `error`, if a consumer has set it. Otherwise the reason is derived from the number
of attempts and the group's retry limit.

The job needs no Spark: there are few dead letters, and an answer within a second matters more than throughput. Dead
letters are read one after another, and only counts stay in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from raydp_jobs.jobs.pictures import bars_over_time, check_picture, literal, save_picture
from raydp_jobs.jobs.times import ALWAYS, Period, every_option, iso_time, period_options
from raymq.common.errors import GroupNotExistError
from raymq.common.names import DLQ_PREFIX, check_group
from raymq.tools.cli.entry import run_command
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    client_of,
    json_option,
    namespace_option,
    print_value,
    quiet_option,
    say,
    table,
)
from raymq.tools.cli.terminal.progress import counting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from raymq.client.admin.dead_letters import DeadLetter
    from raymq.client.client import Client

REASON_PROPERTY: Final = "error"
"""Name of the message property that contains the reason why the message became a dead letter, as text. raymq.serve sets
this property, and any program may set it."""
REASON_CHARACTERS: Final = 100
CAUSES_MAX: Final = 500
"""Maximum number of pairs of topic and reason that are counted separately for a consumer group. The limit protects
memory, because each message may have another reason."""
DRAWN_CAUSES: Final = 8
OTHERS: Final = "(other reasons)"
_ADVANCE: Final = 1000

Cause = tuple[str, str]
"""The cause of dead letters: the topic to which the messages were first sent, and the reason why they became dead
letters."""


@dataclass(slots=True)
class Deaths:
    """The dead letters of one consumer group. `letters`: the number of dead letters. `waiting`: the number of dead
    letters that were not replayed.

    `causes`: numbers of dead letters by cause. `over_time`: numbers of dead letters by cause and by the start of the
    period in which the messages became dead letters (s since 1970). `examples`: the message id of the newest dead
    letter of each cause.
    """

    group: str
    letters: int = 0
    waiting: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    causes: Counter[Cause] = field(default_factory=Counter)
    over_time: dict[int, Counter[Cause]] = field(default_factory=dict)
    examples: dict[Cause, str] = field(default_factory=dict)

    def add(self, letter: DeadLetter, reason: str, every_s: int) -> None:
        """Count one dead letter."""
        message = letter.message
        died_ms = message.store_timestamp_ms
        cause = letter.topic, reason
        if cause not in self.causes and len(self.causes) >= CAUSES_MAX:
            cause = letter.topic, OTHERS
        self.letters += 1
        self.waiting += not letter.replayed
        self.first_ms = died_ms if self.first_ms is None else min(self.first_ms, died_ms)
        self.last_ms = died_ms if self.last_ms is None else max(self.last_ms, died_ms)
        self.causes[cause] += 1
        self.examples[cause] = message.message_id
        start_s = died_ms // 1000 // every_s * every_s
        self.over_time.setdefault(start_s, Counter())[cause] += 1


def run(
    client: Client,
    groups: Sequence[str] = (),
    *,
    every_s: int = 3600,
    period: Period = ALWAYS,
    reason_property: str = REASON_PROPERTY,
    on_read: Callable[[int], None] = lambda count: None,
) -> list[Deaths]:
    """Count the dead letters of the given consumer groups. Without `groups`, count all groups that have dead letters,
    sorted by name.

    Raises GroupNotExistError for a group in `groups` that does not exist. `on_read` is called after each read, with the
    number of dead letters read.
    """
    named = list(dict.fromkeys(check_group(group) for group in groups))
    found = []
    for group in named or groups_with_letters(client.admin.list_topics(internal=True)):
        letters = client.admin.dead_letters(group).each(replayed=True)
        try:
            found.append(count(group, letters, retries_of(client, group), reason_property, every_s, period, on_read))
        except GroupNotExistError:
            if named:
                raise
            # Omit the group: it and its dead letters were deleted after the group names were listed.
    return found


def groups_with_letters(topics: Iterable[str]) -> list[str]:
    """Return the consumer groups that have a dead-letter topic. `topics`: the names of all topics."""
    return sorted(topic.removeprefix(DLQ_PREFIX) for topic in topics if topic.startswith(DLQ_PREFIX))


def retries_of(client: Client, group: str) -> int | None:
    """Return the group's present retry limit; None if the group no longer exists."""
    try:
        return int(client.admin.group_config(group).retry_max_times)
    except GroupNotExistError:
        return None


def count(
    group: str,
    letters: Iterable[DeadLetter],
    retry_max_times: int | None,
    reason_property: str = REASON_PROPERTY,
    every_s: int = 3600,
    period: Period = ALWAYS,
    on_read: Callable[[int], None] = lambda count: None,
) -> Deaths:
    """Count the messages in `letters` that became dead letters within `period`, for one consumer group."""
    deaths = Deaths(group)
    read = 0
    for letter in letters:
        if period.has(letter.message.store_timestamp_ms):
            deaths.add(letter, reason_of(letter, retry_max_times, reason_property), every_s)
        read += 1
        if read % _ADVANCE == 0:
            on_read(_ADVANCE)
    on_read(read % _ADVANCE)
    return deaths


def reason_of(letter: DeadLetter, retry_max_times: int | None, reason_property: str = REASON_PROPERTY) -> str:
    """Return the reason why a message became a dead letter, as one line. This is the first line of the message's reason
    property. Without this property, the reason is derived from the number of attempts."""
    told = letter.message.properties.get(reason_property, "").strip()
    if told:
        line = told.splitlines()[0]
        return line if len(line) <= REASON_CHARACTERS else f"{line[: REASON_CHARACTERS - 1]}…"
    attempts = letter.message.reconsume_times
    times = f"{attempts} attempt" + ("" if attempts == 1 else "s")
    if retry_max_times is None:
        return f"dead after {times}"
    return f"failed in all its {times}" if attempts > retry_max_times else f"given up after {times}"


# Output as JSON, tables and pictures


def deaths_json(found: Iterable[Deaths], every_s: int) -> dict[str, Any]:
    """Return the counts of dead letters as `--json` prints them."""
    return {"every_s": every_s, "groups": [_group_json(deaths) for deaths in found]}


def _group_json(deaths: Deaths) -> dict[str, Any]:
    return {
        "group": deaths.group,
        "dead_letters": deaths.letters,
        "waiting": deaths.waiting,
        "first": _iso_ms(deaths.first_ms),
        "last": _iso_ms(deaths.last_ms),
        "causes": [
            {"topic": topic, "reason": reason, "dead_letters": number, "newest": deaths.examples[topic, reason]}
            for (topic, reason), number in deaths.causes.most_common()
        ],
        "over_time": [
            {
                "start": iso_time(_time(start_s)),
                "dead_letters": counts.total(),
                "causes": [
                    {"topic": topic, "reason": reason, "dead_letters": number}
                    for (topic, reason), number in counts.most_common()
                ],
            }
            for start_s, counts in sorted(deaths.over_time.items())
        ],
    }


def _iso_ms(time_ms: int | None) -> str | None:
    return None if time_ms is None else iso_time(datetime.fromtimestamp(time_ms / 1000, UTC))


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def show(found: Sequence[Deaths]) -> None:
    """Print the counts of dead letters as tables: by group, by cause, and over time."""
    if not found:
        say("no group has a dead letter")
        return
    groups = [[one.group, one.letters, one.waiting, _iso_ms(one.first_ms), _iso_ms(one.last_ms)] for one in found]
    table(["group", "dead letters", "not replayed", "first", "last"], groups)
    causes = [
        [one.group, topic, reason, number, one.examples[topic, reason]]
        for one in found
        for (topic, reason), number in one.causes.most_common()
    ]
    if causes:
        table(["group", "topic", "reason", "dead letters", "newest"], causes)
    times = [
        [one.group, iso_time(_time(start_s)), topic, reason, number]
        for one in found
        for start_s, counts in sorted(one.over_time.items())
        for (topic, reason), number in counts.most_common()
    ]
    if times:
        table(["group", "from", "topic", "reason", "dead letters"], times)


def draw(figure: Figure, found: Sequence[Deaths], every_s: int) -> None:
    """Draw the dead letters over time, one panel per group. The most common causes have separate bars; the others are
    stacked on top."""
    panels = figure.subplots(max(len(found), 1), 1, sharex=True, squeeze=False)
    figure.suptitle(f"dead letters in {every_s} s")
    for axes, one in zip(panels[:, 0], found, strict=False):
        times = sorted(one.over_time)
        bars_over_time(axes, [_time(start) for start in times], every_s, series_of(one), literal(one.group))


def series_of(deaths: Deaths) -> dict[str, list[float]]:
    """Return, for each cause, the number of dead letters in each period: one series for each of the DRAWN_CAUSES most
    common causes, and one for all other causes."""
    times = sorted(deaths.over_time)
    common = [cause for cause, _ in deaths.causes.most_common(DRAWN_CAUSES)]
    series = {f"{topic}: {reason}": _over(deaths, times, {(topic, reason)}) for topic, reason in common}
    rest = deaths.causes.keys() - set(common)
    if rest:
        series[OTHERS] = _over(deaths, times, rest)
    return series


def _over(deaths: Deaths, times: Iterable[int], causes: Iterable[Cause]) -> list[float]:
    causes = list(causes)
    return [float(sum(deaths.over_time[start][cause] for cause in causes)) for start in times]


@click.command("dead-letters", cls=Command)
@click.argument("groups", metavar="[GROUP]...", shell_complete=completes("groups"), nargs=-1)
@every_option("1h")
@period_options
@click.option(
    "--reason-property",
    default=REASON_PROPERTY,
    show_default=True,
    help="Name of the message property with the reason.",
)
@click.option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw dead letters over time in this PNG file."
)
@namespace_option
@address_option
@json_option
@quiet_option
def command(
    groups: tuple[str, ...],
    every_s: int,
    period: Period,
    reason_property: str,
    picture: Path | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Show dead letters of GROUPs, or of all groups, by reason, topic and time.

    Example: raymq job dead-letters billing --from -7d --picture billing.png
    """
    check_picture(picture)
    with client_of(address) as client, counting("reading dead letters", talks=as_json) as counter:
        found = run(
            client,
            groups,
            every_s=every_s,
            period=period,
            reason_property=reason_property,
            on_read=counter.advance,
        )
    if picture is not None:
        save_picture(picture, lambda figure: draw(figure, found, every_s))
    value = {**deaths_json(found, every_s), **({"picture": str(picture)} if picture else {})}
    print_value(as_json, value, lambda: show(found))


def main() -> None:
    """Run the job as a program: ``python -m raydp_jobs.jobs.dead_letters billing``."""
    run_command(command)


if __name__ == "__main__":
    main()
