"""Tests of a raymq cluster as its users use it: producing, consuming by poll and by listener, administration, and plain
actor handles."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
import ray

import raymq
from raymq.common.message import MessageExt, MessageQueue, PullStatus, SendStatus
from raymq.records.format.hashing import java_hash
from raymq.records.format.layout import SYS_FLAG_COMPRESSED, SYS_FLAG_COMPRESSION_TYPE_MASK
from tests.support.clusters.cluster import command_of, descendants, poll_until
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def read_all(mq: raymq.Client, topic: str) -> dict[MessageQueue, list[MessageExt]]:
    """Return every message of a topic, by queue."""
    read: dict[MessageQueue, list[MessageExt]] = {}
    for description in mq.admin.describe_topic(topic):
        messages: list[MessageExt] = []
        while len(messages) < description.messages:
            result = mq.admin.pull(description.queue, description.min_offset + len(messages), max_messages=1000)
            assert result.status is PullStatus.FOUND
            messages.extend(result.messages)
        read[description.queue] = messages
    return read


def bodies(messages: Iterable[MessageExt]) -> list[bytes]:
    return [message.body for message in messages]


# Tests of the embedded cluster


def test_an_embedded_raymq_runs_no_process_of_ray_that_it_does_not_use(mq: raymq.Client) -> None:
    commands = [" ".join(arguments) for process in descendants() if (arguments := command_of(process))]
    assert any("raylet" in command for command in commands), commands
    unused = [command for command in commands if re.search(r"monitor\.py", command)]
    assert unused == []


# Tests of producing


def test_a_message_is_read_back_where_its_result_says_with_everything_it_was_sent_with(
    mq: raymq.Client, topic: str
) -> None:
    message = raymq.Message(
        topic, "été".encode(), tags="paid", keys=("o-17", "c-3"), properties={"shop": "Zürich"}, flag=-7
    )
    before_ms = time.time_ns() // 1_000_000
    with mq.producer("shop") as producer:
        result = producer.send(message)
    pulled = mq.admin.pull(result.queue, result.queue_offset)
    [read] = pulled.messages
    assert result.status is SendStatus.SEND_OK
    assert (read.topic, read.body, read.tags, read.keys, read.flag) == (
        topic,
        "été".encode(),
        "paid",
        ("o-17", "c-3"),
        -7,
    )
    assert read.properties == {"shop": "Zürich"}
    assert (read.queue, read.queue_offset) == (result.queue, result.queue_offset)
    assert (read.message_id, read.offset_message_id) == (result.message_id, result.offset_message_id)
    assert before_ms <= read.born_timestamp_ms <= read.store_timestamp_ms
    assert read.reconsume_times == 0
    assert pulled.next_offset == pulled.max_offset == result.queue_offset + 1


def test_many_messages_sent_async_are_acknowledged_once_each_and_keep_their_order_in_each_queue(
    mq: raymq.Client, topic: str
) -> None:
    with mq.producer() as producer:
        futures = [producer.send_async(raymq.Message(topic, b"%d" % number)) for number in range(5000)]
        results = [future.result(30) for future in futures]
    by_queue: dict[MessageQueue, list[bytes]] = defaultdict(list)
    for number, result in enumerate(results):
        assert result.queue_offset == len(by_queue[result.queue])
        by_queue[result.queue].append(b"%d" % number)
    assert {queue: bodies(messages) for queue, messages in read_all(mq, topic).items() if messages} == by_queue
    assert len({result.message_id for result in results}) == 5000
    assert len({result.offset_message_id for result in results}) == 5000


def test_a_batch_goes_into_one_queue_one_after_another(mq: raymq.Client, topic: str) -> None:
    with mq.producer() as producer:
        results = producer.send_batch(raymq.Message(topic, b"%d" % number) for number in range(100))
    assert len({result.queue for result in results}) == 1
    first = results[0].queue_offset
    assert [result.queue_offset for result in results] == list(range(first, first + 100))
    assert bodies(read_all(mq, topic)[results[0].queue]) == [b"%d" % number for number in range(100)]


def test_a_oneway_message_is_stored_by_the_time_flush_returns(mq: raymq.Client, topic: str) -> None:
    with mq.producer() as producer:
        producer.send_oneway(raymq.Message(topic, b"no answer needed"))
        producer.flush()
        assert [bodies(messages) for messages in read_all(mq, topic).values() if messages] == [[b"no answer needed"]]


def test_close_waits_for_everything_handed_over(mq: raymq.Client, topic: str) -> None:
    producer = mq.producer()
    futures = [producer.send_async(raymq.Message(topic, b"x" * 1000)) for _ in range(3000)]
    producer.close()
    assert all(future.done() and future.exception() is None for future in futures)
    producer.close()


def test_a_future_of_a_send_cannot_be_cancelled_and_still_ends(mq: raymq.Client, topic: str) -> None:
    with mq.producer() as producer:
        futures = [producer.send_async(raymq.Message(topic, b"%d" % number)) for number in range(50)]
        assert not any(future.cancel() for future in futures)
        assert all(future.result(30).status is SendStatus.SEND_OK for future in futures)


def test_one_sharding_key_is_one_queue_in_order_and_the_queue_is_rocketmqs(mq: raymq.Client, topic: str) -> None:
    # The Java hash of the key "polygenelubricants" is the smallest negative integer, whose absolute value overflows.
    keys = [f"user-{number}" for number in range(20)] + ["polygenelubricants"]
    queues = [description.queue for description in mq.admin.describe_topic(topic)]
    with mq.producer() as producer:
        futures = [
            (key, producer.send_async(raymq.Message(topic, f"{key}:{turn}".encode()), sharding_key=key))
            for turn in range(30)
            for key in keys
        ]
        for key, future in futures:
            assert future.result(30).queue == queues[abs(java_hash(key)) % len(queues)]
    turns: dict[str, list[int]] = defaultdict(list)
    for messages in read_all(mq, topic).values():
        for body in bodies(messages):
            key, _, turn = body.decode().partition(":")
            turns[key].append(int(turn))
    assert turns == {key: list(range(30)) for key in keys}


@pytest.mark.parametrize("kind", list(raymq.CompressionType))
def test_bodies_from_4_kib_on_are_compressed_on_the_way_and_read_back_as_they_were(
    mq: raymq.Client, topic: str, kind: raymq.CompressionType
) -> None:
    sent = [b"-" * 4095, b"=" * 4096, os.urandom(5000), json.dumps(list(range(20_000))).encode()]
    with mq.producer(compression=raymq.Compression(kind)) as producer:
        results = producer.send_batch([raymq.Message(topic, body) for body in sent])
    read = read_all(mq, topic)[results[0].queue]
    assert bodies(read) == sent
    assert not read[0].sys_flag & SYS_FLAG_COMPRESSED
    for message in (read[1], read[3]):
        assert bool(message.sys_flag & SYS_FLAG_COMPRESSED) == (kind is not raymq.CompressionType.NONE)
        assert message.sys_flag & SYS_FLAG_COMPRESSION_TYPE_MASK == kind
    places = [int(message.offset_message_id[16:], 16) for message in read]
    assert (places[2] - places[1] < 1000) == (kind is not raymq.CompressionType.NONE)


def test_the_largest_message_is_4_mib_and_comes_back_whole(mq: raymq.Client, topic: str) -> None:
    body = os.urandom(4 << 20)
    with mq.producer() as producer:
        result = producer.send(raymq.Message(topic, body))
    with mq.pull_consumer("g-largest", consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        [message] = poll_until(consumer, 1)
    assert message.body == body
    assert message.message_id == result.message_id


# Tests of consuming by poll


def send_numbers(mq: raymq.Client, topic: str, numbers: Iterable[int], *, sharding: bool = False) -> None:
    """Send one message for each number, with the number as body. With `sharding`, the number is also the message's
    sharding key, which spreads the messages over all queues."""
    with mq.producer() as producer:
        for number in numbers:
            producer.send_async(raymq.Message(topic, b"%d" % number), sharding_key=str(number) if sharding else None)


def numbers_of(messages: Iterable[MessageExt]) -> list[int]:
    return sorted(int(message.body) for message in messages)


def test_poll_returns_at_most_max_messages_in_queue_order(mq: raymq.Client, topic: str, group: str) -> None:
    send_numbers(mq, topic, range(400), sharding=True)
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        taken: list[MessageExt] = []
        while len(taken) < 400:
            some = consumer.poll(max_messages=7)
            assert len(some) <= 7
            taken.extend(some)
        assert consumer.poll(timeout_s=0) == []
    assert numbers_of(taken) == list(range(400))
    for queue in {message.queue for message in taken}:
        offsets = [message.queue_offset for message in taken if message.queue == queue]
        assert offsets == list(range(len(offsets)))


def test_a_tag_subscription_gets_exactly_its_tags_even_where_two_tags_have_one_code(
    mq: raymq.Client, topic: str, group: str
) -> None:
    assert java_hash("AaAa") == java_hash("BBBB")
    with mq.producer() as producer:
        for number in range(300):
            tag = ("AaAa", "BBBB", "C", None)[number % 4]
            producer.send_async(raymq.Message(topic, b"%d" % number, tags=tag))
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic, "AaAa || C")
        got = poll_until(consumer, 150)

        def committed() -> int:
            assert consumer.poll(timeout_s=0.2) == []
            consumer.commit()
            return sum(consumer.committed(queue) or 0 for queue in consumer.assignment())

        # Poll until all offsets are committed. If the last messages of a queue do not pass the filter, the consumer's
        # offset moves over them only when a long poll ends without a result.
        eventually(lambda: committed() == 300, "everything committed")
    assert Counter(message.tags for message in got) == {"AaAa": 75, "C": 75}
    assert numbers_of(got) == [number for number in range(300) if number % 4 in (0, 2)]
    # Pull from all queues, because a burst of sends may put its first messages into a single queue.
    queues = [row.queue for row in mq.admin.describe_topic(topic)]
    pulled = [
        [message for queue in queues for message in mq.admin.pull(queue, 0, max_messages=1000, tags=tag).messages]
        for tag in ("AaAa", "BBBB")
    ]
    assert [{message.tags for message in messages} for messages in pulled] == [{"AaAa"}, {"BBBB"}]


def test_a_group_continues_at_its_committed_offsets(mq: raymq.Client, topic: str, group: str) -> None:
    send_numbers(mq, topic, range(100), sharding=True)
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        done = poll_until(consumer, 60)
        consumer.commit()
        lost = poll_until(consumer, 40)
        held = consumer.assignment()
        assert sum(consumer.position(queue) for queue in held) == 100
        assert sum(consumer.committed(queue) or 0 for queue in held) == 60
    with mq.pull_consumer(group, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        again = poll_until(consumer, 40)
        assert consumer.poll(timeout_s=0.2) == []
    assert numbers_of(again) == numbers_of(lost)
    assert numbers_of(done + again) == list(range(100))


def test_auto_commit_commits_messages_of_earlier_polls(mq: raymq.Client, topic: str, group: str) -> None:
    """With auto-commit, each poll marks the messages of the polls before it as consumed. Closing the consumer also
    commits the messages of the last poll, unless the program's `with` block ends with an exception."""
    send_numbers(mq, topic, range(30))
    consumer = mq.pull_consumer(group, consume_from=FIRST)
    consumer.subscribe(topic)
    poll_until(consumer, 20)
    # Call `poll` exactly once more, however many messages it returns.
    assert consumer.poll(max_messages=10, timeout_s=60.0)
    with pytest.raises(ZeroDivisionError), consumer:
        raise ZeroDivisionError
    left = sum(entry.lag for entry in mq.admin.describe_group(group))
    assert left == 10
    with mq.pull_consumer(group) as consumer:
        consumer.subscribe(topic)
        poll_until(consumer, left)
    assert sum(entry.lag for entry in mq.admin.describe_group(group)) == 0


