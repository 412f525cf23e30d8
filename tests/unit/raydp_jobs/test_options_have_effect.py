"""Tests that each entry point of Spark and Ray Data uses each option that it accepts, and refuses all others by
name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import click
import pytest
from click.testing import CliRunner
from pyspark.sql.types import BinaryType, StructField

import raymq
from raydp_jobs.data_source.options import (
    BATCH_OPTIONS,
    BATCH_WRITE_OPTIONS,
    STREAM_OPTIONS,
    STREAM_WRITE_OPTIONS,
    batch_options,
    batch_write_options,
    stream_options,
    stream_write_options,
)
from raydp_jobs.jobs import archive, dead_letters, replay, topic_stats, windowed_counts
from raydp_jobs.sink.writer import topic_sink, write_topic
from raydp_jobs.source import reader
from raydp_jobs.stream import topic_stream
from raydp_jobs.stream.topic_stream import StartingOptions, stream_topic
from raymq.client.producer.settings import ProducerOptions, check_repeatable
from raymq.client.scan.ranges import ScanOptions, plan_ranges
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.data import datasink, datasource, iterating, reading
from tests.support.clients.scan_source import T0_MS, Queues

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

SPARK: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2))
NO_FRAME: Any = None
ONE_QUEUE = {("broker-a", 0): (10, 100), ("broker-a", 1): (0, 30)}


def options_of(function: Callable[..., Any], *more: type) -> set[str]:
    """Return the names of a function's keyword options. `more`: the TypedDicts of its ``**`` arguments."""
    names = {name for name, one in signature(function).parameters.items() if one.kind is Parameter.KEYWORD_ONLY}
    return names.union(*(kind.__annotations__ for kind in more))


def texts(options: dict[str, Any]) -> dict[str, str]:
    """Return options as Spark passes them to a data source, with a topic."""
    return {"topic": "orders", **{name: str(value) for name, value in options.items()}}


class Frame:
    """Fake DataFrame with the column `body`."""

    isStreaming = False  # noqa: N815  # PySpark's name
    columns: ClassVar[list[str]] = ["body"]
    schema: ClassVar[list[StructField]] = [StructField("body", BinaryType())]


FRAME: Any = Frame()

ENTRY_POINTS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "spark read_topic": (
        lambda **options: reader.read_topic(SPARK, "orders", client=CLIENT, **options),
        options_of(reader.read_topic, ScanOptions),
    ),
    "spark stream_topic": (
        lambda **options: stream_topic(SPARK, "orders", client=CLIENT, **options),
        options_of(stream_topic, StartingOptions),
    ),
    "spark write_topic": (
        lambda **options: write_topic(FRAME, "orders", **options),
        options_of(write_topic, ProducerOptions),
    ),
    "spark topic_sink": (lambda **options: topic_sink("orders", **options), options_of(topic_sink, ProducerOptions)),
    "spark format, batch": (
        lambda **options: batch_options(texts(options)),
        set(BATCH_OPTIONS),
    ),
    "spark format, stream": (
        lambda **options: stream_options(texts(options)),
        set(STREAM_OPTIONS),
    ),
    "spark format, batch write": (
        lambda **options: batch_write_options(texts(options)),
        set(BATCH_WRITE_OPTIONS),
    ),
    "spark format, stream write": (
        lambda **options: stream_write_options(texts(options)),
        set(STREAM_WRITE_OPTIONS),
    ),
    "ray read_topic": (lambda **options: reading.read_topic("orders", **options), options_of(reading.read_topic)),
    "ray iter_topic": (
        lambda **options: iterating.iter_topic("g", "orders", **options),
        options_of(iterating.iter_topic),
    ),
    "ray TopicDatasource": (
        lambda **options: datasource.TopicDatasource("orders", **options),
        options_of(datasource.TopicDatasource),
    ),
    "ray write_topic": (
        lambda **options: datasink.write_topic(NO_FRAME, "orders", **options),
        options_of(datasink.write_topic),
    ),
}
ALL_OPTIONS = set().union(*(names for _, names in ENTRY_POINTS.values())) | {"interval_s", "max_rows"}
CLIENT: Any = SimpleNamespace(routes=None, storages=None, names=SimpleNamespace(name=""))
POSITIONAL = {"ray iter_topic": {"interval_s", "max_rows"}, "spark read_topic": set(), "spark stream_topic": set()}


