"""The checkpoint: the store times up to which the log and the queues are known to be on disk (spec/storage.md §4).

On disk
    checkpoint      4096 bytes: five longs, big-endian, a checksum, then zeros

    | physic_msg_timestamp 8 | logics_msg_timestamp 8 | index_msg_timestamp 8 | master_flushed_offset 8 |
    | confirm_physical_offset 8 | zeros 24 | "RMQC" 4 | CRC-32 of the five longs 4 |

After a crash, recovery starts at a log file whose first message is older than the timestamps of both the log and the
queues. It takes the newest such file. A checkpoint that is missing, cut short or damaged counts as zeros: recovery then
starts at the first file. RocketMQ writes no checksum; it leaves the existing checksum in place, which then does not
match its values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raymq.records.format.crc import crc32
from storage.files import disk
from storage.files.damage import DamageNotes

FILE_BYTES: Final = 4096
_LONGS: Final = struct.Struct(">qqqqq")
_MARGIN_MS: Final = 3000
_SEAL: Final = struct.Struct(">4sI")
_SEAL_AT: Final = 64
_SEAL_NAME: Final = b"RMQC"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The values of the checkpoint file. Timestamps are store times in ms; offsets are physical offsets."""

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_physical_offset: int = 0

    @property
    def min_timestamp(self) -> int:
        """A store time in ms: all records that were stored before it, and their consume-queue entries, are certainly on
        disk."""
        return max(0, min(self.physic_msg_timestamp, self.logics_msg_timestamp) - _MARGIN_MS)


def read_checkpoint(path: Path, damage: DamageNotes) -> Checkpoint:
    """Read the checkpoint at `path`. Returns zeros if the file does not exist, is too short, or is damaged. Damage is
    recorded in `damage`."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Checkpoint()
    if len(data) < _LONGS.size:
        damage.note(
            f"file {path} has {len(data)} bytes instead of {FILE_BYTES} and is ignored: recovery reads more of the log"
        )
        return Checkpoint()
    if len(data) >= _SEAL_AT + _SEAL.size:
        name, crc = _SEAL.unpack_from(data, _SEAL_AT)
        if name == _SEAL_NAME and crc != crc32(data[: _LONGS.size]):
            damage.note(f"file {path} does not match its checksum and is ignored: recovery reads more of the log")
            return Checkpoint()
    return Checkpoint(*_LONGS.unpack_from(data))


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the values of the checkpoint file at `path` and wait until they are on disk. All values are in one
    sector, so the write is atomic."""
    new = not path.exists()
    values = (
        checkpoint.physic_msg_timestamp,
        checkpoint.logics_msg_timestamp,
        checkpoint.index_msg_timestamp,
        checkpoint.master_flushed_offset,
        checkpoint.confirm_physical_offset,
    )
    longs = _LONGS.pack(*values)
    data = longs.ljust(_SEAL_AT, b"\0") + _SEAL.pack(_SEAL_NAME, crc32(longs))
    disk.write_file(path, data.ljust(FILE_BYTES, b"\0"))
    if new:
        disk.sync_directory(path.parent)
