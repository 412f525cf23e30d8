"""Runs Debian's Prometheus for tests: the programs `prometheus` and `promtool`, a server for one test, and a stand-in
for Ray's metrics exporter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PROMETHEUS_START_S = 60.0
ANSWER_S = 60.0


def program(name: str) -> str:
    """Return the path of the program `prometheus` or `promtool`. If the program is missing, the test is skipped; in CI,
    the test fails."""
    found = shutil.which(name)
    if found is None and os.environ.get("CI"):
        pytest.fail(f"{name} is not installed: .ci/run installs Debian's package prometheus")
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus)")
    return found


def check_with_promtool(*arguments: str) -> str:
    """Run promtool and return its output. Fails the test if promtool reports an error."""
    done = subprocess.run(
        [program("promtool"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


class Prometheus:
    """A running Prometheus server: its address, and methods that query the server."""

    def __init__(self, address: str) -> None:
        self.address = address

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current samples of a PromQL expression. Fails the test if Prometheus rejects the
        expression."""
        return list(self.ask("query", query=expression)["result"])

    def ask(self, path: str, **arguments: str) -> Any:
        """Send a request to a path below /api/v1/ of the Prometheus server, and return the `data` field of the
        response."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{arguments}: {error.read().decode()}")
        assert answer["status"] == "success", answer
        return answer["data"]


@contextmanager
def running_prometheus(config: str, directory: Path) -> Iterator[Prometheus]:
    """Run a Prometheus server with this configuration inside the block, on a free port of loopback. `directory`: an
    empty directory for the server's files."""
    path = directory / "prometheus.yml"
    path.write_text(config)
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={path}",
                f"--storage.tsdb.path={directory / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield Prometheus(_listening_at(process, log))
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listening_at(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address on which the Prometheus server listens. The address is read from the sockets of its
    process."""
    deadline_s = time.monotonic() + PROMETHEUS_START_S
    while time.monotonic() < deadline_s:
        text = log.read_text(errors="replace")
        if process.poll() is not None:
            pytest.fail(f"Prometheus has ended:\n{text}")
        if "Server is ready to receive web requests" in text:
            import psutil

            [port] = {c.laddr.port for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"}
            return f"127.0.0.1:{port}"
        time.sleep(0.05)
    pytest.fail(f"Prometheus did not start:\n{log.read_text(errors='replace')}")


@contextmanager
def exporter(page: Callable[[], str]) -> Iterator[str]:
    """Serve the text that `page` returns over HTTP, as the metrics port of a Ray node does. Yields the server's
    address, host:port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
