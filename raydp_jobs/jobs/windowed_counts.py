"""A job that counts the messages of topics by tag or key in time windows, continuously. Each count is sent as a message
to another topic.

    open_stream → counted → as_messages → topic_sink
                  a window is counted until the watermark has passed its end; then its counts are sent, once

After a restart the job continues from its checkpoint: each message is counted once, and each count is sent once.
Messages that arrive after their window's counts were sent are not counted; the job reports their number.

A run may close the count: after its last message, it sends the counts of the windows that are still open. Then the
count is final (raydp_jobs.jobs.count_checkpoint), because no window is open for a further message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from raydp_jobs.jobs.count_checkpoint import CountState, check_open, compare_options, fix_options, state_of
from raydp_jobs.jobs.spark_job import SessionSize, check_topics, refuse_beside, spark_job, spark_options
from raydp_jobs.stream.progress import CLOSING_TIME_US, batch_size, topic_sources
from raymq.common.errors import InvalidArgumentError
from raymq.common.names import check_group
from raymq.common.numbers import POSITIVE
from raymq.tools.cli.entry import run_command
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.options import DURATION
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    json_option,
    namespace_option,
    print_value,
    quiet_option,
    say,
)
from raymq.tools.cli.terminal.progress import counting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from raydp_jobs.sink.partitions import WriteSummary
    from raymq.client.client import Client

CLOSE_NEEDS_AVAILABLE_NOW: Final = (
    "--close needs --available-now: only a run that ends has last windows; add --available-now, or leave out --close"
)
_LOOK_S: Final = 1

By = Literal["tags", "keys"]
Time = Literal["store", "born"]
Sink = Callable[["DataFrame", int], None]
OnRead = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Windows:
    """The time windows in which a job counts messages by tag or key (`by`). Each window is `length_s` seconds long. A
    message's window is decided by its store time or its born time (`time`).

    A new window begins every `slide_s` seconds. A window closes `late_s` seconds after its end.
    """

    length_s: int = 60
    slide_s: int = 60
    late_s: int = 10
    by: By = "tags"
    time: Time = "store"

    def __post_init__(self) -> None:
        if not 0 < self.slide_s <= self.length_s:
            raise InvalidArgumentError(
                f"windows of {self.length_s} s that begin every {self.slide_s} s would skip messages: set --slide "
                "to at most --window"
            )


@dataclass(frozen=True, slots=True)
class Counted:
    """The result of a run: the number of `counts` sent (one count per window and tag or key), and the number of
    batches.

    `late`: the minimum number of messages that arrived after their window's counts were sent. The real number may be
    larger, because Spark combines some late messages before it counts them. `closed`: all windows of the checkpoint
    have ended, and their counts are sent. `closed_before`: an earlier run had begun to close the checkpoint, so this
    run counted no further message.
    """

    target: str
    batches: int
    counts: int
    late: int
    closed: bool = False
    closed_before: bool = False


def run(
    spark: SparkSession,
    client: Client,
    topics: Sequence[str],
    target: str,
    checkpoint: Path,
    *,
    windows: Windows,
    start: Literal["first", "last", "end"] = "first",
    trigger_s: int = 5,
    available_now: bool = False,
    close: bool = False,
    max_offsets_per_trigger: int | None = None,
    commit_group: str | None = None,
    on_counts: Callable[[int], None] = lambda count: None,
    on_read: OnRead = lambda read, left: None,
) -> Counted:
    """Count the messages of `topics` and send the counts to `target`, until the query is stopped. `available_now`:
    count only the present messages.

    `close`, which needs `available_now`: also send the counts of the windows that are open after the last present
    message. Afterwards the checkpoint is final. A repeated run with `close` finishes what an interrupted run left, and
    counts no further message.

    `checkpoint`: this job's directory, from which it continues. `start`: where the job begins without a checkpoint.
    `on_counts` is called with each number of stored counts, and `on_read` after each batch with the number of messages
    that the run has read, and with the number that is left. The query is stopped at the end. Raises
    InvalidArgumentError for `close` without `available_now`, if the checkpoint belongs to other time windows, or if it
    is closed and `close` is not given; and the errors of `stream_topic` and `topic_sink`.
    """
    from raydp_jobs.sink.writer import topic_sink
    from raydp_jobs.stream.cluster import TopicChoice
    from raydp_jobs.stream.planner import BatchLimits
    from raydp_jobs.stream.topic_stream import open_stream

    if close and not available_now:
        raise InvalidArgumentError(CLOSE_NEEDS_AVAILABLE_NOW)
    check(client, topics, target, checkpoint, windows, commit_group, close=close)
    before = state_of(checkpoint)
    messages = open_stream(
        spark,
        TopicChoice(topics),
        {"starting_offsets": "earliest" if start == "first" else "latest"},
        BatchLimits(max_offsets=max_offsets_per_trigger, parallelism=spark.sparkContext.defaultParallelism),
        columns=["topic", windows.by, f"{windows.time}_timestamp"],
        commit_group=commit_group,
        client=client,
        closes=close,
    )
    stored = StoredCounts(on_counts)
    sink = topic_sink(target, client=client, on_batch=stored.add)
    fix_options(checkpoint, _described(topics, target, windows))
    query = begin(messages, windows, sink, checkpoint, trigger_s=trigger_s, available_now=available_now)
    done = await_end(query, target, stored, on_read)
    closed = close and state_of(checkpoint) is CountState.CLOSED
    return replace(done, closed=closed, closed_before=before is not CountState.OPEN)


def check(
    client: Client,
    topics: Sequence[str],
    target: str,
    checkpoint: Path,
    windows: Windows,
    commit_group: str | None,
    *,
    close: bool = False,
) -> None:
    """Check the arguments of `run` before Spark starts. Raises InvalidArgumentError if the target is one of the topics.
    Also raises it if the checkpoint belongs to other windows, cannot be created, or is closed and `close` is False.

    Raises IllegalNameError for an illegal name, TopicNotExistError if a topic does not exist, and NoPermissionError if
    the target is not writable.
    """
    if target in topics:
        raise InvalidArgumentError(f"the counts of {target} would be counted again: send them to another topic")
    if commit_group is not None:
        check_group(commit_group)
    check_topics(client, topics)
    client.write_queues(target)
    try:
        checkpoint.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"the checkpoint cannot be in {checkpoint}: {error.strerror}") from None
    compare_options(checkpoint, _described(topics, target, windows))
    if not close:
        check_open(checkpoint)


def _described(topics: Sequence[str], target: str, windows: Windows) -> dict[str, Any]:
    return {"topics": sorted(topics), "target": target, **asdict(windows)}


class StoredCounts:
    """The totals of a streaming query so far: the number of stored counts (result messages), and the number of stored
    batches."""

    def __init__(self, on_counts: Callable[[int], None]) -> None:
        self._on_counts = on_counts
        self.batches = self.counts = 0

    def add(self, batch: int, summary: WriteSummary) -> None:
        """Add a stored batch of the streaming query to the totals. Each row of the batch is one window's count, so
        `summary.rows` is the number of counts."""
        self.batches += 1
        self.counts += summary.rows
        self._on_counts(summary.rows)


def begin(
    messages: DataFrame, windows: Windows, sink: Sink, checkpoint: Path, *, trigger_s: int, available_now: bool
) -> StreamingQuery:
    """Start the streaming query. It counts `messages` by time window, converts each count to a message, and passes
    these messages to `sink`."""
    counts = as_messages(counted(messages, windows), windows.by)
    writer = counts.writeStream.foreachBatch(sink).outputMode("append").option("checkpointLocation", str(checkpoint))
    writer = (
        writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime=f"{trigger_s} seconds")
    )
    return writer.start()


def await_end(
    query: StreamingQuery, target: str, stored: StoredCounts, on_read: OnRead = lambda read, left: None
) -> Counted:
    """Wait until a query ends, and call `on_read` after each batch. Stops the query if the wait is interrupted. Raises
    the query's error."""
    late, seen, read = 0, -1, 0
    try:
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(_LOOK_S))
            new = [one for one in query.recentProgress if one["batchId"] > seen]
            late += sum(map(late_messages, new))
            sources = [one for each in new for one in topic_sources(each)]
            read += sum(map(batch_size, sources))
            if sources:
                on_read(read, sources[-1].lag)
            seen = max([seen, *(one["batchId"] for one in new)])
    finally:
        query.stop()
    return Counted(target, stored.batches, stored.counts, late)


