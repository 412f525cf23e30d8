"""Fixtures for stores with transactions. The test sets the store's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.message_store import MessageStore
from tests.support.stores.stores import open_store
from tests.support.stores.transactions import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., MessageStore]]:
    """Yield a function that opens a store, by default the store in the directory `store/`. The fixture closes all
    stores after the test."""
    stores = []

    def open_one(root: Path = tmp_path / "store", **changes: Any) -> MessageStore:
        stores.append(open_store(root, clock_ms=clock, **changes))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()
