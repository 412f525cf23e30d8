"""Tests of transactions on replicas. The table of half messages follows the log, and a transaction ends only once
despite a failover."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.replica.replica import Replica
from raymq.common.errors import NotMasterError
from raymq.common.message import Message
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest, LocalTransactionState as State
from tests.support.replicas.local_replicas import LocalReplicas
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
    old = replicas.control_state.record.master
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
    replicas.close(old)
    replicas.control_state._lease_until_s = 0.0
    replicas.control_state._accounts.pop(old)
    replicas.control(6)
    replicas.settle()
    assert replicas.control_state.record.master != old
    assert end_transaction(replicas.master, first).duplicate
    assert not end_transaction(replicas.master, second).duplicate
    assert end_transaction(replicas.master, second).duplicate
    assert bodies_of(replicas.master.store) == [b"committed", b"open"]
