"""Tests of the methods of Admin that create, change and delete users. A change is sent to the first broker group, and
contains no secret."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.admin import base as admin_base
from raymq.client.admin.upkeep.users import UserAdmin, shown_user
from raymq.common.config.cluster import ClusterSettings
from raymq.common.errors import InvalidArgumentError, UserNotExistError
from raymq.common.names import USERS_BROKER
from raymq.remoting.access.changes import (
    CreateUser,
    DeleteEntries,
    DeleteUser,
    PutEntries,
    UpdateUser,
    UserDescription,
)
from raymq.remoting.access.policies import Pattern, make_entry
from raymq.remoting.access.users import User, UserStatus, UserType, derive_key

TEAM = UserDescription("team", "Normal", "enable", 0, 0, (make_entry("Topic:orders", ["Pub"]),))


@pytest.fixture
def asked(monkeypatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def client(name: str) -> SimpleNamespace:
        def call(method: str, *args: Any, timeout_s: float) -> Any:
            calls.append((name, method, *args))
            return [TEAM] if method == "users" else None

        return SimpleNamespace(call=call)

    monkeypatch.setattr(admin_base, "broker_client", client)
    return calls


@pytest.fixture
def admin() -> UserAdmin:
    return UserAdmin(None, None)  # type: ignore[arg-type]  # no route and no store is asked


def test_the_first_broker_group_keeps_the_users():
    assert ClusterSettings().broker_names[0] == USERS_BROKER


def test_each_call_asks_for_one_change(admin, asked):
    admin.create_user("new", "a secret", bytes_per_second=5)
    admin.create_user("boss", "a secret", is_super=True)
    admin.update_user("new", secret="another", enabled=False)
    admin.update_user("new", is_super=False, enabled=True, messages_per_second=0)
    admin.delete_user("new")
    admin.create_policy("new", "Topic:orders*", ["pub", "Sub"], sources=["10.0.0.0/8"])
    admin.update_policy("new", "*", ["All"], "deny")
    admin.delete_policy("new")
    admin.delete_policy("new", "Group:g")
    assert [(broker, method) for broker, method, _ in asked] == [("broker-a", "change_access")] * 9
    key, entry = derive_key("new", "a secret"), make_entry("Topic:orders*", ["Pub", "Sub"], sources=["10.0.0.0/8"])
    assert [change for *_, change in asked] == [
        CreateUser(User("new", key, bytes_per_second=5)),
        CreateUser(User("boss", derive_key("boss", "a secret"), UserType.SUPER)),
        UpdateUser("new", derive_key("new", "another"), status=UserStatus.DISABLE),
        UpdateUser("new", type=UserType.NORMAL, status=UserStatus.ENABLE, bounds={"messages_per_second": 0}),
        DeleteUser("new"),
        PutEntries("new", (entry,), is_new=True),
        PutEntries("new", (make_entry("*", ["All"], "Deny"),), is_new=False),
        DeleteEntries("new"),
        DeleteEntries("new", Pattern.parse("Group:g")),
    ]


def test_impossible_arguments_are_refused_before_any_call(admin, asked):
    for call in (
        lambda: admin.create_user("new", "short"),
        lambda: admin.create_user("no name", "a secret"),
        lambda: admin.update_user("no name", secret="a secret"),
        lambda: admin.create_policy("team", "orders", ["Pub"]),
        lambda: admin.create_policy("team", "Topic:orders", ["Fly"]),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
    assert asked == []


def test_one_user_is_found_among_all(admin, asked):
    assert admin.user("team") is TEAM
    assert shown_user(TEAM)["policies"][0]["resource"] == "Topic:orders"
    with pytest.raises(UserNotExistError):
        admin.user("nobody")
