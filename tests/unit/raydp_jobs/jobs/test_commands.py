"""Tests of the commands for jobs that run on Spark: the options that a command passes to its job's `run`, and the
command's output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raydp_jobs.jobs import archive, count_checkpoint, topic_stats, windowed_counts
from raydp_jobs.jobs.archive import Archived
from raydp_jobs.jobs.archive_check import ArchivedQueue
from raydp_jobs.jobs.spark_job import SessionSize
from raydp_jobs.jobs.times import Period
from raydp_jobs.jobs.topic_figures import TopicFigures
from raydp_jobs.jobs.windowed_counts import Counted, StoredCounts, Windows, await_end
from raydp_jobs.stream.progress import StreamOffsets, WindowClosing
from raymq.common.errors import (
    ClientStateError,
    ConfigError,
    IllegalNameError,
    InvalidArgumentError,
    NoPermissionError,
    RaymqError,
    RequestTimeoutError,
    StoreCorruptError,
    TopicNotExistError,
)
from raymq.common.message import MessageQueue
from tests.support.clients.scan_source import Queues


class Job:
    """Fake job whose `run` records its arguments and returns `result`."""

    def __init__(self, module: ModuleType, result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._module, self._result = module, result
        self.sessions: list[tuple[Any, ...]] = []
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        monkeypatch.setattr(module, "spark_job", self._session)
        monkeypatch.setattr(module, "run", self._run)

    @contextmanager
    def _session(self, *arguments: Any, quiet: bool, check: Any) -> Iterator[tuple[str, str]]:
        self.sessions.append((*arguments, quiet))
        yield "spark", "client"

    def _run(self, *arguments: Any, **options: Any) -> Any:
        self.arguments = arguments
        self.options = {name: value for name, value in options.items() if not name.startswith("on_")}
        return self._result

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(self._module.command, list(arguments), catch_exceptions=False)


def test_topic_stats_takes_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = TopicFigures("orders", 0, 0, 0, None, None, 0, {}, 0, [])
    job = Job(topic_stats, [empty], monkeypatch)
    picture = tmp_path / "orders.png"
    result = job(
        "orders", "bills", "orders", "--every", "1h", "--top", "3", "--tags", "paid || late", "--to", "2026-03-01"
    )
    assert job.arguments == ("spark", "client", ["orders", "bills"])
    assert job.options == {
        "every_s": 3600,
        "top": 3,
        "tags": "paid || late",
        "period": Period(None, 1_772_323_200_000),
        "quiet": False,
    }
    assert job.sessions == [("topic-stats", None, SessionSize(), False)]
    assert "orders" in result.output
    value = json.loads(job("orders", "--json", "--executors", "2", "--picture", str(picture)).output)
    assert (value["topics"][0]["messages"], value["picture"]) == (0, str(picture))
    assert job.sessions[1] == ("topic-stats", None, SessionSize(executors=2), True)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    page = tmp_path / "orders.html"
    value = json.loads(job("orders", "--json", "--tags", "paid", "--report", str(page)).output)
    assert (value["report"], "picture" in value) == (str(page), False)
    assert "Messages with the tags paid" in page.read_text()


def test_archive_takes_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    added = ArchivedQueue("broker-a", 3, 0, 17, 2, 17, 0)
    job = Job(archive, Archived("orders", 17, 2, 4096, (added,)), monkeypatch)
    monkeypatch.chdir(tmp_path)
    text = job("orders", "archive", "--to", "2026-03-01", "--skip-lost").output
    assert job.arguments == ("spark", "client", "orders", tmp_path / "archive")
    assert job.options == {"before_ms": 1_772_323_200_000, "skip_lost": True}
    assert "17 messages of orders archived, 2 new files with 4,096 bytes" in text
    value = json.loads(job("orders", "archive", "--json").output)
    assert (value["messages"], value["files"], value["added"][0]["end_offset"]) == (17, 2, 17)


def test_windowed_counts_takes_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = Job(windowed_counts, Counted("counts", 3, 12, 4), monkeypatch)
    arguments = ["orders", "bills", "counts", "--checkpoint", str(tmp_path)]
    text = job(*arguments).output
    assert job.arguments == ("spark", "client", ["orders", "bills"], "counts", tmp_path)
    assert job.options == {
        "windows": Windows(60, 60, 10, "tags", "store"),
        "start": "first",
        "trigger_s": 5,
        "available_now": False,
        "close": False,
        "max_offsets_per_trigger": None,
        "commit_group": None,
    }
    assert text == "12 counts sent to counts in 3 batches; at least 4 messages came too late\n"
    more = ["--window", "1h", "--slide", "5m", "--watermark", "1m", "--by", "keys", "--time", "born", "--available-now"]
    more += ["--close", "--max-offsets", "9", "--commit-group", "g", "--from", "last", "--json"]
    value = json.loads(job(*arguments, *more).output)
    assert value == {
        "target": "counts",
        "batches": 3,
        "counts": 12,
        "late": 4,
        "closed": False,
        "closed_before": False,
    }
    assert job.options == {
        "windows": Windows(3600, 300, 60, "keys", "born"),
        "start": "last",
        "trigger_s": 5,
        "available_now": True,
        "close": True,
        "max_offsets_per_trigger": 9,
        "commit_group": "g",
    }


@pytest.mark.parametrize(
    ("closed_before", "text"),
    [
        (False, "12 counts sent to counts in 3 batches; all windows are closed\n"),
        (
            True,
            "12 counts sent to counts in 3 batches; all windows are closed; an earlier run has closed this checkpoint, "
            "so no newer message was counted\n",
        ),
    ],
)
def test_windowed_counts_reports_that_its_windows_are_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed_before: bool, text: str
) -> None:
    done = Counted("counts", 3, 12, 0, closed=True, closed_before=closed_before)
    job = Job(windowed_counts, done, monkeypatch)
    arguments = ["orders", "counts", "--checkpoint", str(tmp_path), "--available-now", "--close"]
    assert job(*arguments).output == text
    value = json.loads(job(*arguments, "--json").output)
    assert (value["closed"], value["closed_before"]) == (True, closed_before)


@pytest.mark.parametrize(
    ("module", "arguments", "error"),
    [
        (topic_stats, ("orders", "--picture", "/nowhere/x.png"), InvalidArgumentError),
        (topic_stats, ("orders", "--report", "/nowhere/x.html"), InvalidArgumentError),
        (windowed_counts, ("a", "b", "--checkpoint", "/x", "--slide", "2m"), InvalidArgumentError),
        (windowed_counts, ("a", "b", "--checkpoint", "/x", "--close"), InvalidArgumentError),
    ],
)
def test_wrong_options_are_refused_before_spark_is_started(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, arguments: tuple[str, ...], error: type[RaymqError]
) -> None:
    job = Job(module, None, monkeypatch)
    with pytest.raises(error):
        job(*arguments)
    assert job.sessions == []


def test_a_picture_without_matplotlib_is_refused_before_spark_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(topic_stats, None, monkeypatch)
    monkeypatch.setattr("raymq.common.extras.find_spec", lambda name: None)
    with pytest.raises(ConfigError):
        job("orders", "--picture", "orders.png")
    assert job.sessions == []


def test_counting_a_topic_into_itself_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(InvalidArgumentError, match="would be counted again"):
        windowed_counts.run(nothing, nothing, ["orders"], "orders", Path("/x"), windows=Windows())


def test_a_count_without_an_end_cannot_be_closed() -> None:
    nothing: Any = None
    with pytest.raises(InvalidArgumentError, match="--close needs --available-now"):
        windowed_counts.run(nothing, nothing, ["orders"], "counts", Path("/x"), windows=Windows(), close=True)


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the cluster by a fake client with the topics orders and counts, and fail if Spark is loaded."""
    seen = SimpleNamespace(sessions=0)

    def session(*arguments: Any, **options: Any) -> None:
        seen.sessions += 1
        raise AssertionError("Spark starts")

    @contextmanager
    def client_of(address: str | None) -> Iterator[Any]:
        yield SimpleNamespace(routes=None, storages=None, names=None, write_queues=write_queues)

    def write_queues(topic: str) -> tuple[MessageQueue, ...]:
        if topic == "locked":
            raise NoPermissionError(f"topic {topic!r} is not writable")
        return tuple(QUEUES.queues(topic))

    monkeypatch.setattr("raymq.client.scan.queue_bounds.ClusterQueues", lambda *_: QUEUES)
    monkeypatch.setattr("raydp_jobs.jobs.spark_job.client_of", client_of)
    monkeypatch.setitem(sys.modules, "raydp_jobs.session", SimpleNamespace(spark_session=session))
    return seen


