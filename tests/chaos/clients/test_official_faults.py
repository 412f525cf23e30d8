"""Tests of faults around RocketMQ's official clients: a client or a process of the gateway is killed, a listener takes
long, a message is at another broker group, and an administrator asks a client that does not answer.

RAYMQ_SOAK=1 also runs the test of a listener that takes longer than a gateway's lease of 60 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import raymq
from raymq.common.errors import ClientStateError
from raymq.common.message import MessageQueue
from raymq.gateway.clients import connected_clients
from raymq.gateway.convert import leases
from raymq.gateway.service import service
from tests.support.gateway.gateways import LocalGateway, RunningGateway, local_gateway, running_gateway
from tests.support.gateway.official import InstallError, or_skip
from tests.support.gateway.official_client import OfficialClient, OfficialError, official_client
from tests.support.gateway.official_place import ARRIVES_S, LANGUAGES, Place, check_load
from tests.support.history.waiting import eventually

pytestmark = pytest.mark.timeout(900)  # The first run installs the clients.

PROCESSES = 2
LONG_LEASE_MS = 3_600_000
"""Longer than any test: a message that arrives again was returned, and its lease has not ended."""
SHORT_LEASE_MS = 10_000
HELD_S = 100.0
"""Longest time for which a listener holds a message. The tests release it earlier."""
SOAK_HELD_S = 75.0
POLLERS = 3
POLL_S = 20
"""The longest time for which a gateway lets a receive wait."""
Clients = Callable[[str], OfficialClient]
Start = Callable[[str], AbstractContextManager[OfficialClient]]


@pytest.fixture(scope="module")
def gateway(mq: raymq.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), f", processes: {PROCESSES}") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def local(mq: raymq.Client) -> Iterator[LocalGateway]:
    """Yield a gateway of this process, which notes after 2 s that a client has gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connected_clients, "STREAM_EXPIRED_S", 2.0)
        patch.setattr(service, "TICK_S", 1.0)
        with local_gateway(mq) as gateway:
            yield gateway


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return a function that starts another program with a client of a language. The program is killed at the end of
    the `with` statement."""

    @contextmanager
    def started(language: str) -> Iterator[OfficialClient]:
        with ExitStack() as stack:
            try:
                client = stack.enter_context(official_client(language, tmp_path / language))
            except InstallError as error:
                or_skip(error)
            yield client

    return started


def places(mq: raymq.Client, clients: Clients, endpoints: str, name: str) -> list[Place]:
    """Return a place of this name for the client of each language."""
    return [Place(mq, clients(language), endpoints, name) for language in LANGUAGES]


def repeated(client: OfficialClient, request: str, **arguments: Any) -> None:
    """Carry out a request until it succeeds. Raises its last error if it does not."""
    failures: list[OfficialError] = []

    def succeeds() -> bool:
        try:
            client.call(request, **arguments)
        except OfficialError as error:
            failures.append(error)
            return False
        return True

    try:
        eventually(succeeds, request, ARRIVES_S)
    except AssertionError:
        raise failures[-1] from None


# Clients that are killed


@pytest.mark.parametrize("language", LANGUAGES)
def test_messages_after_the_death_of_a_polling_client_are_first_attempts_of_the_next_one(
    mq: raymq.Client, local: LocalGateway, clients: Clients, start: Start, language: str
) -> None:
    """A poll of a killed client may lease a message, which nobody gets. The gateway gives the message back."""
    place = Place(mq, clients(language), local.endpoints, "killed-pollers")
    place.create()
    producer, consumer = place.open("producer"), place.open("simple")
    with start(language) as leaving:
        names = [f"poller-{number}" for number in range(POLLERS)]
        where = {"endpoints": place.endpoints, "group": place.group, "topic": place.topic}
        for name in names:
            leaving.call("open_simple", name=name, wait_s=POLL_S, **where)
        for name in names:
            leaving.begin("receive", name=name, invisible_s=LONG_LEASE_MS // 1000)
        eventually(lambda: local.waiting_receives() == POLLERS, "waiting receives")
    place.send(producer, *(f"{number}" for number in range(POLLERS)))
    got = place.receive(consumer, POLLERS)
    assert sorted(one["body"] for one in got) == [f"{number}" for number in range(POLLERS)]
    assert {one["attempt"] for one in got} == {1}
    place.ack(consumer, got)
    place.settled()
    eventually(lambda: local.waiting_receives() == 0, "the end of the killed client's receives")


def test_the_messages_of_a_killed_push_consumer_go_to_another_one_before_their_leases_end(
    mq: raymq.Client, local: LocalGateway, clients: Clients, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "PUSH_INVISIBLE_MS", LONG_LEASE_MS)
    bodies = {f"{number}" for number in range(5)}
    own = places(mq, clients, local.endpoints, "killed-push")
    with ExitStack() as stack:
        for place in own:
            place.create()
            place.send(place.open("producer"), *bodies)
            leaving = place.beside(stack.enter_context(start(place.client.language)))
            consumer = leaving.open("push", hold_s=HELD_S)
            assert {one["body"] for one in leaving.consumed(consumer, len(bodies))} == bodies
        assert local.renewed_leases() > 0
    for place in own:
        consumer = place.open("push")
        got = place.consumed(consumer, len(bodies))
        assert sorted((one["body"], one["attempt"]) for one in got) == sorted((body, 2) for body in bodies)
        place.settled()
    # nothing is renewed for a client that has gone, and nothing that is settled
    eventually(lambda: local.renewed_leases() == 0, "the end of all renewals")


# Listeners that take long


def test_a_listener_that_takes_longer_than_a_lease_gets_its_message_once(
    mq: raymq.Client, local: LocalGateway, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is renewed after half of its time, so it would have ended before its third renewal."""
    monkeypatch.setattr(leases, "PUSH_INVISIBLE_MS", SHORT_LEASE_MS)
    own = places(mq, clients, local.endpoints, "slow-listener")
    for place in own:
        place.create()
        place.send(place.open("producer"), "slow")
        assert [one["body"] for one in place.consumed(place.open("push", hold_s=HELD_S), 1)] == ["slow"]
    wanted = local.renewals() + 3 * len(own)
    eventually(lambda: local.renewals() >= wanted, "three renewals of each lease", HELD_S)
    check_delivered_once(own)


