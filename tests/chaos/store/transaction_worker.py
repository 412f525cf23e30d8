"""The child process of test_store_transaction_kill.py: runs transactions against a store of its own, until it is
killed.

    python tests/chaos/store/transaction_worker.py DIRECTORY DATABASE TRANSACTIONS

The local part of a transaction is a row in a database file. When the store asks for the outcome of an open transaction,
the row decides: if the transaction has a row, the row is the outcome. Otherwise the check inserts a row that forbids a
later commit. This check also ends the open transactions of the previous process. The program writes the line `open`
when the store is open, and `done` after all TRANSACTIONS transactions have an outcome.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from raymq.common.message import Message
from raymq.records.format.decode import decode_record
from storage.message_store import MessageStore
from tests.support.stores.stores import open_store
from tests.support.stores.transactions import GROUP, Transaction, half_batch

THREADS = 8


class Worker:
    """Runs the transactions of one process against its store and its database."""

    def __init__(self, store: MessageStore, database: str) -> None:
        self._store, self._database = store, database

    def execute(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        connection = sqlite3.connect(self._database, timeout=60)
        try:
            with connection:
                # Turn off the database's flushes to disk: SIGKILL ends the process, but the machine keeps its power, so
                # no written data is lost.
                connection.execute("PRAGMA synchronous=OFF")
                return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    def run(self, _: int) -> None:
        """Run one transaction with a random outcome. Some transactions are left open, so that a later check
        ends them."""
        number = int(str(self.execute("INSERT INTO begun DEFAULT VALUES RETURNING number")[0][0]))
        kind = random.choice(("commit", "commit", "commit", "rollback", "silent", "unknown"))
        name = f"{kind}-{number}"
        batch = half_batch([Message("orders", name.encode())], ids=[name], queue_id=number % 3)
        [result] = self._store.append([batch])
        one = Transaction(self._store, name, result.queue_offset, result.physical_offset)
        if kind == "unknown":
            return
        self.execute("INSERT INTO outcomes VALUES (?, ?)", name, kind != "rollback")
        if kind == "rollback":
            one.rollback()
        elif kind == "commit":
            one.commit()
            if number % 5 == 0:
                assert one.commit().duplicate

    def answer_checks(self) -> int:
        """Run one check of open transactions in the store, and commit or roll back each transaction that the check
        returns. Returns the number of these transactions."""
        part = self._store.transactions.check([GROUP])
        for check in part.checks:
            name = check.transaction_id
            assert decode_record(check.record).body == name.encode()
            self.execute("INSERT OR IGNORE INTO outcomes VALUES (?, ?)", name, False)
            [(commits,)] = self.execute("SELECT commits FROM outcomes WHERE id = ?", name)
            one = Transaction(self._store, name, check.queue_offset, check.physical_offset)
            (one.commit if commits else one.rollback)(from_transaction_check=True)
        return len(part.checks)


def main() -> None:
    directory, database, count = sys.argv[1:]
    store = open_store(
        Path(directory),
        mapped_file_size_commit_log_bytes=1 << 20,
        flush_interval_consume_queue_ms=50,
        transaction_time_out_ms=1,
    )
    os.write(1, b"open\n")
    worker = Worker(store, database)
    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            [(begun,)] = worker.execute("SELECT count(*) FROM begun")
            if int(str(begun)) >= int(count):
                break
            list(pool.map(worker.run, range(50)))
            worker.answer_checks()
    while store.transactions.figures().waiting:
        time.sleep(0.002)
        worker.answer_checks()
    store.close()
    os.write(1, b"done\n")


if __name__ == "__main__":
    main()
