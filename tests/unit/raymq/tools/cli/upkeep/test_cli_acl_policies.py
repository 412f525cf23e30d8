"""Tests of the `raymq acl` commands that list and change policies: the calls that they make to a fake Admin, and their
output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raymq.remoting.access.changes import UserDescription
from raymq.remoting.access.policies import make_entry

TEAM = UserDescription("team", "Normal", "enable", 0, 0, (make_entry("Topic:orders*", ["Pub", "Sub"]),))


class Admin:
    """Fake Admin with one user that has one policy. It records the changes."""

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


def test_policies_are_listed(run: Any) -> None:
    [row] = json.loads(run("acl", "list", "--json").output)["policies"]
    assert row == {
        "user": "team", "resource": "Topic:orders*", "actions": "Pub Sub", "decision": "Allow", "sources": ""
    }  # fmt: skip


def test_each_command_changes_one_policy(run: Any, admin: Admin) -> None:
    run("acl", "create", "team", "--resource", "*", "--action", "All", "--deny", "--source", "10.0.0.1")
    run("acl", "update", "team", "--resource", "Topic:a", "--action", "Pub", "--action", "Sub")
    run("acl", "delete", "team", "--resource", "Topic:a")
    run("acl", "delete", "team")
    assert admin.asked == [
        ("create_policy", "team", "*", ("All",), "Deny", {"sources": ("10.0.0.1",)}),
        ("update_policy", "team", "Topic:a", ("Pub", "Sub"), "Allow", {"sources": ()}),
        ("delete_policy", "team", "Topic:a", {}),
        ("delete_policy", "team", None, {}),
    ]
