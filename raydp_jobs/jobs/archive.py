"""A job that archives a topic as Parquet files by day. Later runs continue the archive.

    driver     lock the archive, empty its staging directory, find the next offset of each queue
    rounds     plan about a million messages → tasks write files in staging → the driver checks each file and renames it
               into place, in the order of its offsets

A run may be killed at any moment. Files in their final place are complete, and their offset ranges follow each other
without a gap. The next run empties the staging directory and continues after the last file. Only the driver that holds
the lock renames files. A task of a run that has ended finds its staging directory deleted, so it writes nothing. Each
file is flushed before it is renamed, and each rename is flushed before the next rename.

Executors write the files and the driver renames them, so the archive must have the same path on all these nodes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import pyarrow as pa

from raydp_jobs.jobs.archive_check import ArchivedQueue, ArchiveReport, check_file, summary, verify
from raydp_jobs.jobs.archive_files import (
    STAGING,
    ArchiveFile,
    ArchiveStep,
    check_cover,
    find_pieces,
    next_offsets,
    plan_round,
)
from raydp_jobs.jobs.archive_writer import Written, flush_file, write_range
from raydp_jobs.jobs.spark_job import (
    SPARK_PARAMETERS,
    SessionSize,
    check_topics,
    refuse_beside,
    spark_job,
    spark_options,
)
from raymq.client.scan.partitions import ScanPartition
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import ClientStateError, InvalidArgumentError, StoreCorruptError
from raymq.common.message import MessageQueue
from raymq.common.names import check_topic
from raymq.common.protocol.store import QueueBounds
from raymq.tools.cli.entry import run_command
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.options import TIME, RenamedOption
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    json_option,
    namespace_option,
    print_value,
    quiet_option,
    say,
    table,
)
from raymq.tools.cli.terminal.progress import counting

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from raymq.client.client import Client

ROUND_MESSAGES: Final = 1_000_000
"""Approximate number of messages that the archive job writes in one round. At the end of a round the driver checks the
round's files and renames them into place."""
_REPORT: Final = (
    "broker_name string, queue_id int, start_offset long, end_offset long, day string, rows long, bytes long"
)

Stage = Callable[[Sequence[OffsetRange], Path], list[Written]]
"""Type of a function that writes the messages of offset ranges to archive files in a staging directory, and returns the
files."""


@dataclass(frozen=True, slots=True)
class Archived:
    """The result of one archive run: the numbers of messages, files and bytes that the run added to the archive, in
    total and by queue."""

    topic: str
    messages: int
    files: int
    bytes: int
    added: tuple[ArchivedQueue, ...]


def run(
    spark: SparkSession,
    client: Client,
    topic: str,
    directory: Path,
    *,
    before_ms: int | None = None,
    skip_lost: bool = False,
    round_messages: int = ROUND_MESSAGES,
    on_plan: Callable[[int], None] = lambda total: None,
    on_written: Callable[[int], None] = lambda count: None,
) -> Archived:
    """Archive the present messages of a topic that are not archived yet. `before_ms`: only messages stored before this
    time.

    `on_plan` is called with the number of messages to archive. `on_written` is called after files were renamed into
    place, with their number of messages. On success the archive has each message exactly once. After a failure it has
    only some of the messages, and the next run continues.

    Raises ClientStateError while another run holds the archive's lock. Raises DataLossError if messages were deleted
    before they were archived, unless `skip_lost`. Raises StoreCorruptError if the archive has gaps or foreign files, or
    belongs to an older topic of this name. Raises the errors of `read_topic`.
    """
    from raymq.client.scan.queue_bounds import ClusterQueues

    check_topic(topic)
    source = ClusterQueues(client.routes, client.storages, client.names)
    queues = source.bounds(source.queues(topic))
    if before_ms is not None:
        ends = source.offsets_by_time(dict.fromkeys(queues, before_ms))
        queues = {queue: _until(bounds, ends[queue]) for queue, bounds in queues.items()}
    stage = spark_stage(spark, client)
    with locked(directory / topic) as folder:
        return archive(
            folder,
            topic,
            queues,
            stage,
            skip_lost=skip_lost,
            round_messages=round_messages,
            parallelism=spark.sparkContext.defaultParallelism,
            on_plan=on_plan,
            on_written=on_written,
        )


def check(client: Client, topic: str, directory: Path) -> None:
    """Check the topic and the archive before Spark starts. Raises TopicNotExistError if the topic does not exist, and
    ClientStateError if another run holds the archive's lock. Raises StoreCorruptError if the archive has gaps or
    foreign files."""
    check_topics(client, [topic])
    with locked(directory / topic) as folder:
        next_offsets(find_pieces(folder))


def _until(bounds: QueueBounds, end_offset: int) -> QueueBounds:
    end = min(max(end_offset, bounds.min_offset), bounds.max_offset)
    return QueueBounds(bounds.min_offset, end, bounds.first_in_memory)


# Archiving a topic's queues in several rounds


