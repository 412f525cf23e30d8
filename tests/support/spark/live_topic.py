"""Sends a steady stream of messages for a streaming query, and checks that the query's sink has each message exactly
once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import raymq
from tests.support.history.history import History
from tests.support.history.workload import Senders, read_back
from tests.support.spark.batch_files import BatchFiles


@contextmanager
def sending(mq: raymq.Client, topic: str) -> Iterator[None]:
    """Send about 100 messages a second to `topic` while the `with` block runs."""
    senders = Senders(mq, topic, producers=1, count=10**6, history=History(), pause_s=0.01)
    senders.start()
    try:
        yield
    finally:
        senders.stop()
        senders.join(120)


def check_sink(mq: raymq.Client, topic: str, sink: BatchFiles) -> None:
    """Check that the sink has each message of the topic exactly once, and that each repeated batch had the same
    rows."""
    stored = {
        (queue.broker_name, queue.queue_id, offset, sent.body().decode())
        for queue, messages in read_back(mq, topic).items()
        for offset, sent in enumerate(messages)
    }
    counts = Counter(sink.rows())
    doubled = {row: count for row, count in counts.items() if count > 1}
    print(f"{len(stored)} messages in {sink.count('json')} batches, {sink.count('begun')} begun")
    assert (len(stored - counts.keys()), len(doubled), len(counts.keys() - stored)) == (0, 0, 0)
    assert sink.count("different") == 0
