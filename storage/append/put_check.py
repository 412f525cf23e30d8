"""RocketMQ's put checks, in RocketMQ's order (spec/storage.md §1). The checks refuse messages before anything is
written.

`refuse_store` checks the store, and `refuse_batch` checks the messages. The first check that fails decides the status.
Some of RocketMQ's checks are left out, because the messages that they refuse never reach the store.
raymq.records.format.encode refuses invalid topics and bodies. A producer puts delayed messages, also in batches, into
their own queue before it sends them (raymq.common.delay).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from raymq.common.config.store import StoreSettings
from raymq.common.errors import (
    MessageIllegalError,
    NoPermissionError,
    RaymqError,
    ServiceNotAvailableError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.common.message import (
    MAX_MESSAGE_SIZE_BYTES,
    MAX_PROPERTIES_BYTES,
    PROPERTY_DELAY,
    PROPERTY_INNER_BASE,
    PROPERTY_INNER_MULTI_QUEUE_OFFSET,
    PROPERTY_INNER_NUM,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
    SendStatus,
)
from raymq.common.names import HALF_TOPIC, check_group, check_topic, is_internal_topic
from raymq.records.format.compression import check_compressed, decompress
from raymq.records.format.inner_batch import count_items
from raymq.records.format.inner_batch_encode import INNER_MESSAGES_MAX, count_messages
from raymq.records.format.layout import (
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_TRANSACTION_MASK,
    Buffer,
    RecordError,
    find_sections,
    unpack_header,
)
from raymq.records.kernels.check import BatchFacts
from storage.dispatch.half_messages import HALF_QUEUE_ID
from storage.log.commit_log import CommitLog

RECORD_OVERHEAD_MAX_BYTES: Final = 64 * 1024
"""Maximum number of bytes that a record may have in addition to its body."""
BUSY_MAX_MS: Final = 10_000_000
"""Upper bound in ms for the time of an append, as in RocketMQ. Appends are refused as busy if the current append has
held the lock longer than the store's busy timeout, but less than this bound. A longer time does not count as busy."""
_INNER: Final = b"INNER_"
"""The common prefix of the property names INNER_NUM, INNER_BASE and INNER_MULTI_DISPATCH."""
_INNER_NUM: Final = f"{PROPERTY_INNER_NUM}\x01".encode()
_MULTI_OFFSETS: Final = f"{PROPERTY_INNER_MULTI_QUEUE_OFFSET}\x01".encode()
_SPECIAL_FLAGS: Final = SYS_FLAG_INNER_BATCH | SYS_FLAG_TRANSACTION_MASK


class PutMessageStatus(Enum):
    """The outcome of a put, with RocketMQ's names and numbers."""

    PUT_OK = 0
    FLUSH_DISK_TIMEOUT = 1
    FLUSH_SLAVE_TIMEOUT = 2
    SLAVE_NOT_AVAILABLE = 3
    SERVICE_NOT_AVAILABLE = 4
    CREATE_MAPPED_FILE_FAILED = 5
    MESSAGE_ILLEGAL = 6
    PROPERTIES_SIZE_EXCEEDED = 7
    OS_PAGE_CACHE_BUSY = 8
    UNKNOWN_ERROR = 9
    IN_SYNC_REPLICAS_NOT_ENOUGH = 10
    PUT_TO_REMOTE_BROKER_FAIL = 11
    LMQ_CONSUME_QUEUE_NUM_EXCEEDED = 12
    WHEEL_TIMER_FLOW_CONTROL = 13
    WHEEL_TIMER_MSG_ILLEGAL = 14
    WHEEL_TIMER_NOT_ENABLE = 15

    @property
    def send_status(self) -> SendStatus | None:
        """The status with which a producer's send ends if the store answers its append with this put status. None if
        the put status means that no message was stored."""
        return _SEND_STATUS.get(self)


