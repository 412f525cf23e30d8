"""Tests of the calls of a broker's clients. A call has the same result or error over a lane (direct socket connection)
as it has as an actor method."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.broker import lane as broker_lane
from actors.broker.lane import BrokerLane
from actors.broker.monitor import BrokerMonitor
from actors.broker.pop.methods import PopMethods
from actors.broker.pop.receives import Receives
from actors.broker.state_log import StateLog
from actors.core.broker.client_registry import ClientRegistry
from actors.members.direct_methods import DirectMethods
from actors.members.methods import QuestionMethods
from actors.transactions.methods import TransactionMethods
from raymq.common.config.cluster import BrokerOptions
from raymq.common.errors import (
    GroupNotExistError,
    InvalidArgumentError,
    NoPermissionError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    SystemBusyError,
    TopicNotExistError,
)
from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.common.protocol.clients import ClientHeartbeat, ConsumerData
from raymq.common.protocol.group import CommitAnswer, GroupConfig, OffsetCommit, QueueOffset, StartOffsetQuery
from raymq.common.protocol.pop import ReceiveAnswer, ReceiveRequest
from raymq.common.protocol.route import NewTopic
from raymq.common.protocol.store import QueueBounds, QueueEnds
from raymq.common.protocol.transactions import TransactionCheck
from raymq.remoting import broker_client as module, lane_pool
from raymq.remoting.broker_client import BrokerClient, BrokerDescription
from raymq.remoting.lane import server as lane_server
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.async_client import open_lane
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.frames import FrameKind
from raymq.telemetry.metrics.client_figures import ClientMetrics
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually
from tests.unit.actors.broker.test_receives import LONG_S, Ends
from tests.unit.actors.broker.test_state_log import CallGate, Sender, Store

TIMEOUT_S = 10.0
FIRST = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)


class LocalBroker(PopMethods, TransactionMethods, QuestionMethods, DirectMethods):
    """Fake of a broker's actor without Ray, on a fake store that keeps state records. The queues of the fake store hold
    the offsets 3 to 9."""

    def __init__(self) -> None:
        self.store = Store("storage-broker-a-0")
        self.send = Sender(self.store)
        log = StateLog("broker-a", self.store, self.send)  # type: ignore[arg-type]  # a fake
        log.load()
        settings: Any = SimpleNamespace(
            broker_name="broker-a", options=SimpleNamespace(auto_create_subscription_group=True)
        )
        store: Any = SimpleNamespace(bounds_of_queues=lambda queues: [QueueBounds(3, 10, 0) for _ in queues])
        monitor = BrokerMonitor(log, lambda: store, settings.options, self.update_group)
        no_receives: Any = SimpleNamespace(known={})
        PopMethods.__init__(self, settings, log, store, monitor, no_receives)
        TransactionMethods.__init__(self, store, lambda topic: None)
        QuestionMethods.__init__(self, lambda: self.lane.loop)
        DirectMethods.__init__(self, lambda: self.lane.loop, log.state_now)
        self.clients = ClientRegistry()
        self.lane = self.open_lane()

    @property
    def later(self) -> dict[str, Any]:
        """Return the broker's methods that answer a request after the handler has returned, by method name."""
        return {**self._answered_later, "take_questions": self._take_questions_soon, **self._direct_answered_later}

    def open_lane(self) -> BrokerLane:
        self.lane = BrokerLane("test", self, self._commit_soon, "127.0.0.1", self.later)
        return self.lane

    @property
    def log(self) -> StateLog:
        return self._log

    def _subscriptions(self) -> Mapping[str, Collection[str]] | None:
        return self.clients.subscriptions(time.monotonic())

    def delete_topic(self, topic: str) -> None:
        self._change(lambda state: state.decide_topic_delete(topic))

    def _change(self, decide: Any) -> bool:
        return self._log.change(decide)

    def create_topics(self, topics: list[NewTopic]) -> bool:
        return self._change(lambda state: state.decide_topics(topics))

    def auto_create_topic(self, topic: str, default_topic_queue_nums: int, layout: str = "") -> None:
        self._change(lambda state: state.decide_auto_topic(topic, default_topic_queue_nums, 8, layout))

    def take_transaction_checks(self, group: str, client_id: str) -> list[TransactionCheck]:
        return []

    def leave_transaction_checks(self, group: str, client_id: str) -> None:
        """Replace the broker's method, because this fake broker has no transaction checks."""

    def heartbeat(self, heartbeat: ClientHeartbeat) -> ClientMetrics:
        self.clients.heartbeat(heartbeat, 0.0)
        return ClientMetrics("shop", per_topic_max=7)

    def unregister_client(self, client_id: str) -> None:
        self.clients.unregister(client_id)

    def close(self) -> None:
        self.lane.close()
        self.log.close()


