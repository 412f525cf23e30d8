"""Tests of choosing a node for each replica of a broker group."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from placement.replica_nodes import Node, carrying, choose_nodes, store_directory
from raymq.common.errors import ConfigError
from raymq.common.names import StorageName


def names(groups: int, replicas: int) -> list[StorageName]:
    return [StorageName(f"broker-{letter}", replica) for letter in "abcdef"[:groups] for replica in range(replicas)]


def nodes(count: int, **stores: dict[str, int]) -> list[Node]:
    return [Node(f"n{index}", f"10.0.0.{index}", stores.get(f"n{index}", {})) for index in range(count)]


def test_replicas_of_a_group_are_on_different_nodes_and_the_load_is_even():
    homes = choose_nodes(names(3, 2), nodes(3))
    for letter in "abc":
        assert homes[StorageName(f"broker-{letter}", 0)] != homes[StorageName(f"broker-{letter}", 1)]
    assert Counter(node.node_id for node in homes.values()) == {"n0": 2, "n1": 2, "n2": 2}


def test_data_stays_where_it_is():
    homes = choose_nodes(names(1, 2), nodes(3, n2={"broker-a-0": 5}, n1={"broker-a-1": 9}))
    assert [homes[name].node_id for name in names(1, 2)] == ["n2", "n1"]


def test_a_new_replica_goes_to_the_node_with_the_fewest_bytes():
    homes = choose_nodes([StorageName("broker-b", 0)], nodes(3, n0={"x": 500}, n1={"x": 100}, n2={"x": 300}))
    assert homes[StorageName("broker-b", 0)].node_id == "n1"


def test_more_replicas_than_nodes_are_refused_with_the_rule_and_the_nodes():
    with pytest.raises(ConfigError, match=r"storage-broker-a-2 .*different nodes.*10\.0\.0\.0, 10\.0\.0\.1"):
        choose_nodes(names(1, 3), nodes(2))


def test_without_spreading_one_machine_holds_them_all():
    assert {node.node_id for node in choose_nodes(names(1, 3), nodes(1), spread=False).values()} == {"n0"}


def test_zones_count_where_every_node_has_one():
    zoned = [Node(f"n{index}", f"10.0.0.{index}", zone="east" if index < 3 else "west") for index in range(4)]
    homes = choose_nodes(names(1, 2), zoned)
    assert {node.zone for node in homes.values()} == {"east", "west"}
    with pytest.raises(ConfigError, match="a zone may have at most 2 of 4"):
        choose_nodes(names(1, 4), zoned)


def test_one_node_without_a_zone_and_zones_do_not_count():
    mixed = [Node("n0", "a", zone="east"), Node("n1", "b", zone="east"), Node("n2", "c")]
    assert len(choose_nodes(names(1, 2), mixed)) == 2


def test_a_draining_node_keeps_nothing():
    drained = [Node("n0", "a", {"broker-a-0": 9}, draining=True), Node("n1", "b"), Node("n2", "c")]
    assert choose_nodes(names(1, 2), drained)[StorageName("broker-a", 0)].node_id in {"n1", "n2"}


def test_the_node_a_store_runs_on_counts_if_two_nodes_have_its_directory():
    both = nodes(2, n0={"broker-a-0": 900}, n1={"broker-a-0": 5})
    name = StorageName("broker-a", 0)
    assert choose_nodes([name], both)[name].node_id == "n0"
    assert choose_nodes([name], both, known={name: "n1"})[name].node_id == "n1"


def test_a_cluster_without_nodes_is_refused():
    with pytest.raises(ConfigError, match="no live node"):
        choose_nodes(names(1, 1), [])


@given(groups=st.integers(1, 6), replicas=st.integers(1, 3), count=st.integers(3, 6), seed=st.randoms())
def test_planning_again_changes_nothing(groups, replicas, count, seed):
    wanted = names(groups, replicas)
    first = choose_nodes(wanted, nodes(count))
    assert max(Counter((name.broker_name, node.node_id) for name, node in first.items()).values()) == 1
    stores: dict[str, dict[str, int]] = {}
    for name, node in first.items():
        stores.setdefault(node.node_id, {})[store_directory(name)] = seed.randint(1, 10**9)
    shuffled = nodes(count, **stores)
    seed.shuffle(shuffled)
    again = choose_nodes(wanted, shuffled)
    assert {name: node.node_id for name, node in again.items()} == {name: node.node_id for name, node in first.items()}


LABELS = {"n0": {"raymq-store": "0", "other": "x"}, "n1": {"raymq-store": ""}, "n2": {"other": "x"}, "n3": {}}


def test_only_nodes_that_carry_the_label_may_hold_stores_whatever_its_value():
    assert carrying("raymq-store", LABELS) == {"n0", "n1"}
    assert carrying(None, LABELS) == set(LABELS)


def test_an_unknown_node_label_is_refused_with_the_existing_labels():
    with pytest.raises(
        ConfigError, match=r"none of the 4 nodes .* 'raymq-stor' .*--labels raymq-stor=.*other, raymq-store"
    ):
        carrying("raymq-stor", LABELS)
    with pytest.raises(ConfigError, match="labels are: none"):
        carrying("raymq-store", {"n3": {}})
