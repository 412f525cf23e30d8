"""Takes the screenshots of the console for docs/pictures/ (`make pictures`), with an example cluster of a web shop.

A screenshot whose file is too large is reduced to 256 colours.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import Browser

from raymq.common.errors import RaymqError
from tests.support.browser.chromium import DESKTOP, PHONE, launched
from tests.support.console.served_console import ServedConsole, serving
from tests.support.console.shop import order, samples, shop

PICTURES = Path(__file__).parents[2] / "docs/pictures"
SIZE_MAX = 100_000
CHARTS_ARE_DRAWN = "[...document.querySelectorAll('[data-chart]')].every(plot => plot.querySelector('canvas'))"


class Picture(NamedTuple):
    """A screenshot to take: its name, the page's path, and a text that the page shows when it is fully drawn."""

    name: str
    path: str
    text: str
    window: tuple[int, int] = DESKTOP
    dark: bool = False


PLACED = "/messages?topic=orders&offset=broker-b%3A3%3A1775024"
ALL = (
    Picture("console-overview", "/", "Groups that are behind most"),
    Picture("console-overview-dark", "/", "Groups that are behind most", dark=True),
    Picture("console-overview-phone", "/", "Groups that are behind most", PHONE),
    Picture("console-topic", "/topics/orders", "Route"),
    Picture("console-messages", "/topics/orders/messages", "scanned"),
    Picture("console-message", PLACED, "412 messages before it"),
    Picture("console-message-phone", PLACED, "412 messages before it", PHONE),
    Picture("console-tail", "/topics/orders/tail", "Live, 18 shown"),
    Picture("console-group", "/groups/billing", "Members"),
    Picture("console-dead-letters", "/groups/billing/dead-letters", "Why a message failed"),
    Picture("console-delayed", "/delayed", "Next due"),
    Picture("console-cluster", "/cluster", "broker-a"),
)


def take(browser: Browser, served: ServedConsole, picture: Picture) -> bytes:
    """Take a screenshot of the visible part of a page. Returns the PNG file's bytes."""
    with served.page(browser, window=picture.window, dark=picture.dark) as page:
        page.goto(picture.path)
        if picture.path.endswith("/tail"):
            page.get_by_text("Live, 0 shown").wait_for()
            now_ms = time.time_ns() // 1_000_000
            served.cluster.messages["orders"] += [order(200 + number, now_ms - 22_000) for number in range(18)]
        page.get_by_text(picture.text).first.wait_for()
        page.wait_for_function(CHARTS_ARE_DRAWN)
        png = page.screenshot(animations="disabled", caret="hide")
    image, smaller = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    image.save(smaller, "PNG", optimize=True)
    if smaller.tell() > SIZE_MAX:
        smaller = io.BytesIO()
        image.quantize(256, dither=Image.Dither.NONE).save(smaller, "PNG", optimize=True)
    return smaller.getvalue()


def make(folder: Path, wanted: list[str]) -> None:
    """Take the screenshots whose names are in `wanted`, or all screenshots if `wanted` is empty. Write them into a
    folder."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = shop()
    cluster.errors["figures"] = RaymqError("the pictures have samples of their own")
    with serving(cluster) as served, launched() as browser:
        for sample in samples(time.time_ns() // 1_000_000):
            served.console.history.add(sample)
        for picture in ALL:
            if not wanted or picture.name in wanted:
                png = take(browser, served, picture)
                (folder / f"{picture.name}.png").write_bytes(png)
                print(f"{picture.name}.png  {len(png):,} bytes")
                assert len(png) <= SIZE_MAX, f"{picture.name} is larger than {SIZE_MAX} bytes"


if __name__ == "__main__":
    make(PICTURES, sys.argv[1:])
