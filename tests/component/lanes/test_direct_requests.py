"""Tests of requests with ``durable=False`` over lanes: requesters, brokers and threads of listeners in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from actors.members.direct_methods import DirectMethods
from raymq.client.consumer.push.answers import Replier
from raymq.client.consumer.push.consume_pool import ConsumePool
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.client.request import direct as direct_module
from raymq.client.request.direct import DirectRequests
from raymq.client.request.request_threads import RequestThreads
from raymq.common.errors import (
    ClientStateError,
    InvalidArgumentError,
    ListenerError,
    NoListenerError,
    NoPermissionError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    TopicNotExistError,
)
from raymq.common.message import ConsumeStatus, Message, MessageExt
from raymq.common.protocol.request_reply import Reply, RequestStatistics, reply
from raymq.common.protocol.route import PERM_ALL, PERM_READ, TopicConfig
from raymq.remoting import broker_client as broker_module
from raymq.remoting.broker_client import BrokerClient, BrokerDescription
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import ControlCalls
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.server import LaneServer
from tests.support.clients.fakes import WAIT_S, topic_route
from tests.support.history.waiting import eventually

NO_OTHERS = RequestStatistics(0, 0, 0, 0, 0)


class LocalBroker(DirectMethods):
    """A broker's lane that serves only direct requests. Its state has the topic `prices`, and `frozen`, to which
    nobody may send; the group `banned` may read no topic."""

    def __init__(self, name: str, way: str) -> None:
        self.name, self.way = name, way
        topics = {"prices": TopicConfig("prices", 1, 1, PERM_ALL), "frozen": TopicConfig("frozen", 1, 1, PERM_READ)}

        def require_topic(topic: str) -> TopicConfig:
            if topic not in topics:
                raise TopicNotExistError(topic)
            return topics[topic]

        def check_readable(group: str, topic: str) -> None:
            if group == "banned":
                raise NoPermissionError("group 'banned' may not consume")

        state: Any = SimpleNamespace(require_topic=require_topic, check_readable=check_readable)
        super().__init__(lambda: self.server.loop, lambda: state)
        calls = ControlCalls({}, lambda *call: None, self._direct_answered_later)
        self.server = LaneServer(
            name, {FrameKind.CALL: calls}, contexts=self._direct_connection, host="127.0.0.1" if way == "tcp" else ""
        )

    def describe(self) -> BrokerDescription:
        address = self.server.address
        if self.way == "tcp":
            address = LaneAddress("\0raymq-elsewhere", address.secret, address.host, address.port)
        return BrokerDescription(self.name, "node", address)

    @property
    def ends(self) -> dict[str, int]:
        return {end: count for end, count in self._direct_figures()[0].items() if count}

    def close(self) -> None:
        self.server.close()


class Cluster:
    """Brokers, listeners and requesters in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        self.way = way
        self.brokers: dict[str, LocalBroker] = {}
        self.clients: dict[str, BrokerClient] = {}
        self.listeners: list[RequestThreads] = []
        self.requests = DirectRequests("client", "10.0.0.9")
        monkeypatch.setattr(broker_module, "ActorRef", lambda name: SimpleNamespace(call=self.actor(name)))
        monkeypatch.setattr(direct_module, "broker_client", self.client)

    def actor(self, name: str) -> Callable[..., Any]:
        def call(method: str, *args: Any, timeout_s: float) -> Any:
            if name not in self.brokers:
                raise ServiceNotAvailableError(f"{name} is gone")
            assert method == "describe"
            return self.brokers[name].describe()

        return call

    def client(self, name: str) -> BrokerClient:
        if name not in self.clients:
            self.clients[name] = BrokerClient(name)
        return self.clients[name]

    def start(self, *names: str) -> None:
        for name in names:
            self.brokers[name] = LocalBroker(name, self.way)

    def kill(self, name: str) -> None:
        self.brokers.pop(name).close()

    def listen(
        self,
        listener: Callable[[MessageExt], Any],
        *,
        threads: int = 1,
        group: str = "g",
        name: str = "g/0",
        tags: str = "*",
        at: tuple[str, ...] = ("a",),
        wait: bool = True,
    ) -> RequestThreads:
        settings = PushSettings(group, (Subscription.parse("prices", tags),), request_threads=threads)
        pool = ConsumePool(listener, threads=1, timeout_s=WAIT_S, group=group)

        def call(message: MessageExt, replier: Replier) -> tuple[str, str, float]:
            return pool.call_directly(message, replier)

        topics = frozenset({"prices"})
        answers = RequestThreads(
            settings, name, call, brokers=lambda: dict.fromkeys(at, topics), client_of=BrokerClient
        )
        self.listeners.append(answers)
        if wait:
            assert answers.begin(WAIT_S) == ""
        return answers

    def ask(
        self, body: bytes = b"?", *, tags: str | None = None, topic: str = "prices", timeout_s: float = WAIT_S
    ) -> Any:
        return self.requests.request(self.route(topic), topic, Message(topic, body, tags), timeout_s)

    def ask_later(self, body: bytes = b"?", *, timeout_s: float = WAIT_S) -> Future[MessageExt]:
        return self.requests.request_later(self.route("prices"), "prices", Message("prices", body), timeout_s)

    def route(self, topic: str) -> Any:
        return topic_route(topic, **dict.fromkeys(self.routed, 1))

    routed: tuple[str, ...] = ("a",)

    def close(self) -> None:
        for gate in Gate.all:
            gate.open.set()
        Gate.all.clear()
        self.requests.close()
        for listener in self.listeners:
            assert listener.stop(WAIT_S)
        for client in self.clients.values():
            client.drop_lanes()
        for name in list(self.brokers):
            self.kill(name)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(monkeypatch, getattr(request, "param", "unix"))
    cluster.start("a")
    yield cluster
    cluster.close()


