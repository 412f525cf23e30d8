"""The append path: from batches to bytes in the files, everything that happens under the append lock.

Nothing is written before every batch of the call is known to be good, new or a repeat, and to have room on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.delay import is_waiting_topic
from raymq.errors import MessageIllegalError, StoreNotWritableError
from raymq.log_reader import LogReader
from raymq.message import SendStatus
from raymq.record import EncodedBatch, decode_host, dispatch_view, stamp, validate_batch
from raymq.record_layout import BLANK_LENGTH, SYS_FLAG_STORE_HOST_IPV6
from raymq.record_move import stamp_one
from raymq.store_api import AppendResult
from storage.commit_log import CommitLog, Place
from storage.consume_queue import ConsumeQueue
from storage.dedup import DedupTable
from storage.deliveries import Deliveries, Delivery, Source, waiting_codes
from storage.put_check import RECORD_OVERHEAD_MAX_BYTES, refuse_batch
from storage.queue_table import QueueTable
from storage.visibility import Visibility

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
        deliveries: Deliveries,
        visibility: Visibility,
        reader: LogReader,
        *,
        max_message_size_bytes: int,
        delay_levels_ms: tuple[int, ...],
        store_host: bytes,
        clock_ms: Callable[[], int],
        last_store_timestamp_ms: int,
        last_record_offset: int,
    ) -> None:
        self._log, self._queues, self._dedup = commit_log, queues, dedup
        self._deliveries, self._delay_levels_ms = deliveries, delay_levels_ms
        self._visibility, self._reader = visibility, reader
        self._max_message_size_bytes = max_message_size_bytes
        room = commit_log.file_size - BLANK_LENGTH
        self._record_max_bytes = min(max_message_size_bytes + RECORD_OVERHEAD_MAX_BYTES, room)
        self.store_host = store_host
        self._clock_ms = clock_ms
        self.last_store_timestamp_ms = self._earliest_ms = last_store_timestamp_ms
        self.last_record_offset = last_record_offset
        self.messages_appended = self.duplicates_dropped = 0

    def check(self, batch: EncodedBatch) -> NDArray[np.uint8]:
        """Raise MessageIllegalError unless `batch` can be stored; returns its records in memory of their own."""
        facts = validate_batch(batch)
        if not 0 <= batch.queue_id <= QUEUE_ID_MAX:
            raise MessageIllegalError(f"queue id {batch.queue_id} is negative")
        refused = refuse_batch(
            facts,
            max_message_size_bytes=self._max_message_size_bytes,
            record_max_bytes=self._record_max_bytes,
        )
        if refused is not None:
            raise refused.error
        if bool(facts.sys_flags & SYS_FLAG_STORE_HOST_IPV6) != (len(self.store_host) > 8):
            raise MessageIllegalError(
                f"the records have room for another kind of store host than this store's {decode_host(self.store_host)}"
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
        self._reserve([(job.queue, len(job.sizes)) for job in jobs], places)
        self.look_at_the_clock()
        self.last_store_timestamp_ms = self._earliest_ms
        return [self._write(job, where) for job, where in zip(jobs, places, strict=True)]

    def deliver(self, source: Source, deliveries: Sequence[Delivery]) -> None:
        """Store messages that waited in `source`, in this order, whatever queues they are for. Nothing is flushed.

        MessageIllegalError and StoreNotWritableError are raised before anything is written. OSError: the disk failed in
        the middle.
        """
        for item in deliveries:
            if not 0 <= item.queue_id <= QUEUE_ID_MAX:
                raise MessageIllegalError(f"queue id {item.queue_id} is negative")
        queues = [self._queues.get_or_create(item.topic, item.queue_id) for item in deliveries]
        [places] = self._log.place([np.array([len(item.record) for item in deliveries], np.int32)])
        self._reserve([(queue, 1) for queue in queues], [places])
        self.look_at_the_clock()
        self.last_store_timestamp_ms = self._earliest_ms
        for place in places:
            part = slice(place.first, place.last)
            self._write_deliveries(deliveries[part], queues[part], place.physical_offset)
            self._deliveries.advance(source, deliveries[part][-1].epoch, deliveries[part][-1].queue_offset + 1)

    def _write_deliveries(
        self, deliveries: Sequence[Delivery], queues: Sequence[ConsumeQueue], physical_offset: int
    ) -> None:
        store_ms = self.last_store_timestamp_ms
        units: dict[ConsumeQueue, list[tuple[int, int, int]]] = {}
        position = physical_offset
        for item, queue in zip(deliveries, queues, strict=True):
            rows = units.setdefault(queue, [])
            stamp_one(item.record, queue.next_offset + len(rows), position, store_ms, self.store_host)
            code = item.tags_code
            if is_waiting_topic(item.topic):
                waits_in = (item.topic, item.queue_id)
                [code] = waiting_codes(waits_in, np.array([code], np.int64), store_ms, self._delay_levels_ms).tolist()
            rows.append((position, len(item.record), code))
            position += len(item.record)
        data = np.frombuffer(b"".join([item.record for item in deliveries]), np.uint8)
        self._log.write(physical_offset, data, store_ms)
        self.last_record_offset = self._log.end_offset - len(deliveries[-1].record)
        for queue, rows in units.items():
            columns = np.array(rows, np.int64)
            queue.append_scattered(columns[:, 0], columns[:, 1].astype(np.int32), columns[:, 2])
            self._visibility.add(self._log.end_offset, queue, queue.next_offset)
        self.messages_appended += len(deliveries)

    def look_at_the_clock(self) -> int:
        """The time now. Nothing is stored with an earlier one from here on."""
        now_ms = self._clock_ms()
        self._earliest_ms = max(self._earliest_ms, now_ms)
        return now_ms

    def _refuse_repeats_within(self, batches: Sequence[EncodedBatch]) -> None:
        if len(batches) > 1:
            keys = [(b.producer.producer_id, b.topic, b.queue_id) for b in batches if b.producer is not None]
            if len(set(keys)) < len(keys):
                raise MessageIllegalError("one append holds two batches of the same producer for the same queue")

    def _stored_prefix(self, batch: EncodedBatch) -> list[int]:
        if batch.producer is None:
            return []
        return self._dedup.stored_prefix(batch.producer, batch.topic, batch.queue_id, len(batch))

    def _reserve(self, counts: Sequence[tuple[ConsumeQueue, int]], places: list[list[Place]]) -> None:
        """Make every file that so many messages need, or raise StoreNotWritableError and leave all as it was."""
        needed: dict[ConsumeQueue, int] = {}
        for queue, count in counts:
            needed[queue] = needed.get(queue, 0) + count
        written = [place for batch_places in places for place in batch_places]
        try:
            if written:
                self._log.reserve(written[-1].physical_offset)
            for queue, count in needed.items():
                queue.reserve(count)
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
        codes = batch.tag_codes
        if is_waiting_topic(batch.topic):
            waits_in = (batch.topic, batch.queue_id)
            codes = waiting_codes(waits_in, codes, self.last_store_timestamp_ms, self._delay_levels_ms)
        for place in places:
            first, last = place.first + skipped, place.last + skipped
            records = job.records[starts[first] : ends[last - 1]]
            stamp(
                records,
                batch.sizes[first:last],
                first_queue_offset=queue.next_offset,
                first_physical_offset=place.physical_offset,
                store_timestamp_ms=self.last_store_timestamp_ms,
                store_host=self.store_host,
            )
            self._log.write(place.physical_offset, records, self.last_store_timestamp_ms)
            self.last_record_offset = self._log.end_offset - int(batch.sizes[last - 1])
            queue.append(place.physical_offset, batch.sizes[first:last], codes[first:last])
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