def test_seek_moves_in_both_directions_and_commits_follow(mq: raymq.Client, topic: str, group: str) -> None:
    with mq.producer() as producer:
        [queue] = {result.queue for result in producer.send_batch([raymq.Message(topic, b"%d" % n) for n in range(50)])}
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        assert numbers_of(poll_until(consumer, 50)) == list(range(50))
        consumer.seek(queue, 10)
        assert consumer.position(queue) == 10
        assert numbers_of(poll_until(consumer, 40)) == list(range(10, 50))
        consumer.seek(queue, 45)
        consumer.commit()
        assert consumer.committed(queue) == 45
        consumer.seek(queue, 50)
        assert consumer.poll(timeout_s=0.2) == []
        send_numbers(mq, topic, [50])
        assert numbers_of(poll_until(consumer, 1)) == [50]


def test_a_new_group_starts_at_the_first_message_or_at_a_time(mq: raymq.Client, topic: str, group: str) -> None:
    with mq.producer() as producer:
        sent = [producer.send(raymq.Message(topic, b"%d" % n), sharding_key="one queue") for n in range(3)]
        stored_ms = mq.admin.pull(sent[2].queue, sent[2].queue_offset).messages[0].store_timestamp_ms
        eventually(lambda: time.time_ns() // 1_000_000 > stored_ms, "the next millisecond")
        since_ms = time.time_ns() // 1_000_000
        for number in (3, 4):
            producer.send(raymq.Message(topic, b"%d" % number), sharding_key="one queue")
    with mq.pull_consumer(group + "-1", consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        assert numbers_of(poll_until(consumer, 5)) == [0, 1, 2, 3, 4]
    timestamp = raymq.ConsumeFromWhere.CONSUME_FROM_TIMESTAMP
    with mq.pull_consumer(group + "-2", consume_from=timestamp, consume_timestamp_ms=since_ms) as consumer:
        consumer.subscribe(topic)
        assert numbers_of(poll_until(consumer, 2)) == [3, 4]
        assert consumer.poll(timeout_s=0.2) == []


def test_a_group_that_starts_at_the_end_skips_the_messages_of_a_young_topic(
    mq: raymq.Client, topic: str, group: str
) -> None:
    end = raymq.ConsumeFromWhere.CONSUME_FROM_END
    send_numbers(mq, topic, range(5))
    with (
        mq.pull_consumer(f"{group}-pull", consume_from=end) as pulling,
        mq.simple_consumer(f"{group}-simple", consume_from=end) as receiving,
    ):
        pulling.subscribe(topic)
        receiving.subscribe(topic)
        queues = pulling.fetch_message_queues(topic)

        def started() -> bool:
            assert pulling.poll(timeout_s=0.1) == []
            assert receiving.receive(10, invisible_s=60, wait_s=0.1) == []
            return all(pulling.committed(queue) is not None for queue in queues)

        eventually(started, "the start offsets of all queues")
        send_numbers(mq, topic, [5, 6])
        assert sorted(numbers_of(poll_until(pulling, 2))) == [5, 6]
        received: list[int] = []

        def receive() -> bool:
            received.extend(int(one.body) for one in receiving.receive(10, invisible_s=60, wait_s=0.1))
            return len(received) >= 2

        eventually(receive, "the messages that were sent after the start")
        assert sorted(received) == [5, 6]


def test_two_consumers_share_the_queues_and_hand_over_without_a_message_delivered_twice(
    mq: raymq.Client, topic: str, group: str
) -> None:
    """The first consumer of a group has all queues. A second consumer joins and gets half of the queues. After the
    first consumer leaves, the second has all queues. No message is delivered twice."""
    seen: list[MessageExt] = []

    def take(consumer: raymq.PullConsumer) -> int:
        some = consumer.poll(timeout_s=0.1)
        consumer.commit()
        seen.extend(some)
        return len(seen)

    send_numbers(mq, topic, range(100), sharding=True)
    first = mq.pull_consumer(group, consume_from=FIRST, auto_commit=False)
    first.subscribe(topic)
    eventually(lambda: take(first) >= 0 and len(first.assignment()) == 4, "all queues at the first")
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as second:
        second.subscribe(topic)

        def shared() -> bool:
            take(first)
            take(second)
            # Read the second consumer's assignment before the first consumer's. A queue moves from the first consumer
            # to the second, and during the move neither has it, so no queue can appear in both assignments.
            taken, left = second.assignment(), first.assignment()
            assert not set(taken) & set(left)
            return [len(taken), len(left)] == [2, 2]

        eventually(shared, "two queues at each")
        send_numbers(mq, topic, range(100, 200), sharding=True)
        eventually(lambda: max(take(first), take(second)) >= 200, "all messages")
        first.close()
        send_numbers(mq, topic, range(200, 300), sharding=True)
        eventually(lambda: take(second) >= 300, "all messages at the one that is left")
        assert len(second.assignment()) == 4
    assert numbers_of(seen) == list(range(300))


def test_a_consumer_is_iterated_until_it_is_closed(mq: raymq.Client, topic: str, group: str) -> None:
    send_numbers(mq, topic, range(20))
    consumer = mq.pull_consumer(group, consume_from=FIRST)
    consumer.subscribe(topic)
    seen = []
    for message in consumer:
        seen.append(message)
        if len(seen) == 20:
            consumer.close()
    assert numbers_of(seen) == list(range(20))


def test_a_deleted_topic_does_not_keep_a_consumer_from_its_other_topic(
    mq: raymq.Client, topic: str, group: str
) -> None:
    mq.admin.create_topic("to-be-deleted", queues=2)
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe("to-be-deleted")
        consumer.subscribe(topic)
        eventually(lambda: consumer.poll(timeout_s=0.1) or len(consumer.assignment()) == 6, "all queues")
        mq.admin.delete_topic("to-be-deleted")
        send_numbers(mq, topic, range(50), sharding=True)
        assert numbers_of(poll_until(consumer, 50)) == list(range(50))
        consumer.commit()
    assert sum(entry.committed or 0 for entry in mq.admin.describe_group(group)) == 50


# Tests of consuming by listener


@pytest.fixture
def journal(tmp_path: Path) -> ListenerNotes:
    return ListenerNotes(tmp_path / "journal")


def test_stop_commits_messages_that_the_listener_consumed(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    def listen(message: MessageExt) -> None:
        assert message.tags == "wanted"
        journal(message)

    push = mq.push_consumer(group, consume_from=FIRST).subscribe(topic, "wanted").on_message(listen)
    with mq.producer() as producer, push.start() as subscription:
        for number in range(200):
            tag = "wanted" if number % 2 else "not wanted"
            producer.send_async(raymq.Message(topic, b"%d" % number, tags=tag), sharding_key=str(number))
        eventually(lambda: len(journal.distinct_numbers()) >= 100, "100 messages at the listener")
        [status] = subscription.status()
        assert (status.failures, status.last_error) == (0, "")
        assert sum(queue.topic == topic for queue in subscription.queues()) == 4
        subscription.raise_listener_error()

        def passed() -> int:
            return sum(q.commit_offset for q in subscription.status()[0].queues if q.queue.topic == topic)

        # Wait until the offsets of all queues are at the end. If the last messages of a queue do not pass the filter,
        # its offset moves over them only when a long poll ends without a result.
        eventually(lambda: passed() == 200, "the end of every queue")
    subscription.stop()
    assert journal.distinct_numbers() == list(range(1, 200, 2))
    assert sum(entry.committed or 0 for entry in mq.admin.describe_group(group)) == 200
    assert sum(entry.lag for entry in mq.admin.describe_group(group)) == 0
    names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    assert f"pull-{group}-0" not in names


class SumPerQueue:
    """A message listener with state. Its first call creates objects that cannot be pickled."""

    def __init__(self, journal: ListenerNotes) -> None:
        self._journal = journal
        self._totals: dict[str, int] = {}

    def __call__(self, messages: list[MessageExt]) -> raymq.ConsumeStatus:
        assert len({message.queue for message in messages}) == 1
        queue = str(messages[0].queue)
        self._totals[queue] = self._totals.get(queue, 0) + sum(int(message.body) for message in messages)
        self._journal.write(f"{len(messages)} {queue} {self._totals[queue]}")
        return raymq.ConsumeStatus.CONSUME_SUCCESS


def test_an_object_listens_to_lists_of_one_queue_and_keeps_its_state(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    send_numbers(mq, topic, range(500), sharding=True)
    push = mq.push_consumer(group, orderly=True, consume_from=FIRST).subscribe(topic)
    with push.on_messages(SumPerQueue(journal), batch_max=50).start():
        eventually(lambda: sum(int(line.split()[0]) for line in journal.lines()) >= 500, "500 messages")
    totals: dict[str, int] = {}
    for line in journal.lines():
        count, queue, total = line.split()
        assert int(count) <= 50
        totals[queue] = int(total)
    assert sum(totals.values()) == sum(range(500))


def test_messages_answered_with_reconsume_later_are_redelivered(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes, tmp_path: Path
) -> None:
    looked = tmp_path / "looked"

    def listen(message: MessageExt) -> raymq.ConsumeStatus:
        journal(message)
        if journal.lines().count("1") < 2:
            return raymq.ConsumeStatus.RECONSUME_LATER
        while not looked.exists():
            time.sleep(0.01)
        return raymq.ConsumeStatus.CONSUME_SUCCESS

    with mq.producer() as producer:
        producer.send(raymq.Message(topic, b"1"))
    push = mq.push_consumer(group, orderly=True, consume_from=FIRST).subscribe(topic).on_message(listen)
    with push.start() as subscription:
        eventually(lambda: subscription.status()[0].failures == 1, "a failure")
        assert sum(entry.committed or 0 for entry in mq.admin.describe_group(group)) == 0
        with pytest.raises(raymq.ListenerError, match="RECONSUME_LATER"):
            subscription.raise_listener_error()
        looked.touch()
        eventually(lambda: subscription.status()[0].consumed == 1, "the second delivery")
    assert journal.lines() == ["1", "1"]
    assert sum(entry.committed or 0 for entry in mq.admin.describe_group(group)) == 1


def test_several_instances_share_the_queues_without_duplicates(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    push = mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(journal)
    with push.start(instances=3) as subscription:

        def holding() -> list[int]:
            return sorted(
                sum(queue.queue.topic == topic for queue in status.queues) for status in subscription.status()
            )

        eventually(lambda: holding() == [1, 1, 2], "four queues shared by three")
        send_numbers(mq, topic, range(300), sharding=True)
        eventually(lambda: len(journal.distinct_numbers()) >= 300, "300 messages")
        statuses = subscription.status()
        assert [status.instance for status in statuses] == [f"pull-{group}-{index}" for index in range(3)]
        heard = len(journal.lines())
        eventually(lambda: sum(status.consumed for status in subscription.status()) >= heard, "all of them counted")
    assert journal.distinct_numbers() == list(range(300))


def test_a_push_and_a_pull_consumer_of_one_group_share_its_queues(
    mq: raymq.Client, topic: str, group: str, journal: ListenerNotes
) -> None:
    push = mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(journal)
    seen: list[MessageExt] = []
    with mq.pull_consumer(group, consume_from=FIRST) as consumer, push.start() as subscription:
        consumer.subscribe(topic)

        def heard() -> int:
            seen.extend(consumer.poll(timeout_s=0.1))
            return len(seen) + len(journal.lines())

        def shared() -> bool:
            heard()
            return [len(consumer.assignment()), sum(q.topic == topic for q in subscription.queues())] == [2, 2]

        eventually(shared, "two queues at each")
        send_numbers(mq, topic, range(100), sharding=True)
        eventually(lambda: heard() >= 100, "all")
    assert sorted(numbers_of(seen) + journal.numbers()) == list(range(100))
    assert seen
    assert journal.lines()


# Tests of administration


def test_creating_a_topic_again_as_it_is_changes_nothing_and_otherwise_is_refused(mq: raymq.Client) -> None:
    mq.admin.create_topic("admin-5", queues=5)
    mq.admin.create_topic("admin-5", queues=5)
    with pytest.raises(raymq.TopicExistsError, match="delete the topic first"):
        mq.admin.create_topic("admin-5", queues=8)
    queues = [description.queue for description in mq.admin.describe_topic("admin-5")]
    assert queues == [MessageQueue("admin-5", "broker-a", i) for i in range(3)] + [
        MessageQueue("admin-5", "broker-b", i) for i in range(2)
    ]
    assert "admin-5" in mq.admin.list_topics()
    assert mq.admin.list_topics() == sorted(mq.admin.list_topics())


def test_a_deleted_topic_is_empty_when_it_is_recreated(mq: raymq.Client, group: str) -> None:
    for attempt in range(2):
        mq.admin.create_topic("admin-short-lived", queues=2)
        assert [entry.max_offset for entry in mq.admin.describe_topic("admin-short-lived")] == [0, 0]
        send_numbers(mq, "admin-short-lived", range(10 + attempt))
        with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
            consumer.subscribe("admin-short-lived")
            assert numbers_of(poll_until(consumer, 10 + attempt)) == list(range(10 + attempt))
            consumer.commit()
        mq.admin.delete_topic("admin-short-lived")
        assert "admin-short-lived" not in mq.admin.list_topics()
        assert mq.admin.describe_group(group) == []
        with pytest.raises(raymq.TopicNotExistError), mq.producer() as producer:
            producer.send(raymq.Message("admin-short-lived", b"too late"))
        with pytest.raises(raymq.TopicNotExistError):
            mq.admin.delete_topic("admin-short-lived")


def test_groups_are_listed_described_with_their_lag_and_forgotten(mq: raymq.Client, topic: str, group: str) -> None:
    send_numbers(mq, topic, range(40), sharding=True)
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        poll_until(consumer, 40)
        consumer.commit()
    send_numbers(mq, topic, range(40, 50), sharding=True)
    assert group in mq.admin.list_groups()
    progress = mq.admin.describe_group(group)
    assert [entry.queue for entry in progress] == [entry.queue for entry in mq.admin.describe_topic(topic)]
    assert sum(entry.committed or 0 for entry in progress) == 40
    assert sum(entry.lag for entry in progress) == 10
    mq.admin.delete_group(group)
    assert group not in mq.admin.list_groups()
    for refused in (mq.admin.describe_group, mq.admin.delete_group):
        with pytest.raises(raymq.GroupNotExistError):
            refused(group)


# Tests of plain actor handles


def test_plain_handles_of_a_broker_send_to_and_pull_from_its_own_queues(mq: raymq.Client, topic: str) -> None:
    broker = ray.get_actor("broker-a", namespace="raymq")
    sent = ray.get(
        [
            broker.send.remote(topic, b"%d" % n, tags="paid", keys=["o-17"], properties={"n": "1"}, sharding_key="k")
            for n in range(5)
        ]
    )
    [queue_id] = {result["queue_id"] for result in sent}
    assert {result["broker_name"] for result in sent} == {"broker-a"}
    assert sorted(result["queue_offset"] for result in sent) == list(range(5))
    pulled = ray.get(broker.pull.remote("billing", topic, queue_id=queue_id, offset=0, max_messages=3))
    assert pulled["status"] == "FOUND"
    assert [message["queue_offset"] for message in pulled["messages"]] == [0, 1, 2]
    assert (pulled["next_offset"], pulled["max_offset"]) == (3, 5)
    assert [(m["tags"], m["keys"], m["properties"]) for m in pulled["messages"]] == [("paid", ["o-17"], {"n": "1"})] * 3
    nothing = ray.get(broker.pull.remote("billing", topic, queue_id=queue_id, offset=5))
    assert (nothing["status"], nothing["messages"]) == ("NO_NEW_MESSAGE", [])
    waiting = broker.pull.remote("billing", topic, queue_id=queue_id, offset=5, wait_s=15.0)
    ray.get(broker.send.remote(topic, b"late", sharding_key="k"))
    assert [message["body"] for message in ray.get(waiting)["messages"]] == [b"late"]


def test_closing_one_of_two_clients_leaves_the_other_and_the_servers_alone(mq: raymq.Client, topic: str) -> None:
    with raymq.connect() as second:
        producer = second.producer()
        producer.send(raymq.Message(topic, b"1"))
    with pytest.raises(raymq.ClientStateError, match="closed"):
        producer.send(raymq.Message(topic, b"2"))
    with pytest.raises(raymq.ClientStateError, match="closed"):
        second.producer()
    with mq.producer() as other:
        other.send(raymq.Message(topic, b"3"))