_SEND_STATUS: Final = {
    PutMessageStatus.PUT_OK: SendStatus.SEND_OK,
    PutMessageStatus.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    PutMessageStatus.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    PutMessageStatus.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}

_ERRORS: Final[dict[PutMessageStatus, type[RaymqError]]] = {
    PutMessageStatus.SERVICE_NOT_AVAILABLE: ServiceNotAvailableError,
    PutMessageStatus.CREATE_MAPPED_FILE_FAILED: StoreNotWritableError,
    PutMessageStatus.MESSAGE_ILLEGAL: MessageIllegalError,
    PutMessageStatus.PROPERTIES_SIZE_EXCEEDED: MessageIllegalError,
    PutMessageStatus.OS_PAGE_CACHE_BUSY: SystemBusyError,
    PutMessageStatus.UNKNOWN_ERROR: StoreNotWritableError,
    PutMessageStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED: MessageIllegalError,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why the store refuses an append."""

    # The status with which RocketMQ refuses such an append.
    status: PutMessageStatus
    # The reason why the store refuses the append, and what the user should do.
    text: str
    # The error that raymq raises when it refuses an append for this reason.
    error: RaymqError


def refusal(status: PutMessageStatus, text: str, kind: type[RaymqError] | None = None) -> Refusal:
    """Build the Refusal of an append. The Refusal's error has the type `kind`, or else the type that belongs to
    `status`."""
    return Refusal(status, text, (kind or _ERRORS[status])(text))


@dataclass(frozen=True, slots=True)
class StoreState:
    """The state of a store that decides whether it accepts puts."""

    # The directory of the store, for error texts.
    root: str
    closed: bool
    # The reason why nothing may be written to the store (spec §9); empty if the store is writable.
    not_writable_reason: str
    # Time in ms for which the current append has held the append lock; 0 if no append holds the lock.
    append_ms: int
    # Maximum time in ms for which an append may hold the append lock. If an append holds it longer, other appends are
    # refused (os_page_cache_busy_timeout_ms).
    busy_timeout_ms: int


def refuse_store(state: StoreState) -> Refusal | None:
    """Return the refusal that every put to a store in this state gets; None if the store accepts messages."""
    if state.closed:
        return refusal(PutMessageStatus.SERVICE_NOT_AVAILABLE, f"the store {state.root} is closed")
    if state.not_writable_reason:
        return refusal(PutMessageStatus.SERVICE_NOT_AVAILABLE, state.not_writable_reason, StoreNotWritableError)
    if state.busy_timeout_ms < state.append_ms < BUSY_MAX_MS:
        return refusal(
            PutMessageStatus.OS_PAGE_CACHE_BUSY,
            f"the disk is busy: an append has been writing for {state.append_ms} ms "
            f"(os_page_cache_busy_timeout_ms is {state.busy_timeout_ms}); nothing was stored, send again later",
        )
    return None


def refuse_batch(facts: BatchFacts, *, max_message_size_bytes: int, record_max_bytes: int) -> Refusal | None:
    """Return the refusal of a batch with these facts; None if the batch may be stored.

    `max_message_size_bytes` limits a body. `record_max_bytes` limits a record, which must fit into one file. The body
    of an inner batch also contains the message's properties and field lengths. An inner batch of one message may exceed
    the body limit by the size of these parts. So its topic accepts the same messages as other topics.
    """
    messages, longest_record, longest_body, longest_properties, sys_flags, first_properties, _ = facts
    if may_be_special(sys_flags, first_properties):
        refused = _refuse_special(messages, sys_flags, first_properties)
        if refused is not None:
            return refused
    if longest_properties > MAX_PROPERTIES_BYTES:
        return refusal(
            PutMessageStatus.PROPERTIES_SIZE_EXCEEDED,
            f"message properties of {longest_properties} bytes exceed the limit of {MAX_PROPERTIES_BYTES} bytes",
        )
    if longest_record > record_max_bytes:
        return refusal(
            PutMessageStatus.MESSAGE_ILLEGAL,
            f"a record of {longest_record} bytes exceeds this store's limit of {record_max_bytes}",
        )
    if longest_body > max_message_size_bytes:
        inner = count_messages(first_properties) if sys_flags & SYS_FLAG_INNER_BATCH else 0
        if inner != 1 or longest_body > max_message_size_bytes + RECORD_OVERHEAD_MAX_BYTES:
            body = "a body" if not inner else f"an inner batch of {inner} messages, with a body"
            return refusal(
                PutMessageStatus.MESSAGE_ILLEGAL,
                f"{body} of {longest_body} bytes exceeds this store's limit of {max_message_size_bytes}",
            )
    return None


def may_be_special(sys_flags: int, first_properties: bytes) -> bool:
    """Return True if a batch may need the checks for transactions, inner batches and multi-dispatch. False means that
    it certainly needs none of these checks.

    `sys_flags` are the batch's sys flags. `first_properties` are the properties of its first record.
    """
    return bool(sys_flags & _SPECIAL_FLAGS) or _INNER in first_properties


def _refuse_special(messages: int, sys_flags: int, first_properties: bytes) -> Refusal | None:
    """Run the checks for transaction records, inner batches, and records with offsets in further queues. Return the
    refusal of the batch; None if it passes. Helper of `refuse_batch`."""
    if sys_flags & SYS_FLAG_INNER_BATCH and (messages > 1 or sys_flags & SYS_FLAG_TRANSACTION_MASK):
        return refusal(PutMessageStatus.MESSAGE_ILLEGAL, "an inner batch must be sent alone, and not in a transaction")
    if sys_flags & SYS_FLAG_INNER_BATCH and not count_messages(first_properties):
        return refusal(
            PutMessageStatus.MESSAGE_ILLEGAL,
            f"an inner batch must have the property {PROPERTY_INNER_NUM} with its number of messages, 1 to "
            f"{INNER_MESSAGES_MAX}, and must end in a property {PROPERTY_INNER_BASE} of zeros, which the store "
            "replaces by an offset",
        )
    if _INNER_NUM in first_properties and not sys_flags & SYS_FLAG_INNER_BATCH:
        return refusal(
            PutMessageStatus.MESSAGE_ILLEGAL,
            f"a record that is not an inner batch has the property {PROPERTY_INNER_NUM}",
        )
    if _MULTI_OFFSETS in first_properties:
        return refusal(
            PutMessageStatus.MESSAGE_ILLEGAL,
            "a message already has offsets in other queues, which only the store may set",
        )
    if messages > 1 and sys_flags & SYS_FLAG_TRANSACTION_MASK:
        return refusal(PutMessageStatus.MESSAGE_ILLEGAL, "messages of a transaction cannot be sent in a batch")
    if sys_flags & SYS_FLAG_TRANSACTION_MASK:
        return refusal(
            PutMessageStatus.MESSAGE_ILLEGAL,
            "a record has transaction bits, which only the store may set: send the message with a transaction producer",
        )
    return None


def refuse_bodies(records: Buffer, starts: Sequence[int], *, inner: int, max_message_size_bytes: int) -> Refusal | None:
    """Return a refusal if the body of one of the records cannot be read; None if all bodies can be read.

    The records have passed the other checks. `starts`: the offset of each record in `records`. A body that is not
    compressed can always be read. `inner`: the number of messages that an inner batch (one record) must contain; 0 for
    records of one message each.
    """
    view = memoryview(records)
    for number, start in enumerate(starts):
        header = unpack_header(view, start)
        sys_flag = header[7]
        if not sys_flag & SYS_FLAG_COMPRESSED:
            continue
        body_at, body_end, _, _, _ = find_sections(view, start, header)
        try:
            if not inner:
                check_compressed(view[body_at:body_end], sys_flag, max_bytes=max_message_size_bytes)
            else:
                # Allow at least 4 MiB for the body of an inner batch: a producer joins messages up to this size, even
                # if the store's limit for a single message is lower.
                most = max(max_message_size_bytes, MAX_MESSAGE_SIZE_BYTES) + RECORD_OVERHEAD_MAX_BYTES
                _check_items(decompress(view[body_at:body_end], sys_flag, max_bytes=most), inner)
        except RecordError as error:
            return refusal(
                PutMessageStatus.MESSAGE_ILLEGAL,
                f"the body of message {number + 1} of {len(starts)} cannot be decompressed: {error} "
                "(check_compressed_body is on); nothing was stored, compress the body again",
            )
    return None


def _check_items(body: bytes, messages: int) -> None:
    """Raise RecordError if the decompressed body of an inner batch does not contain exactly `messages`
    messages."""
    found = count_items(body)
    if found != messages:
        raise RecordError(f"an inner batch declares {messages} messages but contains {found}")


class HalfFacts(NamedTuple):
    """The properties and queue id of one half message (a message of an open transaction), for the put checks."""

    properties: Mapping[str, str]
    queue_id: int


def refuse_transactional(topic: str, halves: Sequence[HalfFacts], *, waiting: int, settings: StoreSettings) -> None:
    """Check that messages for a transaction topic (names.py) are all half messages that this store accepts.

    Raises MessageIllegalError or NoPermissionError if a message is refused. `waiting`: the number of half messages that
    are neither committed nor rolled back. Raises SystemBusyError if this number is too large.
    """
    if topic != HALF_TOPIC:
        raise MessageIllegalError(f"only the store itself may write to topic {topic!r}; nothing was stored")
    if settings.reject_transaction_message:
        raise NoPermissionError(
            "this store does not accept half messages (reject_transaction_message is on); nothing was stored"
        )
    if waiting + len(halves) > settings.transaction_open_max:
        raise SystemBusyError(
            f"{waiting} transactions are open, neither committed nor rolled back (transaction_open_max is "
            f"{settings.transaction_open_max}); nothing was stored, see `raymq transactions list`"
        )
    for half in halves:
        _check_half(*half)


def _check_half(properties: Mapping[str, str], queue_id: int) -> None:
    """Check that a message in the topic for half messages has the properties and the queue id of a half message. Raises
    MessageIllegalError, or IllegalNameError if its group or topic has an illegal name."""
    group, topic = properties.get(PROPERTY_PRODUCER_GROUP), properties.get(PROPERTY_REAL_TOPIC)
    real_queue_id = properties.get(PROPERTY_REAL_QUEUE_ID, "")
    complete = properties.get(PROPERTY_TRANSACTION_PREPARED) == "true" and group and topic
    if not complete or not real_queue_id.isdecimal() or queue_id != HALF_QUEUE_ID:
        raise MessageIllegalError("the message is not a half message: send it with a transaction producer")
    check_group(str(group))
    if is_internal_topic(check_topic(str(topic))):
        raise MessageIllegalError(f"a transaction cannot send to topic {topic!r}, which is a system topic")
    if PROPERTY_DELAY in properties or PROPERTY_TIMER_DELIVER_MS in properties:
        raise MessageIllegalError("a message of a transaction cannot be delayed")


SpaceCheck = Callable[[int], None]
"""A check of disk space. It is called with the number of bytes to write, under the append lock, before anything is
written. Raises if these bytes must not be written now."""


def space_checks(settings: StoreSettings, log: CommitLog) -> list[SpaceCheck]:
    """Return the checks for free space that a store with these settings makes before it writes to `log`."""
    if not settings.fast_fail_if_no_buffer_in_store_pool:
        return []

    def require_buffer(size: int) -> None:
        if size and not log.has_buffer_for(size):
            raise refusal(
                PutMessageStatus.CREATE_MAPPED_FILE_FAILED,
                "all buffers of the transient store pool are full of bytes that are not on disk yet; nothing was "
                "stored, send again later",
                SystemBusyError,
            ).error

    return [require_buffer]
