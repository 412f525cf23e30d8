"""One Chromium, and one console of a small cluster for each test; no Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser.chromium import launched
from tests.support.console.fake_cluster import FakeCluster
from tests.support.console.served_console import ServedConsole, serving


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Yield the browser of all tests in this folder, which ends before tests of other folders run: see `launched`."""
    with launched() as browser:
        yield browser


@pytest.fixture
def served() -> Iterator[ServedConsole]:
    with serving(FakeCluster()) as served:
        yield served
