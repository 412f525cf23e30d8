"""Tests of the secret key of raymq's own actors, and of the user in whose name the launcher calls servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.access import launching
from placement.access.launching import KEY_FILE, internal_key
from raymq.common import identity
from raymq.common.config.access import AccessOptions
from raymq.common.errors import AuthenticationError, ConfigError
from raymq.remoting.access.credentials import Credentials
from raymq.remoting.access.users import KEY_BYTES


def test_the_key_is_made_once_for_its_user_only(tmp_path: Path) -> None:
    key = internal_key(str(tmp_path / "data"))
    assert len(key) == KEY_BYTES
    assert internal_key(str(tmp_path / "data")) == key
    file = tmp_path / "data" / KEY_FILE
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {
        "key": 0o600,
        "key.sha256": 0o600,
    }
    file.unlink()
    assert internal_key(str(tmp_path / "data")) == internal_key(str(tmp_path / "data")) != key


@pytest.mark.parametrize("name", ["key", "key.sha256"])
def test_a_damaged_key_is_refused(tmp_path: Path, name: str) -> None:
    internal_key(str(tmp_path))
    path = (tmp_path / KEY_FILE).with_name(name)
    data = path.read_bytes()
    path.write_bytes(data[:5] + bytes([data[5] ^ 1]) + data[6:])
    with pytest.raises(ConfigError, match=r"does not match its checksum .* remove both files"):
        internal_key(str(tmp_path))


def test_another_place_has_another_key(tmp_path: Path) -> None:
    assert internal_key(str(tmp_path / "a")) != internal_key(str(tmp_path / "b"))


@pytest.mark.parametrize(("content", "mode"), [(b"x" * KEY_BYTES, 0o640), (b"short", 0o600)])
def test_an_invalid_or_readable_key_file_is_refused(tmp_path: Path, content: bytes, mode: int) -> None:
    file = tmp_path / KEY_FILE
    file.parent.mkdir()
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="remove the file"):
        internal_key(str(tmp_path))


class Running:
    """Fake of a running NameServer, with or without access control."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks

    def call(self, method: str, timeout_s: float) -> dict[str, str]:
        if self._asks:
            raise AuthenticationError(method)
        return {}


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("enable", [False, True])
def test_servers_with_access_do_not_join_servers_without(
    monkeypatch: pytest.MonkeyPatch, asks: bool, enable: bool
) -> None:
    monkeypatch.setattr(launching, "running", lambda: ["broker-a", "nameserver-0"])
    monkeypatch.setattr(launching, "ActorRef", lambda name: Running(asks))
    options = AccessOptions(enable=enable, super_secret_file=Path("secret"))
    if asks == enable:
        launching._check_running(options)
        return
    with pytest.raises(ConfigError, match="raymq down"):
        launching._check_running(options)


def test_where_nothing_runs_either_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "running", list)
    launching._check_running(AccessOptions(enable=True, super_secret_file=Path("secret")))


def test_the_super_user_of_the_settings_can_stop_raymq(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret of root\n")
    secret.chmod(0o600)
    access = {"enable": True, "super_user": "root", "super_secret_file": str(secret)}
    expected = Credentials("root", "the secret of root").identity
    launching.act_as_owner({"access": access})
    try:
        assert identity.present() == expected
    finally:
        identity.give_back(expected)


def test_without_settings_it_is_the_user_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYMQ_USER", "team")
    monkeypatch.setenv("RAYMQ_SECRET", "the secret of the team")
    expected = Credentials("team", "the secret of the team").identity
    launching.act_as_owner(None)
    try:
        assert identity.present() == expected
    finally:
        identity.give_back(expected)