@pytest.mark.skipif(os.environ.get("RAYMQ_SOAK") != "1", reason="one of the long runs: `make soak`")
def test_a_listener_of_75_s_gets_its_message_once(mq: raymq.Client, gateway: RunningGateway, clients: Clients) -> None:
    own = places(mq, clients, gateway.endpoints, "slowest-listener")
    for place in own:
        place.create()
        place.send(place.open("producer"), "slow")
        place.consumed(place.open("push", hold_s=SOAK_HELD_S), 1)
    check_delivered_once(own, release=False)


def check_delivered_once(own: list[Place], *, release: bool = True) -> None:
    """Check that each place's push consumer settles the message that its listener holds, and gets it only once.
    `release`: let the listener hold it no longer."""
    for place in own:
        if release:
            place.client.call("release", name=f"{place.topic}-push")
        place.settled()
        records = place.client.call("records", name=f"{place.topic}-push")
        assert [(one["body"], one["attempt"]) for one in records] == [("slow", 1)]


# Several broker groups


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_receive_is_empty_while_a_message_is_at_another_broker_group(
    mq: raymq.Client, gateway: RunningGateway, clients: Clients, language: str
) -> None:
    """The clients name the two broker groups in turn. All messages are at one of them."""
    place = Place(mq, clients(language), gateway.endpoints, "other-broker")
    place.create()
    consumer = place.open("simple", wait_s=POLL_S)
    bodies = [f"{number}" for number in range(6)]
    with mq.producer() as producer:
        for body in bodies:
            producer.send(raymq.Message(place.topic, body.encode()), queue=MessageQueue(place.topic, "broker-b", 0))
    got = []
    for _ in bodies:
        [one] = place.client.call("receive", name=consumer, count=1)
        got.append(one)
    assert sorted(one["body"] for one in got) == bodies
    place.ack(consumer, got)
    place.settled()


def test_push_consumers_get_the_messages_of_all_broker_groups(
    mq: raymq.Client, gateway: RunningGateway, clients: Clients
) -> None:
    for place in places(mq, clients, gateway.endpoints, "all-brokers"):
        place.create()
        consumer = place.open("push")
        with mq.producer() as producer:
            for number in range(8):
                queue = MessageQueue(place.topic, f"broker-{'ab'[number % 2]}", 0)
                producer.send(raymq.Message(place.topic, b"%d" % number), queue=queue)
        assert {one["body"] for one in place.consumed(consumer, 8)} == {f"{number}" for number in range(8)}
        place.settled()


