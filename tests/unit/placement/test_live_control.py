"""Tests of LiveControl, which collects the data of the cluster page from the servers. If some servers do not answer,
the page shows the data of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from placement.console import live_control as module
from placement.console.live_control import LiveControl
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.common.protocol.status import BrokerReport, ClusterStatus

ROUTE = TopicRoute(
    "orders", {"broker-a": BrokerData("c", "broker-a", {0: "storage-broker-a-0"})}, (QueueData("broker-a", 1, 1, 6),)
)


class Admin:
    """Fake Admin of a cluster with one topic."""

    error: Exception | None = None

    def topic_routes(self, topics: list[str]) -> dict[str, TopicRoute]:
        if self.error is not None:
            raise self.error
        return {"orders": ROUTE}


def test_the_cluster_shows_writes_and_settings_also_without_a_nameserver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin = Admin()
    client: Any = SimpleNamespace(admin=admin)
    control = LiveControl(client, "raymq")
    broker = BrokerReport("broker-a", broker="broker-a", ready=True, topics=("orders",), storage="storage-broker-a-0")
    asked: list[str] = []

    def describe(method: str, timeout_s: float) -> Any:
        asked.append(method)
        return SimpleNamespace(max_message_size_bytes=5, commit_log_file_size=6, consume_queue_file_size=7)

    monkeypatch.setattr(module, "cluster_status", lambda: ClusterStatus(brokers=(broker,)))
    monkeypatch.setattr(module.operations, "placed_replicas", lambda: ((), frozenset()))
    monkeypatch.setattr(module.ray, "nodes", lambda: [{"NodeManagerAddress": "h", "NodeID": "n", "Alive": True}])
    monkeypatch.setattr(module, "ActorRef", lambda name: SimpleNamespace(call=describe))
    view = control.cluster()
    assert [one.writable for one in view.brokers] == [True]
    assert view.settings["store.max_message_size_bytes"] == "5"
    admin.error = ServiceNotAvailableError("no NameServer answers")
    assert [one.writable for one in control.cluster().brokers] == [True]
    assert asked == ["describe"]
