"""The append path: from batches to bytes in the files, everything that happens under the append lock.

Nothing is written before every batch of the call is known to be good, new or a repeat, and to have room on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.errors import MessageIllegalError, StoreNotWritableError
from raymq.log_reader import LogReader
from raymq.message import SendStatus
from raymq.record import EncodedBatch, dispatch_view, stamp, validate_batch
from raymq.store_api import AppendResult
from storage.commit_log import CommitLog, Place
from storage.consume_queue import ConsumeQueue
from storage.dedup import DedupTable
from storage.queue_table import QueueTable
from storage.visibility import Visibility

RECORD_OVERHEAD_MAX_BYTES: Final = 64 * 1024
QUEUE_ID_MAX: Final = 2**31 - 1


@dataclass(slots=True)
class _Job:
    """One batch on its way. `stored` are the queue offsets of the messages that an earlier send stored already."""

    batch: EncodedBatch
    records: NDArray[np.uint8]
    queue: ConsumeQueue
    stored: list[int]

    @property
    def sizes(self) -> NDArray[np.int32]:
        return self.batch.sizes[len(self.stored) :]


class Appender:
    """Writes batches to the log and the queues. `append` is called under the append lock, `check` outside.

    `messages_appended` and `duplicates_dropped` count since the store was opened. `last_record_offset` is where the
    newest record starts, -1 in an empty log.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        queues: QueueTable,
        dedup: DedupTable,
        visibility: Visibility,
        reader: LogReader,
        *,
        max_message_size_bytes: int,
        store_host: bytes,
        clock_ms: Callable[[], int],
        last_store_timestamp_ms: int,
        last_record_offset: int,
    ) -> None:
        self._log, self._queues, self._dedup = commit_log, queues, dedup
        self._visibility, self._reader = visibility, reader
        self._record_max_bytes = min(max_message_size_bytes + RECORD_OVERHEAD_MAX_BYTES, commit_log.file_size - 8)
        self._store_host = store_host
        self._clock_ms = clock_ms
        self.last_store_timestamp_ms = last_store_timestamp_ms
        self.last_record_offset = last_record_offset
        self.messages_appended = self.duplicates_dropped = 0

    def check(self, batch: EncodedBatch) -> NDArray[np.uint8]:
        """Raise MessageIllegalError unless `batch` can be stored; returns its records in memory of their own."""
        validate_batch(batch)
        if not 0 <= batch.queue_id <= QUEUE_ID_MAX:
            raise MessageIllegalError(f"queue id {batch.queue_id} is negative")
        longest = int(batch.sizes.max())
        if longest > self._record_max_bytes:
            raise MessageIllegalError(
                f"a record of {longest} bytes exceeds this store's limit of {self._record_max_bytes}"
            )
        return np.frombuffer(bytearray(batch.records), np.uint8)

    def append(self, batches: Sequence[EncodedBatch], records: Sequence[NDArray[np.uint8]]) -> list[AppendResult]:
        """Store `batches`, whose checked copies are `records`. The results say SEND_OK; nothing is flushed.

        MessageIllegalError, ClientStateError (see `DedupTable`), and StoreNotWritableError for a disk without room are
        raised before anything is written. OSError: the disk failed in the middle.
        """
        self._refuse_repeats_within(batches)
        stored = [self._stored_prefix(batch) for batch in batches]
        jobs = [
            _Job(batch, data, self._queues.get_or_create(batch.topic, batch.queue_id), prefix)
            for batch, data, prefix in zip(batches, records, stored, strict=True)
        ]
        places = self._log.place([job.sizes for job in jobs])
        self._reserve(jobs, places)
        self.last_store_timestamp_ms = max(self.last_store_timestamp_ms, self._clock_ms())
        return [self._write(job, where) for job, where in zip(jobs, places, strict=True)]

    def _refuse_repeats_within(self, batches: Sequence[EncodedBatch]) -> None:
        if len(batches) > 1:
            keys = [(b.producer.producer_id, b.topic, b.queue_id) for b in batches if b.producer is not None]
            if len(set(keys)) < len(keys):
                raise MessageIllegalError("one append holds two batches of the same producer for the same queue")

    def _stored_prefix(self, batch: EncodedBatch) -> list[int]:
        if batch.producer is None:
            return []
        return self._dedup.stored_prefix(batch.producer, batch.topic, batch.queue_id, len(batch))

    def _reserve(self, jobs: list[_Job], places: list[list[Place]]) -> None:
        """Make every file that the jobs need, or raise StoreNotWritableError and leave log and queues as they were."""
        needed: dict[int, int] = {}
        for job in jobs:
            needed[id(job.queue)] = needed.get(id(job.queue), 0) + len(job.sizes)
        written = [place for batch_places in places for place in batch_places]
        try:
            if written:
                self._log.reserve(written[-1].physical_offset)
            for job in jobs:
                job.queue.reserve(needed[id(job.queue)])
        except OSError as error:
            raise StoreNotWritableError(
                f"no room for another file in {self._log.directory.parent}: {error}; nothing was stored, "
                "make room and send again"
            ) from error

    def _write(self, job: _Job, places: list[Place]) -> AppendResult:
        if not places:
            return self._repeat(job)
        batch, queue, skipped = job.batch, job.queue, len(job.stored)
        ends = np.cumsum(batch.sizes, dtype=np.int64)
        starts = ends - batch.sizes
        first_queue_offset = queue.next_offset
        for place in places:
            first, last = place.first + skipped, place.last + skipped
            records = job.records[starts[first] : ends[last - 1]]
            stamp(
                records,
                batch.sizes[first:last],
                first_queue_offset=queue.next_offset,
                first_physical_offset=place.physical_offset,
                store_timestamp_ms=self.last_store_timestamp_ms,
                store_host=self._store_host,
            )
            self._log.write(place.physical_offset, records, self.last_store_timestamp_ms)
            self.last_record_offset = self._log.end_offset - int(batch.sizes[last - 1])
            queue.append(place.physical_offset, batch.sizes[first:last], batch.tag_codes[first:last])
        self._visibility.add(self._log.end_offset, queue, queue.next_offset)
        if batch.producer is not None:
            rest = replace(batch.producer, first_sequence=batch.producer.first_sequence + skipped)
            self._dedup.record(rest, batch.topic, batch.queue_id, len(job.sizes), first_queue_offset)
        self.messages_appended += len(job.sizes)
        if not skipped and len(places) == 1:
            physical_offset = places[0].physical_offset
            return AppendResult(SendStatus.SEND_OK, first_queue_offset, physical_offset, self.last_store_timestamp_ms)
        self.duplicates_dropped += skipped
        return self._result(job, [*job.stored, *range(first_queue_offset, queue.next_offset)], duplicate=False)

    def _repeat(self, job: _Job) -> AppendResult:
        self.duplicates_dropped += len(job.stored)
        return self._result(job, job.stored, duplicate=True)

    def _result(self, job: _Job, queue_offsets: list[int], *, duplicate: bool) -> AppendResult:
        """The result for messages that do not lie back to back, or were written by an earlier call."""
        pieces = [units for offset in queue_offsets if len(units := job.queue.units(offset, 1))]
        physical_offsets = [int(units[0]["physical_offset"]) for units in pieces]
        if len(physical_offsets) < len(queue_offsets):
            # Stored, and deleted since by age: there is nothing left to look up.
            return AppendResult(SendStatus.SEND_OK, queue_offsets[0], -1, self.last_store_timestamp_ms, duplicate)
        first_record = self._reader.views(pieces[0])[0]
        back_to_back = np.array_equal(np.diff(physical_offsets), job.batch.sizes[:-1])
        in_sequence = queue_offsets == list(range(queue_offsets[0], queue_offsets[0] + len(queue_offsets)))
        return AppendResult(
            SendStatus.SEND_OK,
            queue_offsets[0],
            physical_offsets[0],
            dispatch_view(first_record).store_timestamp_ms,
            duplicate,
            None if back_to_back else tuple(physical_offsets),
            None if in_sequence else tuple(queue_offsets),
        )
