"""Tests of a gateway's HTTP face on a cluster: messages, tails and tasks, with tokens, and as the gateway's actor."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

import raymq
from raymq.client.admin.live_tails import Positions
from raymq.client.admin.messages import Arrived
from raymq.client.cluster.launcher import launch
from raymq.common.config.cluster import load_settings
from raymq.gateway.clients.access import GatewayAccess
from raymq.gateway.http.bodies import REQUEST_OVERHEAD_BYTES
from raymq.gateway.http.tasks import histories_of
from raymq.gateway.service.cluster import cluster_of
from raymq.remoting.access.policies import make_entry
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import gateway_secret, make_user
from raymq.serve.states import StateRecord, TaskState
from raymq.serve.task import decode_task
from raymq.serve.task_messages import state_message
from tests.support.gateway.gateway_client import ANSWER_S, HOST
from tests.support.gateway.http_client import HttpClient, http_served
from tests.support.history.waiting import eventually
from tests.support.ports import free_port

SEND_TIMEOUT_S = 30.0
PAGE = Path(__file__).parents[4] / "docs/http.md"
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def run(
    mq: raymq.Client, scenario: Callable[[HttpClient], Awaitable[None]], access: GatewayAccess | None = None
) -> None:
    async def read_tail(topic: str, positions: Positions | None, most: int) -> Arrived:
        return await asyncio.to_thread(partial(mq.admin.tail, topic, positions, max_messages=min(most, 1000)))

    async def main() -> None:
        async with (
            mq.async_producer("gateway-http", send_timeout_s=SEND_TIMEOUT_S) as producer,
            http_served(cluster_of(mq, producer, SEND_TIMEOUT_S), read_tail, histories_of(mq), access=access) as client,
        ):
            await scenario(client)

    asyncio.run(main())


async def receive(client: HttpClient, group: str, topic: str, count: int) -> list[dict[str, Any]]:
    """Receive exactly `count` messages, in several requests if needed."""
    messages: list[dict[str, Any]] = []
    async with asyncio.timeout(ANSWER_S):
        while len(messages) < count:
            asked = {"topic": topic, "wait_s": 5, "invisible_s": 300}
            status, answer = await client.post(f"/v1/groups/{group}/receive", asked)
            assert status == 200, answer
            messages += answer["messages"]
    assert len(messages) == count
    return messages


def test_messages_are_sent_received_and_settled_over_http(mq: raymq.Client) -> None:
    mq.admin.create_topic("http-orders", queues=2)
    path, group = "/v1/topics/http-orders/messages", "http-billing"

    async def scenario(client: HttpClient) -> None:
        one = {"body": "17", "tag": "paid", "keys": ["k1"], "properties": {"shop": "7"}, "message_id": "HTTP17"}
        for _ in range(2):
            status, answer = await client.post(path, one)
            assert (status, answer["messages"][0]["message_id"]) == (200, "HTTP17"), answer
        status, answer = await client.request("POST", path + "?tag=raw", b"\xff\x00")
        assert status == 200, answer
        status, answer = await client.post(path, [{"body": f"many {number}"} for number in range(5)])
        assert status == 200, answer
        offsets = [sent["offset"] for sent in answer["messages"]]
        assert offsets == list(range(offsets[0], offsets[0] + 5)), "several messages are in one queue, in order"
        found = await receive(client, group, "http-orders", 7)
        [paid] = [message for message in found if message.get("tag") == "paid"]
        assert (paid["body"], paid["keys"], paid["properties"]) == ("17", ["k1"], {"shop": "7"})
        assert (paid["message_id"], paid["attempt"]) == ("HTTP17", 1)
        [raw] = [message for message in found if message.get("tag") == "raw"]
        assert (raw["body_base64"], "body" in raw) == ("/wA=", False)
        change = {"topic": "http-orders", "receipt": raw["receipt"], "invisible_s": 0}
        assert (await client.post(f"/v1/groups/{group}/change", change))[0] == 200
        status, answer = await client.post(f"/v1/groups/{group}/change", change)
        assert (status, answer["title"]) == (400, "INVALID_RECEIPT_HANDLE")
        [again] = await receive(client, group, "http-orders", 1)
        assert (again["message_id"], again["attempt"]) == (raw["message_id"], 2)
        receipts = [message["receipt"] for message in (*found, again) if message is not raw]
        ack = {"topic": "http-orders", "receipts": receipts}
        assert (await client.post(f"/v1/groups/{group}/ack", ack))[0] == 200
        longest = 2 * 4 * 1024 * 1024 + REQUEST_OVERHEAD_BYTES
        status, answer = await client.request("POST", path, b"x" * (longest + 1))
        assert (status, answer["title"]) == (413, "PAYLOAD_TOO_LARGE")
        status, answer = await client.request("POST", path, b"x" * (4 * 1024 * 1024 + 1))
        assert (status, answer["title"]) == (413, "MESSAGE_BODY_TOO_LARGE")

    run(mq, scenario)
    assert mq.admin.group_summary(group).lag == 0


def test_a_tail_streams_the_messages_of_any_producer(mq: raymq.Client) -> None:
    mq.admin.create_topic("http-tail", queues=2)

    async def scenario(client: HttpClient) -> None:
        async with client.events("/v1/topics/http-tail/tail?tags=paid") as events, asyncio.timeout(ANSWER_S):

            async def send_until_seen() -> None:
                # the tail begins at the end that its first read finds, so the first messages may be before it
                while True:
                    await client.post("/v1/topics/http-tail/messages", [{"body": "1", "tag": "paid"}, {"body": "2"}])
                    await asyncio.sleep(0.2)

            sending = asyncio.create_task(send_until_seen())
            name, message = await anext(events)
            sending.cancel()
            assert (name, message["body"], message["tag"]) == ("message", "1", "paid")

    run(mq, scenario)


def test_a_task_is_sent_and_its_state_is_read(mq: raymq.Client) -> None:
    for topic in ("http-jobs", "http-jobs-results"):
        mq.admin.create_topic(topic, queues=2)

    async def scenario(client: HttpClient) -> None:
        new = {"queue": "http-jobs", "name": "resize", "args": [7]}
        status, answer = await client.post("/v1/tasks", new)
        assert (status, answer["state"]) == (202, "PENDING"), answer
        path = f"/v1/tasks/{answer['id']}?queue=http-jobs"

        async def becomes(state: str) -> Any:
            async with asyncio.timeout(ANSWER_S):
                while (found := await client.request("GET", path))[1].get("state") != state:
                    await asyncio.sleep(0.1)
            return found[1]

        assert (await becomes("PENDING"))["created_at_s"] == answer["created_at_s"]

        def work() -> None:
            """Do the task as a replica of its deployment does."""
            with mq.pull_consumer("http-workers", consume_from=FIRST) as consumer, mq.producer("http-work") as producer:
                consumer.subscribe("http-jobs")
                [message] = eventually(lambda: consumer.poll(timeout_s=1.0), "the task")
                task = decode_task(message.body)
                assert (task.id, task.name, task.args) == (answer["id"], "resize", (7,))
                state = StateRecord.of(task, TaskState.SUCCESS, task.created_at_s + 1, attempt=0, result={"bytes": 9})
                producer.send(state_message("http-jobs-results", state, state.encode()), sharding_key=task.id)

        await asyncio.to_thread(work)
        assert (await becomes("SUCCESS"))["result"] == {"bytes": 9}
        status, problem = await client.request("GET", "/v1/tasks/unknown?queue=http-jobs")
        assert (status, problem["title"]) == (404, "NOT_FOUND")

    run(mq, scenario)


def test_a_token_and_its_rights_are_needed_if_access_is_on(mq: raymq.Client) -> None:
    mq.admin.create_topic("http-guarded", queues=1)
    shop = make_user("shop", "a long secret")
    entry = make_entry("Topic:http-guarded", ["Pub"])
    state = AuthState().with_user(shop, is_new=True).with_entries("shop", [entry])

    async def scenario(client: HttpClient) -> None:
        path = "/v1/topics/http-guarded/messages"
        for token in ("", "shop:wrong", "shop:a long secret"):
            client.token = token
            assert (await client.post(path, {"body": "x"}))[0] == 401
        client.token = f"shop:{gateway_secret(shop.key)}"
        assert (await client.post(path, {"body": "x"}))[0] == 200
        assert (await client.post("/v1/groups/http-guarded-g/receive", {"topic": "http-guarded"}))[0] == 403

    run(mq, scenario, GatewayAccess(lambda: state))


@pytest.fixture
def http_port(mq: raymq.Client, tmp_path: Path) -> Iterator[int]:
    """Start the gateway's actor with HTTP, and yield the port of HTTP."""
    ports = [free_port(), free_port()]
    config, address = tmp_path / "raymq.yaml", ray.get_runtime_context().gcs_address
    config.write_text(f"gateway: {{port: {ports[0]}, http_port: {ports[1]}}}\n")
    [found] = launch("gateways", address, load_settings(config))
    assert found["http"] == f"{HOST}:{ports[1]}"
    yield ports[1]
    launch("stop_gateways", address)


