"""Tests of a gateway with the requests of the clients for Java, Go and C#, which these tests do not install.

The bytes of the requests are made by hand, as the source of each client makes them: with the fields that the client
sets, and without the fields that it leaves out. They are made without the gateway's own messages, so the gateway's
table of fields is not compared with itself.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from typing import Any, Final

import grpc
import pytest

from raymq.gateway.convert.outgoing import outgoing
from raymq.gateway.convert.times import millis
from raymq.gateway.wire.enums import ClientType, Code, Language, TransactionResolution
from raymq.gateway.wire.messages import Resource, Settings
from tests.component.gateway.test_gateway_calls import Gateway
from tests.support.clients.fakes import topic_route
from tests.support.clients.producers import producers_of_fakes
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import ANSWER_S, FakeTransactions, GatewayClient

Value = int | str | bytes
"""A number, a text, or bytes: a body, or the fields of a message inside a message."""


def fields(*pairs: tuple[int, Value]) -> bytes:
    """Return the bytes of a message of protobuf with these fields, each a number and a value, in this order."""
    return b"".join(_field(number, value) for number, value in pairs)


def _field(number: int, value: Value) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Return a number in groups of 7 bits, the lowest group first. Each byte but the last has its highest bit set."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


JAVA: Final = (("x-mq-client-id", "host@1@0@java"), ("x-mq-language", "JAVA"), ("x-mq-client-version", "5.0.7"))
GO: Final = (("x-mq-client-id", "host@2@0@go"), ("x-mq-language", "GOLANG"), ("x-mq-client-version", "5.1.3"))
CSHARP: Final = (("x-mq-client-id", "host@3@0@net"), ("x-mq-language", "DOTNET"), ("x-mq-client-version", "5.1.0"))
ORDERS: Final = fields((2, "orders"))
BILLING: Final = fields((2, "billing"))
ENDPOINTS: Final = fields((1, 3), (2, fields((1, "gateway.example"), (2, 8081))))
BROKER: Final = fields((1, "a"), (3, ENDPOINTS))
QUEUE: Final = fields((1, ORDERS), (3, 3), (4, BROKER), (5, bytes([1, 2, 3, 4])))
"""Queue 0 of broker group a, as a route has it: numbers that are 0 are absent, and the types are in one field."""
THREE_SECONDS: Final = fields((1, 3))
NEWER_FIELD: Final = fields((99, "a newer client"))


def agent(language: int, version: str) -> bytes:
    return fields((1, language), (2, version), (3, "Linux"), (4, "host"))


def push_settings(language: int, version: str, *properties: tuple[str, str]) -> bytes:
    """Return the settings that a push consumer writes to its stream. `properties`: the client's own ones."""
    subscription = fields((1, BILLING), (2, fields((1, ORDERS), (2, fields((1, 1), (2, "*"))))))
    own = [(9, fields((1, name), (2, value))) for name, value in properties]
    settings = fields(
        *((1, int(ClientType.PUSH_CONSUMER)), (2, ENDPOINTS), (4, THREE_SECONDS), (6, subscription)),
        *((7, agent(language, version)), *own),
    )
    return fields((2, settings + NEWER_FIELD))


def producer_settings(language: int, version: str) -> bytes:
    """Return the settings of a producer. Its policy for retries has times of 0, which are empty durations."""
    policy = fields((1, 3), (2, fields((1, b""), (2, b""))))
    settings = fields(
        *((1, int(ClientType.PRODUCER)), (2, ENDPOINTS), (3, policy), (4, THREE_SECONDS)),
        *((5, fields((1, ORDERS), (3, 1))), (7, agent(language, version))),
    )
    return fields((2, settings))


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with producers_of_fakes() as make:
        gateway = Gateway(make)
        gateway.route = topic_route(a=2)
        gateway.calls["billing"] = FakeGroupCalls("billing")
        gateway.more = {"transactions": FakeTransactions(a=[])}
        yield gateway


