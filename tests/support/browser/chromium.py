"""Chromium for tests, and pages that notice whatever a user's browser would complain about.

The browser is Debian's package `chromium`, or the executable that RAYMQ_CHROMIUM names; Playwright drives it. A test
waits for texts and roles, never for a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

WAIT_MS = 20_000
"""Bounds each wait for a text or a role; a page that works takes a small part of it."""
DESKTOP, PHONE = (1280, 900), (390, 844)
"""Widths and heights of windows, in CSS pixels."""


def chromium_path() -> str:
    """The browser's executable. Skips the test if there is none, and fails it where CI is set."""
    path = os.environ.get("RAYMQ_CHROMIUM") or shutil.which("chromium")
    if path and Path(path).exists():
        return path
    reason = "no Chromium: apt-get install chromium, or name an executable in RAYMQ_CHROMIUM"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser. While it is there, this thread has an event loop, so a test in it cannot call asyncio.run."""
    path = chromium_path()
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]  # tests run as root, in containers with a small /dev/shm
    with TemporaryDirectory(prefix="chromium") as home, sync_playwright() as playwright:
        environment = {**os.environ, "HOME": home}  # it keeps files there, also where it has a profile of its own
        browser = playwright.chromium.launch(executable_path=path, args=arguments, env=environment)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched_page(
    browser: Browser,
    origin: str,
    *,
    window: tuple[int, int] = DESKTOP,
    dark: bool = False,
    expected: Sequence[str] = (),
) -> Iterator[Page]:
    """A page of a browser without cookies, whose paths begin at `origin`.

    At its end the test fails if the browser's console had a warning or an error, a script raised, a dialog opened, or
    anything was asked for outside the origin; unless the complaint contains one of the `expected` texts.
    """
    troubles: list[str] = []
    width, height = window
    context = browser.new_context(
        base_url=origin,
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        accept_downloads=True,
    )
    context.set_default_timeout(WAIT_MS)

    def note_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            troubles.append(f"{message.type} at {message.location.get('url', '')}: {message.text}")

    def note_request(request: Request) -> None:
        if not request.url.startswith((f"{origin}/", "data:", "blob:")):
            troubles.append(f"asked for {request.url}")

    context.on("console", note_console)
    context.on("request", note_request)
    context.on("weberror", lambda error: troubles.append(f"raised {error.error}"))
    context.on("dialog", lambda dialog: (troubles.append(f"dialog {dialog.message!r}"), dialog.dismiss()))
    try:
        yield context.new_page()
    finally:
        context.close()
    unexpected = [trouble for trouble in troubles if not any(text in trouble for text in expected)]
    if unexpected:
        raise AssertionError("the browser complained: " + "; ".join(unexpected))