def upper(message: MessageExt) -> Reply:
    return reply(message.body.upper(), keys=["k"], properties={"by": "upper"})


class Gate:
    """A listener whose calls wait until the test lets them go, or ends."""

    all: ClassVar[list[Gate]] = []

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.open = threading.Event()
        self.all.append(self)

    def __call__(self, message: MessageExt) -> Reply:
        self.calls.append(message.body)
        assert self.open.wait(WAIT_S)
        return reply(b"late " + message.body)


@pytest.mark.parametrize("cluster", ["unix", "tcp"], indirect=True)
def test_a_request_and_its_reply_keep_all_fields(cluster: Cluster) -> None:
    got = list[MessageExt]()

    def listener(message: MessageExt) -> Reply:
        got.append(message)
        return upper(message)

    cluster.listen(listener)
    sent = Message("prices", b"apple", "A", ["k1", "k2"], {"user": "u"}, 7)
    answer = cluster.requests.request(cluster.route("prices"), "prices", sent, WAIT_S)
    [message] = got
    assert (message.topic, message.body, message.tags, message.keys) == ("prices", b"apple", "A", ("k1", "k2"))
    assert (message.properties, message.flag, message.broker_name) == ({"user": "u"}, 7, "a")
    assert (message.queue_id, message.queue_offset, message.store_timestamp_ms) == (-1, -1, 0)
    assert message.system_properties == {"CORRELATION_ID": message.message_id, "TTL": str(int(WAIT_S * 1000))}
    assert (message.born_host, message.record_damaged) == ("10.0.0.9", False)
    assert (answer.body, answer.keys, answer.properties) == (b"APPLE", ("k",), {"by": "upper"})
    assert (answer.topic, answer.system_properties["CORRELATION_ID"]) == ("raymq_REPLY_TOPIC", message.message_id)
    assert cluster.brokers["a"].ends == {"replied": 1}


