"""The files in `config/`: small texts that the broker stores beside the log (spec/storage.md §4).

On disk
    config/topics.json          the newest text
    config/topics.json.bak      the previous text

A new text is written under a temporary name and renamed. So after a crash one of the two texts exists, or only the
older text as `.bak`. During each replacement the file is missing for a moment, and a reader must not mistake this for
damage. So the readers and writers of a directory share a lock; all of them are in the store's process.

Each text is followed by a checksum that other programs ignore. RocketMQ reads the same JSON files, and may write them.
So the checksum is white space after the text: a line feed, one character for each bit of the CRC-32 (a space for 0, a
tab for 1), a line feed. A text without a checksum was written by RocketMQ or by hand, and is accepted unchecked. To
edit a text with a checksum by hand, delete the white space.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from raymq.records.format.crc import crc32
from storage.files import disk
from storage.files.damage import DamageNotes
from storage.files.reserve import write_with_reserve

_BITS: Final = 32
_SEAL_BYTES: Final = _BITS + 2
_ZERO, _ONE, _LINE_FEED = b" \t\n"
REPAIRED_MAX_BYTES: Final = 8192
"""Maximum length in bytes of a text in which a single wrong bit can be located and corrected. The store does not
correct longer texts."""


class Unsealed(NamedTuple):
    """A text that was read from a file, and a description of its damage.

    `text` is None if it does not match its checksum and cannot be corrected. `damage` describes the damage; it is empty
    if the text was intact.
    """

    text: bytes | None
    damage: str


def seal(text: bytes) -> bytes:
    """Return the content of a configuration file, followed by a checksum that can also correct a single wrong
    bit."""
    crc = crc32(text)
    bits = bytes(_ONE if crc >> bit & 1 else _ZERO for bit in range(_BITS))
    return b"".join((text, b"\n", bits, b"\n"))


def unseal(data: bytes) -> Unsealed:
    """Split the content of a config file into text and checksum. If a checksum exists, check the text, and correct a
    single wrong bit."""
    text, tail = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    wrong = sum(byte not in (_ZERO, _ONE) for byte in tail[1:-1]) + (tail[:1] != b"\n") + (tail[-1:] != b"\n")
    if len(data) < _SEAL_BYTES or wrong > 1:
        return Unsealed(data, "")
    if _agrees(crc32(text), tail):
        return Unsealed(text, "a bit of the file's checksum was wrong" if wrong else "")
    if not wrong and len(text) <= REPAIRED_MAX_BYTES:
        changed = bytearray(text)
        for at in range(len(changed)):
            for bit in range(8):
                changed[at] ^= 1 << bit
                if _agrees(crc32(changed), tail):
                    return Unsealed(bytes(changed), f"a bit of byte {at} was wrong and has been corrected")
                changed[at] ^= 1 << bit
    return Unsealed(None, "the text does not match the file's checksum")


def _agrees(crc: int, tail: bytes) -> bool:
    """Return True if every readable bit of a file's checksum equals the bit in `crc`. `tail` is the checksum at the end
    of the file: one white-space character for each bit. Any other character is an unreadable bit."""
    return all(
        byte not in (_ZERO, _ONE) or (byte == _ONE) == bool(crc >> bit & 1) for bit, byte in enumerate(tail[1:-1])
    )


_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_STRING_OR_INTEGER_KEY: Final = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d+)(?=\s*:)', re.DOTALL)

_turns: Final[WeakValueDictionary[Path, threading.Lock]] = WeakValueDictionary()
"""One lock for each `config` directory in use, because several objects may read and write the files of a
directory."""
_turns_lock: Final = threading.Lock()


def parse_fastjson(text: str) -> Any:
    """Parse JSON as RocketMQ's fastjson writes it: integer keys may be unquoted, as in ``{0:5,1:7}``.

    An unquoted key becomes a str, like every key in JSON. Raises ValueError if the text is not valid JSON apart from
    unquoted keys.
    """
    return json.loads(_STRING_OR_INTEGER_KEY.sub(lambda found: f'"{found[1]}"' if found[1] else found[0], text))


class ConfigFiles:
    """The files in the directory `root`/config. Thread-safe, even if several objects use one directory."""

    def __init__(self, root: Path, damage: DamageNotes | None = None) -> None:
        """Open the configuration files below `root`. `damage`: the object that collects the descriptions of damaged
        files."""
        self._damage = damage or DamageNotes()
        self.directory = root / "config"
        disk.make_directory(self.directory)
        with _turns_lock:
            self._turn = _turns.setdefault(self.directory.resolve(), threading.Lock())

    def read(self, name: str) -> str | None:
        """Return the text of the file `name`, or of its `.bak` file. The `.bak` file is used if `name` is missing,
        empty or (for .json) does not parse.

        Returns None if neither file exists. Deletes a file that cannot be used, as RocketMQ does. Raises
        StoreCorruptError if the `.bak` file is needed and cannot be used either.
        """
        with self._turn:
            return self._read(self._path(name))

    def _read(self, path: Path) -> str | None:
        text = self._usable_text(path)
        if text is not None:
            return text
        if path.exists():
            self._damage.note(f"file {path} is empty or damaged; its previous text is used if a backup exists")
            disk.unlink(path)
        backup = Path(f"{path}.bak")
        if not backup.exists():
            return None
        text = self._usable_text(backup)
        if text is None:
            raise StoreCorruptError(
                f"file {path} is missing or damaged, and its backup {backup} is damaged; restore one of the "
                "two files, or delete both"
            )
        return text

    def write(self, name: str, text: str, *, may_use_reserve: bool = True) -> None:
        """Replace the text of the file `name`, and keep the previous text as `.bak`. On return both files are
        on disk.

        If the disk is full, the write uses the space that is reserved for the broker's state (SpaceReserve). With
        `may_use_reserve=False` it raises OSError instead, and the file keeps its text.
        """
        path = self._path(name)
        new = Path(f"{path}.new")
        with self._turn:
            sealed = seal(text.encode())
            if may_use_reserve:
                write_with_reserve(self.directory.parent, lambda: disk.write_file(new, sealed))
            else:
                disk.write_file(new, sealed)
            if path.exists():
                disk.rename(path, Path(f"{path}.bak"))
            disk.rename(new, path)
            disk.sync_directory(self.directory)

    def _usable_text(self, path: Path) -> str | None:
        """Return the text of the file `path`. Returns None if the file is missing, empty, damaged or not UTF-8, or is a
        .json file that does not parse.

        Rewrites the file if it has a single wrong bit.
        """
        try:
            data, damage = unseal(path.read_bytes())
            if data is None:
                return None
            text = data.decode()
            if path.name.removesuffix(".bak").endswith(".json"):
                parse_fastjson(text)
        except (FileNotFoundError, ValueError):
            return None
        if damage:
            disk.replace_file(path, seal(data))
            self._damage.note(f"file {path} was damaged: {damage}")
        return text or None

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"{name!r} is not a config file name: use letters, digits, '_', '-' and '.'")
        return self.directory / name
