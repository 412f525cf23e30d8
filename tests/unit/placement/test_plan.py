"""The nodes that the planner chooses for broker groups; data stays where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.plan import make_plan
from placement.replica_nodes import Node, store_directory
from raymq.config.cluster import ClusterSettings
from raymq.config.store import FlushDiskType, StoreOptions
from raymq.errors import ConfigError
from raymq.names import NameServerName, StorageName


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
def test_compressed_bodies_are_checked_with_access_on_unless_the_settings_say_otherwise(access, chosen, checks):
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
def test_the_controller_is_told_whether_roles_are_fixed(role, fixed):
    settings = ClusterSettings(replication={"replicas": 2, "spread": False, "broker_role": role})
    controller = make_plan(settings, [Node("n1", "10.0.0.1")]).controller
    assert controller is not None
    assert controller.rules.fixed_master == fixed


def test_without_a_node_there_is_no_plan():
    with pytest.raises(ConfigError, match="no node"):
        make_plan(ClusterSettings(), [])


def test_a_directory_is_named_after_the_replica():
    assert store_directory(StorageName("broker-a", 2)) == "broker-a-2"
