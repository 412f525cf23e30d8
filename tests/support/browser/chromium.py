"""Runs Chromium for tests. A page fails its test on every error or warning that a user's browser would report.

The browser is Debian's package `chromium`, or the executable that RAYMQ_CHROMIUM names. Playwright drives the browser.
A test waits for texts and roles on a page, never for a fixed time.
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
"""Timeout, in ms, of each wait for a text or an element on a web page in a browser test. Elements are found by their
ARIA role. A working page takes far less time."""
DESKTOP, PHONE = (1280, 900), (390, 844)
"""Window sizes of a desktop and of a phone: width and height, in CSS pixels."""


def chromium_path() -> str:
    """Return the path of the browser's executable. If no browser exists, the test is skipped, or fails if the variable
    CI is set."""
    path = os.environ.get("RAYMQ_CHROMIUM") or shutil.which("chromium")
    if path and Path(path).exists():
        return path
    reason = "no Chromium: apt-get install chromium, or name an executable in RAYMQ_CHROMIUM"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def launched() -> Iterator[Browser]:
    """Yield a running browser. The calling thread has an event loop while the browser runs, so a test must not call
    asyncio.run."""
    path = chromium_path()
    # Chromium's sandbox refuses to run as root, and a container's /dev/shm is too small for Chromium. Tests run in both
    # situations.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    with TemporaryDirectory(prefix="chromium") as home, sync_playwright() as playwright:
        # Use a temporary HOME, because Chromium stores files in HOME even if it has a separate profile directory.
        environment = {**os.environ, "HOME": home}
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
    """Yield a browser page with a new cookie store. Paths that the page opens are relative to `origin`.

    At the end of the block the test fails in four cases: the browser's console had a warning or an error, a script
    raised an error, a dialog opened, or the page requested something outside of the origin. A complaint that contains
    one of the `expected` texts is allowed.
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
