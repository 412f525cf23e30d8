"""Tests of the programs in examples/, which run on one cluster. The numbers that they print match the data, and each
program draws its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

import raymq
from examples import flights_to_picture, orders_to_windows, points_to_classes

SMALLEST_PICTURE_BYTES = 5_000

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # PySpark uses distutils, which is deprecated.
    # Ignore warnings about open sockets: Py4J leaves its sockets open until the garbage collector closes them.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Ignore future warnings, which come from Ray Data.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def assert_picture(file: Path) -> None:
    """Check that the file is a PNG with content. An empty picture of this size would have far fewer bytes."""
    picture = file.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > SMALLEST_PICTURE_BYTES


def test_orders_become_windows_while_they_come(mq: raymq.Client, tmp_path: Path) -> None:
    sent = [order for _, order in orders_to_windows.orders()]
    windows = {(order["shop"], str(order["at"])[:16]) for order in sent}
    assert orders_to_windows.main(tmp_path) == {
        "orders": len(sent),
        "euros": sum(float(str(order["euros"])) for order in sent),
        "windows": len(windows),
    }
    assert_picture(tmp_path / "sales.png")


def test_flights_become_a_picture(mq: raymq.Client, tmp_path: Path) -> None:
    flights = flights_to_picture.month()
    left = flights[flights.origin.isin(["JFK", "LGA"]) & flights.dep_delay.notna()]
    assert flights_to_picture.main(tmp_path) == {
        "sent": len(flights),
        "left": len(left),
        "minutes": pytest.approx(left.dep_delay.sum()),
    }
    assert_picture(tmp_path / "delays.png")


def test_points_get_their_classes(mq: raymq.Client, tmp_path: Path) -> None:
    figures = points_to_classes.main(tmp_path)
    assert figures["points"] == points_to_classes.POINTS
    assert 0.9 < figures["right"] < 1.0
    assert_picture(tmp_path / "classes.png")
