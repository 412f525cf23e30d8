"""Tests of the output of the commands for brokers and NameServers, with a fake Admin."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raymq.common.config.live import LiveOptions
from raymq.common.protocol.settings import BrokerConfig
from raymq.tools import cli
from tests.support.clients.fakes import connect_commands


class Values:
    """Fake key-value configuration (settings by namespace and key) of one NameServer."""

    def __init__(self) -> None:
        self.table: dict[str, dict[str, str]] = {"billing": {"currency": "EUR", "area": "EU"}}

    def get_kv(self, namespace: str, key: str) -> str | None:
        return self.list_kv(namespace).get(key)

    def list_kv(self, namespace: str) -> dict[str, str]:
        return self.table.get(namespace, {})

    def put_kv(self, namespace: str, key: str, value: str) -> None:
        self.table.setdefault(namespace, {})[key] = value

    def delete_kv(self, namespace: str, key: str) -> None:
        self.table.get(namespace, {}).pop(key, None)


def run(monkeypatch: pytest.MonkeyPatch, admin: Any, *words: str) -> Result:
    """Run one command whose client uses the fake `admin`."""
    connect_commands(monkeypatch, SimpleNamespace(admin=admin))
    return CliRunner().invoke(cli.cli, list(words))


def test_values_are_put_got_listed_and_deleted(monkeypatch):
    values = Values()

    def at(*words: str) -> Result:
        return run(monkeypatch, values, "kv", *words)

    assert at("get", "billing", "currency").output == "EUR\n"
    assert json.loads(at("put", "billing", "currency", "USD", "--json").output)["value"] == "USD"
    listed = json.loads(at("list", "billing", "--json").output)["values"]
    assert listed == [{"key": "area", "value": "EU"}, {"key": "currency", "value": "USD"}]
    assert at("delete", "billing", "area").exit_code == 0
    missing = at("get", "billing", "area")
    assert (missing.exit_code, missing.output) == (1, "billing has no key area\n")


class Settings:
    """Fake settings of two broker groups. One store does not answer."""

    def __init__(self) -> None:
        self.changed: dict[str, Any] = {}
        self.writable: dict[str, bool] = {}

    def config(self, broker: str | None = None) -> dict[str, BrokerConfig]:
        started = LiveOptions().plain()
        one = BrokerConfig(
            started, self.changed, {**started, **self.changed}, {}, frozenset(["store.delete_when"]), ("storage-x",)
        )
        return {name: one for name in ("broker-a", "broker-b") if broker in (None, name)}

    def set_config(self, name: str, value: Any, broker: str | None = None) -> dict[str, BrokerConfig]:
        self.changed[name] = value
        return self.config(broker)

    def unset_config(self, name: str, broker: str | None = None) -> dict[str, BrokerConfig]:
        self.changed.pop(name, None)
        return self.config(broker)

    def set_broker_writable(self, broker: str, writable: bool) -> None:
        self.writable[broker] = writable


def test_settings_are_shown_got_set_and_unset(monkeypatch):
    settings = Settings()

    def at(*words: str) -> Result:
        return run(monkeypatch, settings, "config", *words)

    assert json.loads(at("show", "--json").output)["settings"] == []
    told = at("set", "deleteWhen", "05", "--broker", "broker-a").output
    assert told == "broker-a has store.delete_when 05 now; storage-x gets the setting when it runs again\n"
    [row, _] = json.loads(at("show", "--json").output)["settings"]
    expected = {
        "broker": "broker-a",
        "setting": "store.delete_when",
        "value": "05",
        "raymq.yaml": "04",
        "changes": "live",
    }
    assert row == expected
    everything = json.loads(at("show", "--effective", "--broker", "broker-a", "--json").output)["settings"]
    assert len(everything) == len(LiveOptions().plain())
    assert at("get", "delete_when").output == "broker-a 05\nbroker-b 05\n"
    assert json.loads(at("unset", "delete_when", "--json").output)["values"] == {"broker-a": "04", "broker-b": "04"}
    assert "raymq starts" in str(at("set", "flushDiskType", "ASYNC_FLUSH").exception)


def test_a_broker_group_is_made_writable_or_not(monkeypatch):
    settings = Settings()
    assert "takes no messages" in run(monkeypatch, settings, "broker", "writable", "off", "broker-b").output
    assert settings.writable == {"broker-b": False}
