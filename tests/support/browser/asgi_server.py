"""Serves an ASGI application over loopback from a thread of the test's process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raymq.tools.console.app import ConsoleServer


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve `app` inside the block. Yields the server's origin, such as http://127.0.0.1:40123.

    Fails if the server does not end after the block, for example because a stream was not closed.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = ConsoleServer(app, listening)
        server.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            assert server.stop(), "the server did not end"
