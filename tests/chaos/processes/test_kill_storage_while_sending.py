"""Test of killed storage processes: they are killed repeatedly while four producers send.

Every acknowledged message is read back exactly once, in order per producer and queue, at its acknowledged offset.
RAYMQ_CHAOS_KILLS (default 6) sets the number of kills. RAYMQ_CHAOS_SEED repeats a run's faults.
"""

from __future__ import annotations

import os
import random

import raymq
from tests.support.cases import chaos_seed
from tests.support.clusters.faults import StorageKiller
from tests.support.history.checker import check
from tests.support.history.history import History
from tests.support.history.workload import Senders, read_back

KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "6"))
PRODUCERS = 4
MESSAGES_PER_KILL = 2500
STORAGES = ("storage-broker-a-0", "storage-broker-b-0")


def test_everything_acknowledged_is_read_back_once_and_in_order_after_storage_kills(
    mq: raymq.Client, topic: str
) -> None:
    seed = chaos_seed()
    history = History()
    count = KILLS * MESSAGES_PER_KILL
    senders = Senders(mq, topic, producers=PRODUCERS, count=count, history=history)
    killer = StorageKiller(
        mq, STORAGES, random.Random(seed), kills=KILLS, total=PRODUCERS * count, progress=lambda: len(history)
    )
    senders.start()
    killer.start()
    senders.join(60 + 30 * KILLS)
    killer.stop()
    print("killed", *killer.killed, sep="\n  ")
    report = check(history, read_back(mq, topic))
    print(report)
    assert len(history) == PRODUCERS * count
    assert report.violations == {}
    # No send fails, because a storage process restarts long before the send timeout.
    assert report.acknowledged == PRODUCERS * count
    assert len(killer.killed) == KILLS
