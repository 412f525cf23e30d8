"""Tests of a client's credentials: where the client looks for them, and which files it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.common.errors import ConfigError, InvalidArgumentError
from raymq.remoting.access.credentials import Credentials, find_credentials, read_secret

SECRET = "a secret of mine"


def private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_secret_is_in_no_repr_and_the_key_is_the_users():
    credentials = Credentials("team", SECRET)
    assert SECRET not in f"{credentials!r} {credentials}"
    assert len(credentials.key) == 32
    assert credentials.key != Credentials("other", SECRET).key


def test_a_short_secret_and_a_bad_name_are_refused():
    for user, secret in ("team", "123456"), ("a b", SECRET):
        with pytest.raises(InvalidArgumentError):
            Credentials(user, secret)


def test_the_argument_comes_before_the_environment_and_that_before_the_file(tmp_path):
    file = private(tmp_path / "credentials", f"# mine\nuser: filed\nsecret: {SECRET}\n")
    by_file = {"RAYMQ_CREDENTIALS": str(file)}
    by_variable = {**by_file, "RAYMQ_USER": "varied", "RAYMQ_SECRET": SECRET}
    given = Credentials("given", SECRET)
    assert find_credentials(given, environment=by_variable) is given
    assert find_credentials(environment=by_variable) == Credentials("varied", SECRET)
    assert find_credentials(environment=by_file) == Credentials("filed", SECRET)


def test_a_secret_may_be_in_a_file_of_its_own(tmp_path):
    file = private(tmp_path / "secret", SECRET + "\n")
    found = find_credentials(environment={"RAYMQ_USER": "team", "RAYMQ_SECRET_FILE": str(file)})
    assert found == Credentials("team", SECRET)


def test_nothing_anywhere_is_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_credentials(environment={}) is None


@pytest.mark.parametrize(
    "half",
    [
        {"RAYMQ_USER": "team"},
        {"RAYMQ_SECRET": SECRET},
        {"RAYMQ_USER": "team", "RAYMQ_SECRET": SECRET, "RAYMQ_SECRET_FILE": "x"},
    ],
)
def test_half_of_them_is_an_error(half):
    with pytest.raises(ConfigError, match="RAYMQ_USER"):
        find_credentials(environment=half)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_read_is_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(private(tmp_path / "secret", SECRET, mode))


@pytest.mark.parametrize("text", ["", "one line\nand more", "x" * 5000, "\udcff"])
def test_a_file_that_holds_no_secret_is_refused_and_the_error_does_not_show_it(tmp_path, text):
    file = tmp_path / "secret"
    file.write_bytes(text.encode(errors="surrogateescape"))
    file.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read_secret(file)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["user: a", "user: a\nsecret: b1234567\nmore: c", f"user: a\nuser: b\nsecret: {SECRET}"]
)
def test_a_file_without_exactly_both_lines_is_refused(tmp_path, text):
    file = private(tmp_path / "credentials", text)
    with pytest.raises(ConfigError, match="user: NAME"):
        find_credentials(environment={"RAYMQ_CREDENTIALS": str(file)})


def test_a_path_that_is_not_a_file_is_refused(tmp_path):
    for path in tmp_path / "absent", tmp_path:
        with pytest.raises(ConfigError, match=r"cannot read|no file"):
            read_secret(path)
