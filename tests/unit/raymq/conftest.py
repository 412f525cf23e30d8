"""Fixtures for tests of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raymq.producer import async_producer, producer, sender, table as table_send
from tests.support.clients.producers import Clock, MakeProducer, producers_of_fakes


@pytest.fixture
def make() -> Iterator[MakeProducer]:
    """Makes producers over fake stores."""
    with producers_of_fakes() as make:
        yield make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of producers. Waits of their threads use the real one."""
    clock = Clock()
    for module in (async_producer, producer, sender, table_send):
        monkeypatch.setattr(module, "time", clock)
    return clock
