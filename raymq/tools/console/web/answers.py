"""HTTP responses of the console: pages, parts of pages, and error pages.

A page that refreshes itself has a template block `live`. The response to a request by htmx contains only this block.
"""

from __future__ import annotations

import time
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

from raymq.common.errors import (
    BodyUnreadableError,
    GroupNotExistError,
    IllegalNameError,
    InvalidArgumentError,
    TopicNotExistError,
)
from raymq.tools.console.security.gate import SESSION_COOKIE
from raymq.tools.console.security.sessions import SESSION_LIFE_S, ConsoleUser, Session
from raymq.tools.console.web.console import console_of, notify, session_of
from raymq.tools.console.web.texts import sentence

LIVE_BLOCK: Final = "live"
ERROR_TITLES: Final = {404: "Not found", 503: "No answer"}
_STATUS: Final = (
    (TopicNotExistError, 404),
    (GroupNotExistError, 404),
    (IllegalNameError, 400),
    (InvalidArgumentError, 400),
    (BodyUnreadableError, 422),
)


def page(request: Request, template: str, values: dict[str, Any] | None = None, *, status: int = 200) -> Response:
    """Render a page's template with `values`, or only its block `live` if htmx sent the request. Templates can also use
    `user`, `path` (below the base path), `now_ms`, `notices`, `settings` and `may_change`."""
    console = console_of(request)
    user: ConsoleUser | None = request.scope.get("user")
    is_live = is_part(request) and console.renderer.has_block(template, LIVE_BLOCK)
    block = LIVE_BLOCK if is_live else ""
    session = session_of(request)
    new_session = None
    if session is None and user is not None and console.settings.open_to_all:
        session = new_session = console.sessions.begin(user.name, user.role, user.address, time.monotonic())
    notices = session.notices if session is not None and not block else []
    text = console.renderer.render(
        template,
        {
            "user": user,
            "path": request.url.path.removeprefix(console.settings.base_path) or "/",
            "now_ms": time.time_ns() // 1_000_000,
            "notices": notices,
            "settings": console.settings,
            "may_change": user is not None and user.is_admin and not console.settings.read_only,
            **(values or {}),
        },
        block,
    )
    if session is not None and not block:
        session.notices = []
    response = HTMLResponse(text, status)
    if new_session is not None:
        set_session_cookie(request, response, new_session)
    return response


def is_part(request: Request) -> bool:
    """Return True if htmx requests a part of a page that is already open in the browser."""
    return "hx-request" in request.headers


def wants_json(request: Request) -> bool:
    """Return True if the client is a script that expects JSON: the path is below /api/, or the Accept header requests
    JSON."""
    path = request.url.path.removeprefix(console_of(request).settings.base_path)
    return path.startswith("/api/") or request.headers.get("accept", "").startswith("application/json")


def redirect(request: Request, path: str) -> Response:
    """Redirect the browser to the page `path` of the console, with the method GET."""
    return RedirectResponse(console_of(request).settings.base_path + path, 303)


def refused(request: Request, error: InvalidArgumentError, path: str) -> Response:
    """Redirect the browser to the page `path` with the form, which then shows the error. A script gets the error as
    JSON with status 400."""
    if wants_json(request):
        return JSONResponse({"outcome": str(error)}, 400)
    notify(request, "failed", sentence(str(error)))
    return redirect(request, path)


def set_session_cookie(request: Request, response: Response, session: Session) -> None:
    """Store the session's id in a cookie of the browser. Scripts cannot read this cookie, and other sites cannot send
    it."""
    settings = console_of(request).settings
    response.set_cookie(
        SESSION_COOKIE,
        session.user.session,
        max_age=int(SESSION_LIFE_S),
        path=settings.base_path or "/",
        secure=settings.secure,
        httponly=True,
        samesite="strict",
    )


async def raymq_error(request: Request, error: Exception) -> Response:
    """Show the error page for a RaymqError: its text, and a link to try again."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 503)
    return _error_page(request, status, str(error))


async def console_error(request: Request, error: Exception) -> Response:
    """Show the error page for a failure of the console itself. The server logs the failure. The page contains no
    details of it."""
    return _error_page(request, 500, "The console failed; its log has the details.")


async def http_error(request: Request, error: Exception) -> Response:
    """Show the error page for a path that does not exist, or a method that the path does not allow."""
    assert isinstance(error, HTTPException)
    text = "This page does not exist." if error.status_code == 404 else error.detail
    return _error_page(request, error.status_code, text)


def _error_page(request: Request, status: int, text: str) -> Response:
    if wants_json(request):
        return JSONResponse({"error": text}, status)
    if is_part(request):
        return PlainTextResponse(text, status)
    return page(
        request,
        "error.html",
        {"title": ERROR_TITLES.get(status, "The request failed"), "text": sentence(text)},
        status=status,
    )
