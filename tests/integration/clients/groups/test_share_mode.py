"""Tests of push consumers in the consume mode "share" in a cluster: more instances than queues, retries, order, a stop,
the death of a listener's process, and the modes of a group."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import raymq
from raymq.common.message import MessageExt
from raymq.common.protocol.group import GroupConfig
from raymq.tools.cli import cli
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def send(mq: raymq.Client, topic: str, count: int, *, key: Callable[[int], str] | None = None) -> None:
    with mq.producer() as producer:
        for number in range(count):
            producer.send_async(raymq.Message(topic, b"%d" % number), sharding_key=key(number) if key else None)


def notes_into(path: Path, pause_s: float = 0.0) -> Callable[[MessageExt], None]:
    """Return a listener that appends a line to a file: its process, and the message's number and attempt."""
    name = str(path)

    def listen(message: MessageExt) -> None:
        import os
        import time

        time.sleep(pause_s)
        line = f"{os.getpid()} {int(message.body)} {message.reconsume_times}\n"
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    return listen


def lines_of(path: Path) -> list[tuple[int, int, int]]:
    """Return the process, the number and the attempt of each line."""
    text = path.read_text() if path.exists() else ""
    return [(int(pid), int(number), int(attempt)) for pid, number, attempt in map(str.split, text.splitlines())]


def in_flight(mq: raymq.Client, group: str) -> tuple[int, int]:
    """Return a group's lag, and the number of its leased messages."""
    found = mq.admin.group_summary(group)
    return found.lag, sum(one.in_flight for one in found.queues)


