"""Fixtures for the console's tests: one Chromium browser for all tests, and a console of a small fake cluster for each
test. They use no Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser.chromium import launched
from tests.support.console.fake_cluster import FakeCluster
from tests.support.console.served_console import ServedConsole, serving


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Yield a browser that all tests in this folder share. `launched` ends the browser before tests of other folders
    run."""
    with launched() as browser:
        yield browser


@pytest.fixture
def served() -> Iterator[ServedConsole]:
    with serving(FakeCluster()) as served:
        yield served
