"""How far long work is, on standard error and only where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from raymq.cli.output import err
from raymq.cli.terminal_text import printable


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """A spinner; yields a function that takes the name of the step that begins."""
    with err.status("…") as spinner:
        yield lambda step: spinner.update(Text(f"{printable(step)} …"))


class Counter:
    """Counts what is done of some work; its methods may be called in any thread."""

    def __init__(self, bar: Progress, description: str) -> None:
        self._bar = bar
        self._task = bar.add_task(description, total=None)

    def expect(self, total: int) -> None:
        """There are `total` parts in all, as is known now."""
        self._bar.update(self._task, total=total)

    def advance(self, count: int = 1) -> None:
        """`count` more parts are done."""
        self._bar.advance(self._task, count)


@contextmanager
def counting(description: str, total: int | None = None, *, talks: bool = False) -> Iterator[Counter]:
    """A bar with the number of parts done, gone at the end. `talks`: the command itself prints on the terminal or reads
    from it meanwhile, and a bar would be in between."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    hidden = talks or not err.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True, disable=hidden) as bar:
        counter = Counter(bar, printable(description))
        if total is not None:
            counter.expect(total)
        yield counter
