"""ASGI middleware in front of all routes of the console. It identifies the user, and refuses requests that the user may
not make.

    no user      pages lead to the login, /api/ and scripts get 401 or 403; only the login, its files and /healthz open
    a change     every method but GET and HEAD: by an admin, from a page of this origin, and not while `read_only`

A browser states the origin of a request in Sec-Fetch-Site; older browsers state it in Origin. A page of another site
cannot forge these headers. A script that sends a token with each request sends none of these headers, and no cookie
that another site could use.

Headers of every response: only the console's own scripts, styles and frames are allowed, browsers must not guess
content types, and responses are not cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raymq.common.errors import SystemBusyError
from raymq.tools.console.security.sessions import ConsoleUser, Role, Sessions
from raymq.tools.console.security.tokens import role_of_token
from raymq.tools.console.settings import ConsoleSettings

SESSION_COOKIE: Final = "raymq_session"
OPEN_PATHS: Final = ("/login", "/healthz", "/favicon.ico")
OWN_SESSION_PATHS: Final = ("/login", "/logout")
"""Paths on which a POST request changes only the user's own session. Viewers may use these paths, too."""
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_READS: Final = ("GET", "HEAD")


class AuthMiddleware:
    """Middleware that checks the user of each request. It stores the ConsoleUser in the request's scope as `user`; None
    on pages that need no login."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ConsoleSettings,
        sessions: Sessions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._settings = settings
        self._sessions = sessions
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            raise RuntimeError("the console does not support web sockets")
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refuse_host(scope) or self._admit(scope)
        await (refusal or self._app)(scope, receive, send)

    def _admit(self, scope: Scope) -> Response | None:
        """Store the user of a request in the request's scope. Returns the response if the request is refused or the
        user must log in; None if the request may continue."""
        connection = HTTPConnection(scope)
        path = scope["path"].removeprefix(self._settings.base_path) or "/"
        is_open = path in OPEN_PATHS or path.startswith("/static/")
        is_change = scope["method"] not in _READS
        if is_change and not from_own_page(connection.headers, scope["scheme"]):
            return _refused(
                "The console accepts changes only from its own pages; this change came from another site.", 403
            )
        user, refusal = self._user(connection)
        scope["user"] = user
        if refusal is not None and not is_open:
            return refusal
        if user is None and not is_open:
            return self._to_login(scope, path, connection.headers)
        if is_change and path not in OWN_SESSION_PATHS:
            return self._refuse_change(user)
        return None

    def _refuse_host(self, scope: Scope) -> Response | None:
        """Refuse requests for any host name except localhost if the console has no login. Otherwise another site could
        map its own host name to this machine's address, and use the console."""
        if not self._settings.open_to_all:
            return None
        parts = _parts_of(f"//{Headers(scope=scope).get('host', '')}")
        if parts is None or parts.hostname not in LOOPBACK_HOSTS:
            return _refused("A console without a login only answers requests to localhost.", 403)
        return None

    def _refuse_change(self, user: ConsoleUser | None) -> Response | None:
        if user is None or not user.is_admin:
            return _refused("Viewers cannot make changes; log in as an admin.", 403)
        if self._settings.read_only:
            return _refused("This console is read-only (console.read_only).", 403)
        return None

    def _user(self, connection: HTTPConnection) -> tuple[ConsoleUser | None, Response | None]:
        """Return the user of a request, or None if the request has no user. Also returns the response that refuses the
        request if its token is wrong."""
        address, now_s = address_of(connection), self._clock()
        kind, _, token = connection.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            settings = self._settings
            try:
                role = role_of_token(token.strip(), settings.is_admin, settings.viewer_token, settings.guarded)
            except SystemBusyError as error:
                return None, _refused(str(error), 429)
            if role is None:
                return None, _refused("This token is wrong.", 403)
            return ConsoleUser("script", role, address), None
        session = self._sessions.find(connection.cookies.get(SESSION_COOKIE, ""), now_s)
        if session is not None:
            return session.user, None
        return (ConsoleUser("everybody", Role.ADMIN, address) if self._settings.open_to_all else None), None

    def _to_login(self, scope: Scope, path: str, headers: Headers) -> Response:
        login = f"{self._settings.base_path}/login"
        if path.startswith("/api/"):
            return JSONResponse(
                {"error": "log in, or send Authorization: Bearer TOKEN"}, 401, {"WWW-Authenticate": "Bearer"}
            )
        # htmx requests a part of an open page: redirect the whole page to the login, and return to this page after the
        # login
        if headers.get("hx-request"):
            page = _parts_of(headers.get("hx-current-url", ""))
            login += (
                ""
                if page is None
                else self._next(unquote(page.path).removeprefix(self._settings.base_path), page.query)
            )
            return PlainTextResponse("Log in again.", 401, {"HX-Redirect": login})
        if scope["method"] not in _READS:
            return RedirectResponse(login, 303)
        return RedirectResponse(login + self._next(path, scope["query_string"].decode("latin-1")), 303)

    def _next(self, path: str, query: str) -> str:
        """Return the query string for the address of the login page. It makes the login page redirect to the requested
        page after the login. Empty if the overview page was requested."""
        page = f"{path}?{query}" if query else path
        return "" if page in ("", "/") else f"?next={quote(page, safe='')}"


def from_own_page(headers: Headers, scheme: str) -> bool:
    """Return True if a request to change something comes from a page of the console itself. Also True for a client that
    is not a browser and sends no cookie, and so has no session."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("origin")
    if origin is None:
        # The client is not a browser. Without a cookie, it has no session that another site could use.
        return headers.get("cookie") is None
    parts = _parts_of(origin)
    return parts is not None and parts.scheme in (scheme, "https") and parts.netloc == headers.get("host")


def _parts_of(address: str) -> SplitResult | None:
    """Split a URL that a client sent into its parts; returns None if the text is not a URL."""
    try:
        return urlsplit(address)
    except ValueError:
        return None


def address_of(connection: HTTPConnection) -> str:
    """Return the client's IP address; "" if the server cannot determine it."""
    return connection.client.host if connection.client is not None else ""


def _refused(text: str, status: int) -> Response:
    return PlainTextResponse(f"{text}\n", status)


CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class SecurityHeaders:
    """ASGI middleware that adds the security headers to each response of the console. Browsers must not cache a
    response, unless the response states how long it may be cached."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, send_with_headers)
