"""Tests of transactions over gRPC: half messages, their ends at any gateway, and the checks that producers answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from raymq.common.errors import RequestTimeoutError, ServiceNotAvailableError, TransactionError
from raymq.common.message import Message, SendStatus
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.transactions import LocalTransactionState, TransactionCheck
from raymq.gateway.calls import CallContext
from raymq.gateway.clients import command_streams
from raymq.gateway.convert.times import duration, timestamp
from raymq.gateway.convert.transactions import TransactionPlace
from raymq.gateway.service import transaction_calls
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import ClientType, Code, MessageType, TransactionResolution, TransactionSource
from tests.support.clients.fakes import FakeStore, topic_route
from tests.support.clients.producers import MakeProducer, producers_of_fakes
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import ANSWER_S, FakeGroups, FakeTransactions, GatewayClient, gateway_of
from tests.support.stores.transactions import half_batch

ORDERS = wire.Resource(name="orders")
COMMIT, ROLLBACK = TransactionResolution.COMMIT, TransactionResolution.ROLLBACK
Scenario = Callable[[GatewayClient], Awaitable[None]]


class Gateway:
    """A gateway on a fake store. `run` runs a scenario with a client of the gateway."""

    def __init__(self, make: MakeProducer) -> None:
        self._make, self.store, self.topic, self.layout = make, FakeStore(), "orders", ""
        self.transactions = FakeTransactions(a=[])

    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            route = replace(topic_route(self.topic, a=2), layout=self.layout)
            producer = self._make(self.store, route=route, send_timeout_s=30.0)
            more = {"transactions": self.transactions}
            calls = lambda group, namespace: FakeGroupCalls(group)  # noqa: E731
            async with gateway_of(producer, FakeGroups(), calls, **more) as client:
                await scenario(client)

        asyncio.run(main())


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with producers_of_fakes() as make:
        yield Gateway(make)


def half(**fields: Any) -> wire.SendMessageRequest:
    system = wire.SystemProperties(**{"message_id": "01A", "message_type": MessageType.TRANSACTION, **fields})
    return wire.SendMessageRequest(messages=[wire.Message(topic=ORDERS, system_properties=system, body=b"paid")])


def ends(transaction_id: str, resolution: int = COMMIT, **fields: Any) -> wire.EndTransactionRequest:
    return wire.EndTransactionRequest(
        topic=ORDERS, message_id="01A", transaction_id=transaction_id, resolution=resolution, **fields
    )


# Half messages


def test_a_message_of_a_transaction_is_stored_as_a_half_message_of_its_topics_group(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        request = half(orphaned_transaction_recovery_duration=duration(30_500), tag="t", message_group="k")
        [entry] = (await client.call("SendMessage", request)).entries
        assert entry.status.code == Code.OK
        [stored] = gateway.store.messages()
        system = stored.system_properties
        assert (stored.topic, system["REAL_TOPIC"], system["PGROUP"]) == (HALF_TOPIC, "orders", "orders")
        assert (system["CHECK_IMMUNITY_TIME_IN_SECONDS"], stored.tags, stored.body) == ("31", "t", b"paid")
        place = TransactionPlace.parse(entry.transaction_id)
        assert (place.broker_name, place.queue_offset, place.unique_id) == ("a", entry.offset, entry.message_id)
        assert str(place) == entry.transaction_id
        assert gateway.transactions.ends == []

    gateway.run(scenario)


@pytest.mark.parametrize(("time_ms", "immunity"), [(0, None), (1, "1"), (7_200_000, "3600")])
def test_the_time_before_the_first_check_is_bounded(gateway: Gateway, time_ms: int, immunity: str | None) -> None:
    async def scenario(client: GatewayClient) -> None:
        request = half(orphaned_transaction_recovery_duration=duration(time_ms))
        assert (await client.call("SendMessage", request)).status.code == Code.OK
        [stored] = gateway.store.messages()
        assert stored.system_properties.get("CHECK_IMMUNITY_TIME_IN_SECONDS") == immunity

    gateway.run(scenario)


def test_a_half_message_that_is_less_durable_than_promised_is_rolled_back(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        answer = await client.call("SendMessage", half())
        assert answer.status.code == Code.MASTER_PERSISTENCE_TIMEOUT
        async with asyncio.timeout(ANSWER_S):
            while not gateway.transactions.ends:
                await asyncio.sleep(0.01)
        [(broker, topic, order)] = gateway.transactions.ends
        assert (broker, topic, order.commit_or_rollback) == ("a", "orders", LocalTransactionState.ROLLBACK_MESSAGE)
        assert order.transaction_id == answer.entries[0].message_id

    gateway.store.status = SendStatus.FLUSH_DISK_TIMEOUT
    gateway.run(scenario)


def test_a_message_of_a_transaction_is_alone_and_not_delayed(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        two = wire.SendMessageRequest(messages=[*half().messages, *half().messages])
        assert (await client.call("SendMessage", two)).status.code == Code.BAD_REQUEST
        at_ms = time.time_ns() // 1_000_000 + 60_000
        answer = await client.call("SendMessage", half(delivery_timestamp=timestamp(at_ms)))
        assert answer.status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        assert gateway.store.messages() == []

    gateway.run(scenario)


def test_a_topic_whose_name_is_no_group_has_no_transactions(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        request = half()
        request.messages[0].topic.name = gateway.topic
        assert (await client.call("SendMessage", request)).status.code == Code.ILLEGAL_TOPIC
        async with Producing(client, gateway.topic):
            await client.service.poll_checks()
        assert gateway.transactions.polls == gateway.store.messages() == []

    gateway.topic = "x" * 121
    gateway.run(scenario)


# Ends


@pytest.mark.parametrize(
    ("resolution", "state"),
    [(COMMIT, LocalTransactionState.COMMIT_MESSAGE), (ROLLBACK, LocalTransactionState.ROLLBACK_MESSAGE)],
)
@pytest.mark.parametrize("source", [TransactionSource.SOURCE_CLIENT, TransactionSource.SOURCE_SERVER_CHECK])
def test_a_transaction_of_another_gateway_is_ended_with_its_id_alone(
    gateway: Gateway, resolution: int, state: LocalTransactionState, source: int
) -> None:
    async def scenario(client: GatewayClient) -> None:
        answer = await client.call("EndTransaction", ends("a/5/700/01AB/CD", resolution, source=source))
        assert answer.status.code == Code.OK
        [(broker, topic, order)] = gateway.transactions.ends
        assert (broker, topic, order.producer_group, order.transaction_id) == ("a", "orders", "orders", "01AB/CD")
        assert (order.queue_offset, order.physical_offset, order.commit_or_rollback) == (5, 700, state)
        assert order.from_transaction_check == (source == TransactionSource.SOURCE_SERVER_CHECK)

    gateway.run(scenario)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "a", "a/1/2", "a/1/2/", "/1/2/id", "a/-1/2/id", "a/1/x/id", "a/²/2/id", "b/1/2/id"),
        *(f"a/{2**63}/2/id", "a/1/2/" + "x" * 600, "a/" + "9" * 400 + "/2/id"),
    ],
    ids=range(13),
)
def test_an_id_that_is_no_id_of_the_topic_ends_nothing(gateway: Gateway, text: str) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert (await client.call("EndTransaction", ends(text))).status.code == Code.INVALID_TRANSACTION_ID
        assert gateway.transactions.ends == []

    gateway.run(scenario)


def test_a_transaction_of_a_broker_group_that_left_the_routes_can_be_ended_later(gateway: Gateway) -> None:
    """A client begins a new transaction after INVALID_TRANSACTION_ID, and repeats the end after HA_NOT_AVAILABLE."""

    async def scenario(client: GatewayClient) -> None:
        answer = await client.call("EndTransaction", ends("gone/1/2/id"))
        assert answer.status.code == Code.HA_NOT_AVAILABLE
        assert [broker for broker, *_ in gateway.transactions.ends] == ["gone"]

    gateway.layout = "a:2;gone:2"
    gateway.transactions.failure = ServiceNotAvailableError("broker group 'gone' is not available")
    gateway.run(scenario)


def test_an_outcome_that_is_unknown_ends_nothing(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert (await client.call("EndTransaction", ends("a/1/2/id", 0))).status.code == Code.OK
        assert (await client.call("EndTransaction", ends("a/1/2/id", 9))).status.code == Code.BAD_REQUEST
        assert gateway.transactions.ends == []

    gateway.run(scenario)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TransactionError("rolled back already"), Code.INVALID_TRANSACTION_ID),
        (RequestTimeoutError("an end", 1.0), Code.PROXY_TIMEOUT),
    ],
)
def test_a_refused_end_is_not_ok(gateway: Gateway, error: Any, code: Code) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert (await client.call("EndTransaction", ends("a/1/2/id"))).status.code == code

    gateway.transactions.failure = error
    gateway.run(scenario)


# Checks


def check(number: int, topic: str = "orders") -> TransactionCheck:
    message = Message(topic, b"paid %d" % number, tags="t", keys=["k"], properties={"colour": "red"})
    record = bytes(half_batch([message], ids=[f"T{number}"], group=topic).records)
    return TransactionCheck(topic, f"T{number}", number, number * 100, 1, record)


class Producing:
    """A producer's stream, whose settings name topics. `read` returns the next command."""

    def __init__(self, client: GatewayClient, *topics: str, name: str = "client-1", namespace: str = "") -> None:
        metadata = (("x-mq-client-id", name), ("x-mq-namespace", namespace))
        self._stream = client.method("Telemetry")(metadata=metadata, timeout=ANSWER_S)
        self._topics = topics

    async def __aenter__(self) -> Producing:
        await self.publish(*self._topics)
        return self

    async def publish(self, *topics: str) -> None:
        publishing = wire.Publishing(topics=[wire.Resource(name=topic) for topic in topics])
        settings = wire.Settings(client_type=ClientType.PRODUCER, publishing=publishing)
        await self._stream.write(wire.TelemetryCommand(settings=settings))
        assert (await self._stream.read()).HasField("settings")

    async def __aexit__(self, *error: object) -> None:
        await self._stream.done_writing()
        while await self._stream.read() is not grpc.aio.EOF:
            pass

    async def read(self) -> wire.RecoverOrphanedTransactionCommand:
        command = await self._stream.read()
        assert command.WhichOneof("command") == "recover_orphaned_transaction_command"
        return command.recover_orphaned_transaction_command  # type: ignore[no-any-return]


