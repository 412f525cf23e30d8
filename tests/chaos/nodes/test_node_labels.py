"""Tests of `placement.node_label`: stores run only on nodes with the label. In Kubernetes, nodes without the label have
no volume.

No replica moves to a node without the label, neither at the start nor when a node is lost. A new node with the label
gets the lost node's replica.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import raymq
from tests.support.clusters.cluster import Sandbox, one_group
from tests.support.clusters.nodes import Nodes, nodes
from tests.support.history.waiting import eventually
from tests.support.replicas.placed_group import PlacedGroup

LABELLED = {"raymq-store": "0"}
SETTINGS = one_group("{replicas: 2, replace_after_s: 1}") + "placement: {node_label: raymq-store}\n"


@pytest.fixture(scope="module")
def machines(box: Sandbox) -> Iterator[Nodes]:
    with nodes(box, ("head",)) as made:
        made.add("left", labels=LABELLED)
        made.add("right", labels={"raymq-store": "1"})
        yield made


def test_replicas_stay_on_nodes_with_the_label(mq: raymq.Client, machines: Nodes, topic: str) -> None:
    group = PlacedGroup("broker-a", 2, machines)
    group.wait_for_homes({"left", "right"})
    with mq.producer("before") as producer:
        producer.send(raymq.Message(topic, b"kept"))
    machines.add("compute")
    machines.kill("right")

    def refused() -> bool:
        return any("cannot be placed" in replica["note"] for replica in group.account()["replicas"])

    eventually(refused, "a replica without a node")
    machines.add("spare", labels=LABELLED)
    group.wait_for_homes({"left", "spare"})
    group.assert_equal_logs()
    assert list(machines.data("compute").glob("*")) == list(machines.data("head").glob("broker-*")) == []
