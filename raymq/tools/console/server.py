"""ConsoleServer: uvicorn in a thread, for the actor `console` and for tests."""

from __future__ import annotations

import socket
import threading
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

CONSOLE_GRACE_S: Final = 5
"""Requests that are under way get so long to end when the server stops."""
CONSOLE_STOP_S: Final = 20.0


class ConsoleServer(uvicorn.Server):
    """A server of the console, on a socket that its caller has bound.

    Stopping it ends the live tails first: uvicorn waits for open connections, and those of tails end never.
    """

    def __init__(self, app: ASGIApp, listening: socket.socket, **config: Any) -> None:
        """`config`: further arguments of uvicorn.Config, such as ssl_certfile."""
        super().__init__(
            uvicorn.Config(app, lifespan="on", log_level="warning", timeout_graceful_shutdown=CONSOLE_GRACE_S, **config)
        )
        self._listening = listening
        self._thread = threading.Thread(
            target=self.run, kwargs={"sockets": [listening]}, name="console-server", daemon=True
        )

    def start(self) -> None:
        """Serve, in a thread of its own; connections that come before it is ready wait."""
        self._listening.listen()
        self._thread.start()

    def stop(self) -> bool:
        """Stop serving, within CONSOLE_STOP_S; True if it has stopped."""
        self.should_exit = True
        self._thread.join(CONSOLE_STOP_S)
        return not self._thread.is_alive()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then what uvicorn ends."""
        console = self.lifespan.state.get("console")
        if console is not None:
            console.close_streams()
        await super().shutdown(sockets)
