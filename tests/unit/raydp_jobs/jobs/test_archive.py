"""Tests of the archive job. The archive grows with each run, even if a run was interrupted, and damaged archive files
are detected."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from raydp_jobs.jobs import archive as job
from raydp_jobs.jobs.archive import Archived, archive, locked
from raydp_jobs.jobs.archive_check import check_file, check_rows, verify
from raydp_jobs.jobs.archive_files import ArchiveFile, find_pieces
from raydp_jobs.jobs.archive_writer import Written, write_range
from raydp_jobs.jobs.replay_source import Selection, lines_of, read_line
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import ClientStateError, InvalidArgumentError, StoreCorruptError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds
from tests.support.stores.topic_batches import HOUR_MS, batch_of, messages_of

RANGE = OffsetRange("orders", "broker-a", 3, 0, 60)
QUEUES = {MessageQueue("orders", "broker-a", 3): (0, 60), MessageQueue("orders", "broker-b", 0): (10, 40)}


class Killed(BaseException):
    """Simulates that a run was killed. It is a BaseException, so that `except Exception` does not catch it."""


def stage(ranges: Sequence[OffsetRange], staging: Path) -> list[Written]:
    return [written for item in ranges for written in write_range(item, messages_of(item), staging)]


def run(folder: Path, queues: dict[MessageQueue, tuple[int, int]] | None = None, **options: Any) -> Archived:
    bounds = {queue: QueueBounds(low, high, low) for queue, (low, high) in (queues or QUEUES).items()}
    options = {"stage": stage, "round_messages": 20, **options}
    with locked(folder) as place:
        return archive(place, "orders", bounds, **options)


def rows(folder: Path) -> list[tuple[str, int, int]]:
    """Return the broker group, queue id and offset of every row of the archive. Reads the files as Spark or pandas
    does."""
    table = ds.dataset(folder, format="parquet", partitioning="hive", ignore_prefixes=["_", "."]).to_table()
    return sorted(
        zip(*(table.column(name).to_pylist() for name in ("broker_name", "queue_id", "queue_offset")), strict=True)
    )


EXPECTED = sorted(
    (queue.broker_name, queue.queue_id, n) for queue, (low, high) in QUEUES.items() for n in range(low, high)
)


# Tests of archiving one offset range


def names(written: list[Written]) -> list[tuple[int, int, str, int]]:
    return [(one.piece.start_offset, one.piece.end_offset, one.piece.day, one.rows) for one in written]


def raymq_metadata(path: Path) -> dict[str, str]:
    found = pq.read_metadata(path).metadata
    return {key.decode(): value.decode() for key, value in found.items() if key.startswith(b"raymq.")}


def test_a_range_becomes_a_file_for_each_day(tmp_path: Path) -> None:
    written = write_range(RANGE, messages_of(RANGE), tmp_path)
    assert names(written) == [(0, 24, "2026-03-01", 24), (24, 48, "2026-03-02", 24), (48, 60, "2026-03-03", 12)]
    table = pq.read_table(tmp_path / written[1].piece.path, partitioning=None)
    assert table.column("queue_offset").to_pylist() == list(range(24, 48))
    assert table.column("body")[0].as_py() == b"broker-a:3:24"
    assert table.column("properties")[0].as_py() == [("number", "24")]
    assert raymq_metadata(tmp_path / written[1].piece.path) == {
        "raymq.topic": "orders",
        "raymq.broker_name": "broker-a",
        "raymq.queue_id": "3",
        "raymq.start_offset": "24",
        "raymq.end_offset": "48",
        "raymq.day": "2026-03-02",
        "raymq.rows": "24",
    }


def test_a_long_day_becomes_several_files(tmp_path: Path) -> None:
    written = write_range(RANGE, messages_of(RANGE), tmp_path, file_bytes=1)
    assert [one.piece.start_offset for one in written] == [0, 7, 14, 21, 24, 28, 35, 42, 48, 49, 56]
    assert written[-1].piece.end_offset == 60


def test_a_clock_that_goes_back_over_midnight_gives_files_in_the_order_of_offsets(tmp_path: Path) -> None:
    batches = [batch_of(RANGE, [22, 23]), batch_of(RANGE, [24]), batch_of(RANGE, [25], -2 * HOUR_MS)]
    written = write_range(RANGE, batches, tmp_path)
    assert names(written) == [(0, 24, "2026-03-01", 2), (24, 25, "2026-03-02", 1), (25, 60, "2026-03-01", 1)]


def test_offsets_without_a_message_belong_to_the_file_before_them(tmp_path: Path) -> None:
    written = write_range(RANGE, [batch_of(RANGE, [3, 4, 9]), batch_of(RANGE, [30, 31])], tmp_path)
    assert names(written) == [(0, 30, "2026-03-01", 3), (30, 60, "2026-03-02", 2)]
    assert write_range(RANGE, [], tmp_path) == []


def with_damage(batch: pa.RecordBatch, damaged: set[int]) -> pa.RecordBatch:
    """Return the batch as if some of its messages were damaged: all columns of these messages are null, except the
    columns of queue and queue offset."""
    places = {"topic", "broker_name", "queue_id", "queue_offset"}
    keep = pa.array([offset not in damaged for offset in batch.column("queue_offset").to_pylist()])
    columns = [
        batch.column(name)
        if name in places
        else pa.array(
            [
                value if kept else None
                for value, kept in zip(batch.column(name).to_pylist(), keep.to_pylist(), strict=True)
            ],
            batch.schema.field(name).type,
        )
        for name in batch.schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def test_damaged_messages_are_rows_without_a_body_which_a_replay_leaves_out(tmp_path: Path) -> None:
    damaged = {0, 31, 59}
    folder = tmp_path / "archive"

    def stage(ranges: Sequence[OffsetRange], staging: Path) -> list[Written]:
        batches = [with_damage(batch, damaged) for item in ranges for batch in messages_of(item)]
        return write_range(RANGE, batches, staging)

    run(folder, {RANGE.queue: (0, 60)}, stage=stage, round_messages=60)
    assert [offset for _, _, offset in rows(folder)] == list(range(60))
    for piece in find_pieces(folder):
        check_rows(folder / piece.path, "orders", piece)
    [line] = lines_of(folder)
    read = [(count, batch.column("body").null_count, batch.num_rows) for count, batch in read_line(line, Selection())]
    assert sum(count for count, _, _ in read) == 60
    assert sum(nulls for _, nulls, _ in read) == 0
    assert sum(kept for _, _, kept in read) == 57


def test_messages_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreCorruptError, match="offset 4 was read after offset 5"):
        write_range(RANGE, [batch_of(RANGE, [3, 5]), batch_of(RANGE, [4])], tmp_path)


def test_a_task_of_a_run_that_is_over_writes_nothing(tmp_path: Path) -> None:
    batches = messages_of(RANGE)
    with pytest.raises(FileNotFoundError):
        write_range(RANGE, batches, tmp_path / "gone")


def test_two_attempts_of_one_task_leave_one_whole_file(tmp_path: Path) -> None:
    first = messages_of(RANGE)
    half = [next(first), next(first)]

    def interrupted() -> Iterator[pa.RecordBatch]:
        yield from half
        assert write_range(RANGE, messages_of(RANGE), tmp_path)
        yield from first

    assert names(write_range(RANGE, interrupted(), tmp_path)) == names(write_range(RANGE, messages_of(RANGE), tmp_path))


# Tests of several runs of the archive job into one archive


def test_a_run_archives_each_message_once_and_the_next_run_adds_new_messages(tmp_path: Path) -> None:
    folder = tmp_path / "orders"
    done = run(folder)
    assert (done.messages, rows(folder)) == (90, EXPECTED)
    assert (run(folder).messages, rows(folder)) == (0, EXPECTED)
    more = run(folder, {**QUEUES, MessageQueue("orders", "broker-a", 3): (0, 65)})
    assert more.messages == 5
    assert [(queue.start_offset, queue.end_offset, queue.messages) for queue in more.added] == [(60, 65, 5)]
    assert verify(tmp_path, "orders").problems == ()


def test_progress_counts_messages(tmp_path: Path) -> None:
    told: list[int] = []
    run(tmp_path / "orders", on_plan=told.append, on_written=told.append)
    assert told[0] == 90
    assert sum(told[1:]) == 90
    assert max(told[1:]) <= 20


def test_messages_deleted_first_are_absent_and_counted(tmp_path: Path) -> None:
    queue = MessageQueue("orders", "broker-a", 3)
    run(tmp_path / "orders", {queue: (0, 10)})
    done = run(tmp_path / "orders", {queue: (25, 60)}, skip_lost=True)
    assert done.messages == 35
    report = verify(tmp_path, "orders")
    [found] = report.queues
    assert (found.start_offset, found.end_offset, found.messages, found.absent) == (0, 60, 45, 15)
    assert report.problems == ()


def test_a_range_without_messages_is_not_planned_again(tmp_path: Path) -> None:
    asked: list[OffsetRange] = []

    def nothing(ranges: Sequence[OffsetRange], staging: Path) -> list[Written]:
        asked.extend(ranges)
        return []

    for _ in range(2):
        run(tmp_path / "orders", {MessageQueue("orders", "broker-a", 3): (0, 10)}, stage=nothing)
    assert [(item.start_offset, item.end_offset) for item in asked] == [(0, 10)]
    assert verify(tmp_path, "orders").queues[0].absent == 10


class KillAt:
    """Fault injector that ends the run before or after its n-th operation that changes the disk."""

    def __init__(self, step: int, *, before: bool) -> None:
        self.step, self.before, self.made = step, before, 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **options: Any) -> Any:
            self.made += 1
            # compare `made` with `step` before the call: a mkdir that calls itself for the parent directory increases
            # `made` during the call
            is_last = self.made == self.step
            if is_last and self.before:
                raise Killed
            result = function(*args, **options)
            if is_last:
                raise Killed
            return result

        return stepped


@pytest.mark.parametrize("before", [True, False])
def test_a_killed_run_leaves_whole_files_and_the_next_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Kill a run of the archive job at each of its steps. It leaves only complete archive files, and the next run
    continues after them. The killed run does not clean up, so its staging files remain."""
    queues = {MessageQueue("orders", "broker-a", 3): (20, 30), MessageQueue("orders", "broker-b", 0): (0, 3)}
    expected = [*(("broker-a", 3, n) for n in range(20, 30)), *(("broker-b", 0, n) for n in range(3))]
    kills, step = 0, 0
    while True:
        step += 1
        folder = tmp_path / f"{step}" / "orders"
        killer = KillAt(step, before=before)
        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "fsync"):
                patch.setattr(os, name, killer.wrap(getattr(os, name)))
            patch.setattr(Path, "mkdir", killer.wrap(Path.mkdir))
            patch.setattr(shutil, "rmtree", killer.wrap(shutil.rmtree) if before else lambda *args, **options: None)
            try:
                run(folder, queues)
            except Killed:
                kills += 1
            else:
                break
        seen = rows(folder) if any(folder.glob("day=*/*.parquet")) else []
        assert len(seen) == len(set(seen)), f"step {step}"
        assert set(seen) <= set(expected)
        assert verify(folder.parent, "orders").problems == (), f"step {step}"
        again = run(folder, queues)
        assert again.messages == 13 - len(seen)
        assert rows(folder) == expected, f"step {step}"
        assert verify(folder.parent, "orders").problems == ()
    assert kills > 15


