"""Tests of the replay job, which sends the rows of Parquet files to a topic again: selection, order and rate of the
rows. Each row is sent once."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydp_jobs.jobs import replay as job
from raydp_jobs.jobs.archive_writer import write_range
from raydp_jobs.jobs.replay import Pace, ReplayResult, fixed_queues, merged, run
from raydp_jobs.jobs.replay_source import READ_ROWS, Line, Selection, lines_of, producer_id, read_line
from raydp_jobs.jobs.times import Period
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError, StoreCorruptError
from raymq.common.message import MessageQueue
from tests.support.stores.topic_batches import HOUR_MS, MARCH_1_MS, messages_of

QUEUES = tuple(MessageQueue("again", "broker-a", queue_id) for queue_id in range(4))
RANGES = [OffsetRange("orders", "broker-a", 3, 0, 60), OffsetRange("orders", "broker-b", 0, 10, 40)]


def archive(folder: Path, ranges: list[OffsetRange]) -> Path:
    """Write archive files of the given offset ranges, in the form in which the archive job writes them."""
    folder.mkdir(exist_ok=True)
    for item in ranges:
        write_range(item, messages_of(item), folder)
    return folder


class Writer:
    """Fake writer that stores rows in a dictionary: (producer id, sequence number) → row. The writer fails at row
    number `fails_at` of the replay."""

    def __init__(self, cluster: Cluster, producer: str, queues: list[MessageQueue], first_queue: int) -> None:
        self.cluster, self.producer = cluster, producer
        self.queues, self.first_queue = queues, first_queue
        self.left_out, self.rows = 0, 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.open -= 1

    def write(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            if len(self.cluster.stored) == self.cluster.fails_at:
                raise ServiceNotAvailableError("broker-a is away")
            key = self.producer, self.rows
            self.rows += 1
            if key in self.cluster.stored:
                assert self.cluster.stored[key] == row
                self.left_out += 1
            self.cluster.stored[key] = row

    def finish(self) -> Any:
        return SimpleNamespace(stored_before=self.left_out)


class Cluster:
    """Fake client of a cluster with the topic `again`."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, int], dict[str, Any]] = {}
        self.kv: dict[str, str] = {}
        self.fails_at = -1
        self.open = self.most_open = 0
        self.writers: list[Writer] = []
        self.queues = QUEUES
        self.admin = self

    def write_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        return self.queues

    def list_kv(self, namespace: str) -> dict[str, str]:
        assert namespace == job.REPLAYS
        return dict(self.kv)

    def put_kv(self, namespace: str, key: str, value: str) -> None:
        self.kv[key] = value

    def repeatable_writer(self, topic: str, *, producer_id: str, queues: Any, first_queue: int = 0) -> Writer:
        assert topic == "again"
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        self.writers.append(Writer(self, producer_id, list(queues), first_queue))
        return self.writers[-1]


def replay(cluster: Cluster, source: Path, **options: Any) -> ReplayResult:
    client: Any = cluster
    return run(client, source, "again", sleep=lambda seconds: None, **options)


def bodies(cluster: Cluster) -> list[bytes]:
    return sorted(row["body"] for row in cluster.stored.values())


def expected(ranges: list[OffsetRange] = RANGES) -> list[bytes]:
    return sorted(
        b"%s:%d:%d" % (item.broker_name.encode(), item.queue_id, offset)
        for item in ranges
        for offset in range(item.start_offset, item.end_offset)
    )


# Tests that a replay sends each row exactly once


def test_an_archive_is_sent_once_however_often_it_is_run(tmp_path: Path) -> None:
    cluster, folder = Cluster(), archive(tmp_path / "orders", RANGES)
    done = replay(cluster, folder)
    assert (done.rows, done.selected, done.sent, done.stored_before) == (90, 90, 90, 0)
    assert bodies(cluster) == expected()
    again = replay(cluster, folder)
    assert (again.sent, again.stored_before) == (0, 90)
    assert bodies(cluster) == expected()


@pytest.mark.parametrize("fails_at", [0, 1, 40, 89])
def test_a_run_that_failed_is_gone_on_with(tmp_path: Path, fails_at: int) -> None:
    cluster, folder = Cluster(), archive(tmp_path / "orders", RANGES)
    cluster.fails_at = fails_at
    with pytest.raises(ServiceNotAvailableError):
        replay(cluster, folder)
    assert cluster.open == 0
    cluster.fails_at = -1
    done = replay(cluster, folder)
    assert (done.sent, done.stored_before) == (90 - fails_at, fails_at)
    assert bodies(cluster) == expected()


def test_an_archive_that_grew_has_only_its_new_rows_sent(tmp_path: Path) -> None:
    """After a first replay, the archive gets a queue whose name sorts before the old queues, and more files in the old
    queues. A second replay sends only the new rows."""
    cluster, folder = Cluster(), archive(tmp_path / "orders", RANGES)
    replay(cluster, folder)
    more = [OffsetRange("orders", "broker-a", 3, 60, 70), OffsetRange("orders", "aaa", 0, 0, 5)]
    archive(folder, more)
    assert replay(cluster, folder).sent == 15
    assert bodies(cluster) == expected([*RANGES, *more])


