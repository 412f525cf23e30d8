"""Walking the log in large pieces of whole records, for readers that take a thousand of them at a time."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from raymq.kernels.fields import Bytes, Ints
from raymq.logfiles.log_reader import LogReader
from raymq.record.walk import is_blank, walk_records

logger = logging.getLogger(__name__)


class WalkedRecords(NamedTuple):
    """Records of one file, back to back: `data` begins at `physical_offset`, the records in it at `starts`.

    The walk goes on at `end_offset`: the end of the last record, or the next file if this one ends there.
    """

    data: Bytes
    starts: Ints
    physical_offset: int
    end_offset: int


def walk_log(reader: LogReader, physical_offset: int, limit: int, max_bytes: int) -> WalkedRecords:
    """The records between `physical_offset`, where one starts, and `limit`, where one ends: about `max_bytes` of them.

    Only sizes and magics are looked at: everything before `limit` was checked when it was written or recovered. A
    record that is damaged all the same hides the rest of its file, which is logged. DataLossError if the file is gone.
    """
    file_size = reader.commit_log_file_size
    file_end = physical_offset - physical_offset % file_size + file_size
    data = reader.log_bytes(physical_offset, min(limit, file_end))
    starts, end = walk_records(data, 0, max_bytes)
    end_offset = physical_offset + end
    if end < min(max_bytes, len(data)):
        if not is_blank(data, end):
            logger.error("no record at physical offset %d; going on in the next file", end_offset)
        end_offset = file_end
    else:
        data = data[:end]
    return WalkedRecords(np.frombuffer(data, np.uint8), starts, physical_offset, end_offset)
