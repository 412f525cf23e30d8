"""The commands about brokers and NameServers: their output, of an admin that is a stand-in."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raymq import cli
from raymq.cli.upkeep import kv


class Values:
    """The KV configuration of one NameServer."""

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


def run(monkeypatch: pytest.MonkeyPatch, module: Any, admin: Any, *words: str) -> Result:
    """One command, whose client has this admin."""

    @contextmanager
    def client(address: str | None) -> Any:
        yield SimpleNamespace(admin=admin)

    monkeypatch.setattr(module, "client_of", client)
    return CliRunner().invoke(cli.cli, list(words))


def test_values_are_put_got_listed_and_deleted(monkeypatch):
    values = Values()

    def at(*words: str) -> Result:
        return run(monkeypatch, kv, values, "kv", *words)

    assert at("get", "billing", "currency").output == "EUR\n"
    assert json.loads(at("put", "billing", "currency", "USD", "--json").output)["value"] == "USD"
    listed = json.loads(at("list", "billing", "--json").output)["values"]
    assert listed == [{"key": "area", "value": "EU"}, {"key": "currency", "value": "USD"}]
    assert at("delete", "billing", "area").exit_code == 0
    missing = at("get", "billing", "area")
    assert (missing.exit_code, missing.output) == (1, "billing has no key area\n")
