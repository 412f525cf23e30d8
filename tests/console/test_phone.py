"""Tests of the console on a phone: the navigation shows every page, the texts of charts can be read, and a table that
is wider than the screen shows that it continues.

Other tests check that the overview claims nothing about a cluster that does not answer.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.protocol.status import Problem
from raymq.tools.console.web.history import ClusterFigures
from tests.support.browser.chromium import DESKTOP, PHONE
from tests.support.console.fake_cluster import FakeCluster
from tests.support.console.served_console import ServedConsole, serving

LABELS_PX_MIN = 12
SAMPLE_S = 10
NOTE_LABELS = """
const draw = CanvasRenderingContext2D.prototype.fillText, clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...area) {
  this.canvas.labels = [];
  return clear.apply(this, area);
};
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  const size = parseFloat(this.font) * this.canvas.clientWidth / this.canvas.width;
  (this.canvas.labels ||= []).push({ text, size });
  return draw.call(this, text, ...place);
};
"""
"""A script that records the texts drawn on each canvas since the canvas was last cleared, each with its font size in
CSS pixels."""
LABELS = "[...document.querySelectorAll('canvas')].map(canvas => canvas.labels || [])"
SPILLED_TEXTS = """
(() => {
  const spilled = [];
  const texts = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, range = document.createRange();
    if (!text.textContent.trim() || text.parentElement.closest('.unseen')) continue;
    range.selectNodeContents(text);
    let box = text.parentElement;
    while (box && getComputedStyle(box).display.startsWith('inline')) box = box.parentElement;
    const edge = box.getBoundingClientRect().right + 1, { width, right } = range.getBoundingClientRect();
    if (width && right > edge) spilled.push(text.textContent);
  }
  return spilled;
})()
"""
"""A script that returns the texts that are wider than the block around them."""


@pytest.fixture
def seed() -> int:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return seed


@pytest.fixture
def quiet() -> Iterator[ServedConsole]:
    """Yield a running console that takes no samples of the cluster's counters, because the test adds its own
    samples."""
    cluster = FakeCluster()
    cluster.errors["figures"] = RaymqError("the test adds its own samples")
    with serving(cluster) as served:
        yield served


def add_samples(served: ServedConsole, rates: list[int]) -> None:
    """Add samples of the cluster's counters to the history, one every SAMPLE_S until now."""
    now_ms, into = time.time_ns() // 1_000_000, 0
    for step, rate in enumerate(rates):
        into += rate * SAMPLE_S
        at_ms = now_ms - (len(rates) - step) * SAMPLE_S * 1000
        served.console.history.add(ClusterFigures(at_ms, into, into, into * 100, 0, 0, {}, {}))


def labels_of(page: Page) -> list[list[dict[str, float | str]]]:
    """Return the labels of each chart on the overview, after the charts are drawn."""
    page.add_init_script(NOTE_LABELS)
    page.goto("/")
    page.wait_for_function(f"() => {LABELS}.length === 2 && {LABELS}.every(labels => labels.length > 2)")
    return page.evaluate(LABELS)


def test_every_page_of_the_navigation_is_visible_on_a_phone(browser: Browser, served: ServedConsole) -> None:
    with served.page(browser, window=PHONE) as page:
        page.goto("/cluster")
        links = page.get_by_role("navigation", name="Pages").get_by_role("link").all()
        assert len(links) >= 8
        boxes = [link.bounding_box() for link in links]
        assert all(box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE[0] for box in boxes), boxes


def test_no_two_ticks_of_an_axis_have_the_same_label(browser: Browser, quiet: ServedConsole, seed: int) -> None:
    dice = random.Random(seed)
    base, spread = dice.choice([0, 100, 9_000, 10_200, 990_000]), dice.choice([3, 40, 600, 20_000])
    add_samples(quiet, [base + dice.randrange(spread) for _ in range(dice.choice([4, 8, 14, 60]))])
    with quiet.page(browser, window=dice.choice([PHONE, DESKTOP])) as page:
        for labels in labels_of(page):
            texts = [str(label["text"]) for label in labels]
            times, values = [text for text in texts if ":" in text], [text for text in texts if ":" not in text]
            assert len(times) == len(set(times)), times
            assert len(values) == len(set(values)) >= 2, values


def test_a_young_chart_has_seconds_at_its_ticks(browser: Browser, quiet: ServedConsole) -> None:
    add_samples(quiet, [100, 120, 110, 130, 90, 100, 105, 95])
    with quiet.page(browser, window=PHONE) as page:
        for labels in labels_of(page):
            times = [str(label["text"]) for label in labels if ":" in str(label["text"])]
            assert len(times) >= 2
            assert all(text.count(":") == 2 for text in times), times


def test_labels_of_charts_can_be_read_on_a_phone(browser: Browser, quiet: ServedConsole) -> None:
    add_samples(quiet, [100, 120, 110, 130, 90, 100])
    with quiet.page(browser, window=PHONE) as page:
        sizes = [label["size"] for labels in labels_of(page) for label in labels]
        assert min(sizes) >= LABELS_PX_MIN, sizes
        captions = page.locator(".chart figcaption")
        assert (
            captions.evaluate_all("all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize)))")
            >= 12
        )


def test_long_texts_of_the_cluster_page_stay_in_their_boxes(browser: Browser, served: ServedConsole) -> None:
    reason = "no replica of broker-a answers: RequestTimeoutError: storage-broker-a-0 did not answer within 5 s " * 2
    path = "/srv/" + "raymq-with-a-long-name/" * 8
    served.cluster.problems = (Problem("store", "fail", reason + path, where="storage-broker-a-0"),)
    with served.page(browser, window=PHONE) as page:
        for address in ("/cluster", "/"):
            page.goto(address)
            page.get_by_text("did not answer within 5 s").first.wait_for()
            assert page.evaluate(SPILLED_TEXTS) == []


def test_a_table_that_goes_on_shows_a_shadow_at_its_edge(browser: Browser, served: ServedConsole) -> None:
    with served.page(browser, window=PHONE) as page:
        page.goto("/cluster")
        hidden = page.locator(".scroll").evaluate_all(
            "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
        )
        assert hidden > 0
        kinds = page.locator(".scroll").evaluate_all(
            "all => all.map(one => getComputedStyle(one).backgroundAttachment)"
        )
        assert all("local" in kind and "scroll" in kind for kind in kinds), kinds


def test_the_overview_does_not_say_that_all_is_well_while_it_asks(browser: Browser, served: ServedConsole) -> None:
    gate = threading.Event()
    with served.page(browser) as page:
        page.goto("/")
        expect(page.get_by_text("All is well")).to_be_visible()
        served.cluster.gates["cluster"] = gate
        try:
            page.get_by_text("Checking …").wait_for()
            expect(page.get_by_text("All is well")).to_be_hidden()
        finally:
            gate.set()
            del served.cluster.gates["cluster"]
        page.get_by_text("All is well").wait_for()


def test_the_overview_claims_nothing_while_the_cluster_does_not_answer(browser: Browser, served: ServedConsole) -> None:
    with served.page(browser) as page:
        page.goto("/")
        expect(page.get_by_text("All is well")).to_be_visible()
        served.cluster.errors["cluster"] = ServiceNotAvailableError("no broker is registered")
        page.get_by_role("heading", name="Not known now").wait_for()
        expect(page.get_by_text("All is well")).to_have_count(0)
