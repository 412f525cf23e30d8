"""Tests of transactions in a real store. Half messages are invisible, end once, are checked, and survive kills and
recovery."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raymq.client.transactions.checks import checked_message
from raymq.common.errors import (
    BodyUnreadableError,
    MessageIllegalError,
    NoPermissionError,
    SystemBusyError,
    TopicNotExistError,
    TransactionError,
)
from raymq.common.message import Message, SendStatus
from raymq.common.names import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from raymq.records.format.decode import decode_record
from raymq.records.format.encode import ProducerSequence
from raymq.records.format.layout import BODY_OFFSET, MAGIC_OFFSET, SYS_FLAG_OFFSET, read_header
from storage.message_store import MessageStore
from tests.support.stores.clocks import let_pass
from tests.support.stores.damage import flip
from tests.support.stores.stores import killed_copy, make_batch, open_store, read_queue
from tests.support.stores.transactions import GROUP, Clock, Transaction, begin, half_batch

pytestmark = pytest.mark.usefixtures("no_flushes")

Open = Callable[..., MessageStore]
TIME_OUT_MS = 6000


def table(store: MessageStore) -> dict[str, Any]:
    return store._parts.halves.rows()


def bodies(store: MessageStore, topic: str = "orders", queue_id: int = 3) -> list[bytes]:
    return [message.body for message in read_queue(store, topic, queue_id)]


def test_a_half_message_is_not_seen_before_it_is_committed_and_then_once(opened, clock):
    store = opened()
    one = begin(store, b"one", clock=clock)
    assert bodies(store) == []
    [half] = read_queue(store, HALF_TOPIC, 0)
    names = ("TRAN_MSG", "PGROUP", "REAL_TOPIC", "REAL_QID", "__transactionId__", "UNIQ_KEY")
    expected = ["true", GROUP, "orders", "3", one.transaction_id, one.transaction_id]
    assert [half.system_properties[name] for name in names] == expected
    result = one.commit()
    assert (result.topic, result.queue_id, result.queue_offset, result.duplicate) == ("orders", 3, 0, False)
    [message] = read_queue(store, "orders", 3)
    assert (message.body, message.tags, message.keys, message.properties) == (b"one", "paid", ("k",), {"a": "b"})
    assert (message.message_id, message.born_timestamp_ms) == (half.message_id, half.born_timestamp_ms)
    assert message.sys_flag & 0xC == 8
    assert [message.system_properties[name] for name in ("REAL_TOPIC", "REAL_QID", "TRAN_MSG", "WAIT")] == [
        "orders", "3", "true", "false",
    ]  # fmt: skip
    record = store.queries.by_physical_offset(result.physical_offset)
    assert read_header(record).prepared_transaction_offset == one.physical_offset
    again = one.commit()
    assert (again.duplicate, again.queue_offset, again.physical_offset) == (True, 0, result.physical_offset)
    assert bodies(store) == [b"one"]


def test_a_rolled_back_message_is_never_visible_and_has_an_op_record(opened, clock):
    store = opened()
    begin(store, b"other", clock=clock)
    one = begin(store, b"one", clock=clock)
    assert one.rollback().duplicate is False
    assert one.rollback().duplicate is True
    assert store.queues.bounds("orders", 3).max_offset == 0
    [op] = read_queue(store, OP_HALF_TOPIC, 0)
    assert (op.body, op.tags) == (b"1,", "d")


def test_the_other_outcome_is_refused_and_changes_nothing(opened, clock):
    store = opened()
    one, two = begin(store, b"one", clock=clock), begin(store, b"two", clock=clock)
    one.commit()
    two.rollback()
    with pytest.raises(TransactionError, match="is already committed"):
        one.rollback()
    with pytest.raises(TransactionError, match="is already rolled back"):
        two.commit()
    assert bodies(store) == [b"one"]


def test_another_group_may_not_end_it(opened, clock):
    """Another producer group cannot commit the transaction: it gets TransactionError. Source: golden fact 94 of
    spec/features.md."""
    store = opened()
    with pytest.raises(TransactionError) as raised:
        begin(store, clock=clock).commit(producer_group="b")
    assert raised.value.code == 1
    assert bodies(store) == []


@pytest.mark.parametrize("offset", [10**9, 17, -1])
def test_an_offset_without_a_half_message_is_refused(opened, clock, offset):
    one = begin(opened(), clock=clock)
    with pytest.raises(TransactionError, match="has no half message"):
        one.commit(physical_offset=offset, transaction_id="unknown")


def test_a_final_message_that_cannot_be_stored_leaves_the_transaction_open(opened, clock):
    """The commit adds a property, and the message's properties become too long. The commit fails, and the transaction
    stays open. Source: golden fact 98 (spec/features.md §12)."""
    store = opened()
    message = Message("orders", b"x", properties={"p": "v" * 32_550})
    room = 32_767 - len(store.append([half_batch([message], ids=["T"])]) and _properties(store))
    longer = Message("orders", b"x", properties={"p": "v" * (32_550 + room)})
    [stored] = store.append([half_batch([longer], ids=["U"], born_ms=clock())])
    one = Transaction(store, "U", stored.queue_offset, stored.physical_offset)
    before = table(store)
    with pytest.raises(MessageIllegalError) as raised:
        one.commit()
    assert raised.value.code == 13
    assert table(store) == before
    assert bodies(store) == []
    assert one.rollback().duplicate is False


def _properties(store: MessageStore) -> bytes:
    end = store.queues.bounds(HALF_TOPIC, 0).max_offset
    unit = read_queue(store, HALF_TOPIC, 0)[end - 1]
    record = store.queries.by_physical_offset(unit.physical_offset)
    return record[-int.from_bytes(record[record.index(HALF_TOPIC.encode()) + len(HALF_TOPIC) :][:2]) :]


def test_a_deleted_topic_gets_no_message_of_a_transaction(opened, clock):
    store = opened()
    one = begin(store, clock=clock)

    def refuse(topic: str) -> None:
        raise TopicNotExistError(topic)

    with pytest.raises(TopicNotExistError):
        store.transactions.start_end(one.order(8), require_topic=refuse)
    assert store.transactions.figures().waiting[0].waiting == 1


def test_users_cannot_write_to_the_topics_of_transactions_or_set_their_bits(opened):
    store = opened()
    for topic in (HALF_TOPIC, OP_HALF_TOPIC, CHECK_MAX_TIME_TOPIC):
        with pytest.raises(MessageIllegalError):
            store.append([make_batch([b"x"], topic=topic, queue_id=0)])
    for bits in (4, 8, 12):
        batch = make_batch([b"x"])
        batch.records = bytearray(batch.records)
        batch.records[SYS_FLAG_OFFSET + 3] |= bits
        with pytest.raises(MessageIllegalError, match="transaction bits"):
            store.append([batch])
    assert store.log.end_offset == 0


def test_half_messages_are_refused_while_too_many_wait_or_if_the_store_takes_none(opened, clock, tmp_path):
    store = opened(transaction_open_max=2)
    one, _ = begin(store, b"1", clock=clock), begin(store, b"2", clock=clock)
    with pytest.raises(SystemBusyError):
        begin(store, b"3", clock=clock)
    one.commit()
    begin(store, b"3", clock=clock)
    with pytest.raises(NoPermissionError):
        begin(opened(tmp_path / "other", reject_transaction_message=True))


def test_a_half_message_that_is_sent_again_is_recognised_after_a_kill_too(opened, clock, tmp_path):
    store = opened()
    producer = ProducerSequence("p", 0, 0)
    begin(store, b"one", clock=clock, producer=producer)
    copy = opened(killed_copy(tmp_path / "store", tmp_path / "copy"))
    for other in (store, copy):
        batch = half_batch([Message("orders", b"one")], ids=["T-other"], producer=producer)
        assert other.append([batch])[0].duplicate
        assert len(table(other)["open"]) == 1


# Tests of transaction checks


def asked(store: MessageStore, *groups: str) -> list[tuple[str, int]]:
    return [(check.transaction_id, check.times) for check in store.transactions.check(groups or (GROUP,)).checks]


def test_a_half_message_that_is_old_enough_is_asked_about_and_its_copy_counts(opened, clock):
    """A half message is checked once it is old enough. The store then appends a copy of the half message with an
    increased number of checks. Source: golden facts 90 and 92 (spec/features.md §12)."""
    store = opened()
    one = begin(store, b"one", clock=clock)
    clock.now_ms += TIME_OUT_MS
    assert asked(store) == []
    clock.now_ms += 1
    [check] = store.transactions.check([GROUP]).checks
    assert (check.producer_group, check.transaction_id, check.times) == (GROUP, one.transaction_id, 1)
    copy = decode_record(check.record)
    assert copy.system_properties["TRANSACTION_CHECK_TIMES"] == "1"
    assert copy.system_properties["TRAN_PREPARED_QUEUE_OFFSET"] == "0"
    assert copy.system_properties["WAIT"] == "false"
    assert (copy.body, copy.queue_offset) == (b"one", 1)
    clock.now_ms += 1
    assert asked(store) == [(one.transaction_id, 2)]


def test_a_round_of_checks_continues_after_a_damaged_half_message(opened, clock, tmp_path):
    store = opened()
    first, damaged, last = (begin(store, body, clock=clock) for body in (b"first", b"damaged", b"last"))
    flip(tmp_path / "store", damaged.physical_offset, "magic")
    clock.now_ms += TIME_OUT_MS + 1
    assert asked(store) == [(first.transaction_id, 1), (last.transaction_id, 1)]
    with pytest.raises(BodyUnreadableError) as caught:
        damaged.commit()
    assert caught.value.physical_offset == damaged.physical_offset
    # The transaction of the damaged half message stays open, so the store keeps the bytes of the half message.
    assert damaged.transaction_id in [row[0] for row in table(store)["open"]]
    last.commit()
    assert bodies(store) == [b"last"]


def test_a_check_of_a_message_whose_body_cannot_be_read_names_its_real_queue(opened, clock, tmp_path):
    store = opened()
    half = begin(store, b"one", clock=clock)
    clock.now_ms += TIME_OUT_MS + 1
    [check] = store.transactions.check([GROUP]).checks
    record = bytearray(check.record)
    record[BODY_OFFSET] ^= 1
    message = checked_message(replace(check, record=bytes(record)), "broker-a")
    assert (message.topic, message.queue_id, message.message_id) == ("orders", 3, half.transaction_id)
    assert message.body_error is not None
    record[MAGIC_OFFSET] ^= 1
    with pytest.raises(BodyUnreadableError) as caught:
        checked_message(replace(check, record=bytes(record)), "broker-a")
    assert caught.value.physical_offset == check.physical_offset


def test_an_end_that_names_the_first_offsets_also_ends_the_copies(opened, clock):
    """A transaction check copies the half message. A commit that names the offsets of the first half message also ends
    the transaction of the copies, so they are not checked again. RocketMQ would check the copies again (quirk 2 of
    transaction checks in spec/features.md)."""
    store = opened()
    one = begin(store, b"one", clock=clock)
    clock.now_ms += TIME_OUT_MS + 1
    [check] = store.transactions.check([GROUP]).checks
    assert one.commit().duplicate is False
    by_copy = Transaction(store, one.transaction_id, check.queue_offset, check.physical_offset)
    assert by_copy.commit(from_transaction_check=True).duplicate is True
    assert asked(store) == []
    assert bodies(store) == [b"one"]


def test_a_group_without_a_producer_is_not_asked_and_nothing_is_counted(opened, clock):
    """If a producer group has no connected producer, its half messages are not checked and no check is counted.
    RocketMQ behaves differently (quirk 3 of transaction checks, spec/features.md §1.5)."""
    store = opened()
    begin(store, b"one", clock=clock)
    clock.now_ms += TIME_OUT_MS + 1
    end = store.log.end_offset
    for _ in range(20):
        assert asked(store, "another") == []
    assert store.log.end_offset == end
    assert asked(store) == [("T-" + b"one".hex(), 1)]


def test_a_half_message_is_given_up_once_after_15_checks(opened, clock, tmp_path):
    """After 15 checks without an outcome the store gives up a half message, and never gives it up a second time.
    Source: golden fact 91 of spec/features.md."""
    store = opened()
    one = begin(store, b"one", clock=clock)
    clock.now_ms += TIME_OUT_MS + 1
    times = []
    for _ in range(15):
        times += [count for _, count in asked(store)]
        clock.now_ms += 1
    assert times == list(range(1, 16))
    assert store.transactions.check([GROUP]).given_up == 1
    assert store.transactions.check([GROUP]).given_up == 0
    store.gate.flush_all()
    [message] = read_queue(store, CHECK_MAX_TIME_TOPIC, 0)
    assert message.body == b"one"
    with pytest.raises(TransactionError, match="given up"):
        one.commit(from_transaction_check=True)
    copy = opened(killed_copy(tmp_path / "store", tmp_path / "copy"))
    assert copy.transactions.check([GROUP]).given_up == 0
    assert copy.transactions.figures().waiting == []


def test_a_half_message_older_than_retention_is_given_up_without_a_check(opened, clock):
    """A half message that is older than the retention time is given up without a check. Source: golden fact 93 of
    spec/features.md."""
    store = opened(file_reserved_time_hours=72)
    begin(store, b"one", born_ms=clock.now_ms - 72 * 3_600_000 - 1000)
    clock.now_ms += 1
    assert store.transactions.check([]).given_up == 0
    let_pass(store, 72)
    assert store.transactions.check([]).given_up == 1
    store.gate.flush_all()
    assert bodies(store, CHECK_MAX_TIME_TOPIC, 0) == [b"one"]


def test_a_round_of_many_checks_comes_in_parts_and_asks_about_each_once(opened, clock):
    store = opened()
    batch = half_batch([Message("orders", b"x")] * 600, ids=[f"T{n}" for n in range(600)], born_ms=clock())
    store.append([batch])
    clock.now_ms += TIME_OUT_MS + 1
    parts, start_ms, more = [], 0, True
    while more:
        part = store.transactions.check([GROUP], start_ms)
        start_ms, more = part.start_ms, part.more
        parts.append(len(part.checks))
    assert parts == [256, 256, 88]


def test_op_records_are_written_for_all_that_ended_many_at_a_time(opened, clock):
    """The store writes op records, which mark half messages as finished, for all ended transactions. One op record
    marks several half messages. Without an op record, RocketMQ would check the half message again."""
    store = opened()
    transactions = [begin(store, b"%d" % number, clock=clock) for number in range(3)]
    for one in transactions:
        one.commit()
    clock.now_ms += 1
    store.transactions.check([])
    store.gate.flush_all()
    [op] = read_queue(store, OP_HALF_TOPIC, 0)
    assert op.body == b"0,1,2,"
    assert table(store)["ops"] == []


def test_many_commits_write_op_records_by_themselves(opened, clock):
    store = opened(transaction_op_msg_max_size=64)
    for number in range(40):
        begin(store, b"%d" % number, clock=clock).commit()
    named = b"".join(bodies(store, OP_HALF_TOPIC, 0))
    assert named.startswith(b"0,1,2,3,")
    assert all(len(body) <= 64 for body in bodies(store, OP_HALF_TOPIC, 0))
    assert len(table(store)["ops"]) < 40


def test_retention_keeps_the_half_messages_that_wait(opened, clock):
    store = opened()
    store.append([make_batch([b"before"] * 5)])
    one = begin(store, b"one", clock=clock)
    assert store.cleaner.pinned_physical_offset() == one.physical_offset
    one.rollback()
    assert store.cleaner.pinned_physical_offset() == store.log.end_offset


def test_a_half_message_is_in_no_light_queue_before_it_is_committed(opened, clock):
    store = opened(enable_lmq=True, enable_multi_dispatch=True)
    [stored] = store.append([half_batch([Message("orders", b"one")], ids=["T"], light_queues="%LMQ%a,%LMQ%b")])
    assert store.queues.bounds("%LMQ%a", 0).max_offset == 0
    Transaction(store, "T", stored.queue_offset, stored.physical_offset).commit()
    assert [bodies(store, topic, 0) for topic in ("%LMQ%a", "%LMQ%b")] == [[b"one"], [b"one"]]
    assert bodies(store) == [b"one"]


def test_figures_count_waiting_half_messages_and_their_age_by_topic(opened, clock):
    store = opened()
    first = clock.now_ms
    begin(store, b"1", clock=clock)
    clock.now_ms += 10
    begin(store, b"2", clock=clock)
    begin(store, b"3", clock=clock).commit()
    figures = store.transactions.figures()
    [row] = figures.waiting
    assert (row.topic, row.producer_group, row.waiting, row.oldest_born_timestamp_ms) == ("orders", GROUP, 2, first)
    assert (figures.committed, figures.rolled_back, figures.given_up) == (1, 0, 0)


def test_a_slow_disk_leaves_the_transaction_committed(opened, clock, monkeypatch):
    """If the flush of a commit is too slow, the commit returns FLUSH_DISK_TIMEOUT, and the transaction is committed.
    Source: golden fact 97 of spec/features.md."""
    store = opened(flush_disk_type="SYNC_FLUSH", sync_flush_timeout_ms=50)
    one = begin(store, b"one", clock=clock)
    monkeypatch.setattr(store.gate, "is_durable", lambda end_offset, late: False)
    assert one.commit().status is SendStatus.FLUSH_DISK_TIMEOUT
    monkeypatch.undo()
    assert one.commit().duplicate is True


# Tests that recovery rebuilds the table of half messages from the log


@pytest.mark.parametrize("seed", range(6))
def test_recovery_finds_the_same_table_after_a_kill_at_any_point(opened, clock, tmp_path, seed):
    print(f"seed {seed}")
    dice = random.Random(seed)
    root = tmp_path / "store"
    store = opened(root, transaction_op_msg_max_size=48, mapped_file_size_commit_log_bytes=8192)
    transactions: list[Transaction] = []
    for step in range(60):
        _random_step(store, transactions, dice, clock, step)
        if dice.random() < 0.3:
            # pretend that the last snapshot is long ago, so that `flush_queues` writes a new snapshot
            store._checkpoints._snapshot_s = -1e9
            store._checkpoints.flush_queues()
        if dice.random() < 0.3:
            copy = killed_copy(root, tmp_path / f"copy{step}")
            if dice.random() < 0.5:
                (copy / "dedup").unlink(missing_ok=True)
            if dice.random() < 0.3:
                shutil.rmtree(copy / "consumequeue" / HALF_TOPIC, ignore_errors=True)
            found = open_store(copy, clock_ms=clock, mapped_file_size_commit_log_bytes=8192)
            assert table(found) == table(store), f"after step {step}"
            found.close()
    assert len(bodies(store)) == len({message.message_id for message in read_queue(store, "orders", 3)})


def _random_step(
    store: MessageStore, transactions: list[Transaction], dice: random.Random, clock: Clock, step: int
) -> None:
    kind = dice.choice(("begin", "begin", "commit", "rollback", "check", "other"))
    clock.now_ms += dice.choice((1, 10, 7000))
    if kind == "begin" or not transactions:
        transactions.append(begin(store, b"%d" % step, clock=clock))
    elif kind == "check":
        store.transactions.check([GROUP])
    elif kind == "other":
        store.append([make_batch([b"y"] * dice.choice((1, 50)))])
    else:
        one = dice.choice(transactions)
        try:
            one.commit() if kind == "commit" else one.rollback()
        except TransactionError:
            assert one.transaction_id not in {row[0] for row in table(store)["open"]}