def test_a_task_that_fails_leaves_the_archive_as_it_was(tmp_path: Path) -> None:
    def fails(ranges: Sequence[OffsetRange], staging: Path) -> list[Written]:
        stage(ranges[:1], staging)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run(tmp_path / "orders", stage=fails)
    assert find_pieces(tmp_path / "orders") == []
    assert sorted(path.name for path in (tmp_path / "orders").iterdir()) == [".lock"]


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "orders"), pytest.raises(ClientStateError, match="another run is archiving"):
        run(tmp_path / "orders")
    run(tmp_path / "orders")


def test_files_missing_on_the_driver_are_reported_as_an_unshared_directory(tmp_path: Path) -> None:
    def elsewhere(ranges: Sequence[OffsetRange], staging: Path) -> list[Written]:
        other = tmp_path / "other-node"
        other.mkdir()
        return stage(ranges, other)

    with pytest.raises(InvalidArgumentError, match="a directory that all nodes share"):
        run(tmp_path / "orders", stage=elsewhere)


def test_unplanned_files_are_not_moved_into_the_archive(tmp_path: Path) -> None:
    def too_much(ranges: Sequence[OffsetRange], staging: Path) -> list[Written]:
        return stage([*ranges, OffsetRange("orders", "broker-c", 0, 0, 5)], staging)

    with pytest.raises(StoreCorruptError, match="was written, but does not belong to the plan"):
        run(tmp_path / "orders", stage=too_much)
    assert find_pieces(tmp_path / "orders") == []


