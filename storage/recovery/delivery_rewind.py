"""Takes back the progress of delayed messages whose deliveries are no longer in the log, so that the next master
delivers these messages.

A replica saves its delivery progress about once a second. A failover may then cut deliveries off its log that no other
replica has, but its files still count them. If this replica became the master before another replica delivered the
messages, nobody would ever deliver them. So this module derives the progress again, from the confirmed progress
(storage.dispatch.delivery_progress) and from the deliveries in the log after it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from raymq.common.delay import delivery_source
from raymq.common.errors import DataLossError
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import DispatchView, dispatch_view
from storage.dispatch.delivery_progress import DeliveryProgress
from storage.parts import StoreParts

logger = logging.getLogger(__name__)


def take_back_lost_deliveries(parts: StoreParts) -> None:
    """Correct the delivery progress of a store that is being opened, if the log ends before some deliveries that the
    progress files count. Otherwise change nothing.

    The log must be recovered. On return the corrected progress is on disk.
    """
    progress, end = parts.deliveries, parts.log.end_offset
    confirmed = progress.confirmed
    if confirmed is None or end >= progress.saved_end:
        return
    if confirmed.physical_offset > end:
        logger.error(
            "%s: the log ends at %d, before the confirmed offset %d; delayed messages that were delivered after "
            "the end of the log are not delivered again",
            *(parts.settings.store_path_root_dir, end, confirmed.physical_offset),
        )
        return
    earlier = DeliveryProgress()
    earlier.start_from(confirmed)
    try:
        for view in _records(parts, max(confirmed.physical_offset, parts.log.min_offset), end):
            producer = view.producer
            source = None if producer is None else delivery_source(producer.producer_id)
            if producer is not None and source is not None:
                earlier.advance(source, producer.epoch, producer.first_sequence + 1)
    except DataLossError as error:
        logger.error("%s: cannot read the deliveries: %s", parts.settings.store_path_root_dir, error)
        return
    logger.info(
        "%s: the log was cut at %d; delayed messages that were delivered after that offset wait again",
        *(parts.settings.store_path_root_dir, end),
    )
    progress.rewind(earlier.table(), parts.config, end)


def _records(parts: StoreParts, start: int, end: int) -> Iterator[DispatchView]:
    """Yield the intact records of the log from the physical offset `start`, where a record begins, to `end`."""
    size, holes = parts.log.file_size, parts.holes.holes
    while start < end:
        file_end = min(start - start % size + size, end)
        data, position = parts.reader.log_bytes(start, file_end), 0
        while position < len(data):
            length, good = check_record(data, position, check_crc=False)
            if good and length > 0:
                yield dispatch_view(data, position)
                position += length
                continue
            # Continue after a damaged range. Otherwise the rest of the file is blank.
            at = start + position
            position = min([hole.end_offset for hole in holes if hole.offset <= at < hole.end_offset], default=file_end)
            position -= start
        start = file_end
