"""The offsets of a streaming query: JSON texts in Spark's own offset log, from which any batch can be read again.

On disk
    CHECKPOINT/offsets/17       Spark writes it before batch 17 runs, and never changes it. One line per source, such as
    {"creations":{"orders":{"broker-a":"9f…"}},"offsets":{"orders":{"broker-a":{"0":1200,"1":980}}},"partitions":4,
     "starts":{},"tags":"paid","version":1}, in one line
    CHECKPOINT/commits/17       Spark writes it after batch 17

Batch 17 has the messages of each queue from the queue's offset in file 16 up to, not including, its offset in file 17.
`starts` has the first offsets of queues whose range begins elsewhere: all queues in batch 0, later new queues and
queues that have lost messages. `partitions` and `tags` are part of the plan. So batch 17 always has the same rows in
the same Spark partitions, even if a restarted query has other options. `creations` distinguishes a topic from a later
topic of the same name, whose offsets mean other messages. Files of older versions have no `creations`, and remain
valid. A file contains two numbers per queue and a text per topic and broker group; its size does not depend on the
number of messages. Spark deletes old files (spark.sql.streaming.minBatchesToRetain).

A query may close its last time windows when it has read all messages (raydp_jobs.stream.source). Two batches without
messages do so. Their files have version 2 and a number `closing`. An older raymq refuses these files. Otherwise an
older raymq would read on, and Spark would drop each further message, because the message's window is closed.

After a crash
    before offsets/17 exists        the batch was never planned: it is planned again, with the bounds of that moment
    before commits/17 exists        Spark runs batch 17 again from this file: the same rows
    after commits/17                the next batch begins at these offsets

If two drivers use one checkpoint, only one of them can create the file, completely or not at all. Spark ends the query
of the other driver.

The module also contains the progress of a streaming query over topics: offsets, messages and lag, as values that print
as JSON. Spark's own progress contains them (`query.lastProgress["sources"]`), with the metrics of this module.
`stream_progress` reads them. The module does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from raymq.client.scan.ranges import Creations
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

FORMAT_VERSION: Final = 1
_CLOSING_VERSION: Final = 2
"""The format version of offsets that close a query's time windows."""
CLOSING_TIME_US: Final = 2**63 - 1
"""Event time of the row that closes a query's time windows, in microseconds since 1970: the latest time that Spark can
represent. No message has this time, because the times of messages are whole milliseconds."""


class WindowClosing(IntEnum):
    """How far a query has closed its time windows.

    `NO`: the query has not begun to close them. `ROW`: the batch has one row, with the time CLOSING_TIME_US. At the end
    of the batch, the row moves the watermark past all windows. `LAST`: the query's last batch, which is empty. Spark
    compares the windows with the moved watermark in this batch, and returns all of them.
    """

    NO = 0
    ROW = 1
    LAST = 2


