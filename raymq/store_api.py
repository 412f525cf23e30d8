"""What goes into a message store and what comes out: values that both ends of the wire know.

A `queue_offset` counts the messages of a queue from 0, a `physical_offset` the bytes of the commit log. An end offset
is the one that the next message will get.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymq.message import PullStatus, SendStatus


@dataclass(frozen=True, slots=True)
class AppendResult:
    """Where one batch is. Its i-th message has queue offset `queue_offset + i`, unless `queue_offsets` lists them.

    `status` is SEND_OK, or FLUSH_DISK_TIMEOUT when the batch is stored but was not known to be on disk in time.
    `physical_offset` is that of the first message; `physical_offsets` lists all of them when the records do not lie
    back to back (the batch went over the end of a file). `duplicate`: every message was stored before, by an earlier
    send of the same batch; nothing was written now. `queue_offsets` is given only when a crash cut the batch and
    another producer wrote to the queue before the rest came again.
    """

    status: SendStatus
    queue_offset: int
    physical_offset: int
    store_timestamp_ms: int
    duplicate: bool = False
    physical_offsets: tuple[int, ...] | None = None
    queue_offsets: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Read a queue from `queue_offset` on, at most `max_messages`, only tag codes in `tag_codes` (None: all)."""

    topic: str
    queue_id: int
    queue_offset: int
    max_messages: int
    tag_codes: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What one request found. Go on at `next_offset`, which may have moved past messages that the tags excluded.

    `records` are `count` whole records back to back. OFFSET_ILLEGAL: the offset asked for is outside
    [`min_offset`, `max_offset`], and `next_offset` is the nearest end of that range.
    """

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    records: bytes
    count: int


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The offsets a consumer may read, [`min_offset`, `max_offset`), and the first that is likely still in memory."""

    min_offset: int
    max_offset: int
    first_in_memory: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A snapshot of one store, for people and for health checks.

    Offsets are physical. `max_physical_offset` is the end of what is written, `flushed_physical_offset` of what is on
    disk, `visible_physical_offset` of what consumers may see. `recovered` says in words how the store was opened;
    `cut_bytes` is how much of the log's tail recovery removed. `not_writable_reason` is empty while appends are taken.
    """

    pid: int
    root: str
    broker_name: str
    topics: int
    queues: int
    min_physical_offset: int
    max_physical_offset: int
    flushed_physical_offset: int
    visible_physical_offset: int
    messages_appended: int
    duplicates_dropped: int
    waiting_fetches: int
    known_producers: int
    recovered: str
    cut_bytes: int
    writable: bool
    not_writable_reason: str
