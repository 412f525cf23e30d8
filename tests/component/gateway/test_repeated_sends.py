"""Tests of sends that a client repeats at another gateway process: a stored message is not stored again."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.consumer.queue_calls import QueueCalls
from raymq.common.delay import TIMER_TOPIC
from raymq.common.errors import InvalidArgumentError, NoPermissionError, ServiceNotAvailableError
from raymq.common.message import MessageExt, SendStatus
from raymq.common.protocol.recall import RecallHandle
from raymq.gateway.clients.send_window import SEND_WINDOW_S
from raymq.gateway.convert import incoming
from raymq.gateway.convert.times import timestamp
from raymq.gateway.service.stored_sends import IDS_MAX, SILENT_S
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code
from raymq.records.format.encode import WaitingBatch, encode_batch
from tests.support.clients.fakes import FakeRoutes, FakeStore, topic_route
from tests.support.clients.producers import Gate, MakeProducer, producers_of_fakes
from tests.support.console.fake_cluster import fake_message
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import FakeGroups, FakeQueues, GatewayClient, gateway_of
from tests.support.stores.stores import open_store

NUMBERS = itertools.count()
DAY_MS = 86_400_000
ORDERS = wire.Resource(name="orders")


class Gateway:
    """A gateway on one fake store, whose clock stands still. `queues`: the messages that are stored already."""

    def __init__(self, make: MakeProducer) -> None:
        self._make = make
        self.store, self.queues, self.now_s = FakeStore(), FakeQueues(), 0.0
        self.route = topic_route(a=2)

    def run(self, scenario: Callable[[GatewayClient], Awaitable[None]]) -> None:
        async def main() -> None:
            producer = self._make(self.store, FakeStore("storage-b-0"), route=self.route, send_timeout_s=30.0)
            places = producer, FakeGroups(), lambda group, namespace: FakeGroupCalls(group)
            async with gateway_of(*places, clock=lambda: self.now_s, queues=self.queues) as client:
                await scenario(client)

        asyncio.run(main())


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with producers_of_fakes() as make:
        yield Gateway(make)


def message(body: bytes, message_id: str = "", **fields: Any) -> wire.Message:
    system = wire.SystemProperties(message_id=message_id or f"01{next(NUMBERS):032X}", **fields)
    return wire.Message(topic=ORDERS, user_properties={"user": "7"}, system_properties=system, body=body)


def stored(body: bytes, message_id: str, **fields: Any) -> MessageExt:
    plain: dict[str, Any] = {"tags": None, "keys": (), "properties": {"user": "7"}}
    return fake_message("orders", body, message_id=message_id, broker_name="a", **plain | fields)


async def send(client: GatewayClient, *messages: wire.Message) -> wire.SendMessageResponse:
    answer: wire.SendMessageResponse = await client.call("SendMessage", wire.SendMessageRequest(messages=messages))
    return answer


def test_a_message_that_another_process_stored_is_not_stored_again(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        answer = await send(client, message(b"first", "ID1"))
        assert (answer.status.code, answer.entries[0].message_id, answer.entries[0].offset) == (Code.OK, "ID1", 41)
        assert gateway.store.everything() == []
        # other messages with the same id
        assert (await send(client, message(b"other", "ID1"))).status.code == Code.OK
        assert (await send(client, message(b"first", "ID1", tag="t"))).status.code == Code.OK
        assert (await send(client, message(b"first", "ID1", keys=["k"]))).status.code == Code.OK
        assert (await send(client, message(b"first", "ID1", message_group="g"))).status.code == Code.OK
        assert gateway.store.everything() == [b"other", b"first", b"first", b"first"]

    gateway.queues.by_id["a"] = [stored(b"first", "ID1", queue_offset=41)]
    gateway.run(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"message_group": "g"},
        {"tag": "t", "keys": ["a", "b"]},
        {"trace_context": "c", "born_host": "host"},
        {"delivery_timestamp": timestamp(time.time_ns() // 1_000_000 + DAY_MS)},
    ],
)
def test_a_message_is_recognised_in_the_form_in_which_a_store_has_it(
    gateway: Gateway, tmp_path: Path, fields: dict[str, Any]
) -> None:
    delayed = "delivery_timestamp" in fields

    async def scenario(client: GatewayClient) -> None:
        sent = message(b"first", "ID1", **fields)
        one = incoming.incoming(sent, "orders", time.time_ns() // 1_000_000, 1000)
        batch = encode_batch(
            [one.message],
            0,
            born_host=("127.0.0.1", 1),
            born_timestamp_ms=1,
            message_ids=[one.message_id],
            waiting=WaitingBatch(TIMER_TOPIC, [0]) if delayed else None,
        )
        with closing(open_store(tmp_path / "store")) as store:
            store.append([batch])
            storage = SimpleNamespace(query_by_unique_ids=lambda *given: store.queries.by_unique_ids(*given[:3]))
            calls = QueueCalls(FakeRoutes(gateway.route), SimpleNamespace(get=lambda name: storage))  # type: ignore[arg-type]
            gateway.queues.by_id["a"] = calls.stored("orders", "a", ["ID1"], 10.0, delayed=delayed)
            assert (await send(client, sent)).status.code == Code.OK
        assert gateway.store.everything() == []

    gateway.run(scenario)


def test_only_the_messages_of_a_request_that_are_not_stored_are_sent(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        sent = [message(b"%d" % number, f"ID{number}", message_group="g") for number in range(3)]
        answer = await send(client, *sent)
        assert answer.status.code == Code.OK
        assert [entry.message_id for entry in answer.entries] == ["ID0", "ID1", "ID2"]
        assert answer.entries[1].offset == 41
        assert gateway.store.everything() == [b"0", b"2"]

    found = stored(b"1", "ID1", queue_offset=41)
    gateway.queues.by_id["a"] = [found._replaced(system_properties={"__SHARDINGKEY": "g"})]
    gateway.run(scenario)


def test_a_delayed_message_that_is_stored_has_its_recall_handle(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        answer = await send(client, message(b"later", "ID1", delivery_timestamp=timestamp(due_ms)))
        assert RecallHandle.parse(answer.entries[0].recall_handle) == ("orders", "a", due_ms, "ID1")
        assert gateway.store.everything() == []

    due_ms = time.time_ns() // 1_000_000 + DAY_MS
    gateway.queues.by_id["a"] = [stored(b"later", "ID1")]
    gateway.run(scenario)


def test_the_stores_are_not_asked_over_an_old_connection(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        await send(client, message(b"young", "ID1"))
        gateway.now_s = SEND_WINDOW_S
        await send(client, message(b"old", "ID2"))
        assert [ids for _, ids in gateway.queues.asked] == [("ID1",)]
        await client.call("SendMessage", wire.SendMessageRequest(messages=[message(b"other", "ID3")]),
                          metadata=(("x-mq-client-id", "client-2"),))  # fmt: skip
        assert gateway.queues.asked[-1] == ("a", ("ID3",))

    gateway.run(scenario)


def test_the_stores_are_asked_for_a_send_that_failed_before(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        await send(client, message(b"young", "ID1"))
        gateway.now_s = SEND_WINDOW_S
        one = message(b"first", "ID2")
        gateway.store.script = [NoPermissionError("not now")]
        assert (await send(client, one)).status.code == Code.FORBIDDEN
        gateway.queues.by_id["a"] = [stored(b"first", "ID2", queue_offset=41)]
        assert (await send(client, one)).entries[0].offset == 41
        assert [ids for _, ids in gateway.queues.asked] == [("ID1",), ("ID2",)]
        assert gateway.store.everything() == [b"young"]

    gateway.run(scenario)


def test_a_message_that_was_not_safe_is_asked_for_when_it_is_repeated(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        one = message(b"first", "ID1")
        assert (await send(client, one)).status.code == Code.SLAVE_PERSISTENCE_TIMEOUT
        gateway.now_s = SEND_WINDOW_S - 1
        gateway.queues.by_id["a"] = [stored(b"first", "ID1", queue_offset=41)]
        answer = await send(client, one)
        assert (answer.status.code, answer.entries[0].offset) == (Code.OK, 41)
        assert gateway.store.everything() == [b"first"]

    gateway.store.status = SendStatus.FLUSH_SLAVE_TIMEOUT
    gateway.run(scenario)


def test_a_send_fails_while_no_broker_group_can_tell_what_it_has_stored(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        one = message(b"first", "ID1")
        assert (await send(client, one)).status.code == Code.HA_NOT_AVAILABLE
        assert gateway.store.everything() == []
        gateway.queues.by_id["b"] = []
        assert (await send(client, one)).status.code == Code.OK

    gateway.route = topic_route(a=1, b=1)
    gateway.queues.by_id.update({name: ServiceNotAvailableError("it restarts") for name in "ab"})
    gateway.run(scenario)


def test_a_broker_group_that_does_not_answer_is_not_asked_for_a_while(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        for number, now_s in enumerate((0.0, SILENT_S - 1, SILENT_S)):
            gateway.now_s = now_s
            assert (await send(client, message(b"first", f"ID{number}"))).status.code == Code.OK
        asked = [(name, ids[0]) for name, ids in gateway.queues.asked]
        assert sorted(asked) == [("a", "ID0"), ("a", "ID1"), ("a", "ID2"), ("b", "ID0"), ("b", "ID2")]

    gateway.route = topic_route(a=1, b=1)
    gateway.queues.by_id["b"] = ServiceNotAvailableError("it restarts")
    gateway.run(scenario)


def test_a_store_without_an_index_does_not_stop_sends(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert (await send(client, message(b"first", "ID1"))).status.code == Code.OK
        assert gateway.store.everything() == [b"first"]

    gateway.queues.by_id["a"] = InvalidArgumentError("this store has no index")
    gateway.run(scenario)


def test_questions_of_many_clients_go_together(gateway: Gateway) -> None:
    count = 2 * IDS_MAX + 1

    async def scenario(client: GatewayClient) -> None:
        sent = [message(b"%d" % number, f"ID{number}") for number in range(count)]
        first = asyncio.create_task(send(client, sent[0]))
        assert await asyncio.to_thread(gate.entered.wait, 60)
        others = [asyncio.create_task(send(client, one)) for one in sent[1:]]
        waiting = client.service._sends._stored_sends._waiting["orders", False]
        while len(waiting) < count - 1:
            await asyncio.sleep(0.01)
        gate.opened.set()
        answers = await asyncio.gather(first, *others)
        assert {answer.status.code for answer in answers} == {Code.OK}
        assert [len(ids) for _, ids in gateway.queues.asked] == [1, IDS_MAX, IDS_MAX]
        assert len(gateway.store.everything()) == count - 1

    gate, ask = Gate(), gateway.queues.stored

    def held(*arguments: Any, **options: Any) -> list[MessageExt]:
        if not gateway.queues.asked:
            gate(())
        return ask(*arguments, **options)

    gateway.queues.stored = held  # type: ignore[method-assign]
    gateway.queues.by_id["a"] = [stored(b"7", "ID7")]
    gateway.run(scenario)
