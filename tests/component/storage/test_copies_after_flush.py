"""An append whose flush is done before anybody looks: the other replicas have their whole time all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raymq.config.store import FlushDiskType
from raymq.message import SendStatus
from raymq.protocol.transactions import LocalTransactionState
from storage.append.durability import ReplicaAcks
from storage.log.flush_service import FlushService
from storage.message_store import MessageStore
from tests.support.stores.stores import make_batch, open_store
from tests.support.stores.transactions import begin

COPIES_TIMEOUT_S = 60.0
THIRD_LOOK = 3


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageStore]:
    """A store whose disk is done at once."""
    monkeypatch.setattr(FlushService, "is_flushed", lambda self, end_offset: True)
    store = open_store(tmp_path / "store", flush_disk_type=FlushDiskType.SYNC_FLUSH)
    yield store
    store.close()


def late_copies(store: MessageStore) -> ReplicaAcks:
    """The copies are there at the third look."""
    looks: list[int] = []

    def has_copies(end_offset: int) -> bool:
        looks.append(end_offset)
        if len(looks) < THIRD_LOOK:
            threading.Thread(target=store.notify_progress).start()
        return len(looks) >= THIRD_LOOK

    return ReplicaAcks(None, has_copies, COPIES_TIMEOUT_S)


def appended(store: MessageStore) -> SendStatus:
    [result] = store.append([make_batch([b"first"])], acks=late_copies(store))
    return result.status


def committed(store: MessageStore) -> SendStatus:
    transaction = begin(store)
    order = transaction.order(LocalTransactionState.COMMIT_MESSAGE)
    return store.transactions.end(order, acks=late_copies(store)).status


@pytest.mark.parametrize("stored", [appended, committed])
def test_the_copies_are_waited_for(store: MessageStore, stored: Callable[[MessageStore], SendStatus]) -> None:
    assert stored(store) is SendStatus.SEND_OK
