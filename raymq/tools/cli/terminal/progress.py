"""Displays the progress of long commands, on standard error if it is a terminal. With --json or --quiet nothing is
displayed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from raymq.tools.cli.terminal.output import duration, err, is_quiet, printable, say_note

if TYPE_CHECKING:
    from raymq.client.cluster.launcher import ProgressCallback

STEPS_SHOWN: Final = 8
"""Maximum number of steps of a command that the terminal shows; older steps are hidden."""


class Steps:
    """The finished steps and the running step of a command, each with its duration."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._shown: deque[TaskID] = deque()
        self._text = ""

    def begin(self, text: str) -> None:
        """Begin a new step of the command. If `text` and the running step's text are equal up to the colon, no step
        begins: the running step only gets the new text."""
        before, self._text = self._text, printable(text)
        if self._shown and _subject(before) == _subject(self._text):
            self._bar.update(self._shown[-1], description=f"{self._text} …")
            return
        if self._shown:
            self._bar.update(self._shown[-1], description=before, total=1, completed=1)
        if len(self._shown) == STEPS_SHOWN:
            self._bar.remove_task(self._shown.popleft())
        self._shown.append(self._bar.add_task(f"{self._text} …", total=None))


def _subject(text: str) -> str:
    return text.partition(":")[0]


@contextmanager
def steps(*, quiet: bool = False, lines: bool = False) -> Iterator[ProgressCallback]:
    """Show the steps of a command with their durations, unless `quiet`. Yields a function to call with the name of each
    new step.

    At the end the steps disappear from the terminal. If standard error is no terminal and `lines` is true, each step is
    one line on standard error, which stays.
    """
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    is_silent = quiet or is_quiet()
    if lines and not is_silent and not err.is_terminal:
        yield lambda step: say_note(f"{step} …")
        return
    with Progress(*columns, console=err, transient=True, disable=is_silent or not err.is_terminal) as bar:
        yield Steps(bar).begin


class Counter:
    """Counts the finished items of a long command for its progress bar. Thread-safe."""

    def __init__(self, bar: Progress, description: str) -> None:
        self._bar = bar
        self._task = bar.add_task(description, total=None)
        self.shown = not bar.disable

    def expect(self, total: int) -> None:
        """Set the total number of items for the progress bar, after the command has determined this number."""
        self._bar.update(self._task, total=total)

    def reach(self, count: int) -> None:
        """Set the number of finished items to `count`."""
        self._bar.update(self._task, completed=count)

    def advance(self, count: int = 1) -> None:
        """Add `count` to the number of finished items."""
        self._bar.advance(self._task, count)


class RateColumn(ProgressColumn):
    """Progress column with the number of items per second. While the command runs, the column shows the recent rate. At
    the end, the column shows the rate over the whole time."""

    def render(self, task: Task) -> Text:
        """Return the progress bar's rate as text; empty while the rate is unknown."""
        # rich drops its samples of the rate when the total number of items becomes known, so rich may have no rate at
        # the end.
        rate = task.completed / task.finished_time if task.finished_time else task.speed
        return Text("" if rate is None else f"{rate:,.0f}/s")


class TimeLeftColumn(ProgressColumn):
    """Progress column with the estimated time until the last item, such as "12 s left". The column is empty while the
    total number of items or the rate is unknown."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Return the time left as text. The estimate uses the recent rate."""
        left_s = None if task.finished or task.total is None else task.time_remaining
        return Text("" if left_s is None else f"{duration(int(left_s * 1000))} left")


@contextmanager
def counting(description: str, total: int | None = None, *, talks: bool = False) -> Iterator[Counter]:
    """Show a progress bar with the number of finished items, their rate and, if the total is known, the time left. At
    the end the bar disappears.

    `talks`: true if the command prints to the terminal or reads from it while it runs. Then no bar is shown.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    hidden = talks or is_quiet() or not err.is_terminal
    times = RateColumn(), TimeElapsedColumn(), TimeLeftColumn()
    with Progress(*columns, *times, console=err, transient=True, disable=hidden) as bar:
        counter = Counter(bar, printable(description))
        if total is not None:
            counter.expect(total)
        yield counter
