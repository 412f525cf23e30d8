"""Tracks the half messages that have no outcome yet, and the most recent outcomes.

A half message is a record of the half topic: a message of a transaction whose producer has not yet sent the outcome.
One more record ends the transaction, and that record's kind gives the outcome:

    the final message, with the commit bit, in its real topic      committed
    an op record (tag `d`, body `3,17,`: offsets in the half queue) rolled back
    a record of TRANS_CHECK_MAX_TIME_TOPIC                          given up

So one append ends a transaction, and the end can never be half done. A check appends the half message again, with a
raised TRANSACTION_CHECK_TIMES. The copy has the same transaction id and replaces the original in this table.

The table is derived from the log alone, so recovery and replicas build the same table. RocketMQ also expects an op
record for each finished half message, and would check the half message again without it. `unwritten_ops` contains the
offsets that have no op record so far. The store writes these op records many at a time (storage.transactions.service).
If some of them are lost, no data is lost.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Final

from raymq.common.java_text import parse_number
from raymq.common.message import (
    PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_UNIQ_KEY,
)
from raymq.common.names import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_TOPICS
from raymq.records.format.dispatch import DispatchView
from raymq.records.format.layout import (
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
    Buffer,
    find_sections,
    unpack_header,
)

ENDED_REMEMBERED_MAX: Final = 32_768
"""Maximum number of outcomes of transactions that the table keeps. They serve to recognise a repeated request to end a
transaction."""
OP_TAG: Final = "d"
"""Tag of op records, which list finished half messages."""
HALF_QUEUE_ID: Final = 0


class Outcome(IntEnum):
    """The outcome of a transaction."""

    COMMITTED = 1
    ROLLED_BACK = 2
    GIVEN_UP = 3


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A half message without an outcome: its newest record, and the queue offsets of its earlier copies, in
    order."""

    transaction_id: str
    producer_group: str
    topic: str
    queue_offset: int
    physical_offset: int
    size: int
    born_ms: int
    stored_ms: int
    check_times: int
    # Text value of the half message's property CHECK_IMMUNITY_TIME_IN_SECONDS; None if it has no such property.
    immunity: str | None
    earlier: tuple[int, ...]

    @property
    def first_queue_offset(self) -> int:
        """Queue offset of the half message's first record."""
        return self.earlier[0] if self.earlier else self.queue_offset

    @property
    def queue_offsets(self) -> tuple[int, ...]:
        """Queue offsets of all records of this half message: its earlier copies and its newest record, in
        order."""
        return (*self.earlier, self.queue_offset)


@dataclass(frozen=True, slots=True)
class EndedTransaction:
    """The outcome of a transaction, and the position of the record that gives the outcome."""

    outcome: Outcome
    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    stored_ms: int


