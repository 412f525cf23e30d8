"""Progress of long commands, on standard error and only if that is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from raymq.cli.terminal.output import err
from raymq.cli.terminal.terminal_text import printable

if TYPE_CHECKING:
    from raymq.cluster.launcher import ProgressCallback


@contextmanager
def steps(*, quiet: bool = False) -> Iterator[ProgressCallback]:
    """Show a spinner, unless `quiet`; yields a function to call with the name of each step that begins."""
    if quiet:
        yield lambda step: None
        return
    with err.status("…") as spinner:
        yield lambda step: spinner.update(Text(f"{printable(step)} …"))


class Counter:
    """Counts the parts of some work that are done. Thread-safe."""

    def __init__(self, bar: Progress, description: str) -> None:
        self._bar = bar
        self._task = bar.add_task(description, total=None)
        self.shown = not bar.disable

    def expect(self, total: int) -> None:
        """Set the number of parts in all, once it is known."""
        self._bar.update(self._task, total=total)

    def advance(self, count: int = 1) -> None:
        """Note that `count` more parts are done."""
        self._bar.advance(self._task, count)


@contextmanager
def counting(description: str, total: int | None = None, *, talks: bool = False) -> Iterator[Counter]:
    """Show a bar with the number of parts done, which goes away at the end. `talks`: the command itself prints on the
    terminal or reads from it meanwhile, so there is no bar, which would be in between."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    hidden = talks or not err.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True, disable=hidden) as bar:
        counter = Counter(bar, printable(description))
        if total is not None:
            counter.expect(total)
        yield counter
