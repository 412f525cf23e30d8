"""Tests of the output of `raymq kv`, with a fake Admin."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import Result


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


@pytest.fixture
def admin() -> Values:
    return Values()


def test_values_are_put_got_listed_and_deleted(run: Any) -> None:
    def at(*words: str, code: int = 0) -> Result:
        return run("kv", *words, code=code)

    assert at("get", "billing", "currency").output == "EUR\n"
    assert json.loads(at("put", "billing", "currency", "USD", "--json").output)["value"] == "USD"
    listed = json.loads(at("list", "billing", "--json").output)["values"]
    assert listed == [{"key": "area", "value": "EU"}, {"key": "currency", "value": "USD"}]
    at("delete", "billing", "area")
    assert at("get", "billing", "area", code=1).output == "billing has no key area\n"
