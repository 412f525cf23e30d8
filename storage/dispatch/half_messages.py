"""The half messages that have no outcome yet, and the outcomes of the last ones that do.

A half message is a record of the half topic: a message of a transaction before its producer has said how that ended.
One more record ends it, and which one says how:

    the final message, with the commit bit, in its real topic      committed
    an op record (tag `d`, body `3,17,`: offsets in the half queue) rolled back
    a record of TRANS_CHECK_MAX_TIME_TOPIC                          given up

So the end of a transaction is one append, and there is no moment at which half of it is done. A check appends the half
message anew, with a raised TRANSACTION_CHECK_TIMES; the copy has the same transaction id, and takes its place here.

All of this is derived from the log alone: recovery and replicas get the same table. RocketMQ also wants an op record
for each finished half message, which it would check again otherwise. `unwritten_ops` are the offsets that have none so
far; the store writes them many at a time (storage.transactions.service), and losing some loses nothing.
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
"""The outcomes that are remembered, to recognise an END that comes again."""
OP_TAG: Final = "d"
"""The tag of op records."""
HALF_QUEUE_ID: Final = 0


class Outcome(IntEnum):
    """How a transaction has ended."""

    COMMITTED = 1
    ROLLED_BACK = 2
    GIVEN_UP = 3


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A half message without an outcome: its newest record, and the queue offsets of the ones before, in order."""

    transaction_id: str
    producer_group: str
    topic: str
    queue_offset: int
    physical_offset: int
    size: int
    born_ms: int
    stored_ms: int
    check_times: int
    # The text of CHECK_IMMUNITY_TIME_IN_SECONDS, if the message has it.
    immunity: str | None
    earlier: tuple[int, ...]

    @property
    def first_queue_offset(self) -> int:
        """The queue offset of its first record."""
        return self.earlier[0] if self.earlier else self.queue_offset

    @property
    def queue_offsets(self) -> tuple[int, ...]:
        """The queue offsets of all its records."""
        return (*self.earlier, self.queue_offset)


@dataclass(frozen=True, slots=True)
class EndedTransaction:
    """The outcome of a transaction, and the record that says so."""

    outcome: Outcome
    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    stored_ms: int


class HalfMessages:
    """The table of one store's half messages. Changed and read under the store's append lock."""

    def __init__(self) -> None:
        # By transaction id, in the order of their newest records.
        self.open: dict[str, HalfMessage] = {}
        # The ids of open ones by the offsets of all their records.
        self._by_offset: dict[int, str] = {}
        # The last outcomes by transaction id, the oldest first.
        self._ended: dict[str, EndedTransaction] = {}
        # Offsets of finished half messages that no op record names.
        self.unwritten_ops: dict[int, None] = {}
        # Outcomes noted since the store was opened.
        self.counts = dict.fromkeys(Outcome, 0)

    def ended(self, transaction_id: str) -> EndedTransaction | None:
        """The outcome of a transaction; None if it has none, or it is not remembered any more."""
        return self._ended.get(transaction_id)

    def clear(self) -> None:
        """Forget everything, because the log is read again from its start."""
        for table in (self.open, self._by_offset, self._ended, self.unwritten_ops):
            table.clear()
        self.counts = dict.fromkeys(Outcome, 0)

    def note(self, view: DispatchView, record: Buffer) -> None:
        """Note a record of the log, whose bytes are `record`. The records have to come in the order of the log."""
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
        """Forget a half message whose record is gone."""
        half = self.open.pop(transaction_id, None)
        if half is not None:
            self._forget_offsets(half)

    def pinned_physical_offset(self) -> int | None:
        """The start of the first record that retention has to keep; None if there is none."""
        return min((half.physical_offset for half in self.open.values()), default=None)

    def rows(self) -> dict[str, Any]:
        """The whole table, as values of JSON."""
        return {
            "open": [[*list(asdict(half).values())[:-1], list(half.earlier)] for half in self.open.values()],
            "ended": [[key, *asdict(ended).values()] for key, ended in self._ended.items()],
            "ops": list(self.unwritten_ops),
        }

    def load(self, rows: dict[str, Any]) -> None:
        """Take over what `rows` returned. KeyError, TypeError or ValueError for anything else."""
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
            return  # nobody could be asked about it, and it has nowhere to go
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
            return  # recovery may walk records twice
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
    """True if the table has to know the record."""
    committed = view.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_COMMIT
    return committed or view.topic in TRANSACTION_TOPICS


def transaction_id(view: DispatchView) -> str:
    """The id of the transaction that a record belongs to. It stays the same in copies and in the final message."""
    properties = view.properties
    known = properties.get(PROPERTY_TRANSACTION_ID) or properties.get(PROPERTY_UNIQ_KEY)
    return known or f"@{view.queue_offset}"


def op_body(queue_offsets: list[int]) -> bytes:
    """The body of an op record: each offset in decimal, and a comma behind it."""
    return "".join([f"{offset}," for offset in queue_offsets]).encode()


def parse_op_body(body: bytes) -> list[int]:
    """The offsets in the body of an op record; what is no number is left out."""
    return [int(piece) for piece in body.split(b",") if piece.isdigit()]
