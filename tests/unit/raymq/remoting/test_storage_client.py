"""StorageClient: lanes on the actor's node, actor calls from other nodes, and lost answers."""

from __future__ import annotations

import threading

import pytest

from raymq.errors import (
    MessageIllegalError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.message import PullStatus
from raymq.protocol.store import FetchRequest, QueueBounds
from raymq.record.hashing import tags_code
from raymq.remoting import storage_client
from raymq.remoting.lane import LaneServer
from raymq.remoting.storage_client import LANES_MAX, StorageClient
from raymq.retry import persist_until
from tests.support.clients.fakes import WAIT_S, description
from tests.support.stores.stores import make_batch, open_store

BOUNDS = QueueBounds(1, 9, 1)


class FakeActor:
    """A stand-in for ActorRef that answers calls from `methods` and counts them."""

    def __init__(self, methods) -> None:
        self.methods = methods
        self.calls: list[str] = []

    def call(self, method, *args, timeout_s):
        self.calls.append(method)
        return self.methods[method](*args)


@pytest.fixture
def servers():
    opened: list[LaneServer] = []

    def serve(methods) -> LaneServer:
        opened.append(LaneServer(methods, "test"))
        return opened[-1]

    yield serve
    for server in opened:
        server.close()


@pytest.fixture
def client(monkeypatch):
    """Makes a client of a fake actor with these methods, on the node "here"."""
    clients = []

    def make(**methods) -> tuple[StorageClient, FakeActor]:
        actor = FakeActor(methods)
        monkeypatch.setattr(storage_client, "ActorRef", lambda name: actor)
        clients.append(StorageClient("storage-a-0", "here"))
        return clients[-1], actor

    yield make
    for made in clients:
        made.close()


def test_on_the_stores_node_calls_go_over_a_lane_that_is_kept(client, servers):
    threads = set()

    def queue_bounds(topic, queue_id):
        threads.add(threading.get_ident())
        return BOUNDS

    server = servers({"queue_bounds": queue_bounds})
    storage, actor = client(describe=lambda: description(server.address))
    for _ in range(3):
        assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    assert actor.calls == ["describe"]
    assert len(threads) == 1  # one connection, one thread


def test_from_another_node_calls_go_to_the_actor(client):
    storage, actor = client(
        describe=lambda: description(node_id="elsewhere"), queue_bounds=lambda topic, queue_id: BOUNDS
    )
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    assert storage.reader() is None
    assert actor.calls == ["describe", "queue_bounds"]


def test_where_no_lane_can_be_opened_the_actor_is_called_and_asked_for_its_address_again(client):
    storage, actor = client(describe=description, queue_bounds=lambda topic, queue_id: BOUNDS)
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    assert actor.calls == ["describe", "queue_bounds"] * 2


def test_after_a_restart_of_the_actor_its_new_lane_is_used(client, servers):
    old, new = servers({"queue_bounds": lambda *_: BOUNDS}), servers({"queue_bounds": lambda *_: QueueBounds(2, 3, 2)})
    addresses = [old.address, new.address]
    storage, actor = client(describe=lambda: description(addresses.pop(0)))
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    old.close()
    with pytest.raises(ServiceNotAvailableError, match="the lane to storage-a-0 broke during queue_bounds"):
        storage.queue_bounds("orders", 0, WAIT_S)
    assert storage.queue_bounds("orders", 0, WAIT_S) == QueueBounds(2, 3, 2)
    assert actor.calls == ["describe"] * 2


def test_a_refusal_of_the_store_is_raised_as_it_is_and_the_lane_is_kept(client, servers):
    def refuse(batches):
        raise StoreNotWritableError("the disk is full")

    server = servers({"append": refuse})
    storage, actor = client(describe=lambda: description(server.address))
    for _ in range(2):
        with pytest.raises(StoreNotWritableError, match="the disk is full"):
            storage.append([], WAIT_S)
    assert actor.calls == ["describe"]


def test_a_lane_call_without_an_answer_is_a_timeout_and_the_next_call_takes_another_lane(client, servers):
    release = threading.Event()
    server = servers({"append": lambda batches: release.wait(WAIT_S), "queue_bounds": lambda *_: BOUNDS})
    storage, _ = client(describe=lambda: description(server.address))
    try:
        with pytest.raises(RequestTimeoutError):
            storage.append([], 0.01)
        assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    finally:
        release.set()


@pytest.mark.parametrize("failure", [ServiceNotAvailableError("restarting"), RequestTimeoutError("append", 1.0)])
def test_an_actor_call_without_an_answer_makes_the_client_ask_for_the_address_again(client, failure):
    def append(batches):
        raise failure

    storage, actor = client(describe=lambda: description(node_id="elsewhere"), append=append)
    for _ in range(2):
        with pytest.raises(type(failure)):
            storage.append([], WAIT_S)
    assert actor.calls == ["describe", "append"] * 2


def test_beyond_the_limit_of_lanes_calls_go_to_the_actor(client, servers):
    release, inside = threading.Event(), threading.Semaphore(0)

    def wait(*_):
        inside.release()
        release.wait(WAIT_S)
        return BOUNDS

    server = servers({"queue_bounds": wait})
    storage, actor = client(describe=lambda: description(server.address), queue_bounds=lambda *_: QueueBounds(0, 0, 0))
    storage.describe()
    threads = [threading.Thread(target=storage.queue_bounds, args=("t", 0, WAIT_S)) for _ in range(LANES_MAX)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert inside.acquire(timeout=WAIT_S)
    assert storage.queue_bounds("t", 0, WAIT_S) == QueueBounds(0, 0, 0)
    release.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert actor.calls == ["describe", "queue_bounds"]


def test_control_calls_always_go_to_the_actor(client):
    storage, actor = client(read_config=lambda name: f"text of {name}")
    assert storage.control("read_config", "topics.json", timeout_s=WAIT_S) == "text of topics.json"
    assert actor.calls == ["read_config"]


def test_an_actor_whose_store_did_not_open_gives_the_reason(client):
    def describe():
        raise StoreNotWritableError("read-only file system")

    storage, _ = client(describe=describe)
    with pytest.raises(StoreNotWritableError, match="read-only"):
        storage.fetch([], 1000, 0.0, WAIT_S)


@pytest.fixture
def store(tmp_path, no_flushes):
    store = open_store(tmp_path / "store")
    store.append([make_batch([b"one", b"two", b"three"])])
    yield store
    store.close()


@pytest.fixture
def no_flushes(monkeypatch):
    import os

    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def fetch_of(store):
    return lambda requests, max_bytes, wait_s: store.fetch(requests, max_bytes=max_bytes, wait_s=wait_s)


@pytest.mark.parametrize("node_id", ["here", "elsewhere"])
def test_reading_gives_the_same_near_the_files_and_far_from_them(client, servers, store, tmp_path, node_id):
    server = servers({"fetch": fetch_of(store)})
    where = description(server.address, node_id=node_id, root=str(tmp_path / "store"))
    storage, _ = client(describe=lambda: where, fetch=fetch_of(store))
    requests = [
        FetchRequest("orders", 0, 1, 100),
        FetchRequest("orders", 0, 3, 100),
        FetchRequest("orders", 0, 7, 100),
        FetchRequest("orders", 1, 0, 100),
        FetchRequest("orders", 0, 0, 1),
    ]
    results = storage.fetch(requests, 1 << 20, 0.0, WAIT_S)
    assert results == store.fetch(requests, max_bytes=1 << 20, wait_s=0.0)
    assert [result.status for result in results[:3]] == [
        PullStatus.FOUND,
        PullStatus.NO_NEW_MESSAGE,
        PullStatus.OFFSET_ILLEGAL,
    ]
    assert results[0].count == 2


def test_the_files_of_a_log_on_several_disks_are_read_in_place_also_after_these_changed(
    client, servers, tmp_path, no_flushes
):
    logs = (tmp_path / "a", tmp_path / "b")
    store = open_store(tmp_path / "store", store_path_commit_log=logs)
    for _ in range(3):
        store.append([make_batch([b"x" * 40_000])])

    def only_ends(requests, max_bytes, wait_s):
        assert max_bytes == 0, "the files were not read in place"
        return store.fetch(requests, max_bytes=max_bytes, wait_s=wait_s)

    server = servers({"fetch": only_ends})
    described = [description(server.address, root=str(tmp_path / "store"), logs=tuple(map(str, logs)))]
    storage, _ = client(describe=lambda: described[-1])
    requests = [FetchRequest("orders", 0, 0, 100)]
    assert storage.fetch(requests, 1 << 20, 0.0, WAIT_S)[0].count == 3
    for log in logs:
        log.rename(tmp_path / f"new-{log.name}")
    moved = tuple(str(tmp_path / f"new-{log.name}") for log in logs)
    described.append(description(server.address, root=str(tmp_path / "store"), logs=moved))
    storage._drop_lanes()
    assert storage.fetch(requests, 1 << 20, 0.0, WAIT_S)[0].count == 3
    for name, log in zip(moved, logs, strict=True):
        (tmp_path / name).rename(log)


@pytest.mark.parametrize("node_id", ["here", "elsewhere"])
def test_records_the_store_has_searched_for_tags_are_not_searched_again(client, servers, tmp_path, no_flushes, node_id):
    """The client's own reader would search on: the store tells it where to begin, and that there is nothing."""
    store = open_store(tmp_path / "store", max_filter_message_size_bytes=20 * 40)
    store.append([make_batch([b"x"] * 50, tags="no"), make_batch([b"here"], tags="yes")])
    server = servers({"fetch": fetch_of(store)})
    where = description(server.address, node_id=node_id, root=str(tmp_path / "store"))
    storage, _ = client(describe=lambda: where, fetch=fetch_of(store))

    def ask(offset):
        request = FetchRequest("orders", 0, offset, 10, frozenset([tags_code("yes")]))
        [result] = storage.fetch([request], 1 << 20, 0.0, WAIT_S)
        return result.status, result.next_offset, result.count

    assert ask(0) == (PullStatus.NO_MATCHED_MESSAGE, 40, 0)
    assert ask(40) == (PullStatus.FOUND, 51, 1)
    store.close()


def test_a_small_limit_still_gives_one_message_of_each_queue_that_has_one(client, servers, store, tmp_path):
    store.append([make_batch([b"x"], queue_id=1)])
    server = servers({"fetch": fetch_of(store)})
    storage, _ = client(describe=lambda: description(server.address, root=str(tmp_path / "store")))
    requests = [FetchRequest("orders", 0, 0, 100), FetchRequest("orders", 1, 0, 100)]
    assert [result.count for result in storage.fetch(requests, 1, 0.0, WAIT_S)] == [1, 1]


# persist_until


class Clock:
    """Time that passes only in sleeps."""

    def __init__(self, monkeypatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(storage_client.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(storage_client.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_retryable_failure_is_tried_again_until_it_succeeds(clock):
    failures: list[RaymqError] = [ServiceNotAvailableError("1"), RequestTimeoutError("2", 1.0), SystemBusyError("3")]
    lefts = []

    def call(left_s):
        lefts.append(left_s)
        if failures:
            raise failures.pop(0)
        return "done"

    assert persist_until(clock.now_s + 10.0, call) == "done"
    assert lefts == sorted(lefts, reverse=True)
    assert lefts[0] == 10.0


def test_the_last_failure_is_raised_before_the_time_is_up(clock):
    deadline_s = clock.now_s + 3.0

    def call(left_s):
        raise ServiceNotAvailableError(f"left {left_s > 1}")

    with pytest.raises(ServiceNotAvailableError, match="left False"):
        persist_until(deadline_s, call)
    assert clock.now_s < deadline_s


def test_a_failure_that_trying_again_cannot_help_is_raised_at_once(clock):
    calls = []

    def call(left_s):
        calls.append(left_s)
        raise MessageIllegalError("no")

    with pytest.raises(MessageIllegalError):
        persist_until(clock.now_s + 10.0, call)
    assert len(calls) == 1


def test_a_deadline_that_has_passed_still_gives_one_attempt(clock):
    assert persist_until(clock.now_s - 5.0, lambda left_s: left_s) == 0.1
