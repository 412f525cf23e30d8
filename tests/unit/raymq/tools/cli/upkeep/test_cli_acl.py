"""Tests of `raymq acl`. The command converts a file of ACL 1.0 to a users file, and explains which access a users file
allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from raymq.common.errors import ConfigError, InvalidArgumentError, UserNotExistError
from raymq.tools.cli import cli

PLAIN = """
globalWhiteRemoteAddresses: [10.10.103.*]
accounts:
- {accessKey: account, secretKey: xs3cretx, topicPerms: [orders=PUB]}
- {accessKey: rocketmq2, secretKey: 12345678, admin: true}
"""


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["acl", *map(str, words)])


@pytest.fixture
def users(tmp_path: Path) -> Path:
    (tmp_path / "plain_acl.yml").write_text(PLAIN)
    result = run("import", tmp_path / "plain_acl.yml", "--output", tmp_path / "users.yaml")
    assert result.exit_code == 0, result.output
    return tmp_path / "users.yaml"


def test_import_writes_a_private_file_and_lists_omissions_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "plain_acl.yml").write_text(PLAIN)
    result = run("import", tmp_path / "plain_acl.yml", "--output", tmp_path / "users.yaml", "--json")
    told = json.loads(result.stdout)
    assert [(user["user"], user["type"]) for user in told["users"]] == [("account", "Normal"), ("rocketmq2", "Super")]
    assert ["globalWhiteRemoteAddresses" in one for one in told["left_out"]] == [True]
    assert (tmp_path / "users.yaml").stat().st_mode & 0o777 == 0o600
    assert "s3cret" not in result.output


def test_import_for_people_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "plain_acl.yml").write_text(PLAIN)
    result = run("import", tmp_path / "plain_acl.yml", "--output", tmp_path / "users.yaml")
    assert ("access.users_file" in result.output, "left out: globalWhite" in result.output) == (True, True)


def test_import_leaves_a_file_that_is_there(users: Path) -> None:
    before = users.read_text()
    result = run("import", users.with_name("plain_acl.yml"), "--output", users)
    assert isinstance(result.exception, ConfigError)
    assert users.read_text() == before


@pytest.mark.parametrize("content", [b"\xff", b"accounts: []", b"x" * ((1 << 20) + 1), None])
def test_import_of_an_invalid_file_writes_no_file(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "plain_acl.yml").write_bytes(content)
    result = run("import", tmp_path / "plain_acl.yml", "--output", tmp_path / "users.yaml")
    assert isinstance(result.exception, ConfigError)
    assert not (tmp_path / "users.yaml").exists()


def test_import_keeps_no_file_that_raymq_up_would_refuse(tmp_path: Path) -> None:
    perms = ", ".join(f"topic-{number}=PUB" for number in range(4001))
    (tmp_path / "plain_acl.yml").write_text(
        f"accounts: [{{accessKey: account, secretKey: 1234567, topicPerms: [{perms}]}}]"
    )
    result = run("import", tmp_path / "plain_acl.yml", "--output", tmp_path / "users.yaml")
    assert isinstance(result.exception, ConfigError)
    assert not (tmp_path / "users.yaml").exists()


@pytest.mark.parametrize(
    ("user", "action", "resource", "allowed"),
    [
        ("account", "pub", "Topic:orders", True),
        ("account", "Sub", "Topic:orders", False),
        ("account", "Sub", "Topic:%RETRY%billing", False),
        ("rocketmq2", "Delete", "Group:billing", True),
    ],
)
def test_check_shows_whether_a_request_is_allowed(
    users: Path, user: str, action: str, resource: str, allowed: bool
) -> None:
    words = "check", users, "--user", user, "--action", action, "--resource", resource
    told = run(*words, "--json")
    assert (json.loads(told.stdout)["allowed"], told.exit_code) == (allowed, 0 if allowed else 1)
    assert ("is allowed" in run(*words).stdout) is allowed


def test_check_refuses_unknown_users_and_actions_and_resource_patterns(users: Path) -> None:
    unknown = run("check", users, "--user", "nobody", "--action", "Pub", "--resource", "Topic:orders")
    assert isinstance(unknown.exception, UserNotExistError)
    wrong = run("check", users, "--user", "account", "--action", "Fly", "--resource", "Topic:orders")
    assert isinstance(wrong.exception, InvalidArgumentError)
    assert run("check", users, "--user", "account", "--action", "Pub", "--resource", "Topic:o*").exit_code == 2
