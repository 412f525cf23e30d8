"""Replaces damaged bytes of a log by the good ones of another replica, in place.

All replicas have the same bytes at the same physical offsets, so the bytes of a hole are right if they are whole, good
records, each of which says that it is at its place, and if they fill the hole exactly. The queues' units that lead into
the hole are made again from these records. The index does not get their keys before it is built anew.
"""

from __future__ import annotations

import logging
import os

from raymq.errors import InvalidArgumentError
from storage.dispatch.block_dedup import remember_producer
from storage.dispatch.multi_dispatch import QueueUnit, units_elsewhere
from storage.dispatch.record_blocks import is_queued
from storage.files import disk
from storage.parts import StoreParts
from storage.replication.chunk_appender import parse_chunk

logger = logging.getLogger(__name__)


def mend_hole(parts: StoreParts, offset: int, data: bytes) -> None:
    """Write `data` over the hole at a physical offset. Called under the append lock. On return it is on disk.

    InvalidArgumentError, and nothing is changed, unless there is such a hole and `data` fits it. OSError: the disk
    failed; the hole stays.
    """
    hole = next((one for one in parts.holes.holes if one.offset == offset), None)
    if hole is None:
        raise InvalidArgumentError(f"the log has no hole at physical offset {offset}")
    if len(data) != hole.size:
        raise InvalidArgumentError(f"the hole at physical offset {offset} has {hole.size} bytes, not {len(data)}")
    file_size = parts.log.file_size
    views = parse_chunk(memoryview(data), offset, file_size, parts.settings.delay_levels_ms)
    start = offset - offset % file_size
    descriptor = disk.open_file(parts.log.path(start), os.O_RDWR)
    try:
        disk.pwrite_all(descriptor, offset - start, data)
        disk.flush(descriptor)
    finally:
        os.close(descriptor)
    for view in views:
        if not is_queued(view.sys_flag) or parts.queues.was_deleted_after(view.topic, view.physical_offset):
            continue
        own = QueueUnit((view.topic, view.queue_id), view.queue_offset)
        for unit in (own, *units_elsewhere(view, view.physical_offset)):
            queue = parts.queues.get_plain(*unit.key)
            if queue is not None and queue.first_offset <= unit.queue_offset < queue.next_offset:
                queue.put_unit_at(unit.queue_offset, view.physical_offset, view.size, view.tags_code)
        remember_producer(view, parts.dedup, parts.deliveries)
    parts.holes.replace([one for one in parts.holes.holes if one is not hole], file_size)
    logger.warning(
        "%s: the %d damaged bytes at %d were replaced", parts.settings.store_path_root_dir, hole.size, offset
    )
