"""The files in which a replica stores its epochs and its highest confirm offset (spec §11.2).

The epoch file contains the offset at which each epoch began. The replica compares these offsets with the master's
epochs. The confirm file contains the highest confirm offset that the replica reported: a log that ends before that
offset lacks acknowledged messages.

On disk
    epochFileCheckpoint         2                   the number of lines of epochs
                                1895893516          CRC-32 of the epoch lines, top bit cleared; 0: unchecked
                                1-0                 epoch 1 began at physical offset 0
                                2-1073741824
    epochFileCheckpoint.bak     the previous text
    confirmOffset               two slots of 512 bytes, zeros after the fields, big-endian:
                                CRC-32 of the next 24 bytes (4 bytes), number of the write, epoch, offset (8 bytes each)

A new text of epochs is written to another file, which is then renamed. A crash leaves the new text, or the previous
text as `.bak`. The confirm file is written three times a second while messages arrive. Its two slots are overwritten in
turn, in place, so a crash damages at most one slot, and the other slot still has the previous confirm offset.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final
from zlib import crc32

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from raymq.records.format.crc import body_crc
from storage.files import disk
from storage.files.reserve import write_with_reserve
from storage.replication.epochs import ConfirmFloor, EpochEntry

logger = logging.getLogger(__name__)

EPOCH_FILE: Final = "epochFileCheckpoint"
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
    count, crc, *lines = text.decode().splitlines()
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

    def __init__(self, root: Path) -> None:
        """Read the epoch file, or its `.bak` if the file is missing or damaged. Raises StoreCorruptError if both are
        damaged."""
        self._path = root / EPOCH_FILE
        self._backup = root / f"{EPOCH_FILE}.bak"
        self.entries: tuple[EpochEntry, ...] = tuple(self._read())

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

    def _read(self) -> list[EpochEntry]:
        damage = ""
        for path in (self._path, self._backup):
            try:
                return decode_epochs(path.read_bytes())
            except FileNotFoundError:
                continue
            except (ValueError, TypeError) as error:
                damage = f"file {path} is damaged: {error}"
                logger.warning("%s", damage)
        if damage:
            raise StoreCorruptError(f"{damage}; empty the store directory and let another replica fill it")
        return []

    def _write(self, entries: tuple[EpochEntry, ...]) -> None:
        if entries == self.entries:
            return
        new = self._path.with_name(f"{EPOCH_FILE}.new")
        write_with_reserve(self._path.parent, lambda: disk.write_file(new, encode_epochs(entries)))
        if self._path.exists():
            disk.rename(self._path, self._backup)
        disk.rename(new, self._path)
        disk.sync_directory(self._path.parent)
        self.entries = entries


class ConfirmFile:
    """The confirm file, which stores the highest confirm offset of one store directory. Not thread-safe. A method that
    changes the offset returns after the change is on disk."""

    def __init__(self, root: Path) -> None:
        """Read the confirm file, or create it. The file has two slots, each with a confirm offset. The confirm offset
        is 0 if the file is new, or if both slots are damaged. Raises OSError if the disk fails or is full."""
        self._path = root / CONFIRM_FILE
        if not self._path.exists():
            # Create the confirm file now, so that raising the confirm offset later needs no disk space.
            disk.replace_file(self._path, bytes(2 * CONFIRM_SLOT_BYTES))
        self._write_number, self.floor = self._read()

    def raise_to(self, epoch: int, offset: int) -> None:
        """Record that messages are confirmed up to `offset`, unless the confirm offset on disk is already higher.
        Raises OSError if the disk fails."""
        if offset > self.floor.offset:
            self.reset(ConfirmFloor(epoch, offset))

    def reset(self, floor: ConfirmFloor) -> None:
        """Replace the stored confirm offset, even by a lower one. Used if messages before the old offset are lost or
        given up. Raises OSError if the disk fails."""
        fields = _FIELDS.pack(self._write_number + 1, *floor)
        slot = struct.pack(">I", crc32(fields)) + fields
        descriptor = disk.open_file(self._path, os.O_RDWR)
        try:
            disk.pwrite_all(descriptor, (self._write_number + 1) % 2 * CONFIRM_SLOT_BYTES, slot)
            disk.flush(descriptor)
        finally:
            os.close(descriptor)
        self._write_number, self.floor = self._write_number + 1, floor

    def _read(self) -> tuple[int, ConfirmFloor]:
        data = self._path.read_bytes()
        slots = [data[start : start + _FIELDS.size + 4] for start in (0, CONFIRM_SLOT_BYTES)]
        good = [
            _FIELDS.unpack(slot[4:])
            for slot in slots
            if len(slot) == _FIELDS.size + 4 and int.from_bytes(slot[:4]) == crc32(slot[4:])
        ]
        if good:
            number, epoch, offset = max(good)
            return number, ConfirmFloor(epoch, offset)
        if data.strip(b"\0"):
            logger.error(
                "file %s is damaged, so the highest confirm offset of this replica is unknown: until the replica "
                "follows or leads again, it cannot detect that its log has lost its end",
                self._path,
            )
        return 0, ConfirmFloor(0, 0)
