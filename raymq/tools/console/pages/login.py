"""`/login`, `/logout`: begin a session of the console with a token, and end the session."""

from __future__ import annotations

import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raymq.common.errors import SystemBusyError
from raymq.tools.console.security.gate import SESSION_COOKIE, address_of
from raymq.tools.console.security.tokens import role_of_token
from raymq.tools.console.web.answers import page, redirect, set_session_cookie
from raymq.tools.console.web.changes import form_of
from raymq.tools.console.web.console import console_of, session_of

USER_NAME_MAX: Final = 60
LOGIN_FIELDS_MAX: Final = 10
LOGIN_FIELD_MAX_BYTES: Final = 8 * 1024
"""Maximum number of bytes of a field of the login form. Anybody may send this form, so the limit protects the console's
memory."""


async def show(request: Request) -> Response:
    """Show the login form. Users who are logged in already are redirected to the overview."""
    if session_of(request) is not None or console_of(request).settings.open_to_all:
        return redirect(request, "/")
    return page(request, "login.html", {"error": "", "next": _own_path(request.query_params.get("next", "/"))})


async def log_in(request: Request) -> Response:
    """Begin a session if the login form contains a correct token."""
    console, address, now_s = console_of(request), address_of(request), time.monotonic()
    form = await form_of(request, fields_max=LOGIN_FIELDS_MAX, field_max_bytes=LOGIN_FIELD_MAX_BYTES)
    then = _own_path(form.text("next", "/"))
    settings = console.settings
    try:
        role = role_of_token(form.text("token"), settings.is_admin, settings.viewer_token, settings.guarded)
    except SystemBusyError as error:
        return page(request, "login.html", {"error": str(error), "next": then}, status=429)
    if role is None:
        return page(request, "login.html", {"error": "This token is wrong.", "next": then}, status=403)
    session = console.sessions.begin(form.text("name", role)[:USER_NAME_MAX], role, address, now_s)
    response = redirect(request, then)
    set_session_cookie(request, response, session)
    return response


async def log_out(request: Request) -> Response:
    """End the user's session and show the login form."""
    console = console_of(request)
    if (session := session_of(request)) is not None:
        console.sessions.end(session.user.session)
    response = redirect(request, "/login")
    response.delete_cookie(SESSION_COOKIE, path=console.settings.base_path or "/")
    return response


def _own_path(path: str) -> str:
    """Return `path` if it is a path of the console, else "/". This prevents a redirect to another site after
    the login."""
    own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if own else "/"


LOGIN_ROUTES: Final = [
    Route("/login", show),
    Route("/login", log_in, methods=["POST"]),
    Route("/logout", log_out, methods=["POST"]),
]
