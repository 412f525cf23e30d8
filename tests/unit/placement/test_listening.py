"""Tests of the address on which the web console listens: an automatically chosen port stays the same after a
restart."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from placement.console.actor import PORT_FILE, listen
from raymq.common.errors import ConfigError

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """Yield a port on which another program already listens."""
    with closing(socket.socket()) as other:
        other.bind((HOST, 0))
        other.listen()
        yield other.getsockname()[1]


def port_of(folder: Path, port: int = 0, *, restarted: bool = False) -> int:
    with closing(listen(HOST, port, folder, restarted=restarted, timeout_s=0.0)) as bound:
        found: int = bound.getsockname()[1]
        return found


def test_a_restarted_process_has_the_same_port(tmp_path: Path) -> None:
    first = port_of(tmp_path)
    assert [port_of(tmp_path, restarted=True) for _ in range(3)] == [first] * 3


def test_a_port_that_is_named_is_used_and_nothing_is_kept(tmp_path: Path) -> None:
    free = port_of(tmp_path)
    (tmp_path / PORT_FILE).unlink()
    assert port_of(tmp_path, free) == free
    assert list(tmp_path.iterdir()) == []


def test_a_configured_port_in_use_is_a_clear_error(tmp_path: Path, taken: int) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on {HOST}:{taken}: .*; set console.port"):
        port_of(tmp_path, taken)


def test_a_port_that_another_program_took_is_given_up(tmp_path: Path, taken: int) -> None:
    (tmp_path / PORT_FILE).write_text(str(taken))
    moved = port_of(tmp_path, restarted=True)
    assert moved != taken
    assert port_of(tmp_path, restarted=True) == moved


@pytest.mark.parametrize("text", [None, "", "eighty"])
def test_a_port_that_is_not_known_is_any(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / PORT_FILE).write_text(text)
    assert port_of(tmp_path, restarted=True) > 0


def test_a_folder_that_cannot_be_written_keeps_nothing_from_starting(tmp_path: Path) -> None:
    assert port_of(tmp_path / "gone") > 0
