"""StorageClient: lanes on the actor's node, actor calls from other nodes, and lost answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from raymq.common.errors import (
    MessageIllegalError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.common.protocol.store import QueueBounds, QueueSpan
from raymq.common.retry import persist_until
from raymq.remoting import lane_pool, storage_client
from raymq.remoting.lane import server as lane_server
from raymq.remoting.lane.calls import ControlCalls
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.server import LaneServer
from raymq.remoting.lane_pool import LANES_MAX
from raymq.remoting.storage_client import StorageClient
from tests.support.clients.fakes import WAIT_S, FakeActor, description
from tests.support.history.waiting import eventually

BOUNDS = QueueBounds(1, 9, 1)


@pytest.fixture
def servers():
    opened: list[LaneServer] = []

    def serve(methods) -> LaneServer:
        """A server of these control calls. APPENDs go to methods["append"], with the request."""
        handlers = {
            FrameKind.OPEN: lambda request: request.drop(),
            FrameKind.CALL: ControlCalls(methods, lambda name, call, fail: call()),
        }
        opened.append(LaneServer("test", handlers | {FrameKind.APPEND: methods.get("append", LaneRequest.drop)}))
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


def test_the_bytes_of_spans_go_over_a_lane(client, servers):
    def bytes_of_spans(spans: Sequence[QueueSpan]) -> list[list[int]]:
        return [[span.queue_id, span.end_offset - span.start_offset] for span in spans]

    server = servers({"bytes_of_spans": bytes_of_spans})
    storage, actor = client(describe=lambda: description(server.address))
    assert storage.bytes_of_spans([QueueSpan("orders", 3, 5, 9), QueueSpan("bills", 0, 0, 2)], WAIT_S) == [
        [3, 4],
        [0, 2],
    ]
    assert actor.calls == ["describe"]


def test_on_the_stores_node_calls_go_over_a_lane_that_is_kept(client, servers):
    server = servers({"queue_bounds": lambda topic, queue_id: BOUNDS})
    storage, actor = client(describe=lambda: description(server.address))
    for _ in range(3):
        assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
        assert server.connections == 1
    assert actor.calls == ["describe"]


def test_from_another_node_calls_go_to_the_actor_if_it_has_no_lane_for_other_nodes(client):
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
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    assert actor.calls[4:] == ["queue_bounds"]  # the address is the same: no lane is tried for a while


def test_a_lane_that_could_not_be_opened_is_tried_again_after_a_pause(client, servers, monkeypatch):
    server = servers({"queue_bounds": lambda topic, queue_id: QueueBounds(2, 3, 2)})
    storage, _ = client(describe=lambda: description(server.address), queue_bounds=lambda topic, queue_id: BOUNDS)
    monkeypatch.setattr(lane_server, "CONNECTIONS_MAX", 0)
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    monkeypatch.setattr(lane_server, "CONNECTIONS_MAX", 1)
    eventually(lambda: storage.queue_bounds("orders", 0, WAIT_S) == QueueBounds(2, 3, 2), "a lane is opened")


def test_a_new_address_is_tried_at_once(client, servers):
    server = servers({"queue_bounds": lambda topic, queue_id: BOUNDS})
    described = [description(), description(server.address)]
    storage, _ = client(describe=lambda: described.pop(0), queue_bounds=lambda topic, queue_id: QueueBounds(0, 0, 0))
    assert storage.queue_bounds("orders", 0, WAIT_S) == QueueBounds(0, 0, 0)
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS


def test_after_a_restart_of_the_actor_its_new_lane_is_used(client, servers):
    old, new = (
        servers({"queue_bounds": lambda topic, queue_id: BOUNDS}),
        servers({"queue_bounds": lambda topic, queue_id: QueueBounds(2, 3, 2)}),
    )
    addresses = [old.address, new.address]
    storage, actor = client(describe=lambda: description(addresses.pop(0)))
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    old.close()
    with pytest.raises(ServiceNotAvailableError, match="the lane to storage-a-0 broke during queue_bounds"):
        storage.queue_bounds("orders", 0, WAIT_S)
    assert storage.queue_bounds("orders", 0, WAIT_S) == QueueBounds(2, 3, 2)
    assert actor.calls == ["describe"] * 2


def test_a_refusal_of_the_store_is_raised_as_it_is_and_the_lane_is_kept(client, servers):
    def refuse(request):
        raise StoreNotWritableError("the disk is full")

    server = servers({"append": refuse})
    storage, actor = client(describe=lambda: description(server.address))
    for _ in range(2):
        with pytest.raises(StoreNotWritableError, match="the disk is full"):
            storage.append([], WAIT_S)
    assert actor.calls == ["describe"]


def test_a_lane_call_without_an_answer_is_a_timeout_and_the_next_call_takes_another_lane(client, servers):
    kept = []
    server = servers({"append": kept.append, "queue_bounds": lambda topic, queue_id: BOUNDS})
    storage, _ = client(describe=lambda: description(server.address))
    storage.queue_bounds("orders", 0, WAIT_S)  # opens a lane, which would take a part of the next call's time
    with pytest.raises(RequestTimeoutError):
        storage.append([], 0.2)
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS


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
    kept = []
    server = servers({"append": kept.append})
    storage, actor = client(describe=lambda: description(server.address), append=lambda batches: "by the actor")
    storage.describe()
    threads = [threading.Thread(target=storage.append, args=([], WAIT_S)) for _ in range(LANES_MAX)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(kept) == LANES_MAX, "all lanes are in use")
    assert storage.append([], WAIT_S) == "by the actor"
    for request in kept:
        request.answer()
    for thread in threads:
        thread.join(WAIT_S)
    assert actor.calls == ["describe", "append"]


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


# persist_until


class Clock:
    """Time that passes only in sleeps."""

    def __init__(self, monkeypatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(lane_pool.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(lane_pool.time, "sleep", self.sleep)

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
