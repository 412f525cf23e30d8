"""A small journal of values that must survive a crash: one JSON value per key. The newest value of a key counts.

On disk
    journal                 8c1f03aa {"key": "broker-a", "value": {…}, "number": 17}
                            CRC-32 of the rest of the line, in hex, a space, and one JSON object per line
    journal.bak             the same lines
    journal.new             exists while the journal is being rewritten
    journal.damaged-1       a damaged copy, as it was found

The numbers of the lines are consecutive. A line is on disk in both copies when `put` returns. A crash may leave the
last line incomplete (torn) in one copy. A torn line was never acknowledged, so it is cut off. Any other damaged line is
read from the other copy; so are the lines of a copy that is missing, cut short or older. A line that is damaged in both
copies is an error, because a lost value could be a promise to another process. When most lines are outdated, the
journal is rewritten under another name and renamed. Earlier versions wrote one copy, and lines without a number.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

from raymq.common.errors import StoreCorruptError, StoreError
from raymq.records.format.crc import crc32
from storage.files import disk
from storage.files.two_copies import keep_damaged

logger = logging.getLogger(__name__)

REWRITE_LINES: Final = 10_000


class Journal:
    """An open journal. Only one thread at a time may use it."""

    def __init__(self, path: Path) -> None:
        """Read the journal at `path`, or create an empty journal.

        Raises StoreCorruptError if a line is damaged in both copies; the files are then unchanged. Raises StoreError if
        a file cannot be read or written.
        """
        self._paths = path, path.with_name(f"{path.name}.bak")
        self.values: dict[str, Any] = {}
        self._lines = 0
        self._number = 0
        """The number of the newest line."""
        self._is_torn = False
        """True after a failed write, which may have left a part of a line: the next write rewrites the journal."""
        try:
            disk.make_directory(path.parent)
            self._read()
            self._rewrite()
        except OSError as error:
            raise StoreError(f"cannot open the journal file {path}: {error}") from error

    def put(self, key: str, value: Any) -> None:
        """Set the value of `key`. The value is on disk on return. After a StoreError it is unknown whether the value is
        on disk."""
        try:
            if self._is_torn:
                self._rewrite()
            self._number += 1
            for path in self._paths:
                _append(path, _line(key, value, self._number))
        except OSError as error:
            self._is_torn = True
            raise StoreError(
                f"cannot write the journal file {self._paths[0]}: {error}; the new value may or may not be on disk"
            ) from error
        self.values[key] = value
        self._lines += 1
        if self._lines > REWRITE_LINES + 2 * len(self.values):
            self._rewrite()

    def _read(self) -> None:
        copies = [_JournalCopy.read(path) for path in self._paths]
        if copies[0].is_legacy:
            # An earlier version wrote this journal, and no second copy.
            copies = copies[:1]
        present = [copy for copy in copies if copy.exists]
        entries = {number: entry for copy in present for number, entry in copy.entries.items()}
        last = max(entries, default=0)
        # The first line of a copy that was rewritten begins a complete list of values.
        first = max((copy.first for copy in present if copy.first), default=last)
        lost = sorted({*range(first, last)} - entries.keys())
        if not any(copy.first for copy in present) and any(copy.is_damaged for copy in present):
            lost = [1]
        ends_well = any(copy.ends_well and max(copy.entries, default=0) == last for copy in present)
        # A crash tears the last line of one copy only. The other copy is then complete.
        if present and not ends_well and (len(present) > 1 or present[0].ends_with_damaged_line):
            lost = lost or [last + 1]
        if lost:
            raise StoreCorruptError(
                f"line {lost[0]} of the journal file {self._paths[0]} is damaged, also in its copy "
                f"{self._paths[1].name}; move both files away: their values are rebuilt when all replicas answer"
            )
        for number in sorted(entries):
            self.values[entries[number]["key"]] = entries[number]["value"]
        self._number = last
        for path, copy in zip(self._paths, copies, strict=False):
            if copy.is_damaged:
                logger.error("journal file %s was damaged, and is written again%s", path, keep_damaged(path))
            elif max(copy.entries, default=0) < last - 1:
                logger.error("journal file %s was missing or an older version, and is written again", path)

    def _rewrite(self) -> None:
        lines = []
        for key, value in self.values.items():
            self._number += 1
            lines.append(_line(key, value, self._number))
        for path in self._paths:
            disk.replace_file(path, b"".join(lines))
        self._lines, self._is_torn = len(self.values), False


class _JournalCopy(NamedTuple):
    """The content of one copy of a journal.

    `entries`: the intact lines, by number. `first`: the number of the first line, 0 if that line is damaged or missing.
    `ends_well`: True if nothing follows the last intact line. `ends_with_damaged_line`: True if the last complete line
    is damaged. `is_damaged`: True if a complete line is damaged. `is_legacy`: True if lines have no number.
    """

    exists: bool
    entries: dict[int, dict[str, Any]]
    first: int
    ends_well: bool
    ends_with_damaged_line: bool
    is_damaged: bool
    is_legacy: bool

    @classmethod
    def read(cls, path: Path) -> _JournalCopy:
        try:
            *lines, tail = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return cls(False, {}, 0, True, False, False, False)
        parsed = [_parse(line) for line in lines]
        last = _parse(tail)
        if last is not None:  # only the line feed is missing or damaged
            parsed.append(last)
            tail = b""
        numbered = [(entry.get("number", at), entry) for at, entry in enumerate(parsed, 1) if entry is not None]
        whole = bool(parsed) and parsed[-1] is not None
        return cls(
            exists=True,
            entries=dict(numbered),
            first=numbered[0][0] if parsed and parsed[0] is not None else 0,
            ends_well=not tail and (whole or not parsed),
            ends_with_damaged_line=bool(parsed) and not whole,
            is_damaged=None in parsed,
            is_legacy=any("number" not in entry for _, entry in numbered),
        )


def set_journal_aside(path: Path) -> None:
    """Rename both copies of a damaged journal, so that their bytes are kept. Raises StoreError if the disk fails."""
    try:
        for copy in (path, path.with_name(f"{path.name}.bak")):
            keep_damaged(copy)
    except OSError as error:
        raise StoreError(f"cannot rename the damaged journal file {path}: {error}") from error


def _append(path: Path, line: bytes) -> None:
    descriptor = disk.open_file(path, os.O_RDWR)
    try:
        disk.pwrite_all(descriptor, os.fstat(descriptor).st_size, line)
        disk.flush(descriptor)
    finally:
        os.close(descriptor)


def _line(key: str, value: Any, number: int) -> bytes:
    text = json.dumps({"key": key, "value": value, "number": number}, ensure_ascii=False).encode()
    return b"%08x %b\n" % (crc32(text), text)


def _parse(line: bytes) -> dict[str, Any] | None:
    crc, _, text = line.partition(b" ")
    if not text or crc != b"%08x" % crc32(text):
        return None
    entry: dict[str, Any] = json.loads(text)
    return entry
