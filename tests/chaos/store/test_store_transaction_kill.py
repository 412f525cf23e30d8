"""Test of killed transactions: a process that runs transactions is killed with SIGKILL at random moments, repeatedly.

Its local transactions are rows of a database file. At the end the log has a message exactly once if the database has
committed its row, and otherwise not: the outcomes in the database and in the topic are equal. RAYMQ_CHAOS_TRANSACTIONS
(default 600, 10,000 with RAYMQ_SOAK=1) is the number of transactions. RAYMQ_CHAOS_SEED repeats the moments of the
kills.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cases import chaos_seed
from tests.support.stores.stores import bodies_of, open_store

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
COUNT = int(os.environ.get("RAYMQ_CHAOS_TRANSACTIONS", "10000" if SOAK else "600"))
WORKER = Path(__file__).with_name("transaction_worker.py")
LIFE_S = (0.05, 2.0)
START_TIMEOUT_S = 60.0
KILLS_MIN, KILLS_MAX = 3, 1000


def run_and_kill(root: Path, database: Path, life_s: float, count: int) -> bool:
    """Run a child process for `life_s` seconds, then kill it. Returns False if the child finished `count` transactions
    before the kill."""
    command = [sys.executable, str(WORKER), str(root), str(database), str(count)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], START_TIMEOUT_S)
    assert readable, "the child did not start"
    # Let the child process run for a random time, then kill it. The sleep is the test's own: no event ends it earlier.
    time.sleep(life_s)
    child.send_signal(signal.SIGKILL)
    output, errors = child.communicate(timeout=START_TIMEOUT_S)
    assert child.returncode in (-signal.SIGKILL, 0), errors.decode()
    assert b"Traceback" not in errors, errors.decode()
    return b"done" not in output


@pytest.mark.timeout(60 + COUNT // 2)
def test_the_outcomes_of_database_and_topic_are_equal_over_every_kill(tmp_path):
    seed = chaos_seed()
    dice, root, database, kills = random.Random(seed), tmp_path / "store", tmp_path / "outcomes.db", 0
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE begun (number INTEGER PRIMARY KEY AUTOINCREMENT)")
        connection.execute("CREATE TABLE outcomes (id TEXT PRIMARY KEY, commits BOOLEAN)")
    # Give the first child processes more transactions than any machine can finish, so that the test certainly kills
    # them.
    while run_and_kill(root, database, dice.uniform(*LIFE_S), COUNT if kills >= KILLS_MIN else sys.maxsize):
        kills += 1
        assert kills < KILLS_MAX
    rows = connection.execute("SELECT id, commits FROM outcomes").fetchall()
    connection.close()
    store = open_store(root, mapped_file_size_commit_log_bytes=1 << 20)
    found = Counter(body.decode() for queue_id in range(3) for body in bodies_of(store, "orders", queue_id))
    figures = store.transactions.figures()
    store.close()
    committed = Counter(name for name, commits in rows if commits)
    print(f"{COUNT} transactions, {kills} kills: {committed.total()} committed, {len(rows)} with an outcome")
    assert figures.waiting == []
    assert found == committed
    assert committed.total() > COUNT / 3
