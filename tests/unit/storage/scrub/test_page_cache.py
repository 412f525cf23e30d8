"""Tests that a pass over a file leaves the page cache as it was: pages that were in memory stay, others are dropped."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage.files import disk
from storage.files.page_cache import passing_read, resident_pages

PAGES = 512
SIZE = PAGES * mmap.PAGESIZE


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Yield a file on disk, none of whose pages is in the page cache, and a descriptor of the file."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        if resident_pages(descriptor, 0, SIZE).any():
            pytest.skip("this file system keeps all pages in memory")
        yield path, descriptor
    finally:
        os.close(descriptor)


def test_pages_that_only_the_pass_has_read_are_dropped(file):
    path, descriptor = file
    with passing_read(path, 0, SIZE):
        assert resident_pages(descriptor, 0, SIZE).all()
    assert not resident_pages(descriptor, 0, SIZE).any()


def test_pages_that_were_in_memory_stay(file):
    path, descriptor = file
    os.pread(descriptor, 10 * mmap.PAGESIZE, 100 * mmap.PAGESIZE)
    os.pread(descriptor, 1, SIZE - 1)
    before = resident_pages(descriptor, 0, SIZE)
    assert 11 <= before.sum() < PAGES / 2
    with passing_read(path, 5, SIZE - 5):
        pass
    assert (resident_pages(descriptor, 0, SIZE) == before).all()


def test_pages_after_the_range_are_dropped_if_the_pass_may_read_them(file):
    path, descriptor = file
    half = SIZE // 2
    with passing_read(path, 0, half, reach=half):
        os.pread(descriptor, half, half)
    assert not resident_pages(descriptor, 0, SIZE).any()


def test_pages_that_the_pass_has_mapped_are_dropped_and_the_map_stays_readable(file):
    path, descriptor = file
    content = path.read_bytes()
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
    view = np.frombuffer(mapped, np.uint8)
    with passing_read(path, 0, SIZE, mapped=lambda: view):
        assert int(view.sum(dtype=np.int64)) == sum(content)
    assert not resident_pages(descriptor, 0, SIZE).any()
    assert view.tobytes() == content


def test_a_file_that_another_process_has_mapped_keeps_its_pages(file):
    path, descriptor = file
    mapped = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
    view = np.frombuffer(mapped, np.uint8)
    with passing_read(path, 0, SIZE):
        # A consumer on the node reads these pages through its own map while the pass runs.
        assert view[: 20 * mmap.PAGESIZE].any()
    assert resident_pages(descriptor, 0, 20 * mmap.PAGESIZE).all()


def test_a_sector_that_cannot_be_read_is_an_error_before_any_map_is_read(file, monkeypatch):
    path, descriptor = file

    def fail(number: int, size: int, position: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "pread", fail)
    with pytest.raises(OSError, match="Input/output error"), passing_read(path, 0, SIZE):
        pytest.fail("the body of the pass ran")
    assert not resident_pages(descriptor, 0, SIZE).any()


def test_nothing_is_dropped_if_the_kernel_does_not_report_the_page_cache(file, monkeypatch):
    path, descriptor = file
    monkeypatch.setattr("storage.files.page_cache._LIBC", NoMincore())
    with passing_read(path, 0, SIZE):
        pass
    monkeypatch.undo()
    assert resident_pages(descriptor, 0, SIZE).all()


class NoMincore:
    """Stands for a C library whose mincore fails."""

    def mincore(self, *arguments: object) -> int:
        return -1


def test_an_empty_range_and_a_range_after_the_end_are_read(file):
    path, _ = file
    for begin, end in [(0, 0), (SIZE, SIZE), (SIZE - 1, SIZE + 10 * mmap.PAGESIZE)]:
        with passing_read(path, begin, end, reach=1 << 20):
            pass