def archive(
    folder: Path,
    topic: str,
    queues: Mapping[MessageQueue, QueueBounds],
    stage: Stage,
    *,
    skip_lost: bool = False,
    round_messages: int = ROUND_MESSAGES,
    parallelism: int = 1,
    on_plan: Callable[[int], None] = lambda total: None,
    on_written: Callable[[int], None] = lambda count: None,
) -> Archived:
    """Archive the messages of `queues`, from the lower to the upper bound of each queue, into `folder`, the archive
    directory of the topic. The caller must have locked `folder`. Raises the errors of `run`, which locks the directory
    and calls this function."""
    done = next_offsets(find_pieces(folder))
    starts = {
        queue: done.get((queue.broker_name, queue.queue_id), bounds.min_offset) for queue, bounds in queues.items()
    }
    on_plan(sum(max(bounds.max_offset - starts[queue], 0) for queue, bounds in queues.items()))
    total: list[Written] = []
    while part := plan_round(queues, done, most=round_messages, parallelism=parallelism, skip_lost=skip_lost):
        with staging_in(folder) as staging:
            written = _write_round(part, topic, staging, stage)
            for one in written:
                put_in_place(folder, staging, one.piece)
        total += written
        done |= {one.piece.queue: one.piece.end_offset for one in written}
        on_written(sum(one.piece.end_offset - one.piece.start_offset for one in written))
    rows = {one.piece: one.rows for one in total}
    files = [one for one in total if one.piece.day]
    return Archived(topic, sum(rows.values()), len(files), sum(one.bytes for one in files), summary(list(rows), rows))


def _write_round(part: ArchiveStep, topic: str, staging: Path, stage: Stage) -> list[Written]:
    """Write the archive files of one round (ArchiveStep) into the staging directory, and check them. Returns the files
    in the order in which the caller must rename them into the archive."""
    written = stage(part.ranges, staging) if part.ranges else []
    for one in written:
        path = staging / one.piece.path
        if not path.is_file():
            raise InvalidArgumentError(
                f"file {path} was written by an executor, but does not exist on this node: use a directory that "
                "all nodes share under the same path"
            )
        rows = check_file(path, topic, one.piece)
        if rows != one.rows:
            raise StoreCorruptError(f"file {path} has {rows} rows, but {one.rows} rows were written")
    written += [_write_absent(piece, staging) for piece in (*part.absent, *_empty(part.ranges, written))]
    check_cover(
        [
            *part.ranges,
            *(OffsetRange(topic, *piece.queue, piece.start_offset, piece.end_offset) for piece in part.absent),
        ],
        [one.piece for one in written],
    )
    return sorted(written, key=lambda one: one.piece)


def _empty(ranges: Iterable[OffsetRange], written: Iterable[Written]) -> list[ArchiveFile]:
    """Return an archive entry without rows for each offset range that contains no message, and therefore has no Parquet
    file."""
    starts = {(*one.piece.queue, one.piece.start_offset) for one in written}
    return [
        ArchiveFile(item.broker_name, item.queue_id, item.start_offset, item.end_offset, "")
        for item in ranges
        if (item.broker_name, item.queue_id, item.start_offset) not in starts
    ]


def _write_absent(piece: ArchiveFile, staging: Path) -> Written:
    path = staging / piece.path
    path.parent.mkdir(exist_ok=True)
    path.touch()
    flush_file(path)
    return Written(piece, 0, 0)


def put_in_place(folder: Path, staging: Path, piece: ArchiveFile) -> None:
    """Rename a complete file from the staging directory into the archive. On return the new name is durable."""
    target = folder / piece.path
    if not target.parent.is_dir():
        target.parent.mkdir()
        flush_file(folder)
    os.rename(staging / piece.path, target)
    flush_file(target.parent)


@contextmanager
def staging_in(folder: Path) -> Iterator[Path]:
    """Create an empty staging directory for one round of an archive run. Deletes the staging directories of earlier
    rounds. Deletes the new directory at the end of the `with` block."""
    staging = folder / STAGING / uuid.uuid4().hex
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(folder / STAGING, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Lock a topic's archive directory during a `with` block; create the directory if necessary. Raises
    ClientStateError if another run holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"cannot create the archive in directory {folder}: {error.strerror}") from None
    with open(folder / ".lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClientStateError(
                f"another run is archiving into directory {folder}; wait until that run ends"
            ) from None
        yield folder


# Writing archive files in Spark tasks


def spark_stage(spark: SparkSession, client: Client) -> Stage:
    """Return a function that writes offset ranges to archive files (a stage). It runs one Spark task for each range.
    The task reads the range from the client's cluster.

    A task runs on the node whose disk holds the range, if an executor on that node is free.
    """
    from raydp_jobs.source.locality import preferred_hosts
    from raydp_jobs.source.reader import read_ranges
    from raydp_jobs.worker_client import address_of_cluster
    from raymq.remoting.namespaced_routes import NamespacedRoutes

    address = address_of_cluster(client)

    def read(item: OffsetRange) -> Iterator[pa.RecordBatch]:
        return read_ranges([item], address, frozenset(), True)

    def hosts(ranges: Sequence[OffsetRange]) -> list[list[str]]:
        routes = NamespacedRoutes(client.routes, client.names)
        return preferred_hosts(routes, [ScanPartition((item,), 0) for item in ranges])

    return stage_with(spark, read, hosts)


