"""Requests to a message store, and the store's answers.

A `queue_offset` counts the messages of a queue from 0. A `physical_offset` counts the bytes of the commit log. The end
offset of a queue or log is the offset that its next message will get.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from raymq.common.message import PullStatus, SendStatus

BROWSE_MAX_MESSAGES: Final = 1000
BROWSE_MAX_SCANNED: Final = 1_000_000
"""Limit for one page of a topic's messages: the maximum number of messages on the page, and the maximum number of
records that are read for the page."""


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """The offsets of one appended batch. Message i has queue offset `queue_offset + i`, unless `queue_offsets` lists
    the offsets.

    `status`: SEND_OK, or FLUSH_DISK_TIMEOUT if the batch is stored but was not flushed in time. `physical_offset`: the
    first message's physical offset. `physical_offsets`: the physical offsets of all messages, if the records are not
    contiguous because the batch crosses the end of a file. `duplicate`: True if an earlier send of the same batch
    stored all messages, so that nothing was written now. `queue_offsets` is only set if a crash truncated the batch,
    and another producer wrote to the queue before the rest was sent again.
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
    """A request to read at most `max_messages` messages of a queue, from `queue_offset` on. `tag_codes`: read only
    messages with these tag codes (None: all messages). `sql`: read only messages that match this filter expression
    (None: all messages)."""

    topic: str
    queue_id: int
    queue_offset: int
    max_messages: int
    tag_codes: frozenset[int] | None = None
    sql: str | None = None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The answer to one FetchRequest. The next fetch continues at `next_offset`, which also skips messages that the
    tags or the expression excluded.

    `records`: `count` whole records, one after another. Status OFFSET_ILLEGAL: the requested offset is outside
    [`min_offset`, `max_offset`], and `next_offset` is the nearest end of that range. `pull_from`: the storage actor for
    the next fetch, if the next fetch should go to another replica of the broker group.
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
    """A position in a queue, given by its queue offset. In a report of damage, PHYSICAL_QUEUE_ID as the queue id means
    that `queue_offset` is a physical offset, because the reader does not know the record's queue."""

    topic: str
    queue_id: int
    queue_offset: int


PHYSICAL_QUEUE_ID: Final = -1
"""Queue id in a report of a damaged record if the reader knows only the physical offset."""


class QueueSpan(NamedTuple):
    """A range of a queue's offsets, from `start_offset` up to, but not including, `end_offset`."""

    topic: str
    queue_id: int
    start_offset: int
    end_offset: int


class ReadsInPlace(NamedTuple):
    """Counts of a client's reads in the mapped files of a store. The store adds them to its own read counters. `found`:
    number of queue reads that found messages; `messages`: number of messages."""

    found: int = 0
    messages: int = 0


class QueueEnds(NamedTuple):
    """The range of a queue's offsets that consumers may read, [`min_offset`, `max_offset`). `pull_from`: the storage
    actor of another replica, if consumers should read from that replica."""

    min_offset: int
    max_offset: int
    pull_from: str = ""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The range of a queue's offsets that a consumer may read, [`min_offset`, `max_offset`), and the first offset that
    is probably still in memory."""

    min_offset: int
    max_offset: int
    first_in_memory: int


class Boundary(Enum):
    """The rule that selects the message in a search by time. LOWER: the first message stored at this time or later.
    UPPER: the last message stored at this time or earlier."""

    LOWER = "LOWER"
    UPPER = "UPPER"


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Messages found by a key: `count` whole records, one after another, in the order in which they were stored.

    `complete`: False if the index did not reach the end of the log in time, so that the newest messages may be missing.
    `damaged`: physical offsets of indexed records whose bytes cannot be read as records. A record whose body alone is
    damaged is in `records`.
    """

    records: bytes
    count: int
    complete: bool
    damaged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RetentionStatus:
    """A store's progress in deleting old messages, since the store was opened.

    `disk_ratio`: used part of the disk, from 0 to 1; -1 before the first check. `last_reason`: why files were last
    deleted. `runs_by_hand`: number of deletion runs that an administrator has requested and that are not done yet.
    `young_files_deleted`: number of files deleted before their retention time because the disk was full
    (clean_file_forcibly_enable). `disk_free_bytes`: free bytes of the fullest disk; -1 if unknown.
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
    """A range of a queue's messages that were deleted before their retention time: offsets from `begin_offset` up to,
    but not including, `end_offset`."""

    topic: str
    queue_id: int
    begin_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class TopicPuts:
    """Counts of a topic since the store was opened: the messages stored in the topic, and the bytes of their
    records."""

    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot of a store's counters. `runtime`: the values as text, by RocketMQ's names (spec/storage.md §12).
    `put_latency_buckets`: numbers of appends that took up to 0, 10, 50, 100, 200, 500 ms, 1, 2, 3, 4, 5, 10 s, and
    longer."""

    runtime: dict[str, str]
    topics: dict[str, TopicPuts]
    put_latency_buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """A store's progress in delivering delayed messages.

    `pending`: number of waiting messages by level; messages with a delivery time count under "deliver_at". `late_ms`:
    the largest lateness of the messages that are being delivered, 0 if there are none. `delivered`, `given_up` and
    `recalled` count since the store was opened. A message that is moved to a later queue on the way to its delivery
    time counts as delivered. `due`: number of messages that the last round was about to deliver. `pending_by_hour`:
    number of messages with a delivery time, by the full hours from now until their delivery.
    """

    pending: dict[str, int]
    late_ms: int
    delivered: int
    given_up: int
    recalled: int = 0
    due: int = 0
    pending_by_hour: dict[int, int] = field(default_factory=dict)


