"""WebhookReceiver: an HTTP server that keeps the calls of web hooks; and the requests that send tasks to a gateway."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.gateway.gateway_client import HOST

WEBHOOK_ANSWER_S = 120.0


class WebhookReceiver:
    """An HTTP server that keeps the calls that it gets. `statuses`: the next answers; further calls are accepted.
    `silent`: task ids whose first call gets no answer until `release` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        self.silent: set[str] = set()
        self.release = threading.Event()
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, waits = receiver.take(headers, body)
                if waits:
                    receiver.release.wait(WEBHOOK_ANSWER_S)
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://{HOST}:{self._server.server_address[1]}/hook"

    def take(self, headers: dict[str, str], body: bytes) -> tuple[int, bool]:
        """Keep a call, and return the status of its answer, and whether the answer waits."""
        task = json.loads(body)["data"]["id"]
        with self._lock:
            self.calls.append((headers, body))
            waits = task in self.silent
            self.silent.discard(task)
            return self.statuses.pop(0) if self.statuses else 204, waits

    def of(self, task: str) -> list[tuple[dict[str, str], dict[str, Any]]]:
        """Return the calls about a task: the headers, and the event's data."""
        with self._lock:
            calls = [(headers, json.loads(body)["data"]) for headers, body in self.calls]
        return [one for one in calls if one[1]["id"] == task]

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def webhook_receiver() -> Iterator[WebhookReceiver]:
    found = WebhookReceiver()
    try:
        yield found
    finally:
        found.close()


def send_task(http: str, queue: str, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, Any]:
    """Send a task to the gateway whose HTTP address is `http`. Returns the status and the JSON of the answer. `fields`:
    of the task."""
    body = json.dumps({"queue": queue, **fields}).encode()
    named = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(f"http://{http}/v1/tasks", body, named, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=WEBHOOK_ANSWER_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
