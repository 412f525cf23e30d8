"""Tests of the console's pages about topics, groups and the cluster, in a browser: with the keyboard, after a refresh,
and while no broker answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.protocol.stats import GroupTotals
from raymq.tools.console.web.history import ClusterFigures
from tests.support.browser.asgi_server import served
from tests.support.browser.chromium import DESKTOP, PHONE, watched_page
from tests.support.console.fake_cluster import NOW_MS, FakeCluster, topic_reading
from tests.support.console.logged_in import ADMIN_TOKEN, console_app

PAGES = {
    "/": "Overview",
    "/topics": "Topics",
    "/topics/orders": "orders",
    "/groups": "Groups",
    "/groups/billing": "billing",
    "/groups/billing/reset?topic=orders&to=earliest": "Reset offsets",
    "/cluster": "Cluster",
}


UNNAMED = """
all => all.filter(one => !one.textContent.trim() && !one.labels?.length && !one.ariaLabel).map(one => one.outerHTML)
"""
"""JavaScript function that returns the form fields, buttons and links that have no name for screen readers."""


class Served:
    """A console of a fake cluster in memory, with the console's origin (URL)."""

    def __init__(self, cluster: FakeCluster, app: Any, origin: str) -> None:
        self.cluster, self.app, self.origin = cluster, app, origin


@pytest.fixture(scope="module")
def served_console() -> Iterator[Served]:
    cluster = FakeCluster()
    rising = [
        ClusterFigures(
            NOW_MS + n * 10_000, n * 8_000, n * 7_900, n * 4_000_000, 2, 3, {"orders": n * n}, {"billing": n}
        )
        for n in range(61)
    ]
    cluster.errors["figures"] = RaymqError("the charts have samples of their own")
    app = console_app(cluster, refresh_s=0.8)
    for figures in rising:
        app._app.state.console.history.add(figures)
    with served(app) as origin:
        yield Served(cluster, app, origin)


def log_in(page: Page) -> None:
    """Log in with the keyboard only. Checks that the token field has the focus."""
    page.goto("/login")
    expect(page.get_by_label("Token")).to_be_focused()
    page.keyboard.type(ADMIN_TOKEN)
    page.keyboard.press("Tab")
    page.keyboard.type("Ada")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Overview").wait_for()


@pytest.mark.parametrize(("window", "dark"), [(DESKTOP, True), (PHONE, False)], ids=str)
def test_every_page_fits_its_window_without_a_complaint(
    browser: Browser, served_console: Served, window: tuple[int, int], dark: bool
):
    with watched_page(browser, served_console.origin, window=window, dark=dark) as page:
        log_in(page)
        for path, heading in PAGES.items():
            page.goto(path)
            page.get_by_role("heading", name=heading, exact=path != "/cluster", level=1).wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= window[0], path
            unnamed = page.locator("input:not([type=hidden]), select, button, a").evaluate_all(UNNAMED)
            assert unnamed == [], path


def test_charts_are_drawn(browser: Browser, served_console: Served):
    with watched_page(browser, served_console.origin) as page:
        log_in(page)
        for caption in ("Messages per second", "Bytes in per second"):
            expect(page.get_by_role("figure").filter(has_text=caption).locator("canvas")).to_be_visible()
        page.goto("/groups/billing")
        expect(page.get_by_role("figure").filter(has_text="Lag in messages").locator("canvas")).to_be_visible()
        page.goto("/topics")
        expect(page.get_by_role("row", name="orders").locator("svg")).to_be_visible()


def test_the_keyboard_reaches_the_content_and_sorts_a_table(browser: Browser, served_console: Served):
    with watched_page(browser, served_console.origin) as page:
        log_in(page)
        page.goto("/groups")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("main")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.get_by_role("searchbox", name="Filter groups")).to_be_focused()
        page.get_by_role("button", name="Lag").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("rowheader")).to_have_text(["billing", "search", "reports"])
        expect(page.get_by_role("columnheader", name="Lag")).to_have_attribute("aria-sort", "descending")
        page.keyboard.press("Enter")
        expect(page.get_by_role("rowheader")).to_have_text(["reports", "search", "billing"])
        page.get_by_role("searchbox", name="Filter groups").fill("BILL")
        expect(page.get_by_role("rowheader")).to_have_text(["billing"])


