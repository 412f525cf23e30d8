"""Tests of the search for store directories on a node's disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from placement.inventory import _list_stores, inventory
from storage.files.config_files import ConfigFiles
from storage.replication.epochs import ReplicaMembers
from storage.replication.replica_files import MEMBERS_FILE
from tests.support.stores.stores import make_batch, open_store


def test_stores_are_found_wherever_their_logs_are_and_nothing_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name, options in (("broker-a-0", {}), ("broker-a-1", {"store_path_commit_log": (tmp_path / "disk",)})):
        store = open_store(data / name, **options)
        store.append([make_batch([b"x"])])
        store.close()
    (data / "controller").mkdir()
    (data / "controller" / "journal").touch()
    # create a directory that looks like the copy of a store without its lock file
    (data / "broker-a-2" / "commitlog").mkdir(parents=True)
    members = ReplicaMembers(4, frozenset({0, 3}), removed=frozenset({1, 2}))
    ConfigFiles(data / "broker-a-1").write(MEMBERS_FILE, json.dumps(members.to_plain()))
    found, changed = _list_stores(str(data))
    assert changed == {"broker-a-1": members}
    assert sorted(found) == ["broker-a-0", "broker-a-1", "broker-a-2"]
    assert found["broker-a-0"] > 0


def test_nodes_without_the_label_are_neither_asked_nor_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nodes without the label for stores are not queried. Such a compute-only node may leave the cluster during a
    query, and waiting for its answer would delay decisions about stores."""
    asked: list[str] = []

    def listing(node_id: str, _: Path) -> str:
        asked.append(node_id)
        return node_id

    nodes = [
        {"NodeID": name, "Alive": name != "gone", "NodeManagerAddress": f"ip-{name}", "Labels": labels}
        for name, labels in {
            "head": {},
            "s0": {"raymq-store": "0"},
            "s1": {"raymq-store": "1"},
            "gone": {"raymq-store": "2"},
            "compute": None,
        }.items()
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "head"))
    monkeypatch.setattr("placement.inventory._start_listing", listing)
    monkeypatch.setattr("placement.inventory.resolve", lambda node_id, *_: ({f"broker-of-{node_id}": 1}, {}))
    found = inventory(tmp_path, node_label="raymq-store")
    assert {node.node_id: dict(node.stores) for node in found} == {"s0": {"broker-of-s0": 1}, "s1": {"broker-of-s1": 1}}
    assert sorted(asked) == ["s0", "s1"]
    assert len(inventory(tmp_path)) == 4