@pytest.mark.parametrize("cluster", ["unix", "tcp"], indirect=True)
def test_futures_and_asyncio_get_each_its_own_reply_and_listeners_share_the_work(cluster: Cluster) -> None:
    seen = dict[str, int]()
    for number in range(3):

        def listener(message: MessageExt, name: str = str(number)) -> Reply:
            seen[name] = seen.get(name, 0) + 1
            return upper(message)

        cluster.listen(listener, threads=4, name=f"g/{number}")
    futures = [cluster.ask_later(b"n%d" % n) for n in range(200)]
    assert [future.result(WAIT_S).body for future in futures] == [b"N%d" % n for n in range(200)]

    async def ask() -> list[bytes]:
        requests = cluster.requests.in_loop()
        try:
            sent = [
                requests.request(cluster.route("prices"), "prices", Message("prices", b"n%d" % n), WAIT_S)
                for n in range(200)
            ]
            return [one.body for one in await asyncio.gather(*sent)]
        finally:
            requests.close()

    assert asyncio.run(ask()) == [b"N%d" % n for n in range(200)]
    large = b"x" * (1 << 20)
    assert cluster.ask(large).body == large.upper()
    assert sum(seen.values()) == 401
    assert min(seen.get(str(number), 0) for number in range(3)) > 0
    assert cluster.requests.statistics(NO_OTHERS) == RequestStatistics(0, 401, 0, 0, 0)
    eventually(lambda: sum(one.statistics().sent for one in cluster.listeners) == 401, "the counts of replies")


def raises(message: MessageExt) -> Reply:
    raise ValueError("no such fruit")


@pytest.mark.parametrize(
    ("listener", "text"),
    [
        (raises, "failed on request [0-9A-F]{32}: ValueError: no such fruit"),
        (lambda message: None, "consumed request .* and returned no reply"),
        (lambda message: ConsumeStatus.RECONSUME_LATER, "RECONSUME_LATER"),
        (lambda message: 7, "which is not a valid answer"),
        (lambda message: [reply(b"1"), reply(b"2")], "returned 2 answer"),
    ],
)
def test_a_listener_without_a_reply_gives_an_error_at_once(cluster: Cluster, listener: Any, text: str) -> None:
    cluster.listen(listener)
    with pytest.raises(ListenerError, match=text):
        cluster.ask()
    with pytest.raises(ListenerError, match=text):
        cluster.ask_later().result(WAIT_S)
    assert cluster.brokers["a"].ends == {"failed": 2}
    assert cluster.requests.statistics(NO_OTHERS).failed == 2


def test_a_coroutine_listener_answers(cluster: Cluster) -> None:
    async def listener(message: MessageExt) -> Reply:
        await asyncio.sleep(0)
        return upper(message)

    cluster.listen(listener)
    assert cluster.ask(b"a").body == b"A"


def test_without_a_listener_for_topic_and_tag_a_request_fails_at_once(cluster: Cluster) -> None:
    with pytest.raises(NoListenerError, match="of topic 'prices', so the request was not executed"):
        cluster.ask()
    cluster.listen(upper, tags="A || B")
    assert cluster.ask(tags="B").body == b"?"
    with pytest.raises(NoListenerError, match="with tag 'C'"):
        cluster.ask(tags="C")
    with pytest.raises(NoListenerError, match="with tag 'C'"):
        cluster.requests.request_later(cluster.route("prices"), "prices", Message("prices", b"?", "C"), WAIT_S).result(
            WAIT_S
        )
    with pytest.raises(NoPermissionError, match="not writable"):
        cluster.ask(topic="frozen")
    with pytest.raises(TopicNotExistError):
        cluster.ask(topic="unknown")
    with pytest.raises(InvalidArgumentError, match="timeout_s must be positive"):
        cluster.ask(timeout_s=0.0)


def test_a_listener_that_may_not_read_the_topic_gets_the_brokers_error(cluster: Cluster) -> None:
    answers = cluster.listen(upper, group="banned", wait=False)
    with pytest.raises(NoPermissionError, match="may not consume"):
        answers.begin(WAIT_S)


