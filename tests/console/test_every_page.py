"""Tests of every page of the console: on a desktop and on a phone, with the keyboard only, and with hostile text in
every field."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote, urlencode

from playwright.sync_api import Browser, Page, expect
from starlette.routing import Mount, Route

from raymq.tools.console.app import console_routes
from tests.support.browser.chromium import DESKTOP, PHONE
from tests.support.console.fake_cluster import FakeCluster
from tests.support.console.hostile import FOREIGN, NAME, XSS, HostileCluster
from tests.support.console.logged_in import ADMIN_TOKEN
from tests.support.console.served_console import serving

PLACE = "broker-a:0:1"
NO_PAGES = ("/api/", "/healthz", "/favicon.ico", "/static", "/export", "/events", "/track", "/messages/body")
"""Parts of URL paths of the console under which no web page is returned, but for example data or a file."""
PARAMETERS = {
    "/messages": {"topic": "TOPIC", "offset": PLACE},
    "/groups/{group}/reset": {"topic": "TOPIC", "to": "earliest"},
    "/groups/{group}/copy": {"topic": "TOPIC", "source": "GROUP"},
}
"""For some pages, by path: query parameters without which the page would show little."""
IS_WIDER = "document.scrollingElement.scrollWidth > document.documentElement.clientWidth"
NAMELESS = """[...document.querySelectorAll('input:not([type=hidden]), select, textarea, button, a')]
    .filter(one => !one.labels?.length && !one.textContent.trim() && !one.ariaLabel).map(one => one.outerHTML)"""


def page_routes() -> Iterator[str]:
    """Yield the paths of all pages of the console, as its router lists them."""
    for route in console_routes():
        if isinstance(route, Route) and "GET" in (route.methods or ()) and not any(x in route.path for x in NO_PAGES):
            yield route.path
        else:
            assert isinstance(route, Route | Mount)


def address(path: str, topic: str, group: str) -> str:
    """Return the URL of the page at `path` for a topic and a group."""
    query = {n: v.replace("TOPIC", topic).replace("GROUP", group) for n, v in PARAMETERS.get(path, {}).items()}
    path = path.replace("{topic}", quote(topic, safe="")).replace("{group}", quote(group, safe=""))
    return f"{path}?{urlencode(query)}" if query else path


def visit(page: Page, path: str, topic: str, group: str) -> None:
    answer = page.goto(address(path, topic, group))
    assert answer is not None
    assert answer.status == 200, (path, answer.text())
    page.get_by_role("heading", level=1).wait_for()


def test_the_router_has_the_pages_that_are_visited_here() -> None:
    pages = set(page_routes())
    assert {"/", "/login", "/topics/{topic}/tail", "/groups/{group}/dead-letters", "/audit", "/cluster"} <= pages
    assert set(PARAMETERS) <= pages


def test_every_page_fits_its_window_and_every_control_has_a_name(browser: Browser) -> None:
    with serving(FakeCluster()) as served, served.page(browser) as page:
        for path in page_routes():
            visit(page, path, "orders", "billing")
            assert page.evaluate(NAMELESS) == [], path
            expect(page.get_by_role("main")).to_have_count(1)
            for width, height in (PHONE, DESKTOP):
                page.set_viewport_size({"width": width, "height": height})
                assert not page.evaluate(IS_WIDER), f"{path} is wider than {width} px"


def test_no_page_runs_or_renders_hostile_texts(browser: Browser) -> None:
    with serving(HostileCluster()) as served, served.page(browser, name=XSS[1]) as page:
        for path in page_routes():
            visit(page, path, NAME, NAME)
            expect(page.locator(FOREIGN)).to_have_count(0)
            assert "49" not in page.title()
            if path == "/messages":
                page.get_by_role("table", name="Groups and this message").wait_for()
                expect(page.locator(FOREIGN)).to_have_count(0)


def test_login_and_navigation_work_without_a_mouse(browser: Browser) -> None:
    with serving(FakeCluster()) as served, served.page(browser, role=None) as page:
        page.goto("/topics")
        expect(page.get_by_label("Token")).to_be_focused()
        page.keyboard.type(ADMIN_TOKEN)
        page.keyboard.press("Tab")
        page.keyboard.type("mira")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Topics").wait_for()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("main")).to_be_focused()
        link = page.get_by_role("link", name="orders", exact=True)
        link.focus()
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="orders").wait_for()
