"""The messages of an OffsetRange as Arrow batches of bounded size, read by whoever runs a part of a scan.

A Spark task, a Ray Data task and a job of the command line all read their ranges here: from mapped files on the store's
node, over a lane elsewhere (raymq.scan.range_reader). A batch holds copies, so it outlives the files it came from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raymq.errors import DataLossError
from raymq.kernels.columns import decode_columns
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_clients import StorageClients
from raymq.scan.queue_bounds import bounds_of
from raymq.scan.range_reader import RangeReader
from raymq.scan.ranges import OffsetRange

BATCH_BYTES: Final = 4 * 1024 * 1024
"""The bytes of records in one Arrow batch, which bounds the memory of a worker and of its executor."""

logger = logging.getLogger(__name__)


def open_range(
    routes: RouteSource, storages: StorageClients, queue_range: OffsetRange, *, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """The messages of one range, in order, with the columns of `raymq.kernels.columns.SCHEMA` and copied bodies.

    DataLossError when some of them are gone; without `fail_on_data_loss` the rest of the range is read instead.
    """
    position = queue_range.start_offset
    while position < queue_range.end_offset:
        try:
            records = RangeReader(routes, storages).read(queue_range.queue, position, queue_range.end_offset)
            for buffer, starts in records:
                for some in _slices(starts):
                    batch = decode_columns(buffer, some, broker_name=queue_range.broker_name, body_type="binary")
                    position = batch.column("queue_offset")[-1].as_py() + 1
                    yield batch
            return
        except DataLossError as error:
            kept = bounds_of(routes, storages, queue_range.queue).min_offset
            if fail_on_data_loss or kept <= position:
                raise
            logger.warning("%s: offsets %d to %d are gone: %s", queue_range.queue, position, kept - 1, error)
            position = kept


def _slices(starts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Neighbouring records, BATCH_BYTES at a time but one at least; a chunk may be a whole file, and Spark copies."""
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + BATCH_BYTES)))
        yield starts[first:last]
        first = last
