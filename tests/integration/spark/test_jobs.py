"""Tests of raymq's built-in Spark jobs: `raymq job` commands run them on a cluster of one machine and in one Spark
session."""

from __future__ import annotations

import ast
import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner, Result
from matplotlib.image import imread
from pyspark.sql import SparkSession

import raymq
from raydp_jobs.jobs import archive, dead_letters, replay, topic_stats, windowed_counts
from raydp_jobs.jobs.pictures import PICTURE_SIZE_PX
from raydp_jobs.jobs.spark_job import SessionSize
from raydp_jobs.stream.progress import batch_size, topic_sources
from raymq.common.message import ConsumeFromWhere
from raymq.tools.cli import cli
from raymq.tools.cli.terminal.output import client_of
from tests.support.history.waiting import eventually

TOPIC = "job-orders"
AGAIN = "job-orders-again"
GROUP = "job-billing"
MESSAGES = 3000
TAGS = ("paid", "late", None)
JOBS = {
    "archive": archive,
    "dead-letters": dead_letters,
    "replay": replay,
    "topic-stats": topic_stats,
    "windowed-counts": windowed_counts,
}
OF_SESSIONS = {"--executors", "--executor-cores", "--executor-memory", "--start-timeout"}
"""Options of a session of Spark's own, which tests/chaos/spark start."""
OF_CONNECTIONS = {"--address", "--namespace", "--quiet"}
"""Options that all commands share. The test of a count that goes on is in a namespace."""


@pytest.fixture(scope="module")
def sent(mq: raymq.Client) -> list[bytes]:
    """Send messages to a topic and return their sorted bodies. The topic gets 1,000 messages of each tag and 1,000
    without a tag, with 50 different keys."""
    mq.admin.create_topics({TOPIC: 4, AGAIN: 4})
    return send(mq, range(MESSAGES))


def send(mq: raymq.Client, numbers: range) -> list[bytes]:
    messages = [
        raymq.Message(TOPIC, b"order %d" % n, tags=TAGS[n % 3], keys=(f"c-{n % 50}",), properties={"n": str(n)})
        for n in numbers
    ]
    with mq.producer("job-test") as producer:
        for first in range(0, len(messages), 500):
            producer.send_batch(messages[first : first + 500])
    return sorted(message.body for message in messages)