def test_a_check_is_sent_to_a_producer_whose_answer_ends_the_transaction(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        await client.service.poll_checks()
        assert gateway.transactions.polls == []
        async with Producing(client, "orders") as producer:
            await client.service.poll_checks()
            command = await producer.read()
            assert gateway.transactions.polls == [("a", ["orders"])]
            message = command.message
            assert (message.topic, message.body, dict(message.user_properties)) == (
                ORDERS,
                b"paid 7",
                {"colour": "red"},
            )
            system = message.system_properties
            assert (system.tag, list(system.keys), system.message_id) == ("t", ["k"], "T7")
            assert system.message_type == MessageType.TRANSACTION
            source = TransactionSource.SOURCE_SERVER_CHECK
            answer = await client.call("EndTransaction", ends(command.transaction_id, source=source))
            assert answer.status.code == Code.OK
            [(_, _, order)] = gateway.transactions.ends
            assert (order.queue_offset, order.physical_offset, order.transaction_id) == (7, 700, "T7")

    gateway.transactions.checks["a"] = [check(7)]
    gateway.run(scenario)


def test_the_producers_of_a_topic_take_turns_and_a_new_one_answers_for_one_that_has_gone(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        checks = gateway.transactions.checks
        async with Producing(client, "orders", name="one") as one:
            async with Producing(client, "orders", name="two") as two:
                checks["a"] = [check(number) for number in range(4)]
                await client.service.poll_checks()
                assert [(await two.read()).transaction_id[-2:] for _ in range(2)] == ["T1", "T3"]
            checks["a"] = [check(5)]
            await client.service.poll_checks()
            assert [(await one.read()).transaction_id[-2:] for _ in range(3)] == ["T0", "T2", "T5"]

    gateway.run(scenario)


def test_a_topic_without_a_producer_is_polled_no_more(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        async with Producing(client, "orders", "other") as producer:
            await client.service.poll_checks()
            await producer.publish("other")
            await client.service.poll_checks()
        await client.service.poll_checks()
        await client.service.poll_checks()
        first, second = gateway.transactions.polls
        assert (sorted(first[1]), second[1]) == (["orders", "other"], ["other"])
        async with asyncio.timeout(ANSWER_S):
            while len(gateway.transactions.left) < 2:
                await asyncio.sleep(0.01)
        assert sorted(gateway.transactions.left) == [("a", "orders"), ("a", "other")]

    gateway.run(scenario)


def test_polls_of_many_topics_take_turns(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: GatewayClient) -> None:
        async with Producing(client, *(f"t{number}" for number in range(5))):
            for _ in range(6):
                await client.service.poll_checks()
        polls = [groups for _, groups in gateway.transactions.polls]
        assert [len(groups) for groups in polls] == [2] * 6
        assert len({topic for groups in polls for topic in groups}) == 5

    monkeypatch.setattr(transaction_calls, "POLLED_TOPICS_MAX", 2)
    gateway.run(scenario)


def test_a_broker_that_does_not_answer_does_not_stop_the_checks_of_others(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        async with Producing(client, "orders") as producer:
            await client.service.poll_checks()
            assert (await producer.read()).transaction_id.startswith("b/1/")

    gateway.transactions.checks |= {"b": [check(1)]}
    gateway.transactions.dead = {"a"}
    gateway.run(scenario)


def test_a_check_that_cannot_be_read_does_not_stop_the_others(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(client: GatewayClient) -> None:
        async with Producing(client, "orders") as producer:
            await client.service.poll_checks()
            assert (await producer.read()).transaction_id == "a/2/200/T2"
        assert "transaction T1 cannot be checked" in caplog.text

    broken = TransactionCheck("orders", "T1", 1, 100, 1, b"rubbish")
    gateway.transactions.checks["a"] = [broken, check(2)]
    gateway.run(scenario)


def test_the_commands_that_wait_for_a_client_are_bounded() -> None:
    async def scenario() -> None:
        stream = command_streams.CommandStream("client-1", CallContext())
        command = wire.TelemetryCommand()
        offered = [stream.offer(command) for _ in range(command_streams.COMMANDS_MAX + 3)]
        assert offered == [True] * command_streams.COMMANDS_MAX + [False] * 3
        stream.end()
        read = [await stream.next() for _ in range(command_streams.COMMANDS_MAX + 1)]
        assert read[-1] is None
        # an answer waits until it is read
        answer = asyncio.create_task(stream.answer(command))
        assert await stream.next() is command
        await answer

    asyncio.run(scenario())


def test_a_client_with_too_many_topics_is_refused() -> None:
    streams, stream = command_streams.CommandStreams(), command_streams.CommandStream("client-1", CallContext())
    topics = {f"t{number}": ORDERS for number in range(command_streams.TOPICS_MAX + 1)}
    with pytest.raises(ValueError, match="at most 1000"):
        streams.publishes(stream, topics)
    assert streams.published_topics() == []
    assert streams.turn("t1", lambda stream: True) is None
