"""Reads queue entries (units) that are not in plain consume queues: units of consume-queue extensions, and units of
inner batches.

The extension of a consume queue has units that are too long for the queue itself (spec/storage.md §2).

On disk
    consumequeue_ext/TOPIC/QUEUE/00000000000000000000      48 MiB each, named after the offset of the first byte

    unit    | size 2 = 20 + bitmap | tags_code 8 | store_timestamp 8 | bitmap_size 2 | bitmap |
    end     | -1 2 | the rest of the file, too short for a unit

If a message has an extension unit, its unit in the consume queue has the extension unit's address instead of a tag
code. The address is the extension unit's offset plus the smallest long; no tag hash is this small. If the extension
unit was deleted, the tag is unknown.

Batch consume queues are RocketMQ's queues of records that hold many messages each (spec/storage.md §2).

On disk
    batchconsumequeue/TOPIC/QUEUE/00000000000000000000      units of 46 bytes, one for each record

    | physical_offset 8 | size 4 | tags_code 8 | store_timestamp 8 | base_offset 8 | count 2 | -1 4 | 0 4 |

A unit's position in its file does not determine the unit's queue offset: `base_offset` is the queue offset of the
record's first message. This module returns single messages (raymq.records.format.inner_batch), so that no other module
handles batches.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.config.values import BATCH_UNIT_BYTES
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.inner_batch import split_inner_batch
from raymq.records.format.layout import BATCH_UNIT_DTYPE, RecordError, windows
from raymq.records.logfiles.directory import file_name
from raymq.records.logfiles.file_maps import FileMaps


def read_units(maps: FileMaps, path: Path) -> NDArray[np.void]:
    """Return the entries (units) of a batch consume-queue file, as an array over the mapped file. Units that were never
    written are zero. Raises FileNotFoundError if the file does not exist."""
    data = maps.get(str(path), at_random=True)
    return np.frombuffer(data, BATCH_UNIT_DTYPE, len(data) // BATCH_UNIT_BYTES)


def units_from(maps: FileMaps, directory: Path, queue_offset: int) -> Iterator[NDArray[np.void]]:
    """Yield the entries (units) of a batch consume queue, starting with the unit that contains `queue_offset`. Each
    unit is an array of length one."""
    paths = sorted(directory / name for name in os.listdir(directory) if name.isdecimal())
    # The file that contains `queue_offset` is the last file whose first unit begins at or before this offset.
    firsts = [int(units[0]["base_offset"]) for path in paths if len(units := read_units(maps, path))]
    for path in paths[max(bisect_right(firsts, queue_offset) - 1, 0) :]:
        units = read_units(maps, path)
        # The units of a batch consume queue are written in order, so the first unit without a size is the first
        # unwritten unit.
        written = int(np.argmax(units["size"] <= 0)) if (units["size"] <= 0).any() else len(units)
        ends = units["base_offset"][:written] + units["count"][:written]
        for index in range(int(np.searchsorted(ends, queue_offset, "right")), written):
            yield units[index : index + 1]


def messages_of(
    record: memoryview, unit: np.void, from_offset: int, tag_codes: frozenset[int] | None
) -> Iterator[tuple[int, bytes]]:
    """Yield the messages of an inner batch from queue offset `from_offset` on, each with its queue offset. If
    `tag_codes` is given, only messages with one of these tag codes are yielded. If the batch is damaged or its body
    cannot be decompressed, each message is empty bytes. The reader treats empty bytes as a damaged record."""
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


EXT_ADDRESS_MAX: Final = -(2**31) - 1
"""Largest value of a consume-queue entry's tag-code field that is the address of an entry (unit) in the queue's
extension. Larger values are tag codes."""
EXT_UNIT_DTYPE: Final = np.dtype(
    [("size", ">i2"), ("tags_code", ">i8"), ("store_timestamp", ">i8"), ("bitmap_size", ">i2")]
)
"""numpy type of a consume-queue extension unit, without its bitmap."""
_FIRST_ADDRESS: Final = np.int64(-(2**63))


def addresses_of(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert offsets of extension units into the addresses that consume-queue entries store."""
    return offsets ^ _FIRST_ADDRESS


def offsets_of(addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert the addresses of extension units, as consume-queue entries store them, into offsets in the queue's
    extension."""
    return addresses ^ _FIRST_ADDRESS


def units_at(data: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.void]:
    """Return the consume-queue extension units at `positions` of a file. A unit beyond the end of the file is
    zero."""
    units = np.zeros(len(positions), EXT_UNIT_DTYPE)
    within = positions <= len(data) - EXT_UNIT_DTYPE.itemsize
    units[within] = windows(data, EXT_UNIT_DTYPE.itemsize)[positions[within]].view(EXT_UNIT_DTYPE)
    return units


def are_units(units: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a mask of the consume-queue extension units that were written. Such a unit has valid length
    fields."""
    bitmaps = units["bitmap_size"].astype(np.int32)
    good: NDArray[np.bool_] = (bitmaps >= 0) & (units["size"] == EXT_UNIT_DTYPE.itemsize + bitmaps)
    return good


class ExtensionReader:
    """Reads the consume-queue extensions in `directory`, whose files have `file_size` bytes. The reader is used only if
    a consume-queue entry has the address of an entry (unit) in the extension. So it is never used if the store's
    extension option was never on."""

    def __init__(self, maps: FileMaps, directory: str, file_size: int) -> None:
        self._maps, self._directory, self._file_size = maps, directory, file_size

    def units(
        self, topic: str, queue_id: int, addresses: NDArray[np.int64]
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """Return the extension units at `addresses` of a queue's consume-queue extension, and a mask of the units that
        exist."""
        offsets = offsets_of(addresses)
        starts = offsets - offsets % self._file_size
        units = np.zeros(len(offsets), EXT_UNIT_DTYPE)
        for start in np.unique(starts).tolist():
            # `rows`: the indices of the addresses that lead to entries (units) in this extension file. If the file was
            # deleted, these entries stay zero.
            rows = np.flatnonzero(starts == start)
            try:
                data = self._maps.get(f"{self._directory}/{topic}/{queue_id}/{file_name(start)}", at_random=True)
            except FileNotFoundError:
                continue
            units[rows] = units_at(data, offsets[rows] - start)
        return units, are_units(units)

    def tags_codes(
        self, topic: str, queue_id: int, addresses: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the tag codes of the extension units at `addresses`, and a mask of the units that exist. The code of a
        missing unit is 0."""
        units, found = self.units(topic, queue_id, addresses)
        return np.where(found, units["tags_code"], 0), found
