"""Test of transactions under faults: replicas of a broker group, masters among them, brokers and producers of
transactions are killed, several at once, while the producers work.

The local transactions are rows of a database file. The topic must have each message whose row the database has
committed, exactly once. It must have no rolled-back message, and no transaction may stay without an outcome.

The test injects faults for at least 15 s, and until RAYMQ_CHAOS_TRANSACTIONS transactions have run (default 200, 10,000
with RAYMQ_SOAK=1). RAYMQ_CHAOS_SEED repeats the faults.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray

import raymq
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import one_group
from tests.support.clusters.storm import Storm, Weather
from tests.support.history.log_rules import check_log
from tests.support.history.observations import Observation, Observations, Seen
from tests.support.history.waiting import eventually
from tests.support.history.watcher import Watcher

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
COUNT = int(os.environ.get("RAYMQ_CHAOS_TRANSACTIONS", "10000" if SOAK else "200"))
PRODUCERS = 3
THREADS = 6
"""Number of transactions that each producer runs at the same time."""
STORM_S = 3000.0 if SOAK else 15.0
SETTLED_S = 180.0
"""Maximum number of seconds, after the faults have ended, until all transactions have an outcome. The limit is
generous, because a killed process starts slowly and checks run only once a second."""
WEATHER = Weather(
    kills={"Storage": 3, "Broker": 2, "Payer": 2}, stops={"Storage": 1}, stop_s=(0.5, 2.0), calm_s=(2.0, 6.0), at_once=3
)
SETTINGS = (
    one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}").replace(
        "store:\n", "store:\n  transaction_check_max: 60\n  transaction_time_out_ms: 2000\n"
    )
    + "broker:\n  transaction_check_interval_ms: 1000\n"
)
"""Cluster settings that allow more checks per transaction than the default. Each kill of a producer or broker loses a
check, and checks run each second."""


def payer_class() -> Any:
    """Return the actor class that runs transactions. The class is nested so that it is pickled by value, because Ray's
    workers cannot import test modules."""

    class Payer:
        """An actor that runs transactions until the test has closed the database. Ray restarts the actor after
        a kill."""

        def __init__(self, topic: str, database: str, threads: int) -> None:
            import threading

            self._topic, self._database = topic, database
            mq = raymq.connect()
            self._payers = mq.transaction_producer("payers", check=self._check, check_threads=4)
            self._strangers = mq.transaction_producer("strangers", check=lambda message: None)
            self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
            for thread in self._threads:
                thread.start()

        def ping(self) -> int:
            """Return the actor's process id."""
            return os.getpid()

        def working(self) -> int:
            """Return the number of threads that still run transactions."""
            return sum(thread.is_alive() for thread in self._threads)

        def _execute(self, statement: str, *values: Any) -> list[Any]:
            connection = sqlite3.connect(self._database, timeout=60)
            try:
                with connection:
                    return connection.execute(statement, values).fetchall()
            finally:
                connection.close()

        def _work(self) -> None:
            dice = random.Random()
            while not self._execute("SELECT 1 FROM closed"):
                [(number,)] = self._execute("INSERT INTO begun DEFAULT VALUES RETURNING number")
                kind = dice.choices(("commit", "rollback", "silent", "raise", "unknown"), (12, 4, 2, 1, 1))[0]
                message = raymq.Message(self._topic, f"{kind} {number}".encode(), keys=[str(number)])
                producer = self._strangers if kind == "unknown" else self._payers
                try:
                    producer.send_in_transaction(message, self._local, kind)
                except raymq.RaymqError:
                    # The half message may be stored although the send raised an error. In this case a transaction check
                    # of the broker ends the transaction.
                    continue
                # Pause between transactions, so that the faults hit many transactions.
                time.sleep(dice.uniform(0, 0.2))

        def _local(self, transaction: Any, kind: str) -> Any:
            from raymq.common.protocol.transactions import LocalTransactionState as State

            if kind == "unknown":
                return None
            commits = kind != "rollback"
            body = transaction.message.body.decode()
            self._execute("INSERT INTO outcomes VALUES (?, ?, ?)", transaction.message_id, body, commits)
            if kind == "raise":
                raise RuntimeError("after the local transaction")
            if kind == "silent":
                return State.UNKNOW
            return State.COMMIT_MESSAGE if commits else State.ROLLBACK_MESSAGE

        def _check(self, message: Any) -> Any:
            from raymq.common.protocol.transactions import LocalTransactionState as State

            body = message.body.decode()
            # The first row that is inserted for a transaction decides its outcome. If the transaction has no row yet,
            # its producer may have died before the local transaction. So insert a row for a rollback: it also prevents
            # a late local transaction from committing.
            self._execute("INSERT OR IGNORE INTO outcomes VALUES (?, ?, ?)", message.message_id, body, False)
            [(commits,)] = self._execute("SELECT commits FROM outcomes WHERE id = ?", message.message_id)
            return State.COMMIT_MESSAGE if commits else State.ROLLBACK_MESSAGE

    return Payer


