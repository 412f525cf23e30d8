"""Requests to a message store, and its answers.

A `queue_offset` counts the messages of a queue from 0, a `physical_offset` the bytes of the commit log. An end offset
is the offset that the next message will get.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from raymq.common.message import PullStatus, SendStatus

BROWSE_MAX_MESSAGES: Final = 1000
BROWSE_MAX_SCANNED: Final = 1_000_000
"""The most messages of a page of a topic, and the most records that are read for a page."""


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """The offsets of one appended batch. Message i has queue offset `queue_offset + i`, unless `queue_offsets` lists
    them.

    `status`: SEND_OK, or FLUSH_DISK_TIMEOUT if the batch is stored but was not flushed in time. `physical_offset`: of
    the first message. `physical_offsets`: of all messages, if the records do not lie back to back because the batch
    crosses the end of a file. `duplicate`: an earlier send of the same batch stored all messages; nothing was written
    now. `queue_offsets`: only if a crash cut the batch, and another producer wrote to the queue before the rest was
    sent again.
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
    """Read a queue from `queue_offset` on, at most `max_messages`. `tag_codes`: only messages with these tag codes
    (None: all). `sql`: only messages that pass this filter expression (None: all)."""

    topic: str
    queue_id: int
    queue_offset: int
    max_messages: int
    tag_codes: frozenset[int] | None = None
    sql: str | None = None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The answer to one FetchRequest. Continue at `next_offset`, which also skips messages that tags or expression
    excluded.

    `records`: `count` whole records back to back. OFFSET_ILLEGAL: the requested offset is outside [`min_offset`,
    `max_offset`], and `next_offset` is the nearest end of that range. `pull_from`: the storage actor for the next
    fetch, if that is another replica of the broker group.
    """

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    records: bytes
    count: int
    pull_from: str = ""


class LightQueue(NamedTuple):
    """A light queue of one store: its topic, its first stored offset, and the offset that the next message will get."""

    topic: str
    min_offset: int
    max_offset: int


class QueuePosition(NamedTuple):
    """An offset of a queue."""

    topic: str
    queue_id: int
    queue_offset: int


class QueueSpan(NamedTuple):
    """The offsets of a queue from `start_offset` up to, not including, `end_offset`."""

    topic: str
    queue_id: int
    start_offset: int
    end_offset: int


class ReadsInPlace(NamedTuple):
    """Reads by a client in the mapped files of a store, which the store adds to its gets: the number of queue reads
    that found messages, and the number of messages."""

    found: int = 0
    messages: int = 0


class QueueEnds(NamedTuple):
    """The offsets of a queue that consumers may read, [`min_offset`, `max_offset`), and the storage actor to read from,
    if that is another replica."""

    min_offset: int
    max_offset: int
    pull_from: str = ""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The offsets that a consumer may read, [`min_offset`, `max_offset`), and the first offset that is probably still
    in memory."""

    min_offset: int
    max_offset: int
    first_in_memory: int


class Boundary(Enum):
    """The message that a time selects. LOWER: the first message stored at this time or later. UPPER: the last message
    stored at this time or earlier."""

    LOWER = "LOWER"
    UPPER = "UPPER"


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Messages found by a key: `count` whole records back to back, in the order of their storage.

    `complete`: False if the index did not reach the end of the log in time, so that the newest messages may be missing.
    `damaged`: physical offsets of indexed records whose bytes are not readable as records. A record with only a damaged
    body is in `records`.
    """

    records: bytes
    count: int
    complete: bool
    damaged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RetentionStatus:
    """The progress of the deletion of old messages since the store was opened.

    `disk_ratio`: used part of the disk, from 0 to 1; -1 before the first check. `last_reason`: why files were deleted
    last. `runs_by_hand`: runs that an administrator has requested and that are not done yet. `young_files_deleted`:
    deleted files younger than their retention time, because the disk was full (clean_file_forcibly_enable).
    `disk_free_bytes`: free bytes of the fullest disk; -1 if unknown.
    """

    disk_ratio: float
    files_deleted: int
    bytes_deleted: int
    last_reason: str
    runs_by_hand: int
    young_files_deleted: int = 0
    disk_free_bytes: int = -1


@dataclass(frozen=True, slots=True)
class DeletedRange:
    """Messages of a queue that were deleted before their retention time: offsets from `begin_offset` up to
    `end_offset`."""

    topic: str
    queue_id: int
    begin_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class TopicPuts:
    """Messages and bytes of records stored in a topic since the store was opened."""

    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot of a store's counters. `runtime`: RocketMQ's names and texts (spec/storage.md §12).
    `put_latency_buckets`: the appends that took up to 0, 10, 50, 100, 200, 500 ms, 1, 2, 3, 4, 5, 10 s, and longer."""

    runtime: dict[str, str]
    topics: dict[str, TopicPuts]
    put_latency_buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """The progress of the delivery of delayed messages.

    `pending`: the waiting messages by level; messages with a delivery time under "deliver_at". `late_ms`: the largest
    lateness of the messages in delivery, 0 without any. `delivered`, `given_up` and `recalled` count since the store
    was opened; a message that is filed again, nearer to its time, counts as delivered. `due`: messages that the last
    round was about to deliver. `pending_by_hour`: messages with a delivery time, by the full hours from now until the
    hour of their delivery.
    """

    pending: dict[str, int]
    late_ms: int
    delivered: int
    given_up: int
    recalled: int = 0
    due: int = 0
    pending_by_hour: dict[int, int] = field(default_factory=dict)


