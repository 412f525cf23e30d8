"""Tests of recalls of delayed messages and of replays of dead letters in a whole cluster, through the API and from the
command line."""

from __future__ import annotations

import json
import time
from uuid import uuid4

import pytest
from click.testing import CliRunner

import raymq
from raymq.client.admin.replay import Replay
from raymq.common.errors import GroupNotExistError, InvalidArgumentError, RecallError
from raymq.common.message import Message, MessageExt
from raymq.common.protocol.group import GroupConfig
from raymq.tools.cli import cli
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def run(*words: str) -> dict[str, object]:
    """Run a raymq command with --json. Returns its decoded output."""
    done = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def read(mq: raymq.Client, topic: str) -> list[MessageExt]:
    """Return every message of a topic, one queue after another."""
    messages: list[MessageExt] = []
    for entry in mq.admin.describe_topic(topic):
        offset = entry.min_offset
        while offset < entry.max_offset:
            result = mq.admin.pull(entry.queue, offset, max_messages=1000)
            messages += result.messages
            offset = result.next_offset
    return messages


def test_a_message_is_recalled_in_time_and_another_one_too_late(mq: raymq.Client, topic: str) -> None:
    due_ms = now_ms() + 3000
    with mq.producer() as producer:
        handles = [producer.send(Message(topic, b"%d" % n, deliver_at_ms=due_ms)).recall_handle for n in range(3)]
        assert producer.send(Message(topic, b"now")).recall_handle is None
        message_id = producer.recall(topic, handles[0] or "")
        assert run("recall", topic, handles[2] or "")["message_id"] != message_id
        assert eventually(lambda: [m.body for m in read(mq, topic) if m.body == b"1"], "the message not recalled")
        with pytest.raises(RecallError):
            producer.recall(topic, handles[1] or "")
        with pytest.raises(RecallError, match="not of topic 'other'"):
            producer.recall("other", handles[1] or "")
    assert sorted(message.body for message in read(mq, topic)) == [b"1", b"now"]


def test_a_replay_continues_without_duplicates(mq: raymq.Client, topic: str) -> None:
    again = f"{topic}-again"
    mq.admin.create_topic(again, queues=2)
    begin = now_ms()
    with mq.producer() as producer:
        sent = producer.send_batch(Message(topic, b"%d" % n, tags="t", keys=f"k{n % 3}") for n in range(30))
        end = now_ms() + 1
        time.sleep(0.002)
        producer.send(Message(topic, b"later"))
    arguments = {"begin_ms": begin, "end_ms": end, "to_topic": again}
    assert mq.admin.replay(topic, **arguments, dry_run=True) == Replay(again, 30, 0, 0, True)
    counts: list[int] = []
    assert mq.admin.replay(topic, **arguments, max_messages=10, progress=counts.append) == Replay(
        again, 10, 10, 0, False
    )
    assert sum(counts) == 10
    assert mq.admin.replay(topic, **arguments) == Replay(again, 30, 20, 10, True)
    assert mq.admin.replay(topic, **arguments) == Replay(again, 30, 0, 30, True)
    copies = read(mq, again)
    assert [message.body for message in copies] == [b"%d" % n for n in range(30)]
    assert [message.message_id for message in copies] == [result.message_id for result in sent]
    assert {(message.tags, message.system_properties["ORIGIN_MESSAGE_ID"]) for message in copies} == {
        ("t", result.offset_message_id) for result in sent
    }
    assert mq.admin.replay(topic, **arguments, name="once more").sent == 30


def test_a_replay_to_one_group_reaches_no_other(mq: raymq.Client, topic: str) -> None:
    group = f"only-{uuid4().hex[:8]}"
    with mq.producer() as producer:
        sent = [producer.send(Message(topic, b"%d" % n, keys="k" if n < 5 else "other")) for n in range(10)]
    eventually(lambda: len(mq.admin.query_by_key(topic, "k")) == 5, "the index")
    with pytest.raises(GroupNotExistError):
        mq.admin.replay(topic, key="k", to_group=group)
    mq.admin.create_group(GroupConfig(group))
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(f"%RETRY%{group}")
        assert run("replay", topic, "--key", "k", "--to-group", group)["sent"] == 5
        assert mq.admin.replay(topic, key="k", to_group=group).sent_before == 5
        ids = (sent[7].message_id, sent[8].message_id)
        assert run("replay", topic, "--id", ids[0], "--id", ids[1], "--to-group", group)["sent"] == 2
        got: list[MessageExt] = []
        eventually(lambda: got.extend(consumer.poll(timeout_s=1.0)) or len(got) >= 7, "the copies")
        assert sorted(message.body for message in got) == [b"0", b"1", b"2", b"3", b"4", b"7", b"8"]
        assert {message.system_properties["RETRY_TOPIC"] for message in got} == {topic}
    assert len(read(mq, topic)) == 10


def test_a_replay_into_its_own_topic_leaves_its_copies_out(mq: raymq.Client, topic: str) -> None:
    with mq.producer() as producer:
        producer.send_batch([Message(topic, b"%d" % n) for n in range(3)])
    assert mq.admin.replay(topic, begin_ms=0, to_topic=topic).sent == 3
    assert mq.admin.replay(topic, begin_ms=0, to_topic=topic) == Replay(topic, 3, 0, 3, True)
    assert len(read(mq, topic)) == 6


def test_a_replay_with_missing_arguments_is_refused(mq: raymq.Client, topic: str) -> None:
    for arguments in ({}, {"key": "k", "begin_ms": 0}, {"key": "k"}, {"key": "k", "to_topic": topic, "to_group": "g"}):
        with pytest.raises(InvalidArgumentError):
            mq.admin.replay(topic, **arguments)


def test_the_example_of_the_page_prints_the_documented_output(mq: raymq.Client) -> None:
    assert_prints_what_it_says("recall-and-replay.md")
