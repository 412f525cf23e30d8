"""Tests of transactions in a whole cluster.

tests/component/transactions has the tests of the store alone, and tests/chaos/transactions the tests of faults.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

import pytest
import ray

import raymq
from raymq.common.errors import IllegalNameError, InvalidArgumentError, MessageIllegalError, TransactionError
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.transactions import LocalTransactionState as State
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.waiting import eventually


def test_the_example_of_the_page_prints_the_documented_output(mq: raymq.Client) -> None:
    assert_prints_what_it_says("transactions.md")


def bodies(mq: raymq.Client, topic: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for entry in mq.admin.describe_topic(topic):
        if entry.max_offset:
            found.update(message.body for message in mq.admin.pull(entry.queue, 0, max_messages=1000).messages)
    return found


def waiting(mq: raymq.Client, topic: str) -> int:
    return sum(row.waiting for found in mq.admin.transactions().values() for row in found.waiting if row.topic == topic)


def unknown(message: raymq.MessageExt) -> State:
    return State.UNKNOW


def test_a_transaction_becomes_visible_if_it_was_committed(mq: raymq.Client, topic: str) -> None:
    seen = []

    def local(transaction: raymq.Transaction, state: State | None) -> State | None:
        seen.append((transaction.message.body, transaction.transaction_id, bodies(mq, topic).total()))
        return state

    with mq.transaction_producer("payments", check=unknown) as producer:
        results = {
            state: producer.send_in_transaction(raymq.Message(topic, b"%d" % (state or 99), keys=["k"]), local, state)
            for state in (State.ROLLBACK_MESSAGE, None, State.UNKNOW, State.COMMIT_MESSAGE)
        }
        assert [row[2] for row in seen] == [0, 0, 0, 0]
        done = results[State.COMMIT_MESSAGE]
        assert done.local_transaction_state is State.COMMIT_MESSAGE
        assert done.queue.topic == topic
        [message] = mq.admin.pull(done.queue, done.queue_offset).messages
        assert (message.body, message.message_id) == (b"8", done.transaction_id)
        assert bodies(mq, topic) == Counter([b"8"])
        assert waiting(mq, topic) == 2
        stores = [mq.storages.get(f"storage-{name}-0") for name in ("broker-a", "broker-b")]
        told = [store.control("status", timeout_s=30) for store in stores]
        rows = [row for status in told for row in status["transactions"]["waiting"] if row["topic"] == topic]
        assert sum(row["waiting"] for row in rows) == 2
        assert [one.message_id for one in mq.admin.query_by_key(topic, "k")] == [done.message_id]

        def failing(transaction: raymq.Transaction, argument: None) -> State:
            raise ValueError("the database is away")

        failed = producer.send_in_transaction(raymq.Message(topic, b"x"), failing)
        assert (failed.local_transaction_state, failed.local_error) == (
            State.UNKNOW,
            "ValueError: the database is away",
        )


def test_a_block_commits_at_its_end_and_rolls_back_on_an_exception(mq: raymq.Client, topic: str) -> None:
    with mq.transaction_producer("payments", check=unknown) as producer:
        with producer.transaction(raymq.Message(topic, b"good"), sharding_key="user-9") as transaction:
            assert bodies(mq, topic).total() == 0
        with pytest.raises(ZeroDivisionError), producer.transaction(raymq.Message(topic, b"bad")):
            raise ZeroDivisionError
        with producer.transaction(raymq.Message(topic, b"dropped")) as dropped:
            dropped.rollback()
        with pytest.raises(TransactionError, match="already rolled back"):
            dropped.commit()
        assert transaction.commit().duplicate
        assert bodies(mq, topic) == Counter([b"good"])
        assert waiting(mq, topic) == 0


def test_an_invalid_transaction_is_refused(mq: raymq.Client, topic: str) -> None:
    with pytest.raises(InvalidArgumentError):
        mq.transaction_producer("payments", check=None)  # type: ignore[arg-type]
    with mq.transaction_producer("payments", check=unknown) as producer:
        for name, kind in ((HALF_TOPIC, IllegalNameError), ("%RETRY%billing", MessageIllegalError)):
            with pytest.raises(kind):
                producer.transaction(raymq.Message(name, b"x"))
        with producer.transaction(raymq.Message(topic, b"late", delay_level=18)):
            pass
        assert bodies(mq, topic) == Counter([b"late"])  # A delay level has no effect on a transaction's message.
    with pytest.raises(raymq.TopicNotExistError):
        mq.admin.describe_topic(HALF_TOPIC)


def test_a_task_that_dies_in_a_transaction_leaves_nothing_visible_and_another_process_is_asked(
    mq: raymq.Client, topic: str
) -> None:
    @ray.remote(max_retries=0)
    def die_in_a_transaction(topic: str) -> None:
        producer = raymq.connect().transaction_producer("dying", check=lambda message: None)
        producer.transaction(raymq.Message(topic, b"of a dead task", keys=["dead"]))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(die_in_a_transaction.remote(topic), timeout=60)
    assert bodies(mq, topic).total() == 0
    assert waiting(mq, topic) == 1
    questions: list[raymq.MessageExt] = []
    answered = threading.Event()

    def check(message: raymq.MessageExt) -> State:
        questions.append(message)
        answered.set()
        return State.COMMIT_MESSAGE

    with mq.transaction_producer("dying", check=check):
        assert answered.wait(60)
        eventually(lambda: waiting(mq, topic) == 0, "the transaction has its outcome")
        # The store records the transaction's outcome before the message is on disk and visible to consumers.
        eventually(lambda: bodies(mq, topic), "the message is visible")
    assert (questions[0].topic, questions[0].body, questions[0].keys) == (topic, b"of a dead task", ("dead",))
    assert bodies(mq, topic) == Counter([b"of a dead task"])
