"""Delayed messages and queries through a whole cluster: the store's own tests are in tests/store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import raymq
from raymq.message import ConsumeFromWhere
from tests.support.history.waiting import eventually

FIRST = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def bodies(mq: raymq.Client, topic: str) -> list[bytes]:
    """Everything that can be read in a topic now."""
    found = []
    for queue in mq.admin.describe_topic(topic):
        if queue.messages:
            found += [message.body for message in mq.admin.pull(queue.queue, queue.min_offset).messages]
    return sorted(found)


def test_a_delayed_message_comes_when_it_is_due_over_a_kill_of_its_store(mq: raymq.Client, topic: str) -> None:
    """By level and by time; each once, with the id it was sent with, and not before its time."""
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
        ({"delay_level": 1, "deliver_at_ms": 5}, "both"),
        ({"deliver_at_ms": 2**60}, "at most 40"),
        ({"delay_level": -1}, "delay_level"),
    ],
)
def test_a_delay_that_cannot_be_is_refused_when_the_message_is_made(message: dict[str, int], says: str) -> None:
    with pytest.raises(raymq.MessageIllegalError, match=says):
        raymq.Message("orders", b"x", **message)


def test_the_command_line_sends_later_and_finds_again(mq: raymq.Client, topic: str, box: object) -> None:
    raymq_command = str(Path(sys.executable).with_name("raymq"))
    import ray

    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}

    def run(*arguments: str) -> dict[str, object]:
        done = subprocess.run(
            [raymq_command, *arguments, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    run("send", topic, "later", "--key", "cli", "--deliver-at", "+1s")
    eventually(lambda: bodies(mq, topic) == [b"later"], "it is delivered")
    found = run("query", topic, "--key", "cli")
    assert "later" in json.dumps(found)
