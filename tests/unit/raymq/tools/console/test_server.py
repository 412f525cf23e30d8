"""Tests of shutting down the console's server, over real sockets, while a live view of messages (tail) is open."""

from __future__ import annotations

import http.client
import socket

from raymq.tools.console.app import ConsoleServer
from tests.support.console.fake_cluster import FakeCluster, fake_message
from tests.support.console.logged_in import ADMIN_TOKEN, console_app

WAIT_S = 30.0


def read_until(answer: http.client.HTTPResponse, wanted: bytes) -> None:
    """Read lines of a response until a line begins with `wanted`. Fails at the end of the response."""
    while not (line := answer.readline()).startswith(wanted):
        assert line, f"the stream ended before {wanted!r}"


def test_a_server_that_stops_ends_the_open_tails() -> None:
    cluster = FakeCluster()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = ConsoleServer(console_app(cluster, tail_rate=50), listening)
        server.start()
        connection = http.client.HTTPConnection(*listening.getsockname(), timeout=WAIT_S)
        try:
            headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
            connection.request("GET", "/topics/orders/tail/events", headers=headers)
            answer = connection.getresponse()
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-accel-buffering"] == "no"
            read_until(answer, b": connected")
            # Wait for the live tail's first event before a message is sent, because the tail shows only messages that
            # arrive after this event.
            read_until(answer, b"event: messages")
            cluster.messages["orders"].append(fake_message(body=b"new"))
            read_until(answer, b"event: messages")
            assert server.stop()
            assert b"new" in answer.read()
        finally:
            connection.close()
            server.stop()
