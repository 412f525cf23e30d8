"""Tests of the users file: its allowed content, and its errors, which name the position in the file but never a
secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.common.errors import ConfigError
from raymq.remoting.access.policies import Decision
from raymq.remoting.access.state import NO_USERS, AuthState
from raymq.remoting.access.users import UserStatus, UserType, derive_key
from raymq.remoting.access.users_file import read_users_file

GOOD = """
users:
  - name: orders-team
    secret: a long secret
    messages_per_second: 50
    policies:
      - {resource: "Topic:orders", actions: [Pub, Sub]}
      - {resource: "Group:b*", actions: [Sub], decision: Deny, sources: [10.0.0.0/8]}
  - {name: boss, secret_file: SECRET, type: Super, status: disable}
"""


def read(tmp_path: Path, text: str, mode: int = 0o600) -> AuthState:
    for name, content in (("users", text.replace("SECRET", str(tmp_path / "secret"))), ("secret", "another one\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    return read_users_file(tmp_path / "users", NO_USERS)


def test_users_with_their_policies_are_read(tmp_path: Path) -> None:
    state = read(tmp_path, GOOD)
    team, boss = state.user("orders-team"), state.user("boss")
    assert (team.key, team.type, team.messages_per_second) == (
        derive_key("orders-team", "a long secret"),
        UserType.NORMAL,
        50,
    )
    assert (boss.key, boss.is_super, boss.status) == (derive_key("boss", "another one"), True, UserStatus.DISABLE)
    allow, deny = state.entries("orders-team")
    assert (str(allow.resource), allow.decision, deny.decision, deny.sources) == (
        "Topic:orders",
        Decision.ALLOW,
        Decision.DENY,
        ("10.0.0.0/8",),
    )
    assert state.version > NO_USERS.version


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("users: [", "not YAML"),
        ("- a", "one key, users"),
        ("users: {}", "one key, users"),
        ("users: [1]", "user 1: a user may only have"),
        ("users: [{name: a, secret: xs3cretx, colour: red}]", "user 1: a user may only have"),
        ("users: [{name: a}]", "user 1: a user needs a name"),
        ("users: [{name: a, secret: xs3cretx, secret_file: f}]", "user 1: a user needs a name"),
        ("users: [{name: a, secret: s3}]", "at least 7"),
        ("users: [{name: a, secret: 1234567}]", "at least 7"),
        ("users: [{name: a, secret: xs3cretx, type: King}]", "King"),
        ("users: [{name: a, secret: xs3cretx}, {name: a, secret: xs3cretx}]", "user 2: .*exists"),
        ("users: [{name: a, secret: xs3cretx, policies: 5}]", "policies"),
        ("users: [{name: a, secret: xs3cretx, policies: [{resource: orders, actions: [Pub]}]}]", "not a resource"),
        ("users: [{name: a, secret: xs3cretx, policies: [{resource: '*'}]}]", "user 1"),
        ("users: [{name: rmq_sys_internal, secret: xs3cretx}]", "own actors"),
    ],
)
def test_errors_about_the_users_file_contain_no_secrets(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read(tmp_path, text)
    assert "s3cret" not in str(caught.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read(tmp_path, GOOD, 0o640)
