"""Serves the console of a FakeCluster over HTTP, for tests with a browser."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Browser, Page

from raymq.tools.console.security.gate import SESSION_COOKIE
from raymq.tools.console.security.sessions import Role
from raymq.tools.console.web.console import Console
from tests.support.browser.asgi_server import served
from tests.support.browser.chromium import DESKTOP, watched_page
from tests.support.console.fake_cluster import FakeCluster
from tests.support.console.logged_in import console_app


@dataclass(frozen=True)
class ServedConsole:
    """A console that a server serves at the URL `origin`."""

    cluster: FakeCluster
    console: Console
    origin: str

    @contextmanager
    def page(
        self,
        browser: Browser,
        *,
        role: Role | None = Role.ADMIN,
        name: str = "mira",
        window: tuple[int, int] = DESKTOP,
        dark: bool = False,
        expected: Sequence[str] = (),
    ) -> Iterator[Page]:
        """Yield a page of the console, on which a user with `role` is logged in. If `role` is None, nobody is logged
        in."""
        with watched_page(browser, self.origin, window=window, dark=dark, expected=expected) as page:
            if role is not None:
                session = self.console.sessions.begin(name, role, "127.0.0.1", time.monotonic()).user.session
                page.context.add_cookies([{"name": SESSION_COOKIE, "value": session, "url": self.origin}])
            yield page


@contextmanager
def serving(cluster: FakeCluster, **settings: Any) -> Iterator[ServedConsole]:
    """Serve the console of a FakeCluster inside the block. The console accepts the tokens of `console_app`."""
    app = console_app(cluster, **settings)
    with served(app) as origin:
        yield ServedConsole(cluster, app._app.state.console, origin)
