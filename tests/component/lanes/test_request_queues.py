"""Tests of requests to a store while all of its threads are busy: limits of their number and of their waiting time, and
requests that are not affected. The tests use no Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from actors.replica.data_plane import READ_THREADS
from raymq.common.config.store import StoreOptions
from raymq.common.errors import SystemBusyError
from raymq.common.message import SendStatus
from raymq.common.protocol.stats import RequestFigures
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.remoting import storage_client
from raymq.remoting.storage_client import StorageClient
from tests.support.clients.fakes import WAIT_S, FakeActor, description
from tests.support.clients.lanes import StorageDouble
from tests.support.history.waiting import eventually
from tests.support.stores.stores import make_batch, open_store

CALLERS = 16


class HeldStore:
    """A store whose read threads are all busy with fetches, and the callers of these fetches. Each caller has its own
    lane (direct socket connection)."""

    def __init__(self, actor: StorageDouble, callers: ThreadPoolExecutor, go_on: threading.Event) -> None:
        self.actor, self.go_on = actor, go_on
        self._callers = callers
        self._clients: list[StorageClient] = []

    def client(self) -> StorageClient:
        self._clients.append(StorageClient("storage-a-0", "here"))
        return self._clients[-1]

    def fetch(self) -> Future[list[FetchResult]]:
        requests = [FetchRequest("orders", 0, 0, 10)]
        return self._callers.submit(self.client().fetch, requests, 1 << 20, 0.0, WAIT_S)

    def figures(self, kind: str) -> RequestFigures:
        [found] = [one for one in self.actor.lanes.requests() if one.kind == kind]
        return found

    def close(self) -> None:
        self.go_on.set()
        self._callers.shutdown()
        for client in self._clients:
            client.close()
        self.actor.close()


@pytest.fixture
def hold(monkeypatch, tmp_path) -> Iterator[Callable[..., HeldStore]]:
    """Yield a function that opens a store with the given settings, stores one message, and blocks all read threads of
    the store."""
    opened: list[HeldStore] = []

    def hold(**settings: int) -> HeldStore:
        actor = StorageDouble(open_store(tmp_path / "store"), host="127.0.0.1", queues=StoreOptions(**settings))
        fake = FakeActor({"describe": lambda: description(actor.lanes.address, node_id="elsewhere")})
        monkeypatch.setattr(storage_client, "ActorRef", lambda name: fake)
        go_on, began = threading.Event(), threading.Semaphore(0)
        read = actor.store.fetch

        def stands_still(*arguments, **options):
            began.release()
            assert go_on.wait(WAIT_S)
            return read(*arguments, **options)

        monkeypatch.setattr(actor.store, "fetch", stands_still)
        held = HeldStore(actor, ThreadPoolExecutor(CALLERS), go_on)
        opened.append(held)
        held.client().append([make_batch([b"first"])], WAIT_S)
        # Start the fetches one after another: if they all arrived at once, the store would refuse one of them.
        for _ in range(READ_THREADS):
            held.fetch()
            assert began.acquire(timeout=WAIT_S)
        return held

    yield hold
    for held in opened:
        held.close()


def test_a_fetch_over_the_queue_limit_is_refused_and_appends_continue(hold):
    held = hold(pull_queue_capacity=2)
    waiting = [held.fetch(), held.fetch()]
    eventually(lambda: held.figures("pull").waiting == 2, "both wait")
    with pytest.raises(SystemBusyError, match="as many as pull_queue_capacity allows"):
        held.fetch().result(WAIT_S)
    [result] = held.client().append([make_batch([b"meanwhile"])], WAIT_S)
    assert result.status is SendStatus.SEND_OK
    assert not any(future.done() for future in waiting)
    held.go_on.set()
    assert [len(future.result(WAIT_S)) for future in waiting] == [1, 1]
    figures = held.figures("pull")
    assert (figures.waiting, figures.most, figures.refused_full, figures.refused_late) == (0, 2, 1, 0)


def test_limits_change_while_the_store_is_open(hold):
    held = hold()
    waiting = held.fetch()
    eventually(lambda: held.figures("pull").waiting == 1, "it waits")
    held.actor.lanes.limit(StoreOptions(pull_queue_capacity=1))
    with pytest.raises(SystemBusyError, match="1 requests"):
        held.fetch().result(WAIT_S)
    held.actor.lanes.limit(StoreOptions(pull_queue_capacity=2))
    another = held.fetch()
    held.go_on.set()
    assert [len(future.result(WAIT_S)) for future in (waiting, another)] == [1, 1]


def test_a_request_that_waits_too_long_is_refused_while_all_threads_are_busy(hold):
    held = hold(wait_time_in_pull_queue_ms=50, wait_time_in_admin_broker_queue_ms=60)
    with pytest.raises(SystemBusyError, match="wait_time_in_pull_queue_ms is 50"):
        held.fetch().result(WAIT_S)
    with pytest.raises(SystemBusyError, match="wait_time_in_admin_broker_queue_ms is 60"):
        held.client().queue_bounds("orders", 0, WAIT_S)
    assert not held.go_on.is_set()
    for kind, least_ms in (("pull", 50), ("admin", 60)):
        figures = held.figures(kind)
        assert (figures.waiting, figures.refused_late) == (0, 1)
        assert figures.longest_ms >= least_ms
    held.go_on.set()
    eventually(lambda: held.client().queue_bounds("orders", 0, WAIT_S).max_offset == 1, "calls are answered again")
