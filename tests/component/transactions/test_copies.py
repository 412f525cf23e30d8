"""Tests of transactions on replicas. The table of half messages follows the log, and a transaction ends only once
despite a failover."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.replica.replica import Replica
from raymq.common.errors import NotMasterError, TransactionError
from raymq.common.message import Message
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest, LocalTransactionState as State
from tests.support.replicas.local_replicas import LocalReplicas, give_up
from tests.support.stores.stores import bodies_of, open_store
from tests.support.stores.transactions import GROUP, Clock, begin, half_batch

pytestmark = pytest.mark.usefixtures("no_flushes")


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[LocalReplicas]:
    group = LocalReplicas(tmp_path)
    yield group
    group.end()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunk_bytes", [700, 1 << 20])
def test_a_copy_of_the_log_has_the_same_table(tmp_path, seed, chunk_bytes):
    dice, clock = random.Random(seed), Clock()
    store, copy = open_store(tmp_path / "store", clock_ms=clock), open_store(tmp_path / "copy", clock_ms=clock)
    for number in range(80):
        one = begin(store, b"%d" % number, clock=clock)
        dice.choice((one.commit, one.rollback, lambda: None, lambda: store.transactions.check([GROUP])))()
        clock.now_ms += dice.choice((1, 7000))
        if dice.random() < 0.3:
            store.gate.flush_all()
            end = copy.status().max_physical_offset
            while data := store.chunks.read_chunk(end, chunk_bytes):
                copy.chunks.append_chunk(end, data)
                end += len(data)
            assert copy._parts.halves.rows() == store._parts.halves.rows()
    store.close()
    copy.close()


def end_transaction(replica: Replica, end: EndTransactionRequest) -> EndResult:
    """Commit or roll back a transaction. Returns after the outcome is flushed and copied to enough replicas."""
    started = replica.start_end(end, require_topic=lambda topic: None)
    [result] = replica.any_store.gate.progress.wait_settled(started)
    assert isinstance(result, EndResult)
    return result


def test_a_transaction_that_was_begun_under_one_master_ends_once_under_the_next(replicas):
    replicas.settle()
    replicas.start()
    results = [
        replicas.master.append([half_batch([Message("orders", name.encode())], ids=[name], queue_id=0)])[0]
        for name in ("committed", "open")
    ]
    first, second = [
        EndTransactionRequest(GROUP, result.queue_offset, result.physical_offset, int(State.COMMIT_MESSAGE), name)
        for result, name in zip(results, ("committed", "open"), strict=True)
    ]
    assert not end_transaction(replicas.master, first).duplicate
    slave = next(replica for replica in replicas.replicas.values() if replica is not replicas.master)
    # golden fact 96 (spec/features.md §12): a slave refuses to end a transaction; raymq's error for this case is
    # NotMasterError
    with pytest.raises(NotMasterError):
        end_transaction(slave, second)
    replicas.fail_over()
    replicas.settle()
    assert end_transaction(replicas.master, first).duplicate
    assert not end_transaction(replicas.master, second).duplicate
    assert end_transaction(replicas.master, second).duplicate
    assert bodies_of(replicas.master.store) == [b"committed", b"open"]


def test_an_end_from_an_older_epoch_does_not_end_another_transaction_at_the_same_offsets(replicas):
    """A master that was replaced has given a half message the same queue offset and physical offset as the new master
    gave another half message. A late end of the lost half message must not end the other transaction."""
    replicas.settle()
    old = replicas.master
    replicas.cut_off_master()
    lost, kept = [
        replica.start_append([half_batch([Message("orders", name.encode())], ids=[name], queue_id=0, born_ms=1)])
        for replica, name in ((old, "lost"), (replicas.master, "kept"))
    ]
    [place], [other] = give_up(lost), give_up(kept)
    assert (place.queue_offset, place.physical_offset) == (other.queue_offset, other.physical_offset)
    replicas.rejoin()
    replicas.settle()
    replicas.start()
    offsets = place.queue_offset, place.physical_offset
    for state in (State.ROLLBACK_MESSAGE, State.COMMIT_MESSAGE):
        with pytest.raises(TransactionError, match="the half message of transaction kept, not of transaction lost"):
            end_transaction(replicas.master, EndTransactionRequest(GROUP, *offsets, int(state), "lost"))
    assert not end_transaction(
        replicas.master, EndTransactionRequest(GROUP, *offsets, int(State.COMMIT_MESSAGE), "kept")
    ).duplicate
    assert bodies_of(replicas.master.store) == [b"kept"]