@dataclass(frozen=True, slots=True)
class StreamOffsets:
    """The end of a batch. Together with the end of the previous batch, it is all that is needed to read the batch
    again.

    `offsets`: for each queue, the offset at which the next batch begins. `starts`: the offsets at which this batch
    begins, for queues in which it does not begin at the end of the previous batch. `partitions`: the number of Spark
    partitions of the batch. `tags`: the subscription's expression. `sql`: the filter expression, empty for none.
    `creations`: by topic and broker group, the creation id of the topic to which the offsets belong; "" for a topic
    without an id, and no entry if the id is unknown. `closing`: whether the batch closes the query's time windows.
    """

    offsets: Mapping[MessageQueue, int]
    starts: Mapping[MessageQueue, int] = field(default_factory=dict)
    partitions: int = 1
    tags: str = "*"
    sql: str = ""
    creations: Creations = field(default_factory=dict)
    closing: WindowClosing = WindowClosing.NO

    def to_json(self) -> str:
        """Encode the offsets as a JSON text. Equal offsets give equal texts."""
        fields = {
            "version": _CLOSING_VERSION if self.closing else FORMAT_VERSION,
            "offsets": nested(self.offsets),
            "starts": nested(self.starts),
            "partitions": self.partitions,
            "tags": self.tags,
            **({"sql": self.sql} if self.sql else {}),
            **({"creations": self.creations} if self.creations else {}),
            **({"closing": int(self.closing)} if self.closing else {}),
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StreamOffsets:
        """Decode a JSON text that `to_json` has written. Raises InvalidArgumentError for any other text, and for a text
        of a later version."""
        try:
            fields = json.loads(text)
            version = fields["version"]
            if version in (FORMAT_VERSION, _CLOSING_VERSION):
                return cls(
                    dict(_flat(fields["offsets"])),
                    dict(_flat(fields["starts"])),
                    int(fields["partitions"]),
                    str(fields["tags"]),
                    str(fields.get("sql", "")),
                    {topic: dict(ids) for topic, ids in fields.get("creations", {}).items()},
                    WindowClosing(fields["closing"]) if version == _CLOSING_VERSION else WindowClosing.NO,
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(
                f"the checkpoint does not contain the offsets of a raymq stream ({error!r}): {text[:200]}; use a "
                "separate checkpoint location for each query"
            ) from None
        raise InvalidArgumentError(
            f"the checkpoint's offsets have version {version!r}, but this version of raymq reads versions "
            f"{FORMAT_VERSION} and {_CLOSING_VERSION}; run the query with the version of raymq that wrote the "
            "checkpoint, or with a later version"
        )


def creations_of(queues: Iterable[MessageQueue], before: Creations, now: Creations) -> dict[str, dict[str, str]]:
    """Return the creation ids of the topics of `queues`. `now`: the present ids. `before`: the earlier ids, used if
    `now` has no id for a topic."""
    merged: dict[str, dict[str, str]] = {}
    for queue in queues:
        known, present = (ids.get(queue.topic, {}).get(queue.broker_name) for ids in (before, now))
        creation_id = present or known if known is not None else present
        if creation_id is not None:
            merged.setdefault(queue.topic, {})[queue.broker_name] = creation_id
    return merged


def nested(values: Mapping[MessageQueue, int]) -> dict[str, dict[str, dict[str, int]]]:
    """Convert numbers per queue to nested mappings for JSON: by topic, broker group and queue id, sorted."""
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
"""Offsets of queues, in nested mappings by topic, broker group and queue id."""


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """The progress of a query's last trigger, for one of the query's topic sources.

    `batch_id`: the batch of the trigger. `messages`: the batch's number of messages, from `start_offsets` (None in a
    query's first batch) up to, not including, `end_offsets`. `latest_offsets`: the ends of the queues at the time of
    the trigger. `lag`: the number of messages between `end_offsets` and `latest_offsets`, before any filter.
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
        """Return this progress of a topic (offsets, messages and lag) as a JSON object."""
        return json.dumps(asdict(self), sort_keys=True)


def stream_progress(query: StreamingQuery) -> list[TopicProgress]:
    """Return the progress of a query's topic sources in the query's last trigger; empty before the first trigger.
    `query`: the result of `writeStream.start()`."""
    progress = query.lastProgress
    return [] if progress is None else topic_sources(progress)


def topic_sources(progress: Mapping[str, Any]) -> list[TopicProgress]:
    """Return the topic sources of one trigger. `progress`: an element of Spark's `query.recentProgress`."""
    return [_of_source(progress, one) for one in progress["sources"] if one["description"].startswith(DESCRIPTION)]


def batch_size(source: TopicProgress) -> int:
    """Return the number of offsets in a batch of a topic source, before any filter. Of a query's first batch, whose
    start Spark's progress does not have, return its number of rows."""
    if source.start_offsets is None:
        return source.messages
    starts = dict(_flat(source.start_offsets))
    return sum(max(0, end - starts.get(queue, 0)) for queue, end in _flat(source.end_offsets))


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
    """Return an offset of Spark's progress as a mapping. Spark's progress contains JSON as objects or as text."""
    fields: Mapping[str, Any] | None = json.loads(offset) if isinstance(offset, str) else offset
    return fields


def lag_metrics(end: StreamOffsets | None, latest: Mapping[MessageQueue, int]) -> dict[str, str]:
    """Return the lag metrics of a topic source, under the names that Spark's Kafka source uses. The lag is the number
    of messages between the end of the last batch and the end of a queue. The metrics include the total over all queues.
    """
    reached = end.offsets if end is not None else {}
    behind = [max(0, last - reached.get(queue, 0)) for queue, last in latest.items()] or [0]
    return {
        "offsetsBehindLatest": str(sum(behind)),
        "minOffsetsBehindLatest": str(min(behind)),
        "maxOffsetsBehindLatest": str(max(behind)),
        "avgOffsetsBehindLatest": str(sum(behind) / len(behind)),
    }
