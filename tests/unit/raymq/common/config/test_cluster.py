"""Tests of settings in `raymq.yaml` that are refused, and of the error texts."""

from __future__ import annotations

import ast
import inspect
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from raymq.common.config.cluster import (
    DATA_DIR_VARIABLE,
    SETTINGS_SECTIONS,
    BrokerOptions,
    BrokerRole,
    ClusterSettings,
    data_dir_here,
    load_settings,
    path_here,
)
from raymq.common.config.section import SettingsSection
from raymq.common.config.store import FlushDiskType, StoreOptions, StoreSettings
from raymq.common.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "raymq.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def test_without_a_file_the_defaults_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None)
    assert settings == ClusterSettings()
    assert settings.store.flush_disk_type is FlushDiskType.SYNC_FLUSH
    assert settings.broker_names == ["broker-a"]
    assert settings.data_dir == Path.home() / ".raymq/store"


def test_the_file_of_the_current_directory_is_read(write, tmp_path, monkeypatch):
    write("cluster_name: shop\nbroker_groups: 3\nstore:\n  flush_disk_type: ASYNC_FLUSH\n")
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None)
    assert settings.cluster_name == "shop"
    assert settings.broker_names == ["broker-a", "broker-b", "broker-c"]
    assert settings.store.flush_disk_type is FlushDiskType.ASYNC_FLUSH


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_means_the_defaults(write, text):
    assert load_settings(write(text)) == ClusterSettings()


def test_arguments_of_the_caller_override_the_file_unless_they_are_none(write, tmp_path):
    path = write("broker_groups: 3\ndata_dir: /elsewhere\n")
    settings = load_settings(path, broker_groups=None, data_dir=tmp_path)
    assert (settings.broker_groups, settings.data_dir) == (3, tmp_path)


def test_a_relative_data_directory_is_resolved_in_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_settings(None, data_dir="store").data_dir == tmp_path / "store"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("broker_grops: 2", "unknown key 'broker_grops'; did you mean 'broker_groups'?"),
        ("store: {flush_disk_typ: ASYNC_FLUSH}", "unknown key 'store.flush_disk_typ'; did you mean 'flush_disk_type'?"),
        ("zzz: 1", "unknown key 'zzz'; the keys are cluster_name, data_dir"),
        ("store: {zzz: 1}", "unknown key 'store.zzz'; the keys are store_path_commit_log"),
        ("store: {store_path_root_dir: /x}", "unknown key 'store.store_path_root_dir'"),
        ("1: 2", "1: Keys should be strings"),
        ("broker_groups: 0", "broker_groups: Input should be greater than or equal to 1, got 0"),
        ("broker_groups: 27", "broker_groups: Input should be less than or equal to 26"),
        ("broker_groups: many", "broker_groups: .* got 'many'"),
        ("broker_groups: 1.5", "broker_groups"),
        ("broker_groups:", "broker_groups"),
        ("name_servers: 4", "name_servers"),
        ("cluster_name: a b", "cluster_name"),
        ("data_dir: ~nobody-has-this-name/x", "data_dir"),
        ("store: 5", "store"),
        ("store: {flush_disk_type: SOMETIMES}", "store.flush_disk_type: Input should be 'SYNC_FLUSH' or 'ASYNC_FLUSH'"),
        ("store: {mapped_file_size_commit_log_bytes: 63}", "mapped_file_size_commit_log_bytes"),
        ("store: {max_message_size_bytes: 0}", "max_message_size_bytes"),
        ("store: {transient_store_pool_enable: true}", "transient_store_pool_enable needs flush_disk_type ASYNC_FLUSH"),
        ("store: {store_path_commit_log: [/a, /b/../a, /a]}", "store_path_commit_log: .*listed twice"),
        (
            "store: {store_path_commit_log: [/a], read_only_commit_log_store_paths: [/a, /b]}",
            "contains all directories of store_path_commit_log",
        ),
        ("- a\n- b", "must be a mapping of settings, not a list"),
        ("just text", "must be a mapping of settings, not a str"),
        ("a: [", "line 1 is not YAML: expected the node content, but found '<stream end>'; correct this line"),
        ("a: 1\n b: 2", "line 2 is not YAML: mapping values are not allowed"),
        (b"\xff\xfe\xfa", "is not YAML"),
        ("x: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("x: 2001-99-99", "is not YAML: month must be in"),
        ("x: !!int abc", "is not YAML: invalid literal"),
        (
            "broker_groups: 2\nname_servers: 1\nbroker_groups: 3\n",
            "line 3: key 'broker_groups' is given twice",
        ),
        ("store:\n  delete_when: '04'\n  delete_when: '05'\n", "line 3: key 'delete_when' is given twice.* line 2"),
        ("{broker_groups: 2, broker_groups: 2}", "line 1: key 'broker_groups' is given twice"),
        ("? [a]\n: b", "line 1: a key must be a name"),
        ("x: " + "[" * 20_000, "line 1: the settings are nested more than 16 deep"),
        ("x: " + "[" * 17 + "]" * 17, "line 1: the settings are nested more than 16 deep"),
        ("x: " + "{a: " * 5_000 + "1" + "}" * 5_000, "line 1: the settings are nested more than 16 deep"),
        ("\n".join(" " * n + "a:" for n in range(300)), "line 16: the settings are nested more than 16 deep"),
        ("- " * 10_000, "the settings are nested more than 16 deep"),
        ("x: [" + "1," * 11_000 + "]", "the file has more than 10,000 values"),
        ("a: &a [1]\nb: *a", r"line 1: anchors and aliases \(& and \*\) are not allowed in settings"),
        ("a: *a", "line 1: anchors and aliases"),
        ("a: &a {b: *a}", "line 1: anchors and aliases"),
        ("<<: {broker_groups: 2}\n<<: {broker_groups: 3}", "line 2: key '<<' is given twice"),
        ("#" * 70_000, "is larger than 64 KiB"),
        ("x: " + "y" * 60_000, "unknown key 'x'"),
        ("broker_groups: " + "y" * 60_000, "got 'y{199}…$"),
        ("y" * 1_000 + ": 1", "unknown key 'y{200}…'"),
        ("broker_groups: " + "9" * 5_000, "is not YAML: Exceeds the limit"),
        ("".join(f"unknown{n}: 1\n" for n in range(1_000)), "; and 980 more$"),
    ],
)
def test_a_bad_setting_is_refused_with_the_file_and_the_key(write, text, said):
    path = write(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


def test_no_file_can_make_the_message_long(write):
    for text in (ALIASES, "x: " + "[" * 60_000, "".join(f"{n}: {'z' * 40}\n" for n in range(1_200))):
        with pytest.raises(ConfigError) as caught:
            load_settings(write(text))
        assert len(str(caught.value)) < 20_000


def test_one_error_lists_all_invalid_settings(write):
    with pytest.raises(ConfigError, match=r"broker_groups: .*; name_servers: |name_servers: .*; broker_groups: "):
        load_settings(write("broker_groups: 0\nname_servers: 9\n"))


def test_a_bad_override_is_refused_without_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the settings: broker_groups"):
        load_settings(None, broker_groups=99)


@pytest.mark.parametrize("name", ["no-such-file.yaml", "."])
def test_an_unreadable_settings_file_is_a_clear_error(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot read settings from"):
        load_settings(tmp_path / name)


def test_settings_go_to_the_launcher_and_back():
    settings = ClusterSettings(broker_groups=2, store=StoreOptions(flush_disk_type=FlushDiskType.ASYNC_FLUSH))
    assert ClusterSettings(**settings.model_dump(mode="json")) == settings
    assert ClusterSettings(**yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json")))) == settings


def test_fixed_roles_go_to_the_launcher_and_back():
    settings = ClusterSettings(replication={"replicas": 2, "broker_role": "SYNC_MASTER", "in_sync_replicas": 2})
    assert settings.replication.broker_role is BrokerRole.SYNC_MASTER
    assert ClusterSettings(**settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"broker_role": "ASYNC_MASTER", "in_sync_replicas": 2},
            "does not wait for replicas: leave out in_sync_replicas, or",
        ),
        ({"broker_role": "ASYNC_MASTER", "min_in_sync_replicas": 2}, "leave out min_in_sync_replicas, or use SYNC_"),
        ({"broker_role": "SYNC_MASTER", "enable_elect_unclean_master": True}, "no master is elected"),
        ({"broker_role": "SYNC_MASTER", "in_sync_replicas": 4}, "only 3 of 3 replicas"),
        ({"broker_role": "SLAVE"}, "'ASYNC_MASTER' or 'SYNC_MASTER', got 'SLAVE'"),
    ],
)
def test_roles_that_contradict_other_settings_are_refused(more, words):
    with pytest.raises(ConfigError, match=words):
        load_settings(None, replication={"replicas": 3, **more})