def test_the_gateway_actor_answers_http_as_the_page_says(mq: raymq.Client, http_port: int, tmp_path: Path) -> None:
    for topic in ("http-actor", "http-page-orders"):
        mq.admin.create_topic(topic, queues=1)
    base = f"http://{HOST}:{http_port}"

    def post(path: str, value: Any) -> Any:
        request = urllib.request.Request(
            base + path, json.dumps(value).encode(), {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return json.load(response)

    [sent] = post("/v1/topics/http-actor/messages", {"body": "17"})["messages"]
    [message] = post("/v1/groups/http-actor-g/receive", {"topic": "http-actor", "wait_s": 20})["messages"]
    assert (message["message_id"], message["body"]) == (sent["message_id"], "17")
    ack = {"topic": "http-actor", "receipts": [message["receipt"]]}
    assert [one["code"] for one in post("/v1/groups/http-actor-g/ack", ack)["results"]] == ["OK"]
    _run_page(http_port, tmp_path)
    # a tail opens, and ends with the gateway: the fixture stops the actor while the stream is open
    tail = urllib.request.urlopen(base + "/v1/topics/http-actor/tail", timeout=ANSWER_S)
    assert tail.readline() == b": connected\n"


def _run_page(http_port: int, folder: Path) -> None:
    """Run the program of docs/http.md with a topic and a group of the test's own."""
    [program] = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, own in (("8082", str(http_port)), ("orders", "http-page-orders"), ("billing", "http-page-billing")):
        assert name in program
        program = program.replace(name, own)
    done = subprocess.run(
        ["bash", "-euc", program], cwd=folder, capture_output=True, text=True, timeout=ANSWER_S, check=False
    )
    assert done.returncode == 0, done.stderr
    *sends, acknowledged = [json.loads(text) for text in done.stdout.replace("}{", "}\n{").splitlines()]
    assert [len(answer["messages"]) for answer in sends] == [1, 2, 1]
    assert [one["code"] for one in acknowledged["results"]] == ["OK"]
    [paid] = json.loads((folder / "received.json").read_text())["messages"]
    assert (paid["body"], paid["tag"], paid["keys"]) == ("order 17", "paid", ["17"])
