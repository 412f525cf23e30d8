"""Tests of settings that can change while raymq runs: how they are written, and that the checks of raymq.yaml also
apply to them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raymq.common.config.cluster import BrokerOptions
from raymq.common.config.live import (
    LIVE_SETTINGS,
    LiveOptions,
    apply_changes,
    check_change,
    full_name,
    is_live,
    live_name,
    parse_value,
)
from raymq.common.config.store import StoreOptions
from raymq.common.errors import ConfigError, InvalidArgumentError

START = LiveOptions(store=StoreOptions(file_reserved_time_hours=24))


@pytest.mark.parametrize(
    ("spelling", "full"),
    [
        ("store.delete_when", "store.delete_when"),
        ("delete_when", "store.delete_when"),
        ("deleteWhen", "store.delete_when"),
        ("fileReservedTime", "store.file_reserved_time_hours"),
        ("brokerPermission", "broker.broker_permission"),
        ("osPageCacheBusyTimeOutMills", "store.os_page_cache_busy_timeout_ms"),
        ("sendThreadPoolQueueCapacity", "store.send_queue_capacity"),
        ("metrics.enable", "metrics.enable"),
        ("cluster_name", "cluster_name"),
    ],
)
def test_a_setting_has_its_own_and_rocketmqs_names(spelling, full):
    assert full_name(spelling) == full


def test_a_name_that_means_nothing_or_two_things_is_refused():
    with pytest.raises(InvalidArgumentError, match="did you mean 'delete_when'"):
        full_name("delete_wen")
    with pytest.raises(InvalidArgumentError, match=r"metrics\.enable or console\.enable"):
        full_name("enable")


@pytest.mark.parametrize("name", ["flushDiskType", "broker_groups", "metrics.enable"])
def test_settings_that_are_not_live_are_refused(name):
    with pytest.raises(InvalidArgumentError, match=r"is read only when raymq starts.*raymq\.yaml"):
        live_name(name)


@pytest.mark.parametrize("name", ["replication.replicas", "minInSyncReplicas"])
def test_the_error_for_a_setting_of_the_replicas_names_the_command_that_changes_it(name):
    with pytest.raises(InvalidArgumentError, match="`raymq broker replicas NAME`"):
        live_name(name)


def test_every_live_setting_is_one_of_its_section():
    for section, names in LIVE_SETTINGS.items():
        fields = type(getattr(START, section)).model_fields
        assert set(names) <= set(fields)
        assert all(is_live(f"{section}.{name}") for name in names)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("deleteWhen", "04", "04"),
        ("fileReservedTime", "48", 48),
        ("waitTimeMillsInPullQueue", "900", 900),
        ("heartbeatThreadPoolQueueCapacity", "7", 7),
        ("broker.auto_create_topic_enable", "true", True),
    ],
)
def test_values_are_typed_as_in_the_file(name, text, value):
    assert parse_value(name, text) == value
    assert check_change(START, {}, name, value) == (full_name(name), value)


@pytest.mark.parametrize("text", ["[1]", "{a: 1}", "&a 1"])
def test_a_value_is_one_value(text):
    with pytest.raises((InvalidArgumentError, ConfigError)):
        parse_value("fileReservedTime", text)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("store.file_reserved_time_hours", -1, r"store\.file_reserved_time_hours.*greater"),
        ("store.delete_when", "25", r"store\.delete_when"),
        ("broker.broker_permission", 3, "broker_permission"),
        ("store.send_queue_capacity", "many", "integer"),
    ],
)
def test_a_value_that_the_file_could_not_have_is_refused(name, value, text):
    with pytest.raises(ConfigError, match=text):
        check_change(START, {}, name, value)


def test_valid_changes_override_the_file_and_invalid_changes_are_ignored():
    changes = {"store.file_reserved_time_hours": 48, "store.delete_when": "99", "store.gone": 1}
    now, refused = apply_changes(START, {**changes, "broker.default_topic_queue_nums": 2})
    assert now.store.file_reserved_time_hours == 48
    assert now.store.delete_when == StoreOptions().delete_when
    assert now.broker == BrokerOptions(default_topic_queue_nums=2)
    assert sorted(refused) == ["store.delete_when", "store.gone"]
    assert now.plain()["store.flush_disk_type"] == "SYNC_FLUSH"


def test_an_unknown_setting_is_reported_with_commands_that_list_settings():
    with pytest.raises(InvalidArgumentError) as caught:
        full_name("xyzzy")
    assert "setting 'xyzzy' does not exist; see `raymq config show --effective`" in str(caught.value)
    with pytest.raises(InvalidArgumentError, match=r"did you mean 'delete_when'\? Otherwise see"):
        full_name("delete_wen")


def test_a_client_and_a_command_load_no_model_of_the_settings() -> None:
    program = """
import sys
import raymq.client.client, raymq.client.admin.admin, raymq.tools.cli
print(sorted(name for name in sys.modules if name == "pydantic" or name.startswith("raymq.common.config.")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "['raymq.common.config.values']\n"
