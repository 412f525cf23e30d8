"""Tests of access over HTTP: tokens, the rights of each endpoint, quotas, and users that change under an open tail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from raymq.gateway.clients.access import GatewayAccess
from raymq.remoting.access.policies import make_entry
from tests.component.gateway.test_gateway_http import ACK, CHANGE, RECEIVE, SEND, FakeWebhooks, Gateway
from tests.support.clients.producers import producers_of_fakes
from tests.support.console.fake_cluster import fake_message
from tests.support.gateway.gateway_client import ANSWER_S
from tests.support.gateway.http_client import HttpClient, until
from tests.support.gateway.users import HANDLE, SECRET, secret_of, state_of_users

TAIL = "/v1/topics/orders/tail"
REQUESTS: list[tuple[str, str, Any, str]] = [
    ("POST", SEND, {"body": "x"}, "Pub on Topic:orders"),
    ("POST", RECEIVE, {"topic": "orders"}, "Sub on Group:billing"),
    ("POST", ACK, {"topic": "orders", "receipts": [HANDLE]}, "Sub on Group:billing"),
    ("POST", CHANGE, {"topic": "orders", "receipt": HANDLE, "invisible_s": 1}, "Sub on Group:billing"),
    ("GET", TAIL, None, "Sub or Get on Topic:orders"),
    ("POST", "/v1/tasks", {"queue": "jobs", "name": "run"}, "Pub on Topic:jobs"),
    ("GET", "/v1/tasks/7?queue=jobs", None, "Sub or Get on Topic:jobs-results"),
]
"""A request for each endpoint, and the right whose lack refuses the request."""


class GuardedGateway(Gateway):
    """A gateway with access on. `state`: the users and policies in force."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.state, self.now_ms = state_of_users(), 0.0
        self.access = GatewayAccess(lambda: self.state, monotonic_ms=lambda: self.now_ms)

    def allow(self, user: str, *entries: Any) -> None:
        self.state = self.state.with_entries(user, entries)


@pytest.fixture
def gateway() -> Iterator[GuardedGateway]:
    with producers_of_fakes() as make:
        yield GuardedGateway(make)


def token(user: str) -> str:
    return f"{user}:{secret_of(user)}"


async def ask(client: HttpClient, method: str, path: str, value: Any) -> tuple[int, Any]:
    return await (client.request(method, path) if value is None else client.post(path, value))


def test_a_web_hook_needs_the_right_to_read_results(gateway: GuardedGateway) -> None:
    gateway.webhooks = FakeWebhooks(lambda: 0)
    new = {"queue": "jobs", "name": "run"}

    async def scenario(client: HttpClient) -> None:
        client.token = token("shop")
        entries = [make_entry(f"Topic:{topic}", ["Pub"]) for topic in ("jobs", "jobs-results")]
        gateway.allow("shop", *entries)
        assert (await client.post("/v1/tasks", new))[0] == 202
        with_hook = {**new, "webhook": "https://hooks.example.org/a"}
        status, answer = await client.post("/v1/tasks", with_hook)
        assert (status, "Sub or Get on Topic:jobs-results" in answer["detail"]) == (403, True), answer
        gateway.allow("shop", *entries, make_entry("Topic:jobs-results", ["Pub", "Get"]))
        assert (await client.post("/v1/tasks", with_hook))[0] == 202

    gateway.run(scenario)


@pytest.mark.parametrize(("method", "path", "value", "need"), REQUESTS)
def test_each_endpoint_needs_a_token_and_its_rights(
    gateway: GuardedGateway, method: str, path: str, value: Any, need: str
) -> None:
    async def scenario(client: HttpClient) -> None:
        for text in ("", "shop:wrong", "nobody:x", f"shop:{SECRET}", token("gone")):
            client.token = text
            status, answer = await ask(client, method, path, value)
            assert (status, answer["title"]) == (401, "UNAUTHORIZED"), text
        client.token = token("shop")
        status, answer = await ask(client, method, path, value)
        assert (status, answer["title"]) == (403, "FORBIDDEN")
        assert need in answer["detail"]
        client.token = token("root")
        if path == TAIL:
            async with client.events(TAIL):
                return
        status, answer = await ask(client, method, path, value)
        # the super user passes; what the request names may still not exist
        assert status not in (401, 403), answer

    gateway.group.put("a", b"x")
    gateway.run(scenario)


