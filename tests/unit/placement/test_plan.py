"""Tests of the planner that chooses nodes for broker groups. A group that has data stays on the nodes of its
data."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.plan import differences, make_plan, with_found_stores
from placement.replica_nodes import Node, store_directory
from raymq.common.config.cluster import ClusterSettings
from raymq.common.config.store import FlushDiskType, StoreOptions
from raymq.common.errors import ConfigError
from raymq.common.names import NameServerName, StorageName
from storage.replication.epochs import ReplicaMembers


def places(settings: ClusterSettings, *nodes: Node) -> dict[str, str]:
    return {str(storage.name): storage.node_id for storage in make_plan(settings, nodes).storages}


def test_on_one_machine_everything_is_there():
    plan = make_plan(ClusterSettings(data_dir=Path("/data")), [Node("n1", "10.0.0.1")])
    assert [nameserver.name for nameserver in plan.nameservers] == [NameServerName(0)]
    [storage] = plan.storages
    assert (str(storage.name), storage.node_id) == ("storage-broker-a-0", "n1")
    assert storage.settings.store_path_root_dir == Path("/data/broker-a-0")
    assert storage.store_host == ("10.0.0.1", 10911)
    assert [broker.broker_name for broker in plan.brokers] == ["broker-a"]
    assert plan.brokers[0].nameservers == (NameServerName(0),)


def test_stores_are_spread_over_the_nodes():
    nodes = [Node(f"n{number}", f"10.0.0.{number}") for number in range(3)]
    placed = places(ClusterSettings(broker_groups=6), *nodes)
    assert sorted(placed.values()) == ["n0", "n0", "n1", "n1", "n2", "n2"]


def test_the_order_of_the_inventory_does_not_matter():
    nodes = [Node(f"n{number}", f"10.0.0.{number}") for number in range(3)]
    settings = ClusterSettings(broker_groups=5)
    assert places(settings, *nodes) == places(settings, *reversed(nodes))


def test_a_store_stays_where_its_data_is():
    nodes = [Node("n1", "10.0.0.1"), Node("n2", "10.0.0.2", {"broker-a-0": 1, "broker-b-0": 1})]
    placed = places(ClusterSettings(broker_groups=3), *nodes)
    assert placed == {"storage-broker-a-0": "n2", "storage-broker-b-0": "n2", "storage-broker-c-0": "n1"}


def test_a_new_store_does_not_take_the_place_that_data_further_down_the_list_claims():
    nodes = [Node("n1", "10.0.0.1", {"broker-b-0": 1}), Node("n2", "10.0.0.2")]
    placed = places(ClusterSettings(broker_groups=2), *nodes)
    assert placed == {"storage-broker-a-0": "n2", "storage-broker-b-0": "n1"}


def test_every_store_has_an_address_and_a_directory_of_its_own():
    plan = make_plan(ClusterSettings(broker_groups=26), [Node("n1", "10.0.0.1")])
    assert len({storage.store_host for storage in plan.storages}) == 26
    assert len({storage.settings.store_path_root_dir for storage in plan.storages}) == 26


def test_the_options_of_the_stores_are_handed_on():
    options = StoreOptions(flush_disk_type=FlushDiskType.ASYNC_FLUSH, max_message_size_bytes=77)
    [storage] = make_plan(ClusterSettings(store=options), [Node("n1", "10.0.0.1")]).storages
    assert storage.settings.flush_disk_type is FlushDiskType.ASYNC_FLUSH
    assert storage.settings.max_message_size_bytes == 77


@pytest.mark.parametrize(
    ("access", "chosen", "checks"),
    [(False, None, False), (True, None, True), (False, True, True), (True, False, False)],
)
def test_access_turns_on_the_check_of_compressed_bodies_unless_configured(access, chosen, checks):
    users = {"enable": access, "super_secret_file": "secret"}
    settings = ClusterSettings(access=users, store={"check_compressed_body": chosen})
    plan = make_plan(settings, [Node("n1", "10.0.0.1")])
    assert plan.storages[0].settings.check_compressed_body is checks
    assert plan.brokers[0].store.check_compressed_body is checks


def test_each_store_has_a_directory_of_its_own_on_the_disks_of_the_log():
    options = StoreOptions(store_path_commit_log=("/disk1", "/disk2"), read_only_commit_log_store_paths=("/disk1",))
    plan = make_plan(ClusterSettings(broker_groups=2, store=options), [Node("n1", "10.0.0.1")])
    assert [storage.settings.commit_log_directories for storage in plan.storages] == [
        (Path("/disk1/broker-a-0"), Path("/disk2/broker-a-0")),
        (Path("/disk1/broker-b-0"), Path("/disk2/broker-b-0")),
    ]
    assert plan.storages[1].settings.read_only_commit_log_store_paths == (Path("/disk1/broker-b-0"),)


@pytest.mark.parametrize(("role", "fixed"), [(None, None), ("ASYNC_MASTER", 0), ("SYNC_MASTER", 0)])
def test_the_controller_receives_whether_roles_are_fixed(role, fixed):
    settings = ClusterSettings(replication={"replicas": 2, "spread": False, "broker_role": role})
    controller = make_plan(settings, [Node("n1", "10.0.0.1")]).controller
    assert controller is not None
    assert controller.rules.fixed_master == fixed


def test_without_a_node_there_is_no_plan():
    with pytest.raises(ConfigError, match="no live node"):
        make_plan(ClusterSettings(), [])


def test_a_directory_is_named_after_the_replica():
    assert store_directory(StorageName("broker-a", 2)) == "broker-a-2"


TWO_GROUPS = [Node("n1", "10.0.0.1", {"broker-a-0": 9, "lost+found": 1}), Node("n2", "10.0.0.2", {"broker-b-0": 9})]


def test_every_broker_group_on_disk_starts_if_nobody_has_chosen_their_number():
    settings, notes = with_found_stores(ClusterSettings(), ["data_dir"], TWO_GROUPS)
    assert settings.broker_groups == 2
    assert notes == ["starting 2 broker groups: the data directory holds their stores"]
    assert with_found_stores(ClusterSettings(), [], [Node("n1", "10.0.0.1")]) == (ClusterSettings(), [])


@pytest.mark.parametrize("groups", [2, 5])
def test_as_many_broker_groups_start_as_were_chosen(groups):
    chosen = ClusterSettings(broker_groups=groups)
    assert with_found_stores(chosen, ["broker_groups"], TWO_GROUPS) == (chosen, [])


def test_a_chosen_number_that_leaves_out_a_store_is_refused_with_the_way_out():
    with pytest.raises(ConfigError) as caught:
        with_found_stores(ClusterSettings(broker_groups=1), ["broker_groups"], TWO_GROUPS)
    for part in ("broker-b-0 (on 10.0.0.2)", "--broker-groups 2", "--leave-out broker-b"):
        assert part in str(caught.value)


@pytest.mark.parametrize("given", [[], ["broker_groups"]])
def test_a_store_may_be_left_out_on_purpose(given):
    settings, notes = with_found_stores(ClusterSettings(leave_out=("broker-b",)), given, TWO_GROUPS)
    assert settings.broker_groups == 1
    assert notes == ["leaving out broker-b-0 (on 10.0.0.2): leave_out names it"]


def test_a_broker_group_is_not_both_chosen_and_left_out():
    with pytest.raises(ConfigError, match="leave_out names broker-b"):
        with_found_stores(ClusterSettings(broker_groups=2, leave_out=("broker-b",)), ["broker_groups"], TWO_GROUPS)
    third = [*TWO_GROUPS, Node("n3", "10.0.0.3", {"broker-c-0": 9})]
    with pytest.raises(ConfigError, match="leave_out names broker-b"):
        with_found_stores(ClusterSettings(leave_out=("broker-b",)), [], third)


def test_replicas_on_disk_are_not_left_out_without_a_word():
    nodes = [Node("n1", "10.0.0.1", {f"broker-a-{replica}": 9 for replica in range(3)})]
    for given in ([], ["replication"]):
        with pytest.raises(ConfigError, match=r"broker-a-1 .*replicas: 3.*--leave-out broker-a-1"):
            with_found_stores(ClusterSettings(), given, nodes)
    left_out = ClusterSettings(leave_out=("broker-a-1", "broker-a-2"))
    _, notes = with_found_stores(left_out, [], nodes)
    assert "broker-a-2" in notes[0]
    three = ClusterSettings(replication={"replicas": 3})
    assert with_found_stores(three, ["replication"], nodes) == (three, [])


def test_a_name_that_no_store_has_cannot_be_left_out():
    with pytest.raises(ValueError, match="'broker-1' is neither the name of a broker group"):
        ClusterSettings(leave_out=("broker-1",))


def test_a_raymq_that_runs_is_compared_with_the_plan(monkeypatch):
    monkeypatch.delenv("RAYMQ_DATA_DIR", raising=False)
    plan = make_plan(ClusterSettings(data_dir=Path("/data")), [Node("n1", "10.0.0.1")])
    here = {"storage-broker-a-0": "/data/broker-a-0"}
    assert differences(plan, ["broker-a", "nameserver-0", "rebalance-0", "storage-broker-a-0"], here) == []
    there = ["nameserver-0", "nameserver-1", "storage-broker-a-0", "storage-broker-b-0"]
    assert differences(plan, there, {"storage-broker-a-0": "/other/broker-a-0"}) == [
        "storage-broker-b-0 is also running and keeps running",
        "2 actors nameserver-N are running instead of 1, and keep running",
        "storage-broker-a-0 keeps its store in /other/broker-a-0, not in /data/broker-a-0",
    ]


CHANGED = ReplicaMembers(5, frozenset({0, 3}), removed=frozenset({1, 2}))


def changed_nodes(*stores: int) -> list[Node]:
    found = {f"broker-a-{store}": 1 for store in stores}
    return [Node("n1", "10.0.0.1", found, members={"broker-a-0": CHANGED}), Node("n2", "10.0.0.2")]


def test_the_replicas_on_disk_count_more_than_the_settings_after_a_change() -> None:
    nodes = changed_nodes(0, 1)
    settings, notes = with_found_stores(ClusterSettings(data_dir=Path("/data")), (), nodes)
    assert settings.replication.has_controller, "each of the two replicas would lead without a Controller"
    assert any("broker-a has the replicas 0, 3" in note for note in notes)
    assert any("leaving out broker-a-1" in note for note in notes)
    plan = make_plan(settings, nodes)
    assert plan.controller is not None
    assert [str(storage.name) for storage in plan.storages] == ["storage-broker-a-0", "storage-broker-a-3"]
    assert (plan.controller.groups, plan.brokers[0].replicas) == ({"broker-a": frozenset({0, 3})}, (0, 3))


def test_a_store_that_the_changed_replicas_do_not_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not name this replica"):
        with_found_stores(ClusterSettings(data_dir=Path("/data")), (), changed_nodes(0, 7))
