"""Tests of messages in the console with a browser: searched, opened, sent, tailed, replayed and recalled. The tests
find page elements only by role and name."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from raymq.client.admin.dead_letters import DeadLetter
from raymq.common.errors import RequestTimeoutError
from raymq.tools.console.security.sessions import Role
from tests.support.browser.chromium import PHONE
from tests.support.console.fake_cluster import FakeCluster, fake_message
from tests.support.console.hostile import ALL_XSS, FOREIGN, XSS_BODY, HostileCluster, hostile_message
from tests.support.console.served_console import ServedConsole, serving

ONE = "/messages?topic=orders&offset=broker-a%3A0%3A3"
FOUR_MIB = 4 * 1024 * 1024


def cells(page: Page, table: str, row: int) -> list[str]:
    """Return the texts of the cells in a row of a table. Row 0 is the table's header."""
    return page.get_by_role("table", name=table).get_by_role("row").nth(row).get_by_role("cell").all_inner_texts()


def test_a_search_continues_after_its_first_page_and_opens_a_message(browser: Browser, served: ServedConsole) -> None:
    with served.page(browser) as page:
        page.goto("/topics/orders")
        page.get_by_role("link", name="Messages").last.click()
        page.get_by_text("50 messages, 50 scanned, truncated").wait_for()
        page.get_by_role("link", name="Go on behind these").click()
        page.get_by_text("10 messages, 10 scanned.").wait_for()
        page.get_by_role("textbox", name="Text in the body").fill('"order": 41}')
        page.keyboard.press("Enter")
        page.get_by_text("1 message, 1 scanned.").wait_for()
        page.get_by_role("link", name="broker-a:1:20").click()
        page.get_by_role("heading", name="Message broker-a:1:20").wait_for()
        page.get_by_role("cell", name="waits for its third attempt").wait_for()
        assert page.get_by_label("Body", exact=True).inner_text() == '{\n  "order": 41\n}'
        page.get_by_role("link", name="Hex").click()
        expect(page.get_by_label("Body", exact=True)).to_contain_text("00000000  7b 22 6f 72")


def test_an_invalid_search_shows_an_error_and_keeps_its_fields(browser: Browser, served: ServedConsole) -> None:
    with served.page(browser) as page:
        page.goto("/topics/orders/messages")
        page.get_by_role("combobox", name="Show").select_option("in a time range")
        page.get_by_role("textbox", name="From (UTC)").fill("<yesterday>")
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_role("alert")).to_contain_text("'<yesterday>' is not a time")
        expect(page.get_by_role("textbox", name="From (UTC)")).to_have_value("<yesterday>")


def test_a_key_finds_its_message_and_it_is_sent_again_edited(browser: Browser, served: ServedConsole) -> None:
    with served.page(browser, window=PHONE) as page:
        page.goto("/messages")
        page.get_by_role("textbox", name="Topic").fill("orders")
        page.get_by_role("textbox", name="Key").fill("k7")
        page.get_by_role("button", name="Find").click()
        page.get_by_role("heading", name="Message broker-a:1:3").wait_for()
        page.get_by_text("Send again", exact=True).first.click()
        page.get_by_role("textbox", name="To topic").fill("payments")
        page.get_by_role("checkbox", name="Send the body as edited here").check()
        page.get_by_role("textbox", name="Edited body").fill("two\nlines")
        page.get_by_role("button", name="Send again").click()
        expect(page.get_by_role("status").first).to_contain_text("of topic payments is at broker-a:0:1000")
    assert served.cluster.messages["payments"][0].body == b"two\nlines"


def test_a_command_is_copied_or_marked(browser: Browser, served: ServedConsole) -> None:
    with served.page(browser) as page:
        page.goto(ONE)
        button = page.get_by_role("button", name="Copy: show it")
        button.click()
        page.get_by_text("Copied").or_(page.get_by_text("Marked")).wait_for()


@pytest.mark.parametrize("body", [XSS_BODY, ALL_XSS.encode(), b"\x00\xff<script>alert(1)</script>", b"<" * FOUR_MIB])
def test_any_body_is_shown_and_downloaded_whole(browser: Browser, body: bytes, tmp_path: Path) -> None:
    cluster = FakeCluster()
    cluster.messages["orders"] = [fake_message("orders", body, queue_offset=3)]
    with serving(cluster) as served, served.page(browser) as page:
        page.goto(ONE)
        page.get_by_label("Body", exact=True).wait_for()
        expect(page.locator(FOREIGN)).to_have_count(0)
        expect(page.get_by_text("Cut")).to_have_count(1 if len(body) == FOUR_MIB else 0)
        with page.expect_download() as download:
            page.get_by_role("link", name="Download").click()
        download.value.save_as(tmp_path / "body")
    assert (tmp_path / "body").read_bytes() == body


def test_a_tail_shows_new_messages_can_be_paused_and_is_shared(browser: Browser, served: ServedConsole) -> None:
    messages = served.cluster.messages["orders"]
    with served.page(browser) as first, served.page(browser, role=Role.VIEWER) as second:
        for page in (first, second):
            page.goto("/topics/orders/tail")
            page.get_by_text("Live, 0 shown").wait_for()
        messages += [fake_message(body=b"one", queue_offset=100), fake_message(body=b"two", queue_offset=101)]
        for page in (first, second):
            page.get_by_text("Live, 2 shown").wait_for()
        first.get_by_role("button", name="Pause").click()
        messages.append(fake_message(body=b"three", queue_offset=102))
        second.get_by_text("Live, 3 shown").wait_for()
        first.get_by_text("Paused, 1 new").wait_for()
        table = "Messages as they arrive, newest first"
        assert cells(first, table, 1)[-1] == "two"
        first.get_by_role("button", name="Go on").click()
        first.get_by_text("Live, 3 shown").wait_for()
        assert cells(first, table, 1)[1:] == ["broker-a:0:102", "paid", "k1", "three"]
        assert served.console.tails.viewers == 2
        first.get_by_role("link", name="broker-a:0:102").click()
        first.get_by_role("heading", name="Message broker-a:0:102").wait_for()


