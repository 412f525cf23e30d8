"""Tests of the access decision of ACL 2.0: golden facts, and random policies compared with a simple model."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given, strategies as st

from raymq.common.errors import AccessDeniedError
from raymq.remoting.access.decide import decide, is_allowed, visible
from raymq.remoting.access.policies import (
    Action,
    Decision,
    Entry,
    Need,
    Pattern,
    PolicyType,
    Resource,
    ResourceType,
    make_entry,
    topic_resource,
)
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import User, UserStatus, UserType

TEAM = User("team", bytes(32))
ADMIN = User("admin", bytes(32), UserType.SUPER)


def state(*entries: Entry) -> AuthState:
    return AuthState(MappingProxyType({"team": TEAM, "admin": ADMIN}), MappingProxyType({"team": entries}))


def need(action: Action, topic: str) -> Need:
    return Need((action,), topic_resource(topic))


PUB_ORDERS = need(Action.PUB, "orders")


def test_a_literal_comes_before_a_prefix_golden_143():
    decide(state(make_entry("Topic:o*", ["Pub"], "Deny"), make_entry("Topic:orders", ["Pub"])), TEAM, "", [PUB_ORDERS])


def test_a_super_user_needs_no_policy_and_a_normal_one_does_golden_144():
    decide(state(), ADMIN, "", [PUB_ORDERS])
    with pytest.raises(AccessDeniedError) as caught:
        decide(state(), TEAM, "", [PUB_ORDERS])
    assert caught.value.code == 16
    assert "Pub on Topic:orders" in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "allowed"),
    [
        ([make_entry("*", ["All"])], True),
        ([make_entry("*", ["Sub"])], False),
        ([make_entry("Topic:*", ["Pub"], "Deny"), make_entry("*", ["All"])], False),
        ([make_entry("Topic:or*", ["Pub"]), make_entry("Topic:o*", ["Pub"], "Deny")], True),
        ([make_entry("Group:orders", ["Pub"])], False),
        ([make_entry("Topic:orders", ["Pub"], policy_type="Default")], True),
        ([make_entry("Topic:orders", ["Pub"], policy_type="Default"), make_entry("*", ["Pub"], "Deny")], False),
        ([make_entry("Topic:orders", ["Sub"], "Deny"), make_entry("Topic:o*", ["Pub"])], True),
        ([make_entry("Topic:orders", ["Pub"]), make_entry("Topic:orders", ["Pub"], "Deny")], False),
    ],
)
def test_which_entry_decides(entries, allowed):
    assert is_allowed(state(*entries), TEAM, "", PUB_ORDERS) is allowed


@pytest.mark.parametrize(("address", "allowed"), [("10.1.2.3", True), ("11.1.2.3", False), ("", False)])
def test_an_entry_for_a_source_allows_from_there_only(address, allowed):
    entry = make_entry("Topic:orders", ["Pub"], sources=["10.0.0.0/8"])
    assert is_allowed(state(entry), TEAM, address, PUB_ORDERS) is allowed


@pytest.mark.parametrize(("address", "allowed"), [("10.1.2.3", False), ("11.1.2.3", True), ("", False)])
def test_hiding_an_address_does_not_help_against_a_denial(address, allowed):
    entries = make_entry("Topic:orders", ["Pub"], "Deny", sources=["10.0.0.0/8"]), make_entry("*", ["All"])
    assert is_allowed(state(*entries), TEAM, address, PUB_ORDERS) is allowed


def test_all_needs_must_be_allowed_and_one_action_of_a_need_is_enough():
    given_ = state(make_entry("Topic:orders", ["Sub"]))
    either = Need((Action.PUB, Action.SUB, Action.GET), topic_resource("orders"))
    decide(given_, TEAM, "", [either])
    with pytest.raises(AccessDeniedError):
        decide(given_, TEAM, "", [either, PUB_ORDERS])


def test_a_retry_topic_counts_as_its_group():
    allowed = state(make_entry("Group:g", ["Sub"]))
    decide(allowed, TEAM, "", [need(Action.SUB, "%RETRY%g"), need(Action.SUB, "%DLQ%g")])
    with pytest.raises(AccessDeniedError):
        decide(allowed, TEAM, "", [need(Action.SUB, "g")])


def test_a_disabled_user_may_do_nothing_a_super_user_neither():
    for disabled in User("team", b"", status=UserStatus.DISABLE), User("a", b"", UserType.SUPER, UserStatus.DISABLE):
        for needs in [], [PUB_ORDERS]:
            with pytest.raises(AccessDeniedError, match="disabled"):
                decide(state(make_entry("*", ["All"])), disabled, "", needs)


def test_no_policy_allows_raymqs_own_resources():
    own = Need((Action.ALL,), Resource(ResourceType.SERVER, "raymq"))
    assert not is_allowed(state(make_entry("*", ["All"])), TEAM, "", own)
    assert is_allowed(state(), ADMIN, "", own)


def test_names_that_are_not_a_users_are_not_shown():
    shown = visible(state(make_entry("Topic:team-*", ["Pub"])), TEAM, "", topic_resource)
    assert list(filter(shown, ["team-a", "other", "%RETRY%g"])) == ["team-a"]


NAMES = ["a", "ab", "abc", "b", ""]
PATTERNS = st.one_of(
    st.just(Pattern(ResourceType.ANY)),
    st.builds(
        Pattern, st.sampled_from([ResourceType.TOPIC, ResourceType.GROUP]), st.sampled_from(NAMES), st.booleans()
    ),
)
KEPT_ACTIONS = [action for action in Action if action is not Action.ANY]
ENTRIES = st.builds(
    Entry,
    PATTERNS,
    st.frozensets(st.sampled_from(KEPT_ACTIONS), min_size=1, max_size=3),
    st.sampled_from(Decision),
    st.sampled_from([(), ("10.0.0.0/8",), ("10.0.0.1", "11.0.0.0/8")]),
    st.sampled_from(PolicyType),
)
NEEDS = st.builds(
    Need,
    st.lists(st.sampled_from(KEPT_ACTIONS), min_size=1, max_size=2).map(tuple),
    st.builds(Resource, st.sampled_from([ResourceType.TOPIC, ResourceType.GROUP]), st.sampled_from(NAMES)),
)


def model(entries: list[Entry], wanted: Need, address: str) -> bool:
    """Decide a request as the specification of access control describes it: apply one rule after another, from the most
    specific match of a policy entry to the least specific match. The tests compare raymq's decisions with this
    function."""

    def applies(entry: Entry) -> bool:
        text = str(entry.resource)
        if text != "*":
            kind, _, name = text.partition(":")
            if kind != wanted.resource.type.value:
                return False
            if name[-1:] == "*":
                if wanted.resource.name[: len(name) - 1] != name[:-1]:
                    return False
            elif name != wanted.resource.name:
                return False
        if Action.ALL not in entry.actions and not any(action in entry.actions for action in wanted.actions):
            return False
        inside = {
            "10.0.0.1": True,
            "10.2.0.1": entry.sources == ("10.0.0.0/8",),
            "11.0.0.1": "11.0.0.0/8" in entry.sources,
        }
        return not entry.sources or (entry.decision is Decision.DENY if not address else inside[address])

    for policy_type in (PolicyType.CUSTOM, PolicyType.DEFAULT):
        left = [entry for entry in entries if entry.policy_type is policy_type and applies(entry)]
        levels = [[e for e in left if str(e.resource) != "*" and not str(e.resource).endswith("*")]]
        for length in range(4, -1, -1):
            levels.append(
                [e for e in left if e.resource.is_prefix and str(e.resource) != "*" and len(e.resource.name) == length]
            )
        levels.append([e for e in left if str(e.resource) == "*"])
        for level in levels:
            if level:
                return all(e.decision is Decision.ALLOW for e in level)
    return False


@given(st.lists(ENTRIES, max_size=6), NEEDS, st.sampled_from(["", "10.0.0.1", "10.2.0.1", "11.0.0.1"]))
def test_fuzzed_policies_decide_as_the_plain_model(entries, wanted, address):
    assert is_allowed(state(*entries), TEAM, address, wanted) is model(entries, wanted, address)
