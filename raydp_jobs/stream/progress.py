"""The progress of a streaming query over topics: offsets, messages and lag, as values that print as JSON.

Spark's own progress has all of it (`query.lastProgress["sources"]`): the offsets of raydp_jobs.stream.offsets and the
metrics that are made here. `stream_progress` reads them back. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from raydp_jobs.stream.offsets import StreamOffsets
from raymq.common.message import MessageQueue

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

DESCRIPTION: Final = "raymq"

OffsetsByQueue = dict[str, dict[str, dict[str, int]]]
"""Offsets by topic, broker group and queue id."""


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """The last trigger of a query, in one of its topic sources.

    `batch_id`: the batch, which has `messages` messages from `start_offsets` (None in a query's first batch) up to, not
    including, `end_offsets`. `latest_offsets` are the queues' ends at that moment, `lag` the messages between the two,
    before any filter.
    """

    source: str
    batch_id: int
    timestamp: str
    messages: int
    start_offsets: OffsetsByQueue | None
    end_offsets: OffsetsByQueue
    latest_offsets: OffsetsByQueue
    lag: int

    def to_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps(asdict(self), sort_keys=True)


def stream_progress(query: StreamingQuery) -> list[TopicProgress]:
    """The progress of a query's topic sources in its last trigger; empty before that. `query`: what
    `writeStream.start()` gave."""
    progress = query.lastProgress
    if progress is None:
        return []
    return [_of_source(progress, one) for one in progress["sources"] if one["description"].startswith(DESCRIPTION)]


def _of_source(progress: Mapping[str, Any], source: Mapping[str, Any]) -> TopicProgress:
    start, end, latest = (_fields(source[f"{name}Offset"]) for name in ("start", "end", "latest"))
    return TopicProgress(
        source["description"],
        int(progress["batchId"]),
        str(progress["timestamp"]),
        int(source["numInputRows"]),
        start["offsets"] if start else None,
        end["offsets"] if end else {},
        latest["offsets"] if latest else {},
        int(source["metrics"].get("offsetsBehindLatest", 0)),
    )


def _fields(offset: Any) -> Mapping[str, Any] | None:
    """An offset of Spark's progress, which has JSON as objects, or as text."""
    fields: Mapping[str, Any] | None = json.loads(offset) if isinstance(offset, str) else offset
    return fields


def lag_metrics(end: StreamOffsets | None, latest: Mapping[MessageQueue, int]) -> dict[str, str]:
    """The metrics of a source: how far the end of its last batch is behind the queues' ends, with the names of Spark's
    Kafka source, and in all queues together."""
    reached = end.offsets if end is not None else {}
    behind = [max(0, last - reached.get(queue, 0)) for queue, last in latest.items()] or [0]
    return {
        "offsetsBehindLatest": str(sum(behind)),
        "minOffsetsBehindLatest": str(min(behind)),
        "maxOffsetsBehindLatest": str(max(behind)),
        "avgOffsetsBehindLatest": str(sum(behind) / len(behind)),
    }
