"""Tests of raymq's built-in Spark jobs: `raymq job` commands run them on a cluster of one machine and in one Spark
session."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner, Result
from matplotlib.image import imread
from pyspark.sql import SparkSession

import raymq
from raydp_jobs.jobs import archive, dead_letters, replay, topic_stats, windowed_counts
from raydp_jobs.jobs.pictures import PICTURE_SIZE_PX
from raydp_jobs.jobs.spark_job import SessionSize
from raymq.common.message import ConsumeFromWhere
from raymq.tools.cli import cli
from tests.support.history.waiting import eventually

TOPIC = "job-orders"
AGAIN = "job-orders-again"
GROUP = "job-billing"
MESSAGES = 3000
TAGS = ("paid", "late", None)


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
    """Return a function that runs a `raymq job` command. The command uses the test module's Spark session and client
    instead of its own."""

    @contextmanager
    def session(
        name: str,
        address: str | None,
        size: SessionSize,
        *,
        quiet: bool,
        check: Callable[[raymq.Client], None],
    ) -> Iterator[Any]:
        check(mq)
        yield spark, mq

    @contextmanager
    def client(address: str | None) -> Iterator[raymq.Client]:
        yield mq

    for module in (archive, topic_stats, windowed_counts):
        monkeypatch.setattr(module, "spark_job", session)
    for other in (dead_letters, replay):
        monkeypatch.setattr(other, "client_of", client)

    def invoke(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, ["job", *arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


def check_picture(path: Path) -> None:
    """Check that the file is a PNG of PICTURE_SIZE_PX in which at least a tenth of the pixels is coloured."""
    assert struct.unpack(">II", path.read_bytes()[16:24]) == PICTURE_SIZE_PX
    pixels = imread(path)[:, :, :3]
    assert ((pixels.max(axis=2) - pixels.min(axis=2)) > 0.2).mean() > 0.1


@pytest.mark.long
def test_figures_of_a_topic_match_the_sent_messages(run: Any, sent: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "orders.png"
    value = json.loads(run("topic-stats", TOPIC, "--json", "--picture", str(path)).output)
    [topic] = value["topics"]
    assert (topic["messages"], topic["bytes"], topic["keys"]) == (MESSAGES, sum(map(len, sent)), 50)
    assert {one["tags"]: one["messages"] for one in topic["tags"]} == dict.fromkeys(TAGS, 1000)
    assert sum(one["messages"] for one in topic["over_time"]) == MESSAGES
    check_picture(path)


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

    more = send(mq, range(MESSAGES, MESSAGES + 30))
    assert json.loads(run("archive", TOPIC, str(tmp_path), "--json").output)["messages"] == 30
    assert archived(tmp_path / TOPIC) == sorted([*sent, *more])
    nothing = run("archive", TOPIC, str(tmp_path / "before"), "--before", "2020-01-01", "--json")
    assert json.loads(nothing.output)["messages"] == 0


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


def counts_in(mq: raymq.Client, topic: str) -> dict[tuple[int, str | None], int]:
    """Return the message counts that a job stored in a topic, by the start time of the counted window in ms, and by
    tag. Checks that no count is stored twice."""
    found: dict[tuple[int, str | None], int] = {}
    for queue in mq.admin.describe_topic(topic):
        for message in mq.admin.pull(queue.queue, 0, max_messages=1000).messages if queue.messages else ():
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


def test_an_error_is_one_line(run: Any, tmp_path: Path) -> None:
    for arguments in (("topic-stats", "job-nothing"), ("archive", "job-nothing", str(tmp_path))):
        assert isinstance(run(*arguments, code=1).exception, raymq.TopicNotExistError)
