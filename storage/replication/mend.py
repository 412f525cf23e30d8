"""Replaces damaged bytes of a log by the intact bytes of another replica, in place.

All replicas have the same bytes at the same physical offsets. So bytes fit a part of a hole if they are whole, intact
records, and each record holds the physical offset of its place. A large hole is mended part by part: each part is
checked and on disk before the hole shrinks, so a crash leaves a smaller hole and whole records. The units that lead
into the part are rewritten from these records, and the index gets their keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.store import Hole
from storage.dispatch.block_dedup import remember_producer
from storage.dispatch.multi_dispatch import QueueUnit, units_elsewhere
from storage.dispatch.record_blocks import is_queued
from storage.files import disk
from storage.parts import StoreParts
from storage.replication.chunk_appender import parse_chunk

logger = logging.getLogger(__name__)

PutKeys = Callable[[bytes, Sequence[int], int], None]
"""Puts the keys of records into the index: takes bytes, the starts of the records in them, and the bytes' physical
offset.
"""


def mend_part(parts: StoreParts, offset: int, data: bytes, put_keys: PutKeys) -> None:
    """Write `data` over a part of a hole, from a physical offset on. Called under the append lock.

    On return the bytes are on disk, and the hole is smaller by this part. InvalidArgumentError: the part does not lie
    in one hole, or `data` is no sequence of intact records for it; nothing has changed. OSError: the disk failed; the
    hole stays.
    """
    end = offset + len(data)
    hole = next((one for one in parts.holes.holes if one.offset <= offset < end <= one.end_offset), None)
    if hole is None:
        raise InvalidArgumentError(f"the log has no hole from physical offset {offset} to {end}")
    file_size = parts.log.file_size
    views = parse_chunk(memoryview(data), offset, file_size, parts.settings.delay_levels_ms)
    disk.overwrite(parts.log.path(offset - offset % file_size), offset % file_size, data)
    for view in views:
        own = QueueUnit((view.topic, view.queue_id), view.queue_offset)
        if not is_queued(view.sys_flag) or parts.queues.was_deleted_after(own.key, view.physical_offset):
            continue
        for unit in (own, *units_elsewhere(view, view.physical_offset)):
            queue = parts.queues.get_plain(*unit.key)
            if queue is not None and queue.first_offset <= unit.queue_offset < queue.next_offset:
                queue.put_unit_at(unit.queue_offset, view.physical_offset, view.size, view.tags_code)
        remember_producer(view, parts.dedup, parts.deliveries)
    if views:
        put_keys(data, [view.physical_offset - offset for view in views], offset)
    left = [
        one
        for one in (
            Hole(hole.offset, offset - hole.offset, hole.reason),
            Hole(end, hole.end_offset - end, hole.reason),
        )
        if one.size
    ]
    parts.holes.replace([*(one for one in parts.holes.holes if one is not hole), *left], file_size)
    parts.holes.mended_bytes += len(data)
    parts.holes.mended_holes += not left
    logger.warning("%s: %d damaged bytes at %d were replaced", parts.settings.store_path_root_dir, len(data), offset)
