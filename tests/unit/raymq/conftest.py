"""Fixtures for tests of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.producers import MakeProducer, producers_of_fakes


@pytest.fixture
def make() -> Iterator[MakeProducer]:
    """Makes producers over fake stores."""
    with producers_of_fakes() as make:
        yield make