class HookFigures(NamedTuple):
    """Metrics of one hook of a store since the store was opened. `batches`: batches passed to the hook. `refused`:
    messages that the hook refused. `failed`: calls that raised an exception or timed out. `skipped`: calls omitted
    because an earlier call still ran. A further field has the duration of the longest call, in ms. `setting`: the
    setting that names the hook, put_hooks or consume_hooks."""

    path: str
    setting: str
    batches: int
    refused: int
    failed: int
    skipped: int
    longest_ms: float


@dataclass(frozen=True, slots=True)
class Hole:
    """A range of damaged bytes that is kept in a log: `size` bytes from physical offset `offset` on. Intact records
    follow the damaged range.

    `reason` describes the damage. The damaged bytes stay in the log until intact bytes replace them.
    """

    offset: int
    size: int
    reason: str

    @property
    def end_offset(self) -> int:
        """The physical offset at which the damaged range of the log ends and intact records continue."""
        return self.offset + self.size


class HoleUnit(NamedTuple):
    """A queue unit (consume-queue entry) whose record is in a hole (damaged range of the log): the queue, the unit's
    queue offset, and the position of the record."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int


class RepairState(Enum):
    """The answer of a store to a reader that found a record damaged. INTACT: the record is intact now, so the reader
    reads it again. PENDING: the store checks or repairs the record, so the reader waits. LOST: no replica in contact
    has the intact record."""

    INTACT = "INTACT"
    PENDING = "PENDING"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """A damaged range of a log, for an operator: `size` bytes from physical offset `offset` on, with the `reason`.

    `spans`: the queue offsets of the messages in the range, as far as they are known. Between the first and the last
    offset of a span, some messages may lie outside of the range. `lost`: no replica in contact has the intact bytes.
    """

    offset: int
    size: int
    reason: str
    spans: tuple[QueueSpan, ...] = ()
    lost: bool = False


@dataclass(frozen=True, slots=True)
class StoreDamage:
    """The damage of one store's log. `ranges`: what is damaged now. `found` and `repaired`: number of ranges that were
    found and that were repaired since the store was opened; `repaired_bytes`: their bytes. `broker`: the store's broker
    group. `error`: why the store does not answer, else empty."""

    ranges: tuple[DamagedRange, ...] = ()
    found: int = 0
    repaired: int = 0
    repaired_bytes: int = 0
    broker: str = ""
    error: str = ""


REPORT_MAX: Final = 1000
"""Maximum number of damaged records that one call can report to a store."""


@dataclass(frozen=True, slots=True)
class HoleCopy:
    """The metadata that a slave receives with a piece of a hole (damaged range) of its master's log.

    `reason`: the reason of the damage. `units`: the queue units (entries) whose records are in this piece, sorted by
    queue and queue offset. `left`: number of bytes of the hole after this piece; 0 for the last piece.
    """

    reason: str
    units: tuple[HoleUnit, ...] = ()
    left: int = 0


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """The progress of the verification of a store's files, and its last result.

    `running`: True while a verification reads files. `full_speed`: True if it runs by command, without a limit of its
    rate. `section`: the kind of files that is read now; empty between verifications. `checked_bytes`, `total_bytes`:
    bytes read so far, and the bytes to read in total. While none runs, both describe the last verification.

    `completed`: number of complete verifications of this store. `began_ms`, `completed_ms`: when the current or last
    one began, and when the last complete one ended, in ms since 1970; 0 if never. `overdue`: True if the store was not
    completely verified for longer than one and a half periods.

    `found`: number of damaged places that the current or last verification found. `repaired`: how many of them are
    repaired by now. `unrepaired`: descriptions of damage outside of the log that is not repaired. Damage of the log
    that is not repaired is in `StoreStatus.holes`. `error`: why the verification cannot continue, else empty.

    `age_ms`: the time since the last complete verification began, in ms; before the first one is complete, since the
    store waits for it. `read_bytes`, `found_ever`, `repaired_ever`: counters since the store was opened.
    """

    running: bool = False
    full_speed: bool = False
    section: str = ""
    checked_bytes: int = 0
    total_bytes: int = 0
    completed: int = 0
    began_ms: int = 0
    completed_ms: int = 0
    overdue: bool = False
    found: int = 0
    repaired: int = 0
    unrepaired: tuple[str, ...] = ()
    error: str = ""
    age_ms: int = 0
    read_bytes: int = 0
    found_ever: int = 0
    repaired_ever: int = 0


@dataclass(frozen=True, slots=True)
class StoreVerification:
    """The verification of one store: its progress and result (`scrub`), and the damaged ranges of its log (`holes`).
    `broker`: the store's broker group. `error`: why the store does not answer, else empty."""

    scrub: ScrubStatus = ScrubStatus()
    holes: tuple[Hole, ...] = ()
    broker: str = ""
    error: str = ""

    @property
    def lost(self) -> int:
        """The number of damaged places that are known and not repaired."""
        return len(self.holes) + len(self.scrub.unrepaired)

    def is_complete(self, number: int) -> bool:
        """True if the verification with this number, as the storage actor's `verify` returned it, is complete."""
        return self.scrub.completed >= number


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A snapshot of one store's state, for people and for health checks.

    Offsets are physical. `max_physical_offset`: the end of the written bytes; `flushed_physical_offset`: the end of the
    bytes on disk; `visible_physical_offset`: the end of the bytes that consumers may read. `recovered`: how the store
    was opened. `cut_bytes`: number of bytes that recovery removed from the log's end. `not_writable_reason`: empty
    while the store accepts appends. `running_flags`: RocketMQ's bits (spec/storage.md §9). `index_behind_bytes`: number
    of visible bytes of the log that are not in the index yet.

    `schedule`: None on a store that is not master, because only masters deliver delayed messages. `disk_failure`: how
    the disk failed; empty while the disk works, and again after the store is reopened.

    `holes`: the damaged ranges of the log. `mended_bytes`: number of damaged bytes that intact bytes of another replica
    have replaced since the store was opened. `mended_holes`: number of holes that this has closed. `damaged_files`:
    other files that were found damaged when the store was opened, and the action for each file. `scrub`: the progress
    and the result of the verification of all files. `found_holes`: number of damaged ranges that were found while the
    store runs. `damage_reports`: number of records that readers or replicas reported as damaged, each counted once in
    ten seconds.
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
    scrub: ScrubStatus = ScrubStatus()
    found_holes: int = 0
    damage_reports: int = 0


@dataclass(frozen=True, slots=True)
class DelayedInStore:
    """The delayed messages that wait in one store.

    `levels`: number of messages by level; messages with a delivery time count under "deliver_at". `hours`: number of
    messages that become due in each of the next 24 hours, without the messages in the roll queue. `due_ms`,
    `positions` and `records`: the delivery times, the positions in the delay queues, and the records of the first
    messages that are due in the requested period, sorted by time. The records follow one another, and `sizes` are their
    lengths. `complete`: True if no further messages are due in the period, and no queue was too long to be read.
    """

    levels: dict[str, int]
    hours: tuple[int, ...]
    late_ms: int
    due_ms: tuple[int, ...]
    positions: tuple[QueuePosition, ...]
    records: bytes
    sizes: tuple[int, ...]
    complete: bool
