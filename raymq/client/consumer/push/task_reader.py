"""TaskReader decodes the messages of a task: in place from the store's mapped files, or from the bytes in the task.

Messages that refer to a mapped file keep the file mapped, so they stay readable after the file is deleted.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import numpy as np

from raymq.common.errors import DataLossError
from raymq.common.message import MessageQueue
from raymq.common.protocol.consume_result import LogPlaces, ShippedTask, StoreLog
from raymq.records.format.compression import admit_bodies_of
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.messages import find_unreadable, read_messages
from raymq.records.logfiles.log_reader import LogReader

STORES_MAX: Final = 64
"""Maximum number of stores whose readers are kept open; a node has few stores."""

logger = logging.getLogger(__name__)


class TaskReader:
    """Decodes the messages of consume tasks, which a Pull actor sends to a listener. Used by one thread only."""

    def __init__(self) -> None:
        self._readers: dict[StoreLog, LogReader] = {}

    def messages(self, task: ShippedTask) -> tuple[list[Any], bool] | None:
        """Return the messages of a task, with an error in place of each damaged message, and True if any message is
        damaged. Returns None if the mapped files do not show the records; the Pull actor can then send their bytes from
        its own mapped files."""
        admit_bodies_of(task.body_max_bytes)
        if task.log is None:
            return _decode(_located(task), task.queue)
        messages: list[Any] = []
        damaged = False
        try:
            for places in task.places:
                some, some_damaged = _decode(self._find(task.log, places), task.queue)
                messages = messages + some if messages else some
                damaged |= some_damaged
        except (DataLossError, OSError) as error:
            logger.info("cannot read a task of queue %s from the store's files: %s", task.queue, error)
            return None
        return messages, damaged

    def _find(self, log: StoreLog, places: LogPlaces) -> LocatedRecords:
        """Return the records at the positions `places` of a store's log. Raises DataLossError or OSError if the log's
        files lack one of these records."""
        positions, sizes = np.frombuffer(places.positions, np.int64), np.frombuffer(places.sizes, np.int64)
        # use -1 for each queue offset if the queue offsets are unknown
        offsets = np.frombuffer(places.offsets, np.int64) if places.offsets else np.full(len(positions), -1)
        found = self._reader(log).records_at(positions, sizes, offsets)
        if len(found.starts) < len(positions):
            raise DataLossError(f"the log at {log.root} lacks records after physical offset {positions[0]}")
        return found

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


def _located(task: ShippedTask) -> LocatedRecords:
    """Return the records of a consume task that contains its records' bytes (the records are not in mapped log
    files)."""
    if not task.sizes:
        return LocatedRecords.read(task.records)
    sizes = np.frombuffer(task.sizes, np.int64)
    return LocatedRecords(task.records, np.cumsum(sizes) - sizes, sizes, np.frombuffer(task.offsets, np.int64))


def _decode(records: LocatedRecords, queue: MessageQueue) -> tuple[list[Any], bool]:
    """Decode records to messages, with the error in place of each message that cannot be read. Also returns True if any
    message cannot be read."""
    places = RecordPlaces.of(queue, records)
    messages: list[Any] = read_messages(records.data, records.starts, broker_name=queue.broker_name, places=places)
    errors = find_unreadable(messages)
    for index, error in errors.items():
        messages[index] = error
    return messages, bool(errors)