def test_a_topic_is_created_and_deleted(browser: Browser, served_console: Served):
    with watched_page(browser, served_console.origin) as page:
        log_in(page)
        page.goto("/topics")
        page.get_by_text("New topic").click()
        page.get_by_label("Name", exact=True).fill("a%b|c")
        page.get_by_role("button", name="Create topic").click()
        page.get_by_role("status").filter(has_text="Topic a%b|c is created.").wait_for()
        page.get_by_role("heading", name="a%b|c").wait_for()
        page.get_by_text("Delete topic", exact=True).click()
        page.get_by_label("Type the topic's name").fill("a%b|c")
        page.get_by_role("button", name="Delete topic and messages").click()
        page.get_by_role("status").filter(has_text="Topic a%b|c is deleted.").wait_for()
        assert "a%b|c" not in served_console.cluster.topics


def test_offsets_are_reset_after_a_preview(browser: Browser, served_console: Served):
    with watched_page(browser, served_console.origin) as page:
        log_in(page)
        page.goto("/groups/billing")
        page.get_by_text("Reset offsets", exact=True).click()
        page.get_by_label("Go on from").select_option("the earliest message")
        page.get_by_role("button", name="Preview reset").click()
        page.get_by_text("Nothing is changed yet.").wait_for()
        assert [name for name, _ in served_console.cluster.calls if name == "reset_offsets"] == []
        page.get_by_role("button", name="Reset offsets now").click()
        page.get_by_role("status").filter(has_text="continues in topic orders to earliest").wait_for()
        assert [name for name, _ in served_console.cluster.calls if name == "reset_offsets"] == ["reset_offsets"]


def test_a_line_reports_a_silent_cluster_and_vanishes_by_itself(browser: Browser, served_console: Served):
    cluster = served_console.cluster
    with watched_page(browser, served_console.origin) as page:
        log_in(page)
        page.get_by_text("All is well").wait_for()
        cluster.errors["cluster"] = ServiceNotAvailableError("no broker is registered")
        try:
            page.get_by_role("alert").filter(has_text="No answer from the cluster: no broker is registered").wait_for()
            expect(page.get_by_text("Not known now")).to_be_visible()
        finally:
            del cluster.errors["cluster"]
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.get_by_role("figure").first.locator("canvas")).to_be_visible()


def test_a_page_goes_to_the_login_when_its_session_has_ended(browser: Browser, served_console: Served):
    with watched_page(browser, served_console.origin, expected=["401"]) as page:
        log_in(page)
        sessions = served_console.app._app.state.console.sessions
        for cookie in page.context.cookies():
            sessions.end(cookie["value"])
        page.get_by_role("heading", name="Log in").wait_for()


def test_large_lists_are_shown_filtered_and_refreshed(browser: Browser):
    cluster = FakeCluster()
    cluster.topics = {f"t{n}": topic_reading(8, n, 1.0) for n in range(1_000)}
    cluster.groups = {f"g{n}": GroupTotals(lag=n, lag_ms=n) for n in range(2_000)}
    with served(console_app(cluster, refresh_s=0.5)) as origin, watched_page(browser, origin) as page:
        log_in(page)
        page.goto("/topics")
        page.get_by_text("1\u202f000 topics").wait_for()
        page.goto("/groups")
        page.get_by_text("2\u202f000 groups").wait_for()
        # Find the table rows with a CSS selector. Finding them by ARIA role would be too slow: a browser takes seconds
        # to compute the roles of 2,000 rows.
        shown = page.locator("#groups-table tbody tr:not([hidden]) th")
        page.get_by_label("Filter groups").fill("g1999")
        expect(shown).to_have_text(["g1999"])
        cluster.groups["g1999"] = GroupTotals(lag=77_777, lag_ms=1)
        expect(page.locator("#group-g1999")).to_contain_text("77\u202f777")
        expect(shown).to_have_text(["g1999"])
