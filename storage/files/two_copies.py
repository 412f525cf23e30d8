"""Stores a small file twice, so that damage to one copy loses nothing.

On disk
    NAME                    the newest text
    NAME.bak                the same text
    NAME.damaged-1 … -8     damaged copies, as they were found; the store never reads them

Each copy has a checksum and a version, which grows with each write. A write stores both new copies under temporary
names, then renames NAME, then NAME.bak. So a crash leaves at least one intact copy, and never an older text than the
last one whose write returned. A read takes the intact copy with the larger version, rewrites the other copy, and
records the damage. A damaged copy is renamed, never deleted; of more than eight the oldest is replaced. If both copies
are damaged, nothing is renamed and the read fails.

The version is white space at the end of a text, which JSON ignores: a line feed, then one character for each of 40
bits (a space for 0, a tab for 1). Texts of earlier versions of raymq and of RocketMQ have no version. Their `.bak` has
the previous text, and is used only if NAME is missing or damaged. A copy without a checksum was written by RocketMQ or
by hand. As NAME it counts as the newest text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from raymq.common.errors import StoreCorruptError
from raymq.records.format.crc import crc32
from storage.files import disk
from storage.files.damage import DamageNotes

DAMAGED_KEPT_MAX: Final = 8
"""Number of damaged copies of one file that are kept."""
_VERSION_BITS: Final = 40
ZERO, ONE, LINE_FEED = b" \t\n"

logger = logging.getLogger(__name__)


class Copy(NamedTuple):
    """The content of one copy: its text, its version, and whether it has a checksum. The version is 0 if the copy has
    none."""

    text: bytes
    version: int
    is_sealed: bool = True


class CopyFormat(Protocol):
    """How a text, its version and its checksum are written in a copy."""

    def encode(self, text: bytes, version: int) -> bytes:
        """Return the bytes of a copy."""

    def decode(self, data: bytes) -> Copy:
        """Return the content of an intact copy. Raises ValueError if the copy is damaged."""

    def correct(self, data: bytes) -> Copy | None:
        """Return the content of a damaged copy whose damage can be corrected; None for any other damaged copy."""


def whitespace_bits(number: int, count: int) -> bytes:
    """Return `number` as `count` characters of white space, the lowest bit first."""
    return bytes(ONE if number >> bit & 1 else ZERO for bit in range(count))


def with_version(text: bytes, version: int) -> bytes:
    """Return `text`, followed by its version as white space. Without a version (0), return `text`."""
    return text + b"\n" + whitespace_bits(version, _VERSION_BITS) if version else text


def split_version(data: bytes) -> tuple[bytes, int]:
    """Return a text and its version, which is 0 if `data` does not end with a version."""
    tail = data[-_VERSION_BITS - 1 :]
    if len(tail) <= _VERSION_BITS or tail[0] != LINE_FEED or tail[1:].strip(b" \t"):
        return data, 0
    return data[: -len(tail)], sum(1 << bit for bit, byte in enumerate(tail[1:]) if byte == ONE)


class ChecksumLine:
    """The format of raymq's own files: a line with the CRC-32 of the bytes after it, then the text and its version."""

    def encode(self, text: bytes, version: int) -> bytes:
        data = with_version(text, version)
        return b"%08x\n" % crc32(data) + data

    def decode(self, data: bytes) -> Copy:
        crc, _, rest = data.partition(b"\n")
        if crc != b"%08x" % crc32(rest):
            raise ValueError("the file does not match its checksum")
        return Copy(*split_version(rest))

    def correct(self, data: bytes) -> Copy | None:
        return None


CHECKSUM_LINE: Final = ChecksumLine()


class _Seen(NamedTuple):
    """A copy as it was found: its content, or None, and whether a file exists that is damaged."""

    copy: Copy | None
    is_damaged: bool


