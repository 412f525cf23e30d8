"""Maps the files of a commit log for reading: from its one directory, or from several that take turns.

A reader chooses one of the two classes when it is made, and asks it for files by their first physical offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raymq.common.config.store import COMMIT_LOG_DIR
from raymq.records.logfiles.directory import file_name
from raymq.records.logfiles.file_maps import FileMaps


class LogDirectory:
    """The files of a log that is in one directory."""

    def __init__(self, maps: FileMaps, directory: str) -> None:
        self._maps, self._directory = maps, directory

    def __str__(self) -> str:
        return self._directory

    def map_file(self, start: int) -> memoryview:
        """The bytes of the file that starts at physical offset `start`. FileNotFoundError if there is none."""
        return self._maps.get(f"{self._directory}/{file_name(start)}").data


class LogDirectories:
    """The files of a log in several directories, which are given in alphabetical order."""

    def __init__(self, maps: FileMaps, directories: Sequence[str], file_size: int) -> None:
        self._directories = [LogDirectory(maps, directory) for directory in directories]
        self._file_size = file_size

    def __str__(self) -> str:
        return ", ".join(map(str, self._directories))

    def map_file(self, start: int) -> memoryview:
        """The bytes of the file that starts at physical offset `start`. FileNotFoundError if there is none.

        The file is in the directory whose turn it was, unless that disk was full (storage.log.log_paths): then in any
        of the others.
        """
        turn = start // self._file_size % len(self._directories)
        for directory in self._directories[turn:] + self._directories[:turn]:
            try:
                return directory.map_file(start)
            except FileNotFoundError:
                continue
        raise FileNotFoundError(f"{file_name(start)} is in none of {self}")


def open_log_directories(
    maps: FileMaps, root: Path | str, directories: Sequence[Path | str], file_size: int
) -> LogDirectory | LogDirectories:
    """The log files of the store at `root`, which are in `directories`, or below `root` without any."""
    names = sorted(map(str, directories)) or [f"{root}/{COMMIT_LOG_DIR}"]
    return LogDirectory(maps, names[0]) if len(names) == 1 else LogDirectories(maps, names, file_size)
