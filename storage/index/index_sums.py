"""The checksums of index files. They detect a file that the disk has damaged, which is then rebuilt from the log.

On disk
    index.sums      1a2b3c4d                                    the CRC-32 of the rest
                    {"20261120180926228": [next entry, crc]}    for each file, when it was last flushed and closed
    index.sums.bak  the same (storage/files/two_copies.py)

The two values of an index file are its number of the next entry and its checksum, at the time of its last flush. The
checksum covers the header, the slots and the used entries. If a file took more entries before a crash than its checksum
covers, the file cannot be checked. RocketMQ has no checksums for index files, and ignores index.sums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from raymq.common.errors import StoreCorruptError
from raymq.records.format.crc import crc32
from storage.files.damage import DamageNotes
from storage.files.two_copies import CHECKSUM_LINE, TwoCopies
from storage.index.index_file import IndexHeader, IndexShape

SUMS_FILE: Final = "index.sums"
VERIFY_MAX_BYTES: Final = 2 << 30
"""Maximum number of index bytes that are checked when a store opens, newest files first. Checking more would load the
disk for a long time."""


class IndexSums:
    """The checksums of one store's index files. Only one thread at a time may use the object."""

    def __init__(self, root: Path, shape: IndexShape, damage: DamageNotes) -> None:
        """Read the file index.sums of the store in `root`, if it exists."""
        self._shape, self._damage = shape, damage
        self._copies = TwoCopies(root / SUMS_FILE, CHECKSUM_LINE, damage)
        self._sums: dict[str, tuple[int, int]] = {}
        try:
            text = self._copies.read() or b"{}"
            self._sums = {str(name): (int(entries), int(found)) for name, (entries, found) in json.loads(text).items()}
        except (AttributeError, StoreCorruptError, TypeError, ValueError) as error:
            damage.note(f"the index files are not compared with their checksums: {error}")

    def write_down(self, path: Path, header: IndexHeader, data: memoryview, files: list[Path]) -> None:
        """Store the checksum of a flushed index file, and drop the checksums of files that are not in `files`. Raises
        OSError if the disk fails."""
        names = {file.name for file in files}
        self._sums = {name: found for name, found in self._sums.items() if name in names}
        self._sums[path.name] = header.next_entry, self._crc(header.next_entry, data)
        self._copies.write(json.dumps(self._sums).encode())

    def of_file(self, path: Path) -> tuple[int, int] | None:
        """Return the number of the next entry and the checksum of an index file, as they were stored; None if the file
        has no checksum. May be called by any thread."""
        return self._sums.get(path.name)

    def is_damaged(self, path: Path, header: IndexHeader, data: memoryview, *, may_have_grown: bool) -> bool:
        """True if the disk has changed an index file since its checksum was stored. The damage is then recorded.

        `may_have_grown`: True if the file may have more entries than its checksum covers.
        """
        entries, crc = self._sums.get(path.name, (0, 0))
        if not entries or (may_have_grown and header.next_entry > entries):
            return False
        if header.next_entry == entries and self._crc(entries, data) == crc:
            return False
        self._damage.note(
            f"index file {path} does not match its checksum: this file and the later index files are rebuilt from "
            "the log"
        )
        return True

    def used_bytes(self, header: IndexHeader) -> int:
        """Return the size in bytes of the part of an index file that the file's checksum covers."""
        return self._shape.entry_at(min(header.next_entry, self._shape.entries))

    def _crc(self, entries: int, data: memoryview) -> int:
        return crc32(data[: self._shape.entry_at(min(max(entries, 0), self._shape.entries))])