class HookFigures(NamedTuple):
    """One hook of a store since the store was opened. `batches`: the batches passed to the hook; `refused`: the
    messages that it refused; `failed`: calls that raised or timed out; `skipped`: calls omitted because an earlier call
    still ran. Also the longest call in ms. `setting`: put_hooks or consume_hooks."""

    path: str
    setting: str
    batches: int
    refused: int
    failed: int
    skipped: int
    longest_ms: float


@dataclass(frozen=True, slots=True)
class Hole:
    """A range of damaged bytes in a log: `size` bytes from physical offset `offset` on. Intact records follow the
    range.

    `reason` describes the damage. The damaged bytes stay until intact bytes replace them.
    """

    offset: int
    size: int
    reason: str

    @property
    def end_offset(self) -> int:
        """The physical offset at which the log continues."""
        return self.offset + self.size


class HoleUnit(NamedTuple):
    """A unit of a queue whose record is in a hole: the queue, its offset, and the position of the record."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int


@dataclass(frozen=True, slots=True)
class HoleCopy:
    """The notes that accompany a part of the damaged bytes of a master's hole.

    `reason`: the reason of the Hole. `units`: the units of queues whose records are in this part, by queue and queue
    offset. `left`: the number of the hole's bytes after this part; 0 for the last part.
    """

    reason: str
    units: tuple[HoleUnit, ...] = ()
    left: int = 0


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A snapshot of one store, for people and for health checks.

    Offsets are physical. `max_physical_offset`: the end of the written bytes; `flushed_physical_offset`: of the bytes
    on disk; `visible_physical_offset`: of the bytes that consumers may read. `recovered`: how the store was opened.
    `cut_bytes`: the bytes that recovery removed from the log's end. `not_writable_reason`: empty while the store
    accepts appends. `running_flags`: RocketMQ's bits (spec/storage.md §9). `index_behind_bytes`: visible bytes that are
    not in the index yet.

    `schedule`: None on a store that is not master, because it delivers no delayed messages. `disk_failure`: how the
    disk failed; empty while the disk works, and after the store is opened again.

    `holes`: the damaged ranges of the log. Since the store was opened, intact bytes of another replica replaced
    `mended_bytes` damaged bytes and closed `mended_holes` holes. `damaged_files`: other files that were found damaged
    when the store was opened, and the action for each.
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
    schedule: ScheduleStatus | None = None
    running_flags: int = 0
    index_files: int = 0
    index_behind_bytes: int = 0
    retention: RetentionStatus | None = None
    hooks: tuple[HookFigures, ...] = ()
    disk_failure: str = ""
    holes: tuple[Hole, ...] = ()
    mended_bytes: int = 0
    mended_holes: int = 0
    damaged_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DelayedInStore:
    """Delayed messages that wait in one store.

    `levels`: their number by level; messages with a delivery time under "deliver_at". `hours`: the number of messages
    that become due in each of the next 24 hours, without the roll queue. `due_ms` and `records`: the first messages
    that are due in the requested period, sorted by time; the records lie back to back, and `sizes` are their lengths.
    `complete`: no further messages are due in the period, and no queue was too long to be read.
    """

    levels: dict[str, int]
    hours: tuple[int, ...]
    late_ms: int
    due_ms: tuple[int, ...]
    records: bytes
    complete: bool
    sizes: tuple[int, ...] = ()