@dataclass(slots=True)
class TwoCopies:
    """One small file and its second copy. Only one thread at a time may use the object.

    `path`: the first copy. `remedy`: what an operator can do if both copies are damaged. `write_new`: writes a new
    file, for example with the reserve of a full disk.
    """

    path: Path
    form: CopyFormat
    damage: DamageNotes
    remedy: str = "restore one of the two files from a backup of the store, or move both away"
    write_new: Callable[[Path, bytes], None] = disk.write_file
    version: int = -1
    """The version of the newest copy on disk; -1 before the first read."""

    @property
    def backup(self) -> Path:
        """The path of the second copy."""
        return self.path.with_name(f"{self.path.name}.bak")

    def read(self) -> bytes | None:
        """Return the newest text; None if both copies are missing.

        A copy that is missing, damaged or older is rewritten if the disk allows that. Raises StoreCorruptError if no
        copy is usable and at least one exists; the files are then unchanged.
        """
        first, second = self._look(self.path), self._look(self.backup)
        newest = _newest(first.copy, second.copy) or self._correct(self.path) or self._correct(self.backup)
        if newest is None:
            if first.is_damaged or second.is_damaged:
                state = "damaged" if first.is_damaged else "missing"
                other = "damaged" if second.is_damaged else "missing"
                raise StoreCorruptError(
                    f"file {self.path} is {state}, and its second copy {self.backup.name} is {other}; {self.remedy}"
                )
            self.version = max(self.version, 0)
            return None
        self.version = max(self.version, newest.version)
        self._heal(self.path, first, newest)
        self._heal(self.backup, second, newest)
        return newest.text

    def write(self, text: bytes) -> None:
        """Replace the text. On return both copies are on disk. After an OSError each copy has the previous or the new
        text. Damaged copies that no read has found are kept under another name."""
        if self.version < 0:
            self.version = 0
            for path in (self.path, self.backup):
                seen = self._look(path)
                if seen.copy is not None:
                    self.version = max(self.version, seen.copy.version)
                elif seen.is_damaged:
                    self.damage.note(f"file {path} was damaged, and is replaced{keep_damaged(path)}")
        self.version += 1
        data = self.form.encode(text, self.version)
        for path in (self.path, self.backup):
            self.write_new(_new(path), data)
        for path in (self.path, self.backup):
            disk.rename(_new(path), path)
        disk.sync_directory(self.path.parent)

    def remove(self) -> None:
        """Remove both copies. The second copy goes first: as long as the first copy exists, the text is known."""
        for path in (self.backup, self.path):
            disk.unlink(path)
            disk.sync_directory(self.path.parent)

    def _look(self, path: Path) -> _Seen:
        try:
            return _Seen(self.form.decode(path.read_bytes()), False)
        except FileNotFoundError:
            return _Seen(None, False)
        except ValueError:
            return _Seen(None, True)

    def _correct(self, path: Path) -> Copy | None:
        try:
            return self.form.correct(path.read_bytes())
        except FileNotFoundError:
            return None

    def _heal(self, path: Path, seen: _Seen, newest: Copy) -> None:
        """Rewrite the copy at `path` unless it is intact and not older than `newest`. Texts without a version have no
        second copy, so none is made."""
        if seen.copy is not None:
            if seen.copy.version >= newest.version:
                return
            # After a crash between the renames of a write, the second copy is one version older.
            expected = path == self.backup and seen.copy.version == newest.version - 1
            what = "" if expected else "was an older version, and was written again from the other copy"
        elif path == self.path and not newest.version:
            what = f"is {'empty or damaged' if seen.is_damaged else 'missing'}; its previous text is used"
        elif seen.is_damaged:
            what = "was damaged, and was written again"
        elif newest.version:
            what = "was missing, and was written again from the other copy"
        else:
            return
        try:
            is_foreign = seen.copy is not None and not seen.copy.is_sealed
            kept = keep_damaged(path) if seen.is_damaged or is_foreign else ""
            self.write_new(_new(path), self.form.encode(newest.text, newest.version))
            disk.rename(_new(path), path)
            disk.sync_directory(path.parent)
        except OSError as error:
            logger.warning("file %s cannot be written again from its other copy: %s", path, error)
            return
        if what:
            self.damage.note(f"file {path} {what}{kept}")


def keep_damaged(path: Path) -> str:
    """Rename a damaged file, so that its bytes are kept. Returns a clause with the new name; empty if the file does not
    exist. Raises OSError if the disk fails."""
    if not path.exists():
        return ""
    names = [path.with_name(f"{path.name}.damaged-{number}") for number in range(1, DAMAGED_KEPT_MAX + 1)]
    free = [name for name in names if not name.exists()]
    kept = free[0] if free else min(names, key=lambda name: name.stat().st_mtime_ns)
    disk.rename(path, kept)
    return f"; the damaged bytes are in {kept.name}"


def _newest(first: Copy | None, second: Copy | None) -> Copy | None:
    """Return the copy that counts. A first copy without a checksum counts, because RocketMQ or an operator wrote it."""
    if first is None or second is None or not first.is_sealed:
        return first or second
    return second if second.version > first.version else first


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")
