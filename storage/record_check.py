"""What a good record is beside the checks of its own fields and CRC (`raymq.record.check_record`).

A record's CRC covers its body only. Recovery ends the log before a record that is not good by these rules either, so a
replica does not take one.
"""

from __future__ import annotations

from raymq.record import DispatchView
from raymq.record_layout import HEADERS, MIN_RECORD_SIZE, SYS_FLAG_INNER_BATCH


def can_be_topic(topic: str) -> bool:
    """Whether a queue of that name can have a directory."""
    return topic not in ("", ".", "..") and {"/", "\0"}.isdisjoint(topic)


def is_implausible(view: DispatchView, physical_offset: int) -> bool:
    """Whether the record asks for a queue that cannot exist, or for a place in it that it cannot have."""
    return (
        not can_be_topic(view.topic)
        or view.queue_id < 0
        or view.queue_offset < 0
        or (view.queue_offset > physical_offset // MIN_RECORD_SIZE and not view.sys_flag & SYS_FLAG_INNER_BATCH)
    )


def properties_are_cut(data: memoryview, position: int, view: DispatchView) -> bool:
    """Whether a record that has properties ends in a zero byte, which no writer of properties leaves there."""
    if data[position + view.size - 1]:
        return False
    header = HEADERS[(view.sys_flag >> 4) & 3].size
    body_size = int.from_bytes(data[position + header - 4 : position + header])
    topic_size_at = position + header + body_size
    width = 1 if data[position + 7] == 0xA7 else 2
    topic_size = int.from_bytes(data[topic_size_at : topic_size_at + width])
    return topic_size_at + width + topic_size + 2 < position + view.size
