"""The stores that are found on a node's disk."""

from __future__ import annotations

from pathlib import Path

from placement.inventory import _list_stores
from tests.support.stores.stores import make_batch, open_store


def test_stores_are_found_wherever_their_logs_are_and_nothing_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name, options in (("broker-a-0", {}), ("broker-a-1", {"store_path_commit_log": (tmp_path / "disk",)})):
        store = open_store(data / name, **options)
        store.append([make_batch([b"x"])])
        store.close()
    (data / "controller").mkdir()
    (data / "controller" / "journal").touch()
    (data / "broker-a-2" / "commitlog").mkdir(parents=True)  # a copy without its lock
    found = _list_stores(str(data))
    assert sorted(found) == ["broker-a-0", "broker-a-1", "broker-a-2"]
    assert found["broker-a-0"] > 0
