"""Fixtures for stores with delayed messages. The test sets the store's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.message_store import MessageStore
from tests.support.stores.clocks import Clock
from tests.support.stores.stores import open_store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., MessageStore]]:
    """Yield a function that opens stores on the test's clock. By default a store delivers due messages. The fixture
    closes all stores after the test."""
    stores = []

    def open_one(root: Path = tmp_path / "store", *, deliver: bool = True, **changes: Any) -> MessageStore:
        store = open_store(root, clock_ms=clock, **changes)
        stores.append(store)
        if deliver:
            store.schedule.start_delivery()
        return store

    yield open_one
    for store in stores:
        store.close()
