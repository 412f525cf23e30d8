"""The offsets of a streaming query: JSON texts in Spark's own offset log, from which any batch can be read again.

On disk
    CHECKPOINT/offsets/17       Spark writes it before batch 17 runs, and never changes it. One line per source; ours:
    {"creations":{"orders":{"broker-a":"9f…"}},"offsets":{"orders":{"broker-a":{"0":1200,"1":980}}},"partitions":4,
     "starts":{},"tags":"paid","version":1}, in one line
    CHECKPOINT/commits/17       Spark writes it when batch 17 is done

Batch 17 has the messages of each queue from its offset in file 16 up to, not including, its offset in file 17. `starts`
names the queues whose part begins elsewhere: all of them in batch 0, later the queues that are new and those that have
lost messages. `partitions` and `tags` are those of the plan, so batch 17 is the same rows in the same Spark partitions
for ever, whatever the options of a restarted query say. `creations` tells a topic from a later one of the same name,
whose offsets mean other messages; files of older versions have none, and go on as they did. Two numbers per queue and a
text per topic and broker group: nothing grows with the messages, and Spark deletes old files
(spark.sql.streaming.minBatchesToRetain).

After a crash
    before offsets/17 is there      the batch was never planned: it is planned anew, with the bounds of that moment
    after it, before commits/17     Spark runs batch 17 again from this file: the same rows
    after commits/17                the next batch begins at these offsets

Of two drivers on one checkpoint one creates the file, whole or not at all; Spark ends the other one's query.

The progress of a streaming query over topics: offsets, messages and lag, as values that print as JSON.

Spark's own progress has all of it (`query.lastProgress["sources"]`): these offsets, and the metrics that are
made here. `stream_progress` reads them back. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from raymq.client.scan.ranges import Creations
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class StreamOffsets:
    """The end of a batch, and all it takes to read that batch again once the end of the batch before is known.

    `offsets`: the offset of each queue at which the next batch begins. `starts`: the offsets at which this batch begins
    in queues where that is not the end of the batch before. `partitions`: the number of Spark partitions that the batch
    is cut for. `tags`: the subscription's expression; `sql`: the filter expression, empty for none. `creations`: by
    topic and broker group, the creation id of the topic that the offsets are of; "" for a topic that has none, and no
    entry where the id is not known.
    """

    offsets: Mapping[MessageQueue, int]
    starts: Mapping[MessageQueue, int] = field(default_factory=dict)
    partitions: int = 1
    tags: str = "*"
    sql: str = ""
    creations: Creations = field(default_factory=dict)

    def to_json(self) -> str:
        """The offsets as text: equal offsets give equal texts."""
        fields = {
            "version": FORMAT_VERSION,
            "offsets": nested(self.offsets),
            "starts": nested(self.starts),
            "partitions": self.partitions,
            "tags": self.tags,
            **({"sql": self.sql} if self.sql else {}),
            **({"creations": self.creations} if self.creations else {}),
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StreamOffsets:
        """The offsets that `to_json` made a text of; InvalidArgumentError for another text, or of a later version."""
        try:
            fields = json.loads(text)
            version = fields["version"]
            if version == FORMAT_VERSION:
                return cls(
                    dict(_flat(fields["offsets"])),
                    dict(_flat(fields["starts"])),
                    int(fields["partitions"]),
                    str(fields["tags"]),
                    str(fields.get("sql", "")),
                    {topic: dict(ids) for topic, ids in fields.get("creations", {}).items()},
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(
                f"the checkpoint's offsets are not those of a raymq stream ({error!r}): {text[:200]}; give each query "
                "a checkpoint location of its own"
            ) from None
        raise InvalidArgumentError(
            f"the checkpoint's offsets have version {version!r} and this raymq reads version {FORMAT_VERSION}; run the "
            "query with the raymq that wrote them, or a later one"
        )


def creations_of(queues: Iterable[MessageQueue], before: Creations, now: Creations) -> dict[str, dict[str, str]]:
    """The creation ids of the queues' topics, those of `now` over those of `before`."""
    merged: dict[str, dict[str, str]] = {}
    for queue in queues:
        known, present = (ids.get(queue.topic, {}).get(queue.broker_name) for ids in (before, now))
        creation_id = present or known if known is not None else present
        if creation_id is not None:
            merged.setdefault(queue.topic, {})[queue.broker_name] = creation_id
    return merged


def nested(values: Mapping[MessageQueue, int]) -> dict[str, dict[str, dict[str, int]]]:
    """Values per queue as JSON has them: by topic, broker group and queue id, in order."""
    result: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(values):
        by_broker = result.setdefault(queue.topic, {})
        by_broker.setdefault(queue.broker_name, {})[str(queue.queue_id)] = values[queue]
    return result


def _flat(by_topic: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[tuple[MessageQueue, int]]:
    for topic, by_broker in by_topic.items():
        for broker_name, by_id in by_broker.items():
            for queue_id, offset in by_id.items():
                yield MessageQueue(topic, broker_name, int(queue_id)), int(offset)


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
