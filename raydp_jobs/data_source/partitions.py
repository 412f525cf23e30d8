"""The partitions of ``format("raymq")``: the part of a batch or of a stream that one Spark task reads.

The objects of this module travel from the planning processes to the tasks as pickles, so they contain only plain
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from raydp_jobs.source.reader import read_ranges
from raydp_jobs.worker_client import ClusterAddress
from raymq.client.scan.ranges import Creations, OffsetRange


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """The facts of a Spark session that its data source needs: the address of the cluster, the number of tasks that run
    at the same time, and whether the session lets filters be pushed down."""

    address: ClusterAddress
    parallelism: int
    push_filters: bool


class TopicPartition(InputPartition):
    """The part of a read that one Spark task reads: offset ranges, and the filters of the store. `sql`: a filter
    expression; empty for none. `creations`: the creation ids of the topics when the read was planned."""

    def __init__(self, ranges: Sequence[OffsetRange], tags: frozenset[str], sql: str, creations: Creations) -> None:
        super().__init__(None)
        self.ranges, self.tags, self.sql, self.creations = tuple(ranges), tags, sql, creations


def read_partition(
    partition: TopicPartition, settings: SourceSettings, options: Mapping[str, Any], names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Return the messages of a partition as Arrow batches, in a Spark worker. Raises the errors of `open_ranges`."""
    return read_ranges(
        partition.ranges,
        settings.address,
        partition.tags,
        options.get("fail_on_data_loss", True),
        names,
        sql=partition.sql or None,
        unreadable=options.get("unreadable", "null"),
        creations=partition.creations,
    )
