"""Tests of a flush that runs between the write of a message and the store's wait for the flush. The flush ends before
the store has registered the message as waiting for a flush, or before the store checks if the message is flushed.

Even then the acknowledged message becomes visible, and the other replicas have the full timeout for their copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.common.config.store import FlushDiskType
from raymq.common.message import SendStatus
from raymq.common.protocol.transactions import LocalTransactionState
from storage.append.durability import ReplicaAcks
from storage.log.flush_service import FlushService
from storage.message_store import MessageStore
from tests.support.stores.stores import bodies_of, make_batch, open_store
from tests.support.stores.transactions import begin

WAIT_S = 60.0
COPIES_TIMEOUT_S = 60.0
THIRD_LOOK = 3


@pytest.mark.parametrize("messages", [1, 3])
def test_a_message_that_a_flush_overtook_is_visible_and_wakes_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: int
) -> None:
    store = open_store(tmp_path / "store", flush_disk_type=FlushDiskType.SYNC_FLUSH)
    try:
        store.append([make_batch([b"first"])])
        visibility = store._parts.visibility
        add = visibility.add

        def overtaken(end_offset: int, *place: Any) -> None:
            # Make an append visible only after its flush. This imitates a writer thread that the operating system
            # suspends after it has written the records and before it makes them visible.
            assert store.gate.wait_flushed(end_offset)
            add(end_offset, *place)

        monkeypatch.setattr(visibility, "add", overtaken)
        woken = threading.Event()
        store.polls.register([("orders", 0)], woken.set)
        bodies = [b"%d" % number for number in range(messages)]
        store.append([make_batch(bodies)])
        assert bodies_of(store) == [b"first", *bodies]
        assert woken.wait(WAIT_S)
    finally:
        store.close()


@pytest.fixture
def quick_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageStore]:
    """Yield a store that treats every offset as already flushed."""
    monkeypatch.setattr(FlushService, "is_flushed", lambda self, end_offset: True)
    store = open_store(tmp_path / "store", flush_disk_type=FlushDiskType.SYNC_FLUSH)
    yield store
    store.close()


def late_copies(store: MessageStore) -> ReplicaAcks:
    """Return replica acknowledgements for one append. They report that the other replicas have copied the append only
    when the store asks for the third time."""
    looks: list[int] = []

    def has_copies(end_offset: int) -> bool:
        looks.append(end_offset)
        if len(looks) < THIRD_LOOK:
            threading.Thread(target=store.gate.progress.notify).start()
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
def test_an_append_waits_for_the_copies(
    quick_store: MessageStore, stored: Callable[[MessageStore], SendStatus]
) -> None:
    assert stored(quick_store) is SendStatus.SEND_OK
