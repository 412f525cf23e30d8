"""Tests of running consumers of all kinds while an administrator withdraws and restores their group's permission.

The module also tests other changes that an administrator makes and that affect consumers only in a cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import raymq
from raymq.common.message import MessageModel
from raymq.common.protocol.group import GroupConfig
from raymq.tools.cli import cli
from tests.support.clusters.cluster import poll_until
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
SOON_S = 20.0
"""Maximum number of seconds until consumers notice a change of their permissions. A heartbeat and a request to the
brokers take far less."""
COUNTED = 2000


def send(mq: raymq.Client, topic: str, *bodies: bytes) -> None:
    with mq.producer() as producer:
        producer.send_batch([raymq.Message(topic, body) for body in bodies])


def command(*arguments: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output


SWITCHES = {
    "forbid": (
        lambda mq, group, topic: command("group", "forbid", group, topic),
        lambda mq, group, topic: command("group", "allow", group, topic),
    ),
    "consume_enable": (
        lambda mq, group, topic: command("group", "update", group, "--no-consume"),
        lambda mq, group, topic: command("group", "update", group, "--consume"),
    ),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_pull_and_push_consumers_stop_and_continue_within_seconds(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path, switch: str
) -> None:
    stop, go_on = SWITCHES[switch]
    notes = ListenerNotes(tmp_path / "notes")
    pushing = f"push-{group}"[:100]
    listening = mq.push_consumer(pushing, consume_from=FIRST).subscribe(topic).on_message(notes)
    with mq.pull_consumer(group, consume_from=FIRST) as pulling, listening.start() as running:
        pulling.subscribe(topic)
        send(mq, topic, b"1", b"2")
        assert {message.body for message in poll_until(pulling, 2)} == {b"1", b"2"}
        eventually(lambda: sorted(notes.lines()) == ["1", "2"], "the listener's two")
        for name in (group, pushing):
            stop(mq, name, topic)
        bodies: list[bytes] = []
        refusal = eventually(lambda: _refusal(pulling, bodies), "the pull consumer's stop", SOON_S)
        assert "forbidden to read" in refusal or "consume_enable is off" in refusal
        eventually(lambda: _states(running) == {"forbidden"}, "the push consumer's stop", SOON_S)
        assert "group allow" in _trouble(running) or "consume_enable is off" in _trouble(running)
        send(mq, topic, b"3", b"4")  # send two messages that no consumer of the forbidden group may read
        with pytest.raises(raymq.NoPermissionError):
            pulling.poll(timeout_s=1.0)
        assert sorted(notes.lines()) == ["1", "2"]
        for name in (group, pushing):
            go_on(mq, name, topic)
        eventually(lambda: _refusal(pulling, bodies) == "", "the pull consumer's return", SOON_S)
        eventually(lambda: _refusal(pulling, bodies) or len(bodies) == 2, "its other two", SOON_S)
        assert sorted(bodies) == [b"3", b"4"]
        eventually(lambda: sorted(notes.lines()) == ["1", "2", "3", "4"], "the listener's other two", SOON_S)
        assert _trouble(running) == ""


def _refusal(consumer: raymq.PullConsumer, bodies: list[bytes]) -> str:
    """Poll once, and add the received bodies to `bodies`. Returns the text of the NoPermissionError that the poll
    raised; empty if it raised none."""
    try:
        bodies += [message.body for message in consumer.poll(timeout_s=0.2)]
    except raymq.NoPermissionError as error:
        return str(error)
    return ""


def _states(running: Any) -> set[str]:
    """Return the states of the queues that the push consumer reads. The queues of the group's retry topic are left out,
    because the consumer still reads them while a topic is forbidden."""
    return {q.state for one in running.status() for q in one.queues if not q.queue.topic.startswith("%RETRY%")}


def _trouble(running: Any) -> str:
    [status] = running.status()
    return status.last_error


def test_a_broadcasting_consumer_stops_and_continues(mq: raymq.Client, topic: str, group: str, tmp_path: Path) -> None:
    notes = ListenerNotes(tmp_path / "notes")
    options: dict[str, Any] = {"message_model": MessageModel.BROADCASTING, "offsets_dir": str(tmp_path / "offsets")}
    mq.admin.create_group(GroupConfig(group))
    push = mq.push_consumer(group, consume_from=FIRST, **options).subscribe(topic).on_message(notes)
    with push.start() as running:
        send(mq, topic, b"1")
        eventually(lambda: notes.lines() == ["1"], "the first")
        mq.admin.forbid(group, topic)
        eventually(lambda: _states(running) == {"forbidden"}, "the stop", SOON_S)
        send(mq, topic, b"2")
        mq.admin.allow(group, topic)
        eventually(lambda: notes.lines() == ["1", "2"], "the second", SOON_S)


def test_a_forbidden_topic_blocks_no_other_topic(mq: raymq.Client, topic: str, group: str) -> None:
    other = f"a-{topic}"[:100]
    mq.admin.create_topic(other, queues=1)
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        consumer.subscribe(other)
        # The forbidden topic's name sorts before the allowed topic's name, so the consumer polls the forbidden topic's
        # queues first.
        mq.admin.forbid(group, other)
        send(mq, topic, b"1")
        [message] = poll_until(consumer, 1)
        assert message.body == b"1"
    with mq.simple_consumer(group, consume_from=FIRST) as simple:
        simple.subscribe(other)
        with pytest.raises(raymq.NoPermissionError, match="forbidden to read"):
            simple.receive(1, 10.0, wait_s=0.1)
        mq.admin.allow(group, other)
        send(mq, other, b"2")
        [received] = simple.receive(1, 10.0, wait_s=SOON_S)
        assert received.body == b"2"


def test_a_running_group_continues_at_cloned_offsets(mq: raymq.Client, topic: str, group: str) -> None:
    ahead = f"ahead-{group}"[:100]
    with mq.pull_consumer(ahead, consume_from=FIRST, auto_commit=False) as one:
        one.subscribe(topic)
        send(mq, topic, *(b"%d" % number for number in range(50)))
        poll_until(one, 50)
        committed = one.commit()
        assert sum(committed.values()) == 50
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        poll_until(consumer, 50)  # The consumer receives 50 messages and commits none.
        command("group", "clone-offsets", ahead, group, topic)
        send(mq, topic, b"new")
        eventually(
            lambda: all(consumer.position(queue) >= offset for queue, offset in committed.items()), "the clone", SOON_S
        )
        bodies = [message.body for message in poll_until(consumer, 1)]
    assert bodies[-1] == b"new"
    assert {entry.queue: entry.committed for entry in mq.admin.describe_group(group)}.items() >= committed.items()


def test_a_topic_is_made_on_named_brokers_only_and_read_from_there(mq: raymq.Client, topic: str, group: str) -> None:
    there = f"there-{topic}"[:100]
    command("topic", "create", there, "--queues", "2", "--brokers", "broker-b")
    assert mq.admin.topic_route(there).queue_counts() == {"broker-b": 2}
    send(mq, there, b"1", b"2")
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(there)
        assert {message.queue.broker_name for message in poll_until(consumer, 2)} == {"broker-b"}
        assert {queue.broker_name for queue in consumer.assignment()} == {"broker-b"}


def test_values_of_the_name_servers_are_put_listed_and_deleted(mq: raymq.Client, group: str) -> None:
    for key, value in (("colour", "blue"), ("size", "7")):
        mq.admin.put_kv(group, key, value)
    assert mq.admin.list_kv(group) == {"colour": "blue", "size": "7"}
    mq.admin.delete_kv(group, "colour")
    assert (mq.admin.get_kv(group, "colour"), mq.admin.get_kv(group, "size")) == (None, "7")


@pytest.mark.parametrize("kind", ["pull", "table", "simple", "push"])
def test_messages_read_from_mapped_files_count_as_fetched(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path, kind: str
) -> None:
    send(mq, topic, *[b"x"] * COUNTED)
    before = _gets(mq)
    if kind == "push":
        notes = ListenerNotes(tmp_path / "notes")
        with mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(notes).start():
            eventually(lambda: len(notes.lines()) >= COUNTED, "everything")
    elif kind == "simple":
        with mq.simple_consumer(group, consume_from=FIRST) as simple:
            simple.subscribe(topic)
            got = 0
            while got < COUNTED:
                got += simple.ack(simple.receive(32, 60.0, wait_s=SOON_S))
    else:
        with mq.pull_consumer(group, consume_from=FIRST) as consumer:
            consumer.subscribe(topic)
            got = 0
            while got < COUNTED:
                got += len(consumer.poll_table() if kind == "table" else consumer.poll())
    eventually(lambda: _gets(mq) - before >= COUNTED, "the gets", SOON_S)


def _gets(mq: raymq.Client) -> int:
    stores = [mq.admin.store_statistics(name) for name in ("broker-a", "broker-b")]
    return sum(int(store.runtime["msgGetTotalTodayNow"]) for store in stores)