@pytest.mark.parametrize(
    ("entry", "option"),
    [
        (entry, option)
        for entry, (_, names) in ENTRY_POINTS.items()
        for option in sorted(ALL_OPTIONS - names - POSITIONAL.get(entry, set()))
    ],
)
def test_an_option_of_another_entry_point_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, entry: str, option: str
) -> None:
    monkeypatch.setattr(reader, "ClusterQueues", lambda *_: Queues(ONE_QUEUE))
    with pytest.raises((InvalidArgumentError, TypeError), match=rf"\b{option}\b"):
        ENTRY_POINTS[entry][0](**{option: 1})


SCAN_VALUES: dict[str, Any] = {
    "topic_pattern": "orders.*",
    "starting_offsets": {"broker-a": {"0": 20, "1": 5}},
    "starting_timestamp": T0_MS + 20_000,
    "starting_offsets_by_timestamp": {"broker-a": {"0": T0_MS + 20_000, "1": T0_MS + 5_000}},
    "starting_offsets_by_timestamp_strategy": "latest",
    "ending_offsets": {"broker-a": {"0": 50, "1": 5}},
    "ending_timestamp": T0_MS + 20_000,
    "ending_offsets_by_timestamp": {"broker-a": {"0": T0_MS + 20_000, "1": T0_MS + 5_000}},
    "max_offsets": 7,
    "fail_on_data_loss": False,
}
NEEDED: dict[str, dict[str, Any]] = {
    # The options for which planning raises an error with one value and returns ranges with another value. The options
    # on the right are set in both plans. Without the option on the left, they cause the error.
    "starting_offsets_by_timestamp_strategy": {"starting_timestamp": T0_MS + 50_000},
    "fail_on_data_loss": {"starting_offsets": {"broker-a": {"0": 1, "1": 5}}},
}
"""For each option: other options that a test must set with it, because the option has no effect alone."""


def planned(**options: Any) -> Any:
    """Plan a scan with these options. Return the planned offset ranges, or the class of the error that the planning
    raised."""
    topic = None if "topic_pattern" in options else "orders"
    try:
        return plan_ranges(Queues(ONE_QUEUE, topics=["orders", "orders-eu"]), topic, **options)
    except raymq.RaymqError as error:
        return type(error)


@pytest.mark.parametrize("option", sorted(ScanOptions.__annotations__))
def test_each_option_of_a_scan_changes_its_plan(option: str) -> None:
    more = NEEDED.get(option, {})
    assert planned(**{option: SCAN_VALUES[option]}, **more) != planned(**more)


STREAM_VALUES: dict[str, Any] = {
    **{name: SCAN_VALUES[name] for name in StartingOptions.__annotations__},
    "topic_pattern": "orders.*",
    "columns": ["tags"],
    "tags": "paid",
    "expression": raymq.sql("price > 5"),
    "max_offsets_per_trigger": 9,
    "min_offsets_per_trigger": 9,
    "max_trigger_delay_s": 9.0,
    "min_partitions": 9,
    "fail_on_data_loss": False,
    "unreadable": "raise",
    "commit_group": "progress",
    "client": SimpleNamespace(),
}


@pytest.mark.parametrize("option", sorted(options_of(stream_topic, StartingOptions)))
def test_each_option_of_a_stream_reaches_the_source(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    def record(**options: Any) -> list[Any]:
        seen: list[Any] = []

        class Cluster:
            def __init__(self, *arguments: Any, **more: Any) -> None:
                seen.append((arguments, more))

            def queues(self) -> list[MessageQueue]:
                return []

            def starts(self, queues: object) -> None:
                pass

            def address(self) -> str:
                return "here"

            def close(self) -> None:
                pass

        def source(cluster: object, limits: object, **more: Any) -> None:
            seen.append((limits, more))

        def frame(spark: object, source: object, read: Callable[..., Any], schema: Any, name: str) -> None:
            read([], "*", "")
            seen.append((schema, name))

        monkeypatch.setattr(topic_stream, "TopicCluster", Cluster)
        monkeypatch.setattr(topic_stream, "TopicSource", source)
        monkeypatch.setattr(topic_stream, "stream_frame", frame)
        monkeypatch.setattr(topic_stream, "read_ranges", lambda *arguments, **more: seen.append((arguments, more)))
        stream_topic(SPARK, None if "topic_pattern" in options else "orders", **options)
        return seen

    assert record(**{option: STREAM_VALUES[option]}) != record()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("when_full", "raise"),
        ("send_latency_enable", True),
        ("retry_when_not_store_ok", False),
        ("default_topic_queue_nums", 3),
    ],
)
def test_a_repeatable_write_refuses_settings_that_it_would_ignore(setting: str, value: Any) -> None:
    options: Any = {setting: value}
    for refuse in (check_repeatable, lambda given: topic_sink("orders", **given)):
        with pytest.raises(InvalidArgumentError, match=setting):
            refuse(options)


