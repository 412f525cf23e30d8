"""Tests of `raymq user`, and of the `raymq acl` commands that connect to a cluster: the calls that they make to the
Admin, and their output."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raymq.remoting.access.changes import UserDescription
from raymq.remoting.access.policies import make_entry
from raymq.tools import cli
from tests.support.clients.fakes import connect_commands

TEAM = UserDescription(
    "team", "Normal", "enable", 500, 0, (make_entry("Topic:orders*", ["Pub", "Sub"]),), consume_messages_per_second=30
)


class Admin:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def users(self) -> list[UserDescription]:
        return [TEAM]

    def user(self, name: str) -> UserDescription:
        return TEAM

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.asked.append((name, *given, named))


@pytest.fixture
def admin() -> Admin:
    return Admin()


@pytest.fixture
def run(monkeypatch, admin) -> Any:
    connect_commands(monkeypatch, SimpleNamespace(admin=admin))

    def run(*words: str, typed: str = "") -> Result:
        return CliRunner().invoke(cli.cli, list(words), input=typed)

    return run


def test_users_and_policies_are_listed(run):
    [row] = json.loads(run("user", "list", "--json").output)["users"]
    assert row == {
        "user": "team",
        "type": "Normal",
        "status": "enable",
        "bytes/s": 500,
        "messages/s": "",
        "consumed bytes/s": "",
        "consumed messages/s": 30,
        "policies": 1,
    }
    [row] = json.loads(run("acl", "list", "--json").output)["policies"]
    assert row == {
        "user": "team", "resource": "Topic:orders*", "actions": "Pub Sub", "decision": "Allow", "sources": ""
    }  # fmt: skip
    assert "Topic:orders*" in run("user", "show", "team").output
    assert json.loads(run("user", "show", "team", "--json").output)["policies"][0]["actions"] == ["Pub", "Sub"]


def test_a_secret_is_typed_twice_or_read_from_a_private_file(run, admin, tmp_path):
    assert run("user", "create", "team", typed="the secret\nthe secret\n").exit_code == 0
    file = tmp_path / "secret"
    file.write_text("from a file\n")
    file.chmod(0o600)
    assert run("user", "create", "team", "--secret-file", str(file), "--super").exit_code == 0
    assert run("user", "update", "team", "--ask-secret", typed="another\nanother\n").exit_code == 0
    assert admin.asked == [
        ("create_user", "team", "the secret", {"is_super": False}),
        ("create_user", "team", "from a file", {"is_super": True}),
        ("update_user", "team", {"secret": "another", "is_super": None, "enabled": None}),
    ]
    file.chmod(0o644)
    assert run("user", "create", "team", "--secret-file", str(file)).exit_code != 0


def test_each_command_makes_one_change(run, admin):
    run("user", "update", "team", "--disable", "--bytes-per-second", "0", "--consume-bytes-per-second", "9")
    run("user", "delete", "team")
    run("acl", "create", "team", "--resource", "*", "--action", "All", "--deny", "--source", "10.0.0.1")
    run("acl", "update", "team", "--resource", "Topic:a", "--action", "Pub", "--action", "Sub")
    run("acl", "delete", "team", "--resource", "Topic:a")
    run("acl", "delete", "team")
    bounds = {"bytes_per_second": 0, "consume_bytes_per_second": 9}
    changes = {"secret": None, "is_super": None, "enabled": False, **bounds}
    assert admin.asked == [
        ("update_user", "team", changes),
        ("delete_user", "team", {}),
        ("create_policy", "team", "*", ("All",), "Deny", {"sources": ("10.0.0.1",)}),
        ("update_policy", "team", "Topic:a", ("Pub", "Sub"), "Allow", {"sources": ()}),
        ("delete_policy", "team", "Topic:a", {}),
        ("delete_policy", "team", None, {}),
    ]
