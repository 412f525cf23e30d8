"""Tests of finding the last written byte of a preallocated file without reading blocks that were never written."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage.files.written_extents
from storage.files import disk, mapped_file
from storage.files.mapped_file import MappedFile

SIZE = 4 << 20
BLOCK = 4096


@pytest.fixture(params=["the file system tells", "the file system cannot tell"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MappedFile]:
    """Yield a preallocated file. Sets the size from which written extents are used to 0, because the file is small. One
    parameter simulates a file system that cannot report extents."""
    monkeypatch.setattr(mapped_file, "_FLUSH_FIRST_BYTES", 0)
    if request.param == "the file system cannot tell":

        def refuse(*arguments: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "not supported")

        monkeypatch.setattr(storage.files.written_extents, "_next_extents", refuse)
    file = MappedFile.create(tmp_path / "file", 0, SIZE, scratch=tmp_path / "scratch")
    yield file
    file.close()


def test_a_file_never_written_is_unused_also_once_it_was_read(file: MappedFile) -> None:
    assert file.used_end(0) == 0
    assert not any(file.path.read_bytes())
    assert file.used_end(0) == 0


def test_every_last_byte_is_found_wherever_it_is(file: MappedFile) -> None:
    dice = random.Random(1)
    for end in sorted([1, BLOCK, BLOCK + 1, SIZE - BLOCK, SIZE, *(dice.randrange(1, SIZE) for _ in range(50))]):
        file.write(end - 1, b"x")
        for position in (0, end // 2, end - 1):
            assert file.used_end(position) == end
        assert file.used_end(end) == end
        if dice.random() < 0.3:
            file.flush()
        if dice.random() < 0.3:
            file.path.read_bytes()


def test_zeros_that_were_written_are_no_use(file: MappedFile) -> None:
    file.write(100, b"x" * 50)
    file.write(BLOCK * 3, bytes(BLOCK * 300))
    assert file.used_end(0) == 150
    assert file.used_end(200) == 200
    file.zero(0, 150)
    assert file.used_end(0) == 0


def test_more_extents_than_one_answer_holds_are_all_looked_at(file: MappedFile) -> None:
    for at in range(0, SIZE, 2 * BLOCK):
        file.write(at, b"x" if at < SIZE // 2 else b"\0")
    last = SIZE // 2 - 2 * BLOCK
    assert [file.used_end(position) for position in (0, last, last + 1)] == [last + 1, last + 1, last + 1]
    file.write(SIZE - 1, b"x")
    assert file.used_end(last + 1) == SIZE


def test_bytes_only_in_the_page_cache_are_found(file: MappedFile) -> None:
    """`used_end` also finds bytes that another process wrote only to the page cache. The file system does not report a
    block as written until the block is on disk."""
    descriptor = os.open(file.path, os.O_RDWR)
    os.pwrite(descriptor, b"x", SIZE - 10)
    os.close(descriptor)
    assert file.used_end(BLOCK) == SIZE - 9


def test_a_disk_that_fails_is_an_error(file: MappedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk, "flush", fail)
    with pytest.raises(OSError, match="broken"):
        file.used_end(0)
