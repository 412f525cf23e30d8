"""An HTTP client of a gateway in the test's own process. It checks answers against the gateway's OpenAPI document."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import jsonschema

from raymq.client.admin.live_tails import Positions, Tails
from raymq.client.admin.messages import Arrived
from raymq.common.errors import RaymqError
from raymq.common.message import MessageExt, MessageQueue
from raymq.gateway.clients.access import GatewayAccess
from raymq.gateway.front.certificates import CertificateFiles
from raymq.gateway.http.app import create_http_app
from raymq.gateway.http.server import HttpFront
from raymq.gateway.http.tasks import Histories, TaskWebhooks
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.service.route_calls import GatewayAddress
from raymq.gateway.service.service import GatewayService
from raymq.serve.states import TaskHistory
from tests.support.gateway.gateway_client import ANSWER_S, HOST

ROUND_S = 0.01


class FakeTail:
    """A topic whose messages a test adds. `read` is the function that live tails read with. `reads`: the number of
    reads. `failure`: the error of each read."""

    def __init__(self) -> None:
        self.messages: list[MessageExt] = []
        self.reads = 0
        self.failure: RaymqError | None = None
        self.queue = MessageQueue("orders", "a", 0)

    async def read(self, topic: str, positions: Positions | None, most: int) -> Arrived:
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        end = len(self.messages)
        start = end if positions is None else positions[self.queue]
        return Arrived(tuple(self.messages[start:end]), {self.queue: end})


class HttpClient:
    """Sends requests to the HTTP face. `base`: its address. `token`: the bearer token of all requests."""

    def __init__(self, session: aiohttp.ClientSession, base: str, service: GatewayService, front: HttpFront) -> None:
        self.session, self.base, self.service, self.front = session, base, service, front
        self.token = ""
        self.document: dict[str, Any] = {}

    def headers(self, more: Mapping[str, str]) -> dict[str, str]:
        return {**({"Authorization": f"Bearer {self.token}"} if self.token else {}), **more}

    async def post(self, path: str, value: Any, **headers: str) -> tuple[int, Any]:
        """Send JSON, and return the HTTP status and the JSON of the answer."""
        headers = {"content-type": "application/json", **headers}
        return await self.request("POST", path, json.dumps(value).encode(), **headers)

    async def request(self, method: str, path: str, data: bytes | None = None, **headers: str) -> tuple[int, Any]:
        async with self.session.request(
            method,
            self.base + path,
            data=None if data is None else io.BytesIO(data),
            headers=self.headers(headers),
            ssl=False,
        ) as response:
            answer = await response.json(content_type=None)
            self._check(method, path.partition("?")[0], response.status, response.content_type, answer)
            return response.status, answer

    def _check(self, method: str, path: str, status: int, kind: str, body: Any) -> None:
        """Check an answer against the document. Answers of paths that the document does not have are problems."""
        operations = [
            item[method.lower()]
            for template, item in self.document["paths"].items()
            if method.lower() in item and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path)
        ]
        answers = operations[0]["responses"] if operations else {}
        problem = {"content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}}
        described = answers.get(str(status)) or answers.get("default", problem)
        assert kind in described["content"], f"{method} {path} answered {status} {kind}"
        schema = {**described["content"][kind]["schema"], "components": self.document["components"]}
        jsonschema.Draft202012Validator(schema).validate(body)

    @asynccontextmanager
    async def events(self, path: str) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        """Open a stream of server-sent events, and yield the events with their JSON. Comments are left out, and the
        stream has begun."""
        async with self.session.get(self.base + path, headers=self.headers({}), ssl=False) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            assert (await response.content.readline()).startswith(b":")

            async def read() -> AsyncIterator[tuple[str, Any]]:
                name = ""
                async for line in response.content:
                    if line.startswith(b"event: "):
                        name = line[7:].strip().decode()
                    elif line.startswith(b"data: "):
                        yield name, json.loads(line[6:])

            yield read()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(ANSWER_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def http_served(
    cluster: GatewayCluster,
    read_tail: Callable[[str, Positions | None, int], Awaitable[Arrived]],
    histories: Histories = lambda results, task_id: TaskHistory(),
    *,
    access: GatewayAccess | None = None,
    tls: CertificateFiles | None = None,
    tails_max: int = 10,
    webhooks: TaskWebhooks | None = None,
) -> AsyncIterator[HttpClient]:
    """Serve the HTTP face of a gateway, and yield its client. At the end, the cluster is closed."""
    access = access or GatewayAccess(None)
    service = GatewayService(cluster, GatewayAddress(HOST, 0), access, time.monotonic)
    tails = Tails(read_tail, rate=1_000_000, max_viewers=tails_max, limit="the gateway", round_s=ROUND_S)
    front = HttpFront(create_http_app(service.handlers(), cluster, access, tails, histories, webhooks), tails)
    port = await front.start(HOST, 0, tls)
    try:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            base = f"{'http' if tls is None else 'https'}://{HOST}:{port}"
            client = HttpClient(session, base, service, front)
            async with session.get(base + "/v1/openapi.json", ssl=False) as response:
                client.document = await response.json()
            yield client
    finally:
        service.end_receives()
        await front.stop()
        await cluster.finish()
        cluster.close()