def test_settings_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        ClusterSettings().broker_groups = 2


def test_a_consume_queue_file_holds_whole_units(tmp_path):
    settings = StoreSettings(store_path_root_dir=tmp_path, mapped_file_size_consume_queue_bytes=21)
    assert settings.mapped_file_size_consume_queue_bytes == 40


def described_fields(module: ModuleType) -> set[tuple[str, str]]:
    """Return the class fields of a module that a docstring directly follows, as pairs (class, field)."""
    return {
        (cls.name, field.target.id)
        for cls in ast.parse(inspect.getsource(module)).body
        if isinstance(cls, ast.ClassDef)
        for field, below in pairwise(cls.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


@pytest.mark.parametrize("model", [ClusterSettings, StoreSettings, *SETTINGS_SECTIONS.values()])
def test_every_setting_has_a_docstring(model):
    described = set[str]()
    for base in model.__mro__:
        if issubclass(base, SettingsSection):
            described |= {name for cls, name in described_fields(sys.modules[base.__module__]) if cls == base.__name__}
    assert set(model.model_fields) - described == set()


@pytest.mark.parametrize(("period_ms", "interval_s"), [(1000, 10), (30_000, 30), (300_000, 60)])
def test_golden_32_the_registration_period_has_bounds(period_ms, interval_s):
    assert BrokerOptions(register_name_server_period_ms=period_ms).registration_interval_s == interval_s


def test_an_unknown_key_of_the_broker_section_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'auto_create_topic_enable'"):
        load_settings(None, broker={"auto_create_topics_enable": True})


def test_a_node_may_keep_its_stores_elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv(DATA_DIR_VARIABLE, raising=False)
    assert data_dir_here(Path("/data")) == Path("/data")
    assert path_here(Path("/data/broker-a-0/lock"), Path("/data")) == Path("/data/broker-a-0/lock")
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(tmp_path))
    assert data_dir_here(Path("/data")) == tmp_path
    assert path_here(Path("/data/broker-a-0/lock"), Path("/data")) == tmp_path / "broker-a-0" / "lock"
