"""Tests of the output of `raymq transactions`, with a fake Admin."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from raymq.common.protocol.transactions import TransactionFigures, WaitingTransactions
from raymq.tools import cli
from tests.support.clients.fakes import connect_commands


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    born_ms = time.time_ns() // 1_000_000 - 90_500
    figures = {"broker-a": TransactionFigures([WaitingTransactions("orders", "shop", 3, born_ms)], 10, 2, 1, 7)}
    connect_commands(monkeypatch, SimpleNamespace(admin=SimpleNamespace(transactions=lambda: figures)))


def test_the_list_has_the_number_of_transactions_and_the_oldest_age() -> None:
    result = CliRunner().invoke(cli.cli, ["transactions", "list", "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.output)
    [row] = printed["transactions"]
    assert row.pop("oldest_s") >= 90
    assert row == {"broker": "broker-a", "topic": "orders", "group": "shop", "waiting": 3}
    assert printed["since_start"] == {"broker-a": {"committed": 10, "rolled_back": 2, "given_up": 1, "checked": 7}}


def test_people_get_a_table() -> None:
    result = CliRunner().invoke(cli.cli, ["transactions", "list"])
    assert result.exit_code == 0
    assert all(word in result.output for word in ("broker-a", "orders", "shop", "oldest_s"))


def test_the_help_has_an_example() -> None:
    result = CliRunner().invoke(cli.cli, ["transactions", "list", "--help"])
    assert "Example: raymq transactions list" in result.output