def test_an_archive_with_deleted_oldest_files_is_sent_completely(tmp_path: Path) -> None:
    """If the oldest files of an archive were deleted, a replay sends all remaining rows again. The deletion changes the
    numbers of the remaining rows. So a replay that continued at a row number would skip rows that were never sent."""
    cluster, folder = Cluster(), archive(tmp_path / "orders", RANGES[:1])
    replay(cluster, folder)
    next(folder.glob("day=2026-03-01/*.parquet")).unlink()
    assert replay(cluster, folder).sent == 36


def test_queues_that_the_topic_gets_between_two_runs_move_no_row(tmp_path: Path) -> None:
    cluster, folder = Cluster(), archive(tmp_path / "orders", RANGES)
    replay(cluster, folder)
    cluster.queues = tuple(MessageQueue("again", "broker-0", queue_id) for queue_id in range(3)) + QUEUES
    replay(cluster, folder)
    half = len(cluster.writers) // 2
    before, after = cluster.writers[:half], cluster.writers[half:]
    assert [(one.producer, one.queues) for one in before] == [(one.producer, one.queues) for one in after]
    client: Any = cluster
    assert fixed_queues(client, "again", "another name") == cluster.queues


def test_another_name_or_selection_sends_all_again(tmp_path: Path) -> None:
    cluster, folder = Cluster(), archive(tmp_path / "orders", RANGES)
    replay(cluster, folder)
    assert replay(cluster, folder, name="second").sent == 90
    assert replay(cluster, folder, selection=Selection(tags=frozenset({"late"}))).sent == 45
    ids = [
        producer_id(name, line, selection)
        for name in ("a", "b")
        for line in (Line("x", (), 0, True), Line("y", (), 0, True))
        for selection in (Selection(), Selection(Period(1, 2)), Selection(queues=frozenset({("broker-a", 1)})))
    ]
    assert len(set(ids)) == len(ids)
    assert all(len(one.encode()) <= 64 for one in ids)


def test_a_queue_of_an_archive_goes_to_one_queue_and_its_neighbour_to_the_next(tmp_path: Path) -> None:
    ranges = [OffsetRange("orders", "broker-a", queue_id, 0, 5) for queue_id in range(4)]
    cluster = Cluster()
    replay(cluster, archive(tmp_path / "orders", ranges))
    assert {len(writer.queues) for writer in cluster.writers} == {1}
    targets = [writer.queues[0].queue_id for writer in cluster.writers]
    assert sorted(targets) == [0, 1, 2, 3]
    assert all((one + 1) % 4 == other for one, other in pairwise(targets))


def test_few_lines_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "OPEN_LINES_MAX", 2)
    ranges = [OffsetRange("orders", "broker-a", queue_id, 0, 5) for queue_id in range(5)]
    cluster = Cluster()
    assert replay(cluster, archive(tmp_path / "orders", ranges)).sent == 25
    assert (cluster.most_open, cluster.open, len(cluster.writers)) == (2, 0, 5)


def test_progress_counts_rows_of_the_files(tmp_path: Path) -> None:
    told: list[int] = []
    selection = Selection(tags=frozenset({"nothing"}))
    folder = archive(tmp_path / "orders", RANGES)
    done = replay(Cluster(), folder, selection=selection, on_plan=told.append, on_read=told.append)
    assert (told[0], sum(told[1:])) == (90, 90)
    assert (done.rows, done.selected, done.sent) == (90, 0, 0)


# Tests of the rows that a replay selects, and of their content


def test_messages_have_their_columns_again(tmp_path: Path) -> None:
    cluster = Cluster()
    replay(cluster, archive(tmp_path / "orders", [OffsetRange("orders", "broker-a", 3, 7, 8)]))
    assert list(cluster.stored.values()) == [
        {"body": b"broker-a:3:7", "tags": "late", "keys": ["o-7"], "properties": [("number", "7")]}
    ]


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (Selection(), 90),
        (Selection(Period(MARCH_1_MS + 10 * HOUR_MS, MARCH_1_MS + 12 * HOUR_MS)), 4),
        (Selection(Period(MARCH_1_MS + 39 * HOUR_MS)), 22),
        (Selection(queues=frozenset({("broker-b", 0)})), 30),
        (Selection(queues=frozenset({("broker-b", 0), ("broker-a", 3), ("broker-c", 1)})), 90),
        (Selection(queues=frozenset({("broker-b", 3)})), 0),
        (Selection(tags=frozenset({"late"})), 45),
        (Selection(Period(None, MARCH_1_MS + 11 * HOUR_MS), frozenset({("broker-b", 0)}), frozenset({"paid"})), 0),
        (Selection(Period(None, MARCH_1_MS + 12 * HOUR_MS), frozenset({("broker-b", 0)}), frozenset({"late"})), 1),
    ],
)
def test_a_selection_sends_its_rows(tmp_path: Path, selection: Selection, count: int) -> None:
    cluster = Cluster()
    done = replay(cluster, archive(tmp_path / "orders", RANGES), selection=selection)
    assert (done.rows, done.sent, len(cluster.stored)) == (90, count, count)


