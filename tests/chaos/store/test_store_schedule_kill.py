"""Test of killed delivery: a process that stores and delivers delayed messages is killed with SIGKILL at random
moments, repeatedly.

The next process resends unacknowledged messages, and continues to deliver. At the end each acknowledged message is in
its destination queue exactly once, and messages with delay levels are in order.

RAYMQ_CHAOS_KILLS (default 8) sets the number of kills. RAYMQ_CHAOS_SEED repeats the moments of the kills.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raymq.common.delay import TIMER_TOPIC
from raymq.common.names import SCHEDULE_TOPIC
from tests.support.cases import chaos_seed
from tests.support.history.waiting import eventually
from tests.support.stores.stores import bodies_of, open_store

KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "8"))
APPENDER = Path(__file__).with_name("delayed_appender.py")
TARGET_QUEUES = 3
LONGEST_LIFE_S = 1.5
START_TIMEOUT_S = 60.0


def run_and_kill(root: Path, acknowledged: dict[str, int], life_s: float) -> None:
    """Run a child process for `life_s` seconds, then kill it. Adds the acknowledgements that the child reports to
    `acknowledged`."""
    command = [sys.executable, str(APPENDER), str(root), str(acknowledged["level"]), str(acknowledged["timer"])]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], START_TIMEOUT_S)
    assert readable, "the child did not start"
    # Let the child run for a random time, and then kill it. The test needs no exact length of this time.
    time.sleep(life_s)
    child.send_signal(signal.SIGKILL)
    output, errors = child.communicate(timeout=START_TIMEOUT_S)
    assert child.returncode == -signal.SIGKILL, errors.decode()
    # The only permitted error output is recovery's report of the batch that the last kill interrupted.
    assert all(b"opened after a crash" in line for line in errors.splitlines()), errors.decode()
    for line in output.decode().splitlines():
        if " " in line:
            kind, end = line.split()
            acknowledged[kind] = max(acknowledged[kind], int(end))


@pytest.mark.timeout(120 + 10 * KILLS)
def test_acknowledged_messages_are_delivered_once_over_every_kill(tmp_path):
    seed = chaos_seed()
    dice = random.Random(seed)
    root, acknowledged = tmp_path / "store", {"level": 0, "timer": 0}
    for _ in range(KILLS):
        run_and_kill(root, acknowledged, dice.uniform(0.1, LONGEST_LIFE_S))
    store = open_store(root)
    waiting = sum(store.queues.bounds(topic, 0).max_offset for topic in (SCHEDULE_TOPIC, TIMER_TOPIC))
    store.schedule.start_delivery()
    queues = [("orders", queue_id) for queue_id in range(TARGET_QUEUES)]
    eventually(lambda: sum(store.queues.bounds(*queue).max_offset for queue in queues) >= waiting, "all is delivered")
    eventually(lambda: store.status().schedule.pending == {}, "nothing waits")
    arrived = [[body.decode().split(":") for body in bodies_of(store, *queue)] for queue in queues]
    store.close()
    for kind, end in acknowledged.items():
        numbers = sorted(int(number) for queue in arrived for name, number in queue if name == kind)
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= end
    for queue in arrived:
        by_level = [int(number) for name, number in queue if name == "level"]
        assert by_level == sorted(by_level)
    print(f"{KILLS} kills, {acknowledged} acknowledged, {waiting} delivered")
    assert waiting == sum(map(len, arrived))
