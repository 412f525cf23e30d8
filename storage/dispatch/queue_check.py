"""Checks that the files and the units of a consume queue are its own: somebody may have moved files by hand, and a
disk may have changed bytes.

A unit points to its record, and the record names its queue and its offset there. Recovery reads the newest part of the
log only. So it would not see that files of a queue were swapped with each other or with those of another queue, and
consumers would get wrong messages. One record for each file is read here, and that is enough: a file is moved as a
whole.
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
    """The reason why the files of `queue`, which has found its end, cannot be its own; empty if they may be.

    The last units of the files must ascend in the log, and their records, if the log still has them, must be the
    queue's. If a record says otherwise, two more of its file are read: the record itself may be damaged.
    """
    if queue.out_of_order:
        return f"the file of {queue.topic}:{queue.queue_id} from offset {queue.next_offset} on is out of order"
    before = -1
    for first, count in queue.file_ranges():
        last = first + count - 1
        [unit] = queue.units(last, 1)
        if unit["size"] == PRE_BLANK_SIZE:
            continue
        if unit["size"] <= 0 or unit["physical_offset"] <= before:
            return f"the file of {queue.topic}:{queue.queue_id} from offset {first} on is out of order"
        before = int(unit["physical_offset"])
        if not any(_may_lead_to_own(queue, offset, reader) for offset in (last, first + count // 2, first)):
            return f"the file of {queue.topic}:{queue.queue_id} from offset {first} on is another queue's"
    return ""


def wrong_rows(units: NDArray[np.void], begins: Ints, sizes: Ints, codes: Ints) -> list[int]:
    """The rows of a queue's `units` that say something else than the log: it has a record of each size at each physical
    offset, with each tags code. A unit without a record is right, and so is one whose code is in an extension."""
    wrong = (units["physical_offset"] != begins) | (units["size"] != sizes)
    wrong |= (units["tags_code"] != codes) & (units["tags_code"] > EXT_ADDRESS_MAX)
    found: list[int] = np.flatnonzero(wrong & (units["size"] != PRE_BLANK_SIZE)).tolist()
    return found


def leads_to_own(queue: ConsumeQueue, queue_offset: int, reader: LogReader) -> bool:
    """True if the unit at an offset of a queue leads to a record that names this offset of this queue, and has its
    tags code."""
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
    """False if the unit at `queue_offset` leads to a record of another queue."""
    [unit] = queue.units(queue_offset, 1)
    start = int(unit["physical_offset"])
    try:
        view = dispatch_view(reader.log_bytes(start, start + int(unit["size"])))
    except (DataLossError, RecordError):
        return True  # It is not in the log any more, or it is damaged: then this says nothing of the unit.
    key = queue.topic, queue.queue_id
    return (view.topic, view.queue_id) == key or any(unit.key == key for unit in light_queue_units(view, start))
