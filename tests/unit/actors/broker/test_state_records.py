"""Tests of the state records that a broker sends to its store: a resent record has equal bytes, and each record is
stored once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from actors.broker import state_records as module
from actors.broker.state_records import StateRecords, StoredRecords
from raymq.common.errors import (
    ClientStateError,
    NotMasterError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    StoreFailedError,
    StoreNotWritableError,
)
from raymq.common.message import SendStatus
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import AppendResult
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import EncodedBatch


class Store:
    """Fake store that stores each producer sequence number once. It raises the next error of `errors` before it stores
    a record, or after it has stored the record if `late` is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log: list[bytes] = []
        self.first: dict[tuple[str, int], int] = {}
        self.errors: list[RaymqError] = []
        self.late = False
        self.status = SendStatus.SEND_OK
        self.shipped: list[bytes] = []
        self.queue_offsets: tuple[int, ...] | None = None

    def append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> list[AppendResult]:
        [batch] = batches
        self.shipped.append(pickle.dumps(batch))
        if self.errors and not self.late:
            raise self.errors.pop(0)
        assert batch.producer is not None
        key = batch.producer.producer_id, batch.producer.first_sequence
        duplicate = key in self.first
        if not duplicate:
            self.first[key] = len(self.log)
            self.log += [record.body for record in decode_records(bytes(batch.records))]
        if self.errors:
            raise self.errors.pop(0)
        return [AppendResult(self.status, self.first[key], 0, 0, duplicate, queue_offsets=self.queue_offsets)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    return Store("storage-broker-a-0")


def records_at(master: Callable[[], Any]) -> StateRecords:
    return StateRecords(master, ("127.0.0.1", 0))


def test_records_get_their_offsets_in_order(store: Store) -> None:
    records = records_at(lambda: store)
    assert records.append([b"a", b"b"]) == StoredRecords(0, 2, True)
    assert records.append([b"c" * 10_000]) == StoredRecords(2, 3, True)
    assert store.log == [b"a", b"b", b"c" * 10_000]
    assert pickle.loads(store.shipped[0]).topic == STATE_TOPIC


def test_records_that_may_not_be_on_disk_are_not_durable(store: Store) -> None:
    store.status = SendStatus.FLUSH_SLAVE_TIMEOUT
    assert not records_at(lambda: store).append([b"a"]).durable


def test_a_batch_cut_by_a_crash_has_its_first_and_last_offset(store: Store) -> None:
    store.queue_offsets = (3, 7)
    assert records_at(lambda: store).append([b"a", b"b"]) == StoredRecords(3, 8, True)


def test_after_no_answer_the_very_same_bytes_go_to_the_store_and_are_there_once(store: Store) -> None:
    store.errors, store.late = [RequestTimeoutError("append", 5.0), ServiceNotAvailableError("gone")], True
    assert records_at(lambda: store).append([b"a"]) == StoredRecords(0, 1, True)
    assert store.log == [b"a"]
    assert len(store.shipped) == 3
    assert len(set(store.shipped)) == 1


def test_the_next_master_gets_the_bytes_that_the_old_master_refused(store: Store) -> None:
    old = Store("storage-broker-a-1")
    old.errors = [NotMasterError("broker-a", 3)]
    masters = iter([old, store])
    assert records_at(lambda: next(masters)).append([b"a"]) == StoredRecords(0, 1, True)
    assert old.shipped == store.shipped
    assert (old.log, store.log) == ([], [b"a"])


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([ServiceNotAvailableError("no answer")], RequestTimeoutError),
        ([ServiceNotAvailableError("no answer"), NotMasterError("broker-a", 3)], RequestTimeoutError),
        ([NotMasterError("broker-a", 3)], ServiceNotAvailableError),
        ([ServiceNotAvailableError("no answer"), StoreNotWritableError("the disk is full")], RequestTimeoutError),
        ([StoreFailedError("the disk failed"), StoreNotWritableError("the disk failed")], RequestTimeoutError),
    ],
)
def test_the_timeout_error_shows_whether_records_may_be_stored(
    store: Store, monkeypatch: pytest.MonkeyPatch, errors: list[RaymqError], raised: type[RaymqError]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(module.time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + 5.0))
    store.errors = [*errors, *[errors[-1]] * 100]
    with pytest.raises(raised) as caught:
        records_at(lambda: store).append([b"a"])
    assert type(caught.value) is raised
    assert 3 <= len(store.shipped) <= 5


def test_a_refusal_that_will_not_change_is_raised_at_once(store: Store) -> None:
    for error in (ClientStateError("fenced"), StoreNotWritableError("the disk is full")):
        store.errors, store.shipped = [error], []
        with pytest.raises(type(error), match=str(error)):
            records_at(lambda: store).append([b"a"])
        assert len(store.shipped) == 1
    assert len(store.shipped) == 1


def test_the_sequences_of_records_that_were_given_up_are_not_used_again(store: Store) -> None:
    records = records_at(lambda: store)
    store.errors = [ClientStateError("fenced")]
    with pytest.raises(ClientStateError):
        records.append([b"a", b"b"])
    records.append([b"c"])
    sequences = [pickle.loads(shipped).producer.first_sequence for shipped in store.shipped]
    assert sequences == [0, 2]
    assert store.log == [b"c"]