def test_a_repeatable_write_accepts_the_settings_that_it_uses() -> None:
    used: ProducerOptions = {"send_timeout_s": 3.0, "max_buffered_bytes": 9, "when_full": "block"}
    assert check_repeatable(used) == {**used, "retry_when_not_store_ok": True}


def test_a_sink_refuses_an_unknown_sort_before_its_first_batch() -> None:
    with pytest.raises(InvalidArgumentError, match="sort"):
        topic_sink("orders", sort="maybe")  # type: ignore[arg-type]  # the point


ARGUMENTS: dict[ModuleType, list[str]] = {
    topic_stats: ["orders"],
    archive: ["orders", "/x"],
    windowed_counts: ["orders", "counts"],
    dead_letters: ["billing"],
    replay: ["/x", "orders"],
}
JOB_VALUES: dict[str, str | list[str]] = {
    "--address": "10.0.0.7:6379",
    "--before": "2026-03-01",
    "--checkpoint": "/y",
    "--commit-group": "g",
    "--every": "3h",
    "--executor-cores": "3",
    "--executor-memory": "3g",
    "--executors": "3",
    "--from": "2026-03-01",
    "--max-offsets": "3",
    "--name": "again",
    "--queue": "broker-a:1",
    "--rate": "500",
    "--reason-property": "why",
    "--slide": "5s",
    "--start-timeout": "5m",
    "--tags": "paid",
    "--to": "2026-03-01",
    "--top": "3",
    "--trigger": "1s",
    "--watermark": "1m",
    "--window": "5m",
}
JOB_OPTIONS_NEEDED = {"--close": ["--available-now"]}
"""Further options of a job without which it refuses an option."""
NOT_PASSED_TO_RUN = {"--help", "--picture", "--report", "--verify", "--json", "--namespace", "-q"}
"""Options whose effect is not an argument of the job. Other tests of the commands test them."""


@pytest.mark.parametrize(
    ("module", "option"),
    [
        (module, parameter.opts[0])
        for module in ARGUMENTS
        for parameter in module.command.params
        if isinstance(parameter, click.Option) and parameter.opts[0] not in NOT_PASSED_TO_RUN
    ],
    ids=str,
)
def test_each_option_of_a_job_reaches_the_job(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, option: str, tmp_path: Path
) -> None:
    class ReachedError(Exception):
        """Raised by the fake `run`, to end the command after the arguments are recorded."""

    def record(*more: str) -> list[Any]:
        seen: list[Any] = []

        @contextmanager
        def session(*arguments: Any, **options: Any) -> Any:
            seen.append((arguments, [value for name, value in options.items() if name != "check"]))
            yield "spark", "client"

        @contextmanager
        def client(*arguments: Any) -> Any:
            seen.append(arguments)
            yield "client"

        def run(*arguments: Any, **options: Any) -> None:
            seen.append((arguments, {name: one for name, one in options.items() if not name.startswith("on_")}))
            raise ReachedError

        monkeypatch.setattr(module, "spark_job", session, raising=False)
        monkeypatch.setattr(module, "client_of", client, raising=False)
        monkeypatch.setattr(module, "run", run)
        if module is windowed_counts and "--checkpoint" not in more:
            more = (*more, "--checkpoint", str(tmp_path))
        with pytest.raises(ReachedError):
            CliRunner().invoke(module.command, [*ARGUMENTS[module], *more], catch_exceptions=False)
        return seen

    parameter = next(one for one in module.command.params if option in one.opts)
    choices = getattr(parameter.type, "choices", None)
    value = [] if parameter.is_flag else [choices[-1] if choices else JOB_VALUES[option]]
    needed = JOB_OPTIONS_NEEDED.get(option, [])
    assert record(option, *value, *needed) != record(*needed)


@pytest.mark.parametrize(
    ("module", "arguments", "ignored"),
    [
        (archive, ["--verify", "--to", "-1d"], "--to"),
        (archive, ["--verify", "--skip-lost"], "--skip-lost"),
        (archive, ["--verify", "--executors", "2"], "--executors"),
        (archive, ["--verify", "--namespace", "team"], "--namespace"),
        (archive, ["--verify", "--address", "10.0.0.7:6379"], "--address"),
        (windowed_counts, ["--checkpoint", "/y", "--available-now", "--trigger", "1s"], "--trigger"),
    ],
)
def test_a_job_refuses_an_option_that_another_option_makes_useless(
    module: ModuleType, arguments: list[str], ignored: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{ignored} has no effect"):
        CliRunner().invoke(module.command, [*ARGUMENTS[module], *arguments], catch_exceptions=False)
