"""Tests of the time at which a started append completes. It completes after its flush and its copies, after its
timeout, or after the disk has failed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from raymq.common.errors import InSyncReplicasError, ServiceNotAvailableError, StoreFailedError
from raymq.common.message import SendStatus
from raymq.common.protocol.store import AppendResult
from storage.append.durability import AppendProgress, ReplicaAcks, StartedAppend, waits_for
from tests.support.clients.fakes import WAIT_S
from tests.support.stores.stores import make_batch

WAITS = make_batch([b"waits"])
HASTY = replace(make_batch([b"hasty"]), wait_store_msg_ok=False)
END = 500
OK, SLOW_DISK, SLOW_SLAVE = SendStatus.SEND_OK, SendStatus.FLUSH_DISK_TIMEOUT, SendStatus.FLUSH_SLAVE_TIMEOUT


class Disk:
    """Fake state of the disk: the test sets the log offset up to which the log is flushed."""

    def __init__(self) -> None:
        self.flushed, self.failed = 0, False

    def is_durable(self, end_offset: int, *, late: bool) -> bool:
        if self.failed:
            raise StoreFailedError("the disk failed")
        return self.flushed >= end_offset


class Append:
    """A started append of two batches. One batch waits until it is durable, the other does not. The flush must be done
    by 10 s."""

    def __init__(self, disk: Disk | None, acks: ReplicaAcks | None = None) -> None:
        self.told: list[float | None] = []
        results = [AppendResult(OK, index, index, 0) for index in range(2)]
        self.started = StartedAppend(
            (results, END), [WAITS, HASTY], disk, acks, deadline_s=10.0, on_disk=self.told.append
        )

    def statuses(self, now_s: float) -> list[SendStatus] | None:
        results = self.started.settle(now_s)
        return None if results is None else [result.status for result in results]


def copies_up_to(ends: list[int]) -> ReplicaAcks:
    """Return fake acknowledgements: all replicas have copied the log up to the last element of `ends`. The list may
    grow later. An append waits at most 3 s for the copies."""
    return ReplicaAcks(None, lambda end_offset: ends[-1] >= end_offset, 3.0)


def test_an_append_that_waits_for_nothing_is_settled_at_once() -> None:
    append = Append(None)
    assert append.statuses(0.0) == [OK, OK]
    assert not append.told


def test_the_flush_settles_an_append() -> None:
    disk = Disk()
    append = Append(disk)
    disk.flushed = END - 1
    assert append.statuses(1.0) is None
    disk.flushed = END
    assert append.statuses(2.0) == [OK, OK]
    assert append.told == [2.0]


def test_waiting_batches_get_the_status_of_a_slow_disk() -> None:
    append = Append(Disk())
    assert append.statuses(9.9) is None
    assert append.statuses(append.started.deadline_s) == [SLOW_DISK, OK]
    assert append.told == [10.0]


def test_a_failed_disk_is_an_error() -> None:
    disk = Disk()
    append = Append(disk)
    assert append.statuses(1.0) is None
    disk.failed = True
    with pytest.raises(StoreFailedError):
        append.statuses(1.0)
    assert append.told == [None]


def test_replicas_have_their_own_time_once_the_disk_is_done() -> None:
    disk, ends = Disk(), [0]
    append = Append(disk, copies_up_to(ends))
    ends.append(END)
    assert append.statuses(1.0) is None, "the master's own disk comes first"
    ends.append(0)
    disk.flushed = END
    assert append.statuses(4.0) is None
    assert append.started.deadline_s == 7.0
    assert append.statuses(6.9) is None
    assert append.statuses(7.0) == [SLOW_SLAVE, OK]
    assert append.told == [4.0]


def test_copies_settle_an_append_with_a_slow_disk_too() -> None:
    ends = [END]
    append = Append(Disk(), copies_up_to(ends))
    assert append.statuses(10.0) == [SLOW_DISK, OK]


def test_copies_settle_an_append_without_a_wait_for_the_disk() -> None:
    ends = [0]
    append = Append(None, copies_up_to(ends))
    assert append.statuses(0.0) is None
    ends.append(END)
    assert append.statuses(0.1) == [OK, OK]


def test_an_error_of_the_replicas_is_raised() -> None:
    def replaced(end_offset: int) -> bool:
        raise ServiceNotAvailableError("replaced")

    append = Append(None, ReplicaAcks(None, replaced, 3.0))
    with pytest.raises(ServiceNotAvailableError):
        append.statuses(0.0)


def test_too_few_replicas_refuse_appends_that_wait_only() -> None:
    acks = ReplicaAcks(InSyncReplicasError("broker-a", 1, 2), lambda end_offset: True, 3.0)
    assert not waits_for([HASTY], acks)
    with pytest.raises(InSyncReplicasError):
        waits_for([HASTY, WAITS], acks)
    assert waits_for([HASTY, WAITS], None)


def test_progress_wakes_waiting_threads_and_listeners() -> None:
    disk, progress, heard = Disk(), AppendProgress(), threading.Event()
    progress.add_listener(heard.set)
    append = Append(disk)
    with ThreadPoolExecutor(1) as pool:
        append.started.deadline_s = threading.TIMEOUT_MAX / 2
        waiting = pool.submit(progress.wait_settled, append.started)
        progress.notify()
        assert heard.is_set()
        disk.flushed = END
        progress.notify()
        results = waiting.result(WAIT_S)
    assert [result.status for result in results] == [OK, OK]
