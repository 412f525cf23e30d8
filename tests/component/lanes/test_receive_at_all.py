"""Tests of a simple consumer's receive from several broker groups, over real lanes: it waits at all groups at the same
time, and hands out or gives back whatever they lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.consumer.simple import engine as engine_module
from raymq.client.consumer.simple.engine import SimpleEngine
from raymq.client.consumer.simple.lease_reader import LeaseReader
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.simple.settings import SimpleSettings
from raymq.common.errors import GroupNotExistError, NoPermissionError, RaymqError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.protocol.pop import LeasedRange, LeasePart, ReceiveAnswer, ReceiveRequest
from raymq.remoting import broker_client
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import ControlCalls, encode_result
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.server import LaneServer
from tests.support.clients.fakes import WAIT_S, FakeActor
from tests.support.clients.lanes import unix_only
from tests.support.history.waiting import eventually
from tests.unit.raymq.client.consumer.simple.test_pop_calls import read

GROUP, TOPIC = "billing", "orders"
NAMES = ("broker-a", "broker-b")
LONG_S = 600.0
SHORT_S = 60.0
"""A group answers a receive at once that waits for less."""


class Group:
    """One broker group with a real lane. It leases the messages that `put` adds, and records its calls."""

    def __init__(self, name: str, *, remote: bool) -> None:
        self.name = name
        self.receives: list[ReceiveRequest] = []
        self.returned: list[LeasePart] = []
        self.starts = 0
        self.fails: list[RaymqError] = []
        """The errors that the next receives raise."""
        self.on_leave = 0
        """The number of messages that arrive just before the client asks to end its wait."""
        self.answers_leave = True
        self._offset, self._ready = 0, 0
        self._waiting: list[tuple[LaneRequest, ReceiveRequest]] = []
        self._lock = threading.Lock()
        methods = {"start_receiving": self.start_receiving, "change_invisible": self.change_invisible}
        calls = ControlCalls(methods, lambda name, run, fail: run(), {"receive_messages": self.receive_messages})
        self._server = LaneServer("test", {FrameKind.CALL: calls}, host="127.0.0.1" if remote else "")
        own = self._server.address
        self.address = LaneAddress("\0raymq-elsewhere", own.secret, own.host, own.port) if remote else unix_only(own)

    def start_receiving(self, group: str, topics: list[str], query: StartOffsetQuery) -> None:
        self.starts += 1

    def change_invisible(
        self, group: str, parts: list[LeasePart], invisible_ms: int, counted: bool
    ) -> list[LeasedRange | None]:
        assert (group, invisible_ms, counted) == (GROUP, 0, False)
        self.returned += parts
        return [None] * len(parts)

    def receive_messages(self, lane: LaneRequest, request: ReceiveRequest) -> None:
        with self._lock:
            self.receives.append(request)
            if self.fails:
                lane.fail(self.fails.pop(0))
            elif self._ready or request.wait_s < SHORT_S:
                lane.answer(encode_result(self._lease(request)))
            else:
                self._waiting.append((lane, request))
                lane.when_gone(self._left)

    def _left(self) -> None:
        if self.answers_leave:
            self.put(self.on_leave)

    def put(self, count: int) -> None:
        """Store messages, and answer the receives that wait, also if there is no message."""
        with self._lock:
            self._ready += count
            waiting, self._waiting = self._waiting, []  # an answered client may look at `waits` at once
            for lane, request in waiting:
                lane.answer(encode_result(self._lease(request)))

    def _lease(self, request: ReceiveRequest) -> ReceiveAnswer:
        count = min(self._ready, request.max_messages)
        self._ready -= count
        first, self._offset = self._offset, self._offset + count
        starts = range(first, first + count)
        return ReceiveAnswer(tuple(LeasedRange(TOPIC, 5, start, 1, 7, request.invisible_ms, 1) for start in starts), 16)

    @property
    def waits(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self._server.close()


class Routes:
    def __init__(self) -> None:
        self.invalidated = 0

    def wait(self, topic: str, timeout_s: float) -> Any:
        return SimpleNamespace(subscribe_queues=[MessageQueue(topic, name, 0) for name in NAMES])

    def invalidate(self, topic: str) -> None:
        self.invalidated += 1


class Consumer:
    """A simple consumer of both broker groups."""

    def __init__(self) -> None:
        fakes: Any = {"routes": Routes(), "storages": None, "announce": lambda *_: None, "on_close": lambda _: None}
        self.engine = SimpleEngine(SimpleSettings(GROUP), **fakes)
        self.engine.subscribe(TOPIC, "*")
        self.engine._turn = 1  # the next look begins at the first broker group

    def receive(self, count: int = 32, wait_s: float = LONG_S) -> Future[list[ReceivedMessage]]:
        """Begin a receive in a thread of its own."""
        result: Future[list[ReceivedMessage]] = Future()

        def run() -> None:
            try:
                result.set_result(self.engine.receive(count, 60.0, wait_s))
            except RaymqError as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return result


@pytest.fixture(params=["unix", "tcp"])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Group]]:
    monkeypatch.setattr(engine_module, "RECEIVE_WAIT_S", LONG_S)
    monkeypatch.setattr(LeaseReader, "read", lambda _, name, given, wanted, max_bytes: read(given))
    groups = {name: Group(name, remote=request.param == "tcp") for name in NAMES}

    def actor(name: str) -> Any:
        return FakeActor({"describe": lambda: SimpleNamespace(lane=groups[name].address)})

    monkeypatch.setattr(broker_client, "ActorRef", actor)
    yield list(groups.values())
    for group in groups.values():
        group.close()


@pytest.fixture
def consumer(groups: list[Group]) -> Iterator[Consumer]:
    consumer = Consumer()
    yield consumer
    consumer.engine.close()


def until(condition: Callable[[], bool], what: str) -> None:
    eventually(condition, what, WAIT_S)


def waits_of(group: Group) -> list[bool]:
    """Return for each receive at a group whether it waits there for messages."""
    return [request.wait_s > 0 for request in group.receives]


def test_a_lone_message_of_the_second_group_ends_the_one_wait_at_both(groups: list[Group], consumer: Consumer) -> None:
    first, second = groups
    receiving = consumer.receive()
    until(lambda: first.waits == second.waits == 1, "a wait at both groups")
    second.put(1)
    [message] = receiving.result(WAIT_S)
    assert message._receipt.broker_name == "broker-b"
    assert waits_of(first) == waits_of(second) == [False, True], "one look, and one wait"
    assert (first.returned, second.returned, first.waits) == ([], [], 0)
    # the same connections serve the next receive
    again = consumer.receive()
    until(lambda: first.waits == second.waits == 1, "a wait at both groups")
    first.put(1)
    assert [one._receipt.broker_name for one in again.result(WAIT_S)] == ["broker-a"]
    assert first.starts == second.starts == 1


def test_messages_of_several_groups_are_handed_out_up_to_the_wanted_number(
    groups: list[Group], consumer: Consumer
) -> None:
    first, second = groups
    first.on_leave = 3
    receiving = consumer.receive(count=4)
    until(lambda: first.waits == second.waits == 1, "a wait at both groups")
    second.put(3)
    received = receiving.result(WAIT_S)
    assert [one._receipt.broker_name for one in received] == ["broker-a"] * 3 + ["broker-b"]
    assert first.returned == []
    assert sorted(part.start for part in second.returned) == [1, 2], "the others are visible at once"


def test_a_group_that_has_a_backlog_is_asked_alone(groups: list[Group], consumer: Consumer) -> None:
    first, second = groups
    first.put(5)
    second.put(5)
    assert len(consumer.receive(count=2).result(WAIT_S)) == 2
    assert (len(first.receives) + len(second.receives), first.waits + second.waits) == (1, 0)


def test_a_group_that_does_not_answer_the_end_holds_up_nothing_for_long(
    groups: list[Group], consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = groups
    first.answers_leave = False
    monkeypatch.setattr(broker_client, "LAST_ANSWER_S", 0.05)
    receiving = consumer.receive()
    until(lambda: first.waits == second.waits == 1, "a wait at both groups")
    second.put(1)
    assert len(receiving.result(WAIT_S)) == 1
    # the answer that comes late is not taken for the answer to the next receive
    first.put(1)
    first.answers_leave = True
    again = consumer.receive()
    until(lambda: first.waits == second.waits == 1, "a wait at both groups")
    second.put(1)
    [message] = again.result(WAIT_S)
    assert message._receipt.broker_name == "broker-b"


def test_a_message_arrives_while_another_group_fails(groups: list[Group], consumer: Consumer) -> None:
    first, second = groups
    first.fails = [ServiceNotAvailableError("the broker is starting")] * 1000
    receiving = consumer.receive()
    until(lambda: any(waits_of(second)), "a wait at the other group")
    second.put(1)
    [message] = receiving.result(WAIT_S)
    assert message._receipt.broker_name == "broker-b"


def test_a_group_that_fails_during_the_wait_is_asked_again(groups: list[Group], consumer: Consumer) -> None:
    first, second = groups
    receiving = consumer.receive()
    until(lambda: first.waits == second.waits == 1, "a wait at both groups")
    first.fails = [ServiceNotAvailableError("the broker is stopping")]
    first.put(0)  # answers the wait without a message: the receive asks again, and meets the error
    until(lambda: not first.fails, "the error")
    first.put(1)
    assert len(receiving.result(WAIT_S)) == 1


def test_a_group_that_was_deleted_gets_its_start_position_again(groups: list[Group], consumer: Consumer) -> None:
    first, second = groups
    receiving = consumer.receive()
    until(lambda: first.waits == second.waits == 1, "a wait at both groups")
    first.fails = [GroupNotExistError(GROUP)]
    first.put(0)
    until(lambda: first.starts == 2, "a second start position")
    first.put(1)
    assert len(receiving.result(WAIT_S)) == 1
    assert second.starts == 1


def test_an_error_that_would_come_again_ends_the_receive(groups: list[Group], consumer: Consumer) -> None:
    first, second = groups
    receiving = consumer.receive()
    until(lambda: first.waits == second.waits == 1, "a wait at both groups")
    first.fails = [NoPermissionError("the group may not consume")]
    first.put(0)
    until(lambda: not first.fails, "the error")
    second.put(0)
    with pytest.raises(NoPermissionError, match="may not consume"):
        receiving.result(WAIT_S)


def test_a_broken_connection_counts_as_an_error_of_its_group(groups: list[Group], consumer: Consumer) -> None:
    first, second = groups
    receiving = consumer.receive()
    until(lambda: first.waits == second.waits == 1, "a wait at both groups")
    first.close()
    second.put(1)
    assert len(receiving.result(WAIT_S)) == 1
