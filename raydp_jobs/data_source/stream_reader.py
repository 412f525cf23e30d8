"""Topics as a stream of Spark 4 in Python: ``spark.readStream.format("raymq")``. Needs Spark 4.2.

A TopicSource plans the batches, as for `stream_topic`. The offsets in a checkpoint are the texts of
raydp_jobs.stream.progress, which contain everything that a batch needs: begins, ends, filters, number of partitions and
the identity of the topics. So a query may continue from a checkpoint of `stream_topic`, and `stream_topic` from a
checkpoint of this source.

    driver's node    one Python process for each query: TopicStreamReader → TopicSource → the cluster
    executors        Python workers: `read`, with a pickled reader that has only plain values

Spark asks for an initial offset, which it never stores, because the first batch's end replaces it. That end contains
the first offsets of all queues. So a batch that is repeated after a crash has the same messages, even if the repeated
query would begin elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from raydp_jobs.data_source.partitions import SourceSettings, TopicPartition, read_partition
from raydp_jobs.stream.cluster import TopicChoice, TopicCluster
from raydp_jobs.stream.planner import BatchLimits
from raydp_jobs.stream.source import MAX_TRIGGER_DELAY_S, TopicSource
from raymq.client.client import Client, connect
from raymq.client.consumer.subscription import ALL, Subscription
from raymq.client.scan.partitions import ScanPartition
from raymq.client.scan.ranges import NO_CREATIONS, text_of
from raymq.common.closing import closed_on_error
from raymq.common.errors import InvalidArgumentError
from raymq.common.identity import acting_as

INITIAL_OFFSET: Final[Mapping[str, Any]] = {"initial": True}
"""The offset of a query that has no batch yet. The offsets of TopicSource have no such field."""
_QUERY: Final = "query"
"""The id of the only query of a TopicSource."""


class UnplacedTopicCluster(TopicCluster):
    """The cluster of a stream whose tasks run anywhere: Spark's sources in Python cannot prefer a host."""

    def hosts(self, parts: Sequence[ScanPartition]) -> Sequence[Sequence[str]]:
        """Return no preferred hosts for each part."""
        return [[] for _ in parts]


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of topics. `options`: the converted options. `names`: the columns of the result.

    Spark pickles the reader for its tasks before a query uses it, so the connection opens with the first request.
    """

    def __init__(self, settings: SourceSettings, options: Mapping[str, Any], names: Sequence[str]) -> None:
        self._settings, self._options, self._names = settings, dict(options), list(names)
        self._client: Client | None = None
        self._source: TopicSource | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return the offset of a query without a checkpoint. The first batch finds the begins of the queues."""
        return dict(INITIAL_OFFSET)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return the limit of a batch: TopicSource applies the options, so Spark only has to pass a limit back."""
        limits = self._limits()
        rows = limits.max_offsets or limits.min_offsets
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Fix the end of a query with the trigger availableNow at the present ends of the queues."""
        self._topics().prepare_available_now(_QUERY)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return the end of the batch that begins at `start`; returns `start` if there is nothing to read. Raises the
        errors of `TopicSource.latest_offset`."""
        end = self._topics().latest_offset(_QUERY, offset_text(start), unlimited=isinstance(limit, ReadAllAvailable))
        return start if end is None else json.loads(end)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return the last known ends of the queues, for the query's progress."""
        offsets: dict[str, Any] = json.loads(self._topics().report_latest_offset(_QUERY))
        return offsets

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[TopicPartition]:
        """Return the parts of the batch between two offsets. Equal offsets always give equal parts. Raises
        InvalidArgumentError for a batch that closes time windows, which this source cannot repeat."""
        end_text = offset_text(end)
        if end_text is None or start == end:
            return []
        if self._topics().is_closing_row(end_text):
            raise InvalidArgumentError(
                'format("raymq") cannot repeat the batch in which `raymq job windowed-counts --close` closes the last '
                "time windows: run that job again with this checkpoint, or use another checkpoint directory"
            )
        parts, tags, sql = self._topics().batch(offset_text(start), end_text)
        wanted = Subscription.parse("any", tags).tags
        return [TopicPartition(part.ranges, wanted, sql, NO_CREATIONS) for part, _ in parts]

    def read(self, partition: TopicPartition) -> Iterator[pa.RecordBatch]:
        """Return the messages of a part of a batch, as Arrow batches."""
        return read_partition(partition, self._settings, self._options, self._names)

    def stop(self) -> None:
        """Close the connection, because the query has ended."""
        source, client, self._source, self._client = self._source, self._client, None, None
        try:
            if source is not None:
                source.stop(_QUERY)
        finally:
            if client is not None:
                client.close()

    def _limits(self) -> BatchLimits:
        options = self._options
        return BatchLimits(
            max_offsets=options.get("max_offsets_per_trigger"),
            min_offsets=options.get("min_offsets_per_trigger"),
            min_partitions=options.get("min_partitions"),
            parallelism=self._settings.parallelism,
            tags=options.get("tags", ALL),
            sql=text_of(options.get("expression")) or "",
            fail_on_data_loss=options.get("fail_on_data_loss", True),
        )

    def _topics(self) -> TopicSource:
        """Return the source of the batches. Connects to the cluster if this is the first request."""
        if self._source is None:
            options, at = self._options, self._settings.address
            with acting_as(at.user):
                client = connect(at.address, namespace=at.namespace)
            starting = {name: value for name, value in options.items() if name.startswith("starting_")}
            group = options.get("commit_group")
            delay_s = options.get("max_trigger_delay_s", MAX_TRIGGER_DELAY_S)
            with closed_on_error(client.close, "the connection of the query"):
                choice = TopicChoice(options.get("topic"), options.get("topic_pattern"))
                cluster = UnplacedTopicCluster(choice, starting, group=group, client=client)
                self._source = TopicSource(cluster, self._limits(), max_trigger_delay_s=delay_s)
            self._client = client
        return self._source


def offset_text(offset: Mapping[str, Any]) -> str | None:
    """Return an offset that Spark passes as the text of StreamOffsets; None for the offset of a query that has no batch
    yet."""
    return None if offset == INITIAL_OFFSET else json.dumps(offset, sort_keys=True, separators=(",", ":"))
