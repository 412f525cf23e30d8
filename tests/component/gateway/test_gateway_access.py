"""Tests of access over gRPC: signed calls, the rights of each call, quotas, and changes of users under open streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest

from raymq.common.message import Message
from raymq.common.protocol.transactions import TransactionCheck
from raymq.gateway.clients.access import GatewayAccess, address_of
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import ClientType, Code
from raymq.gateway.wire.table import METHODS
from raymq.remoting.access.policies import make_entry
from tests.support.clients.fakes import FakeRoutes, FakeStore, topic_route
from tests.support.clients.producers import MakeProducer, producers_of_fakes
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import ANSWER_S, FakeGroups, FakeTransactions, GatewayClient, gateway_of
from tests.support.gateway.one_call import signed_headers
from tests.support.gateway.users import HANDLE, SECRET, secret_of, state_of_users
from tests.support.stores.transactions import half_batch

ORDERS, BILLING = wire.Resource(name="orders"), wire.Resource(name="billing")
QUEUE = wire.MessageQueue(topic=ORDERS)
SENDS = make_entry("Topic:orders", ["Pub"])
CONSUMES = make_entry("Topic:orders", ["Sub"]), make_entry("Group:billing", ["Sub"])
Scenario = Callable[[GatewayClient], Awaitable[None]]


def signed(user: str, secret: str | None = None, **more: str) -> tuple[tuple[str, str], ...]:
    """Return the headers of a call that `user` signs."""
    if secret is None:
        secret = secret_of(user)
    return (*signed_headers(user, secret), *more.items())


class Gateway:
    """A gateway with access on. `state`: the users and policies in force. `run` runs a scenario with its client."""

    def __init__(self, make: MakeProducer) -> None:
        self._make, self.store, self.group = make, FakeStore(), FakeGroupCalls("billing")
        self.transactions, self.gateways = FakeTransactions(a=[]), 1
        self.state, self.now_ms = state_of_users(), 0.0
        self.routes = FakeRoutes()

    def allow(self, user: str, *entries: Any) -> None:
        self.state = self.state.with_entries(user, entries)

    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            producer = self._make(self.store, route=topic_route(a=2), send_timeout_s=30.0)
            self.routes = producer.test_routes
            access = GatewayAccess(lambda: self.state, monotonic_ms=lambda: self.now_ms, gateways=lambda: self.gateways)
            more: dict[str, Any] = {"transactions": self.transactions, "access": access}
            async with gateway_of(producer, FakeGroups(), lambda group, namespace: self.group, **more) as client:
                await scenario(client)

        asyncio.run(main())


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with producers_of_fakes() as make:
        yield Gateway(make)


def message(body: bytes = b"x") -> wire.Message:
    return wire.Message(topic=ORDERS, system_properties=wire.SystemProperties(message_id="01A"), body=body)


SEND = wire.SendMessageRequest(messages=[message()])
REQUESTS: dict[str, tuple[Any, str]] = {
    "QueryRoute": (wire.QueryRouteRequest(topic=ORDERS), "Pub or Sub or Get or List on Topic:orders"),
    "QueryAssignment": (wire.QueryAssignmentRequest(topic=ORDERS, group=BILLING), "Sub on Group:billing"),
    "Heartbeat": (wire.HeartbeatRequest(group=BILLING), "Sub on Group:billing"),
    "SendMessage": (SEND, "Pub on Topic:orders"),
    "RecallMessage": (wire.RecallMessageRequest(topic=ORDERS, recall_handle="x"), "Pub on Topic:orders"),
    "EndTransaction": (wire.EndTransactionRequest(topic=ORDERS, transaction_id="a/1/2/i"), "Pub on Topic:orders"),
    "AckMessage": (
        wire.AckMessageRequest(topic=ORDERS, group=BILLING, entries=[wire.AckMessageEntry(receipt_handle=HANDLE)]),
        "Sub on Group:billing",
    ),
    "ChangeInvisibleDuration": (
        wire.ChangeInvisibleDurationRequest(topic=ORDERS, group=BILLING, receipt_handle=HANDLE),
        "Sub on Group:billing",
    ),
    "ForwardMessageToDeadLetterQueue": (
        wire.ForwardMessageToDeadLetterQueueRequest(topic=ORDERS, group=BILLING, receipt_handle=HANDLE),
        "Sub on Group:billing",
    ),
    "UpdateOffset": (wire.UpdateOffsetRequest(group=BILLING, message_queue=QUEUE), "Sub on Group:billing"),
    "GetOffset": (wire.GetOffsetRequest(group=BILLING, message_queue=QUEUE), "Sub on Group:billing"),
    "QueryOffset": (wire.QueryOffsetRequest(message_queue=QUEUE), "Pub or Sub or Get or List on Topic:orders"),
}
"""A request for each method with one answer, and the right whose lack refuses the request."""
FOR_ANY_USER = {
    "NotifyClientTermination": wire.NotifyClientTerminationRequest(),
    "SyncLiteSubscription": wire.SyncLiteSubscriptionRequest(),
}
PULL = wire.PullMessageRequest(group=BILLING, message_queue=QUEUE, batch_size=1)


def receive(batch_size: int = 32) -> wire.ReceiveMessageRequest:
    request = wire.ReceiveMessageRequest(group=BILLING, message_queue=QUEUE, batch_size=batch_size)
    request.invisible_duration.seconds = 60
    request.long_polling_timeout.seconds = 0
    return request


async def received(
    client: GatewayClient, request: Any, headers: Any, method: str = "ReceiveMessage"
) -> tuple[wire.Status, int]:
    """Return the status of a receive or a pull, and the number of its messages."""
    stream = client.method(method)(request, metadata=headers, timeout=ANSWER_S)
    answers = [answer async for answer in stream]
    return answers[0].status, len([one for one in answers if one.HasField("message")])


def producer_settings() -> wire.TelemetryCommand:
    publishing = wire.Publishing(topics=[ORDERS])
    return wire.TelemetryCommand(settings=wire.Settings(client_type=ClientType.PRODUCER, publishing=publishing))


def consumer_settings() -> wire.TelemetryCommand:
    subscription = wire.Subscription(group=BILLING, subscriptions=[wire.SubscriptionEntry(topic=ORDERS)])
    return wire.TelemetryCommand(settings=wire.Settings(subscription=subscription))


async def refusal(client: GatewayClient, command: wire.TelemetryCommand, headers: Any) -> str:
    """Return the reason why a stream with these settings is refused."""
    stream = client.method("Telemetry")(metadata=headers, timeout=ANSWER_S)

    async def exchange() -> None:
        await stream.write(command)
        for _ in range(2):  # an answer with the reason may come before the end
            await stream.read()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await exchange()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


def test_each_method_refuses_a_call_that_no_user_signed(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        unsigned = (("x-mq-client-id", "client-1"),)
        own_secret = signed("root", SECRET)  # the user's own secret is not the secret of its clients
        for headers in (unsigned, own_secret, signed("nobody", "x" * 64), signed("gone")):
            for name, (request, _) in REQUESTS.items():
                assert (await client.call(name, request, headers)).status.code == Code.UNAUTHORIZED, name
            for name, request in FOR_ANY_USER.items():
                assert (await client.call(name, request, headers)).status.code == Code.UNAUTHORIZED, name
            assert (await received(client, receive(), headers))[0].code == Code.UNAUTHORIZED
            assert (await received(client, PULL, headers, "PullMessage"))[0].code == Code.UNAUTHORIZED
            assert await refusal(client, producer_settings(), headers)
        assert gateway.store.messages() == gateway.group.receives == gateway.transactions.ends == []
        assert len(client.service.clients) == 0

    gateway.run(scenario)


def test_each_method_names_the_right_that_its_user_lacks(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        for name, (request, right) in REQUESTS.items():
            answer = await client.call(name, request, signed("shop"))
            assert (answer.status.code, right in answer.status.message) == (Code.FORBIDDEN, True), name
        status, _ = await received(client, receive(), signed("shop"))
        assert (status.code, "Sub on Group:billing" in status.message) == (Code.FORBIDDEN, True)
        status, _ = await received(client, PULL, signed("shop"), "PullMessage")
        assert (status.code, "Sub on Group:billing" in status.message) == (Code.FORBIDDEN, True)
        assert "Pub on Topic:orders" in await refusal(client, producer_settings(), signed("shop"))
        assert "Sub on Group:billing" in await refusal(client, consumer_settings(), signed("shop"))
        assert gateway.store.messages() == gateway.group.receives == gateway.transactions.ends == []
        assert len(client.service.clients) == 0

    gateway.run(scenario)


def test_every_method_of_the_gateway_is_in_these_tests(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        answered = {path.rpartition("/")[2] for path in client.service.handlers()}
        assert answered == {*REQUESTS, *FOR_ANY_USER, "ReceiveMessage", "PullMessage", "Telemetry"}
        assert answered <= {method.name for method in METHODS}

    gateway.run(scenario)


@pytest.mark.parametrize("user", ["root", "shop"])
def test_a_user_with_rights_sends_and_receives(gateway: Gateway, user: str) -> None:
    async def scenario(client: GatewayClient) -> None:
        headers = signed(user)
        assert (await client.call("SendMessage", SEND, headers)).status.code == Code.OK
        assert (await client.call("QueryRoute", REQUESTS["QueryRoute"][0], headers)).status.code == Code.OK
        status, count = await received(client, receive(), headers)
        assert (status.code, count) == (Code.OK, 1)
        # another user's client of the same id is another client
        assert (await client.call("Heartbeat", wire.HeartbeatRequest(), headers)).status.code == Code.OK
        end = wire.NotifyClientTerminationRequest()
        assert (await client.call("NotifyClientTermination", end, signed("till"))).status.code == Code.OK
        assert client.service.clients.get(f"{user}/client-1") is not None

    gateway.allow("shop", SENDS, *CONSUMES[1:], make_entry("Topic:orders", ["Pub", "Sub"]))
    gateway.group.put("a", b"x")
    gateway.run(scenario)


def test_an_address_of_a_policy_is_the_callers_own(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert (await client.call("SendMessage", SEND, signed("shop"))).status.code == Code.OK
        assert (await client.call("SendMessage", SEND, signed("till"))).status.code == Code.FORBIDDEN

    gateway.allow("shop", make_entry("Topic:orders", ["Pub"], sources=["127.0.0.0/8"]))
    gateway.allow("till", make_entry("Topic:orders", ["Pub"], sources=["10.0.0.0/8"]))
    gateway.run(scenario)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[fe80::1]:4711", "fe80::1"),
        ("unix:/tmp/x", ""),
        ("", ""),
    ],
)
def test_the_address_in_grpcs_text(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_a_right_that_was_taken_away_counts_at_the_next_call_and_the_next_check(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        headers = signed("shop")
        stream = client.method("Telemetry")(metadata=headers, timeout=ANSWER_S)
        await stream.write(producer_settings())
        assert (await stream.read()).HasField("settings")
        checks = gateway.transactions.checks
        checks["a"] = [check(1)]
        await client.service.poll_checks()
        assert (await stream.read()).recover_orphaned_transaction_command.transaction_id.endswith("T1")
        assert (await client.call("SendMessage", SEND, headers)).status.code == Code.OK
        gateway.state = gateway.state.without_entries("shop")
        assert (await client.call("SendMessage", SEND, headers)).status.code == Code.FORBIDDEN
        checks["a"] = [check(2)]
        await client.service.poll_checks()
        gateway.allow("shop", SENDS)
        checks["a"] = [check(3)]
        await client.service.poll_checks()
        assert (await stream.read()).recover_orphaned_transaction_command.transaction_id.endswith("T3")
        gateway.state = gateway.state.without_user("shop")
        assert (await client.call("SendMessage", SEND, headers)).status.code == Code.UNAUTHORIZED
        stream.cancel()

    def check(number: int) -> TransactionCheck:
        record = bytes(half_batch([Message("orders", b"x")], ids=[f"T{number}"], group="orders").records)
        return TransactionCheck("orders", f"T{number}", number, number, 1, record)

    gateway.allow("shop", SENDS)
    gateway.run(scenario)


@pytest.mark.parametrize(("gateways", "count"), [(1, 4), (2, 2), (9, 1)])
def test_gateways_share_the_quota_of_a_user_that_sends(gateway: Gateway, gateways: int, count: int) -> None:
    async def scenario(client: GatewayClient) -> None:
        requests = [wire.SendMessageRequest(messages=[message(b"%d" % number)]) for number in range(7)]
        codes = [(await client.call("SendMessage", one, signed("till"))).status.code for one in requests[:6]]
        assert codes == [Code.OK] * count + [Code.TOO_MANY_REQUESTS] * (6 - count)
        assert len(gateway.store.everything()) == count
        # a repeated send costs nothing
        assert (await client.call("SendMessage", requests[0], signed("till"))).status.code == Code.OK
        gateway.now_ms += 1000
        assert (await client.call("SendMessage", requests[6], signed("till"))).status.code == Code.OK

    gateway.allow("till", SENDS)
    gateway.gateways = gateways
    gateway.run(scenario)


def test_the_messages_that_a_user_consumes_are_counted(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert (await received(client, receive(), signed("eater")))[1] == 2
        status, count = await received(client, receive(), signed("eater"))
        assert (status.code, count) == (Code.TOO_MANY_REQUESTS, 0)
        gateway.now_ms += 1000
        assert (await received(client, receive(), signed("eater")))[1] == 2

    gateway.allow("eater", *CONSUMES)
    for number in range(5):
        gateway.group.put("a", b"%d" % number)
    gateway.run(scenario)


def test_a_topic_is_created_only_for_a_user_that_may_create_it(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        query = wire.QueryRouteRequest(topic=wire.Resource(name="new"))
        for user, asked in (("shop", []), ("till", ["new"])):
            assert (await client.call("QueryRoute", query, signed(user))).status.code == Code.TOPIC_NOT_FOUND
            assert [topic for topic, _ in gateway.routes.asked_to_create] == asked

    gateway.allow("shop", make_entry("Topic:new", ["Get"]))
    gateway.allow("till", make_entry("Topic:new", ["Pub"]))
    gateway.run(scenario)


def test_a_signature_is_valid_for_the_time_zones_of_the_world_only(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        headers = dict(signed("root"))
        headers["x-mq-date-time"] = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() - 15 * 3600))
        answer = await client.call("SendMessage", SEND, tuple(headers.items()))
        assert answer.status.code == Code.UNAUTHORIZED

    gateway.run(scenario)