# Tests of damaged archive files


def _rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change the rows of an archive file, but keep its old metadata."""
    table, metadata = change(pq.read_table(path, partitioning=None)), raymq_metadata(path)
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    """Invert a byte in the data pages of the first column of an archive file."""
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(6)
    data[column.data_page_offset + column.total_compressed_size - 5] ^= 0xFF
    path.write_bytes(data)


def _with(name: str, values: Callable[[list[Any]], list[Any]]) -> Callable[[Path], None]:
    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        column = pa.array(values(table.column(name).to_pylist()), table.schema.field(index).type)
        return table.set_column(index, table.schema.field(index), column)

    return lambda path: _rewrite(path, change)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "no file has offsets 24 to 47"),
    "cut": (_cut, "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "a byte flipped": (_flip, "is damaged"),
    "named otherwise": (
        lambda path: path.rename(path.with_name(path.name.replace("48.", "47."))),
        "its metadata gives",
    ),
    "another day": (
        lambda path: path.rename(path.parent.parent / "day=2026-03-01" / path.name),
        "its metadata gives",
    ),
    "a row less": (lambda path: _rewrite(path, lambda table: table.slice(1)), "its metadata gives"),
    "a row twice": (
        _with("queue_offset", lambda values: [24, *values[:-1]]),
        "out of order, or an offset occurs twice",
    ),
    "other offsets": (_with("queue_offset", lambda values: [n + 1 for n in values]), "do not match its name"),
    "another queue": (_with("queue_id", lambda values: [4] * len(values)), "whose queue_id is not 3"),
    "stored another day": (
        _with("store_timestamp", lambda values: values[:1] * 23 + [values[0].replace(year=2027)]),
        "not stored on",
    ),
    "a foreign file": (lambda path: path.with_name("notes.txt").touch(), "not a file of an archive"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(tmp_path: Path, kind: str) -> None:
    run(tmp_path / "orders", {MessageQueue("orders", "broker-a", 3): (0, 60)}, round_messages=1000)
    assert verify(tmp_path, "orders").problems == ()
    piece = ArchiveFile("broker-a", 3, 24, 48, "2026-03-02")
    damage, expected = DAMAGE[kind]
    damage(tmp_path / "orders" / piece.path)
    problems = verify(tmp_path, "orders").problems
    assert problems
    assert any(expected in problem for problem in problems), problems


def test_a_files_footer_is_checked_before_the_file_is_moved_into_place(tmp_path: Path) -> None:
    def damaged(ranges: Sequence[OffsetRange], staging: Path) -> list[Written]:
        written = stage(ranges, staging)
        _rewrite(staging / written[0].piece.path, lambda table: table.slice(1))
        return written

    with pytest.raises(StoreCorruptError, match="its metadata gives"):
        run(tmp_path / "orders", stage=damaged)
    assert find_pieces(tmp_path / "orders") == []


def test_the_row_count_of_a_footer_is_checked(tmp_path: Path) -> None:
    [written, *_] = write_range(RANGE, messages_of(RANGE), tmp_path)
    assert check_file(tmp_path / written.piece.path, "orders", written.piece) == 24
    with pytest.raises(StoreCorruptError, match="its metadata gives"):
        check_file(tmp_path / written.piece.path, "bills", written.piece)


# Tests of the command line of the archive job


def test_verify_shows_the_archive_and_exits_with_1_for_a_problem(tmp_path: Path) -> None:
    run(tmp_path / "orders")
    arguments = ["orders", str(tmp_path), "--verify"]
    result = CliRunner().invoke(job.command, arguments)
    assert (result.exit_code, "every file is whole, no queue has a gap" in result.output) == (0, True)
    _cut(tmp_path / "orders" / find_pieces(tmp_path / "orders")[0].path)
    result = CliRunner().invoke(job.command, [*arguments, "--json"])
    assert result.exit_code == 1
    assert '"problems": ["' in result.output


def test_verify_of_nothing_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(job.command, ["orders", str(tmp_path), "--verify"])
    assert isinstance(result.exception, InvalidArgumentError)
