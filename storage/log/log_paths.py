"""Where the files of a log are: in one directory, or in several that take turns (spec/storage.md §1, multi-path).

On disk
    commitlog/00000000000000000000              below the store's root, unless store_path_commit_log says otherwise
    /disk1/00000000000000000000                 with store_path_commit_log: [/disk1, /disk2]
    /disk2/00000000001073741824
    /disk2/.new/commitlog                       while a file grows to its size

The i-th file is made in the i-th of the directories that may be written and whose disks have room, in alphabetical
order, counted round. Where a file is, only the directories know: it is found wherever it is.

RocketMQ 4.9 loads no log from a directory where anything else is. So `.new` is there only while a file grows; a kill
may leave it until the next open.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from raymq.config.store import COMMIT_LOG_DIR, StoreSettings
from raymq.errors import StoreCorruptError
from raymq.logfiles.directory import file_name
from storage.files import disk
from storage.files.disk_usage import disk_usage
from storage.files.file_names import list_files

_NEW_DIR: Final = ".new"


_REMEDY: Final = "restore it from a copy, or empty the store directory and let a replica fill it"


_REMEDY_OF_SEVERAL: Final = f"see that the disks of store_path_commit_log are all mounted; else {_REMEDY}"


class LogPaths:
    """The directories of one log, and which of its files is where. Each change is one dict operation.

    `is_elsewhere`: whether the log is on disks of its own, which may be missing while the root is there.
    """

    def __init__(
        self,
        root: Path,
        file_size: int,
        directories: Iterable[Path] = (),
        *,
        read_only: Iterable[Path] = (),
        full_ratio: float = 1.0,
    ) -> None:
        """The directories are made, but those that are `read_only`, where no file is. No file is made where a disk is
        fuller than `full_ratio`, unless all are."""
        self._root, self._file_size, self._full_ratio = root, file_size, full_ratio
        self._writable = sorted(set(directories) or {root / COMMIT_LOG_DIR})
        self.directories = sorted({*self._writable, *read_only})
        self.is_elsewhere = self.directories != [root / COMMIT_LOG_DIR]
        self._paths: dict[int, Path] = {}
        for directory in self._writable:
            disk.make_directory(directory)
            self.clear(self._scratch_in(directory))

    @classmethod
    def of(cls, settings: StoreSettings) -> LogPaths:
        """The directories that the settings name."""
        return cls(
            settings.store_path_root_dir,
            settings.mapped_file_size_commit_log_bytes,
            settings.log_directories_elsewhere,
            read_only=settings.read_only_commit_log_store_paths,
            full_ratio=settings.clean_forcibly_ratio,
        )

    def __str__(self) -> str:
        return ", ".join(map(str, self.directories))

    def find(self) -> list[int]:
        """Where the files start that are there, ascending. StoreCorruptError when they do not form a log."""
        remedy = _REMEDY_OF_SEVERAL if self.is_elsewhere else _REMEDY
        self._paths = list_files(self.directories, self._file_size, remedy=remedy)
        return list(self._paths)

    def require_up_to(self, physical_offset: int) -> None:
        """Raise StoreCorruptError if the log was known to reach an offset, and its last files are on a disk that is not
        there: the log would end sooner, and what comes next would take the offsets of what is missing."""
        end_offset = max(self._paths, default=-self._file_size) + self._file_size
        if self.is_elsewhere and end_offset < physical_offset:
            raise StoreCorruptError(
                f"the log reached physical offset {physical_offset}, but its files in {self} end at {end_offset}; "
                f"{_REMEDY_OF_SEVERAL}"
            )

    def path(self, start: int) -> Path:
        """The path of the file that starts at physical offset `start`; of one that is not there, where it would be."""
        known = self._paths.get(start)
        return known or self._directory_of(start, self._writable) / file_name(start)

    def choose(self, start: int) -> tuple[Path, Path]:
        """The path for a new file, which is remembered, and a path on the same disk to make it under, to be given to
        `clear` then. OSError: the disk failed."""
        directory, before = self._writable[0], self._paths.get(start)
        if before is not None and before.exists():
            directory = before.parent  # Something failed after it was made: there must not be two.
        elif len(self._writable) > 1:
            with_room = [one for one in self._writable if disk_usage(one) <= self._full_ratio]
            directory = self._directory_of(start, with_room or self._writable)
        scratch = self._scratch_in(directory)
        disk.make_directory(scratch.parent)
        self._paths[start] = directory / file_name(start)
        return self._paths[start], scratch

    def clear(self, scratch: Path) -> None:
        """Remove what is left under a path that `choose` gave to make a file under."""
        if scratch.parent.name == _NEW_DIR:
            disk.remove_tree(scratch.parent)
        else:
            disk.unlink(scratch)

    def forget(self, start: int) -> Path:
        """The file is about to be deleted; returns where it is."""
        return self._paths.pop(start)

    def _directory_of(self, start: int, directories: list[Path]) -> Path:
        return directories[start // self._file_size % len(directories)]

    def _scratch_in(self, directory: Path) -> Path:
        if directory == self._root / COMMIT_LOG_DIR:
            return self._root / "commitlog.new"
        return directory / _NEW_DIR / COMMIT_LOG_DIR
