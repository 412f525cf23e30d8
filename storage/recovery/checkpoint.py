"""The checkpoint: up to which store times the log and the queues are known to be on disk (spec/storage.md §4).

On disk
    checkpoint      4096 bytes: five longs, big-endian, then zeros

    | physic_msg_timestamp 8 | logics_msg_timestamp 8 | index_msg_timestamp 8 | master_flushed_offset 8 |
    | confirm_physical_offset 8 |

After a crash recovery starts at the newest log file whose first message is older than both. A checkpoint that is
missing or cut short counts as zeros: recovery then starts at the first file.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storage.files import disk

logger = logging.getLogger(__name__)

FILE_BYTES: Final = 4096
_LONGS: Final = struct.Struct(">qqqqq")
_MARGIN_MS: Final = 3000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The values in the file. Timestamps are store times in ms, offsets physical."""

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_physical_offset: int = 0

    @property
    def min_timestamp(self) -> int:
        """The time before which log and queues are on disk for sure."""
        return max(0, min(self.physic_msg_timestamp, self.logics_msg_timestamp) - _MARGIN_MS)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`; zeros when there is none, or when it is too short (which is logged)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Checkpoint()
    if len(data) < _LONGS.size:
        logger.warning("%s has %d bytes instead of %d and is ignored", path, len(data), FILE_BYTES)
        return Checkpoint()
    return Checkpoint(*_LONGS.unpack_from(data))


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the values at `path` and wait until they are on disk. The 40 bytes are one sector: all or nothing."""
    new = not path.exists()
    values = (
        checkpoint.physic_msg_timestamp,
        checkpoint.logics_msg_timestamp,
        checkpoint.index_msg_timestamp,
        checkpoint.master_flushed_offset,
        checkpoint.confirm_physical_offset,
    )
    disk.write_file(path, _LONGS.pack(*values).ljust(FILE_BYTES, b"\0"))
    if new:
        disk.sync_directory(path.parent)
