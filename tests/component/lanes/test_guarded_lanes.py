"""Tests of access checks (guards) in a storage actor. The guard checks the user of each request frame, and a refused
frame changes nothing."""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from actors.core.access.meter import ReadLimit
from actors.replica.data_plane import DataPlane
from raymq.common.errors import NoPermissionError
from raymq.common.identity import Identity, acting_as
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.remoting import storage_client
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.storage_client import StorageClient
from tests.support.clients.fakes import WAIT_S, FakeActor, description
from tests.support.clients.lanes import StorageDouble
from tests.support.stores.stores import make_batch, open_store

ALICE = Identity("alice", b"a" * 32)
ENDS = [FetchRequest("orders", 0, 0, 1)]


class Guarded:
    """A storage actor's lane server with an access check, and a client of it. The access check refuses the methods in
    `refused`."""

    def __init__(self, directory: Any, monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
        self.asked: list[tuple[str, str]] = []
        self.refused: set[str] = set()
        self.portions: dict[str, ReadLimit] = {}
        self.read: list[tuple[str, int, int]] = []
        self.store = open_store(directory)
        self.double = StorageDouble(
            self.store, host="127.0.0.1", users={ALICE.user: ALICE.key}.get, guard=self.guard, meter=self
        )
        actor = FakeActor({"describe": lambda: description(self.double.lanes.address, root=str(directory))})
        monkeypatch.setattr(storage_client, "ActorRef", lambda name: actor)
        self.client = StorageClient("storage-broker-a-0", "elsewhere" if remote else "here")

    def guard(self, request: LaneRequest, method: str, arguments: Sequence[Any]) -> None:
        self.asked.append((request.user, method))
        if method in self.refused:
            raise NoPermissionError(f"{request.user} may not {method}")

    def portion(self, user: str) -> ReadLimit | None:
        return self.portions.get(user)

    def consumed(self, user: str, size_bytes: int, messages: int) -> None:
        self.read.append((user, size_bytes, messages))


@pytest.fixture(params=[False, True], ids=["unix", "tcp"])
def guarded(request, tmp_path, monkeypatch):
    made = Guarded(tmp_path / "store", monkeypatch, request.param)
    with acting_as(ALICE):
        yield made
    made.client.close()
    made.double.close()


CALLS = {
    "append": lambda client: client.append([make_batch([b"x"])], WAIT_S),
    "fetch": lambda client: client._fetch(ENDS, 1000, 0.0, WAIT_S),
    "queue_bounds": lambda client: client.queue_bounds("orders", 0, WAIT_S),
    "offset_by_time": lambda client: client.offset_by_time("orders", 0, 0, WAIT_S),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_frame_is_carried_out_only_for_a_user_who_may_send_it(guarded, method):
    guarded.refused.add(method)
    with pytest.raises(NoPermissionError, match=f"alice may not {method}"):
        CALLS[method](guarded.client)
    assert guarded.store.queues.bounds("orders", 0).max_offset == 0
    guarded.refused.clear()
    CALLS[method](guarded.client)
    assert guarded.asked == [("alice", method)] * 2
    assert guarded.store.queues.bounds("orders", 0).max_offset == (method == "append")


def test_each_question_of_a_watch_is_asked_about(guarded):
    watch = guarded.client.open_watch(anywhere=True)
    watch.ask(ENDS, 0.0)
    answer_of(watch)
    guarded.refused.add("bounds_of_queues")
    watch.ask(ENDS, 0.0)
    with pytest.raises(NoPermissionError):
        answer_of(watch)
    watch.close()


def test_a_user_reads_permitted_topics(guarded):
    guarded.client.append([make_batch([b"x"])], WAIT_S)
    [result] = guarded.client.fetch(ENDS, 1000, 0.0, WAIT_S)
    assert result.status is PullStatus.FOUND


@pytest.mark.parametrize(
    ("portion", "count"), [(None, 5), (ReadLimit(0, 2), 2), (ReadLimit(1, 0), 1), (ReadLimit(1 << 20, 9), 5)], ids=str
)
def test_a_user_with_a_quota_gets_a_portion_that_is_counted(guarded, portion, count):
    guarded.client.append([make_batch([b"x"] * 5)], WAIT_S)
    if portion is not None:
        guarded.portions["alice"] = portion
    for wait_s in (0.0, WAIT_S):
        [result] = guarded.client._fetch([FetchRequest("orders", 0, 0, 32)], 1 << 20, wait_s, WAIT_S)
        assert result.count == count
    assert guarded.read == ([] if portion is None else [("alice", len(result.records), count)] * 2)


def test_offsets_are_not_counted(guarded):
    guarded.portions["alice"] = ReadLimit(1, 1)
    guarded.client.append([make_batch([b"x"])], WAIT_S)
    guarded.client._fetch(ENDS, 0, 0.0, WAIT_S)
    assert guarded.read == [("alice", 0, 0)]


def test_only_servers_may_send_frames_of_the_log(tmp_path):
    asked: list[str] = []

    def guard(request: LaneRequest, method: str, arguments: Sequence[Any]) -> None:
        asked.append(method)
        raise NoPermissionError(method)

    def handlers(plane: DataPlane) -> dict[int, Any]:
        return {
            kind: lambda request: request.answer(b"")
            for kind in (FrameKind.READ_LOG, FrameKind.APPEND_LOG, FrameKind.ACK_LOG)
        }

    store = open_store(tmp_path / "store")
    double = StorageDouble(store, users={ALICE.user: ALICE.key}.get, guard=guard, more=handlers)
    with acting_as(ALICE), closing(double), closing(Lane(double.lanes.address)) as lane:
        for kind in (FrameKind.READ_LOG, FrameKind.APPEND_LOG, FrameKind.ACK_LOG):
            with pytest.raises(NoPermissionError):
                lane.call(kind, (b"",), WAIT_S)
    assert asked == ["read_log", "append_log", "read_log"]


def answer_of(watch: Any) -> Any:
    assert select.select([watch], [], [], WAIT_S)[0], "no answer came"
    return watch.receive()
