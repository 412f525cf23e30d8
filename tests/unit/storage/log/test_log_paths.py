"""Tests of a commit log in several directories: it creates files in the directories in turn, and finds a file in any
directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.common.errors import StoreCorruptError
from raymq.records.logfiles.directory import file_name
from storage.log import log_paths
from storage.log.log_paths import LogPaths

SIZE = 100


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    return [tmp_path / "disk-c", tmp_path / "disk-a", tmp_path / "disk-b"]


def made(paths: LogPaths, count: int) -> list[str]:
    """Return the names of the directories that `paths` chooses for the log's first `count` files, in order."""
    return [paths.choose_path(index * SIZE)[0].parent.name for index in range(count)]


def write_file(directory: Path, start: int, size: int = SIZE) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / file_name(start)).write_bytes(bytes(size))


def test_without_a_setting_all_is_in_one_directory_below_the_root(tmp_path):
    paths = LogPaths(tmp_path, SIZE)
    assert made(paths, 3) == ["commitlog"] * 3
    assert paths.path(200) == tmp_path / "commitlog" / file_name(200)
    assert paths.choose_path(300)[1] == tmp_path / "commitlog.new"
    assert not paths.is_elsewhere


def test_files_take_turns_in_alphabetical_order(tmp_path, disks):
    assert made(LogPaths(tmp_path, SIZE, disks), 4) == ["disk-a", "disk-b", "disk-c", "disk-a"]


def test_read_only_directories_get_no_files(tmp_path, disks):
    paths = LogPaths(tmp_path, SIZE, disks[:2], read_only=disks[2:])
    assert made(paths, 4) == ["disk-a", "disk-c", "disk-a", "disk-c"]
    assert len(paths.directories) == 3
    assert not disks[2].exists()


def test_full_disks_are_skipped_unless_all_are_full(tmp_path, disks, monkeypatch):
    usage = {"disk-a": 0.86, "disk-b": 0.85, "disk-c": 0.1}
    monkeypatch.setattr(log_paths, "disk_usage", lambda path: usage[path.name])
    paths = LogPaths(tmp_path, SIZE, disks, full_ratio=0.85)
    assert made(paths, 4) == ["disk-b", "disk-c", "disk-b", "disk-c"]
    usage |= {"disk-b": 0.9, "disk-c": 0.99}
    assert made(paths, 4) == ["disk-a", "disk-b", "disk-c", "disk-a"]


def test_a_file_that_is_made_again_goes_where_it_is_already(tmp_path, disks, monkeypatch):
    paths = LogPaths(tmp_path, SIZE, disks, full_ratio=0.85)
    path, _ = paths.choose_path(SIZE)
    monkeypatch.setattr(log_paths, "disk_usage", lambda one: 1.0 if one == path.parent else 0.1)
    assert paths.choose_path(SIZE)[0] != path
    write_file(path.parent, SIZE)
    paths.find()
    assert paths.choose_path(SIZE)[0] == path


def test_a_file_is_made_on_the_disk_where_it_will_be(tmp_path, disks):
    path, scratch = LogPaths(tmp_path, SIZE, disks).choose_path(SIZE)
    assert (path.parent, scratch.parent.parent) == (disks[2], disks[2])
    assert scratch.parent.is_dir()


def test_files_are_found_wherever_they_are(tmp_path, disks):
    for directory, start in ((disks[0], 300), (disks[1], 100), (disks[1], 200), (disks[2], 400)):
        write_file(directory, start)
    paths = LogPaths(tmp_path, SIZE, disks[:2], read_only=disks[2:])
    assert paths.find() == [100, 200, 300, 400]
    assert [paths.path(start).parent for start in (100, 200, 300, 400)] == [disks[1], disks[1], disks[0], disks[2]]
    assert paths.forget_file(100) == disks[1] / file_name(100)


def test_missing_and_duplicate_log_files_are_reported(tmp_path, disks):
    for directory, start in ((disks[0], 0), (disks[0], 200)):
        write_file(directory, start)
    paths = LogPaths(tmp_path, SIZE, disks)
    with pytest.raises(StoreCorruptError, match=f"disk-a/{file_name(100)} or .* is missing; check that .* mounted"):
        paths.find()
    write_file(disks[1], 100)
    write_file(disks[2], 100)
    with pytest.raises(StoreCorruptError, match=f"{file_name(100)} also exists in "):
        paths.find()


def test_a_log_shorter_than_before_is_reported_with_several_disks(tmp_path, disks):
    write_file(disks[0], 0)
    paths = LogPaths(tmp_path, SIZE, disks)
    paths.find()
    paths.require_up_to(100)
    with pytest.raises(StoreCorruptError, match=r"reached physical offset 101, but its files in .* end at 100"):
        paths.require_up_to(101)
    LogPaths(tmp_path, SIZE).require_up_to(101)
