"""Tests of the push consumer on a Ray cluster: concurrent and orderly consumption, retries, broadcasting, suspension,
and listeners that block or crash."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

import raymq
from raymq.common.message import MessageExt, MessageModel
from raymq.common.protocol.group import GroupConfig
from tests.support.clusters.cluster import SERVER_SETTINGS, actor_processes, poll_until
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually

SETTINGS = SERVER_SETTINGS
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


@pytest.fixture
def journal(tmp_path: Path) -> ListenerNotes:
    return ListenerNotes(tmp_path / "journal")


def send(mq: raymq.Client, topic: str, numbers: Any, *, sharding_key: str | None = None) -> list[raymq.SendResult]:
    with mq.producer() as producer:
        futures = [
            producer.send_async(raymq.Message(topic, b"%d" % n), sharding_key=sharding_key or str(n)) for n in numbers
        ]
        return [future.result(60) for future in futures]


def lag(mq: raymq.Client, group: str) -> int:
    """Return the group's lag: the number of messages after its committed offsets. Returns -1 while no broker has the
    group."""
    try:
        return sum(entry.lag for entry in mq.admin.describe_group(group))
    except raymq.GroupNotExistError:
        return -1


def test_a_slow_message_keeps_no_other_waiting_and_holds_only_the_commit(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def listen(message: MessageExt) -> None:
        while message.body == b"0" and not gate.exists():
            time.sleep(0.02)
        journal(message)

    send(mq, topic, range(300), sharding_key="one queue")
    with mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(listen).start() as subscription:
        eventually(lambda: len(journal.lines()) == 299, "all but the slow one")
        assert lag(mq, group) == 300
        [queue] = [entry for entry in subscription.status()[0].queues if entry.buffered]
        eventually(lambda: subscription.status()[0].queues and queue_at(subscription, queue).in_flight == 1, "one left")
        gate.touch()
        eventually(lambda: lag(mq, group) == 0, "the commit")
    assert journal.numbers() == list(range(300))


def queue_at(subscription: Any, queue: Any) -> Any:
    [found] = [entry for entry in subscription.status()[0].queues if entry.queue == queue.queue]
    return found


def test_an_ordered_listener_failure_stops_only_its_queue(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    def listen(message: MessageExt) -> None:
        journal.write(f"{message.queue_id}{message.broker_name} {int(message.body)} {message.reconsume_times}")
        if int(message.body) == 7 and message.reconsume_times < 2:
            raise ValueError("not yet")

    send(mq, topic, range(200))
    push = mq.push_consumer(group, orderly=True, consume_from=FIRST, suspend_current_queue_time_ms=100)
    with push.subscribe(topic).on_message(listen).start():
        eventually(lambda: lag(mq, group) == 0 and len(journal.lines()) == 202, "everything, one message three times")
    per_queue: dict[str, list[int]] = {}
    for line in journal.lines():
        queue, number, _ = line.split()
        per_queue.setdefault(queue, []).append(int(number))
    assert all(numbers == sorted(numbers) for numbers in per_queue.values())
    assert [line.split()[2] for line in journal.lines() if line.split()[1] == "7"] == ["0", "1", "2"]


def test_a_failing_message_walks_the_retry_topic_to_the_dead_letters_with_its_id(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    def listen(message: MessageExt) -> None:
        journal.write(f"{message.topic} {message.message_id} {message.reconsume_times} {message.tags}")
        if message.body == b"bad":
            raise ValueError("never")

    with mq.producer() as producer:
        bad = producer.send(raymq.Message(topic, b"bad", tags="paid"))
        producer.send(raymq.Message(topic, b"good", tags="paid"))
    push = mq.push_consumer(group, consume_from=FIRST, max_reconsume_times=3).subscribe(topic, "paid")
    with push.on_message(listen).start() as subscription:
        eventually(lambda: len([line for line in journal.lines() if bad.message_id in line]) == 4, "four deliveries")
        assert [line for line in journal.lines() if bad.message_id in line] == [
            f"{topic} {bad.message_id} {times} paid" for times in range(4)
        ]
        eventually(lambda: f"%DLQ%{group}" in mq.admin.list_topics(internal=True), "the dead-letter topic")
        assert subscription.status()[0].failures == 4
    with mq.pull_consumer(f"dlq-{group}"[:100], consume_from=FIRST) as consumer:
        consumer.subscribe(f"%DLQ%{group}")
        [dead] = poll_until(consumer, 1)
    assert (dead.message_id, dead.body, dead.reconsume_times, dead.tags) == (bad.message_id, b"bad", 4, "paid")
    assert dead.system_properties["RETRY_TOPIC"] == topic


def test_a_groups_own_intervals_are_the_times_between_its_attempts(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    mq.admin.create_group(group, retry_intervals_s=(0.2, 0.7))
    assert mq.admin.group_config(group) == GroupConfig(group, retry_intervals_s=(0.2, 0.7))

    def listen(message: MessageExt) -> None:
        due_ms = int(message.system_properties.get("TIMER_DELIVER_MS", 0))
        journal.write(f"{message.reconsume_times} {bool(due_ms)} {message.store_timestamp_ms >= due_ms}")
        if message.reconsume_times < 3:
            raise ValueError("not yet")

    send(mq, topic, range(1))
    with mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(listen).start():
        eventually(lambda: len(journal.lines()) >= 4, "the fourth attempt")
    assert journal.lines() == ["0 False True", *(f"{times} True True" for times in (1, 2, 3))]


def test_a_coroutine_listener_is_awaited_and_its_answer_counts(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    async def listen(message: MessageExt) -> Any:
        await asyncio.sleep(0.01)
        journal.write(f"{message.body.decode()} {message.reconsume_times}")
        return {b"0": False, b"1": raymq.ConsumeLater(delay_level=1) if not message.reconsume_times else None}.get(
            message.body
        )

    send(mq, topic, range(20))
    push = mq.push_consumer(group, consume_from=FIRST, max_reconsume_times=1).subscribe(topic).on_message(listen)
    with push.start() as subscription:
        eventually(lambda: mq.admin.group_summary(group).dead_letters == 1, "the dead letter of the wrong answer")
        eventually(lambda: subscription.status()[0].consumed == 20 - 1, "all others, consumed")
    [letter] = mq.admin.dead_letters(group).letters()
    assert letter.message.body == b"0"
    assert letter.reason.startswith("the listener returned False (bool), which is not a valid answer")
    assert letter.message.system_properties["DLQ_ORIGIN_TOPIC"] == topic
    expected = [f"{number} 0" for number in range(20)] + ["0 1", "1 1"]
    assert sorted(journal.lines()) == sorted(expected)


def test_dead_letters_are_brought_back_once_to_their_group_alone(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    mended = journal.path.with_suffix(".mended")

    def listen(message: MessageExt) -> None:
        if not mended.exists():
            raise ValueError("not yet")
        journal.write(f"{message.topic} {message.message_id} {message.reconsume_times} {message.body.decode()}")

    def other(message: MessageExt) -> None:
        journal.write(f"other {message.message_id}")

    with mq.producer() as producer:
        sent = [producer.send(raymq.Message(topic, b"%d" % number)) for number in range(3)]
    push = mq.push_consumer(group, consume_from=FIRST, max_reconsume_times=0).subscribe(topic).on_message(listen)
    bystander = mq.push_consumer(f"other-{group}"[:100], consume_from=FIRST).subscribe(topic).on_message(other)
    with push.start() as _, bystander.start() as _:
        eventually(lambda: mq.admin.group_summary(group).dead_letters == 3, "three dead letters")
        letters = mq.admin.dead_letters(group)
        assert {letter.message.message_id for letter in letters.letters()} == {one.message_id for one in sent}
        assert {letter.topic for letter in letters.letters()} == {topic}
        mended.touch()
        assert [result.error for result in letters.replay(rate=20.0)] == ["", "", ""]
        eventually(lambda: len(own_lines(journal)) == 3, "the three, consumed")
        assert list(letters.replay()) == []
        assert letters.letters() == []
        assert [letter.replayed for letter in letters.letters(replayed=True)] == [True] * 3
        eventually(lambda: len(journal.lines()) >= 6, "what the bystander has")
    assert sorted(own_lines(journal)) == sorted(
        f"{topic} {one.message_id} 0 {number}" for number, one in enumerate(sent)
    )
    # The second consumer group has no dead letters, so the replay sent it nothing: it received each message only once.
    assert len(journal.lines()) - len(own_lines(journal)) == 3


def own_lines(journal: ListenerNotes) -> list[str]:
    return [line for line in journal.lines() if not line.startswith("other")]


def test_a_listener_chooses_the_level_or_the_dead_letters(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    def listen(message: MessageExt) -> raymq.ConsumeLater | None:
        journal.write(f"{message.body.decode()} {message.reconsume_times} {message.system_properties.get('DELAY')}")
        if message.reconsume_times:
            return None
        return raymq.ConsumeLater(delay_level=-1 if message.body == b"dead" else 2)

    with mq.producer() as producer:
        for body in (b"dead", b"later"):
            producer.send(raymq.Message(topic, body))
    with mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(listen).start():
        eventually(lambda: "later 1 2" in journal.lines(), "the second delivery")
        eventually(lambda: f"%DLQ%{group}" in mq.admin.list_topics(internal=True), "the dead-letter topic")
    assert sorted(journal.lines()) == ["dead 0 None", "later 0 None", "later 1 2"]


def test_in_order_a_message_at_its_limit_goes_away_and_its_queue_on(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    def listen(message: MessageExt) -> None:
        journal.write(f"{int(message.body)} {message.reconsume_times}")
        if int(message.body) == 1:
            raise ValueError("never")

    send(mq, topic, range(3), sharding_key="one queue")
    push = mq.push_consumer(
        group, orderly=True, consume_from=FIRST, max_reconsume_times=1, suspend_current_queue_time_ms=10
    )
    with push.subscribe(topic).on_message(listen).start():
        eventually(lambda: "2 0" in journal.lines(), "the message behind it")
        eventually(lambda: f"%DLQ%{group}" in mq.admin.list_topics(internal=True), "the dead-letter topic")
    assert journal.lines() == ["0 0", "1 0", "1 1", "2 0"]


def test_a_call_that_takes_too_long_is_given_up_and_its_message_comes_back(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    def listen(message: MessageExt) -> None:
        journal.write(f"{message.body.decode()} {message.reconsume_times}")
        if message.body == b"0" and not message.reconsume_times:
            time.sleep(3600)

    send(mq, topic, range(5), sharding_key="one queue")
    push = mq.push_consumer(group, consume_from=FIRST, consume_timeout_s=2.0, threads=1).subscribe(topic)
    with push.on_message(listen).start() as subscription:
        eventually(lambda: "0 1" in journal.lines(), "its second delivery")
        eventually(lambda: lag(mq, group) == 0, "the commit")
        [status] = subscription.status()
        assert status.stuck_threads == 1
    assert sorted(journal.lines()) == ["0 0", "0 1", "1 0", "2 0", "3 0", "4 0"]


def test_a_group_that_may_not_broadcast_is_refused_and_shares_its_queues_as_before(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes, tmp_path: Path
) -> None:
    mq.admin.create_group(GroupConfig(group, consume_broadcast_enable=False))
    options: dict[str, Any] = {"message_model": MessageModel.BROADCASTING, "offsets_dir": str(tmp_path)}
    push = mq.push_consumer(group, consume_from=FIRST, **options)
    with pytest.raises(raymq.NoPermissionError, match="consume_broadcast_enable is off"):
        push.subscribe(topic).on_message(journal).start()
    send(mq, topic, range(3))
    shared = mq.push_consumer(group, consume_from=FIRST).subscribe(topic)
    with shared.on_message(lambda message: journal.write(message.body.decode())).start():
        eventually(lambda: sorted(journal.lines()) == ["0", "1", "2"], "what is shared")


def test_every_broadcasting_instance_gets_all_messages_and_continues(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes, tmp_path: Path
) -> None:
    def listen(message: MessageExt) -> None:
        journal.write(f"{os.getpid()} {int(message.body)}")
        if message.body == b"3":
            raise ValueError("logged, and skipped")

    def start() -> Any:
        push = mq.push_consumer(
            group,
            consume_from=FIRST,
            message_model=MessageModel.BROADCASTING,
            offsets_dir=str(tmp_path / "offsets"),
            instance_name="hall",
        )
        return push.subscribe(topic).on_message(listen).start(instances=2)

    def heard() -> dict[str, list[int]]:
        by_process: dict[str, list[int]] = {}
        for line in journal.lines():
            process, number = line.split()
            by_process.setdefault(process, []).append(int(number))
        return {process: sorted(numbers) for process, numbers in by_process.items()}

    send(mq, topic, range(10))
    with start() as subscription:
        eventually(lambda: list(heard().values()) == [list(range(10))] * 2, "everything at both")
        assert [len(status.holding) for status in subscription.status()] == [4, 4]
        eventually(lambda: [status.failures for status in subscription.status()] == [1, 1], "the failures")
    assert sorted(path.name for path in (tmp_path / "offsets" / group).iterdir()) == ["hall-0", "hall-1"]
    before = set(heard())
    send(mq, topic, range(10, 15))
    with start():
        eventually(lambda: len(heard()) == 4, "two new processes")
        eventually(lambda: all(heard()[p] == list(range(10, 15)) for p in heard() if p not in before), "the new ones")
        for process in actor_processes("Pull"):
            process.kill()
        send(mq, topic, range(15, 20))
        eventually(
            lambda: all(set(range(15, 20)) <= set(numbers) for p, numbers in heard().items() if p not in before),
            "what came after the kill",
        )
    before = set(heard())
    mq.admin.delete_topic(topic)
    # the new topic has two queues in each of two broker groups, as the deleted topic had
    mq.admin.create_topic(topic, queues=2)
    # The broadcast consumers have stored offsets of the deleted topic in files. Send enough messages to raise the end
    # offset of each new queue above these stored offsets.
    send(mq, topic, range(100, 200))
    with start():
        eventually(
            lambda: [heard()[p] for p in heard() if p not in before] == [list(range(100, 200))] * 2,
            "everything of the topic that was created anew",
        )
    assert f"%RETRY%{group}" not in {queue.queue.topic for queue in mq.admin.describe_group(group)}
    shutil.rmtree(tmp_path / "offsets")


def test_a_suspended_consumer_is_quiet_until_it_is_resumed_also_over_a_restart(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    push = mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(journal)
    with push.start() as subscription:
        send(mq, topic, range(10))
        eventually(lambda: len(journal.lines()) == 10, "ten")
        eventually(lambda: committed(mq, group) == 10, "their commit")
        eventually(lambda: len([queue for queue in subscription.queues() if queue.topic == topic]) == 4, "all queues")
        subscription.suspend()
        for process in actor_processes("Pull"):
            process.kill()
            process.wait(30)
        eventually(lambda: suspended(subscription), "the restarted instance to know it")
        eventually(lambda: len(subscription.queues()) >= 4, "its queues again")
        send(mq, topic, range(10, 20))
        time.sleep(1.0)
        assert {entry.state for entry in subscription.status()[0].queues} == {"suspended"}
        assert len(journal.lines()) == 10
        subscription.resume()
        eventually(lambda: len(journal.lines()) == 20, "twenty")
        paused = [queue for queue in subscription.queues() if queue.broker_name == "broker-a"]
        subscription.pause(paused)
        results = send(mq, topic, range(20, 40))
        open_numbers = [n for n, result in enumerate(results, 20) if result.queue not in paused]
        eventually(lambda: len(journal.lines()) == 20 + len(open_numbers), "those of broker-b")
        assert journal.numbers()[20:] == open_numbers
        subscription.resume(paused)
        eventually(lambda: len(journal.lines()) == 40, "forty")
    assert journal.numbers() == list(range(40))


def committed(mq: raymq.Client, group: str) -> int:
    return sum(entry.committed or 0 for entry in mq.admin.describe_group(group))


def suspended(subscription: Any) -> bool:
    try:
        [status] = subscription.status()
    except raymq.RaymqError:
        return False
    return bool(status.suspended)


class Meter:
    """A consume hook that writes a line before and after each listener call, and then raises an error."""

    def __init__(self, journal: ListenerNotes) -> None:
        self._journal = journal

    def before(self, context: raymq.ConsumeContext) -> None:
        self._journal.write(f"before {len(context.messages)}")

    def after(self, context: raymq.ConsumeContext) -> None:
        self._journal.write(f"after {context.success} {context.group}")
        raise ValueError("nobody minds")


def test_hooks_travel_with_the_listener(mq: raymq.Client, topic: str, group: str, journal: ListenerNotes) -> None:
    push = mq.push_consumer(group, consume_from=FIRST).subscribe(topic).hook(Meter(journal))
    send(mq, topic, [1])
    with push.on_message(lambda message: None).start():
        eventually(lambda: len(journal.lines()) == 2, "both calls")
    assert journal.lines() == ["before 1", f"after True {group}"]


@pytest.mark.parametrize("orderly", [False, True])
def test_a_listener_process_that_is_killed_loses_nothing_and_disturbs_no_other(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes, tmp_path: Path, orderly: bool
) -> None:
    killed = tmp_path / "killed"

    def listen(message: MessageExt) -> None:
        while int(message.body) >= 200 and not killed.exists():
            # wait for the kill, so that every queue has unfinished messages when the listener process is killed
            time.sleep(0.01)
        journal.write(f"{os.getpid()} {int(message.body)}")
        time.sleep(0.005)

    push = mq.push_consumer(group, orderly=orderly, consume_from=FIRST).subscribe(topic).on_message(listen)
    with push.start(instances=2) as subscription:
        eventually(lambda: all(status.holding for status in subscription.status()), "queues at both")
        send(mq, topic, range(400))
        eventually(lambda: len(journal.lines()) > 50, "some")
        victim = psutil.Process(int(journal.lines()[-1].split()[0]))
        victim.send_signal(signal.SIGKILL)
        killed.touch()
        eventually(lambda: lag(mq, group) == 0, "the rest")
        assert min(status.listener_deaths for status in subscription.status()) == 0
        assert max(status.listener_deaths for status in subscription.status()) >= 1
        assert sum(status.failures for status in subscription.status()) == 0
    heard = [(line.split()[0], int(line.split()[1])) for line in journal.lines()]
    assert {number for _, number in heard} == set(range(400))
    others = Counter(number for process, number in heard if int(process) != victim.pid)
    again = {number for process, number in heard if int(process) == victim.pid} & set(others)
    assert all(count == 1 for number, count in others.items() if number not in again)


def test_a_message_that_ends_its_listeners_process_is_found_and_sent_back(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    def listen(message: MessageExt) -> None:
        if message.body == b"13" and not message.reconsume_times:
            os._exit(1)
        journal(message)

    send(mq, topic, range(40))
    with mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(listen).start() as subscription:
        eventually(lambda: set(journal.numbers()) == set(range(40)), "all forty", 120)
        eventually(lambda: lag(mq, group) == 0, "the commit")
        [status] = subscription.status()
        assert status.listener_deaths >= 4
        assert (status.failures, status.consumed) == (1, 40)


def shout(message: raymq.MessageExt) -> None:
    """Listener that prints to both streams, in its own process."""
    print("got", message.body.decode())
    print("warned about", message.body.decode(), file=sys.stderr)


async def shout_later(message: raymq.MessageExt) -> None:
    """Coroutine listener that prints to both streams, in its own process."""
    await asyncio.sleep(0.01)
    shout(message)


@pytest.mark.parametrize("listener", [shout, shout_later])
def test_what_a_listener_prints_comes_to_the_program_that_started_it(
    mq: raymq.Client, topic: str, group: str, listener: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    push = mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(listener)
    found = ["", ""]

    def read() -> bool:
        new = capsys.readouterr()
        found[0], found[1] = found[0] + new.out, found[1] + new.err
        return all(f"got {number}\n" in found[0] for number in range(5))

    with push.start(instances=2), mq.producer() as producer:
        for number in range(5):
            producer.send(raymq.Message(topic, b"%d" % number))
        eventually(read, "the lines of five messages")
    read()
    lines = [line for line in found[0].splitlines() if line.startswith(f"({group}/")]
    assert sorted(line.partition(") ")[2] for line in lines) == [f"got {number}" for number in range(5)]
    assert all(re.fullmatch(rf"\({re.escape(group)}/[01] pid=\d+\) got \d", line) for line in lines)
    assert all(f") warned about {number}\n" in found[1] for number in range(5))


def test_a_program_may_leave_the_output_of_its_listeners_in_the_log_files(
    mq: raymq.Client, topic: str, group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    push = mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(shout)
    with push.start(print_output=False) as running, mq.producer() as producer:
        producer.send(raymq.Message(topic, b"7"))
        eventually(lambda: sum(one.consumed for one in running.status()) == 1, "the message")
    assert "got 7" not in capsys.readouterr().out
