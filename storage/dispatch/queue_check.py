"""Checks that the files and the units of a consume queue belong to the queue. An operator may have moved files by hand,
and a disk may have changed bytes.

A unit points to its record, and the record names its queue and its queue offset. Recovery reads only the newest part of
the log, so recovery alone would not detect files that were swapped within a queue or with another queue. Consumers
would get wrong messages. This check reads one record per file, which is enough because files are moved as a whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import DataLossError
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.layout import RecordError
from raymq.records.kernels.fields import Ints
from raymq.records.logfiles.ext_units import EXT_ADDRESS_MAX
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE, LogReader
from storage.dispatch.multi_dispatch import light_queue_units
from storage.queue.consume_queue import ConsumeQueue


def misplaced_file(queue: ConsumeQueue, reader: LogReader) -> str:
    """Return the reason why the files of `queue` cannot belong to it; empty if they can. The queue's end must be known.

    From file to file, the last entries (units) must point to later and later records of the log. These records, if the
    log still has them, must belong to the queue. If a record belongs to another queue, two more records of the file are
    read, because the first record may be damaged.
    """
    if queue.out_of_order:
        return (
            f"the file of queue {queue.topic}:{queue.queue_id} that begins at offset {queue.next_offset} is out "
            "of order"
        )
    before = -1
    for first, count in queue.file_ranges():
        last = first + count - 1
        [unit] = queue.units(last, 1)
        if unit["size"] == PRE_BLANK_SIZE:
            continue
        if unit["size"] <= 0 or unit["physical_offset"] <= before:
            return f"the file of queue {queue.topic}:{queue.queue_id} that begins at offset {first} is out of order"
        before = int(unit["physical_offset"])
        if not any(_may_lead_to_own(queue, offset, reader) for offset in (last, first + count // 2, first)):
            return (
                f"the file of queue {queue.topic}:{queue.queue_id} that begins at offset {first} belongs to "
                "another queue"
            )
    return ""


def wrong_rows(units: NDArray[np.void], begins: Ints, sizes: Ints, codes: Ints) -> list[int]:
    """Return the rows of a queue's entries (`units`) that contradict the log. `begins`, `sizes` and `codes` are the
    physical offset, size and tags code of each entry's record in the log.

    An entry that points to no record is not wrong. The code of an entry is not compared if it is in a consume-queue
    extension.
    """
    wrong = (units["physical_offset"] != begins) | (units["size"] != sizes)
    wrong |= (units["tags_code"] != codes) & (units["tags_code"] > EXT_ADDRESS_MAX)
    found: list[int] = np.flatnonzero(wrong & (units["size"] != PRE_BLANK_SIZE)).tolist()
    return found


def leads_to_own(queue: ConsumeQueue, queue_offset: int, reader: LogReader) -> bool:
    """True if the unit at an offset of a queue points to the right record. The right record names this queue and this
    offset, and has the unit's tags code."""
    [unit] = queue.units(queue_offset, 1)
    start, size, code = (int(value) for value in unit.item())
    try:
        view = dispatch_view(reader.log_bytes(start, start + size))
    except (DataLossError, RecordError):
        return False
    if view.physical_offset != start or view.size != size or (code > EXT_ADDRESS_MAX and code != view.tags_code):
        return False
    places = [((view.topic, view.queue_id), view.queue_offset), *light_queue_units(view, start)]
    return (queue.key, queue_offset) in places


def _may_lead_to_own(queue: ConsumeQueue, queue_offset: int, reader: LogReader) -> bool:
    """Return False if the consume-queue entry (unit) at `queue_offset` points to a record of another queue. Returns
    True if the record cannot be read."""
    [unit] = queue.units(queue_offset, 1)
    start = int(unit["physical_offset"])
    try:
        view = dispatch_view(reader.log_bytes(start, start + int(unit["size"])))
    except (DataLossError, RecordError):
        # The record of this consume-queue entry (unit) is damaged or no longer in the log. So nothing shows that the
        # entry points to a record of another queue, and the check accepts the entry.
        return True
    key = queue.topic, queue.queue_id
    return (view.topic, view.queue_id) == key or any(unit.key == key for unit in light_queue_units(view, start))