def test_any_parquet_with_bodies_is_sent_file_by_file_to_all_queues(tmp_path: Path) -> None:
    for name, count in (("b.parquet", 3), ("a.parquet", READ_ROWS + 2), ("_temporary/c.parquet", 1)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"body": [f"{name} {n}" for n in range(count)], "other": [1] * count}), path)
    cluster = Cluster()
    assert replay(cluster, tmp_path).sent == READ_ROWS + 5
    assert [tuple(writer.queues) for writer in cluster.writers] == [QUEUES, QUEUES]
    assert {tuple(row) for row in cluster.stored.values()} == {("body",)}
    assert replay(cluster, tmp_path).sent == 0
    # A replay of one file has another producer name than a replay of its folder, so its rows are sent again.
    assert replay(cluster, tmp_path / "b.parquet").sent == 3


def test_a_file_that_changed_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["one", "two"]}), path)
    cluster = Cluster()
    replay(cluster, tmp_path)
    pq.write_table(pa.table({"body": ["zero", "one", "two"]}), path)
    assert replay(cluster, tmp_path).sent == 3


def test_lines_advance_alike() -> None:
    def line(*counts: int) -> Any:
        return iter([(count, pa.record_batch({"body": [b""] * count})) for count in counts])

    order = [(index, count) for index, count, _ in merged([line(4, 4, 4), line(10), line(), line(3, 6)])]
    assert order == [(0, 4), (1, 10), (3, 3), (3, 6), (0, 4), (0, 4)]


# Tests of options and files that a replay refuses


def test_a_directory_of_archives_names_one_of_them(tmp_path: Path) -> None:
    archive(tmp_path / "orders", RANGES)
    with pytest.raises(InvalidArgumentError, match=r"name one archive, such as .*/orders"):
        lines_of(tmp_path)


def test_a_missing_source_or_a_source_without_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has no Parquet file"):
        lines_of(tmp_path)
    with pytest.raises(InvalidArgumentError, match="does not exist: name a Parquet file"):
        lines_of(tmp_path / "nothing")


def test_an_archive_with_a_gap_is_refused(tmp_path: Path) -> None:
    folder = archive(tmp_path / "orders", RANGES)
    next(folder.glob("day=2026-03-02/broker-a.*")).unlink()
    with pytest.raises(StoreCorruptError, match="no file has offsets 24 to 47"):
        lines_of(folder)


def test_a_file_without_the_columns_that_are_wanted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"]}), path)
    with pytest.raises(InvalidArgumentError, match="has no column body; its columns are text"):
        list(read_line(lines_of(path)[0], Selection()))
    pq.write_table(pa.table({"body": ["x"]}), path)
    with pytest.raises(InvalidArgumentError, match="has no column store_timestamp, broker_name, queue_id"):
        list(read_line(lines_of(path)[0], Selection(Period(1), frozenset({("broker-a", 0)}))))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(StoreCorruptError, match="cannot be read"):
        lines_of(path)


@pytest.mark.parametrize("rate", ["fast", 0, -1, math.nan, math.inf, 1e-300])
def test_an_illegal_rate_is_refused(rate: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"rate must be .*0\.001 to 1000000000"):
        Pace(rate)


# Tests of the rate at which a replay sends rows. The fake clock advances only during pauses.


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_rows_are_sent_at_the_rate() -> None:
    clock = Clock()
    pace = Pace(1000, clock)
    assert pace.rows_max == 100
    for _ in range(50):
        clock.now_s += pace.pause_s(100)
    assert clock.now_s - 100.0 == pytest.approx(5.0, abs=0.11)


def test_time_in_which_nobody_sent_is_not_made_up_for() -> None:
    clock = Clock()
    pace = Pace(1000, clock)
    clock.now_s += 3600
    pauses = [pace.pause_s(100) for _ in range(3)]
    assert pauses == pytest.approx([0.0, 0.1, 0.2])


def test_without_a_rate_there_is_no_pause() -> None:
    pace = Pace(None)
    assert (pace.rows_max, pace.pause_s(10**9)) == (None, 0.0)


def test_rows_that_were_stored_before_take_no_time(tmp_path: Path) -> None:
    cluster, folder = Cluster(), archive(tmp_path / "orders", RANGES)
    client: Any = cluster
    pauses: list[float] = []
    run(client, folder, "again", rate=10, sleep=pauses.append)
    assert sum(1 for pause in pauses if pause > 0) >= 85
    pauses.clear()
    run(client, folder, "again", rate=10, sleep=pauses.append)
    assert len(pauses) <= 1


def test_a_small_rate_sends_row_by_row() -> None:
    assert Pace(0.5).rows_max == 1
