"""Tests of the Reconciler when the replicas of a broker group change."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement import reconciler as module
from placement.plan import make_plan
from placement.reconciler import Reconciler
from placement.repair import ReplicaGroupView
from placement.replica_nodes import Node
from placement.specs import StoragePlan
from raymq.common.config.cluster import ClusterSettings, ReplicationOptions
from raymq.common.names import StorageName
from storage.replication.epochs import ReplicaMembers

NODES = [Node("n1", "10.0.0.1"), Node("n2", "10.0.0.2")]


def ignore(group: str, replica: int) -> None:
    pass


def test_replicas_that_joined_start_and_actors_of_replicas_that_left_end(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ReplicationOptions(replicas=1, enable_controller_mode=True, replace_after_s=300.0)
    plan = make_plan(ClusterSettings(data_dir=Path("/data"), replication=options), NODES)
    assert plan.controller is not None
    members = ReplicaMembers(3, frozenset({0, 2}), joining=frozenset({2}), removed=frozenset({1}))
    view = ReplicaGroupView(0, frozenset({0}), members)
    started: list[StoragePlan] = []
    ended: list[str] = []
    actors = ["broker-a", "replicator-broker-a-1", "storage-broker-a-0", "storage-broker-a-1", "storage-broker-b-1"]
    monkeypatch.setattr(module, "running", lambda: actors)
    monkeypatch.setattr(module, "inventory", lambda *_: NODES)
    monkeypatch.setattr(module, "start_storage", started.append)
    monkeypatch.setattr(module, "end_actor", ended.append)
    reconciler = Reconciler(plan.controller, lambda: {"broker-a": view}, frozenset, ignore, ignore)
    reconciler.node_ids[StorageName("broker-a", 0)] = "n1"
    reconciler._round()
    assert ended == ["replicator-broker-a-1", "storage-broker-a-1"]
    [new] = started
    assert (new.name, new.node_id) == (StorageName("broker-a", 2), "n2"), "it starts at once, on another node"
    assert new.settings.store_path_root_dir == Path("/data/broker-a-2")
    assert new.store_host[1] != plan.storages[0].store_host[1]
