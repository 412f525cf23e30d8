"""Tests of topics as Ray Data datasets, and of datasets that are written to topics. The rows are the same whatever Ray
Data's execution plan is."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import ray.data
from ray.data import DataContext, Dataset

import raymq
from raydp_jobs.demo import load_flights
from raymq.common.message import MessageQueue
from raymq.data import TopicDatasource, iter_topic, read_topic, write_topic
from raymq.data.columns import SCHEMA
from raymq.data.shared_client import worker_client
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.waiting import eventually

FLIGHTS = 336_776
QUEUES = 4
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET

pytestmark = [
    # Ignore deprecation warnings and future warnings, which all come from Ray Data.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    context = DataContext.get_current()
    context.enable_progress_bars = False


@pytest.fixture(scope="module")
def flights(mq: raymq.Client) -> pd.DataFrame:
    """Send the flights of 2013 to the topic "data-flights". A message's body is the flight as JSON, and its tag is the
    carrier. Returns the flights."""
    flights = load_flights()
    wanted = flights[["row", "carrier", "origin", "tailnum", "arr_delay"]]
    bodies = wanted.to_json(orient="records", lines=True).encode().splitlines()
    tails = wanted["tailnum"].fillna("none")
    table = pa.table({"body": bodies, "tags": list(wanted["carrier"]), "keys": [[tail] for tail in tails]})
    mq.admin.create_topic("data-flights", queues=QUEUES)
    with mq.producer("data-flights") as producer:
        producer.send_table("data-flights", table)
    return wanted


def bounds(mq: raymq.Client, topic: str) -> dict[str, tuple[int, int]]:
    return {
        f"{one.queue.broker_name}:{one.queue.queue_id}": (one.min_offset, one.max_offset)
        for one in mq.admin.describe_topic(topic)
    }


def places(dataset: Dataset) -> list[tuple[str, int, int]]:
    """Return the broker group, queue id and queue offset of every row of a dataset, sorted."""
    rows = dataset.select_columns(["broker_name", "partition", "offset"]).to_pandas()
    return sorted(rows.itertuples(index=False, name=None))


def test_every_flight_is_a_row_once(mq: raymq.Client, flights: pd.DataFrame) -> None:
    dataset = read_topic("data-flights")
    assert dataset.count() == FLIGHTS == len(flights)
    assert dataset.schema().base_schema == SCHEMA
    table = pa.concat_tables(
        [pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch for batch in arrow(dataset)]
    )
    assert table.num_rows == FLIGHTS
    rows = sorted(json.loads(body)["row"] for body in table["value"].to_pylist())
    assert rows == list(range(FLIGHTS))
    per_queue = Counter(zip(table["broker_name"].to_pylist(), table["partition"].to_pylist(), strict=True))
    assert {f"{broker}:{queue}": (0, count) for (broker, queue), count in per_queue.items()} == bounds(
        mq, "data-flights"
    )


def arrow(dataset: Dataset) -> Iterator[Any]:
    return iter(dataset.iter_batches(batch_size=20_000, batch_format="pyarrow"))


def test_a_count_reads_nothing(mq: raymq.Client, flights: pd.DataFrame) -> None:
    dataset = read_topic("data-flights")
    assert dataset.count() == FLIGHTS
    # `stats` lists the operators that Ray Data has executed. No read is among them: the count did not read the
    # messages.
    assert "ReadTopic" not in dataset.stats()
    assert read_topic("data-flights", tags="UA").count() == (flights.carrier == "UA").sum()


def test_grouped_results_equal_pandas(mq: raymq.Client, flights: pd.DataFrame) -> None:
    counts = read_topic("data-flights").groupby("tags").count().to_pandas()
    assert dict(zip(counts["tags"], counts["count()"], strict=True)) == dict(flights.groupby("carrier").size())

    def delays(batch: pa.Table) -> pa.Table:
        found = pd.DataFrame([json.loads(body) for body in batch["value"].to_pylist()])
        groups = found.groupby("origin")["arr_delay"].agg(["sum", "count"]).reset_index()
        return pa.Table.from_pandas(groups, preserve_index=False)

    parts = read_topic("data-flights", columns=["value"]).map_batches(delays, batch_format="pyarrow").to_pandas()
    expected = flights.groupby("origin")["arr_delay"].agg(["sum", "count"])
    assert parts.groupby("origin")[["sum", "count"]].sum().astype(int).to_dict() == expected.astype(int).to_dict()


def test_a_projection_moves_no_bodies(mq: raymq.Client, flights: pd.DataFrame) -> None:
    dataset = read_topic("data-flights")
    pruned = dataset.select_columns(["offset", "tags"]).materialize()
    assert pruned.schema().names == ["offset", "tags"]
    assert pruned.count() == FLIGHTS
    # Check by its size that the materialized dataset has no bodies. A row without its body needs 14 bytes: 8 for the
    # offset, 2 for the tag, and 4 for the tag's position. A body has about 100 bytes.
    assert pruned.size_bytes() < 16 * FLIGHTS
    assert sum(task.metadata.size_bytes for task in TopicDatasource("data-flights").get_read_tasks(1)) > 100 * FLIGHTS


def test_a_dataset_has_the_same_rows_in_each_execution_while_a_producer_writes(mq: raymq.Client, topic: str) -> None:
    with mq.producer() as producer:
        producer.send_batch([raymq.Message(topic, b"%d" % number) for number in range(500)])
        dataset = read_topic(topic, override_num_blocks=5)
        first = places(dataset)
        producer.send_batch([raymq.Message(topic, b"later") for number in range(500)])
        assert places(dataset) == first
        producer.send_batch([raymq.Message(topic, b"later") for number in range(500)])
        assert len(first) == len(places(dataset)) == dataset.count() == 500
        assert {row["value"] for row in dataset.take_all()} == {b"%d" % number for number in range(500)}
    assert read_topic(topic).count() == 1500


def test_offsets_times_topics_and_tags_choose_rows(mq: raymq.Client, topic: str) -> None:
    other = topic + "-2"
    mq.admin.create_topic(other, queues=1)
    queue, *_ = mq.admin.topic_route(topic).publish_queues
    with mq.producer() as producer:
        for number in range(20):
            producer.send(raymq.Message(topic, b"%d" % number, tags="even" if number % 2 == 0 else "odd"), queue=queue)
        middle = datetime.now(UTC) + timedelta(milliseconds=2)  # Message times have a resolution of 1 ms.
        eventually(lambda: datetime.now(UTC) > middle, "the next millisecond")
        for number in range(20, 30):
            producer.send(raymq.Message(topic, b"%d" % number), queue=queue)
        producer.send(raymq.Message(other, b"other"))
    name = f"{queue.broker_name}:{queue.queue_id}"

    def bodies(topics: Any = topic, **options: Any) -> list[int]:
        return sorted(int(row["value"]) for row in read_topic(topics, columns=["value"], **options).take_all())

    assert bodies() == list(range(30))
    assert bodies(start_offset={topic: {name: 5}}, end_offset={topic: {name: 9}}) == [5, 6, 7, 8]
    assert bodies(start_offset=middle) == list(range(20, 30))
    assert bodies(end_offset=middle.replace(tzinfo=None)) == list(range(20))
    assert bodies(tags="odd", end_offset={topic: {name: 10}}) == [1, 3, 5, 7, 9]
    assert {row["topic"] for row in read_topic([topic, other]).take_all()} == {topic, other}
    assert read_topic(other, start_offset=0, end_offset=1000).count() == 1
    blocks = read_topic(topic, rows_per_block=7).iter_batches(batch_size=None, batch_format="pyarrow")
    assert sorted(block.num_rows for block in blocks) == [2, 7, 7, 7, 7]


def test_an_unreadable_topic_raises_an_error_at_once(mq: raymq.Client, topic: str) -> None:
    with pytest.raises(raymq.TopicNotExistError):
        read_topic("data-nothing")
    with pytest.raises(raymq.OffsetOutOfRangeError):
        read_topic(topic, start_offset={topic: {"broker-a:0": 1}})
    empty = read_topic(topic)
    assert (empty.count(), empty.take_all()) == (0, [])
    assert empty.schema().names == read_topic(topic, tags="none").schema().names == SCHEMA.names


ROWS = [
    {
        "id": number,
        "text": f"row {number}",
        "kind": ("new", "old", None)[number % 3],
        "words": [f"w{number}", f"w{number % 7}x"],
        "more": {"colour": "blue" if number % 2 else None, "size": str(number)},
    }
    for number in range(500)
]


def test_written_rows_can_be_read(mq: raymq.Client, topic: str) -> None:
    summary = write_topic(
        ray.data.from_items(ROWS, override_num_blocks=4),
        topic,
        body_field="text",
        key_field="id",
        tags_field="kind",
        keys_field="words",
        properties_field="more",
    )
    assert (summary.rows, summary.stored_before, sum(one.count for one in summary.ranges)) == (500, 0, 500)
    found = {row["value"].decode(): row for row in read_topic(topic).take_all()}
    assert len(found) == 500 == read_topic(topic).count()
    for row in ROWS:
        read = found[row["text"]]
        more = {name: value.encode() for name, value in row["more"].items() if value is not None}
        assert (read["key"], read["tags"], dict(read["headers"])) == (str(row["id"]).encode(), row["kind"], more)
        assert list(read["keys"]) == [str(row["id"]), *row["words"]]


def test_a_whole_row_is_json_and_rows_of_a_key_stay_in_order_in_one_queue(mq: raymq.Client, topic: str) -> None:
    dataset = ray.data.from_items([{"customer": number % 5, "step": number} for number in range(200)])
    write_topic(dataset.repartition(1), topic, key_field="customer")
    steps: dict[int, list[int]] = {number: [] for number in range(5)}
    queues: dict[int, set[MessageQueue]] = {number: set() for number in range(5)}
    rows = read_topic(topic).take_all()
    for row in sorted(rows, key=lambda row: row["offset"]):
        value = json.loads(row["value"])
        steps[value["customer"]].append(value["step"])
        queues[value["customer"]].add(MessageQueue(topic, row["broker_name"], row["partition"]))
    assert steps == {number: list(range(number, 200, 5)) for number in range(5)}
    assert all(len(found) == 1 for found in queues.values())


def test_a_message_may_wait_for_its_time(mq: raymq.Client, topic: str) -> None:
    late = 1000 * int(datetime.now(UTC).timestamp()) + 3_600_000
    rows = [{"text": "now", "at": None}, {"text": "later", "at": late}]
    summary = write_topic(ray.data.from_items(rows), topic, body_field="text", deliver_at_field="at")
    assert summary.rows == 2
    assert [row["value"] for row in read_topic(topic).take_all()] == [b"now"]


def test_a_retried_write_task_stores_its_rows_once(
    mq: raymq.Client, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataContext.get_current(), "target_max_block_size", 128 << 10)
    died = tmp_path / "died"

    def grow_and_die_once(batch: pa.Table) -> pa.Table:
        """Return the batch with an added column, which makes it so large that Ray Data writes it as a separate block at
        once. So earlier batches are already stored when a later call of this function kills its own process. It does so
        once."""
        if batch["id"][0].as_py() >= 6000 and not died.exists():
            deadline_s = time.monotonic() + 60
            stored = 0
            while not stored and time.monotonic() < deadline_s:
                with worker_client().use() as client:
                    stored = sum(queue.messages for queue in client.admin.describe_topic(topic))
            died.write_text(str(stored))
            os._exit(1)
        return batch.append_column("pad", pa.array(["x" * 200] * batch.num_rows))

    numbers = ray.data.range(8000, override_num_blocks=1)
    summary = write_topic(numbers.map_batches(grow_and_die_once, batch_size=1000, batch_format="pyarrow"), topic)
    assert summary.rows == 8000
    assert 0 < int(died.read_text()) <= summary.stored_before
    assert sum(one.count for one in summary.ranges) == 8000 - summary.stored_before
    assert sorted(json.loads(row["value"])["id"] for row in read_topic(topic).take_all()) == list(range(8000))


def test_writes_that_cannot_be_are_refused_before_anything_is_stored(mq: raymq.Client, topic: str) -> None:
    dataset = ray.data.from_items(ROWS)
    with pytest.raises(raymq.TopicNotExistError):
        write_topic(dataset, "data-nothing")
    with pytest.raises(raymq.InvalidArgumentError, match="no field body_field='txt', tags_field='tag'"):
        write_topic(dataset, topic, body_field="txt", tags_field="tag")
    with pytest.raises(Exception, match="MessageIllegalError"):
        write_topic(dataset, topic, key_field="text")  # The write fails, because a message key must not contain spaces.
    assert read_topic(topic).count() == 0


def assert_stored_once(received: list[int], rows: int, failed_most: int) -> None:
    """Check that a write stored each of its rows once. A write of the same rows that failed before may have stored up
    to `failed_most` of them, each once."""
    counts = Counter(received)
    counts.subtract(range(rows))
    assert set(counts) == set(range(rows))
    assert set(counts.values()) <= {0, 1}
    assert counts.total() <= failed_most


def test_a_write_waits_for_room_in_a_full_topic_or_fails(mq: raymq.Client, topic: str, group: str) -> None:
    bounded, limit = f"{topic[:100]}-bounded", 40
    mq.admin.create_group(group)
    mq.admin.create_topic(bounded, queues=1, max_backlog=limit, backlog_policy="refuse", backlog_groups=[group])
    numbers = ray.data.range(200, override_num_blocks=10)
    # The message that the user sees is the message of TopicFullError, after the place in the user's program.
    with pytest.raises(Exception, match=f"topic '{bounded}' is full: group '{group}' has not consumed 40 messages"):
        write_topic(numbers, bounded)
    assert sum(queue.messages for queue in mq.admin.describe_topic(bounded)) <= limit
    mq.admin.update_topic(bounded, backlog_policy="block")
    received = list[int]()
    with ThreadPoolExecutor(1) as pool, mq.simple_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(bounded)
        write = pool.submit(write_topic, numbers, bounded)

        def consume() -> bool:
            messages = consumer.receive(10, invisible_s=60.0, wait_s=0.5)
            received.extend(json.loads(message.body)["id"] for message in messages)
            consumer.ack(messages)
            return write.done() and not messages

        eventually(consume, "the write is stored and consumed", 240.0)
        assert write.result().rows == 200
    assert_stored_once(received, 200, limit)


def test_an_iterator_continues_at_the_committed_offsets(mq: raymq.Client, topic: str, group: str) -> None:
    with mq.producer() as producer:
        producer.send_batch([raymq.Message(topic, b"%d" % number) for number in range(300)])
        seen: list[list[int]] = []
        for dataset in iter_topic(group, topic, 0.0, 100):
            seen.append(sorted(int(row["value"]) for row in dataset.take_all()))
            if len(seen) == 2:
                break
        assert [len(rows) for rows in seen] == [100, 100]
        assert mq.admin.group_summary(group).lag == 200  # The offsets of the second dataset were not committed.
        producer.send_batch([raymq.Message(topic, b"%d" % number) for number in range(300, 400)])
    again = iter_topic(group, topic, 0.0)
    assert sorted(int(row["value"]) for row in next(again).take_all()) == sorted(set(range(400)) - set(seen[0]))
    again.close()  # type: ignore[attr-defined]  # it is a generator


def test_batches_of_torch_come_straight_from_a_topic(mq: raymq.Client, flights: pd.DataFrame) -> None:
    torch = pytest.importorskip("torch", reason="torch is not among the dependencies")
    dataset = read_topic("data-flights", columns=["offset", "timestamp"])
    total, rows = 0, 0
    for batch in dataset.iter_torch_batches(batch_size=50_000):
        assert isinstance(batch["offset"], torch.Tensor)
        total, rows = total + int(batch["offset"].sum()), rows + len(batch["offset"])
    assert rows == FLIGHTS
    assert total == sum(end * (end - 1) // 2 for _, end in bounds(mq, "data-flights").values())


def test_the_example_of_the_page_prints_the_documented_output(mq: raymq.Client) -> None:
    assert_prints_what_it_says("ray-data.md")