def late_messages(progress: Any) -> int:
    """Return the number of rows that a batch dropped because the counts of their time windows were already sent. A row
    may stand for several messages, because Spark combines equal rows before it counts them."""
    return sum(int(one["numRowsDroppedByWatermark"]) for one in progress["stateOperators"])


# Steps of the Spark query; each converts a DataFrame to another DataFrame


def counted(messages: DataFrame, windows: Windows) -> DataFrame:
    """Return one row per topic, time window and tag or key, with the columns `value`, `start`, `end` and `messages`.
    `value` is the tag or key; null for messages without tag or key.

    A message with several keys counts for each key.
    """
    from pyspark.sql import functions as sf

    value = sf.col("tags") if windows.by == "tags" else sf.explode_outer(sf.array_distinct("keys"))
    time = sf.col(f"{windows.time}_timestamp").alias("time")
    window = sf.window("time", f"{windows.length_s} seconds", f"{windows.slide_s} seconds")
    counts = (
        messages.select("topic", time, value.alias("value"))
        .withWatermark("time", f"{windows.late_s} seconds")
        # The row that closes the windows moves the watermark, and is no message. Spark never applies a predicate on the
        # event time before the watermark.
        .where(sf.unix_micros("time") != CLOSING_TIME_US)
        .groupBy("topic", window, "value")
        .agg(sf.count("*").alias("messages"))
    )
    return counts.select("topic", "window.start", "window.end", "value", "messages")