# Questions of administrators


def test_an_administrators_questions_reach_push_consumers(
    mq: raymq.Client, gateway: RunningGateway, clients: Clients
) -> None:
    """Python's client answers no question. Node's client has a constant text for its stacks, and refuses to consume."""
    for place, (language, stacks, refusal) in zip(
        places(mq, clients, gateway.endpoints, "asked"),
        (
            ("PYTHON", (), "a question to client .* did not complete"),
            ("NODE_JS", ("mock stack",), "the client refused the message"),
        ),
        strict=True,
    ):
        place.create()
        producer, consumer = place.open("producer"), place.open("push")
        [message_id] = place.send(producer, "once")
        place.consumed(consumer, 1)
        place.settled()
        [member] = eventually(partial(mq.admin.consumer_connections, place.group), "the announced member")
        assert (member.language, member.consumer.consume_type) == (language, "PUSH")
        [info] = mq.admin.running_info(place.group, stacks=True)
        assert (info.member, info.consume_type) == (member.consumer.member, "PUSH")
        assert tuple(frame for stack in info.stacks for frame in stack.frames) == stacks
        assert ("has not sent its stacks" in info.trouble) == (not stacks)
        [message] = eventually(partial(mq.admin.query_by_id, place.topic, message_id), "the message by its id")
        with pytest.raises(ClientStateError, match=refusal):
            mq.admin.consume_directly(place.group, message)
        assert len(place.client.call("records", name=consumer)) == 1


# Other producers and other processes


def test_another_producer_answers_for_a_producer_that_was_killed(
    mq: raymq.Client, gateway: RunningGateway, clients: Clients, start: Start
) -> None:
    own = places(mq, clients, gateway.endpoints, "orphans")
    for place in own:
        place.create("TRANSACTION")
        place.open("simple")
        with start(place.client.language) as client:
            leaving = place.beside(client)
            message = {"topic": place.topic, "body": "open"}
            client.call("transact", name=leaving.open("producer"), message=message)
        place.open("producer", outcome="COMMIT")
    for place in own:
        assert place.consumed(f"{place.topic}-producer", 1)[0] == "open"
        got = place.receive(f"{place.topic}-simple", 1)
        assert [one["body"] for one in got] == ["open"]
        place.ack(f"{place.topic}-simple", got)
        place.settled()


def test_clients_see_no_error_but_unavailable_while_a_gateway_stops_and_starts_again(
    mq: raymq.Client, gateway: RunningGateway, clients: Clients
) -> None:
    """The gateway ends its running calls before it stops."""
    own = places(mq, clients, gateway.endpoints, "stopped")
    for place in own:
        place.start_load()
        place.more_consumed(20)
    stopped_ms = time.time_ns() // 1_000_000
    gateway.stop()
    gateway.start()
    started_ms = time.time_ns() // 1_000_000
    for place in own:
        place.more_consumed(20)
        check_load(place, [(stopped_ms, started_ms)], failures="UNAVAILABLE")


@pytest.mark.parametrize("language", LANGUAGES)
def test_other_gateway_processes_settle_what_a_client_got_from_killed_ones(
    mq: raymq.Client, gateway: RunningGateway, start: Start, language: str
) -> None:
    """The receipts and the transaction are of processes that are killed. The client's next connection ends at another
    process, which may be a new one."""
    with start(language) as client:
        place, paid = (Place(mq, client, gateway.endpoints, name) for name in ("moved", "moved-paid"))
        place.create()
        paid.create("TRANSACTION")
        place.send(place.open("producer"), "1", "2")
        consumer = place.open("simple")
        got = place.receive(consumer, 2, invisible_s=LONG_LEASE_MS // 1000)
        message = {"topic": paid.topic, "body": "paid"}
        message_id = client.call("transact", name=paid.open("producer"), message=message)
        servers = gateway.servers_of(client.pid)
        assert servers
        for server in servers:
            psutil.Process(server).kill()
        for one in got:
            repeated(client, "ack", name=consumer, handle=one["handle"])
        repeated(client, "end_transaction", message_id=message_id, end="commit")
        now = eventually(lambda: gateway.servers_of(client.pid), "the client's new connection", ARRIVES_S)
        assert not now & servers
        place.settled()
        got = paid.receive(paid.open("simple"), 1)
        assert [one["body"] for one in got] == ["paid"]
        paid.ack(f"{paid.topic}-simple", got)
        paid.settled()
