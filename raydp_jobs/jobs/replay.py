"""A job that sends Parquet files to a topic again: an archive, or any files with a body column. Each row is stored
exactly once.

    lines of rows (replay_source)  →  merged, the oldest next row first  →  at the requested rate  →  a writer per line

A line is a sequence of rows with a fixed order, such as an archived queue. The line's writer stores each row under the
line's identity and the row's number. So a second run sends only the rows that the first run did not send. The first run
stores the list of target queues in the NameServers' KV configuration, so rows do not move if the topic gets more queues
later. All rows of an archived queue are sent to one queue of the topic, in order.

The job needs no Spark: one process is faster than the rate that most topics should get, and a single process can
control the rate.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import pyarrow as pa

from raydp_jobs.jobs.replay_source import (
    EVERYTHING,
    Line,
    Selection,
    lines_of,
    metadata_of_file,
    producer_id,
    read_line,
)
from raydp_jobs.jobs.times import Period, period_options
from raymq.client.consumer.subscription import Subscription
from raymq.common.message import MessageQueue
from raymq.common.numbers import RATE, number_in
from raymq.tools.cli.entry import run_command
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.options import QUEUE
from raymq.tools.cli.terminal.number_type import RateType
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    client_of,
    json_option,
    namespace_option,
    print_value,
    quiet_option,
    say,
)
from raymq.tools.cli.terminal.progress import counting

if TYPE_CHECKING:
    from raymq.client.client import Client
    from raymq.client.producer.repeatable.writer import RepeatableWriter

OPEN_LINES_MAX: Final = 16
"""Maximum number of lines (sequences of rows) that a replay reads and writes at the same time. Each line needs an open
file and a producer."""
REPLAYS: Final = "raymq-replays"
"""The namespace in the NameServers' KV configuration that stores the target queues of each replay."""
_BURST_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay. `rows`: number of rows in the files. `selected`: rows that match the selection. `sent`:
    rows that this run sent. `stored_before`: rows that an earlier run under the same `name` had stored."""

    topic: str
    name: str
    rows: int
    selected: int
    sent: int
    stored_before: int


class Pace:
    """Limits the rate of a sender, in rows per second. A burst has at most as many rows as the rate allows in
    0.1 s."""

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = None if rate is None else number_in("rate", rate, RATE)
        self._clock = clock
        self._free_s = clock()

    @property
    def rows_max(self) -> int | None:
        """Maximum number of rows that the replay may send without a pause; None if the rate is unlimited."""
        return None if self._rate is None else max(int(self._rate * _BURST_S), 1)

    def pause_s(self, rows: int) -> float:
        """Record that the sender has sent `rows` rows. Returns the time in seconds that it must wait before its next
        rows, to keep the rate."""
        if self._rate is None:
            return 0.0
        now_s = self._clock()
        # A sender that was idle may afterwards send faster than its rate, for a burst. Limit the burst to _BURST_S
        # seconds of rows, however long the sender was idle.
        self._free_s = max(self._free_s, now_s - _BURST_S) + rows / self._rate
        return max(self._free_s - now_s, 0.0)


def run(
    client: Client,
    source: Path,
    topic: str,
    *,
    rate: float | None = None,
    selection: Selection = EVERYTHING,
    name: str | None = None,
    on_plan: Callable[[int], None] = lambda total: None,
    on_read: Callable[[int], None] = lambda count: None,
    sleep: Callable[[float], None] = time.sleep,
) -> ReplayResult:
    """Send the selected rows of `source` to an existing topic, each once, with at most `rate` rows per second.

    A line is a sequence of rows that are sent in order. On success all rows are stored, as durably as the cluster's
    settings require. After a failure, only the first rows of each line are stored. A run with the same source,
    selection and `name` (default: the source's path) continues the failed run. `on_plan` is called with the number of
    rows in the files, and `on_read` with the numbers of rows read.

    Raises the errors of `lines_of`, `read_line` and `RepeatableWriter`. Raises InvalidArgumentError if the rate is
    invalid.
    """
    name = str(source.absolute()) if name is None else name
    pace, lines = Pace(rate), lines_of(source)
    on_plan(sum(metadata_of_file(path).num_rows for line in lines for path in line.files))
    queues = fixed_queues(client, topic, name)
    done = [0, 0, 0, 0]
    for first in range(0, len(lines), OPEN_LINES_MAX):
        with ExitStack() as opened:
            writers = [
                (line, opened.enter_context(open_writer(client, queues, line, producer_id(name, line, selection))))
                for line in lines[first : first + OPEN_LINES_MAX]
            ]
            counts = write_lines(writers, selection, pace, on_read, sleep)
        done = [one + other for one, other in zip(done, counts, strict=True)]
    return ReplayResult(topic, name, *done)


def open_writer(client: Client, queues: Sequence[MessageQueue], line: Line, identity: str) -> RepeatableWriter:
    """Open a writer for the rows of a line (a sequence of rows with a fixed order).

    Rows of an archived queue are all sent to one queue of the topic. Other rows are sent to all queues of the topic,
    block by block. The choice of queues depends only on the line itself, not on other lines of the same source.
    """
    topic, place = queues[0].topic, line.place % len(queues)
    if line.is_queue:
        return client.repeatable_writer(topic, producer_id=identity, queues=[queues[place]])
    return client.repeatable_writer(topic, producer_id=identity, queues=queues, first_queue=place)


def write_lines(
    writers: Sequence[tuple[Line, RepeatableWriter]],
    selection: Selection,
    pace: Pace,
    on_read: Callable[[int], None] = lambda count: None,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[int, int, int, int]:
    """Send the rows of several lines (sequences of rows). When this function returns, all rows are stored. Returns the
    number of rows read, selected, sent by this run, and stored by earlier runs."""
    rows = selected = 0
    for index, count, batch in merged([read_line(line, selection) for line, _ in writers]):
        send(writers[index][1], batch, pace, sleep)
        rows, selected = rows + count, selected + batch.num_rows
        on_read(count)
    stored_before = sum(writer.finish().stored_before for _, writer in writers)
    return rows, selected, selected - stored_before, stored_before


def send(writer: RepeatableWriter, batch: pa.RecordBatch, pace: Pace, sleep: Callable[[float], None]) -> None:
    """Send the rows of a batch at the rate that `pace` allows. The rate does not count rows that are skipped because an
    earlier run has stored them."""
    step = pace.rows_max or max(batch.num_rows, 1)
    for first in range(0, batch.num_rows, step):
        part = batch.slice(first, step)
        before = writer.left_out
        writer.write(part)
        pause_s = pace.pause_s(part.num_rows - (writer.left_out - before))
        if pause_s > 0:
            sleep(pause_s)


def merged(lines: Sequence[Iterator[tuple[int, pa.RecordBatch]]]) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Merge the batches of all lines (sequences of rows). The next batch always comes from the line with the fewest
    rows read so far. Yields each batch with the index of its line."""
    heap = [(0, index) for index in range(len(lines))]
    while heap:
        read, index = heap[0]
        for count, batch in lines[index]:
            heapq.heapreplace(heap, (read + count, index))
            yield index, count, batch
            break
        else:
            heapq.heappop(heap)


def fixed_queues(client: Client, topic: str, name: str) -> tuple[MessageQueue, ...]:
    """Return the queues that the topic had at the first run of the replay `name`. The first run stores the list of
    these queues, and later runs read it."""
    key = f"{topic}/{name}"
    there = client.write_queues(topic)
    fixed = client.admin.list_kv(REPLAYS).get(key)
    if fixed is None:
        text = json.dumps([[queue.broker_name, queue.queue_id] for queue in there])
        client.admin.put_kv(REPLAYS, key, text)
        fixed = client.admin.list_kv(REPLAYS).get(key, text)
    return tuple(MessageQueue(topic, broker_name, queue_id) for broker_name, queue_id in json.loads(fixed))


@click.command("replay", cls=Command)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.option(
    "--rate",
    type=RateType(),
    metavar="N",
    help="Maximum number of messages per second, for example 500 or 500/s. Default: no limit.",
)
@period_options
@click.option(
    "--queue",
    "queues",
    type=QUEUE,
    multiple=True,
    metavar="BROKER:QUEUE",
    help="Only messages of this queue; repeatable.",
)
@click.option(
    "--tags", default="*", show_default=True, help='Only messages with these tags, for example "paid || refunded".'
)
@click.option(
    "--name",
    help="Name of the replay; a replay with another name sends all messages again. Default: the source's path.",
)
@namespace_option
@address_option
@json_option
@quiet_option
def command(
    source: Path,
    topic_name: str,
    rate: float | None,
    period: Period,
    queues: tuple[MessageQueue, ...],
    tags: str,
    name: str | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Send Parquet files to a topic again: an archive of a topic, or any files with a column "body". Each row is stored
    once, even if the command runs again.

    Example: raymq job replay /data/archive/orders orders-again --rate 5000/s --from 2026-03-01
    """
    chosen = frozenset((queue.broker_name, queue.queue_id) for queue in queues)
    selection = Selection(period, chosen, Subscription.parse("any", tags).tags)
    with client_of(address) as client, counting(f"replaying to {topic_name}", talks=as_json) as counter:
        done = run(
            client,
            source,
            topic_name,
            rate=rate,
            selection=selection,
            name=name,
            on_plan=counter.expect,
            on_read=counter.advance,
        )
    value: dict[str, Any] = asdict(done)
    text = f"{done.sent:,} messages sent to {topic_name}, {done.stored_before:,} were there by an earlier run"
    print_value(as_json, value, lambda: say(f"{text}; {done.rows - done.selected:,} were not selected"))


def main() -> None:
    """Run the job as a program: ``python -m raydp_jobs.jobs.replay /data/archive/orders orders-again``."""
    run_command(command)


if __name__ == "__main__":
    main()
