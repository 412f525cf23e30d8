"""Checks records beyond their own fields and CRC (which `raymq.records.format.check.check_record` covers).

A record's CRC covers only its body. Recovery also ends the log before a record that is implausible or torn (cut off by
a crash). A replica refuses an implausible record. Only the store that crashed can detect a torn record.
"""

from __future__ import annotations

from typing import Final

from raymq.records.format.check import check_record
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.layout import MIN_RECORD_SIZE, SYS_FLAG_INNER_BATCH, find_sections, read_header

SECTOR_BYTES: Final = 512
"""Size in bytes of the disk's atomic write unit: a disk writes a sector as a whole, or not at all."""


def can_be_topic(topic: str) -> bool:
    """True if `topic` can be the name of a queue directory."""
    return topic not in ("", ".", "..") and {"/", "\0"}.isdisjoint(topic)


def is_implausible(view: DispatchView, physical_offset: int) -> bool:
    """True if the record names a queue that cannot exist, or a queue offset that the record cannot have."""
    return (
        not can_be_topic(view.topic)
        or view.queue_id < 0
        or view.queue_offset < 0
        or (view.queue_offset > physical_offset // MIN_RECORD_SIZE and not view.sys_flag & SYS_FLAG_INNER_BATCH)
    )


def is_torn(data: memoryview, position: int, size: int, *, file_start: int, **checks: bool) -> bool:
    """True if the record at `position` of a log file's `data` is torn: a crash cut off its end. The record's fields
    must be good.

    A torn record ends in zeros. But a whole record can end in zeros too: RocketMQ 4.9 leaves out the last separator, so
    a last property that ends in NUL looks the same. A record is whole if a good record or a BLANK follows. The last
    record of the log is torn if all its bytes in its last sector are zero. It is also torn if the bytes before the
    zeros are not a property. `file_start` is the file's physical offset; `checks` are the arguments of `check_record`
    for the next record.
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
    """True if `position` of a log file's `data` has a good record, or a BLANK (end-of-file marker) that fills the rest
    of the file."""
    size, good = check_record(data, position, **checks)
    if size == 0:
        return int.from_bytes(data[position : position + 4]) == len(data) - position
    return good and not is_implausible(dispatch_view(data, position), file_start + position)
