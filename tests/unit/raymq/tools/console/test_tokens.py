"""Tests of the login tokens of the console's users."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from raymq.common.errors import ConfigError
from raymq.tools.console.security.sessions import Role
from raymq.tools.console.security.tokens import ray_token_check, read_token, role_of_token, same_token


def test_rays_own_check_is_still_where_the_console_looks_for_it():
    """Ray's function for checking a token exists where the console looks for it. The function is not public. If Ray
    removes it, this test fails, and the console compares with the token file instead."""
    module = import_module("ray._private.authentication.authentication_utils")
    assert callable(module.validate_request_token)


@pytest.mark.parametrize("given", ["", "line\nbreak", "tab\t", "ümlaut", "\x00"])
def test_a_text_that_is_no_token_never_reaches_rays_check(monkeypatch: pytest.MonkeyPatch, given: str):
    module = import_module("ray._private.authentication.authentication_utils")
    monkeypatch.setattr(module, "validate_request_token", lambda header: True)
    is_admin = ray_token_check()
    assert is_admin("token")
    assert not is_admin(given)


def test_ray_gets_the_token_as_a_header(monkeypatch: pytest.MonkeyPatch):
    module = import_module("ray._private.authentication.authentication_utils")
    monkeypatch.setattr(module, "validate_request_token", lambda header: header == "Bearer right")
    is_admin = ray_token_check()
    assert (is_admin("right"), is_admin("wrong")) == (True, False)


def test_without_rays_check_the_file_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    module = import_module("ray._private.authentication.authentication_utils")
    monkeypatch.delattr(module, "validate_request_token")
    (tmp_path / "token").write_text("right\n")
    is_admin = ray_token_check(tmp_path / "token")
    assert (is_admin("right"), is_admin("wrong")) == (True, False)
    assert not ray_token_check()("right")


def test_a_token_gives_its_role():
    roles = [role_of_token(given, lambda token: token == "a", "v") for given in ("a", "v", "x", "")]
    assert roles == [Role.ADMIN, Role.VIEWER, None, None]
    assert role_of_token("", lambda token: False, None) is None


def test_a_token_may_have_any_characters():
    assert same_token("ä", "ä")
    assert not same_token("ä", "a")


def test_the_error_for_a_file_without_a_token_has_a_remedy(tmp_path: Path):
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ConfigError, match="openssl rand"):
        read_token(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot read the token"):
        read_token(tmp_path / "missing")
