"""`raymq top` and `raymq console`: live views of the cluster, in the terminal and in a browser.

raymq.tools.cli.cluster.top_figures computes the rates in the tables of `raymq top`.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raymq.common.errors import RaymqError
from raymq.common.numbers import NumberRange
from raymq.tools.cli.cluster.top_figures import (
    SORT_KEYS,
    GroupRates,
    Reading,
    SortKey,
    TopFigures,
    TopicRates,
    figures_between,
    sorted_groups,
    sorted_topics,
)
from raymq.tools.cli.entry import cli
from raymq.tools.cli.options import config_option, number_option
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.cli.terminal.output import duration, out, printable
from raymq.tools.cli.terminal.progress import steps

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin

FRAME_ROWS: Final = 10
"""Number of screen lines of `raymq top` that are not table rows: headers, borders, and the line that explains
the keys."""
_HELP: Final = "sort by  n name  i in  o out  l lag  b behind    q quit"


@command(cli)
@click.option(
    "--sort",
    type=click.Choice(list(SORT_KEYS.values())),
    default="lag",
    show_default=True,
    help="Sort by this column, largest value first.",
)
@number_option("--interval", NumberRange(0.5, 60.0), "Seconds between readings.", 2.0)
@click.option("--once", is_flag=True, help="Print one table with the rates over one interval, and end.")
def top(admin: Admin, sort: SortKey, interval: float, once: bool, as_json: bool) -> CommandResult | None:
    """Watch topics and groups: messages in and out per second, lag in messages and in time.

    Keys: n, i, o, l, b sort by name, in, out, lag, behind; q quits. --json needs --once.

    Example: raymq top --sort in, or raymq top --once --json
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once: raymq top prints one table as JSON")
    if not once and not (out.is_terminal and sys.stdin.isatty()):
        raise click.UsageError("raymq top needs a terminal: add --once to print one table")
    # Connect in this thread, because the namespace of the connection is set for this thread only.
    readings = admin.readings

    def read() -> Reading:
        return Reading(time.monotonic(), readings())

    if not once:
        watch(read, sort, interval)
        return None
    before = read()
    time.sleep(interval)
    figures = figures_between(before, read())
    value = {
        "topics": [asdict(row) for row in sorted_topics(figures.topics, sort)],
        "groups": [asdict(row) for row in sorted_groups(figures.groups, sort)],
        "silent": list(figures.silent),
        "left_out": figures.left_out,
    }
    return CommandResult(value, screen(figures, sort, None))


class Sampler:
    """Reads the brokers' totals once per interval, in a separate thread, so that the screen reacts to keys while a
    broker does not answer.

    `news` is a file descriptor. It becomes readable when there are new `figures` or a new `error`.
    """

    def __init__(self, read: Callable[[], Reading], interval_s: float) -> None:
        self._read, self._interval_s = read, interval_s
        self.news = os.eventfd(0, os.EFD_NONBLOCK)
        self.figures: TopFigures | None = None
        self.error = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before: Reading | None = None
        while not self._stopping.is_set():
            try:
                now = self._read()
                self.figures, self.error = figures_between(before or now, now), ""
                before = now
            except RaymqError as error:
                self.error = str(error)
            os.eventfd_write(self.news, 1)
            self._stopping.wait(self._interval_s)

    def close(self) -> None:
        """Stop the thread that reads the message totals of the brokers for `raymq top`. The thread first finishes its
        running calls to brokers, which have timeouts."""
        self._stopping.set()
        self._thread.join()
        os.close(self.news)


def watch(read: Callable[[], Reading], sort: SortKey, interval_s: float) -> None:
    """Show the tables of `raymq top` until the user presses q. Restores the terminal at the end, also after an
    exception."""
    sampler = Sampler(read, interval_s)
    try:
        with _keys_one_by_one() as keyboard, Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_live_screen(sampler, sort), refresh=True)
                ready, _, _ = select.select([keyboard, sampler.news], [], [])
                if sampler.news in ready:
                    os.eventfd_read(sampler.news)
                if keyboard in ready:
                    keys = os.read(keyboard, 64).decode(errors="replace").lower()
                    if "q" in keys or not keys:  # an empty read means that the terminal was closed
                        return
                    sort = next((SORT_KEYS[key] for key in reversed(keys) if key in SORT_KEYS), sort)
    finally:
        sampler.close()