def test_a_slow_listener_gives_a_timeout_and_its_late_reply_is_dropped(cluster: Cluster) -> None:
    gate = Gate()
    cluster.listen(gate)
    with pytest.raises(RequestTimeoutError, match=r"'prices' .its listener may execute it. did not complete"):
        cluster.ask(b"1", timeout_s=0.1)
    with pytest.raises(RequestTimeoutError, match="no thread of a listener was free, so it was not executed"):
        cluster.ask_later(b"2", timeout_s=0.1).result(WAIT_S)
    waits = cluster.ask_later(b"3")
    gate.open.set()
    assert waits.result(WAIT_S).body == b"late 3"
    assert gate.calls == [b"1", b"3"]
    assert cluster.brokers["a"].ends == {"timed_out": 2, "late": 1, "replied": 1}
    assert cluster.requests.statistics(NO_OTHERS) == RequestStatistics(0, 1, 2, 0, 0)


def test_threads_start_while_all_of_them_work_but_not_more_than_allowed(cluster: Cluster) -> None:
    gate = Gate()
    cluster.listen(gate, threads=3)
    futures = [cluster.ask_later(b"%d" % n) for n in range(5)]
    eventually(lambda: len(gate.calls) == 3, "three calls")
    assert cluster.brokers["a"]._direct_figures()[1:] == (5, 3)
    gate.open.set()
    assert {future.result(WAIT_S).body for future in futures} == {b"late %d" % n for n in range(5)}
    assert cluster.brokers["a"]._direct_figures()[1] == 0


def test_the_loss_of_a_listeners_process_gives_an_error_at_once(cluster: Cluster) -> None:
    gate = Gate()
    answers = cluster.listen(gate)
    future = cluster.ask_later(b"1")
    eventually(lambda: gate.calls, "the call")
    # the end of the process closes its connections
    eventually(lambda: len(cluster.brokers["a"]._direct_connections) == 1, "the worker's connection")
    [state] = cluster.brokers["a"]._direct_connections.values()
    [connection] = [one for one in cluster.brokers["a"].server._connections if one.context is state]
    cluster.brokers["a"].server.loop.call_soon(connection.close)
    with pytest.raises(ServiceNotAvailableError, match=r"listener's process ended .* may have been executed"):
        future.result(WAIT_S)
    gate.open.set()
    assert cluster.brokers["a"].ends == {"lost": 1}
    eventually(lambda: cluster.brokers["a"]._direct_figures()[2] == 1, "the worker's return")
    assert cluster.ask(b"2").body == b"late 2"
    eventually(lambda: sum((answers.statistics().sent, answers.statistics().unsent)) == 2, "the counts of replies")


