"""Storages, brokers and producers of transactions are killed, also several at once, while the producers work.

The local transactions are rows of a database file. Each message that the database has committed is in the log once,
none that was rolled back is, and none whose outcome nobody knows: the outcomes of database and topic are equal.

RAYMQ_CHAOS_TRANSACTIONS (default 300, 10,000 with RAYMQ_SOAK=1) sets how many there are, RAYMQ_CHAOS_SEED repeats the
faults.
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
from tests.support.clusters.cluster import SETTINGS as CLUSTER_SETTINGS, Sandbox
from tests.support.clusters.storm import Storm, Weather
from tests.support.history.waiting import eventually

SEED = int(os.environ.get("RAYMQ_CHAOS_SEED", str(random.SystemRandom().randrange(10**6))))
SOAK = os.environ.get("RAYMQ_SOAK") == "1"
COUNT = int(os.environ.get("RAYMQ_CHAOS_TRANSACTIONS", "10000" if SOAK else "300"))
PRODUCERS = 3
STORM_MAX_S = 1800.0
SETTLED_S = 180.0
"""Generous: a process that was killed takes its time to start, and a round of checks comes each second."""
WEATHER = Weather(
    kills={"Storage": 3, "Broker": 2, "Payer": 2}, stops={"Storage": 1}, stop_s=(0.5, 2.0), calm_s=(2.0, 5.0), at_once=3
)
SETTINGS = CLUSTER_SETTINGS.replace(
    "  transaction_time_out_ms", "  transaction_check_max: 60\n  transaction_time_out_ms"
)
"""A check is lost with each producer or broker that is killed, and a round comes each second."""


def payer_class() -> Any:
    """The actor that carries out transactions. Made in a function, so that it travels by value."""

    class Payer:
        """Carries out transactions until the database has enough. Restarted by Ray when it is killed."""

        def __init__(self, topic: str, database: str, count: int, number: int) -> None:
            import threading

            self._topic, self._database, self._count = topic, database, count
            self._dice = random.Random(f"{number} {time.time_ns()}")
            threading.Thread(target=self._work, daemon=True).start()

        def ping(self) -> int:
            """Its process."""
            return os.getpid()

        def _execute(self, statement: str, *values: Any) -> list[Any]:
            connection = sqlite3.connect(self._database, timeout=60)
            try:
                with connection:
                    return connection.execute(statement, values).fetchall()
            finally:
                connection.close()

        def _work(self) -> None:
            mq = raymq.connect()
            payers = mq.transaction_producer("payers", check=self._check, check_threads=2)
            strangers = mq.transaction_producer("strangers", check=lambda message: None)
            while True:
                [(number,)] = self._execute("INSERT INTO begun DEFAULT VALUES RETURNING number")
                if number > self._count:
                    time.sleep(1)  # from here on it only answers checks
                    continue
                kind = self._dice.choices(("commit", "rollback", "silent", "raise", "unknown"), (12, 4, 2, 1, 1))[0]
                message = raymq.Message(self._topic, f"{kind} {number}".encode(), keys=[str(number)])
                producer = strangers if kind == "unknown" else payers
                try:
                    producer.send_in_transaction(message, self._local, kind)
                except raymq.RaymqError:
                    continue  # the half message may be stored: then a check ends it

        def _local(self, transaction: Any, kind: str) -> Any:
            from raymq.protocol.transactions import LocalTransactionState as State

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
            from raymq.protocol.transactions import LocalTransactionState as State

            body = message.body.decode()
            # Whoever writes first decides: if the producer died before its local transaction, there will be none.
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
    """The transactions that were begun."""
    return int(rows(database, "SELECT max(number) FROM begun")[0][0] or 0)


def make_database(path: Path) -> None:
    connection = sqlite3.connect(path, timeout=60)
    with connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE begun (number INTEGER PRIMARY KEY AUTOINCREMENT)")
        connection.execute("CREATE TABLE outcomes (id TEXT PRIMARY KEY, body TEXT, commits BOOLEAN)")
    connection.close()


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


@pytest.mark.timeout(STORM_MAX_S + 600)
def test_committed_is_visible_once_and_nothing_else_ever(
    mq: raymq.Client, box: Sandbox, topic: str, tmp_path: Path
) -> None:
    print(f"RAYMQ_CHAOS_SEED={SEED}")
    database = tmp_path / "payments.db"
    make_database(database)
    options = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": 0}
    payer = ray.remote(**options)(payer_class())
    payers = [payer.remote(topic, str(database), COUNT, number) for number in range(PRODUCERS)]
    assert len(set(ray.get([one.ping.remote() for one in payers], timeout=120))) == PRODUCERS
    storm = Storm(WEATHER, random.Random(SEED), STORM_MAX_S)
    storm.start()
    try:
        eventually(lambda: begun(database) > COUNT, f"{COUNT} transactions", STORM_MAX_S)
    finally:
        storm.stop()
        print("faults", *storm.faults, sep="\n  ")
    eventually(lambda: open_ones(mq) == 0, "each transaction has its outcome", SETTLED_S)
    found = visible(mq, topic)
    for one in payers:
        ray.kill(one)
    figures = [sum(getattr(row, name) for row in mq.admin.transactions().values()) for name in ("given_up", "checked")]
    print(f"{COUNT} transactions, {len(storm.faults)} faults, {found.total()} visible, given up and checked: {figures}")
    assert found == Counter(body for (body,) in rows(database, "SELECT body FROM outcomes WHERE commits"))
    assert not [body for body in found if body.startswith(("rollback", "unknown"))]
    assert found.total() > COUNT / 4
