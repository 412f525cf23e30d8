"""Tests of retention per topic: which messages a store returns and keeps if a topic has its own reserve time."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.layout import STORE_TIMESTAMP_OFFSET
from storage.message_store import MessageStore
from storage.queue.topic_attributes import TOPICS_FILE, parse_attributes
from storage.retention import cleaner
from tests.support.stores.clocks import let_pass
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.stores import LOG_FILE_BYTES, bodies_of, killed_copy, make_batch, open_store

MINUTE_MS = 60_000
NOW = datetime(2023, 11, 15, 3)
NOW_MS = int(NOW.timestamp() * 1000)


class Clock:
    def __init__(self) -> None:
        self.now_ms = NOW_MS

    def __call__(self) -> int:
        return self.now_ms


def topics_json(**times_ms: int | str) -> str:
    table = {
        topic.replace("_", "-"): {"topicName": topic, "attributes": {"reserve.time": str(time)}}
        for topic, time in times_ms.items()
    }
    return json.dumps({"topicConfigTable": table})


@pytest.fixture
def root(tmp_path, no_flushes, monkeypatch) -> Path:
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    monkeypatch.setattr(cleaner, "disk_usage", lambda path: 0.5)
    return tmp_path / "store"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def filled(root: Path, clock: Clock, count: int = 600, **changes) -> MessageStore:
    """Fill a store with one message of `orders` and one message of `bills` for each of the last `count` minutes.
    Returns the open store."""
    store = open_store(root, clock_ms=clock, **changes)
    for n in range(count):
        clock.now_ms = NOW_MS - (count - 1 - n) * MINUTE_MS
        store.append([make_batch([b"%03d" % n + b"x" * 300]), make_batch([b"%03d" % n], topic="bills")])
    return store


def numbers(store: MessageStore, topic: str = "orders") -> list[int]:
    return [int(body[:3]) for body in bodies_of(store, topic)]


def test_retention_time_of_a_topic_applies_to_this_topic_only(root, clock):
    store = filled(root, clock)
    store.write_config(TOPICS_FILE, topics_json(orders=30 * MINUTE_MS))
    let_pass(store)
    assert store.cleaner.run_once(NOW) == 0
    assert store.queues.bounds("orders", 0).min_offset == 569
    assert numbers(store) == list(range(569, 600))
    assert numbers(store, "bills") == list(range(600))
    assert store.queues.offset_by_time("orders", 0, 0) == 569
    [result] = store.fetch([FetchRequest("orders", 0, 12, 10, None)], max_bytes=10_000, wait_s=0)
    assert (result.status, result.next_offset) == (PullStatus.OFFSET_ILLEGAL, 569)
    assert len(list((root / "consumequeue/orders/0").iterdir())) == 1
    assert len(list((root / "consumequeue/bills/0").iterdir())) == 6
    store.close()


def test_expired_messages_do_not_return_after_a_kill_or_with_a_longer_time(root, clock):
    store = filled(root, clock, 300)
    store.write_config(TOPICS_FILE, topics_json(orders=30 * MINUTE_MS))
    let_pass(store)
    store.cleaner.run_once(NOW)
    killed = killed_copy(root, root.with_name("killed"))
    store.close()
    for path in (root, killed):
        with_more = open_store(path, clock_ms=clock)
        assert numbers(with_more) == list(range(269, 300))
        with_more.write_config(TOPICS_FILE, topics_json(orders=200 * MINUTE_MS))
        let_pass(with_more)
        with_more.cleaner.run_once(NOW)
        assert numbers(with_more) == list(range(269, 300))
        assert with_more.append([make_batch([b"300"])])[0].queue_offset == 300
        with_more.close()


def test_a_topic_with_only_expired_messages_is_empty_and_continues_at_its_end(root, clock):
    store = filled(root, clock, 50)
    store.write_config(TOPICS_FILE, topics_json(orders=30 * MINUTE_MS))
    later = datetime.fromtimestamp((NOW_MS + 60 * MINUTE_MS) / 1000)
    let_pass(store)
    store.cleaner.run_once(later)
    bounds = store.queues.bounds("orders", 0)
    assert (bounds.min_offset, bounds.max_offset) == (50, 50)
    store.close()
    store = open_store(root, clock_ms=clock)
    assert numbers(store) == []
    assert store.append([make_batch([b"050"])])[0].queue_offset == 50
    assert numbers(store) == [50]
    store.close()


def test_a_recreated_topic_begins_at_offset_0(root, clock):
    store = filled(root, clock, 100)
    store.write_config(TOPICS_FILE, topics_json(orders=30 * MINUTE_MS))
    let_pass(store)
    store.cleaner.run_once(NOW)
    store.topics.delete("orders")
    store.append([make_batch([b"%03d" % n for n in range(90)])])
    killed = killed_copy(root, root.with_name("killed"))
    let_pass(store)
    store.cleaner.run_once(NOW)
    assert numbers(store) == list(range(90))
    store.close()
    for path in (root, killed):
        store = open_store(path, clock_ms=clock)
        assert numbers(store) == list(range(90))
        store.close()


@pytest.mark.parametrize("longer_h", [0, 200])
def test_log_files_stay_while_a_topic_with_a_longer_time_has_messages_in_them(root, clock, longer_h):
    store = filled(root, clock)
    for path in sorted((root / "commitlog").iterdir()):
        os.utime(path, (NOW.timestamp() - 100 * 3600,) * 2)
    times = {"bills": longer_h * 60 * MINUTE_MS} if longer_h else {}
    store.write_config(TOPICS_FILE, topics_json(**times))
    store.cleaner._by_hand = 1
    let_pass(store)
    deleted = store.cleaner.run_once(NOW)
    assert (deleted > 0) == (longer_h == 0)
    assert (numbers(store, "bills")[0] == 0) == (longer_h > 0)
    store.close()


def test_a_full_disk_takes_the_messages_of_a_topic_with_a_longer_time_too(root, clock, monkeypatch):
    monkeypatch.setattr(cleaner, "disk_usage", lambda path: 0.89)
    store = filled(root, clock, clean_file_forcibly_enable=True)
    store.write_config(TOPICS_FILE, topics_json(bills=1000 * 60 * MINUTE_MS))
    let_pass(store)
    assert store.cleaner.run_once(NOW) > 0
    lost = {one.topic for one in store.cleaner.deleted_young()}
    assert lost == {"bills", "orders"}
    store.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("{}", {}),
        (topics_json(orders=3_600_000, bills=-1), {"orders": 3_600_000}),
        (topics_json(orders=5), {"orders": 5}),
        (topics_json(orders="soon"), {}),
        ('{"topicConfigTable": {"a": {"attributes": null}, "b": {}}}', {}),
    ],
)
def test_retention_times_are_read_from_rocketmqs_file(text, expected):
    assert {
        topic: values.reserve_time_ms for topic, values in parse_attributes(text).items() if values.reserve_time_ms
    } == expected


@pytest.mark.parametrize(
    "text", [None, "", "[ 1 ]", "\0garbage", '{"topicConfigTable": 5}', '{"topicConfigTable": {"a": 1}}']
)
def test_a_file_that_rocketmq_cannot_have_written_sets_no_topics_time(text):
    assert parse_attributes(text) == {}


@pytest.mark.parametrize("kind", [*FIELDS, "old time", "new time"])
def test_one_damaged_record_makes_no_young_message_old(root, clock, kind):
    """A damaged record does not make retention treat a young message as old. Retention searches for the first message
    that is younger than the topic's reserved time, and may read a damaged record on the way. The test damages one
    record of a queue, at each offset in turn."""
    store = filled(root, clock, 90)
    [queue] = [one for one in store._parts.queues.plain if one.topic == "orders"]
    expected = 90 - 31
    for offset in range(90):
        [unit] = queue.units(offset, 1)
        start = int(unit["physical_offset"])
        path = root / "commitlog" / f"{start - start % LOG_FILE_BYTES:020}"
        good = path.read_bytes()
        if kind in FIELDS:
            flip(root, start, kind)
        else:
            stored_ms = 1 if kind == "old time" else NOW_MS * 2
            with path.open("r+b", buffering=0) as file:
                file.seek(start % LOG_FILE_BYTES + STORE_TIMESTAMP_OFFSET)
                file.write(stored_ms.to_bytes(8))
        found = queue.first_stored_at(NOW_MS - 30 * MINUTE_MS)
        # A damaged store time may look newer than the reserved time. The search for the first young message may then
        # stop at this record, and treat all messages from there on as young.
        if kind == "new time":
            assert found in (min(offset, expected), expected)
        # If the header of the last message that is old enough to be deleted is damaged, its store time is unknown. The
        # store may then keep this message.
        elif offset == expected - 1:
            assert found in (offset, expected)
        # The damaged record is the first record that is too young to be deleted. Its store time is unknown, so
        # retention may delete it together with the old records.
        elif offset == expected:
            assert found in (expected, expected + 1)
        else:
            assert found == expected
        with path.open("r+b", buffering=0) as file:
            file.write(good)
    store.close()


def test_a_damaged_message_keeps_no_old_message_from_being_forgotten(root, clock):
    store = filled(root, clock, 90)
    store.write_config(TOPICS_FILE, topics_json(orders=30 * MINUTE_MS))
    [queue] = [one for one in store._parts.queues.plain if one.topic == "orders"]
    flip(root, int(queue.units(45, 1)[0]["physical_offset"]), "size")
    let_pass(store)
    store.cleaner.run_once(NOW)
    assert store.queues.bounds("orders", 0).min_offset == 59
    store.close()