async def begun(client: GatewayClient, headers: Any, command: bytes) -> tuple[Any, Settings]:
    """Open a client's stream with its settings. Returns the stream, and the settings in the answer."""
    stream = client.method("Telemetry", raw=True)(metadata=headers, timeout=ANSWER_S)
    await stream.write(command)
    answer = await stream.read()
    assert answer.status.code == Code.OK, answer.status.message
    return stream, answer.settings


def test_a_java_push_consumer_starts_receives_and_settles(gateway: Gateway) -> None:
    """It names no invisible time and no time to wait, and its heartbeats do not say which kind of client it is."""
    calls = gateway.calls["billing"]
    calls.put("a", b"0")

    async def scenario(client: GatewayClient) -> None:
        command = push_settings(Language.JAVA, "5.0.7", ("zone", "eu-1"), ("app.name", ""))
        _, settings = await begun(client, JAVA, command)
        # the client does not start without a policy, and fails at an empty list of times
        assert settings.backoff_policy.WhichOneof("strategy") == "customized_backoff"
        assert len(settings.backoff_policy.customized_backoff.next) >= 1
        assert settings.subscription.receive_batch_size == 32
        assert (settings.subscription.fifo, millis(settings.subscription.long_polling_timeout)) == (False, 20_000)
        assert dict(settings.client_properties) == {"zone": "eu-1", "app.name": ""}
        assert NEWER_FIELD in settings.SerializeToString()
        beat = fields((1, BILLING))
        assert (await client.bytes_of("Heartbeat", beat, JAVA)).status.code == Code.OK
        known = client.service.clients.get("host@1@0@java")
        assert known is not None
        assert (known.group, known.language) == ("billing", Language.JAVA)
        assignment = fields((1, ORDERS), (2, BILLING), (3, ENDPOINTS))
        [assigned] = (await client.bytes_of("QueryAssignment", assignment, JAVA)).assignments
        assert assigned.message_queue.broker.endpoints.SerializeToString() == ENDPOINTS
        request = fields((1, BILLING), (2, QUEUE), (3, fields((1, 1), (2, "*"))), (4, 32), (6, 1))
        stream = client.method("ReceiveMessage", raw=True)(request, metadata=JAVA, timeout=ANSWER_S)
        status, received, last = [answer async for answer in stream]
        assert (status.status.code, last.WhichOneof("content")) == (Code.OK, "delivery_timestamp")
        system = received.message.system_properties
        assert (received.message.body, millis(system.invisible_duration)) == (b"0", 60_000)
        entry = fields((1, system.message_id), (2, system.receipt_handle))
        answer = await client.bytes_of("AckMessage", fields((1, BILLING), (2, ORDERS), (3, entry)), JAVA)
        assert answer.status.code == Code.OK
        end = await client.bytes_of("NotifyClientTermination", fields((1, BILLING)), JAVA)
        assert end.status.code == Code.OK
        assert calls.returned == []

    gateway.run(scenario)


@pytest.mark.parametrize(("name", "value"), [("1st", "x"), ("zone", "x" * 257), ("", "x")])
def test_illegal_properties_of_a_java_client_end_its_stream(gateway: Gateway, name: str, value: str) -> None:
    async def scenario(client: GatewayClient) -> None:
        stream = client.method("Telemetry", raw=True)(metadata=JAVA, timeout=ANSWER_S)
        answer = asyncio.ensure_future(stream.read())
        await stream.write(push_settings(Language.JAVA, "5.0.7", (name, value)))
        assert (await answer).status.code == Code.INVALID_CLIENT_PROPERTIES
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    gateway.run(scenario)


