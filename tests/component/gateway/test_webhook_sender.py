"""Tests of the HTTP requests of web hooks, on real connections to a server of the test's own process."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from raymq.common.config.webhook_hosts import WebhookHosts
from raymq.common.errors import ConfigError
from raymq.gateway.webhooks.event import event_body, event_headers, task_ended
from raymq.gateway.webhooks.sender import (
    CONNECTION,
    REFUSED,
    SECRET_BYTES_MAX,
    STATUS,
    TIMEOUT,
    WebhookFailedError,
    WebhookSender,
    read_keys,
)
from raymq.serve.states import StateRecord, TaskState
from tests.support.clients.lanes import make_certificates
from tests.support.gateway.gateway_client import HOST

EVENT = task_ended("jobs", StateRecord("hook-7", TaskState.SUCCESS, 7.0, result={"bytes": 9}))
KEY = b"a key of more than 16 bytes"
LOCAL = ["http://127.0.0.1", "http://hook.test"]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FixedResolver(AbstractResolver):
    """Resolves each host name to the next addresses of a list; the last ones stay. `asked`: the names."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        self.asked.append(host)
        addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            ResolveResult(hostname=host, host=one, port=port, family=2, proto=6, flags=4)  # AF_INET, TCP
            for one in addresses
        ]

    async def close(self) -> None:
        pass


class Receiver:
    """A server that keeps the requests that it gets. `answer`: answers each request."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

        async def accept(request: web.Request) -> web.StreamResponse:
            return web.Response(status=204)

        self.answer: Answer = accept

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path_qs, headers, await request.read()))
        return await self.answer(request)


@asynccontextmanager
async def received(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = web.Server(receiver.handle)
    listening = await asyncio.get_running_loop().create_server(server, HOST, 0, ssl=tls)
    receiver.port = listening.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        listening.close()
        await server.shutdown(1.0)


async def outcome(
    url: str, *, hosts: list[str] = LOCAL, resolver: AbstractResolver | None = None, timeout_s: float = 60.0
) -> str:
    """Call a web hook once, and return the reason of its failure, or an empty text."""
    sender = WebhookSender(
        WebhookHosts.parse(hosts), lambda: [KEY], resolver=resolver, timeout_s=timeout_s, now_s=lambda: 9.0
    )
    try:
        await sender.send(url, EVENT)
    except WebhookFailedError as error:
        # the path of a web hook may be a secret
        return error.reason if "secret-path" not in str(error) else str(error)
    finally:
        await sender.close()
    return ""


def test_an_accepted_call_has_the_body_and_its_signature() -> None:
    async def main() -> None:
        async with received() as receiver:
            assert await outcome(f"http://{HOST}:{receiver.port}/a%2Fb?x=1%202") == ""
        [(path, headers, body)] = receiver.requests
        assert (path, body) == ("/a%2Fb?x=1%202", event_body(EVENT))
        wanted = event_headers("hook-7-SUCCESS-7000", body, [KEY], 9.0)
        assert {name: headers[name] for name in wanted} == wanted

    asyncio.run(main())


def test_other_statuses_fail_and_redirects_are_not_followed() -> None:
    async def main() -> None:
        async with received() as receiver:
            for status in (301, 302, 307, 400, 410, 429, 500, 503):

                async def answer(request: web.Request, status: int = status) -> web.StreamResponse:
                    return web.Response(status=status, headers={"Location": f"http://{HOST}:{receiver.port}/other"})

                receiver.answer = answer
                assert await outcome(f"http://{HOST}:{receiver.port}/secret-path") == STATUS, status
        assert {path for path, _, _ in receiver.requests} == {"/secret-path"}
        assert len(receiver.requests) == 8

    asyncio.run(main())


def test_the_body_of_an_answer_is_not_read() -> None:
    async def main() -> None:
        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                while True:
                    await response.write(b"x" * 65_536)
            except ConnectionError:  # the caller has closed the connection
                return response

        async with received() as receiver:
            receiver.answer = endless
            assert await outcome(f"http://{HOST}:{receiver.port}/") == ""

    asyncio.run(main())


def test_a_call_without_an_answer_ends() -> None:
    async def main() -> None:
        async with received() as receiver:

            async def silent(request: web.Request) -> web.StreamResponse:
                await asyncio.Event().wait()
                raise AssertionError("unreachable")

            receiver.answer = silent
            assert await outcome(f"http://{HOST}:{receiver.port}/secret-path", timeout_s=0.5) == TIMEOUT
            port = receiver.port
        assert await outcome(f"http://{HOST}:{port}/secret-path") == CONNECTION, "nobody listens"

    asyncio.run(main())


def test_only_allowed_addresses_are_called() -> None:
    async def main() -> None:
        async with received() as receiver:
            url = f"http://hook.test:{receiver.port}/secret-path"
            named = FixedResolver([HOST])
            assert await outcome(url, resolver=named) == ""
            assert named.asked == ["hook.test"]
            # the name is allowed, but its address is the own machine, which no entry names
            assert await outcome(url, hosts=["http://hook.test"], resolver=FixedResolver([HOST])) == REFUSED
            # of two addresses only the allowed one is called
            mixed = FixedResolver(["169.254.169.254", HOST])
            assert await outcome(url, resolver=mixed) == ""
            # the setting may have changed since the task was sent
            for hosts in (["hooks.example.org"], ["hook.test", "127.0.0.1"]):
                assert await outcome(url, hosts=hosts, resolver=FixedResolver([HOST])) == REFUSED
            assert await outcome("gopher://hook.test/", resolver=FixedResolver([HOST])) == REFUSED
        assert len(receiver.requests) == 2

    asyncio.run(main())


def test_a_certificate_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)

    async def main() -> None:
        async with received(context) as receiver:
            assert await outcome(f"https://{HOST}:{receiver.port}/secret-path") == CONNECTION
        assert not receiver.requests

    asyncio.run(main())


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with received() as receiver, received() as proxy:
            monkeypatch.setenv("http_proxy", f"http://{HOST}:{proxy.port}")
            assert await outcome(f"http://{HOST}:{receiver.port}/") == ""
        assert (len(receiver.requests), len(proxy.requests)) == (1, 0)

    asyncio.run(main())


def test_the_secret_file_is_read_and_its_errors_name_it(tmp_path: Path) -> None:
    path = tmp_path / "hook-key"
    assert read_keys(None) == []
    path.write_bytes(KEY + b"\n")
    assert read_keys(path) == [KEY]
    for data in (b"\xff" * 32, b"k" * (SECRET_BYTES_MAX + 1)):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="hook-key"):
            read_keys(path)
    path.unlink()
    with pytest.raises(ConfigError, match="hook-key"):
        read_keys(path)


def test_a_sender_says_why_it_can_sign_no_call(tmp_path: Path) -> None:
    path = tmp_path / "hook-key"

    async def main() -> None:
        sender = WebhookSender(WebhookHosts.parse((HOST,)), lambda: read_keys(path))
        assert "hook-key, cannot be read" in sender.key_error()
        path.write_bytes(KEY)
        assert sender.key_error() == ""
        await sender.close()

    asyncio.run(main())
