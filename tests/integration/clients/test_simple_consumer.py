"""Tests of simple consumers in a cluster: receives, acknowledgements, redelivery, dead letters, order, and more
consumers than queues."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections import Counter
from typing import Any

import pytest
from click.testing import CliRunner

import raymq
from raymq.common.protocol.group import GroupConfig
from raymq.tools.cli import cli
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.renewals import renewals_of
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
LONG_S = 60.0


def send(mq: raymq.Client, topic: str, count: int, *, first: int = 0, key: str | None = None, tags: str = "") -> None:
    with mq.producer() as producer:
        for number in range(first, first + count):
            producer.send_async(raymq.Message(topic, b"%d" % number, tags=tags or None), sharding_key=key)


def numbers(messages: list[raymq.ReceivedMessage]) -> list[int]:
    return [int(message.body) for message in messages]


def test_sixteen_consumers_share_two_queues_and_each_message_is_settled_once(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-shared", queues=2)
    send(mq, "pop-shared", 4000)
    got: list[int] = []
    counted: Counter[int] = Counter()
    failures: list[BaseException] = []
    lock = threading.Lock()

    def consume(number: int) -> None:
        try:
            with mq.simple_consumer("pop-shared-g", consume_from=FIRST) as consumer:
                consumer.subscribe("pop-shared")
                while True:
                    messages = consumer.receive(20, LONG_S, wait_s=0.5)
                    if not messages and len(got) >= 4000:
                        return
                    assert {message.attempt for message in messages} <= {1}
                    acked = consumer.ack(messages)
                    with lock:
                        got.extend(numbers(messages))
                        counted[number] += acked
        except BaseException as error:  # The main thread of the test later raises the error of this consumer thread.
            failures.append(error)

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(got) == list(range(4000))
    assert sum(counted.values()) == 4000
    assert sum(count > 0 for count in counted.values()) > 2, "more consumers than queues have work"
    assert mq.admin.group_summary("pop-shared-g").lag == 0


def test_a_message_is_redelivered_with_its_attempt_and_becomes_a_dead_letter(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-again", queues=1)
    mq.admin.create_group(GroupConfig("pop-again-g", retry_max_times=2))
    send(mq, "pop-again", 12)
    with mq.simple_consumer("pop-again-g", consume_from=FIRST) as consumer:
        consumer.subscribe("pop-again")
        first = consumer.receive(12, LONG_S)
        assert numbers(first) == list(range(12))
        assert consumer.ack([message for message in first if int(message.body) % 2]) == 6
        assert consumer.ack(first[1]) == 0, "it has been acknowledged"
        kept = [message for message in first if not int(message.body) % 2]
        for attempt in (2, 3):
            kept = consumer.change_invisible(kept, 0)
            again = consumer.receive(12, LONG_S)
            assert numbers(again) == numbers(kept)
            assert {message.attempt for message in again} == {attempt}
            assert consumer.ack(kept) == 0, "these receipts ended"
            with pytest.raises(raymq.ReceiptExpiredError):
                consumer.change_invisible(kept[0], 1.0)
            kept = again
        assert consumer.ack_handles("pop-again", [kept[0].handle]) == 1
        other = pickle.loads(pickle.dumps(kept[1]))
        assert consumer.ack(other) == 1
        consumer.change_invisible(kept[2:], 0)
        assert consumer.receive(12, LONG_S, wait_s=0) == []
    dead = mq.admin.dead_letters("pop-again-g").letters()
    assert sorted(int(letter.message.body) for letter in dead) == [4, 6, 8, 10]
    sent = {message.body: message.message_id for message in first}
    for letter in dead:
        assert letter.message.reconsume_times == 3
        assert letter.reason == "not acknowledged in 3 attempts"
        assert letter.message.system_properties["DLQ_ORIGIN_TOPIC"] == "pop-again"
        assert letter.message.system_properties["DLQ_ORIGIN_MESSAGE_ID"] == sent[letter.message.body]


def test_expired_messages_are_redelivered_and_wake_waiting_receives(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-late", queues=1)
    send(mq, "pop-late", 3)
    with (
        mq.simple_consumer("pop-late-g", consume_from=FIRST) as slow,
        mq.simple_consumer("pop-late-g", consume_from=FIRST) as other,
    ):
        slow.subscribe("pop-late")
        other.subscribe("pop-late")
        late = slow.receive(3, 0.5)
        assert len(late) == 3
        assert other.receive(3, LONG_S, wait_s=0) == []
        again = other.receive(3, LONG_S, wait_s=20)
        assert [message.attempt for message in again] == [2, 2, 2]
        assert slow.ack(late) == 0
        assert other.ack(again) == 3


def test_order_mode_gives_a_queue_s_next_messages_only_when_all_before_are_settled(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-order", queues=1)
    send(mq, "pop-order", 6)
    with mq.simple_consumer("pop-order-g", consume_from=FIRST, ordered=True) as consumer:
        consumer.subscribe("pop-order")
        first = consumer.receive(3, LONG_S)
        assert numbers(first) == [0, 1, 2]
        assert first[0].handle.split(" ")[3] == "999"
        assert consumer.receive(3, LONG_S, wait_s=0) == []
        consumer.ack([first[0], first[2]])
        assert consumer.receive(3, LONG_S, wait_s=0) == []
        consumer.change_invisible(first[1], 0)
        second = consumer.receive(3, LONG_S)
        assert numbers(second) == [1, 3, 4]
        assert [message.attempt for message in second] == [2, 1, 1]
        assert consumer.ack(second) == 3
        assert numbers(consumer.receive(3, LONG_S)) == [5]


def test_a_topic_of_type_fifo_is_received_in_order_unless_the_group_or_the_consumer_says_otherwise(
    mq: raymq.Client,
) -> None:
    mq.admin.create_topic("pop-fifo", queues=1, message_type="fifo")
    with mq.producer() as producer:
        for number in range(4):
            producer.send(raymq.Message("pop-fifo", b"%d" % number), sharding_key="k")
    mq.admin.create_group("pop-fifo-g")
    with (
        mq.simple_consumer("pop-fifo-g", consume_from=FIRST) as consumer,
        mq.simple_consumer("pop-fifo-g", consume_from=FIRST, ordered=False) as other,
    ):
        consumer.subscribe("pop-fifo")
        other.subscribe("pop-fifo")
        [first] = consumer.receive(1, LONG_S)
        assert (first.body, first.handle.split(" ")[3]) == (b"0", "999")
        assert consumer.receive(1, LONG_S, wait_s=0) == []
        [second] = other.receive(1, LONG_S)
        assert (second.body, second.handle.split(" ")[3]) == (b"1", "0")
        mq.admin.update_group("pop-fifo-g", ordered=False)
        assert mq.admin.group_config("pop-fifo-g").ordered is False
        assert [message.body for message in consumer.receive(2, LONG_S)] == [b"2", b"3"]


def test_tags_choose_and_a_waiting_receive_gets_a_message_when_it_arrives(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-tags", queues=2)
    with mq.simple_consumer("pop-tags-g", consume_from=FIRST) as consumer:
        consumer.subscribe("pop-tags", "paid || refunded")
        got: list[raymq.ReceivedMessage] = []
        waiting = threading.Thread(target=lambda: got.extend(consumer.receive(5, LONG_S, wait_s=30)))
        waiting.start()
        send(mq, "pop-tags", 5, tags="open")
        send(mq, "pop-tags", 1, first=100, tags="paid")
        waiting.join()
        assert numbers(got) == [100]
        [entry] = [entry for entry in mq.admin.describe_group("pop-tags-g") if entry.in_flight]
        assert (entry.in_flight, entry.queue) == (1, got[0].queue)
        consumer.ack(got)
        assert consumer.receive(5, LONG_S, wait_s=0) == []
        assert sum(entry.lag for entry in mq.admin.describe_group("pop-tags-g")) == 0


def test_the_twin_for_asyncio_does_the_same(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-async", queues=1)
    send(mq, "pop-async", 10)

    async def consume() -> None:
        async with mq.async_simple_consumer("pop-async-g", consume_from=FIRST) as consumer:
            await consumer.subscribe("pop-async")
            messages = await consumer.receive(10, LONG_S)
            assert numbers(messages) == list(range(10))
            assert await consumer.ack(messages[:9]) == 9
            renewed = await consumer.change_invisible(messages[9], 0)
            assert renewed.attempt == 1
            [again] = await consumer.receive(10, LONG_S)
            assert again.attempt == 2
            assert await consumer.ack(again) == 1
            receive = asyncio.create_task(consumer.receive(10, LONG_S, wait_s=20))
            await asyncio.sleep(0)
            receive.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receive

    asyncio.run(consume())


def test_another_process_s_receipts_are_settled_by_their_texts(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-texts", queues=2)
    send(mq, "pop-texts", 6)
    with mq.simple_consumer("pop-texts-g", consume_from=FIRST) as consumer:
        consumer.subscribe("pop-texts")
        handles: list[str] = []
        while len(handles) < 6:
            handles += [message.handle for message in consumer.receive(6, LONG_S)]
    # The consumer that received the messages is closed, and this one has no subscription.
    with mq.simple_consumer("pop-texts-g") as settler:
        assert settler.ack_handles("pop-texts", handles[:2]) == 2
        with pytest.raises(raymq.TopicNotExistError):
            settler.ack_handles("pop-texts-no-topic", handles[2:3])
        renewed = settler.change_invisible_handles("pop-texts", handles[1:4], LONG_S)
        assert renewed[0] is None, "it is acknowledged"
        new = [handle for handle in renewed if handle is not None]
        assert len(new) == 2
        assert settler.ack_handles("pop-texts", handles[2:4]) == 0, "these receipts ended"
        assert settler.ack_handles("pop-texts", new) == 2
        assert settler.ack_handles("pop-texts", handles[4:]) == 2
    assert mq.admin.group_summary("pop-texts-g").lag == 0


def test_an_extended_lease_lasts_longer_and_keeps_its_receipt(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-extend", queues=1)
    send(mq, "pop-extend", 3)
    with (
        mq.simple_consumer("pop-extend-g", consume_from=FIRST) as holder,
        mq.simple_consumer("pop-extend-g", consume_from=FIRST) as other,
    ):
        holder.subscribe("pop-extend")
        other.subscribe("pop-extend")
        first, second, third = holder.receive(3, 5.0)
        assert holder.ack(first) == 1
        assert holder.extend_invisible([first, second], LONG_S) == [False, True]
        assert other.extend_invisible_handles("pop-extend", [first.handle, third.handle], 0.0) == [False, True]
        # Without the extension, this receive would get both messages.
        assert other.receive(3, LONG_S, wait_s=6.0) == []
        assert holder.ack([second, third]) == 2
        assert holder.extend_invisible(second, LONG_S) is False


def test_leases_are_renewed_until_they_are_acknowledged_or_the_consumer_closes(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-renew", queues=1)
    send(mq, "pop-renew", 4)
    with mq.simple_consumer("pop-renew-g", consume_from=FIRST) as other:
        other.subscribe("pop-renew")
        with mq.simple_consumer("pop-renew-g", consume_from=FIRST, auto_renew=True) as holder:
            holder.subscribe("pop-renew")
            with pytest.raises(raymq.InvalidArgumentError, match="auto_renew"):
                holder.receive(4, 1.0)
            renewals = renewals_of(holder)
            messages = holder.receive(4, 10.0)
            assert numbers(messages) == [0, 1, 2, 3]
            holder.change_invisible(messages[3], 0.0)
            # The second renewal is sent 10 s after the receive: without renewals, the lease would have ended.
            eventually(lambda: len(renewals) >= 2, "two renewals")
            assert numbers(other.receive(4, LONG_S)) == [3]
            assert other.receive(4, LONG_S, wait_s=0.0) == []
            assert holder.ack(messages[0]) == 1
        again = []
        while len(again) < 2:
            again += other.receive(4, LONG_S, wait_s=20.0)
        assert sorted(numbers(again)) == [1, 2]
        assert {message.attempt for message in again} == {2}


def test_dead_letters_that_are_replayed_are_received_again(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-replay", queues=1)
    mq.admin.create_group(GroupConfig("pop-replay-g", retry_max_times=0))
    send(mq, "pop-replay", 1)
    with mq.simple_consumer("pop-replay-g", consume_from=FIRST) as consumer:
        consumer.subscribe("pop-replay")
        [message] = consumer.receive(1, LONG_S)
        consumer.change_invisible(message, 0)
        assert consumer.receive(1, LONG_S, wait_s=0) == []
        assert len(list(mq.admin.dead_letters("pop-replay-g").replay())) == 1
        [message] = consumer.receive(1, LONG_S)
        assert (message.body, message.attempt) == (b"0", 1)
        assert consumer.ack(message) == 1


def test_the_snippets_of_the_page_print_the_documented_output(mq: raymq.Client) -> None:
    assert_prints_what_it_says("simple-consumer.md")


def test_the_command_receives_keeps_and_acknowledges(mq: raymq.Client) -> None:
    mq.admin.create_topic("pop-command", queues=1)
    send(mq, "pop-command", 3, tags="a")
    words = ["receive", "pop-command-g", "pop-command", "--from", "first", "--json"]

    def run(*more: str) -> dict[str, Any]:
        done = CliRunner().invoke(cli, [*words, *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    [kept] = run("--keep", "--max", "1")["messages"]
    assert kept["body"] == "0"
    assert kept["attempt"] == 1
    assert [message["body"] for message in run("--max", "5")["messages"]] == ["1", "2"]
    assert run("--ack", kept["handle"]) == {"acknowledged": 1}
    assert run("--ack", kept["handle"]) == {"acknowledged": 0}
    assert run("--timeout", "0") == {"messages": []}