def test_a_java_producer_names_a_queue_and_the_gateway_chooses_one(gateway: Gateway) -> None:
    """The number of the queue is the client's wish. Even a number that the topic does not have is no error."""

    async def scenario(client: GatewayClient) -> None:
        born = fields((1, 1_795_400_000), (2, 123_000_000))
        for number in range(3):
            system = fields(
                *((2, "key"), (3, f"01AB{number}"), (5, 1), (6, 1)),
                *((7, born), (8, "10.0.0.9"), (13, 7 * number)),
            )
            message = fields((1, ORDERS), (2, fields((1, "price"), (2, "7"))), (3, system), (4, b"%d" % number))
            answer = await client.bytes_of("SendMessage", fields((1, message)), JAVA)
            assert (answer.status.code, answer.entries[0].message_id) == (Code.OK, f"01AB{number}")
        stored = gateway.store.messages()
        assert sorted(one.body for one in stored) == [b"0", b"1", b"2"]
        assert {one.properties["price"] for one in stored} == {"7"}
        systems = [outgoing(one, Resource(name="orders")).system_properties for one in stored]
        assert {(one.born_host, millis(one.born_timestamp)) for one in systems} == {("10.0.0.9", 1_795_400_000_123)}

    gateway.run(scenario)


def test_the_heartbeats_of_go_clients_register_them(gateway: Gateway) -> None:
    """A producer's heartbeat has two bytes. For minutes, a restarted gateway gets no settings from some clients."""

    async def scenario(client: GatewayClient) -> None:
        for beat, kind, group in (
            (b"\x10\x01", ClientType.PRODUCER, ""),
            (b"\x0a\x09\x12\x07billing\x10\x02", ClientType.PUSH_CONSUMER, "billing"),
            (b"\x0a\x09\x12\x07billing\x10\x03", ClientType.SIMPLE_CONSUMER, "billing"),
        ):
            headers = (("x-mq-client-id", f"go-{kind}"), *GO[1:])
            assert (await client.bytes_of("Heartbeat", beat, headers)).status.code == Code.OK
            known = client.service.clients.get(f"go-{kind}")
            assert known is not None
            assert (known.client_type, known.group) == (kind, group)

    gateway.run(scenario)


def test_a_go_producer_ends_a_transaction_without_a_source(gateway: Gateway) -> None:
    """It does not say whether it answers a check."""
    transactions = gateway.more["transactions"]

    async def scenario(client: GatewayClient) -> None:
        _, settings = await begun(client, GO, producer_settings(Language.GOLANG, "5.1.3"))
        assert settings.backoff_policy.exponential_backoff.multiplier == 2.0
        system = fields((3, "01CD"), (5, 1), (6, 4))
        message = fields((1, ORDERS), (3, system), (4, b"paid"))
        [entry] = (await client.bytes_of("SendMessage", fields((1, message)), GO)).entries
        assert entry.transaction_id
        end = fields((1, ORDERS), (2, "01CD"), (3, entry.transaction_id), (4, int(TransactionResolution.COMMIT)))
        assert (await client.bytes_of("EndTransaction", end, GO)).status.code == Code.OK
        [(broker, topic, order)] = transactions.ends
        assert (broker, topic, order.transaction_id) == ("a", "orders", "01CD")
        assert not order.from_transaction_check

    gateway.run(scenario)


def test_a_csharp_producer_has_a_digest_without_leading_zeros(gateway: Gateway) -> None:
    body = next(b"%d" % number for number in range(1000) if zlib.crc32(b"%d" % number) < 1 << 24)
    checksum = f"{zlib.crc32(body):X}"
    assert len(checksum) < 8

    async def scenario(client: GatewayClient) -> None:
        _, settings = await begun(client, CSHARP, producer_settings(Language.DOT_NET, "5.1.0"))
        assert settings.publishing.validate_message_type
        for digest, code in ((checksum, Code.OK), (f"{zlib.crc32(body) ^ 1:X}", Code.MESSAGE_CORRUPTED)):
            system = fields((3, f"01EF{code}"), (4, fields((1, 1), (2, digest))), (5, 1), (6, 1))
            message = fields((1, ORDERS), (3, system), (4, body))
            answer = await client.bytes_of("SendMessage", fields((1, message)), CSHARP)
            assert answer.status.code == code
        assert gateway.store.everything() == [body]

    gateway.run(scenario)