def stage_with(
    spark: SparkSession,
    read: Callable[[OffsetRange], Iterator[pa.RecordBatch]],
    hosts: Callable[[Sequence[OffsetRange]], list[list[str]]] = lambda ranges: [[] for _ in ranges],
) -> Stage:
    """Return a stage (a function that writes offset ranges to archive files) that runs one Spark task per offset range.
    The task prefers to run on one of the range's `hosts`.

    `read` yields the messages of a range.
    """
    from raydp_jobs.source.locality import numbered_partitions

    def stage(ranges: Sequence[OffsetRange], staging: Path) -> list[Written]:
        def write(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for index in (index for batch in rows for index in batch.column(0).to_pylist()):
                yield from map(_report, write_range(ranges[index], read(ranges[index]), staging))

        reports = numbered_partitions(spark, hosts(ranges)).mapInArrow(write, _REPORT).collect()
        return [Written(ArchiveFile(*row[:5]), row["rows"], row["bytes"]) for row in reports]

    return stage


def _report(written: Written) -> pa.RecordBatch:
    piece = written.piece
    values = {
        "broker_name": pa.array([piece.broker_name]),
        "queue_id": pa.array([piece.queue_id], pa.int32()),
        "start_offset": pa.array([piece.start_offset]),
        "end_offset": pa.array([piece.end_offset]),
        "day": pa.array([piece.day]),
        "rows": pa.array([written.rows]),
        "bytes": pa.array([written.bytes]),
    }
    return pa.RecordBatch.from_pydict(values)


# The command line of the archive job


@click.command("archive", cls=Command)
@click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--to",
    "before_ms",
    cls=RenamedOption,
    former=["--before"],
    type=TIME,
    help="Only messages stored before this time: ISO 8601, or -1d for a day ago.",
)
@click.option("--skip-lost", is_flag=True, help="Continue if messages were deleted before they could be archived.")
@click.option("--verify", "only_verify", is_flag=True, help="Archive nothing; read all files and check them.")
@spark_options
@namespace_option
@address_option
@json_option
@quiet_option
def command(
    topic_name: str,
    directory: Path,
    before_ms: int | None,
    skip_lost: bool,
    only_verify: bool,
    size: SessionSize,
    address: str | None,
    as_json: bool,
) -> None:
    """Archive a topic in a directory, as Parquet files by day, each message once. A later run adds newer messages.

    Exit code 1 if --verify finds a problem. Example: raymq job archive orders /data/archive --to 2026-03-02
    """
    if only_verify:
        refuse_beside("--verify", "before_ms", "skip_lost", "address", "within_namespace", *SPARK_PARAMETERS)
        _verify(directory, check_topic(topic_name), as_json)
        return
    folder = directory.absolute()

    def check_archive(client: Client) -> None:
        check(client, topic_name, folder)

    with (
        spark_job("archive", address, size, quiet=as_json, check=check_archive) as (spark, client),
        counting(f"archiving {topic_name}", talks=as_json) as counter,
    ):
        done = run(
            spark,
            client,
            topic_name,
            folder,
            before_ms=before_ms,
            skip_lost=skip_lost,
            on_plan=counter.expect,
            on_written=counter.advance,
        )
    added = _rows(done.added)
    value = {"topic": done.topic, "messages": done.messages, "files": done.files, "bytes": done.bytes, "added": added}
    text = f"{done.messages:,} messages of {done.topic} archived, {done.files} new files with {done.bytes:,} bytes"
    print_value(as_json, value, lambda: _show(text, added))


def _verify(directory: Path, topic: str, as_json: bool) -> None:
    if not (directory / topic).is_dir():
        raise InvalidArgumentError(f"directory {directory} has no archive of topic {topic!r}")
    with counting("checking files", talks=as_json) as counter:
        counter.expect(sum(1 for _ in (directory / topic).glob("day=*/*")))
        report = verify(directory, topic, counter.advance)
    value = {"topic": topic, "messages": report.messages, "queues": _rows(report.queues)}
    problems = list(report.problems)
    print_value(as_json, {**value, "problems": problems}, lambda: _show_report(topic, report))
    if problems:
        raise click.exceptions.Exit(1)


def _rows(queues: Iterable[ArchivedQueue]) -> list[dict[str, Any]]:
    return [asdict(queue) for queue in queues]


def _show_report(topic: str, report: ArchiveReport) -> None:
    for problem in report.problems:
        say(problem)
    state = f"{len(report.problems)} problems" if report.problems else "every file is whole, no queue has a gap"
    _show(f"{report.messages:,} messages of {topic} in the archive: {state}", _rows(report.queues))


def _show(text: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        table(list(rows[0]), [list(row.values()) for row in rows])
    say(text)


def main() -> None:
    """Run the job as a program: ``python -m raydp_jobs.jobs.archive orders /data/archive``."""
    run_command(command)


if __name__ == "__main__":
    main()
