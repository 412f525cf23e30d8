"""The web console as an ASGI application, which `create_app` builds. ConsoleServer serves this application with uvicorn
in a thread.

The actor `console` and the tests use both `create_app` and ConsoleServer. Ray Serve has its own web server, so it uses
only `create_app`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from raymq.common.errors import RaymqError
from raymq.tools.console.cluster import ConsoleCluster
from raymq.tools.console.pages.audit import AUDIT_ROUTES
from raymq.tools.console.pages.cluster import CLUSTER_ROUTES, OVERVIEW_ROUTES
from raymq.tools.console.pages.dead_letters import DEAD_LETTERS_ROUTES
from raymq.tools.console.pages.delayed import DELAYED_ROUTES
from raymq.tools.console.pages.groups import GROUPS_ROUTES, PRODUCERS_ROUTES
from raymq.tools.console.pages.login import LOGIN_ROUTES
from raymq.tools.console.pages.message import MESSAGE_ROUTES
from raymq.tools.console.pages.messages import MESSAGES_ROUTES, TAIL_ROUTES
from raymq.tools.console.pages.offsets import OFFSETS_ROUTES
from raymq.tools.console.pages.topics import TOPICS_ROUTES
from raymq.tools.console.security.gate import AuthMiddleware, SecurityHeaders
from raymq.tools.console.settings import ConsoleSettings
from raymq.tools.console.web.answers import console_error, http_error, raymq_error
from raymq.tools.console.web.console import Console
from raymq.tools.console.web.render import STATIC_DIRECTORY

FILES_KEPT_S: Final = 365 * 86_400
"""Seconds for which browsers may cache the console's static files. The address of a static file changes with its
content."""


def create_app(cluster: ConsoleCluster, settings: ConsoleSettings) -> ASGIApp:
    """Build the web console of one cluster as an ASGI application.

    While the application's lifespan runs, the console samples the cluster's metrics for its charts. If the server does
    not support lifespan, the charts are empty. Sessions are stored in the application object, so all requests must be
    sent to one process with one event loop.
    """
    console = Console(cluster, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Console]]:
        sampling = asyncio.create_task(console.sample_figures())
        try:
            # ConsoleServer takes the Console object from the state that Starlette's lifespan function yields here.
            yield {"console": console}
        finally:
            sampling.cancel()
            console.close()

    gate = Middleware(AuthMiddleware, settings=settings, sessions=console.sessions)
    app = Starlette(
        routes=console_routes(settings.base_path),
        middleware=[gate],
        exception_handlers={RaymqError: raymq_error, HTTPException: http_error, Exception: console_error},
        lifespan=lifespan,
    )
    app.state.console = console
    return SecurityHeaders(app)


def console_routes(base_path: str = "") -> list[BaseRoute]:
    """Return the routes of all pages and endpoints of the console."""
    routes: list[BaseRoute] = [
        Route("/healthz", healthz),
        Route("/favicon.ico", favicon),
        *LOGIN_ROUTES,
        *OVERVIEW_ROUTES,
        *MESSAGES_ROUTES,
        *TAIL_ROUTES,
        *MESSAGE_ROUTES,
        *DEAD_LETTERS_ROUTES,
        *DELAYED_ROUTES,
        *PRODUCERS_ROUTES,
        *AUDIT_ROUTES,
        *TOPICS_ROUTES,
        *GROUPS_ROUTES,
        *OFFSETS_ROUTES,
        *CLUSTER_ROUTES,
        Mount("/static", KeptFiles(directory=STATIC_DIRECTORY)),
    ]
    return [Mount(base_path, routes=routes)] if base_path else routes


async def healthz(request: Request) -> Response:
    """Respond "ok" while the console process runs. The pages show whether the cluster runs."""
    return PlainTextResponse("ok\n")


async def favicon(request: Request) -> Response:
    """Return the icon for browsers that request it at the fixed address /favicon.ico."""
    return FileResponse(STATIC_DIRECTORY / "favicon.svg", media_type="image/svg+xml")


class KeptFiles(StaticFiles):
    """Serves static files of the console, which browsers may cache."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Return a static file with a header that states how long browsers may cache it."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["Cache-Control"] = f"private, max-age={FILES_KEPT_S}, immutable"
        return response


CONSOLE_GRACE_S: Final = 5
"""Seconds that running requests get to finish when the console's server stops."""
CONSOLE_STOP_S: Final = 20.0


class ConsoleServer(uvicorn.Server):
    """The web server of the console. It serves on a socket that the caller has bound.

    When the server stops, it first ends the live tails. uvicorn waits for open connections, and a live tail never
    closes its connection by itself.
    """

    def __init__(self, app: ASGIApp, listening: socket.socket, **config: Any) -> None:
        """`listening`: the bound socket on which the server listens. `config`: further arguments of uvicorn.Config,
        such as ssl_certfile."""
        super().__init__(
            uvicorn.Config(app, lifespan="on", log_level="warning", timeout_graceful_shutdown=CONSOLE_GRACE_S, **config)
        )
        self._listening = listening
        self._thread = threading.Thread(
            target=self.run, kwargs={"sockets": [listening]}, name="console-server", daemon=True
        )

    def start(self) -> None:
        """Start serving in a new thread. Connections that arrive before the server is ready wait in the
        socket's queue."""
        self._listening.listen()
        self._thread.start()

    def stop(self) -> bool:
        """Stop the console's web server. Waits at most CONSOLE_STOP_S; returns False if the server still runs after
        that time."""
        self.should_exit = True
        self._thread.join(CONSOLE_STOP_S)
        return not self._thread.is_alive()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all live tails, then let uvicorn close the other connections."""
        console = self.lifespan.state.get("console")
        if console is not None:
            console.close_streams()
        await super().shutdown(sockets)
