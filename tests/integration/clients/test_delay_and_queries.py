"""Tests of delayed messages and queries in a whole cluster. tests/component has the tests of the store alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner

import raymq
from placement.console.live_control import live_cluster
from raymq.client.admin.track import TrackState
from raymq.common.message import ConsumeFromWhere
from raymq.tools.cli import cli
from tests.support.clusters.commands import run_here
from tests.support.console.logged_in import console_app, logged_in
from tests.support.history.waiting import eventually
from tests.support.stores.lying_bodies import lying_batch, lying_bodies

FIRST = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def bodies(mq: raymq.Client, topic: str) -> list[bytes]:
    """Return the bodies of all stored messages of a topic."""
    found = []
    for queue in mq.admin.describe_topic(topic):
        if queue.messages:
            found += [message.body for message in mq.admin.pull(queue.queue, queue.min_offset).messages]
    return sorted(found)


def test_a_delayed_message_comes_when_it_is_due_over_a_kill_of_its_store(mq: raymq.Client, topic: str) -> None:
    """Two messages are delayed, by a level and until a time, and the stores are killed. Each message arrives once, with
    its original id, and not before it is due."""
    due_ms = time.time_ns() // 1_000_000 + 3000
    with mq.producer() as producer:
        timed = producer.send(raymq.Message(topic, b"timed", keys=["t"], deliver_at_ms=due_ms))
        level = producer.send(raymq.Message(topic, b"level", keys=["l"], delay_level=1), sharding_key="a")
        producer.send(raymq.Message(topic, b"plain"))
    assert level.queue.topic == "SCHEDULE_TOPIC_XXXX"
    for name in ("storage-broker-a-0", "storage-broker-b-0"):
        os.kill(mq.storages.get(name).describe().pid, signal.SIGKILL)
    eventually(lambda: bodies(mq, topic) == [b"level", b"plain", b"timed"], "all three are delivered")
    [message] = mq.admin.query_by_key(topic, "t")
    assert (message.message_id, message.body) == (timed.message_id, b"timed")
    assert message.store_timestamp_ms >= due_ms
    [message] = mq.admin.query_by_key(topic, "l")
    assert (message.message_id, message.topic) == (level.message_id, topic)


def test_a_consumer_sees_a_delayed_message_as_one_of_its_topic(mq: raymq.Client, topic: str, group: str) -> None:
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic, "late")
        with mq.producer() as producer:
            producer.send(raymq.Message(topic, b"x", tags="late", properties={"a": "b"}, delay_level=1))
        found: list[raymq.MessageExt] = []
        eventually(lambda: found.extend(consumer.poll(timeout_s=0.5)) or found, "the message is delivered")
    assert [(m.topic, m.tags, dict(m.properties)) for m in found] == [(topic, "late", {"a": "b"})]


def test_a_message_is_found_by_key_by_both_ids_and_by_time(mq: raymq.Client, topic: str) -> None:
    with mq.producer() as producer:
        sent = [producer.send(raymq.Message(topic, b"%d" % n, keys=[f"k{n}", "all"])) for n in range(20)]
    assert [m.body for m in mq.admin.query_by_key(topic, "k7")] == [b"7"]
    assert sorted(int(m.body) for m in mq.admin.query_by_key(topic, "all")) == list(range(20))
    assert mq.admin.query_by_key(topic, "nobody") == []
    for result, number in ((sent[0], b"0"), (sent[19], b"19")):
        for name in (result.message_id, result.offset_message_id):
            assert [m.body for m in mq.admin.query_by_id(topic, name)] == [number]
    [message] = mq.admin.query_by_id(topic, sent[5].message_id)
    assert mq.admin.offset_by_time(message.queue, message.store_timestamp_ms) <= message.queue_offset
    assert mq.admin.offset_by_time(message.queue, message.store_timestamp_ms + 60_000) > message.queue_offset


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"delay_level": 1, "deliver_at_ms": 0}, "exclude each other"),
        ({"deliver_at_ms": 2**60}, "at most 40"),
        ({"delay_level": -1}, "delay_level"),
    ],
)
def test_a_delay_that_cannot_be_is_refused_when_the_message_is_made(message: dict[str, int], says: str) -> None:
    with pytest.raises(raymq.MessageIllegalError, match=says):
        raymq.Message("orders", b"x", **message)


def test_the_command_line_sends_later_and_finds_again(mq: raymq.Client, topic: str, box: object) -> None:
    options = ["--json", "--address", ray.get_runtime_context().gcs_address]

    def run(*arguments: str) -> dict[str, object]:
        done = run_here(*arguments, *options)
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    send = ["send", topic, "later", "--key", "cli", "--deliver-at", "+1s"]
    raymq_command = str(Path(sys.executable).with_name("raymq"))
    subprocess.run([raymq_command, *send, *options], capture_output=True, timeout=60, check=True)
    eventually(lambda: bodies(mq, topic) == [b"later"], "it is delivered")
    found = run("query", topic, "--key", "cli")
    assert "later" in json.dumps(found)
    assert run("query", topic, "--key", "cli", "--from", "-1h", "--to", "+1h") == found


def test_a_topic_is_browsed_page_by_page_and_groups_are_tracked(mq: raymq.Client, topic: str, group: str) -> None:
    with mq.producer() as producer:
        sent = [producer.send(raymq.Message(topic, b"body %d" % n, tags="odd" if n % 2 else "even")) for n in range(30)]
    newest = mq.admin.browse(topic, limit=10)
    rest = mq.admin.browse(topic, limit=100, cursor=newest.cursor)
    assert (len(newest.messages), newest.truncated, rest.cursor) == (10, False, None)
    found = [message.body for message in (*newest.messages, *rest.messages)]
    assert sorted(found) == sorted(b"body %d" % n for n in range(30))
    assert [m.body for m in mq.admin.browse(topic, contains="body 17").messages] == [b"body 17"]
    assert len(mq.admin.browse(topic, tags="odd", newest_first=False).messages) == 15
    bounded = mq.admin.browse(topic, contains="nothing", max_scanned=7)
    assert (bounded.scanned, bounded.truncated, bounded.messages) == (7, True, ())
    queue = f"{newest.messages[0].broker_name}:{newest.messages[0].queue_id}"
    of_queue = CliRunner().invoke(cli, ["browse", topic, "--queue", queue, "--from", "-1h", "--json"])
    assert {row["queue"] for row in json.loads(of_queue.stdout)["messages"]} == {queue}
    done = CliRunner().invoke(cli, ["browse", topic, "--contains", "body 3", "--oldest", "--json"])
    assert [row["body"] for row in json.loads(done.stdout)["messages"]] == ["body 3"]

    [message] = mq.admin.query_by_id(topic, sent[4].message_id)
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic, "even")
        seen: list[bytes] = []

        def all_even() -> bool:
            seen.extend(one.body for one in consumer.poll(timeout_s=0.5))
            return len(seen) >= 15

        eventually(all_even, "the group has all it wants")
        consumer.commit()
        assert [one.state for one in mq.admin.message_track(message) if one.group == group] == [TrackState.CONSUMED]
        [odd] = mq.admin.browse(topic, contains="body 17").messages
        assert [one.state for one in mq.admin.message_track(odd) if one.group == group] == [TrackState.FILTERED]
    moves = mq.admin.reset_offsets(group, topic, "earliest", dry_run=True)
    assert set(moves.values()) == {0}
    assert sum(at or 0 for at in moves.old.values()) == 30
    readings = [one for one in mq.admin.readings().values() if one is not None]
    assert sum(one.topics[topic].held for one in readings) == 30
    assert sum(one.group_totals[group].lag for one in readings) == 0


def test_delayed_messages_are_counted_and_the_next_are_listed(mq: raymq.Client, topic: str) -> None:
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    with mq.producer() as producer:
        producer.send(raymq.Message(topic, b"timed", deliver_at_ms=due_ms))
        producer.send(raymq.Message(topic, b"level", delay_level=18))
    found = [one for one in mq.admin.delayed(limit=1000).next_due if one.topic == topic]
    assert [(one.message.body, one.level) for one in found] == [(b"timed", 0), (b"level", 18)]
    assert found[0].due_ms == due_ms
    assert mq.admin.delayed(due_ms, due_ms + 1).levels["deliver_at"] >= 1


@pytest.mark.long
def test_a_hostile_producer_stops_no_reader_of_the_topic(mq: raymq.Client, topic: str, group: str) -> None:
    """A producer sends garbage and decompression bombs all the time. Every reader of the topic still gets the valid
    messages between them."""
    queue = mq.admin.describe_topic(topic)[0].queue
    storage = mq.storages.get(mq.routes.get(topic).master_storage(queue.broker_name))
    liars = list(lying_bodies().values())
    ends, sent = threading.Event(), 0
    place = {"topic": topic, "queue_id": queue.queue_id, "tags": "t"}

    def flood() -> None:
        nonlocal sent
        while not ends.is_set() and sent < 3000:
            storage.append([lying_batch([*liars, (b"good %d" % sent, 0)], **place)], 10.0)
            sent += 1

    before = resident_mib()
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        eventually(lambda: sent >= 20, "the producer sends")
        page = mq.admin.browse(topic, limit=200, newest_first=False)
        pulled = mq.admin.pull(queue, 0, max_messages=200).messages
        for messages in (page.messages, pulled):
            good = [message.body for message in messages if message.body_error is None]
            assert good == [b"good %d" % number for number in range(len(good))]
            assert len(good) >= 10
            assert sum(message.body_error is not None for message in messages) >= 10 * len(liars)
        for words in (
            ["browse", topic, "--max", "50"],
            ["consume", group, topic, "--from", "first", "--max", "50", "--timeout", "20"],
            ["group", "describe", group],
            ["replay", topic, "--from", "-1h", "--to-group", group, "--dry-run"],
            ["query", topic, "--offset", f"{queue.broker_name}:{queue.queue_id}:0"],
        ):
            done = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
            assert done.exit_code == 0, (words, done.output)
        console = logged_in(console_app(live_cluster(mq, "raymq")))
        for path in (f"/topics/{topic}/messages?start=earliest&limit=200", f"/groups/{group}", f"/topics/{topic}",
                     f"/messages?topic={topic}&offset={queue.broker_name}:{queue.queue_id}:1"):  # fmt: skip
            answer = console.get(path)
            assert answer.status == 200, (path, answer.text[:500])
        assert "cannot be read" in answer.text
        console.close()
    finally:
        ends.set()
        thread.join()
    assert resident_mib() - before <= 200


def resident_mib() -> int:
    """Return the resident memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
