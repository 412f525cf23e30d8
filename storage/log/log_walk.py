"""Walking the log in large pieces of whole records, for readers that take a thousand of them at a time."""

from __future__ import annotations

import logging
import struct
from typing import Final, NamedTuple

import numpy as np

from raymq.kernels.fields import Bytes, Ints
from raymq.logfiles.log_reader import LogReader
from raymq.record.layout import BLANK_MAGIC, MAGIC_V1, MAGIC_V2, MIN_RECORD_SIZE

logger = logging.getLogger(__name__)

_INTS: Final = struct.Struct(">ii")


class WalkedRecords(NamedTuple):
    """Records of one file, back to back: `data` begins at `physical_offset`, the records in it at `starts`.

    The walk goes on at `end_offset`: the end of the last record, or the next file if this one ends there.
    """

    data: Bytes
    starts: Ints
    physical_offset: int
    end_offset: int


def walk_records(reader: LogReader, physical_offset: int, limit: int, max_bytes: int) -> WalkedRecords:
    """The records between `physical_offset`, where one starts, and `limit`, where one ends: about `max_bytes` of them.

    Only sizes and magics are looked at: everything before `limit` was checked when it was written or recovered. A
    record that is damaged all the same hides the rest of its file, which is logged. DataLossError if the file is gone.
    """
    file_size = reader.commit_log_file_size
    file_end = physical_offset - physical_offset % file_size + file_size
    data = reader.log_bytes(physical_offset, min(limit, file_end))
    starts: list[int] = []
    position, end = 0, len(data)
    while position < end:
        size, magic = _INTS.unpack_from(data, position) if position <= end - 8 else (0, 0)
        if magic not in (MAGIC_V1, MAGIC_V2) or not MIN_RECORD_SIZE <= size <= end - position:
            if magic != BLANK_MAGIC:
                logger.error("no record at physical offset %d; going on in the next file", physical_offset + position)
            return WalkedRecords(np.frombuffer(data, np.uint8), np.array(starts, np.int64), physical_offset, file_end)
        starts.append(position)
        position += size
        if position >= max_bytes:
            break
    end_offset = physical_offset + position
    return WalkedRecords(
        np.frombuffer(data[:position], np.uint8), np.array(starts, np.int64), physical_offset, end_offset
    )
