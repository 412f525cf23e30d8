"""Tests of the table of half messages (prepared messages of transactions). A store builds it from the log's records,
including records that RocketMQ wrote."""

from __future__ import annotations

from typing import Any

from raymq.common.message import Message
from raymq.common.names import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import encode_batch
from raymq.records.format.layout import SYS_FLAG_TRANSACTION_COMMIT
from storage.dispatch import half_messages
from storage.dispatch.half_messages import HalfMessages, Outcome


class Log:
    """Fake log that passes each record to a table of half messages. A record gets the next offset of its queue."""

    def __init__(self) -> None:
        self.table = HalfMessages()
        self._next: dict[str, int] = {}
        self.position = 0

    def write(self, topic: str, body: bytes, *, tags: str | None = None, flags: int = 0, **properties: str) -> int:
        """Write a record to the fake log. Returns the record's queue offset."""
        batch = encode_batch(
            [Message(topic, body, tags)],
            0,
            born_host=("127.0.0.1", 1),
            born_timestamp_ms=1000,
            message_ids=[properties.pop("UNIQ_KEY", "")],
            extra_properties=properties or None,
        )
        offset = self._next.setdefault(topic, 0)
        self._next[topic] += 1
        view = dispatch_view(batch.records)._replace(
            queue_offset=offset, physical_offset=self.position, store_timestamp_ms=2000, sys_flag=flags
        )
        self.position += len(batch.records)
        self.table.note(view, batch.records)
        return offset

    def half(self, name: str, **properties: str) -> int:
        values: dict[str, str] = {"TRAN_MSG": "true", "PGROUP": "g", "REAL_TOPIC": "orders", "REAL_QID": "3"}
        return self.write(HALF_TOPIC, b"x", UNIQ_KEY=name, **{**values, **properties})

    def open_offsets(self) -> dict[str, int]:
        return {key: half.queue_offset for key, half in self.table.open.items()}

    def outcome(self, name: str) -> Any:
        ended = self.table.ended(name)
        return None if ended is None else ended.outcome


def test_op_records_end_their_half_messages_in_any_order():
    """Golden fact 99 of spec/features.md does not hold in raymq: RocketMQ stores an op offset, raymq does not. So an op
    record that arrives out of order also completes the half messages that it names."""
    log = Log()
    for number in range(14):
        log.half(f"T{number}")
    log.write(OP_HALF_TOPIC, b"13,", tags="d")
    log.write(OP_HALF_TOPIC, b"10,11,", tags="d")
    assert [number for number in range(14) if f"T{number}" not in log.table.open] == [10, 11, 13]
    assert {log.outcome(f"T{number}") for number in (10, 11, 13)} == {Outcome.ROLLED_BACK}


def test_an_op_record_may_name_unknown_half_messages():
    """An op record may name half messages that are unknown or already completed. Golden fact 100 (spec/features.md
    §12)."""
    log = Log()
    offsets = [log.half(f"T{number}") for number in range(7)]
    for offset in offsets[:6]:
        log.write(OP_HALF_TOPIC, b"%d," % offset, tags="d")
    log.write(OP_HALF_TOPIC, b"5,6,99,", tags="d")
    assert log.table.open == {}
    assert list(log.table.unwritten_ops) == []


def test_a_record_of_the_op_topic_with_another_tag_or_no_numbers_ends_nothing():
    log = Log()
    log.half("T0")
    log.write(OP_HALF_TOPIC, b"0,", tags="e")
    log.write(OP_HALF_TOPIC, b"zero,", tags="d")
    assert log.open_offsets() == {"T0": 0}


def test_an_op_record_for_the_first_of_several_copies_ends_all():
    """Golden fact 101 of spec/features.md: an op record that names only the first copy of a half message completes all
    copies. RocketMQ's later copies name the first copy's offset."""
    log = Log()
    for _ in range(4):
        log.half("other")
    assert log.half("T") == 4
    assert log.half("T", TRAN_PREPARED_QUEUE_OFFSET="4", TRANSACTION_CHECK_TIMES="1") == 5
    assert log.table.open["T"].check_times == 1
    assert log.table.open["T"].queue_offsets == (4, 5)
    log.write(OP_HALF_TOPIC, b"4,", tags="d")
    assert log.outcome("T") is Outcome.ROLLED_BACK
    assert "T" not in log.table.open
    assert list(log.table.unwritten_ops) == [5]


def test_the_final_message_and_the_give_up_topic_end_it_too_and_leave_their_op_records_to_be_written():
    log = Log()
    log.half("one")
    log.half("two")
    log.write("orders", b"x", flags=SYS_FLAG_TRANSACTION_COMMIT, UNIQ_KEY="one", TRAN_MSG="true")
    log.write(CHECK_MAX_TIME_TOPIC, b"x", UNIQ_KEY="two", TRAN_MSG="true")
    assert (log.outcome("one"), log.outcome("two")) == (Outcome.COMMITTED, Outcome.GIVEN_UP)
    assert list(log.table.unwritten_ops) == [0, 1]
    log.write(OP_HALF_TOPIC, b"0,1,", tags="d")
    assert list(log.table.unwritten_ops) == []
    assert (log.outcome("one"), log.outcome("two")) == (Outcome.COMMITTED, Outcome.GIVEN_UP)


def test_a_half_message_that_comes_after_its_end_does_not_open_it_again():
    log = Log()
    log.half("one")
    log.write("orders", b"x", flags=SYS_FLAG_TRANSACTION_COMMIT, UNIQ_KEY="one")
    log.half("one")
    assert log.open_offsets() == {}


def test_a_half_message_without_an_id_goes_by_its_offset():
    log = Log()
    log.half("")
    log.half("")
    assert log.open_offsets() == {"@0": 0, "@1": 1}


def test_a_record_without_group_or_topic_is_not_a_half_message():
    log = Log()
    log.write(HALF_TOPIC, b"x", UNIQ_KEY="one")
    assert log.open_offsets() == {}


def test_the_outcomes_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(half_messages, "ENDED_REMEMBERED_MAX", 3)
    log = Log()
    for number in range(5):
        log.half(f"T{number}")
        log.write("orders", b"x", flags=SYS_FLAG_TRANSACTION_COMMIT, UNIQ_KEY=f"T{number}")
    assert [log.outcome(f"T{number}") for number in range(5)] == [None, None, *[Outcome.COMMITTED] * 3]


def test_rows_are_the_whole_table():
    log = Log()
    log.half("open", CHECK_IMMUNITY_TIME_IN_SECONDS="30")
    log.half("open", TRANSACTION_CHECK_TIMES="1")
    log.half("ended")
    log.write(OP_HALF_TOPIC, b"2,", tags="d")
    other = HalfMessages()
    other.load(log.table.rows())
    assert (other.open, other.rows()) == (log.table.open, log.table.rows())