def test_eight_instances_on_one_queue_are_all_busy_and_each_message_is_consumed_once(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    mq.admin.create_topic(f"{topic}-one", queues=1)
    notes = tmp_path / "notes"
    push = mq.push_consumer(group, consume_mode="share", threads=1, consume_from=FIRST)
    push.subscribe(f"{topic}-one").on_message(notes_into(notes, 0.1))
    with push.start(instances=8) as running:
        send(mq, f"{topic}-one", 200)
        eventually(lambda: len(lines_of(notes)) >= 200, "all messages")
        eventually(lambda: in_flight(mq, group) == (0, 0), "all acknowledgements")
        assert sum(one.consumed for one in running.status()) == 200
        assert running.queues() == []
        members = CliRunner().invoke(cli, ["group", "members", group])
        assert members.output.count("share") >= 8
    counted = Counter(number for _, number, _ in lines_of(notes))
    assert counted == Counter(range(200))
    assert len({pid for pid, _, _ in lines_of(notes)}) == 8


def test_failed_messages_are_retried_by_the_groups_policy_and_then_dead_letters(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    mq.admin.create_group(GroupConfig(group, retry_max_times=2, retry_intervals_s=(0.2, 0.3)))
    notes = tmp_path / "notes"
    note = notes_into(notes)

    def listen(message: MessageExt) -> None:
        note(message)
        if int(message.body) % 10 == 0:
            raise ValueError(f"no {int(message.body)}")

    send(mq, topic, 30)
    push = mq.push_consumer(group, consume_mode="share", consume_from=FIRST).subscribe(topic).on_message(listen)
    with push.start(instances=2) as running:
        eventually(lambda: mq.admin.group_summary(group).dead_letters == 3, "the dead letters")
        eventually(lambda: in_flight(mq, group) == (0, 0), "all acknowledgements")
        assert sum(one.failures for one in running.status()) == 9
    attempts = Counter((number, attempt) for _, number, attempt in lines_of(notes))
    assert attempts == Counter(
        [(number, 0) for number in range(30)] + [(number, again) for number in (0, 10, 20) for again in (1, 2)]
    )
    reasons = {letter.reason for letter in mq.admin.dead_letters(group).letters()}
    assert reasons == {f"ValueError: no {number}" for number in (0, 10, 20)}


def test_in_order_a_failed_message_is_repeated_before_the_next_of_its_key(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    mq.admin.create_group(GroupConfig(group, retry_intervals_s=(0.2,)))
    notes = tmp_path / "notes"
    note = notes_into(notes)

    def listen(message: MessageExt) -> None:
        if int(message.body) % 7 == 0 and message.reconsume_times < 2:
            raise ValueError("again")
        note(message)

    send(mq, topic, 60, key=lambda number: f"key {number % 6}")
    push = mq.push_consumer(group, consume_mode="share", orderly=True, consume_from=FIRST)
    push.subscribe(topic).on_message(listen)
    with push.start(instances=3):
        eventually(lambda: in_flight(mq, group) == (0, 0) and len(lines_of(notes)) >= 60, "all messages")
    seen = [number for _, number, _ in lines_of(notes)]
    for key in range(6):
        assert [number for number in seen if number % 6 == key] == list(range(key, 60, 6))


def test_a_call_longer_than_the_lease_is_not_repeated_and_a_stop_gives_the_rest_back(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    mq.admin.create_topic(f"{topic}-long", queues=1)
    send(mq, f"{topic}-long", 3)
    notes = tmp_path / "notes"
    push = mq.push_consumer(
        group, consume_mode="share", threads=1, prefetch_messages=3, invisible_s=2.0, consume_from=FIRST
    )
    push.subscribe(f"{topic}-long").on_message(notes_into(notes, 6.0))
    with push.start() as running:
        eventually(lambda: lines_of(notes), "the first message")
        running.stop()
    consumed = {number for _, number, _ in lines_of(notes)}
    assert {attempt for _, _, attempt in lines_of(notes)} == {0}
    assert len(lines_of(notes)) == len(consumed)
    with mq.simple_consumer(group) as consumer:
        consumer.subscribe(f"{topic}-long")
        rest: list[raymq.ReceivedMessage] = []
        while len(rest) < 3 - len(consumed):
            rest += consumer.receive(3, wait_s=5.0)
        assert {message.attempt for message in rest} <= {1}
        consumer.ack(rest)


def test_the_messages_of_a_killed_listener_are_consumed_by_the_others(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    send(mq, topic, 100)
    push = mq.push_consumer(group, consume_mode="share", threads=2, invisible_s=3.0, consume_from=FIRST)
    push.subscribe(topic).on_message(notes_into(notes, 0.1))
    with push.start(instances=3):
        eventually(lambda: len({pid for pid, _, _ in lines_of(notes)}) == 3, "three processes")
        os.kill(lines_of(notes)[0][0], signal.SIGKILL)
        eventually(lambda: in_flight(mq, group) == (0, 0), "all messages")
    assert {number for _, number, _ in lines_of(notes)} == set(range(100))


def test_a_group_is_consumed_in_one_mode(mq: raymq.Client, topic: str, group: str) -> None:
    shared = mq.push_consumer(group, consume_mode="share").subscribe(topic).on_message(lambda message: None)
    queues = mq.push_consumer(group).subscribe(topic).on_message(lambda message: None)
    with shared.start(print_output=False) as running:
        eventually(lambda: mq.admin.consumer_connections(group), "the first heartbeat")
        with pytest.raises(raymq.ClientStateError, match="consume_mode='share'"):
            queues.start(print_output=False)
        [member] = mq.admin.running_info(group)
        assert (member.consume_type, member.queues) == ("PUSH", ())
        with pytest.raises(raymq.InvalidArgumentError, match="no queues of its own"):
            running.pause([])
        running.suspend()
        assert running.status()[0].suspended
        running.resume()
        assert not running.status()[0].suspended
    with queues.start(print_output=False):
        eventually(lambda: mq.admin.consumer_connections(group), "the first heartbeat")
        with pytest.raises(raymq.ClientStateError, match="consume_mode='queue'"):
            shared.start(print_output=False)


def test_the_page_does_what_it_says(mq: raymq.Client) -> None:
    assert_prints_what_it_says("share-mode.md")
