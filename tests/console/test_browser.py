"""Tests of the browser fixture: it fails a test if a page has a problem, such as a script error. The other console
tests depend on this check."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tests.support.browser.asgi_server import served
from tests.support.browser.chromium import watched_page

PAGES = {
    "good": "<h1>good</h1>",
    "raises": "<h1>raises</h1><script>nothing.there</script>",
    "complains": "<h1>complains</h1><script>console.error('of something')</script>",
    "elsewhere": "<h1>elsewhere</h1><img alt='' src='http://127.0.0.1:9/pixel.png'>",
    "asks": "<h1>asks</h1><script>alert('hello')</script>",
    "policy": "<h1>policy</h1><p style='color: red'>red</p>",
    "missing": "<h1>missing</h1><img alt='' src='/nothing.png'>",
}


async def page_of(request: Request) -> Response:
    """Return the requested page. The page "policy" has a Content-Security-Policy that forbids inline styles, as the
    console's pages have."""
    name = request.path_params["name"]
    policy = {"Content-Security-Policy": "default-src 'self'"} if name == "policy" else {}
    icon = '<link rel="icon" href="data:,">'
    return HTMLResponse(f"<!doctype html><html lang='en'>{icon}{PAGES[name]}</html>", headers=policy)


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with served(Starlette(routes=[Route("/page/{name}", page_of)])) as origin:
        yield origin


def visit(browser: Browser, origin: str, name: str) -> None:
    with watched_page(browser, origin) as page:
        page.goto(f"/page/{name}")
        page.get_by_role("heading", name=name).wait_for()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("raises", "nothing is not defined"),
        ("complains", "of something"),
        ("elsewhere", "asked for http://127.0.0.1:9/pixel.png"),
        ("asks", "dialog 'hello'"),
        ("policy", "Content Security Policy"),
        ("missing", "404"),
    ],
)
def test_a_complaint_of_the_browser_fails_the_test(browser: Browser, origin: str, name: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        visit(browser, origin, name)


def test_a_page_without_complaints_passes(browser: Browser, origin: str) -> None:
    visit(browser, origin, "good")
