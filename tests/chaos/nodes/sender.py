"""A user's program that sends messages until it is killed. Tests that kill all processes or cut networks use it.

    python tests/chaos/nodes/sender.py TOPIC PRODUCER FILE [SEND_TIMEOUT_S]

The program connects to raymq in the Ray cluster that RAY_ADDRESS names. It writes a line to FILE before it sends a
message, and another line as soon as the send has ended (tests.support.history.history.HistoryFile). Each line is in the
file before the program continues.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import raymq
from tests.support.history.history import HistoryFile, Sent
from tests.support.history.workload import outcome_of

PAUSE_EVERY = 50
PAUSE_S = 0.02
"""The pause after each PAUSE_EVERY messages. It leaves the processors to the cluster, and keeps histories short."""
SEND_TIMEOUT_S = 30.0


def main(topic: str, producer_number: int, path: Path, send_timeout_s: float) -> None:
    with (
        raymq.connect() as mq,
        mq.producer(f"sender-{producer_number}", send_timeout_s=send_timeout_s) as producer,
        HistoryFile(path) as journal,
    ):

        def begin(sent: Sent) -> Future[raymq.SendResult]:
            """Begin to send a message. If the producer refuses the message at once, the future has the error."""
            try:
                return producer.send_async(raymq.Message(topic, sent.body()), sharding_key="one")
            except raymq.RaymqError as error:
                refused: Future[raymq.SendResult] = Future()
                refused.set_exception(error)
                return refused

        sequence = 0
        while True:
            run = [Sent(producer_number, sequence + index) for index in range(PAUSE_EVERY)]
            sequence += len(run)
            journal.handed_over(run)
            futures = [begin(sent) for sent in run]
            for sent, future in zip(run, futures, strict=True):
                journal.ended([outcome_of(sent, future)])
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    topic, producer_number, path, *more = sys.argv[1:]
    main(topic, int(producer_number), Path(path), float(more[0]) if more else SEND_TIMEOUT_S)
