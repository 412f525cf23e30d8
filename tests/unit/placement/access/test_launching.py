"""The key of raymq's own actors: made once, for its user only."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.access.launching import KEY_FILE, internal_key
from raymq.access.users import KEY_BYTES
from raymq.errors import ConfigError


def test_the_key_is_made_once_for_its_user_only(tmp_path: Path) -> None:
    key = internal_key(str(tmp_path / "data"))
    assert len(key) == KEY_BYTES
    assert internal_key(str(tmp_path / "data")) == key
    file = tmp_path / "data" / KEY_FILE
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert list(file.parent.iterdir()) == [file]


def test_another_place_has_another_key(tmp_path: Path) -> None:
    assert internal_key(str(tmp_path / "a")) != internal_key(str(tmp_path / "b"))


@pytest.mark.parametrize(("content", "mode"), [(b"x" * KEY_BYTES, 0o640), (b"short", 0o600)])
def test_a_key_that_others_may_read_or_that_is_none_is_refused(tmp_path: Path, content: bytes, mode: int) -> None:
    file = tmp_path / KEY_FILE
    file.parent.mkdir()
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="remove it"):
        internal_key(str(tmp_path))
