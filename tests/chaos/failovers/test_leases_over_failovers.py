"""Tests of leases, attempts and delayed messages over failovers: the master of three replicas is killed repeatedly.
At the same time simple consumers receive, messages are delayed, and a listener fails.

Every acknowledged message is received and acknowledged in the end. A lease from before a failover holds: its messages
are hidden from other consumers until it ends, and its receipts stay valid. Attempts and reconsume times count the
deliveries. A delayed message is stored in its queue once, and not before its time. Extended leases hold, too.

RAYMQ_CHAOS_KILLS (default 3, 20 by `make soak`) sets the number of times that the master is killed. RAYMQ_CHAOS_SEED
repeats the choices of a run.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

import raymq
from raymq.common.message import MessageExt
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import one_group
from tests.support.history.history import History, Outcome
from tests.support.history.leased_deliveries import Deliveries, deliveries_of
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.log_rules import check_log
from tests.support.history.observations import Observation, Observations, Seen, TailWatcher
from tests.support.history.renewals import renewals_of
from tests.support.history.waiting import eventually
from tests.support.history.workload import Senders
from tests.support.replicas.ray_replicas import RayReplicas

KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "20" if os.environ.get("RAYMQ_SOAK") == "1" else "3"))
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
REPLICAS = 3
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
BETWEEN_KILLS = 150
"""Minimum number of messages that are received between two kills."""
CONSUMERS = 3
INVISIBLE_S = 2.0
HELD_S = 60.0
"""Invisible time of the leases that a failover must not end, longer than a failover takes."""
RENEWED_S = 10.0
RETRIES = 2
SETTLED_S = 120.0


@pytest.fixture
def replicas(mq: raymq.Client) -> RayReplicas:
    """Return the broker group after all its replicas are in sync."""
    group = RayReplicas("broker-a", REPLICAS)
    group.settled()
    return group


class Threads:
    """Threads that each call their function repeatedly until `end`. RaymqErrors are part of the test; `end` raises
    other errors."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, step: Callable[[], object], pause_s: float = 0.0) -> None:
        thread = threading.Thread(target=self._run, args=(step, pause_s), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, step: Callable[[], object], pause_s: float) -> None:
        while not self._stopping.wait(pause_s):
            try:
                step()
            except raymq.RaymqError as error:
                if not error.retryable:
                    self._failures.append(error)
                    return
            except BaseException as error:  # keep the error of this thread; `end` raises it in the test's thread
                self._failures.append(error)
                return

    def end(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(SETTLED_S)
            assert not thread.is_alive()
        assert self._failures == []


class Receiver:
    """A simple consumer that acknowledges most messages, and notes what it gets."""

    def __init__(
        self, consumer: raymq.SimpleConsumer, notes: ListenerNotes, seen: Observations, dice: random.Random
    ) -> None:
        self._consumer, self._notes, self._seen, self._dice = consumer, notes, seen, dice

    def __call__(self) -> None:
        begin_s = time.monotonic()
        messages = self._consumer.receive(32, INVISIBLE_S, wait_s=0.5)
        end_s = time.monotonic()
        for one in messages:
            times = f"{one._receipt.pop_ms} {one.invisible_until_ms}"
            self._notes.write(f"G {one.body.decode()} {one.attempt} {times}")
            self._seen.add(Observation(Seen.READ, begin_s, end_s, one.queue, one.queue_offset, one.body, "the group"))
        choice = self._dice.random()
        if choice < 0.05:
            return  # leave the messages unacknowledged, as if the consumer had died
        if choice < 0.1:
            for one in messages:
                self._notes.write(f"C {one.body.decode()} {one.attempt} 0 0")
            self._consumer.change_invisible(messages, 0.2)
        elif self._consumer.ack(messages) == len(messages):
            for one in messages:
                self._notes.write(f"A {one.body.decode()} {one.attempt} 0 0")


class DelayedSender:
    """Sends delayed messages, by level and by time. `due_ms`: by body, the time before which the message must not be
    delivered, for each message whose send was acknowledged."""

    def __init__(self, producer: raymq.Producer, topic: str, dice: random.Random) -> None:
        self._producer, self._topic, self._dice = producer, topic, dice
        self._number = 0
        self.due_ms: dict[str, int] = {}

    def __call__(self) -> None:
        self._number += 1
        body, now_ms = f"delayed-{self._number}", time.time_ns() // 1_000_000
        if self._dice.random() < 0.5:
            due_ms = now_ms + 1000
            message = raymq.Message(self._topic, body.encode(), delay_level=1)
        else:
            due_ms = now_ms + self._dice.randint(200, 4000)
            message = raymq.Message(self._topic, body.encode(), deliver_at_ms=due_ms)
        if self._producer.send(message).status is raymq.SendStatus.SEND_OK:
            self.due_ms[body] = due_ms


def failing_listener(path: str) -> Callable[[MessageExt], object]:
    """Return a listener that fails each message RETRIES times, and writes each delivery to a file."""
    retries = RETRIES

    def listen(message: MessageExt) -> object:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{message.body.decode()} {message.reconsume_times}\n".encode())
        finally:
            os.close(descriptor)
        return raymq.ConsumeLater(delay_level=1) if message.reconsume_times < retries else None

    return listen


def stored(mq: raymq.Client, topic: str) -> list[MessageExt]:
    found: list[MessageExt] = []
    for entry in mq.admin.describe_topic(topic):
        offset = entry.min_offset
        while offset < entry.max_offset:
            result = mq.admin.pull(entry.queue, offset, max_messages=1000)
            found += result.messages
            offset = result.next_offset
    return found


def gaps(deliveries: dict[str, Deliveries]) -> int:
    """Return the number of attempts that no consumer got. The answer of a receive can be lost in a failover."""
    return sum(max(attempt for attempt, *_ in one.given) - len(one.given) for one in deliveries.values())


@pytest.mark.timeout(300 + 20 * KILLS)
def test_attempts_and_times_are_right_over_failovers(
    mq: raymq.Client, replicas: RayReplicas, topic: str, group: str, tmp_path: Path
) -> None:
    seed, later, failing = chaos_seed(), f"{topic}-later", f"{topic}-failing"
    dice = random.Random(seed)
    for name in (later, failing):
        mq.admin.create_topic(name, queues=2)
    history, seen = History(), Observations()
    notes, failures = ListenerNotes(tmp_path / "notes"), ListenerNotes(tmp_path / "failures")
    senders = Senders(mq, topic, producers=1, count=10**6, history=history, pause_s=0.01, observations=seen)
    consumers, threads = [mq.simple_consumer(group, consume_from=FIRST) for _ in range(CONSUMERS)], Threads()
    to_fail: set[str] = set()

    def received() -> int:
        return sum(line.startswith("G") for line in notes.lines())

    with (
        mq.producer("later") as producer,
        TailWatcher(mq, topic, seen, group) as tails,
        mq.push_consumer(f"{group}-failing", consume_from=FIRST)
        .subscribe(failing)
        .on_message(failing_listener(str(failures.path)))
        .start(),
    ):
        delayed = DelayedSender(producer, later, dice)

        def send_to_fail() -> None:
            body = f"failing-{len(to_fail)}"
            if producer.send(raymq.Message(failing, body.encode())).status is raymq.SendStatus.SEND_OK:
                to_fail.add(body)

        for number, consumer in enumerate(consumers):
            consumer.subscribe(topic)
            consumer.subscribe(later)
            threads.start(Receiver(consumer, notes, seen, random.Random(seed + number)))
        sending = Threads()
        sending.start(delayed, 0.02)
        sending.start(send_to_fail, 0.1)
        senders.start()
        try:
            for _ in range(KILLS):
                enough = received() + BETWEEN_KILLS
                eventually(lambda enough=enough: received() >= enough, "messages that are received")  # type: ignore[misc]
                replicas.fail_over()
        finally:
            senders.stop()
            senders.join(SETTLED_S)
            sending.end()
        replicas.settled()
        acknowledged = {one.sent.body().decode() for one in history if one.outcome is Outcome.OK} | set(delayed.due_ms)
        eventually(lambda: acknowledged <= set(deliveries_of(notes)), "each message at a consumer", SETTLED_S)
        eventually(lambda: mq.admin.group_summary(group).lag == 0, "each message acknowledged", SETTLED_S)
        retried = {f"{body} {times}" for body in to_fail for times in range(RETRIES + 1)}
        eventually(lambda: retried <= set(failures.lines()), "each retry of the failing messages", SETTLED_S)
        threads.end()
    tails.check()
    for consumer in consumers:
        consumer.close()
    deliveries = deliveries_of(notes)
    assert {body: faults for body, one in deliveries.items() if (faults := one.faults())} == {}
    print(f"{len(deliveries)} messages in {received()} deliveries, {gaps(deliveries)} attempts without a consumer")
    assert_delayed(stored(mq, later), delayed.due_ms)
    counts = Counter(failures.lines())
    print(f"{len(to_fail)} failing messages, {counts.total()} deliveries")
    assert max(int(line.split()[1]) for line in counts) == RETRIES
    assert mq.admin.group_summary(group).dead_letters == 0
    check_log(seen, random.Random(seed))


def assert_delayed(messages: list[MessageExt], due_ms: dict[str, int]) -> None:
    """Check that each delayed message was delivered once, and none before its time."""
    times: dict[str, list[int]] = defaultdict(list)
    for one in messages:
        times[one.body.decode()].append(one.store_timestamp_ms)
    assert {body: found for body, found in times.items() if len(found) > 1} == {}
    assert set(due_ms) <= set(times)
    assert {body: due for body, due in due_ms.items() if times[body][0] < due} == {}


def test_a_lease_from_before_a_failover_holds(mq: raymq.Client, replicas: RayReplicas, topic: str, group: str) -> None:
    count = 20
    with mq.producer() as producer:
        for number in range(count):
            producer.send(raymq.Message(topic, b"%d" % number))
    with (
        mq.simple_consumer(group, consume_from=FIRST) as holder,
        mq.simple_consumer(group, consume_from=FIRST) as other,
    ):
        for consumer in (holder, other):
            consumer.subscribe(topic)
        held: list[raymq.ReceivedMessage] = []
        while len(held) < count:
            held += holder.receive(count, HELD_S, wait_s=5.0)
        assert {one.attempt for one in held} == {1}
        replicas.fail_over()
        # The new master has the leases, so another consumer gets none of their messages, and their receipts are valid.
        assert _receive(other, HELD_S) == []
        done, rest = held[: count // 2], held[count // 2 :]
        assert holder.ack(done) == len(done)
        assert len(holder.change_invisible(rest, 0.1)) == len(rest)
        again: list[raymq.ReceivedMessage] = []
        while len(again) < len(rest):
            again += _receive(other, HELD_S)
        assert sorted((one.body, one.attempt) for one in again) == sorted((one.body, 2) for one in rest)
        replicas.fail_over()
        # The receipts of the first attempt have ended, and the receipts of the second attempt are valid.
        assert holder.ack(rest) == 0
        assert other.ack(again) == len(again)
        assert _receive(holder, HELD_S) == []
        assert mq.admin.group_summary(group).lag == 0


def test_an_extension_from_before_a_failover_holds_and_the_new_master_extends(
    mq: raymq.Client, replicas: RayReplicas, topic: str, group: str
) -> None:
    count = 10
    with mq.producer() as producer:
        for number in range(count):
            producer.send(raymq.Message(topic, b"%d" % number))
    with (
        mq.simple_consumer(group, consume_from=FIRST) as holder,
        mq.simple_consumer(group, consume_from=FIRST, auto_renew=True) as renewer,
    ):
        for consumer in (holder, renewer):
            consumer.subscribe(topic)
        held: list[raymq.ReceivedMessage] = []
        while len(held) < count // 2:
            held += holder.receive(count // 2 - len(held), HELD_S, wait_s=5.0)
        assert holder.extend_invisible(held, 2 * HELD_S) == [True] * len(held)
        renewed: list[raymq.ReceivedMessage] = []
        while len(renewed) < count - len(held):
            renewed += renewer.receive(count, RENEWED_S, wait_s=5.0)
        assert {one.attempt for one in (*held, *renewed)} == {1}
        replicas.fail_over()
        # If the failover takes longer than a lease, the lease ends, but nobody receives here before it is extended.
        renewals = renewals_of(renewer)
        eventually(lambda: len(renewals) > 1, "renewals at the new master")
        assert {one for results in renewals for one in results} == {True}
        eventually(lambda: _extended(renewer, renewed), "an extension at the new master")
        assert _receive(holder, HELD_S) == []
        assert renewer.ack(renewed) == len(renewed), "the receipts from before the failover are valid"
        assert holder.ack(held) == len(held)
        assert mq.admin.group_summary(group).lag == 0


def _extended(consumer: raymq.SimpleConsumer, messages: list[raymq.ReceivedMessage]) -> bool:
    """Extend leases. Returns False if the broker does not answer yet."""
    try:
        assert consumer.extend_invisible(messages, HELD_S) == [True] * len(messages)
    except raymq.RaymqError as error:
        if not error.retryable:
            raise
        return False
    return True


def _receive(consumer: raymq.SimpleConsumer, invisible_s: float) -> list[raymq.ReceivedMessage]:
    """Receive as soon as the broker answers. Until then the broker may follow the change of the master."""

    def received() -> list[list[raymq.ReceivedMessage]]:
        try:
            return [consumer.receive(32, invisible_s, wait_s=1.0)]
        except raymq.RaymqError as error:
            if not error.retryable:
                raise
            return []

    [messages] = eventually(received, "an answer to a receive")
    return messages
