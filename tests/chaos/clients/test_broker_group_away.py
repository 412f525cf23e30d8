"""Tests of a gateway while one of two broker groups is away: the group's broker and store are killed, and do not start
again until the test starts them.

Clients of RocketMQ 5's protocol go on with the other group. A call that needs the group which is away gets a status
that clients repeat. After the group's return, no acknowledged message is lost, and messages whose acknowledgement
failed are delivered again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import ray

import raymq
from raymq.common.message import MessageQueue
from raymq.common.names import NAMESPACE
from raymq.common.protocol.group import GroupConfig
from raymq.gateway.convert.times import duration
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, MessageType, Permission, TransactionResolution
from tests.support.clusters.cluster import Sandbox
from tests.support.clusters.faults import broker_group_away
from tests.support.gateway.gateway_client import METADATA, GatewayClient
from tests.support.gateway.gateways import RunningGateway
from tests.support.gateway.official_client import OfficialClient
from tests.support.gateway.official_place import LANGUAGES, Place, check_load

pytestmark = pytest.mark.timeout(900)  # The first run installs the clients.

HERE, AWAY = "broker-a", "broker-b"
REPEATED = {Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT}
"""The statuses of a call that needs the broker group which is away. Clients repeat such a call."""
CALL_S = 3.0
"""Timeout of a call in s, as in the official clients."""
POLL_MS = 2_000
PATIENCE_S = 120.0
LONG_LEASE_MS, SHORT_LEASE_MS = 600_000, 2_000
KEYS, LEASED = 8, 4
SENDS = 10
ATTEMPTS = 3
"""Number of times that a client sends a message with the same id."""
MORE = 20


@dataclass
class Calls:
    """The calls of one client about a topic and a group. `acknowledged`: the number of attempts of each message that
    was acknowledged, by body."""

    client: GatewayClient
    topic: wire.Resource
    group: wire.Resource
    acknowledged: dict[bytes, int] = field(default_factory=dict)

    async def call(self, name: str, request: Any) -> Any:
        return await self.client.call(name, request, timeout_s=CALL_S)

    async def route(self) -> dict[str, set[int]]:
        """Return the permissions of the topic's queues in each broker group."""
        answer = await self.call("QueryRoute", wire.QueryRouteRequest(topic=self.topic))
        assert answer.status.code == Code.OK, answer.status
        found: dict[str, set[int]] = {}
        for queue in answer.message_queues:
            found.setdefault(queue.broker.name, set()).add(queue.permission)
        return found

    async def assigned(self, group: wire.Resource) -> set[str]:
        """Return the broker groups from which a push consumer of a group receives."""
        answer = await self.call("QueryAssignment", wire.QueryAssignmentRequest(topic=self.topic, group=group))
        assert answer.status.code == Code.OK, answer.status
        return {one.message_queue.broker.name for one in answer.assignments}

    async def send(self, body: bytes, attempts: int = 1, **fields: Any) -> wire.SendResultEntry:
        """Send a message up to `attempts` times with the same id, until it is acknowledged. Returns the last answer."""
        system = wire.SystemProperties(**{"message_id": secrets.token_hex(17).upper(), **fields})
        request = wire.SendMessageRequest(
            messages=[wire.Message(topic=self.topic, body=body, system_properties=system)]
        )
        for attempt in range(1, attempts + 1):
            answer = await self.call("SendMessage", request)
            [entry] = answer.entries
            if answer.status.code == Code.OK:
                self.acknowledged[body] = attempt
                break
            assert answer.status.code in REPEATED, answer.status
        return entry

    async def receive(self, broker: str, invisible_ms: int = LONG_LEASE_MS) -> tuple[int, list[wire.Message]]:
        """Receive messages in one call, as a simple consumer that names a broker group."""
        queue = wire.MessageQueue(topic=self.topic, broker=wire.Broker(name=broker))
        fields = {"invisible_duration": duration(invisible_ms), "long_polling_timeout": duration(POLL_MS)}
        request = wire.ReceiveMessageRequest(group=self.group, message_queue=queue, batch_size=32, **fields)
        timeout_s = CALL_S + POLL_MS / 1000
        stream = self.client.method("ReceiveMessage")(request, metadata=METADATA, timeout=timeout_s)
        status, *answers, _ = [answer async for answer in stream]
        return status.status.code, [answer.message for answer in answers]

    async def received(self, broker: str, count: int, invisible_ms: int = LONG_LEASE_MS) -> list[wire.Message]:
        """Receive exactly `count` messages, in as many calls as needed."""
        found: list[wire.Message] = []
        until_s = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < until_s, [one.body for one in found]
            code, messages = await self.receive(broker, invisible_ms)
            assert code in REPEATED | {Code.OK, Code.MESSAGE_NOT_FOUND}
            found += messages
        assert len(found) == count, [one.body for one in found]
        return found

    async def ack(self, *messages: wire.Message) -> tuple[int, list[int]]:
        """Acknowledge messages in one call. Returns the status, and the status of each message."""
        entries = [wire.AckMessageEntry(receipt_handle=handle_of(one)) for one in messages]
        answer = await self.call(
            "AckMessage", wire.AckMessageRequest(group=self.group, topic=self.topic, entries=entries)
        )
        return answer.status.code, [entry.status.code for entry in answer.entries]

    async def settle(self, name: str, message: wire.Message) -> Any:
        """Call ChangeInvisibleDuration or ForwardMessageToDeadLetterQueue for a message."""
        fields: dict[str, Any] = {"group": self.group, "topic": self.topic, "receipt_handle": handle_of(message)}
        if name == "ChangeInvisibleDuration":
            return await self.call(
                name, wire.ChangeInvisibleDurationRequest(**fields, invisible_duration=duration(1_000))
            )
        return await self.call(name, wire.ForwardMessageToDeadLetterQueueRequest(**fields, delivery_attempt=1))

    async def commit(self, transaction_id: str) -> int:
        request = wire.EndTransactionRequest(
            topic=self.topic, transaction_id=transaction_id, resolution=TransactionResolution.COMMIT, source=1
        )
        code: int = (await self.call("EndTransaction", request)).status.code
        return code


