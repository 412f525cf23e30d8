"""Tests of `raymq broker`: the calls that the commands make to a fake Admin."""

from __future__ import annotations

from typing import Any

import pytest


class Brokers:
    """Fake Admin that records which broker groups are writable."""

    def __init__(self) -> None:
        self.writable: dict[str, bool] = {}

    def set_broker_writable(self, broker: str, writable: bool) -> None:
        self.writable[broker] = writable


@pytest.fixture
def admin() -> Brokers:
    return Brokers()


def test_a_broker_group_is_made_writable_or_not(run: Any, admin: Brokers) -> None:
    assert "takes no messages" in run("broker", "writable", "off", "broker-b").output
    assert admin.writable == {"broker-b": False}
