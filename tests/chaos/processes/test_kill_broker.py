"""Test of killed brokers: broker actors are killed repeatedly while producers send and a group consumes and commits.

Messages do not pass through a broker, and a broker's whole state is in its store's log. So no message is lost or stored
twice, and committed offsets never decrease. RAYMQ_CHAOS_KILLS (default 5, 20 by `make soak`) sets the number of kills.
RAYMQ_CHAOS_SEED repeats a run's faults.
"""

from __future__ import annotations

import os
import random
import threading

import raymq
from tests.support.cases import chaos_seed
from tests.support.clusters.faults import ActorKiller
from tests.support.history.checker import check
from tests.support.history.history import History, Sent
from tests.support.history.workload import Senders, read_back

KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "20" if os.environ.get("RAYMQ_SOAK") == "1" else "5"))
PRODUCERS = 2
MESSAGES_PER_KILL = 8000
WATCH_S = 0.3


class OffsetWatch:
    """Reads a group's committed offsets repeatedly in a thread, to detect a committed offset that decreases."""

    def __init__(self, mq: raymq.Client, group: str) -> None:
        self._mq, self._group = mq, group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.went_back: list[str] = []
        self.looks = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        furthest: dict[raymq.MessageQueue, int] = {}
        while not self._stop.wait(WATCH_S):
            try:
                progress = self._mq.admin.describe_group(self._group)
            except raymq.RaymqError:
                # No progress can be read now: a broker was just killed, or a broker does not have the consumer group
                # yet.
                continue
            self.looks += 1
            for entry in progress:
                committed = entry.committed or 0
                if committed < furthest.get(entry.queue, 0):
                    self.went_back.append(f"{entry.queue}: {furthest[entry.queue]} then {committed}")
                furthest[entry.queue] = max(furthest.get(entry.queue, 0), committed)


def test_nothing_is_lost_or_twice_and_no_offset_goes_back_when_brokers_are_killed(
    mq: raymq.Client, topic: str, group: str
) -> None:
    seed = chaos_seed()
    history = History()
    count = KILLS * MESSAGES_PER_KILL
    senders = Senders(mq, topic, producers=PRODUCERS, count=count, history=history)
    total = PRODUCERS * count
    killer = ActorKiller(["Broker"], random.Random(seed), kills=KILLS, total=total, progress=lambda: len(history))
    watch = OffsetWatch(mq, group)
    consumed: set[Sent] = set()
    first = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    with mq.pull_consumer(group, consume_from=first, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        senders.start()
        killer.start()
        watch.start()
        quiet = 0
        while quiet < 60 and (senders.running or len(consumed) < total):
            try:
                messages = consumer.poll(max_messages=2000, timeout_s=1.0)
                consumer.commit()
            except raymq.RaymqError as error:
                if not error.retryable:
                    raise
                continue
            consumed.update(Sent.parse(message.body) for message in messages)
            quiet = 0 if messages or senders.running else quiet + 1
        senders.join(60)
        killer.stop()
        watch.stop()
    print("killed", *killer.killed, sep="\n  ")
    report = check(history, read_back(mq, topic))
    print(report, f"consumed {len(consumed)}, looked at the offsets {watch.looks} times")
    assert report.violations == {}
    assert report.acknowledged == total
    assert len(consumed) == total
    assert watch.went_back == []
    assert watch.looks > 0
    assert len(killer.killed) == KILLS