def closed_checkpoint(directory: Path) -> None:
    """Create the checkpoint of a count that a run with --close has closed."""
    for name in ("offsets", "commits"):
        (directory / name).mkdir(parents=True)
    offsets = StreamOffsets({MessageQueue("orders", "broker-a", 0): 9}, closing=WindowClosing.LAST)
    (directory / "offsets/7").write_text(f"v1\n{{}}\n{offsets.to_json()}")
    (directory / "commits/7").write_text("v1\n{}")


QUEUES = Queues({("broker-a", 0): (0, 9)}, topics=["orders", "counts"])


@pytest.mark.parametrize(
    ("module", "arguments", "error"),
    [
        (topic_stats, ["order"], TopicNotExistError),
        (topic_stats, ["or ders"], IllegalNameError),
        (topic_stats, ["orders", "--tags", "|| ||"], InvalidArgumentError),
        (topic_stats, ["orders", "--executor-memory", "much"], InvalidArgumentError),
        (archive, ["order", "DIR/a"], TopicNotExistError),
        (archive, ["orders", "DIR/file/a"], InvalidArgumentError),
        (archive, ["orders", "DIR/held"], ClientStateError),
        (archive, ["orders", "DIR/torn"], StoreCorruptError),
        (windowed_counts, ["order", "counts", "--checkpoint", "DIR/c"], TopicNotExistError),
        (windowed_counts, ["orders", "count", "--checkpoint", "DIR/c"], TopicNotExistError),
        (windowed_counts, ["orders", "locked", "--checkpoint", "DIR/c"], NoPermissionError),
        (windowed_counts, ["orders", "orders", "--checkpoint", "DIR/c"], InvalidArgumentError),
        (windowed_counts, ["orders", "counts", "--checkpoint", "DIR/file/c"], InvalidArgumentError),
        (windowed_counts, ["orders", "counts", "--checkpoint", "DIR/other"], InvalidArgumentError),
        (windowed_counts, ["orders", "counts", "--checkpoint", "DIR/closed"], InvalidArgumentError),
        (windowed_counts, ["orders", "counts", "--checkpoint", "DIR/closed", "--available-now"], InvalidArgumentError),
        (windowed_counts, ["orders", "counts", "--checkpoint", "DIR/c", "--commit-group", "a b"], IllegalNameError),
    ],
)
def test_what_a_job_cannot_do_is_refused_before_spark_is_loaded(
    no_spark: SimpleNamespace, tmp_path: Path, module: ModuleType, arguments: list[str], error: type[RaymqError]
) -> None:
    (tmp_path / "file").write_text("a file is no directory")
    (tmp_path / "torn/orders/day=2026-03-01").mkdir(parents=True)
    (tmp_path / "torn/orders/day=2026-03-01/broker-a.3.5-9.parquet").write_text("a foreign file")
    closed_checkpoint(tmp_path / "closed")
    count_checkpoint.fix_options(tmp_path / "other", {"topics": ["orders"], "target": "counts", "length_s": 7})
    with archive.locked(tmp_path / "held/orders"), pytest.raises(error):
        CliRunner().invoke(
            module.command, [one.replace("DIR", str(tmp_path)) for one in arguments], catch_exceptions=False
        )
    assert no_spark.sessions == 0


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (topic_stats, ["orders"]),
        (archive, ["orders", "DIR/a"]),
        (windowed_counts, ["orders", "counts", "--checkpoint", "DIR/c"]),
        (windowed_counts, ["orders", "counts", "--checkpoint", "DIR/closed", "--available-now", "--close"]),
    ],
)
def test_a_job_that_can_run_starts_spark(
    no_spark: SimpleNamespace, tmp_path: Path, module: ModuleType, arguments: list[str]
) -> None:
    closed_checkpoint(tmp_path / "closed")
    with pytest.raises(AssertionError, match="Spark starts"):
        CliRunner().invoke(
            module.command, [one.replace("DIR", str(tmp_path)) for one in arguments], catch_exceptions=False
        )
    assert no_spark.sessions == 1


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (topic_stats, ["orders"]),
        (archive, ["orders", "DIR/a"]),
        (windowed_counts, ["orders", "counts", "--checkpoint", "DIR/c"]),
    ],
)
def test_a_job_whose_spark_starts_too_late_ends_with_one_line(
    no_spark: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    module: ModuleType,
    arguments: list[str],
) -> None:
    @contextmanager
    def late(name: str, *, start_timeout_s: float | None, **options: Any) -> Iterator[None]:
        assert start_timeout_s is not None
        raise RequestTimeoutError("starting Spark", start_timeout_s)
        yield

    monkeypatch.setattr(sys.modules["raydp_jobs.session"], "spark_session", late)
    given = [*(one.replace("DIR", str(tmp_path)) for one in arguments), "--start-timeout", "90s", "--quiet"]
    monkeypatch.setattr(sys, "argv", ["job", *given])
    monkeypatch.setattr("raymq.tools.cli.entry.out", SimpleNamespace())
    with pytest.raises(SystemExit) as ended:
        module.main()
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (1, "")
    [line] = output.err.splitlines()
    assert "starting Spark" in line
    assert "90" in line


