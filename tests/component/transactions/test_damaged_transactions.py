"""Tests of a store with several transactions and one damaged record. The undamaged transactions end correctly, and no
message is delivered twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raymq.common.errors import BodyUnreadableError, MessageIllegalError
from raymq.common.names import CHECK_MAX_TIME_TOPIC
from storage.message_store import MessageStore
from tests.support.history.waiting import eventually
from tests.support.stores.clocks import let_pass
from tests.support.stores.damage import flip
from tests.support.stores.stores import intact_bodies, killed_copy, make_batch
from tests.support.stores.transactions import GROUP, Transaction, begin

pytestmark = pytest.mark.usefixtures("no_flushes")

FIELDS = ("size", "magic", "physical offset", "body size", "body", "topic size")
RESERVED_MS = 72 * 3_600_000
TIME_OUT_MS = 6000
Open = Callable[..., MessageStore]


def bodies(store: MessageStore) -> list[bytes | None]:
    return intact_bodies(store, "orders", 3)


def reopened(opened: Open, store: MessageStore, root: Path, *, killed: bool, flipped: tuple[int, str]) -> MessageStore:
    """Stop or kill the store, damage the record at `flipped`, and delete the snapshot of producers (dedup). Returns the
    reopened store."""
    if killed:
        root = killed_copy(root, root.with_name("killed"))
    else:
        store.close()
    (root / "dedup").unlink(missing_ok=True)
    flip(root, *flipped)
    return opened(root)


def asked(store: MessageStore) -> list[str]:
    return [check.transaction_id for check in store.transactions.check([GROUP]).checks]


@pytest.mark.parametrize("how", ["open", "stopped", "killed"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_damaged_half_message_holds_up_no_other(opened, clock, tmp_path, caplog, field, how):
    store = opened()
    ones = [begin(store, body, clock=clock) for body in (b"first", b"damaged", b"last")]
    store.append([make_batch([b"behind it"])])
    damaged = ones[1]
    if how == "open":
        flip(tmp_path / "store", damaged.physical_offset, field)
    else:
        flipped = damaged.physical_offset, field
        store = reopened(opened, store, tmp_path / "store", killed=how == "killed", flipped=flipped)
    clock.now_ms += TIME_OUT_MS + 1
    others = [ones[0].transaction_id, ones[2].transaction_id]
    if field == "physical offset":
        # The store also keeps a half message's physical offset outside of the message's record. So a half message
        # counts as intact if only the physical offset in its record is damaged.
        others.insert(1, damaged.transaction_id)
    assert asked(store) == others
    ones = [Transaction(store, *list(vars(one).values())[1:]) for one in ones]
    for one in (ones[0], ones[2]):
        copy = store._parts.halves.open[one.transaction_id]
        one.commit(queue_offset=copy.queue_offset, physical_offset=copy.physical_offset)
    expected = [b"first", b"last"]
    if damaged.transaction_id in others:
        expected.append(b"damaged")
        copy = store._parts.halves.open[damaged.transaction_id]
        ones[1].commit(queue_offset=copy.queue_offset, physical_offset=copy.physical_offset)
    else:
        with pytest.raises(BodyUnreadableError) as caught:
            ones[1].commit()
        assert caught.value.physical_offset == damaged.physical_offset
    assert bodies(store) == expected


@pytest.mark.parametrize("field", ["magic", "body"])
def test_a_damaged_half_message_is_given_up_when_it_is_as_old_as_files_are_kept(opened, clock, tmp_path, caplog, field):
    store = opened()
    damaged = begin(store, b"damaged", clock=clock)
    flip(tmp_path / "store", damaged.physical_offset, field)
    clock.now_ms += TIME_OUT_MS + 1
    assert asked(store) == []
    assert store.cleaner.pinned_physical_offset() == damaged.physical_offset
    assert damaged.transaction_id in caplog.text
    let_pass(store, RESERVED_MS / 3_600_000)
    clock.now_ms += RESERVED_MS
    assert store.transactions.check([GROUP]).given_up == 1
    assert store._parts.halves.open == {}
    assert store.cleaner.pinned_physical_offset() > damaged.physical_offset
    # If the fields of a damaged half message are readable, the store keeps its bytes, so that users can inspect them.
    expected = [None] if field == "body" else []
    eventually(lambda: intact_bodies(store, CHECK_MAX_TIME_TOPIC, 0) == expected, "what was given up")


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_damaged_commit_is_not_delivered_twice(opened, clock, tmp_path, field, killed):
    store = opened()
    ones = [begin(store, body, clock=clock) for body in (b"first", b"damaged", b"last")]
    results = [one.commit() for one in ones]
    flipped = results[1].physical_offset, field
    store = reopened(opened, store, tmp_path / "store", killed=killed, flipped=flipped)
    clock.now_ms += TIME_OUT_MS + 1
    for check in store.transactions.check([GROUP]).checks:
        assert check.transaction_id == ones[1].transaction_id, "only the damaged end may be asked for again"
        copy = store._parts.halves.open[check.transaction_id]
        again = Transaction(store, check.transaction_id, copy.queue_offset, copy.physical_offset)
        assert not again.commit().duplicate
    found = bodies(store)
    assert [body for body in found if body not in (None, b"damaged")] == [b"first", b"last"]
    assert found.count(b"damaged") <= 1
    assert len(found) in (3, 4)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_damaged_op_record_delivers_nothing(opened, clock, tmp_path, field, killed):
    store = opened()
    ones = [begin(store, body, clock=clock) for body in (b"first", b"gone", b"last")]
    op = store.log.end_offset
    ones[1].rollback()
    ones[0].commit()
    ones[2].commit()
    store = reopened(opened, store, tmp_path / "store", killed=killed, flipped=(op, field))
    clock.now_ms += TIME_OUT_MS + 1
    for check in store.transactions.check([GROUP]).checks:
        assert check.transaction_id == ones[1].transaction_id
        copy = store._parts.halves.open[check.transaction_id]
        Transaction(store, check.transaction_id, copy.queue_offset, copy.physical_offset).rollback()
    assert bodies(store) == [b"first", b"last"]
    assert store._parts.halves.open == {}


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_retried_send_is_recognised_beside_a_damaged_record(opened, clock, tmp_path, field, killed):
    store = opened()
    batches = [make_batch([b"body %d" % n], producer=("p", 0, n)) for n in range(5)]
    places = [store.append([batch])[0].physical_offset for batch in batches]
    store = reopened(opened, store, tmp_path / "store", killed=killed, flipped=(places[2], field))
    for number in (4, 3, 1, 0):
        [result] = store.append([batches[number]])
        assert (result.duplicate, result.queue_offset) == (True, number)
    # If the body size or the topic size is damaged, the record's producer cannot be read. If the producer then repeats
    # the batch, the store does not recognise the repeat, and refuses it as too old.
    if field in ("body size", "topic size"):
        with pytest.raises(MessageIllegalError, match="too old to check for repeats"):
            store.append([batches[2]])
    else:
        assert store.append([batches[2]])[0].duplicate
    found = intact_bodies(store)
    assert len(found) == 5
    assert found[:2] + found[3:] == [b"body 0", b"body 1", b"body 3", b"body 4"]
    assert found[2] in (None, b"body 2")
