"""Tests of the consumers that a gateway announces as members of their groups, and of the questions that they answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from raymq.common.errors import InvalidArgumentError, RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.common.members.questions import Answers
from raymq.common.message import Message
from raymq.gateway.clients.connected_clients import STREAM_EXPIRED_S
from raymq.gateway.service import client_members
from raymq.gateway.service.client_members import VERSION_CHARS_MAX, ClientMember
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import ClientType, Code, FilterType, Language
from raymq.records.format.encode import encode_batch
from tests.support.clients.fakes import FakeStore, topic_route
from tests.support.clients.producers import Clock, producers_of_fakes
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import (
    ANSWER_S,
    METADATA,
    FakeAnnouncer,
    FakeGroups,
    GatewayClient,
    gateway_of,
)

ORDERS, BILLING = wire.Resource(name="orders"), wire.Resource(name="billing")
Scenario = Callable[[GatewayClient], Awaitable[None]]


class Gateway:
    """A gateway, and the members that it announces. `run` runs a scenario with a client of the gateway."""

    def __init__(self, make: Any) -> None:
        self._make, self.announcer, self.clock = make, FakeAnnouncer(), Clock()

    @property
    def member(self) -> ClientMember:
        [member] = self.announcer.members
        assert isinstance(member, ClientMember)
        assert isinstance(member, Answers)
        return member

    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            producer = self._make(FakeStore(), route=topic_route(a=2), send_timeout_s=30.0)
            more: dict[str, Any] = {"announcer": self.announcer, "clock": self.clock}
            calls = lambda group, namespace: FakeGroupCalls(group)  # noqa: E731
            async with gateway_of(producer, FakeGroups(), calls, **more) as client:
                await scenario(client)

        asyncio.run(main())


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with producers_of_fakes() as make:
        yield Gateway(make)


def settings(expression: str = "paid", topic: str = "orders") -> wire.TelemetryCommand:
    wanted = wire.FilterExpression(type=FilterType.TAG, expression=expression)
    entry = wire.SubscriptionEntry(topic=wire.Resource(name=topic), expression=wanted)
    subscription = wire.Subscription(group=BILLING, subscriptions=[entry])
    return wire.TelemetryCommand(
        settings=wire.Settings(
            client_type=ClientType.PUSH_CONSUMER,
            subscription=subscription,
            user_agent=wire.UA(language=Language.JAVA, version="5.0.7" + "x" * VERSION_CHARS_MAX),
        )
    )


async def connected(client: GatewayClient, name: str = "client-1") -> Any:
    """Open the stream of a push consumer, and return it."""
    stream = client.method("Telemetry")(metadata=(("x-mq-client-id", name),), timeout=ANSWER_S)
    await stream.write(settings())
    assert (await stream.read()).HasField("settings")
    return stream


def record(topic: str = "orders") -> bytes:
    batch = encode_batch(
        [Message(topic, b"paid", tags="paid", properties={"a": "b"})],
        0,
        born_host=("127.0.0.1", 1),
        born_timestamp_ms=1,
        message_ids=["ID1"],
    )
    return bytes(batch.records)


def test_a_consumer_is_a_member_of_its_group_until_it_has_gone(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        stream = await connected(client)
        data = gateway.announcer.members[gateway.member]
        assert (data.group, data.member, data.consume_type) == ("billing", "client-1", "PUSH")
        assert dict(data.subscriptions) == {"orders": "paid"}
        assert (data.language, data.version) == ("JAVA", ("5.0.7" + "x" * 64)[:64])
        for expression, announced in (("paid", 1), ("late", 2)):
            await stream.write(settings(expression))
            await stream.read()
            assert gateway.announcer.announced == announced
        assert dict(gateway.announcer.members[gateway.member].subscriptions) == {"orders": "late"}
        stream.cancel()
        while client.service.clients.get("client-1").streams:  # type: ignore[union-attr]  # it is registered
            await asyncio.sleep(0.01)
        gateway.clock.now_s += STREAM_EXPIRED_S + 1
        await client.service.tick()
        assert gateway.announcer.members == {}
        await connected(client)
        assert gateway.member.data.member == "client-1"
        await client.call("NotifyClientTermination", wire.NotifyClientTerminationRequest(group=BILLING))
        assert gateway.announcer.members == {}

    gateway.run(scenario)


def test_a_producer_is_no_member_and_the_members_are_bounded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: GatewayClient) -> None:
        stream = client.method("Telemetry")(metadata=METADATA, timeout=ANSWER_S)
        await stream.write(wire.TelemetryCommand(settings=wire.Settings(publishing=wire.Publishing(topics=[ORDERS]))))
        await stream.read()
        assert gateway.announcer.members == {}
        for name in ("one", "two", "three"):
            await connected(client, name)
        assert {data.member for data in gateway.announcer.members.values()} == {"one", "two"}

    monkeypatch.setattr(client_members, "MEMBERS_MAX", 2)
    gateway.run(scenario)


def test_an_administrator_gets_the_stacks_of_a_client(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        stream = await connected(client)
        plain = await asyncio.to_thread(gateway.member.running_info, "gateway", "10.0.0.1", stacks=False)
        assert (plain.client_id, plain.member, plain.group) == ("gateway", "client-1", "billing")
        assert (plain.consume_type, dict(plain.subscriptions), plain.stacks) == ("PUSH", {"orders": "paid"}, ())
        asked = asyncio.create_task(asyncio.to_thread(gateway.member.running_info, "g", "h", stacks=True))
        nonce = (await stream.read()).print_thread_stack_trace_command.nonce
        for number, text in (("wrong", "x"), (nonce, "main\n  run\n  wait")):
            trace = wire.ThreadStackTrace(nonce=number, thread_stack_trace=text)
            await stream.write(wire.TelemetryCommand(thread_stack_trace=trace))
        [stack] = (await asked).stacks
        assert (stack.name, stack.frames) == ("client-1", ("main", "  run", "  wait"))

    gateway.run(scenario)


def test_a_client_that_does_not_answer_has_no_stacks_and_consumes_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: GatewayClient) -> None:
        stream = await connected(client)
        info = await asyncio.to_thread(gateway.member.running_info, "g", "h", stacks=True)
        assert info.stacks == ()
        assert "has not sent its stacks" in info.trouble
        with pytest.raises(RequestTimeoutError, match="a question to client 'client-1' did not complete"):
            await asyncio.to_thread(gateway.member.consume_directly, "g", record(), "a")
        stream.cancel()
        while client.service.clients.get("client-1").streams:  # type: ignore[union-attr]  # it is registered
            await asyncio.sleep(0.01)
        with pytest.raises(ServiceNotAvailableError, match="no open stream"):
            await asyncio.to_thread(gateway.member.consume_directly, "g", record(), "a")

    monkeypatch.setattr(client_members, "MEMBER_ANSWER_S", 0.1)
    gateway.run(scenario)


def test_a_question_that_a_busy_event_loop_does_not_pass_on_names_the_client(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: GatewayClient) -> None:
        await connected(client)
        asked = threading.Thread(target=ask)
        asked.start()
        # the event loop does nothing else until the thread has its answer
        asked.join(ANSWER_S)

    def ask() -> None:
        try:
            gateway.member.consume_directly("g", record(), "a")
        except RaymqError as error:
            raised.append(error)

    raised: list[RaymqError] = []
    monkeypatch.setattr(client_members, "MEMBER_ANSWER_S", 0.1)
    monkeypatch.setattr(client_members, "LOOP_MARGIN_S", 0.0)
    gateway.run(scenario)
    assert [str(error).partition(" did not")[0] for error in raised] == ["a question to client 'client-1'"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.OK, "CONSUME_SUCCESS"),
        (Code.FAILED_TO_CONSUME_MESSAGE, "RECONSUME_LATER"),
        (Code.MESSAGE_CORRUPTED, "EXCEPTION"),
        (Code.VERIFY_FIFO_MESSAGE_UNSUPPORTED, None),
        (777, None),
    ],
)
def test_a_client_consumes_one_message_for_an_administrator(gateway: Gateway, code: int, status: str | None) -> None:
    async def scenario(client: GatewayClient) -> None:
        stream = await connected(client)
        member = gateway.member
        asked = asyncio.create_task(asyncio.to_thread(member.consume_directly, "g", record(), "a"))
        command = (await stream.read()).verify_message_command
        message = command.message
        assert (message.topic, message.body, dict(message.user_properties)) == (ORDERS, b"paid", {"a": "b"})
        assert message.system_properties.message_id == "ID1"
        answer = wire.TelemetryCommand(
            status=wire.Status(code=code, message="why"),
            verify_message_result=wire.VerifyMessageResult(nonce=command.nonce),
        )
        await stream.write(answer)
        if status is None:
            with pytest.raises(InvalidArgumentError, match="refused the message: why"):
                await asked
        else:
            outcome = await asked
            assert (outcome.client_id, outcome.member, outcome.status) == ("g", "client-1", status)
            assert outcome.error == ("" if code == Code.OK else "why")
            assert outcome.took_ms > 0

    gateway.run(scenario)


def test_only_a_push_consumer_is_announced_as_a_member_with_a_listener(gateway: Gateway) -> None:
    """Administrators call the listeners of members of the type PUSH only."""

    async def scenario(client: GatewayClient) -> None:
        for kind, announced in (
            (ClientType.PUSH_CONSUMER, "PUSH"),
            (ClientType.LITE_PUSH_CONSUMER, "PUSH"),
            (ClientType.SIMPLE_CONSUMER, "POP"),
        ):
            command = settings()
            command.settings.client_type = kind
            stream = client.method("Telemetry")(metadata=METADATA, timeout=ANSWER_S)
            await stream.write(command)
            assert (await stream.read()).HasField("settings")
            assert gateway.member.data.consume_type == announced

    gateway.run(scenario)


def test_a_node_client_refuses_to_consume_a_message_at_once(gateway: Gateway) -> None:
    """Node's client sends the command back, without its message, and with a status that refuses it."""

    async def scenario(client: GatewayClient) -> None:
        stream = await connected(client)
        asked = asyncio.create_task(asyncio.to_thread(gateway.member.consume_directly, "g", record(), "a"))
        nonce = (await stream.read()).verify_message_command.nonce
        refusal = wire.TelemetryCommand(
            status=wire.Status(code=Code.NOT_IMPLEMENTED), verify_message_command=wire.VerifyMessageCommand(nonce=nonce)
        )
        await stream.write(refusal)
        with pytest.raises(InvalidArgumentError, match=f"refused the message: code {Code.NOT_IMPLEMENTED:d}"):
            await asked

    gateway.run(scenario)


def test_a_record_that_cannot_be_read_is_refused(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        await connected(client)
        with pytest.raises(RaymqError):
            await asyncio.to_thread(gateway.member.consume_directly, "g", b"rubbish", "a")

    gateway.run(scenario)