class HalfMessages:
    """The table of half messages of one store. Callers hold the store's append lock to change or read the
    table."""

    def __init__(self) -> None:
        # Half messages without an outcome, by transaction id, in the order of their newest records.
        self.open: dict[str, HalfMessage] = {}
        # Transaction ids of open half messages by queue offset. A half message may have several records; the queue
        # offset of each record is a key.
        self._by_offset: dict[int, str] = {}
        # The most recent outcomes of transactions by transaction id, the oldest first.
        self._ended: dict[str, EndedTransaction] = {}
        # Queue offsets of finished half messages that have no op record yet.
        self.unwritten_ops: dict[int, None] = {}
        # Number of transactions with each outcome that were recorded since the store was opened.
        self.counts = dict.fromkeys(Outcome, 0)

    def ended(self, transaction_id: str) -> EndedTransaction | None:
        """Return the outcome of a transaction. Return None if the transaction has no outcome, or the table no longer
        keeps it."""
        return self._ended.get(transaction_id)

    def clear(self) -> None:
        """Empty the table of half messages, because the log is read again from its start."""
        for table in (self.open, self._by_offset, self._ended, self.unwritten_ops):
            table.clear()
        self.counts = dict.fromkeys(Outcome, 0)

    def note(self, view: DispatchView, record: Buffer) -> None:
        """Update the table of half messages from a log record, whose bytes are `record`. Records must be passed in log
        order."""
        if not is_of_transaction(view):
            return
        if view.topic == HALF_TOPIC:
            self._note_half(view, unpack_header(record, 0)[8])
        elif view.topic == OP_HALF_TOPIC:
            self._note_op(view, record)
        else:
            given_up = view.topic == CHECK_MAX_TIME_TOPIC
            self._end(transaction_id(view), Outcome.GIVEN_UP if given_up else Outcome.COMMITTED, view)

    def drop(self, transaction_id: str) -> None:
        """Remove a half message from the table, because its record no longer exists."""
        half = self.open.pop(transaction_id, None)
        if half is not None:
            self._forget_offsets(half)

    def pinned_physical_offset(self) -> int | None:
        """Return the physical offset of the first half-message record that retention must keep. Return None if no half
        message is open."""
        return min((half.physical_offset for half in self.open.values()), default=None)

    def rows(self) -> dict[str, Any]:
        """Return the whole table of half messages as JSON values."""
        return {
            "open": [[*list(asdict(half).values())[:-1], list(half.earlier)] for half in self.open.values()],
            "ended": [[key, *asdict(ended).values()] for key, ended in self._ended.items()],
            "ops": list(self.unwritten_ops),
        }

    def load(self, rows: dict[str, Any]) -> None:
        """Replace the content of the table of half messages by `rows`, which an earlier call of the method `rows`
        returned. Raises KeyError, TypeError or ValueError if `rows` has another form."""
        self.clear()
        for *fields, earlier in rows["open"]:
            values: list[Any] = [*fields, tuple(earlier)]
            self._put(HalfMessage(*values))
        for key, outcome, *place in rows["ended"]:
            self._ended[key] = EndedTransaction(Outcome(outcome), *place)
        self.unwritten_ops = dict.fromkeys(rows["ops"])

    def _note_half(self, view: DispatchView, born_ms: int) -> None:
        properties, key = view.properties, transaction_id(view)
        group, topic = properties.get(PROPERTY_PRODUCER_GROUP), properties.get(PROPERTY_REAL_TOPIC)
        if group is None or topic is None:
            # Ignore an incomplete half message. Without a producer group, no producer can be asked for the outcome.
            # Without a topic, the message has no destination.
            return
        if key in self._ended:
            self.unwritten_ops[view.queue_offset] = None
            return
        before = self.open.pop(key, None)
        earlier: tuple[int, ...] = ()
        if before is not None:
            self._forget_offsets(before)
            earlier = tuple([offset for offset in before.queue_offsets if offset < view.queue_offset])
        times = parse_number(properties.get(PROPERTY_TRANSACTION_CHECK_TIMES)) or 0
        immunity = properties.get(PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS)
        offsets = view.queue_offset, view.physical_offset, view.size
        self._put(HalfMessage(key, group, topic, *offsets, born_ms, view.store_timestamp_ms, times, immunity, earlier))

    def _note_op(self, view: DispatchView, record: Buffer) -> None:
        if view.properties.get(PROPERTY_TAGS) != OP_TAG:
            return
        body_at, body_end, *_ = find_sections(record, 0, unpack_header(record, 0))
        for offset in parse_op_body(bytes(record[body_at:body_end])):
            self.unwritten_ops.pop(offset, None)
            key = self._by_offset.get(offset)
            if key is not None:
                self._end(key, Outcome.ROLLED_BACK, view)
                self.unwritten_ops.pop(offset, None)

    def _end(self, key: str, outcome: Outcome, view: DispatchView) -> None:
        half = self.open.pop(key, None)
        if half is not None:
            self._forget_offsets(half)
            self.unwritten_ops |= dict.fromkeys(half.queue_offsets)
        elif key in self._ended:
            return  # Recovery may scan records twice, so this transaction's outcome may be recorded already.
        self.counts[outcome] += 1
        place = view.topic, view.queue_id, view.queue_offset, view.physical_offset, view.store_timestamp_ms
        self._ended[key] = EndedTransaction(outcome, *place)
        if len(self._ended) > ENDED_REMEMBERED_MAX:
            del self._ended[next(iter(self._ended))]

    def _put(self, half: HalfMessage) -> None:
        self.open[half.transaction_id] = half
        self._by_offset |= dict.fromkeys(half.queue_offsets, half.transaction_id)

    def _forget_offsets(self, half: HalfMessage) -> None:
        for offset in half.queue_offsets:
            self._by_offset.pop(offset, None)


def is_of_transaction(view: DispatchView) -> bool:
    """True if the record belongs to a transaction, so that the table of half messages must be updated from it."""
    committed = view.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_COMMIT
    return committed or view.topic in TRANSACTION_TOPICS


def transaction_id(view: DispatchView) -> str:
    """Return the id of the transaction to which a record belongs. Copies of the half message and the final message have
    the same id."""
    properties = view.properties
    known = properties.get(PROPERTY_TRANSACTION_ID) or properties.get(PROPERTY_UNIQ_KEY)
    return known or f"@{view.queue_offset}"


def op_body(queue_offsets: list[int]) -> bytes:
    """Return the body of an op record: the decimal queue offset of each finished half message, followed by a
    comma."""
    return "".join([f"{offset}," for offset in queue_offsets]).encode()


def parse_op_body(body: bytes) -> list[int]:
    """Parse the offsets in the body of an op record; items that are not numbers are ignored."""
    return [int(piece) for piece in body.split(b",") if piece.isdigit()]
