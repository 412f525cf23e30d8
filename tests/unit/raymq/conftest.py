"""Fixtures for the tests of clients."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.clients.producers import Clock, MakeProducer, producers_of_fakes


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[MakeProducer]:
    """Yield a function that makes producers over fake stores. The producers use the fixture `clock` if the test
    requests it."""
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else time.monotonic
    with producers_of_fakes(clock) as make:
        yield make


@pytest.fixture
def clock() -> Clock:
    """Return the fake clock of the test's producers. The producers' threads still wait in real time."""
    return Clock()