def test_a_tail_filters_counts_skipped_messages_and_shows_errors(browser: Browser) -> None:
    cluster = FakeCluster()
    with serving(cluster, tail_rate=5) as served, served.page(browser) as page:
        page.goto("/topics/orders/tail")
        page.get_by_role("textbox", name="Tags").fill("paid || lost")
        page.get_by_role("textbox", name="Text in the body").fill("x")
        page.get_by_role("button", name="Filter").click()
        page.get_by_text("Live, 0 shown").wait_for()
        cluster.messages["orders"] += [fake_message(body=b"y"), fake_message(body=b"x", tags="other")]
        cluster.messages["orders"] += [fake_message(body=b"xx", queue_offset=200 + n) for n in range(50)]
        page.get_by_text("47 skipped").wait_for()
        page.get_by_text("Live, 5 shown").wait_for()
        cluster.errors["tail"] = RequestTimeoutError("<b>broker-a</b>", 5.0)
        expect(page.get_by_role("alert")).to_contain_text("<b>broker-a</b>")


def test_a_tail_shows_hostile_messages_as_text(browser: Browser) -> None:
    cluster = HostileCluster()
    cluster.messages["orders"] = []
    with serving(cluster) as served, served.page(browser) as page:
        page.goto("/topics/orders/tail")
        page.get_by_text("Live, 0 shown").wait_for()
        cluster.messages["orders"].append(hostile_message(7))
        page.get_by_text("Live, 1 shown").wait_for()
        assert cells(page, "Messages as they arrive, newest first", 1)[-1].startswith("<script>alert(1)</script>")
        expect(page.locator(FOREIGN)).to_have_count(0)


def test_a_tail_with_too_many_viewers_is_refused_with_a_message(browser: Browser) -> None:
    with serving(FakeCluster(), max_viewers=1) as served, served.page(browser) as first, served.page(browser) as second:
        first.goto("/topics/orders/tail")
        first.get_by_text("Live, 0 shown").wait_for()
        second.goto("/topics/payments/tail")
        expect(second.get_by_role("alert")).to_contain_text("max_viewers (1) allows")


def test_chosen_dead_letters_are_replayed_with_progress(browser: Browser, served: ServedConsole) -> None:
    cluster, gate = served.cluster, threading.Event()
    cluster.letters["billing"] = [
        DeadLetter(fake_message("%DLQ%billing", queue_offset=n), "orders", False) for n in range(5)
    ]
    cluster.gates["replay_dead_letters"] = gate
    with served.page(browser) as page:
        page.goto("/groups/billing/dead-letters")
        for place in ("broker-a:0:1", "broker-a:0:3"):
            page.get_by_role("checkbox", name=f"Choose {place}").check()
        page.get_by_role("textbox", name="At most per second").fill("50")
        page.get_by_role("button", name="Replay chosen").click()
        page.get_by_text("running").wait_for()
        page.get_by_text("0 brought back, 0 failed of 2, at most 50.0 per second; begun by mira").wait_for()
        gate.set()
        page.get_by_text("2 brought back, 0 failed").wait_for()
        assert cells(page, "Results, newest first", 1) == ["broker-a:0:3", "brought back"]
        page.get_by_role("link", name="Dead letters").last.click()
        page.get_by_role("link", name="Also replayed ones").click()
        expect(page.get_by_role("checkbox", name="Choose broker-a:0:3")).to_be_disabled()
        expect(page.get_by_role("checkbox", name="Choose broker-a:0:2")).to_be_enabled()


def test_a_delayed_message_is_recalled_and_the_audit_names_the_user(browser: Browser, served: ServedConsole) -> None:
    with served.page(browser) as page:
        page.goto("/delayed")
        page.get_by_role("button", name="Recall").first.click()
        expect(page.get_by_role("status")).to_contain_text("will not be delivered")
        page.get_by_role("link", name="Audit").click()
        row = cells(page, "Changes, newest first", 1)
        assert row[1].startswith("mira")
        assert "orders" in row[3]


def test_a_session_that_has_ended_asks_for_the_login_and_comes_back(browser: Browser, served: ServedConsole) -> None:
    with served.page(browser) as page:
        page.goto(ONE)
        page.get_by_role("cell", name="waits for its third attempt").wait_for()
        served.console.sessions.end(page.context.cookies()[0]["value"])
        page.get_by_role("link", name="Hex").click()
        page.get_by_role("heading", name="Log in").wait_for()
        page.get_by_label("Token").fill("the admins' token")
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("heading", name="Message broker-a:0:3").wait_for()


def test_a_line_on_the_page_reports_a_silent_store(browser: Browser, served: ServedConsole) -> None:
    served.cluster.errors |= {call: RequestTimeoutError("broker-b", 10.0) for call in ("browse", "message_track")}
    with served.page(browser) as page:
        page.goto("/topics/orders/messages")
        expect(page.get_by_role("alert")).to_contain_text("broker-b")
        expect(page.get_by_role("button", name="Search")).to_be_visible()
        page.goto(ONE)
        expect(page.get_by_role("alert")).to_contain_text("broker-b")
        expect(page.get_by_label("Body", exact=True)).to_be_visible()
