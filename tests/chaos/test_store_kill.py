"""A process that appends is killed with SIGKILL at random moments, again and again, on one store directory.

After each kill the store is opened: what was acknowledged is there once and in order, what was under way is there from
its beginning on or not at all. The next child sends again what was not acknowledged.

RAYMQ_CHAOS_KILLS (default 18 for each way to flush) makes a soak of it, RAYMQ_CHAOS_SEED repeats one.
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

from storage.message_store import MessageStore
from tests.support.stores import open_store, read_queue

KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "18"))
SEED = int(os.environ.get("RAYMQ_CHAOS_SEED", str(random.SystemRandom().randrange(10**6))))
QUEUES = 4
BATCH_MAX = 100
LONGEST_LIFE_S = 0.35
START_TIMEOUT_S = 60.0
APPENDER = Path(__file__).with_name("store_appender.py")
DIRECTORY_ROLLS_OVER_BYTES = 48 << 20
"""A soak goes on in a new directory when the log has this size, or reading it back would take all the time."""


def run_and_kill(root: Path, flush: str, seed: str, acknowledged: list[int], life_s: float) -> list[int]:
    """Let a child append for `life_s` seconds and kill it; returns the sequence acknowledged in each queue."""
    command = [sys.executable, str(APPENDER), str(root), flush, seed, *map(str, acknowledged)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], START_TIMEOUT_S)
    assert readable, "the child did not start"
    time.sleep(life_s)  # The moment of the kill is what this test varies; nothing is synchronised by it.
    child.send_signal(signal.SIGKILL)
    output, errors = child.communicate(timeout=START_TIMEOUT_S)
    assert child.returncode == -signal.SIGKILL, errors.decode()
    assert not errors, errors.decode()
    ends = list(acknowledged)
    for line in output.decode().splitlines():
        if " " in line:
            queue_id, end = map(int, line.split())
            ends[queue_id] = max(ends[queue_id], end)
    return ends


def check(store: MessageStore, acknowledged: list[int]) -> None:
    for queue_id, end in enumerate(acknowledged):
        places = [message.body.split(b":")[:2] for message in read_queue(store, queue_id=queue_id)]
        assert places == [[b"%d" % queue_id, b"%d" % sequence] for sequence in range(len(places))]
        assert end <= len(places) <= end + BATCH_MAX


@pytest.mark.timeout(120 + 10 * KILLS)
@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_what_was_acknowledged_is_there_once_and_in_order_after_every_kill(tmp_path, flush):
    print(f"RAYMQ_CHAOS_SEED={SEED}")
    dice = random.Random(f"{SEED}-{flush}")
    root, acknowledged, total = tmp_path / "0", [0] * QUEUES, 0
    for kill in range(KILLS):
        acknowledged = run_and_kill(root, flush, f"{SEED}-{kill}", acknowledged, dice.uniform(0, LONGEST_LIFE_S))
        store = open_store(root)
        check(store, acknowledged)
        size = store.status().max_physical_offset
        if dice.random() < 0.5:
            store.close()
        else:
            # Leave it as a process that opened it and died at once would: with its abort file.
            abort = (root / "abort").read_text()
            store.close()
            (root / "abort").write_text(abort)
        if size > DIRECTORY_ROLLS_OVER_BYTES:
            total += sum(acknowledged)
            root, acknowledged = tmp_path / str(kill + 1), [0] * QUEUES
    total += sum(acknowledged)
    print(f"{KILLS} kills, {total} messages acknowledged")
    assert total or KILLS < 5