def test_the_loss_of_the_broker_gives_an_error_and_the_next_broker_serves_again(cluster: Cluster) -> None:
    gate = Gate()
    cluster.listen(gate)
    futures = [cluster.ask_later(b"runs")]
    eventually(lambda: gate.calls, "the call")
    futures.append(cluster.ask_later(b"waits"))
    threads = [threading.Thread(target=lambda: blocked.append(caught(cluster))) for _ in range(2)]
    blocked = list[Exception | None]()
    for thread in threads:
        thread.start()
    eventually(lambda: cluster.brokers["a"]._direct_figures()[1] == 4, "four requests")
    cluster.kill("a")
    with pytest.raises(ServiceNotAvailableError, match="may have been executed"):
        futures[0].result(WAIT_S)
    # a broker that ends in order tells the requests that wait; a killed broker closes their connections
    with pytest.raises(ServiceNotAvailableError):
        futures[1].result(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
    assert [isinstance(one, ServiceNotAvailableError) for one in blocked] == [True, True]
    cluster.start("a")
    gate.open.set()
    eventually(lambda: cluster.brokers["a"]._direct_figures()[2] == 1, "the listener's return")
    assert cluster.ask(b"again").body == b"late again"
    assert cluster.ask_later(b"again").result(WAIT_S).body == b"late again"


def caught(cluster: Cluster) -> Exception | None:
    try:
        cluster.ask()
    except Exception as error:
        return error
    return None


def test_a_request_finds_the_one_broker_that_has_a_listener_and_remembers_it(cluster: Cluster) -> None:
    cluster.start("b", "c")
    cluster.routed = ("a", "b", "c")
    cluster.listen(upper, at=("b",))
    for _ in range(3):
        assert cluster.ask(b"x").broker_name == "b"
    assert sum(one.ends.get("no_listener", 0) for one in cluster.brokers.values()) <= 2
    cluster.kill("b")
    with pytest.raises((NoListenerError, ServiceNotAvailableError)):
        cluster.ask(b"x")
    cluster.listen(upper, at=("c",), name="g/1")
    eventually(lambda: caught(cluster) is None, "a reply of the other broker")
    cluster.listeners.pop(0).stop(WAIT_S)


def test_a_request_whose_requester_is_gone_is_not_executed(cluster: Cluster) -> None:
    gate = Gate()
    cluster.listen(gate)
    first = cluster.ask_later(b"runs")
    eventually(lambda: gate.calls, "the call")
    other = DirectRequests("other", "")
    waits = other.request_later(cluster.route("prices"), "prices", Message("prices", b"waits"), WAIT_S)
    eventually(lambda: cluster.brokers["a"]._direct_figures()[1] == 2, "two requests")
    other.close()
    with pytest.raises(ClientStateError, match="closed"):
        waits.result(WAIT_S)
    with pytest.raises(ClientStateError, match="closed"):
        other.request_later(cluster.route("prices"), "prices", Message("prices", b"waits"), WAIT_S)
    eventually(lambda: cluster.brokers["a"].ends.get("left") == 1, "the end of the request")
    gate.open.set()
    assert first.result(WAIT_S).body == b"late runs"
    assert cluster.ask(b"next").body == b"late next"
    assert gate.calls == [b"runs", b"next"]


def test_a_stop_answers_the_running_call_and_takes_no_further_request(cluster: Cluster) -> None:
    gate = Gate()
    answers = cluster.listen(gate)
    runs = cluster.ask_later(b"runs")
    eventually(lambda: gate.calls, "the call")
    waits = cluster.ask_later(b"waits")
    eventually(lambda: cluster.brokers["a"]._direct_figures()[1] == 2, "two requests")
    assert not answers.stop(0.05)
    gate.open.set()
    assert answers.stop(WAIT_S)
    assert runs.result(WAIT_S).body == b"late runs"
    with pytest.raises(NoListenerError):
        waits.result(WAIT_S)
    assert gate.calls == [b"runs"]


def test_a_waiting_request_goes_to_another_listener_if_its_own_ends(cluster: Cluster) -> None:
    gates = [Gate(), Gate()]
    answers = [cluster.listen(gate, name=f"g/{number}") for number, gate in enumerate(gates)]
    runs = [cluster.ask_later(b"%d" % number) for number in range(2)]
    eventually(lambda: gates[0].calls and gates[1].calls, "both calls")
    waits = cluster.ask_later(b"waits")
    eventually(lambda: cluster.brokers["a"]._direct_figures()[1] == 3, "three requests")
    assert not answers[0].stop(0.05)
    gates[0].open.set()
    assert answers[0].stop(WAIT_S)
    gates[1].open.set()
    assert waits.result(WAIT_S).body == b"late waits"
    assert {one.result(WAIT_S).body for one in runs} == {b"late 0", b"late 1"}
    assert len(gates[1].calls) == 2


def test_a_suspended_listener_takes_no_requests_until_it_is_resumed(cluster: Cluster) -> None:
    answers = cluster.listen(upper)
    answers.suspend(suspended=True)
    answers.suspend(suspended=True)
    eventually(lambda: cluster.brokers["a"]._direct_figures()[2] == 0, "the end of the worker")
    with pytest.raises(NoListenerError):
        cluster.ask()
    answers.suspend(suspended=False)
    eventually(lambda: cluster.brokers["a"]._direct_figures()[2] == 1, "the worker's return")
    assert cluster.ask(b"a").body == b"A"
