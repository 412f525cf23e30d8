"""Tests of ACL 1.0 files: golden facts, files that are refused, and random accounts compared with a simple model of ACL
1.0's access check."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from raymq.common.errors import ConfigError
from raymq.common.names import TRACE_TOPIC
from raymq.remoting.access.acl1 import Account, Acl1, Perm, parse_perm, read_acl1
from raymq.remoting.access.decide import is_allowed
from raymq.remoting.access.policies import Action, Need, Resource, ResourceType, topic_resource
from raymq.remoting.access.state import NO_USERS, AuthState
from raymq.remoting.access.users import User, UserType, derive_key
from raymq.remoting.access.users_file import read_users_file
from tests.support.cases import examples

EXAMPLE = """
globalWhiteRemoteAddresses:
- 10.10.103.*
accounts:
- accessKey: RocketMQ
  secretKey: 12345678
  whiteRemoteAddress: 192.168.0.*
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  - topicC=SUB
  groupPerms:
  # the group should convert to retry topic
  - groupA=DENY
- accessKey: rocketmq2
  secretKey: 12345678
  whiteRemoteAddress:
  admin: true
"""

PUB, SUB = (Action.PUB,), (Action.SUB,)


def state_of(accounts: Acl1) -> AuthState:
    """Convert ACL 1.0 accounts as `read_users_file` does, but without the slow derivation of secret keys."""
    state = NO_USERS
    for one in accounts.accounts:
        kind = UserType.SUPER if one.is_super else UserType.NORMAL
        state = state.with_user(User(one.access_key, bytes(32), kind), is_new=True)
        state = state.with_entries(one.access_key, one.entries(), is_new=True)
    return state


def may(accounts: Acl1, user: str, actions: tuple[Action, ...], resource: Resource) -> bool:
    state = state_of(accounts)
    return is_allowed(state, state.user(user), "", Need(actions, resource))


def topic(name: str) -> Resource:
    return Resource(ResourceType.TOPIC, name)


def group(name: str) -> Resource:
    return Resource(ResourceType.GROUP, name)


@pytest.mark.parametrize(
    ("text", "perm"),
    [
        pytest.param("PUB|SUB", Perm(12), id="golden-138"),
        pytest.param("SUB|PUB", Perm(12), id="golden-138-turned"),
        pytest.param("pub", Perm.DENY, id="golden-138-small"),
        pytest.param(None, Perm.DENY, id="golden-138-null"),
        ("PUB", Perm(4)),
        (" SUB ", Perm(8)),
        ("DENY", Perm(1)),
        ("", Perm.DENY),
        ("ANY", Perm.DENY),
    ],
)
def test_permissions_are_read_as_rocketmq_does(text: str | None, perm: Perm) -> None:
    assert parse_perm(text) == perm


def test_an_account_with_one_topics_permission_only_golden_140() -> None:
    read = read_acl1([("a", "accounts: [{accessKey: account, secretKey: 1234567, topicPerms: [orders=PUB]}]")])
    assert may(read, "account", PUB, topic("orders"))
    assert not may(read, "account", SUB, topic("orders"))
    assert not may(read, "account", PUB, topic("other"))
    assert not may(read, "account", SUB, group("billing"))


def test_rocketmqs_own_example_is_read() -> None:
    read = read_acl1([("plain_acl.yml", EXAMPLE)])
    first, second = read.accounts
    assert (first.secret_key, first.is_super, second.is_super) == ("12345678", False, True)
    decided = {
        ("Pub", "topicB"): may(read, "RocketMQ", PUB, topic("topicB")),
        ("Sub", "topicC"): may(read, "RocketMQ", SUB, topic("topicC")),
        ("Pub", "topicC"): may(read, "RocketMQ", PUB, topic("topicC")),
        ("Sub", "topicA"): may(read, "RocketMQ", SUB, topic("topicA")),
        ("Sub", "groupA"): may(read, "RocketMQ", SUB, group("groupA")),
        ("Sub", "%RETRY%groupA"): may(read, "RocketMQ", SUB, topic_resource("%RETRY%groupA")),
        ("Sub", "groupB"): may(read, "RocketMQ", SUB, group("groupB")),
        ("Pub", "trace"): may(read, "RocketMQ", PUB, topic(TRACE_TOPIC)),
        ("Create", "new"): may(read, "RocketMQ", (Action.CREATE,), topic("new")),
    }
    assert [key for key, allowed in decided.items() if allowed] == [
        ("Pub", "topicB"),
        ("Sub", "topicC"),
        ("Sub", "groupB"),
        ("Pub", "trace"),
    ]
    assert [one.split(" ")[0] for one in read.left_out] == ["globalWhiteRemoteAddresses", "whiteRemoteAddress"]
    assert "12345678" not in repr(read)


def test_an_action_that_a_name_leaves_out_does_not_come_from_the_defaults_and_looking_at_it_stays_allowed() -> None:
    account = "accessKey: account, secretKey: 1234567, defaultTopicPerm: PUB|SUB, topicPerms: [news=SUB]"
    read = read_acl1([("a", f"accounts: [{{{account}}}]")])
    assert not may(read, "account", PUB, topic("news"))
    assert may(read, "account", SUB, topic("news"))
    # A consumer's request for the bounds of a queue needs one of the rights PUB, SUB and GET.
    assert may(read, "account", (Action.PUB, Action.SUB, Action.GET), topic("news"))
    assert may(read, "account", PUB, topic("other"))


def test_an_admin_with_permissions_of_its_own_administers_topics_and_groups_and_is_no_super_user() -> None:
    read = read_acl1(
        [("a", "accounts: [{accessKey: account, secretKey: 1234567, admin: true, topicPerms: [orders=PUB]}]")]
    )
    assert may(read, "account", (Action.DELETE,), topic("orders"))
    assert may(read, "account", (Action.CREATE,), group("any"))
    assert not may(read, "account", SUB, topic("orders"))
    assert not may(read, "account", (Action.UPDATE,), Resource(ResourceType.SERVER, "Broker.set_config"))
    assert ["settings of brokers" in one for one in read.left_out] == [True]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(
            "accounts: [{accessKey: account, secretKey: xs3cretx, topicPerms: [orders]}]",
            "account 1: .*NAME=PERM",
            id="golden-139",
        ),
        pytest.param("accounts: [{accessKey: account, secretKey: s3cret}]", "secretKey 7", id="golden-142"),
        ("accounts: [{accessKey: acount, secretKey: xs3cretx}]", "accessKey must have at least 7"),
        ("accounts: [{accessKey: 'ac count', secretKey: xs3cretx}]", "account 1: user name 'ac count'"),
        ("accounts: [{accessKey: account, secretKey: xs3cretx, topicPerms: [a=PUB=SUB]}]", "NAME=PERM"),
        ("accounts: [{accessKey: account, secretKey: xs3cretx, topicPerms: ['a*=PUB']}]", "no prefixes"),
        ("accounts: [{accessKey: account, secretKey: xs3cretx, topicPerms: ['=PUB']}]", "not a resource"),
        ("accounts: [{accessKey: account, secretKey: xs3cretx, topicPerms: {a: PUB}}]", "must be a list"),
        ("accounts: [{accessKey: account, secretKey: [xs3cretx]}]", "secretKey must be a single value"),
        (
            "accounts: [{accessKey: account, secretKey: xs3cretx, whiteRemoteAddress: 10.0.0.0/8}]",
            "not an address pattern",
        ),
        ("accounts: [account]", "account 1: an account must have"),
        ("globalWhiteRemoteAddresses: [abc]\naccounts: []", "not an address pattern"),
        ("accounts: []", "the accounts are missing"),
        ("accounts: [{secretKey: xs3cretx", r"not YAML \(line 1\)"),
        ("[]", "must have the key `accounts`"),
    ],
)
def test_the_error_for_a_refused_file_has_the_place_and_no_secret(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read_acl1([("plain_acl.yml", text)])
    assert "s3cret" not in str(caught.value)


def test_the_first_of_equal_access_keys_counts_and_unknown_keys_are_named() -> None:
    account = "accounts: [{accessKey: account, secretKey: 1234567, %s: %s}]"
    read = read_acl1([("a", account % ("defaultTopicPerm", "PUB")), ("b", account % ("defaulttopicPerm", "SUB"))])
    assert [one.topic_default for one in read.accounts] == [Perm.PUB]
    assert read.left_out == ("b: account 1: defaulttopicPerm: ACL 1.0 does not have this key",)


def test_the_file_of_users_that_is_made_of_it_decides_alike(tmp_path: Path) -> None:
    read = read_acl1([("plain_acl.yml", EXAMPLE)])
    file = tmp_path / "users.yaml"
    file.touch(0o600)
    file.write_text(read.users_file())
    state = read_users_file(file, NO_USERS)
    assert state.policies == {name: entries for name, entries in state_of(read).policies.items() if entries}
    assert state.user("RocketMQ").key == derive_key("RocketMQ", "12345678")
    assert (state.user("RocketMQ").type, state.user("rocketmq2").type) == (UserType.NORMAL, UserType.SUPER)


def acl1_allows(account: Account, perm: Perm, resource: Resource) -> bool:
    """Return True if ACL 1.0 allows access to one resource, by steps 6 to 10 of its check (spec/features.md
    §7.3)."""
    if perm is Perm.PUB and resource.name == TRACE_TOPIC and resource.type is ResourceType.TOPIC:
        return True
    if account.is_admin and not account.own:
        return True
    default = account.topic_default if resource.type is ResourceType.TOPIC else account.group_default
    owned = account.own.get(resource, default)
    return not owned & Perm.DENY and bool(owned & perm)


NAMES = ("orders", "news", TRACE_TOPIC)
PERMS = ("DENY", "PUB", "SUB", "PUB|SUB", "nonsense")
resources = st.builds(Resource, st.sampled_from((ResourceType.TOPIC, ResourceType.GROUP)), st.sampled_from(NAMES))
perms = st.sampled_from(PERMS).map(parse_perm)
accounts = st.builds(
    Account,
    st.just("account"),
    st.just("1234567"),
    st.just(""),
    st.booleans(),
    perms,
    perms,
    st.dictionaries(resources, perms, max_size=4),
)


@given(accounts)
@settings(max_examples=examples(300))
def test_fuzzed_accounts_have_the_same_permissions_as_in_acl_1(account: Account) -> None:
    read = Acl1((account,))
    for kind in ResourceType.TOPIC, ResourceType.GROUP:
        for name in *NAMES, "unnamed":
            one = Resource(kind, name)
            for perm, actions in (Perm.PUB, PUB), (Perm.SUB, SUB):
                assert may(read, "account", actions, one) == acl1_allows(account, perm, one), (perm, str(one))
