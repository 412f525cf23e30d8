"""A test program that fills bounded topics over all servers in one process, and prints its observations."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

import raymq
from tests.support.clusters.local_cluster import start_cluster
from tests.support.history.waiting import eventually

LIMIT = 10
TOPIC, GROUP = "bounded", "readers"
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
MESSAGE = raymq.Message(TOPIC, b"x")


def note(name: str, value: object) -> None:
    print(f"{name}: {value}", flush=True)


def is_full(send: Callable[[], object]) -> bool:
    """Return True if a send raises TopicFullError. On a busy machine a send may fail in another way; it is repeated."""
    for _ in range(20):
        try:
            send()
        except raymq.TopicFullError as error:
            return error.group == GROUP
        except raymq.RaymqError:
            continue
        return False
    return False


def queue_end(mq: raymq.Client) -> int:
    return mq.admin.describe_topic(TOPIC)[0].max_offset


def backlog(mq: raymq.Client) -> int:
    [one] = [one for one in mq.admin.describe_group(GROUP) if one.queue.topic == TOPIC]
    return one.max_offset - (one.committed or 0)


def consume(mq: raymq.Client, count: int) -> int:
    """Consume `count` messages in small parts. Returns the largest backlog that the group had between two parts."""
    worst = got = 0
    with mq.pull_consumer(GROUP, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(TOPIC)

        def step() -> bool:
            nonlocal got, worst
            got += len(consumer.poll(max_messages=4, timeout_s=0.2))
            consumer.commit()
            worst = max(worst, backlog(mq))
            return got >= count

        eventually(step, f"{count} messages are consumed")
    return worst


def run(mq: raymq.Client) -> None:
    mq.admin.create_group(GROUP)
    mq.admin.create_topic(TOPIC, queues=1, max_backlog=LIMIT, backlog_groups=[GROUP])
    mq.admin.create_topic("other", queues=1)
    with mq.producer("impatient", send_timeout_s=2.0) as producer:
        eventually(lambda: is_full(lambda: producer.send(MESSAGE)), "the topic is full")
        before = queue_end(mq)
        note("stored when the topic is full", before)
        note("send_async", is_full(lambda: producer.send_async(MESSAGE).result()))
        note("send_batch", is_full(lambda: producer.send_batch([MESSAGE] * 3)))
        note("send_table", is_full(lambda: producer.send_table(TOPIC, pa.table({"body": [b"x"] * 3}))))
        note("delayed", is_full(lambda: producer.send(raymq.Message(TOPIC, b"x", delay_level=1))))
        with mq.transaction_producer("half", check=lambda message: None, send_timeout_s=2.0) as half:
            note("transaction", is_full(lambda: half.send_in_transaction(MESSAGE, lambda transaction, argument: None)))
        note("stored while full", queue_end(mq) - before)
    with mq.producer("patient", send_timeout_s=60.0) as producer:
        waiting = producer.send_async(MESSAGE)
        producer.send(raymq.Message("other", b"x"))
        note("another topic does not wait", not waiting.done())
        futures = [waiting] + [producer.send_async(raymq.Message(TOPIC, b"%d" % number)) for number in range(60)]
        note("the limit holds", consume(mq, before + 61) <= max(LIMIT, before))
        note("all are stored", len([future.result(60.0) for future in futures]))
    mq.admin.update_topic(TOPIC, backlog_policy="drop")
    with mq.producer("dropping") as producer:
        producer.send_batch([MESSAGE] * 100)
        eventually(lambda: backlog(mq) <= LIMIT, "the group has skipped messages")
        note("messages after the skip", queue_end(mq) - before - 61)
        mq.admin.update_topic(TOPIC, max_backlog=0)
        note("the bound is gone", mq.admin.topic_attributes([TOPIC])[TOPIC].bound is None)
        eventually(lambda: producer.send_batch([MESSAGE] * 50), "sends need no room")


if __name__ == "__main__":
    # Register `os._exit` first, so that it runs last. It skips the shutdown of the servers in this process.
    atexit.register(os._exit, 0)
    start_cluster(Path(sys.argv[1]))
    with raymq.connect() as client:
        run(client)
        note("end", True)
