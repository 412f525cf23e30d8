"""A user's program that sends messages until it is killed. Tests that kill all processes at once use it.

    python tests/chaos/nodes/sender.py TOPIC PRODUCER FILE

The program connects to raymq in the Ray cluster that RAY_ADDRESS names. It writes a line to FILE before it sends a
message, and another line as soon as the message is acknowledged (tests.support.history.history.HistoryFile). Each line
is in the file before the program continues.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import raymq
from tests.support.history.history import HistoryFile, Outcome, Sent
from tests.support.history.workload import outcome_of

PAUSE_EVERY = 50


def main(topic: str, producer_number: int, path: Path) -> None:
    with raymq.connect() as mq, mq.producer(f"sender-{producer_number}") as producer, HistoryFile(path) as journal:
        sequence = 0
        while True:
            run = [Sent(producer_number, sequence + index) for index in range(PAUSE_EVERY)]
            sequence += len(run)
            journal.handed_over(run)
            futures = [producer.send_async(raymq.Message(topic, sent.body()), sharding_key="one") for sent in run]
            for sent, future in zip(run, futures, strict=True):
                operation = outcome_of(sent, future)
                if operation.outcome is not Outcome.UNKNOWN:
                    journal.ended([operation])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