def again(key: str) -> bytes:
    return f"again {key}".encode()


def handle_of(message: wire.Message) -> str:
    return message.system_properties.receipt_handle


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until `condition` is true."""
    until_s = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < until_s, what
        await asyncio.sleep(0.05)


def stored(mq: raymq.Client, topic: str) -> dict[MessageQueue, list[bytes]]:
    """Return the bodies of all messages of a topic, by queue."""
    found: dict[MessageQueue, list[bytes]] = {}
    for entry in mq.admin.describe_topic(topic):
        bodies = found.setdefault(entry.queue, [])
        while len(bodies) < entry.max_offset:
            bodies += [one.body for one in mq.admin.pull(entry.queue, len(bodies), max_messages=1000).messages]
    return found


class Scenario:
    """What a client does before, while and after the broker group AWAY is away."""

    def __init__(self, mq: raymq.Client, endpoints: str) -> None:
        self._mq, self._endpoints = mq, endpoints
        self.topic, self.group = "group-away", "group-away-g"
        self.acknowledged: dict[bytes, int] = {}
        self.keys: dict[str, list[str]] = {HERE: [], AWAY: []}
        """The message groups whose queue is in each broker group."""
        self.leased: dict[str, list[wire.Message]] = {}
        """The messages of each broker group that the client has received and not settled."""
        self.transaction_id = ""
        """A transaction of the group AWAY without an outcome."""

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[Calls]:
        async with grpc.aio.insecure_channel(self._endpoints) as channel:
            client = GatewayClient(channel, 0, None)  # type: ignore[arg-type]
            topic, group = wire.Resource(name=self.topic), wire.Resource(name=self.group)
            yield Calls(client, topic, group, self.acknowledged)

    async def before(self) -> None:
        self._mq.admin.create_topic(self.topic, queues=4, message_type="MIXED")
        self._mq.admin.create_group(GroupConfig(self.group, retry_max_times=100))
        async with self.calls() as calls:
            for number in range(KEYS):
                await calls.send(b"key %d" % number, 3 * ATTEMPTS, message_group=f"customer-{number}")
            for queue, bodies in stored(self._mq, self.topic).items():
                self.keys[queue.broker_name] += [f"customer-{body.decode().split()[1]}" for body in bodies]
            assert all(self.keys.values()), self.keys
            assert (await calls.ack(*await calls.received(HERE, KEYS)))[0] == Code.OK
            with self._mq.producer() as producer:
                for broker in (HERE, AWAY):
                    for number in range(LEASED):
                        body = f"leased {number} of {broker}".encode()
                        producer.send(
                            raymq.Message(self.topic, body), queue=MessageQueue(self.topic, broker, number % 2)
                        )
                        self.acknowledged[body] = 1
                    lease_ms = LONG_LEASE_MS if broker == HERE else SHORT_LEASE_MS
                    self.leased[broker] = await calls.received(broker, LEASED, lease_ms)
            while not self.transaction_id.startswith(AWAY):
                entry = await calls.send(
                    b"paid",
                    3 * ATTEMPTS,
                    message_type=MessageType.TRANSACTION,
                    orphaned_transaction_recovery_duration=duration(3_600_000),
                )
                self.transaction_id = entry.transaction_id
            del self.acknowledged[b"paid"]

    async def during(self) -> None:
        async with self.calls() as calls:
            await self._others_go_on(calls)
            await self._calls_of_the_group_are_repeated(calls)
            # The NameServer forgets a broker that sends no heartbeat. The test does not wait for this time.
            nameserver = ray.get_actor("nameserver-0", namespace=NAMESPACE)
            await asyncio.to_thread(ray.get, nameserver.unregister_broker.remote(AWAY))
            await self._keys_of_the_group_wait(calls)

            async def is_forgotten() -> bool:
                return await calls.route() == {HERE: {Permission.READ_WRITE}}

            await until(is_forgotten, f"a route without {AWAY}")
            assert await calls.assigned(calls.group) == {HERE}
            await self._calls_of_the_group_are_repeated(calls)
            assert (await calls.send(b"forgotten")).status.code == Code.OK
            [message] = await calls.received(HERE, 1)
            assert (await calls.ack(message))[0] == Code.OK
            assert (await calls.receive(HERE))[1] == []

    async def _others_go_on(self, calls: Calls) -> None:
        """Sends, receives and new consumers go on with the group HERE."""
        assert (await calls.route())[HERE] == {Permission.READ_WRITE}
        assert HERE in await calls.assigned(wire.Resource(name=f"{self.group}-new"))
        known = set(self.acknowledged)
        answers = Counter[int]()
        while len(self.acknowledged) < len(known) + SENDS:
            entry = await calls.send(b"other %d" % answers.total(), ATTEMPTS)
            answers[entry.status.code] += 1
            assert answers.total() < 2 * SENDS, answers
        got = await calls.received(AWAY, SENDS)
        assert {one.body for one in got} == self.acknowledged.keys() - known
        assert {one.system_properties.delivery_attempt for one in got} == {1}
        assert (await calls.ack(*got))[0] == Code.OK
        code, messages = await calls.receive(AWAY)
        assert (code in REPEATED, messages) == (True, [])

    async def _calls_of_the_group_are_repeated(self, calls: Calls) -> None:
        """Calls about messages and transactions of the group AWAY get a status that clients repeat. The message of the
        group HERE in the same acknowledgement is acknowledged.

        The gateway may acknowledge or forward the messages of the group AWAY later, if the group returns soon."""
        (code, (here, away)), committed, changed, forwarded = await asyncio.gather(
            calls.ack(self.leased[HERE][0], self.leased[AWAY][0]),
            calls.commit(self.transaction_id),
            calls.settle("ChangeInvisibleDuration", self.leased[AWAY][1]),
            calls.settle("ForwardMessageToDeadLetterQueue", self.leased[AWAY][2]),
        )
        assert (code, here) == (Code.MULTIPLE_RESULTS, Code.OK)
        assert {away, committed, changed.status.code, forwarded.status.code} <= REPEATED
        assert changed.receipt_handle == handle_of(self.leased[AWAY][1])

    async def _keys_of_the_group_wait(self, calls: Calls) -> None:
        """A message group keeps its queue: a send is refused while the queue's broker group is away."""
        keys = [*self.keys[HERE], *self.keys[AWAY]]
        entries = await asyncio.gather(*(self._send_again(calls, key) for key in keys))
        codes = {key: entry.status.code for key, entry in zip(keys, entries, strict=True)}
        assert {codes[key] for key in self.keys[HERE]} == {Code.OK}
        assert {codes[key] for key in self.keys[AWAY]} <= REPEATED
        got = await calls.received(HERE, len(self.keys[HERE]))
        assert (await calls.ack(*got))[0] == Code.OK

    async def _send_again(self, calls: Calls, key: str) -> wire.SendResultEntry:
        """Send the second message of a message group. Each call repeats the same send."""
        return await calls.send(again(key), message_id=f"again-{key}", message_group=key)

    async def after(self) -> None:
        async with self.calls() as calls:

            async def is_committed() -> bool:
                code = await calls.commit(self.transaction_id)
                assert code in REPEATED | {Code.OK}
                return code == Code.OK

            await until(is_committed, "the commit")
            self.acknowledged[b"paid"] = 1
            for key in self.keys[AWAY]:

                async def is_sent(key: str = key) -> bool:
                    return (await self._send_again(calls, key)).status.code == Code.OK

                await until(is_sent, f"the repeated send of {key}")
            assert (await calls.ack(*self.leased[HERE]))[0] == Code.OK
            wanted = {again(key) for key in self.keys[AWAY]} | {b"paid"}
            delivered_again = {self.leased[AWAY][1].body, self.leased[AWAY][3].body}
            wanted |= delivered_again
            seen: dict[bytes, int] = {}

            async def has_all() -> bool:
                _, messages = await calls.receive(HERE)
                seen.update((one.body, one.system_properties.delivery_attempt) for one in messages)
                if messages:
                    assert (await calls.ack(*messages))[0] == Code.OK
                return wanted <= seen.keys()

            await until(has_all, f"{wanted}")
            assert {seen[body] for body in delivered_again} == {2}

            async def has_returned() -> bool:
                return await calls.route() == {broker: {Permission.READ_WRITE} for broker in (HERE, AWAY)}

            await until(has_returned, f"a route with {AWAY}")

            async def is_settled() -> bool:
                _, messages = await calls.receive(AWAY)
                if messages:
                    await calls.ack(*messages)
                summary = await asyncio.to_thread(self._mq.admin.group_summary, self.group)
                return summary.lag == 0

            await until(is_settled, "the end of all messages")

    def check_stores(self) -> None:
        """Check that each acknowledged message is stored, and that the messages of message groups are stored once, as
        are all that were acknowledged at their first attempt. The repeated send of another message may be stored at
        both broker groups."""
        counts = Counter(body for bodies in stored(self._mq, self.topic).values() for body in bodies)
        assert {body for body in self.acknowledged if not counts[body]} == set()
        assert {body for body, attempts in self.acknowledged.items() if attempts == 1 and counts[body] > 1} == set()
        unknown = counts.keys() - self.acknowledged.keys()
        print(f"{len(self.acknowledged)} acknowledged, {len(unknown)} others stored, {counts.total()} in all")


