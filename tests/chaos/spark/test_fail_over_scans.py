"""The storage master fails over during a long read of ranges: the same rows, in place and over lanes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import raymq
from raymq.remoting.storage_clients import StorageClients
from raymq.scan import range_reader
from raymq.scan.batches import open_ranges
from raymq.scan.partitions import plan_partitions
from raymq.scan.queue_bounds import ClusterQueues
from raymq.scan.ranges import plan_ranges
from tests.support.clusters.cluster import one_group
from tests.support.replicas.ray_replicas import RayReplicas

REPLICAS = 3
MESSAGES = 6000
FAILOVERS = 2
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")

Row = tuple[int, int, bytes]


def rows(batches: Iterator[Any]) -> list[Row]:
    return [
        (row["queue_id"], row["queue_offset"], row["body"])
        for batch in batches
        for row in batch.select(["queue_id", "queue_offset", "body"]).to_pylist()
    ]


def test_a_long_read_goes_on_at_the_new_master_with_the_same_rows(
    mq: raymq.Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "RANGE_CHUNK_MESSAGES", 50)
    replicas = RayReplicas("broker-a", REPLICAS)
    replicas.settled()
    with mq.producer() as producer:
        results = producer.send_batch([raymq.Message(topic, b"%d" % number) for number in range(MESSAGES)])
    sent = sorted((one.queue.queue_id, one.queue_offset, b"%d" % number) for number, one in enumerate(results))
    source = ClusterQueues(mq.routes, mq.storages)
    ranges = plan_ranges(source, topic)
    assert sum(part.size for part in plan_partitions(source, ranges, min_partitions=5)) == MESSAGES

    with closing(StorageClients("another-node")) as far:

        def read(storages: StorageClients) -> Iterator[Any]:
            return open_ranges(mq.routes, storages, ranges, fail_on_data_loss=True)

        reads: list[tuple[Iterator[Any], list[Row]]] = [(read(mq.storages), []), (read(far), [])]
        for _ in range(FAILOVERS):
            for batches, seen in reads:
                seen.extend(rows(iter([next(batches)])))
            replicas.fail_over()
        for batches, seen in reads:
            assert 0 < len(seen) < MESSAGES
            seen.extend(rows(batches))
            assert sorted(seen) == sent
            assert len(seen) == len(set(seen)) == MESSAGES
