"""HttpFront serves the HTTP face with uvicorn, in the running event loop.

Connections, headers and idle connections are bounded. The addresses in forwarding headers are ignored, because a user's
policies may name the addresses from which the user comes, and anybody can write a header.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from raymq.client.admin.live_tails import Tails
from raymq.common.errors import ServiceNotAvailableError
from raymq.gateway.front.certificates import CertificateFiles

HTTP_CONNECTIONS_MAX: Final = 1000
"""Maximum number of open connections and running requests. Others are answered 503."""
HTTP_HEADERS_BYTES_MAX: Final = 16 * 1024
HTTP_IDLE_S: Final = 60
"""Time in seconds after which a connection without a request is closed."""
HTTP_STOP_S: Final = 5
"""Time in seconds that running requests get to finish when the server stops."""
_BACKLOG: Final = 512


class HttpFront:
    """An HTTP server. `start` opens the port, `stop` closes it. One object serves once."""

    def __init__(self, app: ASGIApp, tails: Tails, *, shares_port: bool = False) -> None:
        """`tails`: the live tails of the application, which end before the server stops. `shares_port`: True if several
        processes of the same user listen at one port, and share its connections."""
        self._app, self._tails, self._shares_port = app, tails, shares_port
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, tls: CertificateFiles | None = None) -> int:
        """Listen at `host` and `port`, and return the port. `port` 0: any free port. `tls`: the files of the server's
        certificate; None for connections without encryption. New connections use a changed certificate.

        Raises ServiceNotAvailableError if the address cannot be used, and ConfigError if the certificate cannot be
        used.
        """
        context = None if tls is None else tls.context()
        listening = _listening(host, port, reuse_port=self._shares_port)
        config = uvicorn.Config(
            self._app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=HTTP_CONNECTIONS_MAX,
            timeout_keep_alive=HTTP_IDLE_S,
            timeout_graceful_shutdown=HTTP_STOP_S,
            h11_max_incomplete_event_size=HTTP_HEADERS_BYTES_MAX,
            ssl_context_factory=None if context is None else lambda config, default: context,
        )
        self._server = server = _Server(config)
        self._serving = asyncio.create_task(server.serve([listening]))
        ready = asyncio.create_task(server.ready.wait())
        try:
            await asyncio.wait((self._serving, ready), return_when=asyncio.FIRST_COMPLETED)
            if self._serving.done():
                listening.close()
                self._serving.result()
        finally:
            ready.cancel()
        opened: int = listening.getsockname()[1]
        return opened

    async def stop(self) -> None:
        """Refuse new connections, end the live tails, wait up to HTTP_STOP_S for running requests, then end them.
        Idempotent."""
        self._tails.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


class _Server(uvicorn.Server):
    """A server that leaves the process's signals to the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listening(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)
    except OSError as error:
        raise ServiceNotAvailableError(
            f"the gateway cannot listen at {host}, port {port}: {error.strerror or error}; see gateway.host and "
            "gateway.http_port"
        ) from None