def test_clients_of_a_gateway_go_on_while_a_broker_group_is_away(
    mq: raymq.Client, box: Sandbox, gateway: RunningGateway
) -> None:
    scenario = Scenario(mq, gateway.endpoints)
    asyncio.run(scenario.before())
    with broker_group_away(box, AWAY):
        asyncio.run(scenario.during())
    asyncio.run(scenario.after())
    scenario.check_stores()


def test_official_clients_start_send_and_receive_while_a_broker_group_is_away(
    mq: raymq.Client, box: Sandbox, gateway: RunningGateway, clients: Callable[[str], OfficialClient]
) -> None:
    """No message that a client's send acknowledged is lost. A message may arrive twice if it was sent or consumed while
    the group was away."""
    places = [Place(mq, clients(language), gateway.endpoints, "group-away") for language in LANGUAGES]
    late = [Place(mq, clients(language), gateway.endpoints, "group-away-late") for language in LANGUAGES]
    for place in places:
        place.start_load()
        place.more_consumed(MORE)
    for place in late:
        place.create()
    away_ms = time.time_ns() // 1_000_000
    with broker_group_away(box, AWAY):
        for place in late:
            producer, _ = place.open("producer"), place.open("push")
            place.client.call("start_load", name=producer, topic=place.topic, prefix="n", pause_s=0.02)
        for place in [*places, *late]:
            place.more_consumed(MORE)
    back_ms = time.time_ns() // 1_000_000
    for place in [*places, *late]:
        place.more_consumed(MORE)
        print(check_load(place, [(away_ms, back_ms)]))
