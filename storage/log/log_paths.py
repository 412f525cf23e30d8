"""Choose and find the paths of a log's files, in one directory or in several (spec/storage.md §1, multi-path).

On disk
    commitlog/00000000000000000000              below the store's root, unless store_path_commit_log is set
    /disk1/00000000000000000000                 with store_path_commit_log: [/disk1, /disk2]
    /disk2/00000000001073741824
    /disk2/.new/commitlog                       while a file grows to its size

New files are distributed round-robin, in alphabetical order, over the directories that are writable and whose disks are
not full. No file lists which directory contains which log file: a log file may be in any of them.

RocketMQ 4.9 loads no log from a directory that contains anything else. So `.new` exists only while a file grows. If the
process is killed, `.new` may remain until the next open.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from raymq.common.config.store import StoreSettings
from raymq.common.config.values import COMMIT_LOG_DIR
from raymq.common.errors import StoreCorruptError
from raymq.records.logfiles.directory import file_name
from storage.files import disk
from storage.files.disk_usage import disk_usage
from storage.files.file_names import list_files

_NEW_DIR: Final = ".new"

_REMEDY: Final = "restore the file from a copy, or empty the store directory and let another replica fill it"

_REMEDY_OF_SEVERAL: Final = f"check that all disks of store_path_commit_log are mounted; otherwise {_REMEDY}"


class LogPaths:
    """The directories of one log, and the path of each log file. Each change is a single dict operation, so readers
    need no lock."""

    def __init__(
        self,
        root: Path,
        file_size: int,
        directories: Iterable[Path] = (),
        *,
        read_only: Iterable[Path] = (),
        full_ratio: float = 1.0,
    ) -> None:
        """Create the directories of the log.

        Directories in `read_only` are not created, and get no new files. A disk whose used share exceeds `full_ratio`
        gets no new files, unless all disks exceed it.
        """
        self._root, self._file_size, self._full_ratio = root, file_size, full_ratio
        self._writable = sorted(set(directories) or {root / COMMIT_LOG_DIR})
        self.directories = sorted({*self._writable, *read_only})
        self.is_elsewhere = self.directories != [root / COMMIT_LOG_DIR]
        """True if the log has any other directory than the default directory below the store's root. The disks of its
        directories may then be missing although the store's root exists."""
        self._paths: dict[int, Path] = {}
        for directory in self._writable:
            disk.make_directory(directory)
            self.remove_scratch(self._scratch_in(directory))

    @classmethod
    def of(cls, settings: StoreSettings) -> LogPaths:
        """Return the log directories that the settings name."""
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
        """Find the log's files. Return the physical offsets at which they start, ascending. Raises StoreCorruptError if
        the files do not form a log."""
        remedy = _REMEDY_OF_SEVERAL if self.is_elsewhere else _REMEDY
        self._paths = list_files(self.directories, self._file_size, remedy=remedy)
        return list(self._paths)

    def require_up_to(self, physical_offset: int) -> None:
        """Raise StoreCorruptError if the log is known to have reached `physical_offset` but its last files are missing.

        A disk may be missing. Without this check the log would end too early, and new records would get the offsets of
        the missing records.
        """
        end_offset = max(self._paths, default=-self._file_size) + self._file_size
        if self.is_elsewhere and end_offset < physical_offset:
            raise StoreCorruptError(
                f"the log reached physical offset {physical_offset}, but its files in {self} end at {end_offset}; "
                f"{_REMEDY_OF_SEVERAL}"
            )

    def path(self, start: int) -> Path:
        """Return the path of the log file that starts at offset `start`. For a missing file, return the path that it
        would have."""
        known = self._paths.get(start)
        return known or self._directory_of(start, self._writable) / file_name(start)

    def choose_path(self, start: int) -> tuple[Path, Path]:
        """Choose the path of a new log file, and a scratch path on the same disk under which the file is first created.
        The chosen path is remembered.

        Afterwards the caller passes the scratch path to `remove_scratch`. Raises OSError if the disk failed.
        """
        directory, before = self._writable[0], self._paths.get(start)
        if before is not None and before.exists():
            # An earlier attempt created this log file, but failed later. Use the same directory again, so that no
            # second file with this name exists.
            directory = before.parent
        elif len(self._writable) > 1:
            not_full = [one for one in self._writable if disk_usage(one) <= self._full_ratio]
            directory = self._directory_of(start, not_full or self._writable)
        scratch = self._scratch_in(directory)
        disk.make_directory(scratch.parent)
        self._paths[start] = directory / file_name(start)
        return self._paths[start], scratch

    def remove_scratch(self, scratch: Path) -> None:
        """Remove what is left at `scratch`, the temporary path that `choose_path` returned for a new log file: a file
        or a directory."""
        if scratch.parent.name == _NEW_DIR:
            disk.remove_tree(scratch.parent)
        else:
            disk.unlink(scratch)

    def forget_file(self, start: int) -> Path:
        """Remove the log file that starts at `start` from the known files, because it is about to be deleted. Returns
        its path."""
        return self._paths.pop(start)

    def _directory_of(self, start: int, directories: list[Path]) -> Path:
        return directories[start // self._file_size % len(directories)]

    def _scratch_in(self, directory: Path) -> Path:
        if directory == self._root / COMMIT_LOG_DIR:
            return self._root / "commitlog.new"
        return directory / _NEW_DIR / COMMIT_LOG_DIR
