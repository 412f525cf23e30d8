"""Whether messages may be stored, and with which status: RocketMQ's put checks in their order (spec/storage.md §1).

`refuse_store` asks about the store, `refuse_batch` about the messages; the first check that fails decides. Left out are
those whose matter cannot come this far: a topic or a body that a Message cannot have (raymq.record.encode refuses the
bytes), and delays, which a producer files in their own queue before it sends (raymq.delay), as batches too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from raymq.errors import (
    MessageIllegalError,
    RaymqError,
    ServiceNotAvailableError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.message import MAX_PROPERTIES_BYTES, PROPERTY_INNER_MULTI_QUEUE_OFFSET, PROPERTY_INNER_NUM, SendStatus
from raymq.record.check import BatchFacts
from raymq.record.layout import (
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)

RECORD_OVERHEAD_MAX_BYTES: Final = 64 * 1024
BUSY_MAX_MS: Final = 10_000_000
_INNER_NUM: Final = f"{PROPERTY_INNER_NUM}\x01".encode()
_MULTI_OFFSETS: Final = f"{PROPERTY_INNER_MULTI_QUEUE_OFFSET}\x01".encode()


class PutMessageStatus(Enum):
    """What became of a put, in RocketMQ's order and with its names."""

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
        """What a producer is told of messages that are stored; None where they are not."""
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
    """A put that is not carried out. `error` is what raymq raises for it."""

    status: PutMessageStatus
    text: str
    error: RaymqError


def refusal(status: PutMessageStatus, text: str, kind: type[RaymqError] | None = None) -> Refusal:
    """A refusal with the error that belongs to its status, or one of `kind`."""
    return Refusal(status, text, (kind or _ERRORS[status])(text))


@dataclass(frozen=True, slots=True)
class StoreState:
    """What of a store decides on puts. `not_writable_reason` is empty for a store that may be written (spec §9);
    `append_ms` is how long the append under way has been holding the append lock, 0 if there is none."""

    root: str
    closed: bool
    not_writable_reason: str
    append_ms: int
    busy_timeout_ms: int


def refuse_store(state: StoreState) -> Refusal | None:
    """Why this store takes no messages now; None if it does."""
    if state.closed:
        return refusal(PutMessageStatus.SERVICE_NOT_AVAILABLE, f"the store {state.root} is closed")
    if state.not_writable_reason:
        return refusal(PutMessageStatus.SERVICE_NOT_AVAILABLE, state.not_writable_reason, StoreNotWritableError)
    if state.busy_timeout_ms < state.append_ms < BUSY_MAX_MS:
        return refusal(
            PutMessageStatus.OS_PAGE_CACHE_BUSY,
            f"an append has been writing for {state.append_ms} ms (os_page_cache_busy_timeout_ms is "
            f"{state.busy_timeout_ms}): the disk is busy; nothing was stored, send again later",
        )
    return None


def refuse_batch(facts: BatchFacts, *, max_message_size_bytes: int, record_max_bytes: int) -> Refusal | None:
    """Why these messages cannot be stored; None if they can. `record_max_bytes`: the longest a file has room for."""
    if facts.sys_flags & SYS_FLAG_INNER_BATCH or _INNER_NUM in facts.first_properties:
        return refusal(PutMessageStatus.MESSAGE_ILLEGAL, "inner batches are read here, but not taken")
    if _MULTI_OFFSETS in facts.first_properties:
        return refusal(PutMessageStatus.MESSAGE_ILLEGAL, "a message's offsets in other queues are the store's to set")
    if facts.count > 1 and facts.sys_flags & SYS_FLAG_TRANSACTION_MASK:
        return refusal(PutMessageStatus.MESSAGE_ILLEGAL, "messages of a transaction cannot be sent in a batch")
    if facts.sys_flags & SYS_FLAG_TRANSACTION_MASK in (SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK):
        return refusal(
            PutMessageStatus.MESSAGE_ILLEGAL,
            "a record that is marked as prepared or rolled back is in no queue, and its offset would be lost",
        )
    if facts.longest_properties > MAX_PROPERTIES_BYTES:
        return refusal(
            PutMessageStatus.PROPERTIES_SIZE_EXCEEDED,
            f"properties of {facts.longest_properties} bytes exceed the limit of {MAX_PROPERTIES_BYTES} bytes",
        )
    if facts.longest_record > record_max_bytes:
        return refusal(
            PutMessageStatus.MESSAGE_ILLEGAL,
            f"a record of {facts.longest_record} bytes exceeds this store's limit of {record_max_bytes}",
        )
    if facts.longest_body > max_message_size_bytes:
        return refusal(
            PutMessageStatus.MESSAGE_ILLEGAL,
            f"a body of {facts.longest_body} bytes exceeds this store's limit of {max_message_size_bytes}",
        )
    return None
