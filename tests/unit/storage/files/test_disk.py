"""Tests of the module storage.files.disk. One test checks that the store's modules change the disk only through this
module."""

from __future__ import annotations

import ast
import os
from itertools import pairwise
from pathlib import Path

import pytest

import storage
from storage.files import disk

PACKAGE = Path(storage.__file__).parent
BACK_DOORS = {
    "os": {"open", "rename", "replace", "unlink", "remove", "link", "mkdir", "makedirs", "rmdir", "fsync", "fdatasync",
           "posix_fallocate", "truncate"},
    "shutil": {"rmtree", "move", "copy", "copyfile", "copytree"},
}  # fmt: skip
PATH_METHODS = {"unlink", "rename", "replace", "write_text", "write_bytes", "mkdir", "rmdir", "touch", "open"}
REPLACES = {"replace"}
"""Names of Path methods that change the disk, but that are also names of methods of str or functions of dataclasses.
The test cannot tell which method is called, so it does not count calls of these names as changes of the disk."""


def calls(module: Path) -> list[tuple[int, str]]:
    """Return the function calls in the source file `module` that change the disk without `storage.files.disk`, with
    their line numbers."""
    found = []
    for node in ast.walk(ast.parse(module.read_text())):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id == "open":
            found.append((node.lineno, "open"))
        if isinstance(function, ast.Attribute):
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            if owner in BACK_DOORS:
                if function.attr in BACK_DOORS[owner]:
                    found.append((node.lineno, f"{owner}.{function.attr}"))
            elif owner not in ("disk", "cls") and function.attr in PATH_METHODS - REPLACES and not owner[:1].isupper():
                found.append((node.lineno, function.attr))
    return found


@pytest.mark.parametrize("module", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_no_module_goes_to_the_disk_past_the_seam(module):
    """No module of the store changes the disk without `storage.files.disk`. The tests of power loss and I/O errors
    intercept only this module."""
    if module.name != "disk.py":
        assert calls(module) == []


def test_replace_file_leaves_the_old_text_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "text"
    disk.replace_file(path, b"old")

    def fail(descriptor):
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(disk, "flush", fail)
    with pytest.raises(OSError, match="Input/output error"):
        disk.replace_file(path, b"new text")
    assert path.read_bytes() == b"old"


def test_write_file_leaves_nothing_of_a_longer_text(tmp_path):
    disk.write_file(tmp_path / "text", b"a long text")
    disk.write_file(tmp_path / "text", b"short")
    assert (tmp_path / "text").read_bytes() == b"short"
    assert (tmp_path / "text").stat().st_mode & 0o777 & ~0o644 == 0


def test_make_directory_makes_every_name_on_the_way_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(disk, "sync_directory", synced.append)
    disk.make_directory(tmp_path / "a" / "b")
    disk.make_directory(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]


def test_flushing_a_path_that_is_gone_is_nothing(tmp_path):
    disk.flush_path(tmp_path / "gone")
    disk.flush_path(tmp_path)


def test_bytes_are_written_again_within_their_bounds_only(tmp_path, monkeypatch):
    path = tmp_path / "log"
    data = bytes(range(256)) * 16 * 1024  # The data has 4 MiB, so that `write_again` needs several write calls.
    path.write_bytes(data)
    written: list[tuple[int, int]] = []
    flushed: list[int] = []
    real = disk.pwrite_all

    def pwrite_all(descriptor: int, position: int, piece: bytes) -> None:
        written.append((position, position + len(piece)))
        real(descriptor, position, piece)

    monkeypatch.setattr(disk, "pwrite_all", pwrite_all)
    monkeypatch.setattr(disk, "flush", flushed.append)
    disk.write_again(path, 1000, 3_000_001)
    assert path.read_bytes() == data
    assert (written[0][0], written[-1][1]) == (1000, 3_000_001)
    assert all(one[1] == other[0] for one, other in pairwise(written))
    assert len(flushed) == 1
    # `write_again` does not write after the file's end: if the given range extends past this end, the file does not
    # grow.
    disk.write_again(path, len(data) - 10, len(data) + 10)
    assert path.read_bytes() == data
