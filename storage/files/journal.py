"""A small journal of values that must survive a crash: one JSON value per key. The newest value of a key counts.

On disk
    journal                 8c1f03aa {"key": "broker-a", "value": {…}}
                            CRC-32 of the rest of the line, in hex, a space, and one JSON object per line
    journal.new             exists while the journal is being rewritten

A line is on disk when `put` returns. A crash may leave the last line incomplete (torn). A torn line was never
acknowledged, so it is cut off. Any other damage is an error, because a lost value could be a promise to another
process. When most lines are outdated, the journal is rewritten under another name and renamed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from raymq.common.errors import StoreCorruptError, StoreError
from raymq.records.format.crc import crc32
from storage.files import disk

REWRITE_LINES: Final = 10_000


class Journal:
    """An open journal. Only one thread at a time may use it."""

    def __init__(self, path: Path) -> None:
        """Read the journal at `path`, or create an empty journal.

        Raises StoreCorruptError if a line before the last one is damaged. Raises StoreError if the file cannot be read
        or written.
        """
        self._path = path
        self.values: dict[str, Any] = {}
        self._lines = 0
        try:
            disk.make_directory(path.parent)
            disk.unlink(path.with_suffix(".new"))
            self._read()
            self._rewrite()
        except OSError as error:
            raise StoreError(f"cannot open the journal file {path}: {error}") from error

    def put(self, key: str, value: Any) -> None:
        """Set the value of `key`. The value is on disk on return. After a StoreError it is unknown whether the value is
        on disk."""
        line = _line(key, value)
        try:
            self._append(line)
        except OSError as error:
            raise StoreError(
                f"cannot write the journal file {self._path}: {error}; the new value may or may not be on disk"
            ) from error
        self.values[key] = value
        self._lines += 1
        if self._lines > REWRITE_LINES + 2 * len(self.values):
            self._rewrite()

    def _append(self, line: bytes) -> None:
        descriptor = disk.open_file(self._path, os.O_RDWR)
        try:
            disk.pwrite_all(descriptor, os.fstat(descriptor).st_size, line)
            disk.flush(descriptor)
        finally:
            os.close(descriptor)

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        lines = data.split(b"\n")
        for number, line in enumerate(lines):
            entry = _parse(line)
            if entry is not None:
                self.values[entry["key"]] = entry["value"]
            elif number < len(lines) - 1:
                raise StoreCorruptError(
                    f"line {number + 1} of the journal file {self._path} is damaged; move the file away: its "
                    "values are rebuilt when all replicas answer"
                )

    def _rewrite(self) -> None:
        new = self._path.with_suffix(".new")
        disk.write_file(new, b"".join(_line(key, value) for key, value in self.values.items()))
        disk.rename(new, self._path)
        disk.sync_directory(self._path.parent)
        self._lines = len(self.values)


def _line(key: str, value: Any) -> bytes:
    text = json.dumps({"key": key, "value": value}, ensure_ascii=False).encode()
    return b"%08x %b\n" % (crc32(text), text)


def _parse(line: bytes) -> dict[str, Any] | None:
    crc, _, text = line.partition(b" ")
    if not text or crc != b"%08x" % crc32(text):
        return None
    entry: dict[str, Any] = json.loads(text)
    return entry
