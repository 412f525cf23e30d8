"""Tests of changes to users and policies in an access-control state. A change that is repeated has no further
effect."""

from __future__ import annotations

import pytest

from raymq.common.errors import InvalidArgumentError, PolicyNotExistError, UserNotExistError
from raymq.remoting.access.changes import (
    CreateUser,
    DeleteEntries,
    DeleteUser,
    PutEntries,
    UpdateUser,
    carry_out,
    changed_user,
    describe_users,
)
from raymq.remoting.access.policies import Pattern, make_entry
from raymq.remoting.access.state import NO_USERS, AuthState
from raymq.remoting.access.users import User, UserStatus, UserType

ROOT = User("root", b"r" * 32, UserType.SUPER)
TEAM = User("team", b"t" * 32)
ORDERS = make_entry("Topic:orders", ["Pub"])


@pytest.fixture
def state() -> AuthState:
    return NO_USERS.with_user(ROOT, is_new=True).with_user(TEAM, is_new=True).with_entries("team", [ORDERS])


def test_a_user_is_created_changed_and_deleted(state):
    created = carry_out(state, CreateUser(User("new", b"n" * 32)))
    assert created.users.keys() == {"root", "team", "new"}
    changed = carry_out(
        created, UpdateUser("new", b"m" * 32, status=UserStatus.DISABLE, bounds={"bytes_per_second": 10})
    )
    assert changed.users["new"] == User("new", b"m" * 32, UserType.NORMAL, UserStatus.DISABLE, 10)
    assert carry_out(changed, UpdateUser("new", type=UserType.SUPER)).users["new"].is_super
    assert carry_out(changed, DeleteUser("new")).users.keys() == state.users.keys()
    assert carry_out(state, DeleteUser("team")).policies == {}


def test_entries_are_put_and_deleted(state):
    bills = make_entry("Topic:bills", ["Sub"])
    both = carry_out(state, PutEntries("team", (bills,), is_new=True))
    assert both.entries("team") == (ORDERS, bills)
    deny = make_entry("Topic:orders", ["All"], "Deny")
    assert carry_out(both, PutEntries("team", (deny,), is_new=False)).entries("team") == (deny, bills)
    assert carry_out(both, DeleteEntries("team", Pattern.parse("Topic:orders"))).entries("team") == (bills,)
    assert carry_out(both, DeleteEntries("team")).entries("team") == ()


def test_a_repeated_change_has_no_effect(state):
    for change in (CreateUser(TEAM), PutEntries("team", (ORDERS,), is_new=True), PutEntries("team", (ORDERS,), False)):
        assert carry_out(state, change) is state


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (CreateUser(User("team", b"x" * 32)), InvalidArgumentError),
        (UpdateUser("nobody", b"x" * 32), UserNotExistError),
        (UpdateUser("root", type=UserType.NORMAL), InvalidArgumentError),
        (UpdateUser("team", bounds={"bytes_per_second": -1}), InvalidArgumentError),
        (DeleteUser("root"), InvalidArgumentError),
        (DeleteUser("nobody"), UserNotExistError),
        (PutEntries("nobody", (ORDERS,), is_new=True), UserNotExistError),
        (PutEntries("team", (make_entry("Topic:orders", ["Sub"]),), is_new=True), InvalidArgumentError),
        (PutEntries("team", (make_entry("Topic:bills", ["Sub"]),), is_new=False), PolicyNotExistError),
        (DeleteEntries("team", Pattern.parse("Topic:bills")), PolicyNotExistError),
    ],
)
def test_an_invalid_change_of_access_is_refused(state, change, error):
    with pytest.raises(error):
        carry_out(state, change)
    assert changed_user(change) in {"team", "nobody", "root"}


def test_descriptions_have_no_key(state):
    root, team = describe_users(state)
    assert (root.name, root.type, team.policies) == ("root", "Super", (ORDERS,))
    assert "tttt" not in repr(team)
    assert "tttt" not in repr([CreateUser(TEAM), UpdateUser("team", TEAM.key)])


def test_a_stored_state_is_newer_than_the_file_and_the_previous_state(state):
    kept = carry_out(state, DeleteUser("team")).kept_at(1_700_000_000_000)
    assert kept.version == 1_700_000_000_000
    assert carry_out(kept, CreateUser(TEAM)).kept_at(5).version == 1_700_000_000_001


def test_the_super_user_of_the_settings_replaces_the_stored_user(state):
    other = User("root", b"x" * 32, UserType.SUPER)
    assert state.with_owner(other).users["root"] == other
    assert state.with_owner(ROOT) is state
    assert state.with_owner(None) is state
    gone = NO_USERS.with_user(TEAM, is_new=True)
    assert gone.with_owner(ROOT).users.keys() == {"team", "root"}