def test_a_refused_token_names_the_way_to_sign(gateway: GuardedGateway) -> None:
    async def scenario(client: HttpClient) -> None:
        async with client.session.post(client.base + SEND, data=b"x") as response:
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, 'Bearer realm="raymq"')

    gateway.run(scenario)


def test_a_policy_for_an_address_counts_the_connection_and_no_header(gateway: GuardedGateway) -> None:
    gateway.allow("shop", make_entry("Topic:orders", ["Pub"], sources=["10.9.9.9"]))

    async def scenario(client: HttpClient) -> None:
        client.token = token("shop")
        status, _ = await client.post(SEND, {"body": "x"}, **{"X-Forwarded-For": "10.9.9.9"})
        assert status == 403

    gateway.run(scenario)


def test_a_user_sends_within_the_quota(gateway: GuardedGateway) -> None:
    gateway.allow("till", make_entry("Topic:orders", ["Pub"]))

    async def scenario(client: HttpClient) -> None:
        client.token = token("till")
        assert (await client.post(SEND, [{"body": "x"}] * 4))[0] == 200
        status, answer = await client.post(SEND, {"body": "x"})
        assert (status, answer["title"]) == (429, "TOO_MANY_REQUESTS")
        gateway.now_ms += 1000
        assert (await client.post(SEND, {"body": "x"}))[0] == 200

    gateway.run(scenario)


def test_a_tail_skips_the_messages_beyond_the_quota_and_ends_with_the_right(gateway: GuardedGateway) -> None:
    gateway.allow("eater", make_entry("Topic:orders", ["Sub"]))

    async def scenario(client: HttpClient) -> None:
        client.token = token("eater")
        async with client.events(TAIL) as events:
            await until(lambda: gateway.tail.reads > 1)
            gateway.tail.messages += [fake_message(body=b"%d" % number, queue_offset=number) for number in range(5)]
            found = [await anext(events) for _ in range(3)]
            assert [(name, data.get("body")) for name, data in found[:2]] == [("message", "0"), ("message", "1")]
            assert found[2] == ("skipped", {"count": 3})
            gateway.tail.messages.append(fake_message(body=b"5", queue_offset=5))
            assert await anext(events) == ("skipped", {"count": 1})
            gateway.state = gateway.state.without_user("eater")
            gateway.tail.messages.append(fake_message(body=b"6", queue_offset=6))
            name, problem = await anext(events)
            assert (name, problem["title"]) == ("problem", "UNAUTHORIZED")
            assert [event async for event in events] == []

    gateway.run(scenario)


def test_open_connections_are_bounded(gateway: GuardedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymq.gateway.http.server.HTTP_CONNECTIONS_MAX", 3)

    async def scenario(client: HttpClient) -> None:
        client.token = token("root")
        address = client.base + "/healthz"
        async with client.events(TAIL), client.events(TAIL), aiohttp.ClientSession() as others:
            assert (await others.get(address)).status == 503
        async with asyncio.timeout(ANSWER_S), aiohttp.ClientSession() as others:
            while (await others.get(address)).status != 200:
                await asyncio.sleep(0.01)

    gateway.run(scenario)


PAGES = [
    {"Origin": "http://a.page.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-origin"},
    # the page's own name, which the page has made a name of this machine
    {"Host": "a.page.example:8082"},
    {"Host": "[broken"},
]
PROGRAMS = [{}, {"Host": "localhost:8082"}, {"Host": "127.0.0.1"}, {"Host": "[::1]:8082"}, {"Sec-Fetch-Site": "none"}]


def test_without_access_control_no_web_page_sends_or_reads_messages() -> None:
    async def scenario(client: HttpClient) -> None:
        for headers in PAGES:
            for method, path, value, _ in REQUESTS:
                data = None if value is None else b"x"
                async with client.session.request(method, client.base + path, data=data, headers=headers) as response:
                    assert (response.status, (await response.json())["title"]) == (403, "FORBIDDEN"), headers
        for headers in PROGRAMS:
            async with client.session.post(client.base + SEND, data=b"x", headers=headers) as response:
                assert response.status == 200, headers

    with producers_of_fakes() as make:
        Gateway(make).run(scenario)


def test_with_access_control_a_web_page_needs_a_token(gateway: GuardedGateway) -> None:
    gateway.allow("shop", make_entry("Topic:orders", ["Pub"]))

    async def scenario(client: HttpClient) -> None:
        for user, status in (("", 401), (token("shop"), 200)):
            client.token = user
            assert (await client.post(SEND, {"body": "x"}, Origin="http://a.page.example"))[0] == status

    gateway.run(scenario)
