"""Further checks of a record, beside those of its own fields and CRC (`raymq.records.format.check.check_record`).

A record's CRC covers its body only. Recovery also ends the log before a record that is implausible or torn. A replica
refuses an implausible one; only the store that crashed can tell that one is torn.
"""

from __future__ import annotations

from typing import Final

from raymq.records.format.check import check_record
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.layout import MIN_RECORD_SIZE, SYS_FLAG_INNER_BATCH, find_sections, read_header

SECTOR_BYTES: Final = 512
"""The size of the pieces that a disk writes as a whole, or not at all."""


def can_be_topic(topic: str) -> bool:
    """True if a queue of that name can have a directory."""
    return topic not in ("", ".", "..") and {"/", "\0"}.isdisjoint(topic)


def is_implausible(view: DispatchView, physical_offset: int) -> bool:
    """True if the record names a queue that cannot exist, or an offset there that it cannot have."""
    return (
        not can_be_topic(view.topic)
        or view.queue_id < 0
        or view.queue_offset < 0
        or (view.queue_offset > physical_offset // MIN_RECORD_SIZE and not view.sys_flag & SYS_FLAG_INNER_BATCH)
    )


def is_torn(data: memoryview, position: int, size: int, *, file_start: int, **checks: bool) -> bool:
    """True if a crash took the end of the record at `position` of a log file's `data`, whose fields are good.

    Such a record ends in zeros. So does one whose last property ends in NUL, where RocketMQ 4.9 wrote it: it leaves the
    last separator out. A record is whole in any case if a good record or a BLANK follows. As the last one it is torn if
    all of it that lies in its last sector is zero, or if what is before the zeros is no property.
    `file_start` is the file's physical offset; `checks` are those of `check_record` for the record behind.
    """
    end = position + size
    if data[end - 1]:
        return False
    _, _, _, properties_at, _ = find_sections(data, position, read_header(data, position))
    properties = bytes(data[properties_at:end])
    if not properties or _good_one_follows(data, end, file_start, checks):
        return False
    sector = (end - 1) // SECTOR_BYTES * SECTOR_BYTES
    if sector > position and not any(data[sector:end]):
        return True
    name, mark, _ = properties.rstrip(b"\0").rpartition(b"\x02")[2].partition(b"\x01")
    return not (name and mark)


def _good_one_follows(data: memoryview, position: int, file_start: int, checks: dict[str, bool]) -> bool:
    """True if a good record, or a BLANK that fills the file, is at `position` of a file's `data`."""
    size, good = check_record(data, position, **checks)
    if size == 0:
        return int.from_bytes(data[position : position + 4]) == len(data) - position
    return good and not is_implausible(dispatch_view(data, position), file_start + position)
