"""Tests of `raymq user`: the calls that the commands make to a fake Admin, and their output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raymq.remoting.access.changes import UserDescription
from raymq.remoting.access.policies import make_entry
from raymq.remoting.access.users import derive_key, gateway_secret

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
        def change(*given: Any, **named: Any) -> UserDescription:
            self.asked.append((name, *given, named))
            return TEAM

        return change


@pytest.fixture
def admin() -> Admin:
    return Admin()


def test_users_are_listed_with_their_policies(run):
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
    assert "Topic:orders*" in run("user", "show", "team").output
    assert json.loads(run("user", "show", "team", "--json").output)["policies"][0]["actions"] == ["Pub", "Sub"]


def test_a_secret_is_typed_twice_or_read_from_a_private_file(run, admin, tmp_path):
    run("user", "create", "team", typed="the secret\nthe secret\n")
    file = tmp_path / "secret"
    file.write_text("from a file\n")
    file.chmod(0o600)
    run("user", "create", "team", "--secret-file", str(file), "--super")
    run("user", "update", "team", "--ask-secret", typed="another\nanother\n")
    assert admin.asked == [
        ("create_user", "team", "the secret", {"is_super": False}),
        ("create_user", "team", "from a file", {"is_super": True}),
        ("update_user", "team", {"secret": "another", "is_super": None, "enabled": None}),
    ]
    file.chmod(0o644)
    run("user", "create", "team", "--secret-file", str(file), code=1)


def test_each_command_makes_one_change(run, admin):
    run("user", "update", "team", "--disable", "--bytes-per-second", "0", "--consume-bytes-per-second", "9")
    run("user", "delete", "team")
    bounds = {"bytes_per_second": 0, "consume_bytes_per_second": 9}
    changes = {"secret": None, "is_super": None, "enabled": False, **bounds}
    assert admin.asked == [
        ("update_user", "team", changes),
        ("delete_user", "team", {}),
    ]


def test_the_secret_of_rocketmq_clients_is_derived_without_a_cluster(run, admin, tmp_path):
    file = tmp_path / "secret"
    file.write_text("the secret\n")
    file.chmod(0o600)
    found = json.loads(run("user", "gateway-secret", "team", "--secret-file", str(file), "--json").output)
    assert found == {"access_key": "team", "access_secret": gateway_secret(derive_key("team", "the secret"))}
    assert found["access_secret"] in run("user", "gateway-secret", "team", typed="the secret\n").output
    assert admin.asked == []
    run("user", "gateway-secret", "a b", "--secret-file", str(file), code=1)
