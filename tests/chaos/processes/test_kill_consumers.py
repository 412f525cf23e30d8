"""Tests of killed push consumers: their processes (Pull and Listener actors) are killed repeatedly under load.

Every acknowledged message reaches a listener. An orderly listener gets the messages of each queue one by one. Messages
are delivered again only after a kill, at most one full task per kill. A request that is not stored runs at most once.
RAYMQ_CHAOS_CONSUMER_KILLS (default 5, 50 with RAYMQ_SOAK) sets the number of kills. RAYMQ_CHAOS_SEED repeats a run's
faults.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import raymq
from raymq.common.message import MessageExt
from tests.support.cases import chaos_seed
from tests.support.clusters.faults import ActorKiller
from tests.support.history.history import History, Outcome, Sent
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually
from tests.support.history.workload import Senders

KILLS = int(os.environ.get("RAYMQ_CHAOS_CONSUMER_KILLS", "50" if os.environ.get("RAYMQ_SOAK") else "5"))
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
PRODUCERS = 2
INSTANCES = 3
MESSAGES_PER_KILL = 1500
LISTENER_S = 0.001
REQUESTERS = 4
REQUESTS_PER_KILL = 1000
REQUEST_S = 20.0
PAUSE_S = 0.01
TASK_MAX = 64
SPAN_MAX = 200
LINE_BYTES = len("broker-a 000 000000000 00:0000000\n")


@dataclass(frozen=True, slots=True)
class ListenerCall:
    """One call of a message listener: the queue, queue offset and identity of the message. A list of calls is in the
    order in which the calls began."""

    queue: str
    offset: int
    sent: Sent


class Listen:
    """A message listener that writes a line of fixed length to a file for each message, and then sleeps
    briefly."""

    def __init__(self, notes: ListenerNotes) -> None:
        self._notes = notes

    def __call__(self, message: MessageExt) -> None:
        sent = Sent.parse(message.body)
        place = f"{message.broker_name} {message.queue_id:03} {message.queue_offset:09}"
        self._notes.write(f"{place} {sent.producer:02}:{sent.sequence:07}")
        time.sleep(LISTENER_S)


def calls_in(notes: ListenerNotes) -> list[ListenerCall]:
    calls = []
    for line in notes.lines():
        broker_name, queue_id, offset, sent = line.split()
        calls.append(ListenerCall(f"{broker_name}:{queue_id}", int(offset), Sent.parse(sent.encode())))
    return calls


def steps_back(heard: Sequence[ListenerCall]) -> list[int]:
    """Find the calls in which the listener received messages of a queue again. For each such call, returns the number
    of offsets by which it lies before the expected offset. Raises AssertionError if offsets of a queue were skipped."""
    place: dict[str, int] = {}
    steps = []
    for call in heard:
        expected = place.get(call.queue, 0)
        assert call.offset <= expected, f"order break: {call.queue} jumps from {expected} to {call.offset}"
        if call.offset < expected:
            steps.append(expected - call.offset)
        place[call.queue] = call.offset + 1
    return steps


@pytest.mark.parametrize("orderly", [True, False], ids=["orderly", "concurrent"])
@pytest.mark.timeout(300 + 30 * KILLS)
def test_consumers_killed_under_load_lose_nothing_and_repeat_little(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path, orderly: bool
) -> None:
    seed = chaos_seed()
    notes, history = ListenerNotes(tmp_path / "notes"), History()
    count = KILLS * MESSAGES_PER_KILL
    push = mq.push_consumer(
        group,
        orderly=orderly,
        consume_from=FIRST,
        pull_batch_size=TASK_MAX,
        consume_concurrently_max_span=SPAN_MAX,
    )
    senders = Senders(mq, topic, producers=PRODUCERS, count=count, history=history)
    killer = ActorKiller(
        ("Pull", "Listener"),
        random.Random(seed),
        kills=KILLS,
        total=PRODUCERS * count,
        progress=lambda: notes.path.stat().st_size // LINE_BYTES,
    )
    with push.subscribe(topic).on_message(Listen(notes)).start(instances=INSTANCES):
        senders.start()
        killer.start()
        senders.join(120 + 30 * KILLS)
        acknowledged = {operation.sent for operation in history if operation.outcome is Outcome.OK}
        eventually(
            lambda: (
                notes.path.stat().st_size // LINE_BYTES >= len(acknowledged)
                and acknowledged <= {call.sent for call in calls_in(notes)}
            ),
            "everything acknowledged at the listeners",
            120 + 20 * KILLS,
        )
        killer.stop()
    print("killed", *killer.killed, sep="\n  ")
    heard = calls_in(notes)
    print(f"acknowledged {len(acknowledged)}, heard {len(heard)}, of them again {len(heard) - len(acknowledged)}")
    assert len(acknowledged) == PRODUCERS * count
    assert len(killer.killed) == KILLS
    queues = {call.queue for call in heard}
    if orderly:
        steps = steps_back(heard)
        print("taken back by", steps)
        assert max(steps, default=0) <= TASK_MAX
        assert len(steps) <= KILLS * len(queues)
    else:
        # Two kinds of messages may be delivered again after a kill: messages that the listener is processing, and
        # processed messages whose offsets are not yet committed.
        assert len(heard) - len(acknowledged) <= KILLS * len(queues) * 2 * (SPAN_MAX + TASK_MAX)


class Answer:
    """A message listener that writes the number of each request to a file, and replies with the number."""

    def __init__(self, notes: ListenerNotes) -> None:
        self._notes = notes

    def __call__(self, message: MessageExt) -> object:
        self._notes.write(message.body.decode())
        return raymq.reply(message.body)


class Requesters:
    """Threads that send numbered requests with ``durable=False`` until `wanted` of them have a reply."""

    def __init__(self, producer: raymq.Producer, topic: str, wanted: int) -> None:
        self._producer, self._topic, self._wanted = producer, topic, wanted
        self._numbers = itertools.count()
        self.replied: list[int] = []
        self.not_executed: list[int] = []
        """Numbers of the requests whose error says that no listener executed them."""
        self.unknown: list[int] = []
        self.wrong: list[str] = []
        """Replies that belong to another request, and errors that a lost process does not explain."""
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(REQUESTERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a request has no end"

    def _run(self) -> None:
        while len(self.replied) < self._wanted and not self.wrong:
            number = next(self._numbers)
            try:
                self._ask(number)
            except Exception as error:
                self.wrong.append(repr(error))

    def _ask(self, number: int) -> None:
        message = raymq.Message(self._topic, b"%d" % number)
        try:
            if number % 2:
                reply = self._producer.request(message, durable=False, timeout_s=REQUEST_S)
            else:
                reply = self._producer.request_async(message, durable=False, timeout_s=REQUEST_S).result()
        except raymq.NoListenerError:
            self.not_executed.append(number)
            time.sleep(PAUSE_S)
        except (raymq.ServiceNotAvailableError, raymq.RequestTimeoutError):
            self.unknown.append(number)
        else:
            if reply.body != message.body:
                self.wrong.append(f"request {number} has the reply {reply.body!r}")
            self.replied.append(number)


@pytest.mark.timeout(300 + 30 * KILLS)
def test_requests_that_are_not_stored_run_at_most_once_while_listeners_and_brokers_are_killed(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    seed = chaos_seed()
    notes, wanted = ListenerNotes(tmp_path / "notes"), KILLS * REQUESTS_PER_KILL
    consumer = mq.push_consumer(group, request_threads=4).subscribe(topic).on_message(Answer(notes))
    with consumer.start(instances=INSTANCES), mq.producer() as producer:
        requesters = Requesters(producer, topic, wanted)
        killer = ActorKiller(
            ("Broker", "Listener"),
            random.Random(seed),
            kills=KILLS,
            total=wanted,
            progress=lambda: len(requesters.replied),
        )
        requesters.start()
        killer.start()
        requesters.join(120 + 30 * KILLS)
        killer.stop()
    print("killed", *killer.killed, sep="\n  ")
    executed = notes.numbers()
    print(
        f"replied {len(requesters.replied)}, unknown {len(requesters.unknown)}, refused {len(requesters.not_executed)}"
    )
    assert requesters.wrong == []
    assert len(killer.killed) == KILLS
    assert len(executed) == len(set(executed))
    assert set(requesters.replied) <= set(executed)
    assert not set(requesters.not_executed) & set(executed)
    assert set(executed) <= set(requesters.replied) | set(requesters.unknown)
