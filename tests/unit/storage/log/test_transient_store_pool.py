"""Tests of the write buffers of the transient store pool: their content, the bytes that a commit writes to the log, and
when a buffer is free again."""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path

import pytest

from storage.files import disk
from storage.files.mapped_file import MappedFile
from storage.log import transient_store_pool
from storage.log.transient_store_pool import TransientStorePool

FILE = 4096


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transient_store_pool, "BUFFER_BYTES", 1000)


@pytest.fixture
def files(tmp_path: Path) -> dict[int, MappedFile]:
    starts = (0, FILE, 2 * FILE)
    made = {
        start: MappedFile.create(tmp_path / str(start), start, FILE, scratch=tmp_path / "scratch") for start in starts
    }
    yield made
    for file in made.values():
        file.close()


def put(pool: TransientStorePool, physical_offset: int, data: bytes) -> bool:
    window = pool.window(physical_offset, len(data))
    if window is not None:
        window[:] = data
    return window is not None


def test_nothing_is_in_the_file_before_the_commit_and_all_of_it_after(files):
    pool = TransientStorePool(FILE, 2)
    assert put(pool, 0, b"a" * 100)
    assert put(pool, 100, b"b" * 100)
    assert files[0].path.read_bytes() == bytes(FILE)
    pool.commit(100, files)
    assert (pool.committed_offset, files[0].path.read_bytes()) == (100, b"a" * 100 + bytes(FILE - 100))
    pool.commit(200, files)
    assert files[0].path.read_bytes() == b"a" * 100 + b"b" * 100 + bytes(FILE - 200)


def test_appends_over_the_ends_of_buffers_and_files_are_all_committed(files):
    pool = TransientStorePool(FILE, 8)
    expected = bytearray(3 * FILE)
    spans = [(0, 900), (900, 300), (1200, 8), (FILE, 10), (FILE + 10, 990), (FILE + 1000, 8), (2 * FILE, 20)]
    for offset, size in spans:
        data = bytes([offset % 251 + 1]) * size
        assert put(pool, offset, data)
        expected[offset : offset + size] = data
    pool.commit(2 * FILE + 20, files)
    assert b"".join(file.path.read_bytes() for file in files.values()) == expected


def test_without_a_free_buffer_there_is_no_window_until_a_commit(files):
    pool = TransientStorePool(FILE, 2)
    assert put(pool, 0, b"a" * 600)
    assert put(pool, 600, b"b" * 600)
    assert pool.has_buffer_for(1200, 400)
    assert not pool.has_buffer_for(1200, 401)
    assert not put(pool, 1200, b"c" * 600)
    assert not put(pool, FILE, b"c")
    pool.commit(1200, files)
    assert pool.has_buffer_for(1200, 401)
    assert put(pool, 1200, b"c" * 600)


def test_bytes_written_directly_are_not_overwritten_by_a_commit(files):
    pool = TransientStorePool(FILE, 2)
    assert put(pool, 0, b"a" * 100)
    pool.commit(100, files)
    files[0].write(100, b"z" * 100)
    pool.skip_to(200)
    assert put(pool, 200, b"c" * 100)
    pool.commit(300, files)
    assert files[0].path.read_bytes()[:300] == b"a" * 100 + b"z" * 100 + b"c" * 100


def test_the_first_bytes_of_a_commit_are_written_last(files, monkeypatch):
    pool = TransientStorePool(FILE, 2)
    put(pool, 0, b"a" * 100)
    positions = []
    real = disk.pwrite_all

    def noting(descriptor: int, position: int, data: disk.Bytes) -> None:
        positions.append((position, len(data)))
        real(descriptor, position, data)

    monkeypatch.setattr(disk, "pwrite_all", noting)
    pool.commit(100, files)
    assert positions == [(8, 92), (0, 8)]


def test_after_a_failed_commit_every_later_one_fails_the_same_way(files, monkeypatch):
    pool = TransientStorePool(FILE, 2)
    put(pool, 0, b"a" * 100)

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(disk, "pwrite_all", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            pool.commit(100, files)
    depths = set()
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output error") as caught:
            pool.commit(100, files)
        assert caught.value.errno == errno.EIO
        depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(depths) == 1, "the traceback of the stored error does not grow"
    assert pool.committed_offset == 0


@pytest.mark.parametrize("missing", [False, True])
def test_a_pool_that_cannot_be_locked_in_memory_warns_and_works(files, monkeypatch, caplog, missing):
    if missing:
        monkeypatch.setattr(transient_store_pool, "_LIBC", object())
    else:
        monkeypatch.setattr(transient_store_pool, "_lock_in_memory", lambda mapped: "Cannot allocate memory")
    pool = TransientStorePool(FILE, 2)
    assert ("this system has no mlock2" if missing else "Cannot allocate memory") in caplog.text
    put(pool, 0, b"a" * 100)
    pool.commit(100, files)
    assert files[0].path.read_bytes()[:100] == b"a" * 100
