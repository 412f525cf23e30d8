"""Tests of a gateway's calls over gRPC, in one process: a real producer over fake stores, and a gRPC client."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from raymq.common.errors import NoPermissionError, NotMasterError, RaymqError, RequestTimeoutError
from raymq.common.message import MessageQueue, SendStatus
from raymq.common.namespaces import Namespace
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.route import TopicRoute
from raymq.common.protocol.store import AppendResult
from raymq.gateway.convert.outgoing import outgoing
from raymq.gateway.convert.routes import endpoints_of
from raymq.gateway.convert.times import millis, timestamp
from raymq.gateway.service.cluster import GROUP_VALID_S
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import ClientType, Code, Encoding, FilterType, Language, MessageType
from raymq.gateway.wire.table import METHODS
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.message_id import IdRange
from tests.support.clients.fakes import FakeStore, topic_route
from tests.support.clients.producers import Clock, Gate, MakeProducer, producers_of_fakes
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import ANSWER_S, HOST, METADATA, FakeGroups, GatewayClient, gateway_of

NUMBERS = itertools.count()
ORDERS = wire.Resource(name="orders")
ANSWERED = (
    *("QueryRoute", "QueryAssignment", "Heartbeat", "NotifyClientTermination", "SendMessage", "RecallMessage"),
    *("AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue", "EndTransaction"),
    *("UpdateOffset", "GetOffset", "QueryOffset", "SyncLiteSubscription"),
)


@pytest.fixture
def make_producer() -> Iterator[MakeProducer]:
    with producers_of_fakes() as make:
        yield make


class StoreOfRecalls(FakeStore):
    """A fake store that also stores recalls, whose ids are not a range."""

    def _store(self, batch: EncodedBatch) -> AppendResult:
        if batch.message_ids and not isinstance(batch.message_ids, IdRange):
            return AppendResult(self.status, 0, 0, 1_700_000_000_000, False)
        return super()._store(batch)


class Gateway:
    """A gateway on one fake store. `run` runs a scenario with a client of the gateway."""

    def __init__(self, make: MakeProducer) -> None:
        self._make = make
        self.store, self.groups = StoreOfRecalls(), FakeGroups(GroupConfig("billing", retry_max_times=2))
        self.route: TopicRoute = topic_route(a=2)
        self.calls: dict[str, FakeGroupCalls] = {}
        self.more: dict[str, Any] = {}

    def run(self, scenario: Callable[[GatewayClient], Awaitable[None]]) -> None:
        async def main() -> None:
            producer = self._make(self.store, route=self.route, send_timeout_s=30.0)
            async with gateway_of(producer, self.groups, self.calls_of, **self.more) as client:
                await scenario(client)

        asyncio.run(main())

    def calls_of(self, group: str, namespace: Namespace) -> FakeGroupCalls:
        return self.calls.setdefault(group, FakeGroupCalls(group))

    def of_type(self, kind: TopicMessageType) -> None:
        self.route = replace(self.route, attributes=TopicAttributes(kind))


@pytest.fixture
def gateway(make_producer: MakeProducer) -> Gateway:
    return Gateway(make_producer)


def message(body: bytes = b"body", user: dict[str, str] | None = None, **fields: Any) -> wire.Message:
    system = wire.SystemProperties(
        **{"message_id": f"01{next(NUMBERS):030X}", "body_encoding": Encoding.IDENTITY, **fields}
    )
    return wire.Message(topic=ORDERS, user_properties=user or {}, system_properties=system, body=body)


def sends(*messages: wire.Message) -> wire.SendMessageRequest:
    return wire.SendMessageRequest(messages=messages)


# Routes


def test_a_route_has_the_endpoints_that_the_client_used(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        asked = endpoints_of("gateway.example", 443)
        answer = await client.call("QueryRoute", wire.QueryRouteRequest(topic=ORDERS, endpoints=asked))
        assert answer.status.code == Code.OK
        assert [queue.id for queue in answer.message_queues] == [0, 1]
        assert {queue.broker.endpoints.addresses[0].host for queue in answer.message_queues} == {"gateway.example"}
        answer = await client.call("QueryRoute", wire.QueryRouteRequest(topic=ORDERS))
        assert answer.message_queues[0].broker.endpoints == endpoints_of(HOST, client.port)
        request = wire.QueryAssignmentRequest(topic=ORDERS, group=wire.Resource(name="billing"), endpoints=asked)
        answer = await client.call("QueryAssignment", request)
        [assignment] = answer.assignments
        assert (assignment.message_queue.id, assignment.message_queue.broker.endpoints) == (-1, asked)

    gateway.run(scenario)


def test_an_advertised_address_is_in_all_routes(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        request = wire.QueryRouteRequest(topic=ORDERS, endpoints=endpoints_of("10.0.0.1", 1))
        answer = await client.call("QueryRoute", request)
        assert answer.message_queues[0].broker.endpoints == endpoints_of("gateway.example", 8081)

    gateway.more = {"advertise": ("gateway.example", 8081)}
    gateway.run(scenario)


@pytest.mark.parametrize(("ordered", "ids"), [(None, [0, 1]), (True, [0, 1]), (False, [-1])])
def test_the_assignments_of_an_ordered_group_are_its_queues(
    gateway: Gateway, ordered: bool | None, ids: list[int]
) -> None:
    async def scenario(client: GatewayClient) -> None:
        request = wire.QueryAssignmentRequest(topic=ORDERS, group=wire.Resource(name="billing"))
        answer = await client.call("QueryAssignment", request)
        assert [one.message_queue.id for one in answer.assignments] == ids
        settings = await settings_answer(client, consumer_settings(Language.JAVA))
        assert settings.subscription.fifo == (ids != [-1])

    gateway.of_type(TopicMessageType.FIFO)
    gateway.groups.configs["billing"] = GroupConfig("billing", ordered=ordered)
    gateway.run(scenario)


def test_the_assignments_of_many_clients_ask_once_for_their_group(gateway: Gateway) -> None:
    """Each push consumer asks every 5 s. A change of the group is in the answers after GROUP_VALID_S."""
    clock = Clock()

    async def scenario(client: GatewayClient) -> None:
        request = wire.QueryAssignmentRequest(topic=ORDERS, group=wire.Resource(name="billing"))

        async def ids() -> list[int]:
            answer = await client.call("QueryAssignment", request)
            return [one.message_queue.id for one in answer.assignments]

        assert [await ids() for _ in range(3)] == [[-1]] * 3
        assert gateway.groups.queried == ["billing"]
        gateway.groups.configs["billing"] = GroupConfig("billing", ordered=True)
        clock.now_s += GROUP_VALID_S
        assert await ids() == [0, 1]
        assert gateway.groups.queried == ["billing"] * 2

    gateway.more = {"clock": clock}
    gateway.run(scenario)


def test_a_call_that_is_wrong_is_answered_with_its_status(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        missing = wire.QueryRouteRequest(topic=wire.Resource(name="missing"))
        assert (await client.call("QueryRoute", missing)).status.code == Code.TOPIC_NOT_FOUND
        illegal = wire.QueryRouteRequest(topic=wire.Resource(name="a b"))
        assert (await client.call("QueryRoute", illegal)).status.code == Code.ILLEGAL_TOPIC
        request = wire.QueryAssignmentRequest(topic=ORDERS, group=wire.Resource(name="a b"))
        assert (await client.call("QueryAssignment", request)).status.code == Code.ILLEGAL_CONSUMER_GROUP
        for name in ANSWERED:
            answer = await client.bytes_of(name, b"\xff\xff")
            assert answer.status.code == Code.BAD_REQUEST, name
            kind = type(client.method(name))  # a stub for each method exists
            assert kind is not None
        for metadata in ((), (("x-mq-client-id", " "),), (("x-mq-client-id", "x" * 256),)):
            answer = await client.call("QueryRoute", wire.QueryRouteRequest(topic=ORDERS), metadata)
            assert answer.status.code == Code.CLIENT_ID_REQUIRED

    gateway.run(scenario)


def test_each_method_of_the_protocol_is_answered(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        names = {path.rpartition("/")[2] for path in client.service.handlers()}
        assert names == {method.name for method in METHODS}
        assert names == {*ANSWERED, "ReceiveMessage", "PullMessage", "Telemetry"}

    gateway.run(scenario)


# Clients


def test_a_client_of_which_the_gateway_knows_nothing_is_registered_by_its_heartbeat(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        beat = wire.HeartbeatRequest(group=wire.Resource(name="billing"), client_type=ClientType.PUSH_CONSUMER)
        assert (await client.call("Heartbeat", beat)).status.code == Code.OK
        known = client.service.clients.get("client-1")
        assert known is not None
        assert (known.client_type, known.group) == (ClientType.PUSH_CONSUMER, "billing")
        end = wire.NotifyClientTerminationRequest()
        assert (await client.call("NotifyClientTermination", end)).status.code == Code.OK
        assert len(client.service.clients) == 0
        bad = wire.HeartbeatRequest(group=wire.Resource(name="a b"))
        assert (await client.call("Heartbeat", bad)).status.code == Code.ILLEGAL_CONSUMER_GROUP

    gateway.run(scenario)


def consumer_settings(language: int, expression: str = "*", kind: int = FilterType.TAG) -> wire.TelemetryCommand:
    entry = wire.SubscriptionEntry(topic=ORDERS, expression=wire.FilterExpression(type=kind, expression=expression))
    subscription = wire.Subscription(group=wire.Resource(name="billing"), subscriptions=[entry])
    return wire.TelemetryCommand(
        settings=wire.Settings(
            client_type=ClientType.PUSH_CONSUMER, subscription=subscription, user_agent=wire.UA(language=language)
        )
    )


async def settings_answer(client: GatewayClient, command: wire.TelemetryCommand) -> wire.Settings:
    stream = client.method("Telemetry")(metadata=METADATA, timeout=ANSWER_S)
    await stream.write(command)
    answer = await stream.read()
    assert answer.status.code == Code.OK
    known = client.service.clients.get("client-1")
    assert known is not None
    assert known.streams == 1
    # a command that answers a question gets no answer; later settings are answered on the same stream
    await stream.write(wire.TelemetryCommand(thread_stack_trace=wire.ThreadStackTrace(nonce="1")))
    await stream.write(command)
    assert (await stream.read()).settings == answer.settings
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert known.streams == 0
    settings: wire.Settings = answer.settings
    return settings


@pytest.mark.parametrize("language", [Language.PYTHON, Language.NODE_JS, Language.JAVA])
def test_a_consumer_gets_the_settings_of_its_group_and_language(gateway: Gateway, language: int) -> None:
    async def scenario(client: GatewayClient) -> None:
        settings = await settings_answer(client, consumer_settings(language))
        assert settings.backoff_policy.max_attempts == 3
        assert not settings.subscription.fifo
        is_node = language == Language.NODE_JS
        strategy = "exponential_backoff" if is_node else "customized_backoff"
        assert settings.backoff_policy.WhichOneof("strategy") == strategy

    gateway.run(scenario)


def test_a_consumer_of_a_fifo_topic_and_of_a_new_group_is_told_so(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        settings = await settings_answer(client, consumer_settings(Language.PYTHON, "n > 5", FilterType.SQL))
        assert settings.subscription.fifo
        assert settings.backoff_policy.max_attempts == 17
        assert set(gateway.groups.queried) == {"billing"}

    gateway.of_type(TopicMessageType.FIFO)
    gateway.groups.configs.clear()
    gateway.run(scenario)


def test_a_producer_gets_the_limits_of_the_cluster(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        settings = wire.Settings(client_type=ClientType.PRODUCER, publishing=wire.Publishing(topics=[ORDERS]))
        answer = await settings_answer(client, wire.TelemetryCommand(settings=settings))
        assert (answer.publishing.max_body_size, answer.publishing.validate_message_type) == (5000, True)

    gateway.more = {"max_body_bytes": 5000}
    gateway.run(scenario)


def test_the_limit_of_a_body_is_the_stores_own(gateway: Gateway) -> None:
    limits: list[int | RaymqError] = [3000, RequestTimeoutError("a description", 1.0), 3]

    def limit() -> int:
        found = limits.pop(0)
        if isinstance(found, RaymqError):
            raise found
        return found

    clock = Clock()

    async def scenario(client: GatewayClient) -> None:
        settings = wire.Settings(client_type=ClientType.PRODUCER, publishing=wire.Publishing(topics=[ORDERS]))
        for passed_s, left, size in ((0, 2, 3000), (59, 2, 3000), (1, 1, 3000), (60, 0, 3)):
            clock.now_s += passed_s
            await client.service.tick()
            answer = await settings_answer(client, wire.TelemetryCommand(settings=settings))
            assert (len(limits), answer.publishing.max_body_size) == (left, size)
        answer = await client.call("SendMessage", sends(message(b"long")))
        assert answer.status.code == Code.MESSAGE_BODY_TOO_LARGE

    gateway.more = {"body_limit": limit, "clock": clock}
    gateway.run(scenario)


@pytest.mark.parametrize(
    "command",
    [
        wire.TelemetryCommand(settings=wire.Settings()),
        consumer_settings(Language.PYTHON, "n >", FilterType.SQL),
        wire.TelemetryCommand(settings=wire.Settings(publishing=wire.Publishing(topics=[wire.Resource(name="a b")]))),
        wire.TelemetryCommand(settings=wire.Settings(subscription=wire.Subscription())),
    ],
    ids=range(4),
)
def test_illegal_settings_end_the_stream(gateway: Gateway, command: wire.TelemetryCommand) -> None:
    async def scenario(client: GatewayClient) -> None:
        # a stream without a client id ends before a request, which the client could then not write
        for metadata, sent in ((METADATA, command), ((), None)):
            stream = client.method("Telemetry")(metadata=metadata, timeout=ANSWER_S)
            # a read that begins after the end of the stream gets no answer
            answer = asyncio.ensure_future(stream.read())
            if sent is not None:
                await stream.write(sent)
            # Node's client ends its start only at an answer
            status = (await answer).status
            assert Code(status.code) not in (Code.OK, Code.INTERNAL_SERVER_ERROR)
            assert status.message
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert len(client.service.clients) == 0

    gateway.run(scenario)


# Sends


def test_a_message_is_stored_as_it_was_sent(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        sent = message(
            gzip.compress(b"hello"),
            {"colour": "red"},
            tag="paid",
            keys=["k1", "k2"],
            message_group="customer-7",
            born_host="10.0.0.9",
            born_timestamp=timestamp(1_795_400_000_123),
            trace_context="00-trace",
            body_encoding=Encoding.GZIP,
        )
        answer = await client.call("SendMessage", sends(sent))
        assert answer.status.code == Code.OK
        [entry] = answer.entries
        assert (entry.status.code, entry.offset, entry.recall_handle) == (Code.OK, 0, "")
        [stored] = gateway.store.messages()
        assert stored.message_id == entry.message_id == sent.system_properties.message_id
        back = outgoing(stored, ORDERS)
        assert (back.body, dict(back.user_properties)) == (b"hello", {"colour": "red"})
        system = back.system_properties
        assert (system.tag, list(system.keys), system.message_group) == ("paid", ["k1", "k2"], "customer-7")
        assert (system.born_host, system.trace_context) == ("10.0.0.9", "00-trace")
        assert (millis(system.born_timestamp), system.message_type) == (1_795_400_000_123, MessageType.FIFO)

    gateway.run(scenario)


def test_messages_of_a_group_go_to_one_queue_and_a_request_of_many_too(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        for number in range(6):
            await client.call("SendMessage", sends(message(b"%d" % number, message_group="g")))
        answer = await client.call("SendMessage", sends(*(message(b"b%d" % number) for number in range(32))))
        assert [entry.status.code for entry in answer.entries] == [Code.OK] * 32
        assert len({entry.message_id for entry in answer.entries}) == 32
        [grouped] = [queue for number in (0, 1) if b"0" in (queue := bodies(number))]
        assert [body for body in grouped if not body.startswith(b"b")] == [b"%d" % number for number in range(6)]
        [batch] = [queue for number in (0, 1) if b"b0" in (queue := bodies(number))]
        assert [body for body in batch if body.startswith(b"b")] == [b"b%d" % number for number in range(32)]

    def bodies(queue_id: int) -> list[bytes]:
        return gateway.store.bodies(MessageQueue("orders", "a", queue_id))

    gateway.run(scenario)


def test_many_clients_send_at_the_same_time(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        calls = [client.call("SendMessage", sends(message(b"%d" % number))) for number in range(200)]
        answers = await asyncio.gather(*calls)
        assert {answer.status.code for answer in answers} == {Code.OK}
        assert sorted(map(int, gateway.store.everything())) == list(range(200))

    gateway.run(scenario)


def test_a_delayed_message_has_a_recall_handle(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        at_ms = time.time_ns() // 1_000_000 + 3_600_000
        answer = await client.call("SendMessage", sends(message(delivery_timestamp=timestamp(at_ms))))
        [entry] = answer.entries
        assert entry.recall_handle
        request = wire.RecallMessageRequest(topic=ORDERS, recall_handle=entry.recall_handle)
        recalled = await client.call("RecallMessage", request)
        assert (recalled.status.code, recalled.message_id) == (Code.OK, entry.message_id)
        for handle in ("", "rubbish"):
            request = wire.RecallMessageRequest(topic=ORDERS, recall_handle=handle)
            assert (await client.call("RecallMessage", request)).status.code == Code.BAD_REQUEST

    gateway.run(scenario)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (sends(), Code.MESSAGE_CORRUPTED),
        (sends(message(), wire.Message(topic=wire.Resource(name="other"), body=b"b")), Code.MESSAGE_CORRUPTED),
        (sends(message(), message(b"")), Code.MESSAGE_BODY_EMPTY),
        (sends(message(), message(tag="a|b")), Code.ILLEGAL_MESSAGE_TAG),
        (sends(message(message_group="g")), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (sends(message(message_type=MessageType.TRANSACTION)), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ],
    ids=range(6),
)
def test_a_request_with_an_illegal_message_stores_nothing(
    gateway: Gateway, request_: wire.SendMessageRequest, code: Code
) -> None:
    async def scenario(client: GatewayClient) -> None:
        answer = await client.call("SendMessage", request_)
        assert answer.status.code == code
        assert [entry.status.code for entry in answer.entries] == [code] * len(request_.messages)
        assert gateway.store.everything() == []

    gateway.of_type(TopicMessageType.NORMAL)
    gateway.run(scenario)


def test_a_topic_that_does_not_exist_is_not_found(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        one = message()
        one.topic.name = "missing"
        assert (await client.call("SendMessage", sends(one))).status.code == Code.TOPIC_NOT_FOUND

    gateway.run(scenario)


def test_the_namespace_of_the_resource_or_the_header_is_part_of_the_stored_name(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        one = message()
        one.topic.resource_namespace = "team-a"
        assert (await client.call("SendMessage", sends(one))).status.code == Code.OK
        header = (("x-mq-client-id", "client-1"), ("x-mq-namespace", "team-a"))
        assert (await client.call("SendMessage", sends(message()), header)).status.code == Code.OK
        assert {stored.topic for stored in gateway.store.messages()} == {"team-a%orders"}
        answer = await client.call("QueryRoute", wire.QueryRouteRequest(topic=one.topic))
        assert answer.message_queues[0].topic == one.topic

    gateway.route = replace(gateway.route, topic="team-a%orders")
    gateway.run(scenario)


def test_a_stored_message_that_is_less_durable_has_a_status_of_its_own(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        answer = await client.call("SendMessage", sends(message()))
        assert answer.status.code == answer.entries[0].status.code == Code.SLAVE_PERSISTENCE_TIMEOUT
        assert answer.entries[0].message_id

    gateway.store.status = SendStatus.FLUSH_SLAVE_TIMEOUT
    gateway.run(scenario)


def test_a_send_is_repeated_at_another_master(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert (await client.call("SendMessage", sends(message()))).status.code == Code.OK
        assert len(gateway.store.attempts) == 2

    gateway.store.script = [NotMasterError("a", 1)]
    gateway.run(scenario)


def test_a_repeated_send_is_stored_once_and_gets_the_same_answer(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        one, gate = sends(message(b"once")), Gate()
        gateway.store.script = [gate]
        first = asyncio.create_task(client.call("SendMessage", one))
        assert await asyncio.to_thread(gate.entered.wait, ANSWER_S)
        # the client's deadline passes while the store has no answer
        try:
            late = (await client.call("SendMessage", one, timeout_s=0.3)).status.code
        except grpc.aio.AioRpcError as error:
            late = error.code()
        assert late in (Code.PROXY_TIMEOUT, grpc.StatusCode.DEADLINE_EXCEEDED)
        first.cancel()
        second = asyncio.create_task(client.call("SendMessage", one))
        gate.opened.set()
        answer = await second
        again = await client.call("SendMessage", one)
        assert answer.status.code == Code.OK
        assert again == answer
        other = (("x-mq-client-id", "client-2"),)
        assert (await client.call("SendMessage", one, other)).entries[0].offset != answer.entries[0].offset
        assert gateway.store.everything() == [b"once", b"once"]

    gateway.route = topic_route(a=1)
    gateway.run(scenario)


def test_a_message_with_the_id_of_another_message_is_stored(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        changes: list[dict[str, Any]] = [{}, {"tag": "t"}, {"keys": ["k"]}, {"message_group": "g"}]
        for fields in changes:
            await client.call("SendMessage", sends(message(message_id="same", **fields)))
        await client.call("SendMessage", sends(message(b"other", message_id="same")))
        await client.call("SendMessage", sends(message(user={"a": "b"}, message_id="same")))
        await client.call("SendMessage", sends(*(message(message_id="same") for _ in range(2))))
        assert len(gateway.store.everything()) == 8

    gateway.run(scenario)


def test_a_send_that_stored_nothing_is_sent_again_when_it_is_repeated(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        one = sends(message())
        assert (await client.call("SendMessage", one)).status.code == Code.FORBIDDEN
        assert (await client.call("SendMessage", one)).status.code == Code.OK

    gateway.store.script = [NoPermissionError("not now")]
    gateway.run(scenario)


@pytest.mark.parametrize("message_id", ["", " ", "a b", "x" * 65, "ü", "a\x01b"])
def test_an_id_that_cannot_be_stored_is_refused(gateway: Gateway, message_id: str) -> None:
    async def scenario(client: GatewayClient) -> None:
        answer = await client.call("SendMessage", sends(message(message_id=message_id)))
        assert answer.status.code == Code.ILLEGAL_MESSAGE_ID

    gateway.run(scenario)


def test_a_send_of_unknown_outcome_is_a_timeout_which_clients_repeat() -> None:
    clock = Clock()

    async def scenario(client: GatewayClient) -> None:
        answer = await client.call("SendMessage", sends(message()))
        assert answer.status.code == answer.entries[0].status.code == Code.PROXY_TIMEOUT

    with producers_of_fakes(clock) as make:
        gateway = Gateway(make)
        gateway.store.script = [clock.passes(RequestTimeoutError("an append", 1.0))]
        gateway.run(scenario)
