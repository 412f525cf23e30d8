"""Tests of killed simple consumers: their processes, brokers and storage actors are killed repeatedly while messages
are received.

At the end every message is acknowledged and none is lost. Attempts are counted correctly. No attempt is delivered
twice, no attempt begins while the previous attempt is invisible, and no attempt follows a valid acknowledgement.
The same faults meet push consumers in the mode "share", also of a PRIORITY topic: every message is consumed, and none
becomes a dead letter. Each message of a PRIORITY topic is stored in its level.
RAYMQ_CHAOS_KILLS (default 6, 40 by `make soak`) sets the number of kills. RAYMQ_CHAOS_SEED repeats a run's faults.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

import raymq
from raymq.common.message import PRIORITY_LEVELS
from raymq.common.protocol.group import GroupConfig
from tests.support.cases import chaos_seed
from tests.support.clusters.faults import ActorKiller
from tests.support.history.history import History, Outcome
from tests.support.history.leased_deliveries import deliveries_of
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually
from tests.support.history.workload import Senders, read_back

KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "40" if os.environ.get("RAYMQ_SOAK") == "1" else "6"))
CONSUMERS = 4
PRODUCERS = 2
MESSAGES_PER_KILL = 1500
INVISIBLE_S = 2.0
RENEWED_S = 3.0


def start_consumers(topic: str, group: str, notes: ListenerNotes, seed: int) -> list[Any]:
    """Start simple consumers in actors. An actor receives messages as soon as it is created, and again after Ray has
    restarted it."""
    # Pass only the path of `notes` to the actors, because Ray's workers cannot import the class of `notes`.
    path = str(notes.path)

    class Taker:
        """A consumer that writes each received message to a file, and acknowledges most messages."""

        def __init__(self, number: int) -> None:
            import threading

            self._random = random.Random(seed + number)
            threading.Thread(target=self._run, daemon=True).start()

        def ready(self) -> bool:
            return True

        def _note(self, line: str) -> None:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, f"{line}\n".encode())
            finally:
                os.close(descriptor)

        def _run(self) -> None:
            first = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
            with raymq.connect() as mq, mq.simple_consumer(group, consume_from=first) as consumer:
                subscribed = False
                while True:
                    try:
                        if not subscribed:
                            consumer.subscribe(topic)
                            subscribed = True
                        self._work(consumer, consumer.receive(100, INVISIBLE_S, wait_s=1.0))
                    except raymq.RaymqError as error:
                        if not error.retryable:
                            self._note(f"E {error!r}".replace("\n", " "))

        def _work(self, consumer: Any, messages: Sequence[Any]) -> None:
            for message in messages:
                times = f"{message._receipt.pop_ms} {message.invisible_until_ms}"
                self._note(f"G {message.body.decode()} {message.attempt} {times}")
            if not messages or self._random.random() < 0.05:
                return  # Leave the message unacknowledged, as if the consumer had died.
            if self._random.random() < 0.05:
                for message in messages:
                    self._note(f"C {message.body.decode()} {message.attempt} 0 0")
                consumer.change_invisible(messages, 0.2)
                return
            if consumer.ack(messages) == len(messages):
                for message in messages:
                    self._note(f"A {message.body.decode()} {message.attempt} 0 0")

    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Taker)
    takers = [actor.remote(number) for number in range(CONSUMERS)]
    ray.get([taker.ready.remote() for taker in takers], timeout=60)
    return takers


def test_every_message_is_acknowledged_in_the_end_and_attempts_are_counted_right(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    seed = chaos_seed()
    mq.admin.create_group(GroupConfig(group, retry_max_times=1000))
    history, notes = History(), ListenerNotes(tmp_path / "notes")
    count = KILLS * MESSAGES_PER_KILL // PRODUCERS
    senders = Senders(mq, topic, producers=PRODUCERS, count=count, history=history, pause_s=0.001)
    total = PRODUCERS * count
    takers = start_consumers(topic, group, notes, seed)
    kinds = ["Taker", "Broker", "Storage"]
    killer = ActorKiller(kinds, random.Random(seed), kills=KILLS, total=total, progress=lambda: len(history))
    senders.start()
    killer.start()

    def all_settled() -> bool:
        summary = mq.admin.group_summary(group)
        return summary.lag == 0 and sum(entry.max_offset for entry in summary.queues) >= total

    try:
        senders.join(200)
        killer.stop()
        eventually(all_settled, "every message to be acknowledged", 120)
    finally:
        for taker in takers:
            ray.kill(taker)
    print("killed", *killer.killed, sep="\n  ")
    deliveries = deliveries_of(notes)
    stored = {operation.sent.body().decode() for operation in history if operation.outcome is Outcome.OK}
    assert len(stored) == total
    assert set(deliveries) == stored
    assert {body: faults for body, one in deliveries.items() if (faults := one.faults())} == {}
    assert mq.admin.group_summary(group).dead_letters == 0
    assert len(killer.killed) == KILLS
    attempts = max(attempt for one in deliveries.values() for attempt, _, _ in one.given)
    print(f"{len(deliveries)} messages, up to {attempts} attempts")
    assert attempts > 1


def test_a_killed_consumers_renewed_messages_are_delivered_again(mq: raymq.Client, topic: str, group: str) -> None:
    count = 12
    with mq.producer() as producer:
        for number in range(count):
            producer.send(raymq.Message(topic, b"%d" % number))

    class Holder:
        """A consumer that receives messages, and renews their leases without ever acknowledging them."""

        def __init__(self) -> None:
            self._consumer = raymq.connect().simple_consumer(
                group, consume_from=raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, auto_renew=True
            )
            self._consumer.subscribe(topic)
            self._renewals = 0
            renewer: Any = self._consumer._engine._renewer
            extend = renewer._extend

            def extend_and_count(*arguments: object) -> list[bool]:
                results: list[bool] = extend(*arguments)
                self._renewals += all(results)
                return results

            renewer._extend = extend_and_count

        def hold(self) -> list[str]:
            """Receive messages. Returns their handles."""
            return [message.handle for message in self._consumer.receive(100, RENEWED_S, wait_s=1.0)]

        def renewals(self) -> int:
            return self._renewals

    holder = ray.remote(num_cpus=0)(Holder).remote()
    handles: list[str] = []
    while len(handles) < count:
        handles += ray.get(holder.hold.remote(), timeout=60)
    # The second renewal of a lease is sent when the lease would have ended without the first one. The messages are in
    # up to four queues, whose leases may be renewed in separate calls.
    eventually(lambda: ray.get(holder.renewals.remote(), timeout=60) >= 8, "two renewals of each lease")
    ray.kill(holder)
    with mq.simple_consumer(group) as other:
        other.subscribe(topic)
        again: list[raymq.ReceivedMessage] = []

        def received() -> bool:
            again.extend(other.receive(100, 60.0, wait_s=1.0))
            return len(again) == count

        eventually(received, "all messages again", 120)
        assert sorted(int(message.body) for message in again) == list(range(count))
        assert {message.attempt for message in again} == {2}
        assert other.ack_handles(topic, handles) == 0, "the receipts of the dead consumer have ended"
        assert other.ack(again) == count
    assert mq.admin.group_summary(group).lag == 0


@pytest.mark.parametrize("levels", [0, PRIORITY_LEVELS])
def test_share_mode_consumes_every_message_of_killed_listeners_and_brokers(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path, levels: int
) -> None:
    seed = chaos_seed()
    if levels:
        topic = f"{topic}-levels"
        mq.admin.create_topic(topic, message_type="priority")
    mq.admin.create_group(GroupConfig(group, retry_max_times=1000, retry_intervals_s=(0.2,)))
    history, notes = History(), ListenerNotes(tmp_path / "notes")
    kills = max(1, KILLS // 2)
    count = kills * MESSAGES_PER_KILL // PRODUCERS
    total = PRODUCERS * count
    senders = Senders(mq, topic, producers=PRODUCERS, count=count, history=history, pause_s=0.001, levels=levels)
    push = mq.push_consumer(
        group,
        consume_mode="share",
        threads=2,
        invisible_s=RENEWED_S,
        consume_from=raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )
    push.subscribe(topic).on_message(notes)
    kinds = ["Listener", "Broker", "Storage"]
    killer = ActorKiller(kinds, random.Random(seed), kills=kills, total=total, progress=lambda: len(history))

    def all_settled() -> bool:
        summary = mq.admin.group_summary(group)
        return summary.lag == 0 and sum(entry.max_offset for entry in summary.queues) >= total

    with push.start(instances=CONSUMERS, print_output=False) as running:

        def all_run() -> bool:
            try:
                return all(not one.listener_away for one in running.status())
            except raymq.RaymqError:  # Ray restarts the process of an instance
                return False

        senders.start()
        killer.start()
        senders.join(200)
        killer.stop()
        eventually(all_settled, "every message to be acknowledged", 120)
        # The other instances may settle all messages while the process of an instance restarts. Such an instance cannot
        # be stopped.
        eventually(all_run, "all instances", 120)
    print("killed", *killer.killed, sep="\n  ")
    stored = {operation.sent.body().decode() for operation in history if operation.outcome is Outcome.OK}
    assert len(stored) == total
    consumed = notes.lines()
    assert set(consumed) == stored
    for queue, messages in read_back(mq, topic).items() if levels else ():
        assert {message.sequence % levels for message in messages} == {queue.queue_id}
    assert mq.admin.group_summary(group).dead_letters == 0
    assert len(killer.killed) == kills
    print(f"{total} messages, {len(consumed) - total} of them consumed again")
