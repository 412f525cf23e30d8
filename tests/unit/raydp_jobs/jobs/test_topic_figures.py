"""Tests of a topic's statistics in the form of JSON, tables and a picture."""

from __future__ import annotations

import io
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from raydp_jobs.jobs.pictures import PICTURE_SIZE_PX, check_picture, save_picture
from raydp_jobs.jobs.topic_figures import SHOWN_BUCKETS, Bucket, TopicFigures, draw, figures_json, show
from raymq.common.errors import ConfigError, InvalidArgumentError
from raymq.tools.cli.terminal import output

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def figures(topic: str = "orders", count: int = 3) -> TopicFigures:
    """Return the statistics of a topic over `count` minutes. In each minute, 60 messages have the tag paid, 30 have no
    tag and 30 have rare tags."""
    buckets = [Bucket(NOON + timedelta(minutes=n), 120, 6000, 10 + n, {"paid": 60, None: 30}) for n in range(count)]
    last = NOON + timedelta(minutes=count)
    tags: dict[str | None, int] = {"paid": 60 * count, None: 30 * count}
    return TopicFigures(topic, 120 * count, 6000 * count, 90, NOON, last, 17, tags, 30 * count, buckets)


def test_json_has_rates_per_second_and_tags_that_occur() -> None:
    [orders] = figures_json([figures()], 60)["topics"]
    assert (orders["messages"], orders["messages_per_second"], orders["bytes_per_second"]) == (360, 2.0, 100.0)
    assert orders["tags"] == [{"tags": "paid", "messages": 180}, {"tags": None, "messages": 90}]
    assert orders["other_tags"] == 90
    assert orders["over_time"][1] == {
        "start": "2026-03-01T12:01:00.000+00:00",
        "messages": 120,
        "bytes": 6000,
        "messages_per_second": 2.0,
        "bytes_per_second": 100.0,
        "keys": 11,
        "tags": [{"tags": "paid", "messages": 60}, {"tags": None, "messages": 30}],
    }


def test_a_topic_without_messages_has_no_rate() -> None:
    empty = TopicFigures("empty", 0, 0, 0, None, None, 0, {}, 0, [])
    [value] = figures_json([empty], 60)["topics"]
    assert (value["messages"], value["messages_per_second"], value["first"]) == (0, None, None)


def test_the_table_has_the_newest_buckets_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(output, "out", Console(file=text, width=200, markup=False))
    show([figures(count=SHOWN_BUCKETS + 5)], 60)
    printed = text.getvalue()
    assert f"the newest {SHOWN_BUCKETS} of {SHOWN_BUCKETS + 5} stretches of 60 s" in printed
    # Besides one line per time bucket, two lines of the output contain a time: the lines of the topic's first and last
    # message.
    assert printed.count("│ 2026-03-01T12:") == SHOWN_BUCKETS + 2
    assert "(no tag)" in printed
    assert "(others)" in printed


def drawn(found: list[TopicFigures]) -> Figure:
    figure = Figure()
    draw(figure, found, 60)
    return figure


def heights(figure: Figure, panel: int) -> list[float]:
    return [bar.get_height() for bar in figure.axes[panel].patches]


def test_a_topics_picture_stacks_its_tags_and_shows_bytes_and_keys() -> None:
    figure = drawn([figures()])
    assert heights(figure, 0) == [1.0] * 3 + [0.5] * 3 + [0.5] * 3
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["paid", "(no tag)", "(others)"]
    assert heights(figure, 1) == [100.0] * 3
    assert heights(figure, 2) == [10, 11, 12]


def test_several_topics_are_stacked_where_they_have_messages() -> None:
    figure = drawn([figures(count=2), figures("$bills_", count=1)])
    assert heights(figure, 0) == [2.0, 2.0, 2.0, 0.0]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["orders", r"\$bills_"]


def test_a_saved_picture_is_a_png_of_the_stated_size_with_bars(tmp_path: Path) -> None:
    path = tmp_path / "orders.png"
    save_picture(path, lambda figure: draw(figure, [figures()], 60))
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == PICTURE_SIZE_PX
    pixels = imread(path)[:, :, :3]
    first_colour = (abs(pixels - [0x1F / 255, 0x77 / 255, 0xB4 / 255]) < 0.01).all(axis=2)
    assert first_colour.sum() > 10_000
    assert [file.name for file in tmp_path.iterdir()] == ["orders.png"]


def test_a_failed_picture_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "orders.png"
    path.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError):
        save_picture(path, lambda figure: 1 / 0)
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize("name", ["orders.pdf", "nowhere/orders.png"])
def test_a_picture_that_cannot_be_saved_is_refused_before_the_job(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError):
        check_picture(tmp_path / name)


def test_without_matplotlib_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("raymq.common.extras.find_spec", lambda name: None)
    check_picture(None)
    with pytest.raises(ConfigError, match=r"pip install 'raymq\[pictures\]'"):
        check_picture(tmp_path / "orders.png")