def as_messages(counts: DataFrame, by: By) -> DataFrame:
    """Convert the rows of `counted` to messages. The body is a JSON object. `counted` counts messages by tag or by key;
    the message that carries such a count has this tag or key itself.

    All counts of one tag or key are sent to one queue, in order.
    """
    from pyspark.sql import functions as sf

    body = sf.to_json(
        sf.struct(
            "topic",
            sf.unix_millis("start").alias("start_ms"),
            sf.unix_millis("end").alias("end_ms"),
            sf.col("value").alias(by),
            "messages",
        ),
        {"ignoreNullFields": "false"},
    )
    has_value = sf.col("value").isNotNull()
    return counts.select(
        body.alias("body"),
        (sf.col("value") if by == "tags" else sf.lit(None).cast("string")).alias("tags"),
        sf.when(has_value, sf.array("value")).alias("keys"),
        sf.concat_ws("\n", "topic", "value").alias("sharding_key"),
    )


# The command line of the windowed-counts job


@click.command("windowed-counts", cls=Command)
@click.argument("topics", metavar="TOPIC...", shell_complete=completes("topics"), nargs=-1, required=True)
@click.argument("target", metavar="TARGET", shell_complete=completes("topics"))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Directory of the checkpoint, from which a restart continues.",
)
@click.option("--window", default="1m", show_default=True, type=DURATION, help="Length of each window.")
@click.option(
    "--slide",
    type=DURATION,
    help="Time between the starts of two windows. Default: the length of a window.",
)
@click.option(
    "--watermark",
    default="10s",
    show_default=True,
    type=DURATION,
    help="How late messages may arrive. The counts of a window are sent this long after its end.",
)
@click.option(
    "--by", type=click.Choice(["tags", "keys"]), default="tags", show_default=True, help="Count by tag or by key."
)
@click.option(
    "--time",
    type=click.Choice(["store", "born"]),
    default="store",
    show_default=True,
    help="Which time of a message decides about its window.",
)
@click.option(
    "--from",
    "start",
    type=click.Choice(["first", "last", "end"]),
    default="first",
    show_default=True,
    help="Where a count without a checkpoint begins: at the first message, or at the end (last and end).",
)
@click.option("--trigger", default="5s", show_default=True, type=DURATION, help="Time between two batches.")
@click.option(
    "--available-now", is_flag=True, help="Count the existing messages, then stop. Default: continue until ctrl-C."
)
@click.option(
    "--close",
    is_flag=True,
    help="With --available-now: also send the counts of the windows that are open after the last message. Then no "
    "further message can be counted from this checkpoint.",
)
@click.option("--max-offsets", type=NumberType(POSITIVE), help="Maximum number of messages in a batch.")
@click.option("--commit-group", metavar="GROUP", help="Consumer group whose lag shows the progress of the count.")
@spark_options
@namespace_option
@address_option
@json_option
@quiet_option
def command(
    topics: tuple[str, ...],
    target: str,
    checkpoint: Path,
    window: int,
    slide: int | None,
    watermark: int,
    by: By,
    time: Time,
    start: Literal["first", "last", "end"],
    trigger: int,
    available_now: bool,
    close: bool,
    max_offsets: int | None,
    commit_group: str | None,
    size: SessionSize,
    address: str | None,
    as_json: bool,
) -> None:
    """Count TOPICs by tag or key in windows of time, continuously; each count is a message of topic TARGET.

    Example: raymq job windowed-counts orders order-counts --checkpoint /data/order-counts --window 5m

    For topics that get no more messages: raymq job windowed-counts orders order-counts --checkpoint /data/order-counts
    --window 5m --available-now --close
    """
    if available_now:
        refuse_beside("--available-now", "trigger")
    elif close:
        raise InvalidArgumentError(CLOSE_NEEDS_AVAILABLE_NOW)
    windows = Windows(window, window if slide is None else slide, watermark, by, time)
    names, place = list(dict.fromkeys(topics)), checkpoint.absolute()

    def check_all(client: Client) -> None:
        check(client, names, target, place, windows, commit_group, close=close)

    with (
        spark_job("windowed-counts", address, size, quiet=as_json, check=check_all) as (spark, client),
        counting(f"counting {', '.join(names)}", talks=as_json) as counter,
    ):

        def show_read(read: int, left: int) -> None:
            counter.expect(read + left)
            counter.reach(read)

        done = run(
            spark,
            client,
            names,
            target,
            place,
            windows=windows,
            start=start,
            trigger_s=trigger,
            available_now=available_now,
            close=close,
            max_offsets_per_trigger=max_offsets,
            commit_group=commit_group,
            on_read=show_read,
        )
    print_value(as_json, asdict(done), lambda: say(_text(done)))


def _text(done: Counted) -> str:
    late = f"; at least {done.late:,} messages came too late" if done.late else ""
    closed = "; all windows are closed" if done.closed else ""
    if done.closed_before:
        closed += "; an earlier run has closed this checkpoint, so no newer message was counted"
    return f"{done.counts:,} counts sent to {done.target} in {done.batches:,} batches{late}{closed}"


def main() -> None:
    """Run the job as a program: ``python -m raydp_jobs.jobs.windowed_counts orders counts --checkpoint
    /data/counts``."""
    run_command(command)


if __name__ == "__main__":
    main()
