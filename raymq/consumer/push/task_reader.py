"""TaskReader makes the messages of a task: from the store's mapped files in place, or from the bytes in the task.

Messages over a map keep it, so that they stay readable after the file is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raymq.errors import DataLossError
from raymq.kernels.messages import read_messages
from raymq.logfiles.log_reader import LogReader
from raymq.message import MessageExt
from raymq.protocol.listener_tasks import LogPlaces, ShippedTask, StoreLog
from raymq.record.check import record_starts
from raymq.record.decode import decode_record
from raymq.record.layout import Buffer, RecordError

STORES_MAX: Final = 64
"""Stores whose readers are kept; a node has few."""

logger = logging.getLogger(__name__)


class TaskReader:
    """Reads tasks. For one thread."""

    def __init__(self) -> None:
        self._readers: dict[StoreLog, LogReader] = {}

    def messages(self, task: ShippedTask) -> tuple[list[Any], bool] | None:
        """The messages of a task, with the error in place of each one that is damaged, and True if there is one. None
        if the files do not show the records (any more): the Pull actor, which holds their maps, has the bytes."""
        broker_name = task.queue.broker_name
        if task.log is None:
            return _decode(task.records, record_starts(task.records), broker_name)
        messages: list[Any] = []
        damaged = False
        try:
            for places in task.places:
                data, starts = self._find(task.log, places)
                some, some_damaged = _decode(data, starts, broker_name)
                messages = messages + some if messages else some
                damaged |= some_damaged
        except (DataLossError, OSError) as error:
            logger.info("a task of %s cannot be read in place: %s", task.queue, error)
            return None
        return messages, damaged

    def _find(self, log: StoreLog, places: LogPlaces) -> tuple[memoryview | bytes, NDArray[np.int64]]:
        """The part of a file that holds the records, and the position of each in it. DataLossError or OSError if the
        file does not hold them all."""
        positions, sizes = np.frombuffer(places.positions, np.int64), np.frombuffer(places.sizes, np.int64)
        found = self._reader(log).records_at(positions, sizes, positions)
        if len(found.starts) < len(positions):
            raise DataLossError(f"the log at {log.root} does not hold all records from {positions[0]} on")
        return found.data, found.starts

    def _reader(self, log: StoreLog) -> LogReader:
        reader = self._readers.get(log)
        if reader is None:
            if len(self._readers) >= STORES_MAX:
                self._readers.clear()
            reader = self._readers[log] = LogReader(
                log.root,
                commit_log_file_size=log.commit_log_file_size,
                consume_queue_file_size=log.consume_queue_file_size,
                commit_log_directories=log.commit_log_directories,
            )
        return reader


def _decode(data: Buffer, starts: NDArray[np.int64], broker_name: str) -> tuple[list[Any], bool]:
    """The messages whose records start at `starts` of `data`, with the error in place of each one that is damaged; and
    True if there is one."""
    try:
        return read_messages(data, starts, broker_name=broker_name), False
    except RecordError:
        logger.exception("a task has a damaged record")
    return _decode_singly(data, starts.tolist(), broker_name), True


def _decode_singly(data: Buffer, starts: Sequence[int], broker_name: str) -> list[MessageExt | RecordError]:
    messages: list[MessageExt | RecordError] = []
    for start in starts:
        try:
            messages.append(decode_record(data, start, broker_name=broker_name))
        except RecordError as error:
            messages.append(error)
    return messages