@pytest.fixture
def run(mq: raymq.Client, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a `raymq job` command. The command connects to the test module's cluster, and uses
    the module's Spark session instead of its own."""

    @contextmanager
    def session(
        name: str,
        address: str | None,
        size: SessionSize,
        *,
        quiet: bool,
        check: Callable[[raymq.Client], None],
    ) -> Iterator[Any]:
        with client_of(address) as client:
            check(client)
            yield spark, client

    for module in (archive, topic_stats, windowed_counts):
        monkeypatch.setattr(module, "spark_job", session)

    def invoke(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, ["job", *arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


def messages_of(mq: raymq.Client, topic: str) -> list[raymq.MessageExt]:
    """Return all messages of a topic."""
    found: list[raymq.MessageExt] = []
    for queue in mq.admin.describe_topic(topic):
        found += mq.admin.pull(queue.queue, 0, max_messages=1000).messages if queue.messages else ()
    return found


@dataclass(frozen=True)
class Part:
    """A part of a topic: the messages that were stored in a period of time."""

    start_ms: int
    end_ms: int

    @classmethod
    def middle_of(cls, messages: Sequence[raymq.MessageExt]) -> Part:
        """Return the period that begins after the first third of the messages, and ends before the last third."""
        times = sorted(message.store_timestamp_ms for message in messages)
        return cls(times[len(times) // 3], times[2 * len(times) // 3] + 1)

    def of(self, messages: Sequence[raymq.MessageExt], *tags: str) -> list[raymq.MessageExt]:
        """Return the messages of this part that have one of the tags."""
        return [one for one in messages if self.start_ms <= one.store_timestamp_ms < self.end_ms and one.tags in tags]


def iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def check_picture(path: Path) -> None:
    """Check that the file is a PNG of PICTURE_SIZE_PX in which at least a tenth of the pixels is coloured."""
    assert struct.unpack(">II", path.read_bytes()[16:24]) == PICTURE_SIZE_PX
    pixels = imread(path)[:, :, :3]
    assert ((pixels.max(axis=2) - pixels.min(axis=2)) > 0.2).mean() > 0.1


@pytest.mark.long
def test_figures_of_a_topic_match_the_sent_messages(
    run: Any, mq: raymq.Client, sent: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "orders.png"
    value = json.loads(run("topic-stats", TOPIC, "--json", "--picture", str(path)).output)
    [topic] = value["topics"]
    assert (topic["messages"], topic["bytes"], topic["keys"]) == (MESSAGES, sum(map(len, sent)), 50)
    assert {one["tags"]: one["messages"] for one in topic["tags"]} == dict.fromkeys(TAGS, 1000)
    assert sum(one["messages"] for one in topic["over_time"]) == MESSAGES
    check_picture(path)


@pytest.mark.long
def test_figures_of_a_part_of_a_topic_match_its_messages(
    run: Any, mq: raymq.Client, sent: list[bytes], tmp_path: Path
) -> None:
    page, stored = tmp_path / "part.html", messages_of(mq, TOPIC)
    part = Part.middle_of(stored)
    expected = part.of(stored, "paid", "late")
    period = ("--from", iso(part.start_ms), "--to", iso(part.end_ms))
    options = ("--every", "1s", "--top", "1", "--tags", "paid || late", *period)
    value = json.loads(run("topic-stats", TOPIC, *options, "--report", str(page), "--json").output)
    [topic] = value["topics"]
    assert 0 < topic["messages"] == len(expected) < MESSAGES
    tags = Counter(one.tags for one in expected)
    [common] = topic["tags"]
    assert common["messages"] == tags[common["tags"]] == max(tags.values())
    assert topic["other_tags"] == len(expected) - common["messages"]
    seconds = Counter(one.store_timestamp_ms // 1000 for one in expected)
    intervals = {datetime.fromisoformat(one["start"]).timestamp(): one["messages"] for one in topic["over_time"]}
    assert {start: count for start, count in intervals.items() if count} == seconds
    assert value["report"] == str(page)
    text = page.read_text()
    assert f"Messages with the tags paid || late stored from {iso(part.start_ms)[:10]}" in text
    for cell in (TOPIC, f"{len(expected):,}", common["tags"], f"{common['messages']:,}"):
        assert f">{cell}</td>" in text


def archived(folder: Path) -> list[bytes]:
    table = ds.dataset(folder, format="parquet", partitioning="hive", ignore_prefixes=["_", "."]).to_table(["body"])
    return sorted(table.column("body").to_pylist())


@pytest.mark.long
def test_a_topic_is_archived_verified_and_replayed_once(
    run: Any, mq: raymq.Client, sent: list[bytes], tmp_path: Path
) -> None:
    first = json.loads(run("archive", TOPIC, str(tmp_path), "--json").output)
    assert (first["messages"], archived(tmp_path / TOPIC)) == (MESSAGES, sent)
    assert "0 messages" in run("archive", TOPIC, str(tmp_path)).output
    verified = json.loads(run("archive", TOPIC, str(tmp_path), "--verify", "--json").output)
    assert (verified["messages"], verified["problems"]) == (MESSAGES, [])

    for expected in ((MESSAGES, 0), (0, MESSAGES)):
        done = json.loads(run("replay", str(tmp_path / TOPIC), AGAIN, "--json").output)
        assert (done["sent"], done["stored_before"]) == expected
    assert sum(queue.messages for queue in mq.admin.describe_topic(AGAIN)) == MESSAGES
    [figures] = json.loads(run("topic-stats", AGAIN, "--json").output)["topics"]
    assert {one["tags"]: one["messages"] for one in figures["tags"]} == dict.fromkeys(TAGS, 1000)

    stored = messages_of(mq, TOPIC)
    part = Part.middle_of(stored)
    paid = part.of(stored, "paid")
    queue = paid[0].queue
    expected = [one for one in paid if one.queue == queue]
    period = ("--from", iso(part.start_ms), "--to", iso(part.end_ms))
    chosen = ("--tags", "paid", "--queue", f"{queue.broker_name}:{queue.queue_id}", *period)
    options = ("--rate", "50000/s", "--name", "part", *chosen)
    done = json.loads(run("replay", str(tmp_path / TOPIC), AGAIN, *options, "--json").output)
    assert (done["selected"], done["sent"], done["name"]) == (len(expected), len(expected), "part")
    assert len(expected) < MESSAGES // 3

    more = send(mq, range(MESSAGES, MESSAGES + 30))
    assert json.loads(run("archive", TOPIC, str(tmp_path), "--json").output)["messages"] == 30
    assert archived(tmp_path / TOPIC) == sorted([*sent, *more])
    early = ("archive", TOPIC, str(tmp_path / "before"), "--skip-lost", "--to")
    assert json.loads(run(*early, "2020-01-01", "--json").output)["messages"] == 0
    before = sorted(one.body for one in stored if one.store_timestamp_ms < part.start_ms)
    assert json.loads(run(*early, iso(part.start_ms), "--json").output)["messages"] == len(before) > 0
    assert archived(tmp_path / "before" / TOPIC) == before


def test_dead_letters_are_shown_with_their_reason(
    run: Any, mq: raymq.Client, sent: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "deaths.png"
    with mq.pull_consumer(GROUP, consume_from=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET) as consumer:
        consumer.subscribe(TOPIC)
        seen: list[raymq.MessageExt] = []
        eventually(lambda: bool(seen.extend(consumer.poll(10, 1.0)) or len(seen) >= 10), "ten messages")
        for message in seen[:10]:
            consumer.send_back(message, delay_level=-1)
    eventually(lambda: len(mq.admin.dead_letters(GROUP).letters()) == 10, "ten dead letters")
    [group] = json.loads(run("dead-letters", GROUP, "--json", "--picture", str(path)).output)["groups"]
    assert (group["dead_letters"], group["waiting"]) == (10, 10)
    [cause] = group["causes"]
    assert (cause["topic"], cause["reason"]) == (TOPIC, "given up after 1 attempt")
    check_picture(path)
    assert GROUP in run("dead-letters").output

    letters = [letter.message for letter in mq.admin.dead_letters(GROUP).each()]
    value = json.loads(run("dead-letters", GROUP, "--every", "1s", "--reason-property", "n", "--json").output)
    [group] = value["groups"]
    assert value["every_s"] == 1
    assert {cause["reason"] for cause in group["causes"]} == {message.properties["n"] for message in seen[:10]}
    starts = {datetime.fromisoformat(one["start"]).timestamp() for one in group["over_time"]}
    assert starts == {message.store_timestamp_ms // 1000 for message in letters}
    first_ms = min(message.store_timestamp_ms for message in letters)
    for option, count in (("--from", 10), ("--to", 0)):
        [group] = json.loads(run("dead-letters", GROUP, option, iso(first_ms), "--json").output)["groups"]
        assert group["dead_letters"] == count


def counts_in(mq: raymq.Client, topic: str) -> dict[tuple[int, str | None], int]:
    """Return the message counts that a job stored in a topic, by the start time of the counted window in ms, and by
    tag. Checks that no count is stored twice."""
    found: dict[tuple[int, str | None], int] = {}
    for message in messages_of(mq, topic):
        body = json.loads(message.body)
        assert (body["start_ms"], body["tags"]) not in found
        assert message.tags == body["tags"]
        found[body["start_ms"], body["tags"]] = body["messages"]
    return found


@pytest.mark.long
def test_a_topic_is_counted_in_windows_and_a_restart_continues(run: Any, mq: raymq.Client, tmp_path: Path) -> None:
    """The job counts messages in windows of one second. When it receives a message that was stored after the end of a
    window, it sends the window's counts."""
    source, target = "job-events", "job-event-counts"
    mq.admin.create_topics({source: 2, target: 2})
    arguments = (
        "windowed-counts",
        source,
        target,
        "--checkpoint",
        str(tmp_path),
        "--window",
        "1s",
        "--watermark",
        "1s",
    )
    sent = Counter[str]()
    for number in range(2):
        tag = f"part-{number}"
        with mq.producer("job-test") as producer:
            results = producer.send_batch([raymq.Message(source, b"event", tags=tag)] * (10 + number))
            sent[tag] += len(results)
        done = json.loads(run(*arguments, "--available-now", "--json").output)
        assert done["late"] == 0

    def all_sent() -> bool:
        """Send one more message, whose arrival closes all earlier time windows. Returns True if the counts of all
        earlier messages have arrived."""
        with mq.producer("job-test") as producer:
            producer.send(raymq.Message(source, b"event", tags="end"))
        run(*arguments, "--available-now", "--json")
        found = Counter[str]()
        for (_, tag), count in counts_in(mq, target).items():
            found[str(tag)] += count
        return {tag: found[tag] for tag in sent} == dict(sent)

    eventually(all_sent, "every window of the first messages")
    other = run(*arguments[:-4], "--window", "5s", code=1)
    assert "belongs to another count" in str(other.exception)


@pytest.mark.long
def test_the_last_windows_of_a_topic_are_closed_once(run: Any, mq: raymq.Client, tmp_path: Path) -> None:
    source, target = "job-finished", "job-finished-counts"
    mq.admin.create_topics({source: 2, target: 2})
    arguments = ("windowed-counts", source, target, "--checkpoint", str(tmp_path), "--window", "1h", "--available-now")
    with mq.producer("job-test") as producer:
        producer.send_batch([raymq.Message(source, b"event", tags=f"part-{n % 3}") for n in range(60)])
    assert json.loads(run(*arguments, "--json").output)["counts"] == 0
    done = json.loads(run(*arguments, "--close", "--json").output)
    assert (done["closed"], done["closed_before"], done["late"]) == (True, False, 0)
    found = counts_in(mq, target)
    total = Counter[str | None]()
    for (_, tag), count in found.items():
        total[tag] += count
    assert (total, done["counts"]) == ({f"part-{n}": 20 for n in range(3)}, len(found))
    with mq.producer("job-test") as producer:
        producer.send(raymq.Message(source, b"event", tags="after"))
    again = json.loads(run(*arguments, "--close", "--json").output)
    assert (again["closed"], again["closed_before"], again["counts"]) == (True, True, 0)
    assert "is closed" in str(run(*arguments, code=1).exception)
    assert counts_in(mq, target) == found


@pytest.mark.long
def test_a_count_begins_at_the_end_of_a_topic_and_goes_on_until_it_is_stopped(
    run: Any, spark: SparkSession, mq: raymq.Client, tmp_path: Path
) -> None:
    """A thread sends messages while the job runs, more in each second than a batch may have. It stops the job's query
    after some windows are counted."""
    source, target, group, most = "events", "counts", "job-counting", 10
    with raymq.connect(namespace="job-team") as client, ThreadPoolExecutor(1) as threads:
        client.admin.create_topics({source: 1, target: 2})
        told: dict[str, Any] = {"second": 0}

        def send(key: str) -> None:
            with client.producer("job-test") as producer:
                producer.send_batch([raymq.Message(source, b"event", keys=(key,))] * (most + 2))

        def counts() -> list[Any]:
            return [json.loads(message.body) for message in messages_of(client, target)]

        def some_windows() -> bool:
            if int(time.time()) > told["second"]:
                told["second"] = int(time.time())
                send("new")
            return len({body["start_ms"] // 1000 % 2 for body in counts()}) == 2

        def stop() -> None:
            [query] = eventually(lambda: spark.streams.active, "the job's query")
            try:
                eventually(some_windows, "the counts of some windows", 180)
                told["trigger"] = query._jsq.streamingQuery().trigger().toString()
                told["sizes"] = [batch_size(one) for each in query.recentProgress for one in topic_sources(each)]
            finally:
                query.stop()

        send("old")
        stopping = threads.submit(stop)
        where = ("--namespace", "job-team", "--checkpoint", str(tmp_path), "--from", "end", "--trigger", "1s")
        windows = ("--window", "2s", "--slide", "1s", "--watermark", "1s", "--by", "keys", "--time", "born")
        limits = ("--max-offsets", str(most), "--commit-group", group)
        done = json.loads(run("windowed-counts", source, target, *where, *windows, *limits, "--json").output)
        stopping.result()
        found, [queue] = counts(), client.admin.group_summary(group).queues
    assert told["trigger"] == "ProcessingTimeTrigger(1000)"
    assert max(told["sizes"]) == most
    assert queue.committed is not None
    assert queue.committed > 0
    assert {body["keys"] for body in found} == {"new"}
    assert {body["end_ms"] - body["start_ms"] for body in found} == {2000}
    assert len({body["start_ms"] for body in found}) == len(found) >= done["counts"] > 0


def test_the_tests_use_each_option_of_the_jobs() -> None:
    used: dict[str, set[str]] = {name: set() for name in JOBS}
    for function in ast.parse(Path(__file__).read_text()).body:
        texts = {str(node.value) for node in ast.walk(function) if isinstance(node, ast.Constant)}
        for name in JOBS.keys() & texts if isinstance(function, ast.FunctionDef) else ():
            used[name] |= {text for text in texts if text.startswith("--")}
    for name, module in JOBS.items():
        options = {parameter.opts[-1] for parameter in module.command.params if isinstance(parameter, click.Option)}
        assert options - OF_SESSIONS - OF_CONNECTIONS <= used[name], name


def test_an_error_is_one_line(run: Any, tmp_path: Path) -> None:
    for arguments in (("topic-stats", "job-nothing"), ("archive", "job-nothing", str(tmp_path))):
        assert isinstance(run(*arguments, code=1).exception, raymq.TopicNotExistError)
