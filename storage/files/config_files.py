"""The files in `config/`: small texts that the broker stores beside the log (spec/storage.md §4).

On disk
    config/topics.json          the newest text
    config/topics.json.bak      the same text: two_copies.py

The readers and writers of a directory share a lock; all of them are in the store's process. So no reader sees a write
half done.

Each text is followed by its version and a checksum that other programs ignore. RocketMQ reads the same JSON files, and
may write them. So the checksum is white space after the text: a line feed, one character for each bit of the CRC-32 (a
space for 0, a tab for 1), a line feed. A text without a checksum was written by RocketMQ or by hand, and is accepted
unchecked. To edit a text with a checksum by hand, delete the white space.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from raymq.common.errors import InvalidArgumentError
from raymq.records.format.crc import crc32
from storage.files import disk
from storage.files.damage import DamageNotes
from storage.files.reserve import write_with_reserve
from storage.files.two_copies import LINE_FEED, ONE, ZERO, Copy, TwoCopies, split_version, whitespace_bits, with_version

_BITS: Final = 32
_SEAL_BYTES: Final = _BITS + 2
REPAIRED_MAX_BYTES: Final = 8192
"""Maximum length in bytes of a text in which a single wrong bit can be located and corrected. The store does not
correct longer texts."""


def seal(text: bytes) -> bytes:
    """Return a text, followed by a checksum that can also correct a single wrong bit."""
    return b"".join((text, b"\n", whitespace_bits(crc32(text), _BITS), b"\n"))


class SealedText:
    """The format of a configuration file: the text, its version and its checksum, both as white space.

    `is_json`: a text without a checksum must be JSON.
    """

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json

    def encode(self, text: bytes, version: int) -> bytes:
        """Return the content of a file: the text, its version and its checksum."""
        return seal(with_version(text, version))

    def decode(self, data: bytes) -> Copy:
        """Return the content of an intact file. Raises ValueError if the file is empty or damaged."""
        text, tail = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        wrong = _wrong_characters(tail)
        if len(data) < _SEAL_BYTES or wrong > 1:
            self._require_plain(data)
            # A cut may have left a part of the white space.
            return Copy(data.rstrip(b" \t\n") if self._is_json else data, 0, is_sealed=False)
        if wrong or not _agrees(crc32(text), tail):
            raise ValueError("the text does not match the file's checksum")
        return Copy(*split_version(text))

    def correct(self, data: bytes) -> Copy | None:
        """Return the content of a file with a single wrong bit. Returns None for any other damage."""
        text, tail = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if len(data) < _SEAL_BYTES or _wrong_characters(tail) > 1:
            return None
        if _agrees(crc32(text), tail):
            return Copy(*split_version(text))
        if not _wrong_characters(tail) and len(text) <= REPAIRED_MAX_BYTES:
            changed = bytearray(text)
            for at in range(len(changed)):
                for bit in range(8):
                    changed[at] ^= 1 << bit
                    if _agrees(crc32(changed), tail):
                        return Copy(*split_version(bytes(changed)))
                    changed[at] ^= 1 << bit
        return None

    def _require_plain(self, data: bytes) -> None:
        """Raise ValueError unless a text without a checksum is usable: not empty, UTF-8, and JSON if it must be."""
        text = data.decode()
        if not text:
            raise ValueError("the file is empty")
        if self._is_json:
            parse_fastjson(text)


def _wrong_characters(tail: bytes) -> int:
    """Return the number of characters of a checksum that are not the expected white space."""
    wrong_ends = (tail[:1] != bytes([LINE_FEED])) + (tail[-1:] != bytes([LINE_FEED]))
    return sum(byte not in (ZERO, ONE) for byte in tail[1:-1]) + wrong_ends


def _agrees(crc: int, tail: bytes) -> bool:
    """Return True if every readable bit of a file's checksum equals the bit in `crc`. `tail` is the checksum at the end
    of the file: one white-space character for each bit. Any other character is an unreadable bit."""
    return all(byte not in (ZERO, ONE) or (byte == ONE) == bool(crc >> bit & 1) for bit, byte in enumerate(tail[1:-1]))


_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_STRING_OR_INTEGER_KEY: Final = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d+)(?=\s*:)', re.DOTALL)


class _DirectoryTurn:
    """The lock of a `config` directory, and the versions of the files that were read or written."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.versions: dict[str, int] = {}


_turns: Final[WeakValueDictionary[Path, _DirectoryTurn]] = WeakValueDictionary()
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
        self.damage = damage or DamageNotes()
        self.directory = root / "config"
        disk.make_directory(self.directory)
        with _turns_lock:
            self._turn = _turns.setdefault(self.directory.resolve(), _DirectoryTurn())

    def read(self, name: str) -> str | None:
        """Return the text of the file `name`, or of its second copy if the file is missing, damaged or older.

        Returns None if neither file exists. A damaged file is kept under another name and written again. Raises
        StoreCorruptError if no copy can be used.
        """
        with self._copies(name) as copies:
            text = copies.read()
        return None if text is None else text.decode()

    def write(self, name: str, text: str, *, may_use_reserve: bool = True) -> None:
        """Replace the text of the file `name`. On return both copies are on disk.

        If the disk is full, the write uses the space that is reserved for the broker's state (SpaceReserve). With
        `may_use_reserve=False` it raises OSError instead, and the file keeps its text.
        """
        with self._copies(name) as copies:
            if not may_use_reserve:
                copies.write_new = disk.write_file
            copies.write(text.encode())

    @contextmanager
    def _copies(self, name: str) -> Iterator[TwoCopies]:
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"{name!r} is not a config file name: use letters, digits, '_', '-' and '.'")
        with self._turn.lock:
            copies = TwoCopies(
                self.directory / name,
                SealedText(is_json=name.endswith(".json")),
                self.damage,
                write_new=self._write_new,
                version=self._turn.versions.get(name, -1),
            )
            try:
                yield copies
            finally:
                self._turn.versions[name] = copies.version

    def _write_new(self, path: Path, data: bytes) -> None:
        write_with_reserve(self.directory.parent, lambda: disk.write_file(path, data))
