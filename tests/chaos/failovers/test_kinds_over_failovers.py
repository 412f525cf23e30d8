"""Tests of requests, light queues and compaction topics: they work while the master of three replicas is killed
repeatedly.

No requester gets another requester's reply, and requests are answered again after each failover. Each light queue has
each acknowledged message once, in order. A compaction topic always contains the newest message of each key. After every
replica has compacted the topic, it contains no other messages.

RAYMQ_CHAOS_KILLS (default 3, 20 by `make soak`) sets the number of times that the master is killed.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest

import raymq
from raymq.common.message import MessageExt
from tests.support.clusters.cluster import one_group
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas

KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "20" if os.environ.get("RAYMQ_SOAK") == "1" else "3"))
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
REPLICAS = 3
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}").replace(
    "store:\n",
    "store:\n  enable_lmq: true\n  enable_multi_dispatch: true\n  compaction_schedule_interval_ms: 500\n",
)
REQUEST_S = 20.0
BETWEEN_KILLS = 30
"""Minimum progress between two kills: each load must make this many more successful calls. A load is a thread of
requests, or of sends to light queues or to the compaction topic."""
MEMBERS = 5
ARTICLES = 20
PAUSE_S = 0.01
COMPACTED_S = 240.0
"""Timeout, in seconds, until all replicas have compacted the topic. It is long because compaction skips messages
younger than a minute, and each replica compacts its own log."""


@pytest.fixture
def replicas(mq: raymq.Client) -> RayReplicas:
    """Return the broker group after all its replicas are in sync."""
    group = RayReplicas("broker-a", REPLICAS)
    group.settled()
    return group


class Load:
    """A thread that calls `step(number)` repeatedly until `end` is called, and counts the successful calls.

    If a step raises RaymqError, its outcome is unknown. If a step raises another error, `end` raises that error.
    """

    def __init__(self, step: Callable[[int], None]) -> None:
        self.answered = 0
        self._step, self._stopping = step, threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        try:
            while not self._stopping.wait(PAUSE_S):
                number += 1
                try:
                    self._step(number)
                except raymq.RaymqError:
                    continue
                self.answered += 1
        except BaseException as error:
            self._failures.append(error)

    def has_answers(self, wanted: int) -> bool:
        assert not self._failures, self._failures
        return self.answered >= wanted

    def end(self) -> None:
        self._stopping.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        assert not self._failures, self._failures


def await_answers(loads: list[Load]) -> None:
    """Wait until each load (a thread that sends requests or messages) has BETWEEN_KILLS further successful calls. A
    failover leaves fewer calls in flight than this number."""
    for load, wanted in [(load, load.answered + BETWEEN_KILLS) for load in loads]:
        eventually(lambda load=load, wanted=wanted: load.has_answers(wanted), "answers")  # type: ignore[misc]


def stored_bodies(mq: raymq.Client, topic: str) -> list[list[bytes]]:
    """Return the bodies of all messages in each queue of the topic, from the first offset on."""
    return eventually(lambda: read_from_the_beginning(mq, topic), f"an answer about {topic}")


def read_from_the_beginning(mq: raymq.Client, topic: str) -> list[list[bytes]]:
    """Return the bodies of all messages in each queue of the topic; an empty list if a server does not answer
    now."""
    found: list[list[bytes]] = []
    try:
        for entry in mq.admin.describe_topic(topic):
            bodies: list[bytes] = []
            position = 0
            while position < entry.max_offset:
                result = mq.admin.pull(entry.queue, position, max_messages=1000)
                bodies += [message.body for message in result.messages]
                assert result.next_offset > position
                position = result.next_offset
            found.append(bodies)
    except raymq.RaymqError as error:
        if not error.retryable:
            raise
        return []
    return found


def assert_light_queues(mq: raymq.Client, topic: str, rooms: str, acknowledged: dict[str, list[bytes]]) -> None:
    [stored] = [bodies for bodies in stored_bodies(mq, rooms) if bodies]
    assert len(set(stored)) == len(stored)
    for member in range(MEMBERS):
        name = f"{topic}-{member}"
        [told] = stored_bodies(mq, raymq.light_queue(name))
        assert told == [body for body in stored if int(body) % (member + 1) == 0]
        known = set(acknowledged[name])
        assert [body for body in told if body in known] == acknowledged[name]


def is_compacted(mq: raymq.Client, prices: str, newest: dict[str, tuple[int, int]]) -> bool:
    """Return True if each article has only one price left in the compacted topic `prices`. Raises AssertionError if the
    newest price of an article is missing."""
    shown: dict[str, list[int]] = defaultdict(list)
    for bodies in stored_bodies(mq, prices):
        for article, number in (body.decode().split() for body in bodies):
            shown[article].append(int(number))
    for article, (acknowledged, sent) in newest.items():
        assert acknowledged <= shown[article][-1] <= sent, (article, acknowledged, sent, shown[article])
    return all(len(numbers) == 1 for numbers in shown.values())


@pytest.mark.timeout(600 + 20 * KILLS)
def test_requests_light_queues_and_compaction(mq: raymq.Client, replicas: RayReplicas, topic: str, group: str) -> None:
    prices, rooms = f"{topic}-prices", f"{topic}-rooms"
    mq.admin.create_topic(prices, queues=2, cleanup_policy="compaction")
    mq.admin.create_topic(rooms, queues=2)
    acknowledged: dict[str, list[bytes]] = defaultdict(list)
    newest: dict[str, tuple[int, int]] = {}
    """For each article, the number of its last acknowledged price and the number of its last sent price."""

    def upper(message: MessageExt) -> raymq.Reply:
        return raymq.reply(message.body.upper())

    with (
        mq.producer("asker") as asker,
        mq.producer("rooms") as room_sender,
        mq.producer("prices") as price_sender,
        mq.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(upper).start(),
    ):

        def ask(number: int) -> None:
            answer = asker.request(raymq.Message(topic, b"question %d" % number), timeout_s=REQUEST_S)
            assert answer.body == b"QUESTION %d" % number

        def tell_members(number: int) -> None:
            names = [f"{topic}-{member}" for member in range(MEMBERS) if number % (member + 1) == 0]
            body = b"%06d" % number
            result = room_sender.send(raymq.Message(rooms, body, light_queues=names), sharding_key="one room")
            if result.status is raymq.SendStatus.SEND_OK:
                for name in names:
                    acknowledged[name].append(body)

        def price(number: int) -> None:
            article = f"article-{number % ARTICLES}"
            known, _ = newest.get(article, (0, 0))
            newest[article] = known, number
            message = raymq.Message(prices, b"%s %d" % (article.encode(), number), keys=[article])
            if price_sender.send(message, sharding_key=article).status is raymq.SendStatus.SEND_OK:
                newest[article] = number, number

        loads = [Load(ask), Load(tell_members), Load(price)]
        try:
            for _ in range(KILLS):
                await_answers(loads)
                replicas.fail_over()
                replicas.settled()
            await_answers(loads)
        finally:
            for load in loads:
                load.end()
    assert_light_queues(mq, topic, rooms, acknowledged)
    for turn in range(REPLICAS):
        if turn:
            replicas.lead((replicas.settled()["master"] + 1) % REPLICAS)
            replicas.settled()
        eventually(lambda: is_compacted(mq, prices, newest), "the compaction at each replica", COMPACTED_S)
