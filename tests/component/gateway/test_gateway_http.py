"""Tests of a gateway's HTTP face, in one process: a real producer over fake stores, and an HTTP client that checks each
answer against the OpenAPI document."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest

from raymq.client.producer.async_producer import AsyncProducer
from raymq.common.config.webhook_hosts import WebhookHosts
from raymq.common.errors import NotMasterError, ServiceNotAvailableError
from raymq.common.message import Message, MessageExt, SendStatus
from raymq.common.namespaces import Namespace
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.common.protocol.group import GroupConfig
from raymq.gateway.clients.access import GatewayAccess
from raymq.gateway.convert.outgoing import outgoing
from raymq.gateway.front.certificates import CertificateFiles
from raymq.gateway.http import bodies, calls
from raymq.gateway.http.answers import stored_message
from raymq.gateway.http.app import ENDPOINTS
from raymq.gateway.http.server import HTTP_HEADERS_BYTES_MAX, HttpFront
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.webhooks.ends import WEBHOOK_ID_PREFIX
from raymq.gateway.webhooks.event import event_body, event_headers, task_ended
from raymq.gateway.wire.messages import Resource
from raymq.serve.states import StateRecord, TaskHistory, TaskState, decode_state
from raymq.serve.task import decode_task
from tests.support.clients.fakes import FakeRoutes, FakeStore, topic_route
from tests.support.clients.lanes import make_certificates
from tests.support.clients.producers import MakeProducer, producers_of_fakes
from tests.support.console.fake_cluster import fake_message
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import (
    ANSWER_S,
    HOST,
    FakeAnnouncer,
    FakeGroups,
    FakeQueues,
    FakeTransactions,
)
from tests.support.gateway.http_client import FakeTail, HttpClient, http_served, until

SEND = "/v1/topics/orders/messages"
RECEIVE, ACK, CHANGE = (f"/v1/groups/billing/{name}" for name in ("receive", "ack", "change"))
Scenario = Callable[[HttpClient], Awaitable[None]]


class FakeWebhooks:
    """Web hooks that may call example.org. `registered`: the result topics, in order. `stored`: counts the messages of
    the store. `counts`: the result of `stored` at each registration."""

    def __init__(self, stored: Callable[[], int]) -> None:
        self.registered: list[str] = []
        self.counts: list[int] = []
        self._stored, self._hosts = stored, WebhookHosts.parse(["hooks.example.org"])

    def check(self, url: str) -> None:
        self._hosts.check(url)

    async def register(self, topic: str) -> None:
        self.registered.append(topic)
        self.counts.append(self._stored())


class Gateway:
    """A gateway on one fake store with the topics orders, jobs and jobs-results. `run` runs a scenario with its HTTP
    client."""

    def __init__(self, make: MakeProducer) -> None:
        self._make = make
        self.store, self.tail, self.group = FakeStore(), FakeTail(), FakeGroupCalls("billing")
        self.routes, self.queues = FakeRoutes(), FakeQueues()
        self.access: GatewayAccess | None = None
        self.histories: dict[tuple[str, str], TaskHistory] = {}
        self.more: dict[str, Any] = {}
        self.tails_max = 10
        self.tls: CertificateFiles | None = None
        self.webhooks: FakeWebhooks | None = None

    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            producer = self._make(self.store, route=topic_route(a=2), send_timeout_s=30.0)
            self.routes = producer.test_routes
            for topic in ("jobs", "jobs-results"):
                self.routes.routes[topic] = topic_route(topic, a=1)
            async with AsyncProducer(producer) as sender:
                cluster = GatewayCluster(
                    *(self.routes, FakeGroups(GroupConfig("billing")), sender, self.calls_of),
                    *(FakeTransactions(), FakeAnnouncer(), self.queues),
                    send_timeout_s=30.0,
                    **self.more,
                )
                served = http_served(
                    *(cluster, self.tail.read, self.history),
                    access=self.access,
                    tails_max=self.tails_max,
                    tls=self.tls,
                    webhooks=self.webhooks,
                )
                async with served as client:
                    await scenario(client)

        asyncio.run(main())

    def calls_of(self, group: str, namespace: Namespace) -> FakeGroupCalls:
        self.group.group = group
        return self.group

    def history(self, results: str, task_id: str) -> TaskHistory:
        return self.histories.get((results, task_id), TaskHistory())

    def messages(self, topic: str = "orders") -> list[MessageExt]:
        return [message for message in self.store.messages() if message.topic == topic]


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with producers_of_fakes() as make:
        yield Gateway(make)


# Sending


def test_one_message_is_sent_as_json(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        message = {
            "body": "gr\u00fc\u00dfe",
            "tag": "paid",
            "keys": ["k1", "k2"],
            "properties": {"shop": "7"},
            "sharding_key": "customer-7",
            "message_id": "01A",
        }
        status, answer = await client.post(SEND, message)
        assert (status, answer) == (
            200,
            {"messages": [{"message_id": "01A", "offset": 0, "code": "OK", "recall_handle": ""}]},
        )
        status, answer = await client.post(SEND, message)
        assert (status, answer["messages"][0]["message_id"]) == (200, "01A"), "a repeated send"

    gateway.run(scenario)
    [stored] = gateway.messages()
    assert (stored.body, stored.tags, list(stored.keys)) == ("gr\u00fc\u00dfe".encode(), "paid", ["k1", "k2"])
    assert (stored.properties, stored.message_id) == ({"shop": "7"}, "01A")


def test_the_stores_are_asked_only_for_ids_that_the_client_has_given(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        assert (await client.post(SEND, {"body": "1"}))[0] == 200
        assert (await client.post(SEND, [{"body": "2"}, {"body": "3"}]))[0] == 200
        assert gateway.queues.asked == [], "the gateway has made the ids just now"
        status, answer = await client.post(SEND, [{"body": "4"}, {"body": "5", "message_id": "01A"}, {"body": "6"}])
        assert (status, [one["code"] for one in answer["messages"]]) == (200, ["OK"] * 3)
        assert answer["messages"][1]["message_id"] == "01A"
        assert {ids for _, ids in gateway.queues.asked} == {("01A",)}

    gateway.run(scenario)
    assert [message.body for message in gateway.messages()] == [b"1", b"2", b"3", b"4", b"5", b"6"]


def test_several_messages_are_stored_in_one_queue_in_order(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        data = base64.b64encode(b"\xff\x00").decode()
        status, answer = await client.post(SEND, [{"body": "0"}, {"body_base64": data}, {"body": "2"}])
        assert status == 200
        assert len({one["message_id"] for one in answer["messages"]}) == 3
        assert [one["offset"] for one in answer["messages"]] == [0, 1, 2]

    gateway.run(scenario)
    assert [stored.body for stored in gateway.messages()] == [b"0", b"\xff\x00", b"2"]


@pytest.mark.parametrize(("query", "kind"), [("", "text/plain"), ("&raw=true", "application/json")])
def test_a_raw_body_is_stored_as_it_is(gateway: Gateway, query: str, kind: str) -> None:
    parameters = "tag=push&key=a&key=b&property=from:hook:7&message_id=01B&sharding_key=x"

    async def scenario(client: HttpClient) -> None:
        status, _ = await client.request("POST", f"{SEND}?{parameters}{query}", b'{"any": 1}', **{"content-type": kind})
        assert status == 200

    gateway.run(scenario)
    [stored] = gateway.messages()
    assert (stored.body, stored.tags, list(stored.keys)) == (b'{"any": 1}', "push", ["a", "b"])
    assert (stored.properties, stored.message_id) == ({"from": "hook:7"}, "01B")


def test_signs_of_json_inside_texts_do_not_count_as_messages(gateway: Gateway) -> None:
    texts = ['{"[' * 1000, "\\" * 999 + '"{' * 1000, "}]" * 1000, '\\"' * 3 + "{" * 1025]

    async def scenario(client: HttpClient) -> None:
        assert (await client.post(SEND, [{"body": text} for text in texts]))[0] == 200
        assert (await client.post(SEND, [{"body": "x"}] * 1024))[0] == 200

    gateway.run(scenario)
    assert [one.body.decode() for one in gateway.messages()][: len(texts)] == texts


@pytest.mark.parametrize("delay", [False, True])
def test_a_message_has_the_same_fields_as_one_of_the_python_client(gateway: Gateway, delay: bool) -> None:
    at_ms = {"deliver_at_ms": time.time_ns() // 1_000_000 + 3_600_000} if delay else {}
    fields = {"keys": ["k"], "properties": {"shop": "7"}, **at_ms}

    async def scenario(client: HttpClient) -> None:
        assert (await client.post(SEND, {"body": "17", "tag": "paid", "message_id": "01A", **fields}))[0] == 200
        sender = gateway._make(gateway.store, route=topic_route(a=2), send_timeout_s=30.0)
        message = Message("orders", b"17", tags="paid", **fields)
        async with AsyncProducer(sender) as producer:
            await producer.send(message, message_id="01A")

    gateway.run(scenario)
    first, second = gateway.store.messages()
    names = [name for name in MessageExt.__match_args__ if name not in ("queue_id", "born_timestamp_ms")]
    ours, theirs = ({name: getattr(one, name) for name in names} for one in (first, second))
    # the id of the producer itself
    assert ours["system_properties"].pop("RMQ_PID") != theirs["system_properties"].pop("RMQ_PID")
    # each producer chooses a queue, which a delayed message has as a property
    for fields_of_one in (ours, theirs):
        assert ("REAL_QID" in fields_of_one["system_properties"]) == delay
        fields_of_one["system_properties"].pop("REAL_QID", None)
    assert ours == theirs


def test_a_delay_is_counted_from_the_request(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        status, answer = await client.post(SEND, {"body": "later", "delay_s": 3600})
        assert (status, bool(answer["messages"][0]["recall_handle"])) == (200, True)
        status, answer = await client.post(SEND, {"body": "x", "delay_s": 1, "deliver_at_ms": 2_000_000_000_000})
        assert (status, answer["title"]) == (400, "BAD_REQUEST")

    gateway.run(scenario)


@pytest.mark.parametrize("priority", [0, 9])
def test_a_priority_is_stored_and_shown(gateway: Gateway, priority: int) -> None:
    async def scenario(client: HttpClient) -> None:
        assert (await client.post(SEND, {"body": "json", "priority": priority}))[0] == 200
        assert (await client.request("POST", f"{SEND}?raw=true&priority={priority}", b"raw"))[0] == 200

    gateway.run(scenario)
    stored = gateway.messages()
    assert [(one.body, one.priority) for one in stored] == [(b"json", priority), (b"raw", priority)]
    shown = [msgspec.to_builtins(stored_message(outgoing(one, Resource(name="orders")))) for one in stored]
    assert [one["priority"] for one in shown] == [priority, priority]


def test_a_message_that_is_less_durable_is_accepted(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        gateway.store.status = SendStatus.FLUSH_SLAVE_TIMEOUT
        status, answer = await client.post(SEND, {"body": "x"})
        assert (status, answer["messages"][0]["code"]) == (202, "SLAVE_PERSISTENCE_TIMEOUT")

    gateway.run(scenario)


REFUSED: list[tuple[Any, int, str]] = [
    ({"body": "x", "tagg": "a"}, 400, "BAD_REQUEST"),
    ({"body": 7}, 400, "BAD_REQUEST"),
    ({"body": "x", "body_base64": "eA=="}, 400, "BAD_REQUEST"),
    ({"body_base64": "%%%"}, 400, "BAD_REQUEST"),
    ({"body": "x", "delay_s": -1}, 400, "BAD_REQUEST"),
    ({"body": "x", "deliver_at_ms": 1_700_000_000}, 400, "BAD_REQUEST"),
    ({"body": "x", "delay_s": 41 * 86_400}, 400, "BAD_REQUEST"),
    ({"body": "x", "priority": 10}, 400, "BAD_REQUEST"),
    ({"body": "x", "priority": -1}, 400, "BAD_REQUEST"),
    ({"body": "x", "priority": 1.5}, 400, "BAD_REQUEST"),
    ({"body": "x", "priority": 1, "sharding_key": "a"}, 400, "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE"),
    ({"body": "x", "priority": 1, "delay_s": 60}, 400, "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE"),
    ({"body": "x", "tag": "a|b"}, 400, "ILLEGAL_MESSAGE_TAG"),
    ({"body": "x", "keys": ["a b"]}, 400, "ILLEGAL_MESSAGE_KEY"),
    ({"body": "x", "properties": {"TAGS": "x"}}, 400, "ILLEGAL_MESSAGE_PROPERTY_KEY"),
    ({"body": "x", "message_id": "a b"}, 400, "ILLEGAL_MESSAGE_ID"),
    ({"body": "x", "properties": {"a": "x" * 20_000}}, 431, "MESSAGE_PROPERTIES_TOO_LARGE"),
    ({"body": ""}, 413, "MESSAGE_BODY_EMPTY"),
    ({}, 413, "MESSAGE_BODY_EMPTY"),
    ([], 400, "MESSAGE_CORRUPTED"),
    ([{"body": "x"}] * 1025, 413, "PAYLOAD_TOO_LARGE"),
    ([{}] * 2_000_000, 413, "PAYLOAD_TOO_LARGE"),
    ([{"body": '\\"{' * 2000}] * 1025, 413, "PAYLOAD_TOO_LARGE"),
    ("x", 400, "BAD_REQUEST"),
    ({"body": "\ud800"}, 400, "BAD_REQUEST"),
]


@pytest.mark.parametrize(("value", "status", "title"), REFUSED)
def test_a_message_that_breaks_a_rule_is_refused(gateway: Gateway, value: Any, status: int, title: str) -> None:
    async def scenario(client: HttpClient) -> None:
        found, answer = await client.post(SEND, value)
        assert (found, answer["title"], answer["status"]) == (status, title, status), answer

    gateway.run(scenario)
    assert gateway.store.attempts == []


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (SEND, b""),
        (SEND, b"{"),
        (SEND, b"[" * 100_000),
        (SEND, b'{"body": "\xff"}'),
        (SEND, b'{"body": "x", "delay_s": NaN}'),
        (SEND + "?tag=a", b'{"body": "x"}'),
        (SEND + "?raw=true&delay_s=nan", b"x"),
        (SEND + "?raw=true&delay_s=inf", b"x"),
        (SEND + "?raw=true&delay_s=soon", b"x"),
        (SEND + "?raw=true&property=x", b"x"),
        (SEND + "?raw=true&tags=x", b"x"),
        (SEND + "?raw=true&tag=x&tag=y", b"x"),
        ("/v1/topics/%E4/messages", b'{"body": "x"}'),
        ("/v1/topics/a%2Fb/messages", b'{"body": "x"}'),
        (RECEIVE, b'{"topic": "orders", "max_messages": 33}'),
        (RECEIVE, b'{"topic": "orders", "max_messages": 1.5}'),
        (RECEIVE, b'{"topic": "orders", "wait_s": 1e999}'),
        (RECEIVE, b'{"topic": "orders", "tags": "a", "sql": "b > 1"}'),
        (RECEIVE, b'{"topic": "orders", "sql": "b >"}'),
        (RECEIVE + "?a=1", b'{"topic": "orders"}'),
        (ACK, b'{"topic": "orders", "receipts": []}'),
        (CHANGE, b'{"topic": "orders", "receipt": "x", "invisible_s": 5}'),
        ("/v1/tasks", b'{"queue": "jobs"}'),
        ("/v1/tasks", b'{"queue": "jobs", "name": " "}'),
        ("/v1/tasks", b'{"queue": "jobs", "name": "run", "args": ' + b"[" * 100_000),
    ],
)
def test_a_malformed_request_is_refused(gateway: Gateway, path: str, data: bytes) -> None:
    async def scenario(client: HttpClient) -> None:
        status, answer = await client.request("POST", path, data, **{"content-type": "application/json"})
        assert status in (400, 404), answer
        assert answer["status"] == status

    gateway.run(scenario)
    assert gateway.store.attempts == []


def test_errors_of_the_cluster_are_problems(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        status, answer = await client.post("/v1/topics/nowhere/messages", {"body": "x"})
        assert (status, answer["title"], answer["code"]) == (404, "TOPIC_NOT_FOUND", 40402)
        gateway.store.script = [NotMasterError("storage-a-0", "storage-a-1")] * 100
        gateway.store.connects = [ServiceNotAvailableError("no store answers")] * 100
        status, answer = await client.post(RECEIVE, {"topic": "nowhere"})
        assert (status, answer["title"]) == (404, "TOPIC_NOT_FOUND")
        for method, path in (("GET", "/v1"), ("PUT", SEND), ("GET", RECEIVE)):
            status, answer = await client.request(method, path)
            assert (status, answer["status"]) in ((404, 404), (405, 405))

    gateway.run(scenario)


# Receiving


def test_messages_are_received_and_settled_by_their_receipts(gateway: Gateway) -> None:
    gateway.group.put("a", b"0", tags="paid")
    gateway.group.put("a", b"\xff", tags="paid")
    gateway.group.put("a", b"2", tags="open")

    async def scenario(client: HttpClient) -> None:
        status, answer = await client.post(RECEIVE, {"topic": "orders", "tags": "paid"})
        assert status == 200
        first, second = answer["messages"]
        assert (first["body"], second["body_base64"]) == ("0", base64.b64encode(b"\xff").decode())
        assert (first["tag"], first["attempt"], first["topic"], "body" in second) == ("paid", 1, "orders", False)
        status, answer = await client.post(ACK, {"topic": "orders", "receipts": [first["receipt"], "rubbish"]})
        assert status == 207
        assert [one["code"] for one in answer["results"]] == ["OK", "INVALID_RECEIPT_HANDLE"]
        change = {"topic": "orders", "receipt": second["receipt"], "invisible_s": 0}
        assert (await client.post(CHANGE, change))[0] == 200
        status, answer = await client.post(CHANGE, change)
        assert (status, answer["title"]) == (400, "INVALID_RECEIPT_HANDLE")
        _, answer = await client.post(RECEIVE, {"topic": "orders", "max_messages": 1, "invisible_s": 0.5})
        [again] = answer["messages"]
        assert again["attempt"] == 2
        status, answer = await client.post(ACK, {"topic": "orders", "receipts": [again["receipt"]]})
        assert (status, answer["results"]) == (200, [{"receipt": again["receipt"], "code": "OK"}])
        status, answer = await client.post(ACK, {"topic": "orders", "receipts": ["rubbish"]})
        assert (status, answer["title"]) == (400, "INVALID_RECEIPT_HANDLE")
        assert (await client.post(RECEIVE, {"topic": "orders"}))[1] == {"messages": []}

    gateway.run(scenario)


def test_messages_that_do_not_fit_into_an_answer_stay_visible(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "RECEIVED_BYTES_MAX", 3000)
    for number in range(5):
        gateway.group.put("a", b"%d" % number + b"x" * (5000 if number == 4 else 1000))

    async def scenario(client: HttpClient) -> None:
        found: list[tuple[str, int]] = []
        sizes = []
        async with asyncio.timeout(ANSWER_S):
            while len(found) < 5:
                messages = (await client.post(RECEIVE, {"topic": "orders", "wait_s": 5}))[1]["messages"]
                found += [(one["body"][0], one["attempt"]) for one in messages]
                sizes.append(len(messages))
        assert sorted(found) == [(str(number), 1) for number in range(5)], "each once, as the first attempt"
        assert max(sizes) == 2

    gateway.run(scenario)


def test_a_receive_waits_for_a_message(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        waiting = asyncio.create_task(client.post(RECEIVE, {"topic": "orders", "wait_s": 20}))
        await gateway.group.wait_for_receives(1)
        gateway.group.put("a", b"late")
        _, answer = await waiting
        assert [one["body"] for one in answer["messages"]] == ["late"]

    gateway.run(scenario)


def test_the_messages_of_a_client_that_left_are_visible_to_others(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        gateway.group.answers.clear()
        waiting = asyncio.create_task(client.post(RECEIVE, {"topic": "orders", "wait_s": 20}))
        await gateway.group.wait_for_receives(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gateway.group.put("a", b"kept")
        gateway.group.answers.set()
        async with asyncio.timeout(ANSWER_S):
            messages: list[Any] = []
            while not messages:
                messages = (await client.post(RECEIVE, {"topic": "orders", "wait_s": 1}))[1]["messages"]
        assert [(one["body"], one["attempt"]) for one in messages] == [("kept", 1)]

    gateway.run(scenario)


# Tails


def test_a_tail_streams_new_messages(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        gateway.tail.messages.append(fake_message(body=b"old"))
        async with client.events("/v1/topics/orders/tail?tags=paid") as events:
            # the tail begins at the end that its first read finds
            await asyncio.sleep(0)
            await until(lambda: gateway.tail.reads > 1)
            gateway.tail.messages += [
                fake_message(body=b"0", tags="open", queue_offset=1),
                fake_message(body=b"1", tags="paid", queue_offset=2),
            ]
            name, message = await anext(events)
            assert (name, message["body"], message["offset"]) == ("message", "1", 2)
            assert "receipt" not in message
            schema = {"$ref": "#/components/schemas/StoredMessage", "components": client.document["components"]}
            jsonschema.Draft202012Validator(schema).validate(message)
            gateway.tail.failure = ServiceNotAvailableError("no store answers")
            name, problem = await anext(events)
            assert (name, problem["title"], problem["detail"]) == ("problem", "HA_NOT_AVAILABLE", "no store answers")

    gateway.run(scenario)


def test_the_number_of_tails_is_bounded_and_a_tail_that_ends_makes_room(gateway: Gateway) -> None:
    gateway.tails_max = 1

    async def scenario(client: HttpClient) -> None:
        async with client.events("/v1/topics/orders/tail"):
            status, answer = await client.request("GET", "/v1/topics/orders/tail")
            assert (status, answer["title"]) == (429, "TOO_MANY_REQUESTS")
        async with asyncio.timeout(ANSWER_S):
            while True:
                try:
                    async with client.events("/v1/topics/orders/tail"):
                        break
                except AssertionError:
                    await asyncio.sleep(0.01)
        assert (await client.request("GET", "/v1/topics/nowhere/tail"))[0] == 404
        for _ in range(3):
            async with client.session.head(client.base + "/v1/topics/orders/tail") as response:
                assert (response.status, response.content_type) == (200, "text/event-stream")

    gateway.run(scenario)


def test_a_server_that_stops_ends_its_tails(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        async with client.events("/v1/topics/orders/tail") as events:
            await client.front.stop()
            assert [event async for event in events] == []

    gateway.run(scenario)


# Tasks


def test_a_task_has_a_priority_only_in_a_queue_with_priorities(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        new = {"queue": "jobs", "name": "resize"}
        status, problem = await client.post("/v1/tasks", {**new, "priority": 5})
        assert (status, "have no priorities" in problem["detail"]) == (400, True)
        levels = TopicAttributes(TopicMessageType.PRIORITY)
        for queue in ("urgent", "urgent-results"):
            gateway.routes.routes[queue] = topic_route(queue, a=10)
        gateway.routes.routes["urgent"] = replace(topic_route("urgent", a=10), attributes=levels)
        new = {"queue": "urgent", "name": "resize"}
        for given in ({"priority": 9}, {}):
            assert (await client.post("/v1/tasks", {**new, **given}))[0] == 202
        for bad in ({"priority": 10}, {"delay_s": 5}, {"sharding_key": "k"}):
            assert (await client.post("/v1/tasks", {**new, **bad}))[0] == 400

    gateway.run(scenario)
    assert [(one.priority, one.queue_id) for one in gateway.messages("urgent")] == [(9, 9), (0, 0)]


def test_a_task_is_stored_as_the_adapter_stores_it(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        new = {"queue": "jobs", "name": "resize", "args": [1, "a"], "kwargs": {"to": None}}
        status, answer = await client.post("/v1/tasks", new)
        assert (status, answer["state"], answer["attempt"], answer["result"]) == (202, "PENDING", 0, None)
        task_id = answer["id"]
        status, problem = await client.request("GET", f"/v1/tasks/{task_id}?queue=jobs")
        assert (status, problem["title"]) == (404, "NOT_FOUND")
        done = StateRecord(task_id, TaskState.SUCCESS, answer["at_s"], answer["created_at_s"], 1, {"bytes": 7})
        gateway.histories["jobs-results", task_id] = TaskHistory(done)
        status, found = await client.request("GET", f"/v1/tasks/{task_id}?queue=jobs")
        assert (status, found["state"], found["result"], found["attempt"]) == (200, "SUCCESS", {"bytes": 7}, 1)
        for result in (2**80, "\ud800", [None, {"a": "\x00"}]):
            gateway.histories["jobs-results", task_id] = TaskHistory(replace(done, result=result))
            _, found = await client.request("GET", f"/v1/tasks/{task_id}?queue=jobs")
            assert found["result"] == result
        for path in (f"/v1/tasks/{task_id}", f"/v1/tasks/{'x' * 300}?queue=jobs", f"/v1/tasks/{task_id}?queue=%20"):
            assert (await client.request("GET", path))[0] == 400
        assert (await client.request("GET", f"/v1/tasks/{task_id}?queue=other"))[0] == 404
        status, problem = await client.post("/v1/tasks", {**new, "queue": "nowhere"})
        assert (status, problem["title"]) == (404, "TOPIC_NOT_FOUND")

    gateway.run(scenario)
    [message], [told] = gateway.messages("jobs"), gateway.messages("jobs-results")
    task, state = decode_task(message.body), decode_state(told.body)
    assert (task.name, task.args, dict(task.kwargs)) == ("resize", (1, "a"), {"to": None})
    assert (list(message.keys), message.properties) == ([task.id], {"task": "resize"})
    assert state == StateRecord.of(task, TaskState.PENDING, task.created_at_s)
    assert (list(told.keys), told.tags) == ([task.id], "PENDING")


def test_a_task_with_a_web_hook_is_stored_after_its_web_hook(gateway: Gateway) -> None:
    url = "https://hooks.example.org/a?key=7"
    new = {"queue": "jobs", "name": "resize", "webhook": url}
    hooks = gateway.webhooks = FakeWebhooks(lambda: len(gateway.store.messages()))
    ids: list[str] = []

    async def scenario(client: HttpClient) -> None:
        status, answer = await client.post("/v1/tasks", new)
        assert status == 202, answer
        ids.append(answer["id"])
        for other, code in (
            ("https://elsewhere.example.org/", 403),
            ("http://hooks.example.org/", 403),
            ("ftp://hooks.example.org/", 400),
            ("hooks.example.org", 400),
            ("https://hooks.example.org/" + "x" * 3000, 400),
        ):
            status, problem = await client.post("/v1/tasks", {**new, "webhook": other})
            assert status == code, problem
            assert code == 400 or "gateway.webhook_hosts" in problem["detail"]

    gateway.run(scenario)
    assert (hooks.registered, hooks.counts) == (["jobs-results"], [0]), "registered once, before any message"
    [task], [stored, told] = gateway.messages("jobs"), gateway.messages("jobs-results")
    assert decode_task(task.body).id == ids[0]
    assert ids[0].startswith(WEBHOOK_ID_PREFIX)
    assert (stored.tags, list(stored.keys), told.tags) == ("WEBHOOK", [ids[0] + "-webhook"], "PENDING")
    assert json.loads(stored.body) == {"task_id": ids[0], "url": url, "queue": "jobs"}
    order = [message.tags for message in gateway.store.messages()]
    assert order[0] == "WEBHOOK", "the web hook is stored before the task"


def test_a_web_hook_is_refused_if_no_host_is_allowed(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        new = {"queue": "jobs", "name": "resize", "webhook": "https://hooks.example.org/a"}
        status, problem = await client.post("/v1/tasks", new)
        assert (status, problem["title"]) == (403, "FORBIDDEN")
        assert "gateway.webhook_hosts" in problem["detail"]

    gateway.run(scenario)
    assert not gateway.store.messages()


# Limits


def test_a_body_that_is_too_long_is_refused(gateway: Gateway) -> None:
    gateway.more = {"max_body_bytes": 1000}

    async def scenario(client: HttpClient) -> None:
        status, answer = await client.request("POST", SEND, b"x" * 1000)
        assert status == 200, answer
        status, answer = await client.request("POST", SEND, b"x" * 1001)
        assert (status, answer["title"]) == (413, "MESSAGE_BODY_TOO_LARGE")
        longest = 2 * 1000 + bodies.REQUEST_OVERHEAD_BYTES
        status, answer = await client.request("POST", SEND, b"x" * (longest + 1))
        assert (status, answer["title"]) == (413, "PAYLOAD_TOO_LARGE")

        async def chunks() -> Any:
            for _ in range(longest // 65_536 + 2):
                yield b"x" * 65_536

        async with client.session.post(client.base + SEND, data=chunks()) as response:
            assert response.status == 413, "a body without an announced length"
        small = bodies.REQUEST_OVERHEAD_BYTES
        for path, size in ((RECEIVE, small + 1), (ACK, small + 1), (CHANGE, small + 1), ("/v1/tasks", small + 1001)):
            status, answer = await client.request("POST", path, b" " * size)
            assert (status, answer["title"]) == (413, "PAYLOAD_TOO_LARGE"), path

    gateway.run(scenario)
    assert len(gateway.messages()) == 1


def test_the_bodies_of_all_requests_have_bounded_memory(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODIES_BYTES_MAX", 1000)

    async def scenario(client: HttpClient) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> Any:
            yield b"x"
            begun.set()
            await go_on.wait()

        async def slow() -> int:
            async with client.session.post(client.base + SEND, data=slowly()) as response:
                return response.status

        sending = asyncio.create_task(slow())
        await begun.wait()
        async with asyncio.timeout(ANSWER_S):
            while (await client.request("POST", SEND, b"x" * 100))[0] != 429:
                await asyncio.sleep(0.005)
        go_on.set()
        assert await sending == 200
        assert (await client.request("POST", SEND, b"x" * 100))[0] == 200

    gateway.run(scenario)


def test_a_body_that_does_not_arrive_is_a_timeout(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_READ_S", 0.05)

    async def scenario(client: HttpClient) -> None:
        never = asyncio.Event()

        async def slowly() -> Any:
            yield b"x"
            await never.wait()

        async with client.session.post(client.base + SEND, data=slowly()) as response:
            assert (response.status, (await response.json())["title"]) == (504, "PROXY_TIMEOUT")

    gateway.run(scenario)


def test_headers_that_are_too_long_are_refused(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        reader, writer = await asyncio.open_connection(HOST, int(client.base.rpartition(":")[2]))
        writer.write(b"GET /healthz HTTP/1.1\r\nx: " + b"x" * 2 * HTTP_HEADERS_BYTES_MAX)
        async with asyncio.timeout(ANSWER_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        async with client.session.get(client.base + "/healthz") as response:
            assert (response.status, await response.text()) == (200, "ok\n")

    gateway.run(scenario)


def test_a_port_in_use_is_an_error_that_names_the_setting(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        with socket.create_server((HOST, 0)) as taken:
            front = HttpFront(lambda: None, client.front._tails)
            with pytest.raises(ServiceNotAvailableError, match="the gateway cannot listen"):
                await front.start(HOST, taken.getsockname()[1])

    gateway.run(scenario)


def test_a_new_connection_gets_the_renewed_certificate(gateway: Gateway, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, second = (make_certificates(tmp_path / name) for name in ("first", "second"))
    gateway.tls = CertificateFiles(Path(first.certificate), Path(first.key))

    async def scenario(client: HttpClient) -> None:
        async def trusts(authority: str) -> bool:
            context = ssl.create_default_context(cafile=authority)
            context.check_hostname = False
            try:
                async with aiohttp.ClientSession() as session:
                    return (await session.get(client.base + "/healthz", ssl=context)).status == 200
            except aiohttp.ClientSSLError:
                return False

        assert await trusts(first.authority)
        Path(first.certificate).write_bytes(Path(second.certificate).read_bytes())
        assert await trusts(first.authority), "the key is still the former one"
        Path(first.key).write_bytes(Path(second.key).read_bytes())
        assert await trusts(second.authority)
        assert not await trusts(first.authority)
        assert (await client.post(SEND, {"body": "x"}))[0] == 200

    gateway.run(scenario)


# The document


def test_the_document_describes_every_endpoint_with_valid_schemas(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        document = client.document
        assert document["openapi"].startswith("3.1.")
        described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
        assert described == {(one.method, one.path) for one in ENDPOINTS.values()}
        for schema in document["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)
        names = document["components"]["schemas"].keys()
        text = json.dumps(document)
        references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
        assert references <= names
        ids = [item["summary"] for path in document["paths"].values() for item in path.values()]
        assert len(set(ids)) == len(ids)
        for path, item in document["paths"].items():
            for operation in item.values():
                parameters = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
                assert all(f"{{{name}}}" in path for name in parameters)
                assert path.count("{") == len(parameters)
                assert "default" in operation["responses"]
        # the request of a web hook, as the gateway sends it
        operation = document["webhooks"]["task.ended"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        state = StateRecord("hook-7", TaskState.SUCCESS, 7.0, result=[1])
        body, headers = event_body(task_ended("jobs", state)), event_headers("hook-7", b"", [b"key"], 7.0)
        components = {"components": document["components"]}
        jsonschema.Draft202012Validator({**schema, **components}).validate(json.loads(body))
        assert {one["name"] for one in operation["parameters"]} == headers.keys() - {"content-type"}

    gateway.run(scenario)


def test_a_namespace_is_part_of_the_stored_names(gateway: Gateway) -> None:
    async def scenario(client: HttpClient) -> None:
        gateway.routes.routes["team%orders"] = replace(topic_route(a=1), topic="team%orders")
        status, answer = await client.post(SEND, {"body": "x"}, **{"x-mq-namespace": "team"})
        assert status == 200, answer

    gateway.run(scenario)
    assert [one.body for one in gateway.messages("team%orders")] == [b"x"]
