"""Tests of users and policies: values that are accepted or refused, and AuthState, the object that holds all users and
policies."""

from __future__ import annotations

import json
import pickle

import pytest

from raymq.common.errors import InvalidArgumentError, PolicyNotExistError, UserNotExistError
from raymq.remoting.access.policies import Action, Pattern, PolicyType, make_entry
from raymq.remoting.access.state import NO_USERS, AuthState
from raymq.remoting.access.users import User, UserStatus, UserType, derive_key, make_user

KEY = bytes(32)
ADMIN = User("admin", KEY, UserType.SUPER)
TEAM = User("team", KEY, bytes_per_second=1000, messages_per_second=5)


def filled() -> AuthState:
    state = NO_USERS.with_user(ADMIN, is_new=True).with_user(TEAM, is_new=True)
    return state.with_entries(
        "team", [make_entry("Topic:a", ["Pub"]), make_entry("Topic:b*", ["Sub"], sources=["10.0.0.0/8"])]
    )


def test_a_state_survives_json_and_pickle():
    state = filled()
    assert AuthState.load(json.loads(json.dumps(state.dump()))) == state == pickle.loads(pickle.dumps(state))
    assert state.version == 3


def test_nothing_that_is_shown_holds_a_secret_or_a_key():
    user = make_user("team", "a secret of mine")
    texts = repr(user), str(user), json.dumps(user.shown()), repr(NO_USERS.with_user(user, is_new=True))
    assert not [text for text in texts if "secret" in text or user.key.hex() in text or repr(user.key) in text]


def test_keys_differ_by_name_and_by_secret():
    keys = {derive_key("a", "1234567"), derive_key("b", "1234567"), derive_key("a", "12345678")}
    assert {len(key) for key in keys} == {32}
    assert len(keys) == 3


def test_a_secret_of_6_characters_is_refused_and_of_7_taken_golden_142():
    with pytest.raises(InvalidArgumentError, match="7 characters"):
        make_user("team", "123456")
    assert make_user("team", "1234567").name == "team"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "rmq_sys_internal", "a\n"])
def test_a_name_is_refused(name):
    with pytest.raises(InvalidArgumentError):
        NO_USERS.with_user(User(name, KEY), is_new=True)


@pytest.mark.parametrize("quota", [-1, True, 1.5])
def test_a_quota_is_refused(quota):
    with pytest.raises(InvalidArgumentError, match="bytes_per_second must be"):
        NO_USERS.with_user(User("team", KEY, bytes_per_second=quota), is_new=True)


def test_creating_twice_updating_nobody_and_deleting_nobody_are_refused():
    state = filled()
    with pytest.raises(InvalidArgumentError, match="exists already"):
        state.with_user(TEAM, is_new=True)
    with pytest.raises(UserNotExistError):
        state.with_user(User("other", KEY), is_new=False)
    with pytest.raises(UserNotExistError):
        state.without_user("other")
    with pytest.raises(UserNotExistError) as caught:
        state.entries(f"{next(iter(state.users))}x")
    assert caught.value.nearest == (next(iter(state.users)),)


def test_the_last_enabled_super_user_stays():
    state = filled()
    for change in (
        lambda: state.without_user("admin"),
        lambda: state.with_user(User("admin", KEY, UserType.SUPER, UserStatus.DISABLE), is_new=False),
        lambda: state.with_user(User("admin", KEY), is_new=False),
    ):
        with pytest.raises(InvalidArgumentError, match="no enabled super user"):
            change()


def test_a_deleted_user_takes_its_entries_along():
    state = filled().without_user("team").with_user(TEAM, is_new=True)
    assert state.entries("team") == ()


def test_entries_merge_by_equal_resource_and_policy_type():
    state = filled().with_entries("team", [make_entry("Topic:a", ["Get"])])
    state = state.with_entries("team", [make_entry("Topic:a", ["Sub"], policy_type="Default")])
    texts = [(str(entry.resource), entry.policy_type, entry.actions) for entry in state.entries("team")]
    assert texts == [
        ("Topic:a", PolicyType.CUSTOM, {Action.GET}),
        ("Topic:b*", PolicyType.CUSTOM, {Action.SUB}),
        ("Topic:a", PolicyType.DEFAULT, {Action.SUB}),
    ]


def test_creating_an_entry_twice_and_updating_none_are_refused():
    with pytest.raises(InvalidArgumentError, match="already"):
        filled().with_entries("team", [make_entry("Topic:a", ["Get"])], is_new=True)
    with pytest.raises(PolicyNotExistError):
        filled().with_entries("team", [make_entry("Topic:zz", ["Get"])], is_new=False)


def test_deleting_one_entry_and_all_of_a_type():
    state = filled()
    assert [str(e.resource) for e in state.without_entries("team", Pattern.parse("Topic:a")).entries("team")] == [
        "Topic:b*"
    ]
    assert state.without_entries("team").entries("team") == ()
    with pytest.raises(PolicyNotExistError):
        state.without_entries("team", Pattern.parse("Topic:zz"))
    with pytest.raises(PolicyNotExistError):
        state.without_entries("admin")


@pytest.mark.parametrize("text", ["", "orders", "Topic:", "topic:a", "Topic:a*b", "Server:x", "Topic", "**"])
def test_a_pattern_of_resources_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="resource"):
        Pattern.parse(text)


@pytest.mark.parametrize("text", ["*", "Topic:*", "Topic:a", "Topic:a*", "Group:%x", "Cluster:raymq"])
def test_a_pattern_of_resources_prints_as_it_was_written(text):
    assert str(Pattern.parse(text)) == text


@pytest.mark.parametrize("actions", [[], ["Any"], ["Publish"]])
def test_actions_are_refused(actions):
    with pytest.raises(InvalidArgumentError):
        make_entry("Topic:a", actions)


@pytest.mark.parametrize("broken", [{}, {"version": 1, "users": [{"name": "x", "key": "zz"}], "policies": {}}])
def test_a_broken_dump_is_one_clear_error(broken):
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        AuthState.load(broken)
