"""Sends requests to an ASGI application without a server, and keeps cookies as a browser does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

OWN_ORIGIN = "http://console.test"


@dataclass(frozen=True)
class Answer:
    """A response: its status, its headers with names in lower case, and its body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class AsgiClient:
    """A client that sends requests to an ASGI application one after another, in an event loop of its own, and keeps
    cookies."""

    def __init__(self, app: Any, *, host: str = "console.test", address: str = "10.0.0.1") -> None:
        self.app, self.host, self.address = app, host, address
        self.cookies: dict[str, str] = {}
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self._runner.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.request("GET", path, headers)

    def post(
        self, path: str, fields: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Post a form with the headers that a browser sends from the console's own page."""
        form = {"origin": f"http://{self.host}", "content-type": "application/x-www-form-urlencoded"}
        return self.request("POST", path, {**form, **(headers or {})}, urlencode(fields or {}).encode())

    def request(self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Answer:
        answer = self._runner.run(self._request(method, path, dict(headers or {}), body))
        for name, morsel in SimpleCookie(answer.headers.get("set-cookie", "")).items():
            self.cookies[name] = morsel.value
        return answer

    async def _request(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        parts = urlsplit(path)
        if self.cookies:
            headers["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        headers.setdefault("host", self.host)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(parts.path),
            "raw_path": parts.path.encode(),
            "root_path": "",
            "query_string": parts.query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": (self.address, 50_000),
            "server": (self.host, 80),
        }
        sent: list[dict[str, Any]] = []
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return received.pop(0) if received else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        try:
            await self.app(scope, receive, send)
        except Exception:
            # An error after the start of the response is not raised. Like a client of a real server, the test gets the
            # bytes that were sent before.
            if not sent:
                raise
        start = sent[0]
        found = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))
