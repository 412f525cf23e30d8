"""Tests of the HTML report about topics: it is one well-formed file that shows each figure and loads nothing."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest

from raydp_jobs.jobs.times import ALWAYS, Period
from raydp_jobs.jobs.topic_figures import Bucket, TopicFigures
from raydp_jobs.jobs.topic_report import BARS_MAX, INTERVALS_SHOWN, check_report, merged, report, save_report
from raymq.common.errors import InvalidArgumentError

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
VOID = {"meta"}


def figures(topic: str = "orders", count: int = 3, tag: str = "paid") -> TopicFigures:
    """Return the statistics of a topic over `count` minutes: in each minute 60 messages with the tag and 60 others."""
    buckets = [Bucket(NOON + timedelta(minutes=n), 120, 6000, 10 + n, {tag: 60}) for n in range(count)]
    last = NOON + timedelta(minutes=count)
    return TopicFigures(topic, 120 * count, 6000 * count, 90, NOON, last, 17, {tag: 60 * count}, 60 * count, buckets)


class Page(HTMLParser):
    """A parsed page: its elements, its texts and its tables. Raises AssertionError if the page is not well-formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)
        elif data.strip():
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.elements)


def page(*found: TopicFigures, every_s: int = 60, period: Period = ALWAYS, tags: str = "*") -> Page:
    return Page(report(found, every_s, made=NOON, period=period, tags=tags))


def test_the_page_has_each_figure() -> None:
    read = page(figures())
    times = ["2026-03-01 12:00:00", "2026-03-01 12:03:00"]
    assert read.rows[1] == ["orders", "360", "2", "18,000", "100", "90", "17", *times]
    assert ["paid", "180", "50.0%"] in read.rows
    assert ["(others)", "180", "50.0%"] in read.rows
    assert read.rows[-1] == ["2026-03-01 12:02:00", "120", "2", "6,000", "12", "60"]
    # A chart of rates has two bars a minute, one for the tag and one for the others; a chart of bytes has one.
    assert (read.count("svg"), read.count("rect")) == (2, 9)
    assert "2026-03-01 12:01:00, paid: 1" in read.texts


def test_several_topics_have_a_chart_of_all() -> None:
    read = page(figures(), figures("bills"), TopicFigures("empty", 0, 0, 0, None, None, 0, {}, 0, []))
    assert read.count("svg") == 2 * 3
    assert "No messages." in read.texts
    assert ["empty", "0", "–", "0", "–", "0", "0", "–", "–"] in read.rows
    assert page(TopicFigures("empty", 0, 0, 0, None, None, 0, {}, 0, [])).count("svg") == 0


def test_texts_of_messages_are_no_markup_and_nothing_is_loaded() -> None:
    text = report([figures(tag='<script src="//evil">&')], 60, made=NOON, period=ALWAYS)
    read = Page(text)
    assert ['<script src="//evil">&', "180", "50.0%"] in read.rows
    names = {tag for tag, _ in read.elements}
    assert names.isdisjoint({"script", "img", "link", "iframe", "a", "object"})
    assert not any({"src", "href"} & attributes.keys() for _, attributes in read.elements)
    assert "default-src 'none'" in text
    assert "url(" not in text


def test_the_page_says_which_messages_it_counts() -> None:
    assert any(
        one.startswith("All messages. Times are store times in UTC; intervals are 1 min")
        for one in page(figures()).texts
    )
    noon_ms = int(NOON.timestamp() * 1000)
    chosen = page(figures(), every_s=7200, period=Period(noon_ms, noon_ms + 1000), tags="paid || late")
    expected = "Messages with the tags paid || late stored from 2026-03-01 12:00:00 before 2026-03-01 12:00:01."
    assert any(one.startswith(f"{expected} Times are store times in UTC; intervals are 2 h") for one in chosen.texts)


def test_a_long_period_has_a_bounded_page() -> None:
    read = page(figures(count=20_000))
    assert read.count("rect") <= 3 * BARS_MAX
    assert len([row for row in read.rows if row[0].startswith("2026-")]) == INTERVALS_SHOWN
    assert f"{20_000 - INTERVALS_SHOWN:,} older intervals are left out." in read.texts
    assert any("means of" in one for one in read.texts)


@pytest.mark.parametrize("count", [1, 199, 200, 201, 1000, 1999])
def test_combined_intervals_have_the_same_sum(count: int) -> None:
    # Every third minute has no message, and no interval.
    minutes = [n for n in range(count) if n % 3 != 1]
    rates = {"paid": [float(n % 7) for n in minutes]}
    starts, width_s, found = merged([NOON + timedelta(minutes=n) for n in minutes], 60, rates)
    assert len(starts) <= BARS_MAX
    assert starts[0] == NOON
    assert sum(found["paid"]) * width_s == pytest.approx(sum(rates["paid"]) * 60)
    assert all((start - NOON).total_seconds() % width_s == 0 for start in starts)


def test_a_saved_report_replaces_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "orders.html"
    path.write_text("before")
    save_report(path, "<p>ä</p>")
    assert [file.name for file in tmp_path.iterdir()] == ["orders.html"]
    assert path.read_bytes() == "<p>ä</p>".encode()
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(InvalidArgumentError, match=re.escape(str(tmp_path / "folder.html"))):
        save_report(tmp_path / "folder.html", "text")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["orders.pdf", "nowhere/orders.html"])
def test_a_report_that_cannot_be_saved_is_refused_before_the_job(tmp_path: Path, name: str) -> None:
    check_report(None)
    check_report(tmp_path / "orders.html")
    with pytest.raises(InvalidArgumentError):
        check_report(tmp_path / name)
