"""Requests to a message store and its answers: values that both ends of the wire know.

A `queue_offset` counts the messages of a queue from 0, a `physical_offset` the bytes of the commit log. An end offset
is the one that the next message will get.
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
    """The offsets of one appended batch. Its i-th message has queue offset `queue_offset + i`, unless `queue_offsets`
    lists them.

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
    """Read a queue from `queue_offset` on, at most `max_messages`, only tag codes in `tag_codes` (None: all), and only
    messages that pass the filter expression `sql` (None: all)."""

    topic: str
    queue_id: int
    queue_offset: int
    max_messages: int
    tag_codes: frozenset[int] | None = None
    sql: str | None = None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The answer to one FetchRequest. Go on at `next_offset`, which may have moved past messages that the tags
    or the expression excluded.

    `records` are `count` whole records back to back. OFFSET_ILLEGAL: the offset asked for is outside
    [`min_offset`, `max_offset`], and `next_offset` is the nearest end of that range. `pull_from`: the storage actor to
    ask next, where that is another replica of the broker group.
    """

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    records: bytes
    count: int
    pull_from: str = ""


class LightQueue(NamedTuple):
    """A light queue of one store: its topic, the first offset held, and the offset that the next message will get."""

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
    """Reads of a client in the mapped files of a store, which the store counts among its gets: how many reads of queues
    have found something, and how many messages."""

    found: int = 0
    messages: int = 0


class QueueEnds(NamedTuple):
    """The offsets of a queue that consumers may read, [`min_offset`, `max_offset`), and the storage actor to read it
    from, where that is another replica."""

    min_offset: int
    max_offset: int
    pull_from: str = ""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The offsets a consumer may read, [`min_offset`, `max_offset`), and the first that is likely still in memory."""

    min_offset: int
    max_offset: int
    first_in_memory: int


class Boundary(Enum):
    """The message that a time stands for: LOWER the first one stored then or later, UPPER the last one then or
    earlier."""

    LOWER = "LOWER"
    UPPER = "UPPER"


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Messages found by a key: `count` whole records back to back, in the order they were stored.

    `complete` is False if the index had not come to the end of the log in time: the newest messages may be missing.
    `damaged` are the physical offsets of records that the index names and that cannot be told from their bytes.
    A record whose body alone is damaged is among `records`.
    """

    records: bytes
    count: int
    complete: bool
    damaged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RetentionStatus:
    """The progress of the deletion of old messages, since the store was opened.

    `disk_ratio` is how full the disk is, from 0 to 1, -1 before the first look. `last_reason`: why files were deleted
    the last time. `runs_by_hand` counts the runs that an administrator has asked for and that are still to come.
    `young_files_deleted` of the files were younger than their reserved time: a full disk took them
    (clean_file_forcibly_enable). `disk_free_bytes`: what the fullest disk still takes now, -1 where that is not known.
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
    """Messages of a queue that were deleted before their time: the offsets from `begin_offset` up to `end_offset`."""

    topic: str
    queue_id: int
    begin_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class TopicPuts:
    """Messages and bytes of records put into a topic since the store was opened."""

    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot of a store's counters. `runtime` has RocketMQ's names and texts (spec/storage.md §12);
    `put_latency_buckets` are the appends that took up to 0, 10, 50, 100, 200, 500 ms, 1, 2, 3, 4, 5, 10 s, and more."""

    runtime: dict[str, str]
    topics: dict[str, TopicPuts]
    put_latency_buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """The progress of the delivery of delayed messages. `pending` counts those that wait, by level, and those with a
    time of their own under "deliver_at". `late_ms` is how late the latest of those is that are being delivered now, 0
    if none. `delivered`, `given_up` and `recalled` count since the store was opened; what is filed again, nearer to its
    time, counts as delivered. `due` counts the messages that the last round was about to deliver;
    `pending_by_hour` those with a time of their own, by the full hours from now until the hour in which they are due.
    """

    pending: dict[str, int]
    late_ms: int
    delivered: int
    given_up: int
    recalled: int = 0
    due: int = 0
    pending_by_hour: dict[int, int] = field(default_factory=dict)


class HookFigures(NamedTuple):
    """One hook of a store since the store was opened: the `batches` that it has seen, the messages that it has
    `refused`, the calls that `failed` (it raised, or took too long), those that were `skipped` because a call before
    was still under way, and its longest call in ms. `setting` is put_hooks or consume_hooks."""

    path: str
    setting: str
    batches: int
    refused: int
    failed: int
    skipped: int
    longest_ms: float


@dataclass(frozen=True, slots=True)
class Hole:
    """A range of damaged bytes in a log: `size` bytes from physical offset `offset` on, with intact records behind it.

    `reason` says in words what is wrong there. The bytes stay as they are until they are replaced by good ones.
    """

    offset: int
    size: int
    reason: str

    @property
    def end_offset(self) -> int:
        """The physical offset at which the log goes on."""
        return self.offset + self.size


class HoleUnit(NamedTuple):
    """A unit of a queue that leads into a hole: the queue, its offset, and the place that it leads to."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int


@dataclass(frozen=True, slots=True)
class HoleCopy:
    """The notes that go along with a part of the damaged bytes of a master's hole.

    `reason`: that of the Hole. `units`: the units of queues that lead into this part, by queue and queue offset.
    `left`: the number of the hole's bytes that follow this part; 0 for the last part.
    """

    reason: str
    units: tuple[HoleUnit, ...] = ()
    left: int = 0


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A snapshot of one store, for people and for health checks.

    Offsets are physical. `max_physical_offset` is the end of what is written, `flushed_physical_offset` of what is on
    disk, `visible_physical_offset` of what consumers may see. `recovered` says in words how the store was opened;
    `cut_bytes` is how much of the log's tail recovery removed. `not_writable_reason` is empty while appends are taken.
    `running_flags` are RocketMQ's bits (spec/storage.md §9). `index_behind_bytes` is how much of what consumers may see
    is not in the index yet.
    `schedule` is None where delayed messages are not delivered: on a store that is no master. `disk_failure` says how
    the disk failed; it is empty while the disk works, and again once the store is opened anew.
    `holes` are the damaged ranges of the log. Since the store was opened, `mended_bytes` damaged bytes were replaced by
    another replica's good ones, which ended `mended_holes` holes. `damaged_files` names the other files that were found
    damaged when the store was opened, and says what was done about each.
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
    """Delayed messages that wait in one store. `levels`: how many, by level, "deliver_at" for times of their own;
    `hours`: how many become due in each of the next 24 hours, those of the roll queue not counted.

    `due_ms` and `records` are the first ones that are due in the time asked for, in the order of their times; the
    records lie back to back, and `sizes` are their lengths. `complete`: there are no more of them, and no queue was too
    long to be looked at.
    """

    levels: dict[str, int]
    hours: tuple[int, ...]
    late_ms: int
    due_ms: tuple[int, ...]
    records: bytes
    complete: bool
    sizes: tuple[int, ...] = ()