class Actor:
    """Fake of the broker's actor that calls the broker's methods with copies of the arguments. `way`: whether clients
    reach the broker's lane (direct socket connection) by "unix" or "tcp"."""

    def __init__(self, broker: LocalBroker, way: str) -> None:
        self.broker, self.way = broker, way
        self.calls: list[str] = []

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append(method)
        if method == "describe":
            by_lane = {"unix": self.broker.lane.address}
            address = self.broker.lane.address
            by_lane["tcp"] = LaneAddress("\0raymq-elsewhere", address.secret, address.host, address.port)
            return BrokerDescription("broker-a", "node", by_lane[self.way])
        arguments = pickle.loads(pickle.dumps(args))
        return pickle.loads(pickle.dumps(getattr(self.broker, method)(*arguments)))


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    broker = LocalBroker()
    broker.create_topics([NewTopic("orders", 4), NewTopic("bills", 2)])
    broker.ensure_group("g")
    yield broker
    broker.close()


def client_of(broker: LocalBroker, way: str, monkeypatch: pytest.MonkeyPatch) -> tuple[BrokerClient, Actor]:
    actor = Actor(broker, way)
    # A pause of the machine must not end the opening of a lane: the client would call the actor once more.
    monkeypatch.setattr(lane_pool, "OPEN_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(lane_server, "HANDSHAKE_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(module, "ActorRef", lambda name: actor)
    return BrokerClient("broker-a"), actor


@pytest.fixture(params=["unix", "tcp"])
def client(broker: LocalBroker, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that makes a client's call to the broker over a lane (direct socket connection): Unix socket or
    TCP, depending on the test's parameter. At the end, check that all calls used the lane."""
    client, actor = client_of(broker, request.param, monkeypatch)

    def call(method: str, *args: Any) -> Any:
        return client.call(method, *args, timeout_s=TIMEOUT_S)

    yield call
    client.drop_lanes()
    assert actor.calls == ["describe"]


def queue(queue_id: int, topic: str = "orders") -> MessageQueue:
    return MessageQueue(topic, "broker-a", queue_id)


# Tests that run over each kind of lane (direct socket connection): Unix socket and TCP


@pytest.mark.parametrize("remote", [False, True])
def test_a_receive_of_a_client_that_has_died_leaves_its_message_to_the_next_client(
    broker: LocalBroker, remote: bool
) -> None:
    ends = Ends()
    broker._receives = Receives(broker.log, ends)  # type: ignore[arg-type]  # a fake
    request = ReceiveRequest("g", ("orders",), 1, 60_000, LONG_S)

    def begin(request: ReceiveRequest) -> Lane:
        lane = Lane(broker.lane.address, remote=remote, timeout_s=WAIT_S)
        lane.send(FrameKind.CALL, (encode_call("receive_messages", (request,)),), time.monotonic() + WAIT_S)
        return lane

    dies, waits = begin(request), begin(replace(request, ordered=False))
    eventually(lambda: len(broker._receives._waiting) == 2, "both receives to wait")
    dies.close()
    eventually(lambda: len(broker._receives._waiting) == 1, "the end of the dead client's receive")
    waits.close()
    eventually(lambda: len(broker._receives._waiting) == 0, "the end of the other receive")
    ends.there["orders", 0] = QueueEnds(0, 1)
    lives = begin(request)
    answer = decode_result(lives.receive_next(time.monotonic() + WAIT_S).payload, ReceiveAnswer)
    assert [(given.start, given.attempts) for given in answer.ranges] == [(0, 1)]
    lives.close()
    broker._receives.close()


@pytest.mark.parametrize("remote", [False, True])
def test_a_receive_whose_client_leaves_is_answered_at_once_and_the_connection_stays(
    broker: LocalBroker, remote: bool
) -> None:
    broker._receives = Receives(broker.log, Ends())  # type: ignore[arg-type]  # a fake

    async def scenario() -> None:
        async with asyncio.timeout(WAIT_S):
            lane = await open_lane(broker.lane.address, remote=remote, timeout_s=WAIT_S)
            leave = asyncio.get_running_loop().create_future()
            request = ReceiveRequest("g", ("orders",), 1, 60_000, LONG_S)
            parts = (encode_call("receive_messages", (request,)),)
            receiving = asyncio.ensure_future(lane.call(FrameKind.CALL, parts, WAIT_S, leave=leave))
            while not len(broker._receives._waiting):
                await asyncio.sleep(0.01)
            leave.set_result(None)
            assert decode_result((await receiving).payload, ReceiveAnswer) == ReceiveAnswer((), 0)
            assert len(broker._receives._waiting) == 0
            answer = await lane.call(FrameKind.CALL, (encode_call("ack_messages", ("g", [])),), WAIT_S)
            assert decode_result(answer.payload, int) == 0
            lane.close()

    asyncio.run(scenario())
    broker._receives.close()


def test_the_answer_to_a_commit_has_the_outcome_of_each_queue(client, broker):
    assert client("commit_offsets", "g", {"orders": {0: OffsetCommit(5, 2, 0), 1: OffsetCommit(7, 2, 0)}}) == (
        CommitAnswer()
    )
    assert client("committed_offsets", "g", "orders") == {0: 5, 1: 7}
    client("commit_offsets", "g", {"orders": {0: OffsetCommit(4, 2, 0)}, "bills": {1: OffsetCommit(1, 0, 0)}})
    assert client("committed_offsets", "g", "orders") == {0: 5, 1: 7}
    assert client("committed_offsets", "g", "bills") == {1: 1}
    client("start_offset", "g", queue(0), FIRST, 3)
    broker.reset_offsets("g", "orders", {1: 2})
    commits = {"orders": {0: OffsetCommit(9, 2, 0), 1: OffsetCommit(9, 2, 0)}, "gone": {3: OffsetCommit(1, 2, 0)}}
    answer = client("commit_offsets", "g", commits)
    assert answer == CommitAnswer({queue(1): QueueOffset(2, 1)}, frozenset([queue(0)]), frozenset([queue(3, "gone")]))
    assert client("commit_offsets", "g", {"orders": {1: OffsetCommit(None, 2, 0)}}).reset == {
        queue(1): QueueOffset(2, 1)
    }


def test_a_commit_of_a_group_that_may_not_consume_counts_and_stops_the_queue(client, broker):
    assert client("update_groups", [GroupConfig("g", consume_enable=False), GroupConfig("h")]) == ["g"]
    assert client("update_groups", [GroupConfig("g", consume_enable=False)]) == []
    assert client("group_config", "g") == GroupConfig("g", consume_enable=False)
    answer = client("commit_offsets", "g", {"orders": {0: OffsetCommit(5, 0, 0)}})
    assert (answer.fenced, list(answer.stopped)) == (frozenset(), [queue(0)])
    assert "consume_enable is off" in answer.stopped[queue(0)]
    assert client("committed_offsets", "g", "orders") == {0: 5}
    with pytest.raises(NoPermissionError, match="consume_enable"):
        client("start_offset", "g", queue(0), FIRST, 1)
    assert client("start_offsets", "g", {"orders": {0: 1}}, FIRST) == {}
    with pytest.raises(NoPermissionError, match="BROADCASTING"):
        client("check_broadcast", "g")


def test_refused_calls_raise_the_error_of_the_broker(client):
    with pytest.raises(GroupNotExistError) as caught:
        client("commit_offsets", "nobody", {"orders": {0: OffsetCommit(5, 0, 0)}})
    assert caught.value.group == "nobody"
    with pytest.raises(InvalidArgumentError, match="no queue 9"):
        client("commit_offsets", "g", {"orders": {9: OffsetCommit(5, 0, 0)}})
    with pytest.raises(TopicNotExistError) as gone:
        client("start_offset", "g", queue(0, "gone"), FIRST, 1)
    assert gone.value.topic == "gone"
    with pytest.raises(InvalidArgumentError):
        client("create_topics", [NewTopic("x", 0)])


def test_the_starts_of_many_queues_are_committed_together(client, broker):
    written = len(broker.send.writes)
    wanted = {"orders": {0: 1, 1: 1, 2: 0}, "bills": {0: 1, 7: 1}, "gone": {0: 1}}
    assert client("start_offsets", "g", wanted, FIRST) == {
        "orders": {0: QueueOffset(3), 1: QueueOffset(3), 2: QueueOffset(3)}
    }  # topic "gone" and queue 7 of topic "bills" do not exist, so the result does not contain them
    assert client("start_offsets", "g", {"orders": {0: 2}, "bills": {0: 2}}, StartOffsetQuery()) == {
        "orders": {0: QueueOffset(3)},
        "bills": {0: QueueOffset(10)},
    }
    # The query for start offsets had the generation 0, which means that the client is no group member. The broker
    # answers such a client, but does not store the start offsets as committed.
    assert client("committed_offsets", "g", "orders") == {0: 3, 1: 3}
    assert len(broker.send.writes) == written + 2
    assert client("commit_offsets", "g", {"orders": {0: OffsetCommit(5, 1, 0)}}).fenced == {queue(0)}


@pytest.mark.parametrize(
    ("bounds", "last", "end"),
    [(QueueBounds(0, 10, 0), 0, 10), (QueueBounds(0, 10, 4), 10, 10), (QueueBounds(0, 0, 0), 0, 0)],
    ids=["young", "old", "empty"],
)
def test_a_group_starts_at_the_end_of_a_young_queue_only_if_it_asks_for_the_end(client, broker, bounds, last, end):
    broker._store.bounds_of_queues = lambda queues: [bounds for _ in queues]
    for number, where in enumerate((ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET, ConsumeFromWhere.CONSUME_FROM_END)):
        expected = [last, end][number]
        starts = client("start_offsets", "g", {"orders": {number: 1}}, StartOffsetQuery(where))
        assert starts == {"orders": {number: QueueOffset(expected)}}
        assert client("committed_offsets", "g", "orders")[number] == expected


def test_groups_topics_and_clients_are_made_known(client, broker):
    client("ensure_group", "new")
    wanted = GroupConfig("x", retry_max_times=3, retry_intervals_s=(1, 0.5), ordered=False)
    client("update_groups", [wanted, GroupConfig("y")])
    assert broker.groups() == ["g", "new", "x", "y"]
    assert client("group_config", "x") == wanted
    with pytest.raises(InvalidArgumentError):
        client("update_groups", [GroupConfig("z"), GroupConfig("x", retry_max_times=-1)])
    assert "z" not in broker.groups()
    assert client("create_topics", [NewTopic("a", 2, "broker-a:2"), NewTopic("b", 1)])
    client("auto_create_topic", "c", 3)
    assert {"a", "b", "c"} <= broker.log.ready().topics.keys()
    heartbeat = ClientHeartbeat("me", "host", 5, frozenset(["p"]), (ConsumerData("g", "PULL", {"orders": "*"}),))
    assert client("heartbeat", heartbeat) == ClientMetrics("shop", per_topic_max=7)
    [connection] = broker.clients.consumers(0.0, "g")
    assert connection.consumer == heartbeat.consumers[0]
    client("unregister_client", "me")
    assert broker.clients.consumers(0.0) == []


# Tests of the broker's lane (direct socket connection) itself


@pytest.fixture
def lane_client(broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerClient]:
    client, _ = client_of(broker, "unix", monkeypatch)
    yield client
    client.drop_lanes()


def commit(client: BrokerClient, queue_id: int, offset: int, timeout_s: float = WAIT_S) -> CommitAnswer:
    commits = {"orders": {queue_id: OffsetCommit(offset, 0, 0)}}
    answer: CommitAnswer = client.call("commit_offsets", "g", commits, timeout_s=timeout_s)
    return answer


def test_commits_of_many_threads_share_writes_and_hold_up_no_other_call(broker, lane_client):
    gate = CallGate()
    broker.send.before = gate
    written = len(broker.send.writes)
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(commit, lane_client, 0, 1)
        gate.wait()
        others = [threads.submit(commit, lane_client, index % 4, 2 + index) for index in range(8)]
        eventually(lambda: len(broker.log._waiting) == 8, "the others to wait", WAIT_S)
        assert lane_client.call("committed_offsets", "g", "orders", timeout_s=WAIT_S) == {}
        assert not first.done()  # the first commit has no answer yet, because its write is still blocked
        broker.send.before = lambda: None
        gate.open()
        assert {one.result(WAIT_S) == CommitAnswer() for one in [first, *others]} == {True}
    assert len(broker.send.writes) == written + 2
    assert broker.committed_offsets("g", "orders") == {0: 6, 1: 7, 2: 8, 3: 9}


def test_a_commit_that_gets_no_answer_in_time_is_unknown_and_may_be_repeated(broker, lane_client):
    gate = CallGate()
    broker.send.before = gate
    with pytest.raises(RequestTimeoutError):
        commit(lane_client, 0, 5, timeout_s=0.2)
    broker.send.before = lambda: None
    gate.open()
    assert commit(lane_client, 0, 5) == CommitAnswer()
    assert broker.committed_offsets("g", "orders") == {0: 5}


def test_a_client_finds_the_lane_of_a_broker_that_was_restarted(broker, lane_client):
    commit(lane_client, 0, 1)
    broker.lane.close()
    broker.open_lane()
    with pytest.raises(ServiceNotAvailableError, match="broke during the call commit_offsets"):
        commit(lane_client, 0, 2)
    commit(lane_client, 0, 3)
    assert broker.committed_offsets("g", "orders") == {0: 3}


def test_more_calls_at_a_time_than_lanes_wait_for_a_lane(broker, monkeypatch):
    monkeypatch.setattr(lane_pool, "LANES_MAX", 1)
    monkeypatch.setattr(lane_pool, "OPEN_PATIENCE_S", WAIT_S)
    client, actor = client_of(broker, "unix", monkeypatch)
    gate = CallGate()
    broker.send.before = gate
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(commit, client, 0, 1)
        gate.wait()
        with pytest.raises(ServiceNotAvailableError, match="this client already has 1 running calls to broker-a"):
            client.call("committed_offsets", "g", "orders", timeout_s=0.2)
        second = threads.submit(client.call, "committed_offsets", "g", "orders", timeout_s=WAIT_S)
        broker.send.before = lambda: None
        gate.open()
        first.result(WAIT_S)
        assert second.result(WAIT_S) == {0: 1}
    assert actor.calls == ["describe"]
    client.drop_lanes()


def test_a_method_that_the_lane_does_not_serve_is_an_actor_method(broker, monkeypatch):
    client, actor = client_of(broker, "unix", monkeypatch)
    assert client.call("groups", timeout_s=WAIT_S) == ["g"]
    assert actor.calls == ["groups"]


def test_the_clients_of_a_process_are_shared_until_they_are_closed(broker, monkeypatch):
    _, actor = client_of(broker, "unix", monkeypatch)
    one = module.broker_client("broker-a")
    assert module.broker_client("broker-a") is one
    assert module.broker_client("broker-b") is not one
    commit(one, 0, 1)
    module.close_broker_clients()
    assert threading.active_count() >= 1
    eventually(lambda: broker.lane._server.connections == 0, "the lane to be closed", WAIT_S)
    commit(one, 0, 2)  # a consumer may still run and commit after its broker client was closed
    one.drop_lanes()
    assert actor.calls == ["describe", "describe"]


def test_a_lane_whose_call_ends_after_its_client_was_closed_is_closed(broker, monkeypatch):
    client, _ = client_of(broker, "unix", monkeypatch)
    gate = CallGate()
    broker.send.before = gate
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(commit, client, 0, 1)
        gate.wait()
        client.drop_lanes()
        broker.send.before = lambda: None
        gate.open()
        under_way.result(WAIT_S)
    eventually(lambda: broker.lane._server.connections == 0, "the lane to be closed", WAIT_S)


def test_calls_that_no_thread_takes_in_time_are_refused_and_heartbeats_wait_in_a_queue_of_their_own(
    broker, monkeypatch
):
    monkeypatch.setattr(broker_lane, "LANE_THREADS", 1)
    broker.lane.close()
    options = BrokerOptions(heartbeat_queue_capacity=1, wait_time_in_client_manager_queue_ms=50)
    goes_on, began = threading.Event(), threading.Event()

    def stand_still(client_id: str) -> None:
        began.set()
        goes_on.wait(WAIT_S)

    monkeypatch.setattr(broker, "unregister_client", stand_still)
    broker.lane = BrokerLane("test", broker, broker._commit_soon, "127.0.0.1", broker.later, options)
    client, actor = client_of(broker, "unix", monkeypatch)

    def end(name: str) -> None:
        client.call("unregister_client", name, timeout_s=WAIT_S)

    with ThreadPoolExecutor(2) as threads:
        try:
            ends = [threads.submit(end, "one")]
            assert began.wait(WAIT_S)
            ends.append(threads.submit(end, "two"))
            eventually(lambda: broker.lane.requests()[0].waiting == 1, "the second waits", WAIT_S)
            with pytest.raises(SystemBusyError, match="heartbeat_queue_capacity"):
                end("three")
            with pytest.raises(SystemBusyError, match="wait_time_in_client_manager_queue_ms is 50"):
                client.call("take_transaction_checks", "g", "me", timeout_s=WAIT_S)
            commit(client, 0, 1)  # a commit succeeds although all request threads are busy
            assert not any(one.done() for one in ends)
        finally:
            goes_on.set()
        assert [one.result(WAIT_S) for one in ends] == [None, None]
    heartbeats, others = broker.lane.requests()
    assert (heartbeats.refused_full, heartbeats.most, others.refused_late) == (1, 1, 1)
    assert actor.calls == ["describe"]
