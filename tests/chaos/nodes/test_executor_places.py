"""Tests of the placement of Spark executors in a Ray cluster of several nodes. Executors run on the nodes of the
storage actors if possible, else on nodes with free resources."""

from __future__ import annotations

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

import raymq
from raydp_jobs.executor_places import ExecutorSize, check_fits, nodes_of, reserved, storage_nodes
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from tests.support.clusters.nodes import Nodes
from tests.support.history.waiting import eventually

SETTINGS = """\
broker_groups: 1
store:
  mapped_file_size_commit_log_bytes: 1048576
  mapped_file_size_consume_queue_bytes: 60000
"""
ONE_CPU = ExecutorSize(1.0, 100 << 20)
TIMEOUT_S = 30.0


@pytest.fixture
def storage(mq: raymq.Client) -> str:
    """Return the id of the node on which the only storage actor runs."""
    [node] = storage_nodes()
    return node


def homes(group: PlacementGroup) -> list[str]:
    """Return the id of the node of each bundle in a placement group."""
    return list(placement_group_table(group)["bundles_to_node_id"].values())


def test_bundles_are_where_the_storage_actor_is_and_are_given_back(
    storage: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = ray.available_resources()["CPU"]
    with reserved(2, ONE_CPU, frozenset([storage]), TIMEOUT_S) as group:
        assert homes(group) == [storage] * 2
        assert nodes_of(group) == [storage]
    assert caplog.messages == []
    eventually(lambda: ray.available_resources()["CPU"] == before, "the CPUs are free again")


def test_executors_without_space_at_a_store_run_elsewhere_with_a_warning(
    storage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with reserved(3, ONE_CPU, frozenset([storage]), TIMEOUT_S) as group:
        assert sorted(home == storage for home in homes(group)) == [False, True, True]
    assert "1 of 3 executors run on nodes without a storage actor" in caplog.text
    assert "free: 2 CPU(s)" in caplog.text


def test_a_group_that_finds_no_room_is_taken_back(storage: str) -> None:
    others = placement_group([{"CPU": 2.0}] * 3)
    try:
        assert others.wait(TIMEOUT_S)
        with (
            pytest.raises(ServiceNotAvailableError, match="other programs use the cluster"),
            reserved(1, ONE_CPU, frozenset([storage]), 0.5),
        ):
            pytest.fail("unreachable")
    finally:
        remove_placement_group(others)
    eventually(lambda: ray.available_resources().get("CPU", 0) == 6, "the CPUs are free again")


def test_a_bundle_whose_node_is_lost_goes_to_another_that_was_wanted(storage: str, machines: Nodes) -> None:
    other = next(name for name in ("left", "right") if machines.node_id(name) != storage)
    wanted = frozenset([storage, machines.node_id(other)])
    with reserved(2, ONE_CPU, wanted, TIMEOUT_S) as group:
        assert set(homes(group)) == wanted
        machines.kill(other)
        eventually(lambda: homes(group) == [storage] * 2, "both bundles are on the node that is left")


def test_executors_larger_than_any_node_are_refused(storage: str) -> None:
    check_fits(1, ONE_CPU)
    with pytest.raises(InvalidArgumentError, match=r"do not fit into this Ray cluster, which has room for 0 \(2 CPU"):
        check_fits(1, ExecutorSize(3.0, 100 << 20))
