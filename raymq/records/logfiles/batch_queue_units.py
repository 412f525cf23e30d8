"""Reads batch consume queues: queues of RocketMQ's whose records hold many messages each (spec/storage.md §2).

On disk
    batchconsumequeue/TOPIC/QUEUE/00000000000000000000      units of 46 bytes, one for each record

    | physical_offset 8 | size 4 | tags_code 8 | store_timestamp 8 | base_offset 8 | count 2 | -1 4 | 0 4 |

A unit's position in its file does not tell its queue offset: `base_offset` does, the offset of its first message. This
module hands out single messages (raymq.records.format.inner_batch), so no other module has to know of batches.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raymq.common.config.store import BATCH_UNIT_BYTES
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.inner_batch import split_inner_batch
from raymq.records.format.layout import BATCH_UNIT_DTYPE, RecordError
from raymq.records.logfiles.file_maps import FileMaps


def read_units(maps: FileMaps, path: Path) -> NDArray[np.void]:
    """The units in a file, over its map; those that were never written are zero. FileNotFoundError if there is none."""
    data = maps.get(str(path), at_random=True)
    return np.frombuffer(data, BATCH_UNIT_DTYPE, len(data) // BATCH_UNIT_BYTES)


def units_from(maps: FileMaps, directory: Path, queue_offset: int) -> Iterator[NDArray[np.void]]:
    """The units from the one that holds `queue_offset` on, each as an array of one."""
    paths = sorted(directory / name for name in os.listdir(directory) if name.isdecimal())
    # The file that holds the offset is the last one whose first unit does not begin behind it.
    firsts = [int(units[0]["base_offset"]) for path in paths if len(units := read_units(maps, path))]
    for path in paths[max(bisect_right(firsts, queue_offset) - 1, 0) :]:
        units = read_units(maps, path)
        # Units are written in order: the first without a size ends them.
        written = int(np.argmax(units["size"] <= 0)) if (units["size"] <= 0).any() else len(units)
        ends = units["base_offset"][:written] + units["count"][:written]
        for index in range(int(np.searchsorted(ends, queue_offset, "right")), written):
            yield units[index : index + 1]


def messages_of(
    record: memoryview, unit: np.void, from_offset: int, tag_codes: frozenset[int] | None
) -> Iterator[tuple[int, bytes]]:
    """The messages of an inner batch from queue offset `from_offset` on, with their queue offsets, only those with a
    tag code in `tag_codes`. If the batch is damaged, or its body does not decompress, each message is empty bytes: its
    reader takes it for a damaged record."""
    codes = None if tag_codes is None else {code & 0xFFFFFFFF for code in tag_codes}
    try:
        for message in split_inner_batch(record):
            view = dispatch_view(message)
            if view.queue_offset >= from_offset and (codes is None or view.tags_code & 0xFFFFFFFF in codes):
                yield view.queue_offset, message
    except RecordError:
        base_offset = int(unit["base_offset"])
        for queue_offset in range(max(base_offset, from_offset), base_offset + int(unit["count"])):
            yield queue_offset, b""