class Query:
    """Fake streaming query that ends, or raises an error, at the third status check."""

    def __init__(self, end: BaseException | None = None) -> None:
        self._end = end
        self.looks = 0
        self.stopped = False

    def awaitTermination(self, timeout: int) -> bool:
        self.looks += 1
        if self.looks == 3 and self._end is not None:
            raise self._end
        return self.looks == 3

    @property
    def recentProgress(self) -> list[dict[str, Any]]:
        """Return the progress reports of the fake query's batches. Each call adds the report of one more batch. Batch n
        reports that the watermark dropped n rows, and reads 10 of 30 messages. Spark counts the rows of some batches
        twice."""
        return [
            {
                "batchId": batch,
                "timestamp": "",
                "stateOperators": [{"numRowsDroppedByWatermark": batch}],
                "sources": [
                    {"description": "FileStreamSource"},
                    {
                        "description": "raymq[orders]",
                        "numInputRows": 20 if batch else 10,
                        "startOffset": offsets(10 * batch) if batch else None,
                        "endOffset": offsets(10 * batch + 10),
                        "latestOffset": offsets(30),
                        "metrics": {"offsetsBehindLatest": str(20 - 10 * batch)},
                    },
                ],
            }
            for batch in range(self.looks)
        ]

    def stop(self) -> None:
        self.stopped = True


def offsets(total: int) -> str:
    """Return an offset of a topic source as in Spark's progress: `total` messages of two queues."""
    return json.dumps({"offsets": {"orders": {"broker-a": {"0": total // 2, "1": total - total // 2}}}})


def test_late_messages_of_each_batch_are_added_once() -> None:
    query: Any = Query()
    read: list[tuple[int, int]] = []
    done = await_end(query, "counts", StoredCounts(lambda count: None), lambda *numbers: read.append(numbers))
    assert done == Counted("counts", 0, 0, 0 + 1 + 2)
    assert read == [(10, 20), (20, 10), (30, 0)]
    assert query.stopped


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ClientStateError("the executors are gone")])
def test_a_query_is_stopped_however_it_ends(error: BaseException) -> None:
    query: Any = Query(error)
    with pytest.raises(type(error)):
        await_end(query, "counts", StoredCounts(lambda count: None))
    assert query.stopped
