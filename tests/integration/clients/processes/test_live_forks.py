"""Test of forks: a forked child process that uses an object of a live connection gets one clear error at once. The
parent process loses nothing."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import raymq
from raymq.common.message import ConsumeFromWhere
from tests.support.clients.forks import in_child, outcome

AT_ONCE_S = 2.0

_producer: raymq.Producer | None = None


def _send(number: int) -> tuple[str, float]:
    begun_s = time.monotonic()
    assert _producer is not None
    return outcome(lambda: _producer.send(raymq.Message("unused", b"child"), timeout_s=30)), time.monotonic() - begun_s


def test_a_forked_child_is_refused_and_its_parent_continues(mq: raymq.Client, topic: str) -> None:
    global _producer
    group = f"{topic}-group"
    first = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    producer, pull = mq.producer(), mq.pull_consumer(group, consume_from=first)
    simple = mq.simple_consumer(f"{group}-simple", consume_from=first)
    sent = [producer.send(raymq.Message(topic, b"before"))]
    pull.subscribe(topic)
    simple.subscribe(topic)
    got = len(pull.poll(10, 10.0)) + len(pull.poll(10, 0.5))

    async def make_async() -> list[object]:
        return [mq.async_producer(), mq.async_pull_consumer(f"{group}-async"), mq.async_simple_consumer(f"{group}-as")]

    asyncs = asyncio.run(make_async())

    def use() -> list[tuple[str, float]]:
        calls = [
            lambda: producer.send(raymq.Message(topic, b"child"), timeout_s=30),
            lambda: producer.send_async(raymq.Message(topic, b"child")),
            lambda: pull.poll(10, 30.0),
            lambda: pull.commit(None),
            lambda: simple.receive(wait_s=30.0),
            lambda: mq.admin.describe_topic(topic),
            lambda: mq.producer("child"),
            lambda: raymq.connect(trace=False),
            *[lambda item=item: item.group for item in asyncs],
        ]
        told = []
        for call in calls:
            begun_s = time.monotonic()
            told.append((outcome(call), time.monotonic() - begun_s))
        for item in (producer, pull, simple, mq):
            item.close()
        return told

    told = in_child(use)
    assert len(told) == 11
    assert all(text.startswith("ClientStateError: ") and took_s < AT_ONCE_S for text, took_s in told), told

    _producer = producer
    fork = multiprocessing.get_context("fork")
    with fork.Pool(4) as pool:
        told = pool.map_async(_send, range(4)).get(timeout=60)
    with ProcessPoolExecutor(2, mp_context=fork) as executor:
        told += executor.map(_send, range(2), timeout=60)
    assert all(text.startswith("ClientStateError: ") and took_s < AT_ONCE_S for text, took_s in told), told

    sent += [producer.send(raymq.Message(topic, b"after %d" % number)) for number in range(4)]
    assert len({(one.queue, one.queue_offset) for one in sent}) == 5
    deadline_s = time.monotonic() + 30
    while got < 5 and time.monotonic() < deadline_s:
        got += len(pull.poll(10, 1.0))
    assert got == 5
    assert simple.receive(wait_s=10.0)
    assert topic in mq.admin.list_topics()
    for item in (producer, pull, simple):
        item.close()