def rows(database: Path, statement: str) -> list[Any]:
    connection = sqlite3.connect(database, timeout=60)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def begun(database: Path) -> int:
    """Return the number of transactions that the producers have begun."""
    return int(rows(database, "SELECT max(number) FROM begun")[0][0] or 0)


def close(database: Path) -> None:
    """Mark the database as closed, so that the producers begin no more transactions."""
    connection = sqlite3.connect(database, timeout=60)
    with connection:
        connection.execute("INSERT INTO closed VALUES (1)")
    connection.close()


def make_database(path: Path) -> None:
    connection = sqlite3.connect(path, timeout=60)
    with connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE begun (number INTEGER PRIMARY KEY AUTOINCREMENT)")
        connection.execute("CREATE TABLE closed (at INTEGER)")
        connection.execute("CREATE TABLE outcomes (id TEXT PRIMARY KEY, body TEXT, commits BOOLEAN)")
    connection.close()


def working(payers: list[Any]) -> int:
    """Return the number of threads, in all producers, that still run transactions."""
    return sum(ray.get([payer.working.remote() for payer in payers], timeout=120))


def visible(mq: raymq.Client, topic: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in mq.admin.describe_topic(topic):
        offset = entry.min_offset
        while offset < entry.max_offset:
            result = mq.admin.pull(entry.queue, offset, max_messages=1000)
            found.update(message.body.decode() for message in result.messages)
            offset = result.next_offset
    return found


def open_ones(mq: raymq.Client) -> int:
    waiting = [row for found in mq.admin.transactions().values() for row in found.waiting]
    return sum(row.waiting for row in waiting if row.producer_group == "payers")


@pytest.mark.timeout(STORM_S + 600)
def test_only_committed_messages_become_visible_and_each_once(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    seed, seen = chaos_seed(), Observations()
    database = tmp_path / "payments.db"
    make_database(database)
    payer = ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)(payer_class())
    payers = [payer.remote(topic, str(database), THREADS) for _ in range(PRODUCERS)]
    assert len(set(ray.get([one.ping.remote() for one in payers], timeout=120))) == PRODUCERS
    eventually(lambda: begun(database) > 20, "transactions")
    storm = Storm(WEATHER, random.Random(seed), STORM_S)
    with Watcher(mq, topic, group, patient=True, observations=seen) as reader:
        storm.start()
        try:
            eventually(lambda: begun(database) >= COUNT, f"{COUNT} transactions", STORM_S + SETTLED_S)
            storm.stop() if SOAK else storm.join()
        finally:
            storm.stop()
            print("faults", *storm.faults, f"{begun(database)} transactions", sep="\n  ")
        close(database)
        # A thread ends after the transaction that it has begun. Until then it can still store a half message, which the
        # counts and reads below would miss.
        eventually(lambda: working(payers) == 0, "the last transaction of each thread has ended", SETTLED_S)
        eventually(lambda: open_ones(mq) == 0, "each transaction has its outcome", SETTLED_S)
        found = visible(mq, topic)
        eventually(lambda: reader.failed or len(reader.seen) >= found.total(), "all at the reader", SETTLED_S)
    reader.check()
    figures = list(mq.admin.transactions().values())
    for one in payers:
        ray.kill(one)
    print(f"{len(storm.faults)} faults, {found.total()} visible; since the stores' last start: {figures}")
    committed = Counter(body for (body,) in rows(database, "SELECT body FROM outcomes WHERE commits"))
    assert found - committed == Counter(), "visible, or twice, without being committed"
    assert committed - found == Counter(), "committed, and not visible"
    assert found.total() > COUNT / 4
    for (body,) in rows(database, "SELECT body FROM outcomes WHERE NOT commits"):
        seen.add(Observation(Seen.ABORTED, 0.0, 0.0, text=body.encode()))
    check_log(seen, random.Random(seed), ("two values", "two places", "skipped", "aborted seen"))
