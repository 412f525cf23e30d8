"""The files in which a replica stores its epochs and its highest confirm offset (spec §11.2).

The epoch file contains the offset at which each epoch began. The replica compares these offsets with the master's
epochs. The confirm file contains the highest confirm offset that the replica reported: a log that ends before that
offset lacks acknowledged messages.

On disk
    epochFileCheckpoint         2                   the number of lines of epochs
                                1895893516          CRC-32 of the epoch lines, top bit cleared; 0: unchecked
                                1-0                 epoch 1 began at physical offset 0
                                2-1073741824
    epochFileCheckpoint.bak     the same text
    config/epochs.json          {"epochs": [[1, 0], [2, 1073741824]]}, with its .bak (config_files.py)
    confirmOffset               two slots of 512 bytes, zeros after the fields, big-endian:
                                CRC-32 of the next 24 bytes (4 bytes), number of the write, epoch, offset (8 bytes each)
    confirmOffset.bak           the same two slots

RocketMQ's epoch file has no room for a version, so an older one of its copies cannot be recognised. Therefore
config/epochs.json, which has a version, counts. RocketMQ's file counts if config/epochs.json is missing or damaged, or
if RocketMQ's file has the same epochs and later ones: then another program, or an earlier version of raymq, has
written it.

The confirm file is written three times a second while messages arrive. Its two slots are overwritten in turn, in place,
in one copy after the other. So a crash damages at most one slot. Of all intact slots the last written one counts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from raymq.records.format.crc import body_crc
from storage.files import disk
from storage.files.config_files import ConfigFiles
from storage.files.damage import DamageNotes
from storage.files.reserve import write_with_reserve
from storage.files.two_copies import keep_damaged
from storage.replication.epochs import ConfirmFloor, EpochEntry

EPOCH_FILE: Final = "epochFileCheckpoint"
EPOCHS_FILE: Final = "epochs.json"
"""Name of the file in `config/` with the same epochs as the epoch file, and a version."""
CONFIRM_FILE: Final = "confirmOffset"
CONFIRM_SLOT_BYTES: Final = 512
"""Size in bytes of a slot of the confirm file: one disk sector. A power cut leaves a sector completely old or
completely new."""
_FIELDS: Final = struct.Struct(">QQQ")


def encode_epochs(entries: Sequence[EpochEntry]) -> bytes:
    """Encode epochs as the text of an epoch file."""
    lines = "".join(f"{entry.epoch}-{entry.start_offset}\n" for entry in entries).encode()
    return b"%d\n%d\n" % (len(entries), body_crc(lines)) + lines


def decode_epochs(text: bytes) -> list[EpochEntry]:
    """Decode the text of an epoch file. Raises ValueError if the text is damaged."""
    count, crc, *lines, rest = text.decode().split("\n")
    if rest:
        raise ValueError("the last line does not end with a line feed")
    entries = [EpochEntry(*map(int, line.split("-"))) for line in lines]
    if len(entries) != int(count):
        raise ValueError(f"the file has {len(entries)} epochs, but its first line says {count}")
    if int(crc) not in (0, body_crc("".join(f"{line}\n" for line in lines).encode())):
        raise ValueError(f"the file does not match its CRC {crc}")
    if any(other.epoch <= one.epoch or other.start_offset <= one.start_offset for one, other in pairwise(entries)):
        raise ValueError("the epochs are not in ascending order")
    return entries


class EpochFile:
    """The epochs of the log in one store directory. Not thread-safe. Each change is on disk when the method
    returns."""

    def __init__(self, root: Path, config: ConfigFiles | None = None) -> None:
        """Read the epochs, from any intact file that has them, and rewrite the other files if they are damaged or
        older. `config`: the files in `config/` of the store, which record their damage.

        Raises StoreCorruptError if all files are damaged; nothing was changed.
        """
        self._path = root / EPOCH_FILE
        self._backup = root / f"{EPOCH_FILE}.bak"
        self._config = config or ConfigFiles(root)
        self.entries: tuple[EpochEntry, ...] = self._read()

    @property
    def last_epoch(self) -> int:
        """The newest epoch; 0 if the log has no epoch."""
        return self.entries[-1].epoch if self.entries else 0

    def entry_at(self, physical_offset: int) -> EpochEntry | None:
        """Return the epoch to which the record at a physical offset belongs; None if the record was stored without an
        epoch."""
        return next((entry for entry in reversed(self.entries) if entry.start_offset <= physical_offset), None)

    def epoch_at(self, end_offset: int) -> int:
        """Return the epoch of the last record before `end_offset`. Return 0 if no record precedes it, or if the record
        was stored without an epoch."""
        entry = self.entry_at(end_offset - 1)
        return 0 if entry is None else entry.epoch

    def begin_epoch(self, epoch: int, start_offset: int) -> None:
        """Record that a new epoch began at `start_offset`. Raises InvalidArgumentError unless the epoch and the offset
        are both larger than those in the last entry."""
        entry = EpochEntry(epoch, start_offset)
        last = self.entries[-1] if self.entries else EpochEntry(-1, -1)
        if epoch <= last.epoch or start_offset <= last.start_offset:
            raise InvalidArgumentError(
                f"epoch {epoch} at physical offset {start_offset} cannot follow epoch {last.epoch} at {last[1]}"
            )
        self._write((*self.entries, entry))

    def truncate_from(self, physical_offset: int) -> None:
        """Remove the epochs that began at `physical_offset` or later, because the log was cut at that offset."""
        self._write(tuple(entry for entry in self.entries if entry.start_offset < physical_offset))

    def forget_before(self, physical_offset: int) -> None:
        """Remove the epochs that ended at or before `physical_offset`, the log's new start. The last epoch is always
        kept."""
        ends = [entry.start_offset for entry in self.entries[1:]]
        self._write(tuple(e for e, end in zip(self.entries, [*ends, 2**63], strict=False) if end > physical_offset))

    def _read(self) -> tuple[EpochEntry, ...]:
        plain: list[tuple[EpochEntry, ...] | None] = []
        damaged: list[str] = []
        for path in (self._path, self._backup):
            try:
                plain.append(tuple(decode_epochs(path.read_bytes())))
            except (FileNotFoundError, ValueError, TypeError) as error:
                plain.append(None)
                if not isinstance(error, FileNotFoundError):
                    damaged.append(f"file {path} was damaged ({error})")
        try:
            versioned = self._read_versioned()
        except StoreCorruptError as error:
            versioned = None
            damaged.append(str(error))
        known = plain[0] if plain[0] is not None else plain[1]
        if versioned is None and known is None:
            if damaged:
                raise StoreCorruptError(
                    f"{'; '.join(damaged)}; no intact copy of the epochs exists. Restore one of these files from a "
                    "backup. If another replica is in sync, move this store directory away: it is filled from there"
                )
            return ()
        entries = _newest(versioned, known)
        if [versioned, *plain] != [entries] * 3:
            self._rewrite(entries, damaged, [versioned, *plain])
        return entries

    def _read_versioned(self) -> tuple[EpochEntry, ...] | None:
        text = self._config.read(EPOCHS_FILE)
        if text is None:
            return None
        try:
            return tuple(EpochEntry(int(epoch), int(start)) for epoch, start in json.loads(text)["epochs"])
        except (KeyError, TypeError, ValueError) as error:
            raise StoreCorruptError(f"file {self._config.directory / EPOCHS_FILE} has no list of epochs") from error

    def _rewrite(
        self, entries: tuple[EpochEntry, ...], damaged: list[str], found: list[tuple[EpochEntry, ...] | None]
    ) -> None:
        """Write all copies of the epochs again, because some are damaged, missing or older. Copies that an earlier
        version of raymq wrote are not reported."""
        for path, copy in zip((self._path, self._backup), found[1:], strict=True):
            if copy is None:
                keep_damaged(path)
        self._write_files(entries)
        if found[0] is None and not damaged:
            return
        for text in damaged:
            self._config.damage.note(f"{text}, and was written again from an intact copy")
        for path, copy in zip((self._path, self._backup), found[1:], strict=True):
            if found[0] == entries and copy != entries and not any(str(path) in text for text in damaged):
                self._config.damage.note(f"file {path} was missing or an older version, and was written again")

    def _write(self, entries: tuple[EpochEntry, ...]) -> None:
        if entries != self.entries:
            self._write_files(entries)
            self.entries = entries

    def _write_files(self, entries: tuple[EpochEntry, ...]) -> None:
        text, root = encode_epochs(entries), self._path.parent
        for path in (self._path, self._backup):
            write_with_reserve(root, partial(disk.replace_file, path, text))
        self._config.write(EPOCHS_FILE, json.dumps({"epochs": entries}))


def _newest(versioned: tuple[EpochEntry, ...] | None, plain: tuple[EpochEntry, ...] | None) -> tuple[EpochEntry, ...]:
    """Return the epochs that count: those with a version, unless the plain file continues them."""
    if versioned is None or plain is None:
        return versioned or plain or ()
    return plain if versioned and plain[: len(versioned)] == versioned else versioned


class ConfirmFile:
    """The confirm file, which stores the highest confirm offset of one store directory, and its second copy. Not
    thread-safe. A method that changes the offset returns after the change is on disk."""

    def __init__(self, root: Path, damage: DamageNotes | None = None) -> None:
        """Read the confirm file and its copy, or create them. Damage is recorded in `damage`. The confirm offset is 0
        if the files are new, or if all slots are damaged. Raises OSError if the disk fails or is full."""
        self._paths = root / CONFIRM_FILE, root / f"{CONFIRM_FILE}.bak"
        self._damage = damage or DamageNotes()
        self._write_number, self.floor = self._read()

    def raise_to(self, epoch: int, offset: int) -> None:
        """Record that messages are confirmed up to `offset`, unless the confirm offset on disk is already higher.
        Raises OSError if the disk fails."""
        if offset > self.floor.offset:
            self.reset(ConfirmFloor(epoch, offset))

    def reset(self, floor: ConfirmFloor) -> None:
        """Replace the stored confirm offset, even by a lower one. Used if messages before the old offset are lost or
        given up. Raises OSError if the disk fails."""
        slot = _slot(self._write_number + 1, floor)
        for path in self._paths:
            disk.overwrite(path, (self._write_number + 1) % 2 * CONFIRM_SLOT_BYTES, slot)
        self._write_number, self.floor = self._write_number + 1, floor

    def _read(self) -> tuple[int, ConfirmFloor]:
        found = [_read_slots(path) for path in self._paths]
        newest = max(slots.newest for slots in found)
        number, epoch, offset = newest
        data = bytearray(2 * CONFIRM_SLOT_BYTES)
        if number:
            slot = _slot(number, ConfirmFloor(epoch, offset))
            begin = number % 2 * CONFIRM_SLOT_BYTES
            data[begin : begin + len(slot)] = slot
        for path, slots in zip(self._paths, found, strict=True):
            if slots.newest == newest and slots.exists and not slots.is_damaged:
                continue
            kept = keep_damaged(path) if slots.is_damaged else ""
            # Creating the file now also means that raising the confirm offset later needs no disk space.
            disk.replace_file(path, data)
            if slots.is_damaged and not number:
                self._damage.note(
                    f"file {path} is damaged, so the highest confirm offset of this replica is unknown: until the "
                    f"replica follows or leads again, it cannot detect that its log has lost its end{kept}"
                )
            # A crash during a write leaves a copy that is one write older.
            elif slots.is_damaged or (slots.exists and slots.newest[0] < number - 1):
                self._damage.note(f"file {path} was damaged or an older version, and was written again{kept}")
        return number, ConfirmFloor(epoch, offset)


class _Slots(NamedTuple):
    """The content of one copy of the confirm file: the number, epoch and offset of the last write in an intact slot, or
    zeros."""

    newest: tuple[int, int, int]
    exists: bool
    is_damaged: bool


def _read_slots(path: Path) -> _Slots:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return _Slots((0, 0, 0), exists=False, is_damaged=False)
    newest, damaged = (0, 0, 0), len(data) != 2 * CONFIRM_SLOT_BYTES
    for start in (0, CONFIRM_SLOT_BYTES):
        slot = data[start : start + CONFIRM_SLOT_BYTES]
        crc, fields, rest = slot[:4], slot[4 : 4 + _FIELDS.size], slot[4 + _FIELDS.size :]
        if len(fields) == _FIELDS.size and int.from_bytes(crc) == crc32(fields):
            newest = max(newest, _FIELDS.unpack(fields))
            damaged = damaged or any(rest)
        else:
            damaged = damaged or any(slot)
    return _Slots(newest, exists=True, is_damaged=damaged)


def _slot(number: int, floor: ConfirmFloor) -> bytes:
    fields = _FIELDS.pack(number, *floor)
    return struct.pack(">I", crc32(fields)) + fields
