"""Tests of the commit log's writer. It writes equal bytes through a memory map and through pwrite, and prefaults only
pages after the log's end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from storage.files import disk
from storage.files.mapped_file import MappedFile
from storage.log import log_writer
from storage.log.log_writer import LogWriter

FILE = 64 << 10
STEP = 8 << 10


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "PAGES_AHEAD_BYTES", STEP)


def new_writer(directory: Path, *, makes_pages: bool = True) -> LogWriter:
    """Return a writer of a log with two files of FILE bytes."""
    directory.mkdir()
    writer = LogWriter(FILE, makes_pages=makes_pages)
    for start in (0, FILE):
        path = directory / str(start)
        writer.files[start] = MappedFile.create(path, start, FILE, scratch=directory / "scratch")
    return writer


def content(writer: LogWriter) -> bytes:
    return b"".join(file.path.read_bytes() for file in writer.files.values())


def test_a_map_and_pwrite_leave_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = [new_writer(tmp_path / "map"), new_writer(tmp_path / "map without pages", makes_pages=False)]
    with monkeypatch.context() as patched:
        patched.setattr(disk, "map_for_writing", lambda *arguments: None)
        writers.append(new_writer(tmp_path / "pwrite"))
    assert [writer.files[0].mapped is None for writer in writers] == [False, False, True]

    def stamp(records: memoryview) -> None:
        records[20:24] = b"here"

    def stamp_record(record: memoryview) -> None:
        log_writer.stamp_at(record, 0, 7, 0, 8, b"hostport")

    def stamp_first(records: memoryview) -> None:
        records[:4] = b"here"

    for writer in writers:
        end = 0
        for size in (100, 5000, 30_000, 20_000, 40_000):
            records = memoryview(bytes([size % 251]) * size)
            start = end if end % FILE + size + 8 <= FILE else FILE
            if size == 100:
                record = memoryview(bytes(size))
                if not writer.write_record(start, record, 7, 8, b"hostport"):
                    writer.write(end, start, record, stamp_record, whole=False)
            else:
                writer.write(end, start, records, stamp if size != 5000 else stamp_first, whole=size == 5000)
            end = start + size
    expected = content(writers[0])
    assert expected.count(b"here") == 4
    assert expected[FILE:].startswith(bytes([40_000 % 251]) * 8)
    assert all(content(writer) == expected for writer in writers)


def test_pages_are_prefaulted_after_the_logs_end_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = new_writer(tmp_path / "log")
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(disk, "pwrite_all", lambda _, position, data: made.append((position, len(data))))
    assert writer.make_pages(100, 300) == STEP
    assert writer.make_pages(300, STEP) == STEP
    assert writer.make_pages(STEP - 10, STEP + 1) == 2 * STEP
    assert writer.make_pages(2 * STEP, 5 * STEP - 1) == FILE  # for a large append, the writer prefaults more pages
    assert writer.make_pages(FILE - 10, FILE + 1) == FILE + STEP
    assert made == [(100, STEP - 100), (STEP, STEP), (2 * STEP, FILE - 2 * STEP), (0, STEP)]


def test_no_pages_are_made_for_a_file_without_a_map_nor_for_long_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_writer(tmp_path / "log")
    monkeypatch.setattr(disk, "pwrite_all", lambda *arguments: pytest.fail("pages were made"))
    monkeypatch.setattr(log_writer, "STORE_MAX_BYTES", 1000)
    assert writer.make_pages(0, 1001) == 1001
    writer.files[0].mapped = None
    assert writer.make_pages(0, 100) == FILE
    assert new_writer(tmp_path / "other", makes_pages=False).make_pages(0, 100) == FILE


def test_a_disk_that_makes_no_pages_is_an_error_and_nothing_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_writer(tmp_path / "log")

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(disk, "pwrite_all", fail)
        with pytest.raises(OSError, match="No space left"):
            writer.make_pages(0, 100)
    assert writer.make_pages(0, 100) == STEP


@pytest.mark.parametrize("magic", [0x9123683E, 0x65735546])
def test_a_file_system_that_may_need_new_blocks_gives_no_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int
) -> None:
    monkeypatch.setattr(disk, "_file_system_of", lambda descriptor: magic)
    assert new_writer(tmp_path / "log").files[0].mapped is None


def test_a_file_system_that_does_not_allocate_gives_no_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_refusal_to_allocate", lambda descriptor, size: os.strerror(errno.EOPNOTSUPP))
    assert new_writer(tmp_path / "log").files[0].mapped is None