@contextmanager
def _keys_one_by_one() -> Iterator[int]:
    """Switch the terminal to unbuffered input without echo. Yields the terminal's file descriptor."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # in cbreak mode, ctrl-C still interrupts the command
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _live_screen(sampler: Sampler, sort: SortKey) -> RenderableType:
    if sampler.error:
        return Text(f"{printable(sampler.error)}\n{_HELP}")
    if sampler.figures is None:
        return Text("reading …")
    return screen(sampler.figures, sort, max(out.height - FRAME_ROWS, 2))


def screen(figures: TopFigures, sort: SortKey, rows: int | None) -> RenderableType:
    """Return the tables of topics and groups for `raymq top`. `rows`: maximum number of rows in both tables together;
    None for all rows."""
    topics, groups = sorted_topics(figures.topics, sort), sorted_groups(figures.groups, sort)
    half = None if rows is None else max(rows // 2, rows - len(groups))
    shown_topics = topics[:half]
    shown_groups = groups if rows is None else groups[: max(rows - len(shown_topics), 1)]
    hidden = len(topics) - len(shown_topics), len(groups) - len(shown_groups) + figures.left_out
    notes = [f"no answer from {', '.join(figures.silent)}"] if figures.silent else []
    notes += [f"{hidden[0]} more topics, {hidden[1]} more groups"] if any(hidden) else []
    notes += [] if rows is None else [f"by {sort};  {_HELP}"]
    return Group(_topic_table(shown_topics), _group_table(shown_groups), *(Text(printable(note)) for note in notes))


def _table(*columns: str, names: int) -> Table:
    """Create an empty table for the terminal. Its first `names` columns are for texts, and its other columns for
    numbers."""
    view = Table(expand=False)
    for index, column in enumerate(columns):
        view.add_column(Text(column), justify="left" if index < names else "right", no_wrap=True)
    return view


def _topic_table(rows: list[TopicRates]) -> Table:
    view = _table("topic", "in/s", "in KiB/s", "out/s", "lag", names=1)
    for row in rows:
        figures = (row.in_per_s, row.in_bytes_per_s / 1024, row.out_per_s, row.lag)
        view.add_row(Text(printable(row.topic)), *(Text(f"{figure:,.0f}") for figure in figures))
    return view


def _group_table(rows: list[GroupRates]) -> Table:
    view = _table("group", "topic", "out/s", "lag", "behind", names=2)
    for row in rows:
        behind = "-" if row.behind_ms is None else duration(row.behind_ms)
        names = (Text(printable(row.group)), Text(printable(row.topic)))
        view.add_row(*names, Text(f"{row.out_per_s:,.0f}"), Text(f"{row.lag:,}"), Text(behind))
    return view


@command(cli)
@config_option
@click.option("--open", "show", is_flag=True, help="Also open the console in this machine's browser.")
@click.option("--stop", is_flag=True, help="Stop the console instead.")
def console(address: str | None, config: Path | None, show: bool, stop: bool, as_json: bool) -> CommandResult | None:
    """Start the web console on the head node and print its address. A second run changes nothing.

    Log in with the cluster's token, `ray get-auth-token`. Example: raymq console --open
    """
    from raymq.client.cluster.local_server import start_console, stop_console

    if stop:
        ended = stop_console(address)
        return CommandResult({"stopped": ended}, "the console has ended" if ended else "no console runs")
    with steps() as progress:
        found = start_console(config, address, progress)
    port = found["port"]
    tunnels = [
        f"from elsewhere: ssh -L {port}:127.0.0.1:{port} HEAD_NODE, then http://127.0.0.1:{port}/",
        f"            or: ray dashboard cluster.yaml --port {port} --remote-port {port}",
        f"            or: kubectl port-forward HEAD_POD {port}:{port}",
    ]
    login = "log in with the token that this command prints on the head node: ray get-auth-token"
    CommandResult(found, found["url"], login, *(tunnels if found["loopback"] else [])).print(as_json=as_json)
    if show:
        webbrowser.open(found["url"])
    return None
