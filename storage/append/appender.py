"""The append path: from batches to bytes in the files, everything that happens under the append lock.

Nothing is written before every batch of the call is known to be good, new or a repeat, and to have room on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from raymq.delay import is_waiting_topic
from raymq.errors import MessageIllegalError, StoreNotWritableError, SystemBusyError
from raymq.message import SendStatus
from raymq.protocol.store import AppendResult
from raymq.record.check import validate_batch
from raymq.record.dispatch import dispatch_view
from raymq.record.encode import EncodedBatch
from raymq.record.layout import BLANK_LENGTH, SYS_FLAG_STORE_HOST_IPV6, decode_host, record_ends
from raymq.record.stamp import is_sealed, stamp_many, stamp_one
from storage.append.checked_batch import CheckedBatch
from storage.append.multi_append import MultiAppend, starts_of
from storage.append.put_check import RECORD_OVERHEAD_MAX_BYTES, PutMessageStatus, refusal, refuse_batch
from storage.dispatch.delivery_progress import Delivery, Source, waiting_codes
from storage.log.append_plan import AppendSpan
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.recovery.recovery import Recovered

QUEUE_ID_MAX: Final = 2**31 - 1


def _dispatched(multi: MultiAppend, checked: CheckedBatch) -> CheckedBatch:
    """The batch with the offsets of its messages in other queues."""
    sent = replace(checked.batch, records=checked.records)
    batch = multi.dispatch(sent)
    if batch is sent:
        return checked
    return CheckedBatch(batch, memoryview(batch.records), record_ends(batch.sizes))


def _dispatched_delivery(multi: MultiAppend, item: Delivery) -> Delivery:
    columns = np.array([len(item.record)], np.int32), np.array([item.tags_code], np.int64)
    sent = EncodedBatch(item.topic, item.queue_id, item.record, *columns, None, ())
    batch = multi.dispatch(sent, must=False)
    return item if batch is sent else replace(item, record=bytearray(batch.records))


class Appender:
    """Writes batches to the log and the queues. `append` is called under the append lock, `check` outside.

    `messages_appended` and `duplicates_dropped` count since the store was opened. `last_record_offset` is where the
    newest record starts, -1 in an empty log.
    """

    def __init__(
        self, parts: StoreParts, recovered: Recovered, *, store_host: bytes, clock_ms: Callable[[], int]
    ) -> None:
        settings = parts.settings
        self._root = settings.store_path_root_dir
        self._log, self._queues, self._dedup = parts.log, parts.queues, parts.dedup
        self._deliveries, self._delay_levels_ms = parts.deliveries, settings.delay_levels_ms
        self._visibility, self._reader = parts.visibility, parts.reader
        self._max_message_size_bytes = settings.max_message_size_bytes
        room = parts.log.file_size - BLANK_LENGTH
        self._record_max_bytes = min(settings.max_message_size_bytes + RECORD_OVERHEAD_MAX_BYTES, room)
        self._append_max_bytes = settings.max_append_bytes
        self._fast_fail = settings.fast_fail_if_no_buffer_in_store_pool
        self.store_host = store_host
        self._clock_ms = clock_ms
        self.last_store_timestamp_ms = self._earliest_ms = recovered.last_store_timestamp_ms
        self.last_record_offset = recovered.last_record_offset
        self.messages_appended = self.duplicates_dropped = 0
        self._multi_append = None
        if MultiAppend.is_enabled(settings):
            self._multi_append = partial(MultiAppend, settings, parts.queues, self._record_max_bytes)

    def check(self, batches: Sequence[EncodedBatch]) -> list[CheckedBatch]:
        """Raise MessageIllegalError unless all `batches` can be stored by one append. Their records are not copied:
        they must not change until that append has returned."""
        if len(batches) > 1 or (batches and len(batches[0]) > 1):
            total = sum([len(batch.records) for batch in batches])
            if total > self._append_max_bytes:
                raise MessageIllegalError(
                    f"one append of {total} bytes exceeds max_append_bytes, which is {self._append_max_bytes}; "
                    "send the messages in several"
                )
        return [self._check(batch) for batch in batches]

    def _check(self, batch: EncodedBatch) -> CheckedBatch:
        if not 0 <= batch.queue_id <= QUEUE_ID_MAX:
            raise MessageIllegalError(f"queue id {batch.queue_id} is negative")
        ends = record_ends(batch.sizes)
        facts = validate_batch(batch, ends)
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
        return CheckedBatch(batch, memoryview(batch.records), ends)

    def append(self, batches: Sequence[CheckedBatch]) -> list[AppendResult]:
        """Store `batches`. The results say SEND_OK; nothing is flushed.

        MessageIllegalError, ClientStateError (see `DedupTable`), StoreNotWritableError for a disk without room, and
        SystemBusyError for a pool without a buffer are raised before anything is written. OSError: the disk failed in
        the middle.
        """
        self._refuse_repeats_within(batches)
        stored = [self._stored_prefix(checked.batch) for checked in batches]
        rests = [checked.without(len(prefix)) for checked, prefix in zip(batches, stored, strict=True)]
        multi = None if self._multi_append is None else self._multi_append()
        if multi is not None:
            rests = [_dispatched(multi, rest) for rest in rests]
        queues = [self._queues.get_or_create(rest.batch.topic, rest.batch.queue_id) for rest in rests]
        places = self._log.plan_append([rest.ends for rest in rests])
        if self._fast_fail:
            self._require_buffer(sum([len(rest.records) for rest in rests]))
        counts = [(queue, len(rest.ends)) for queue, rest in zip(queues, rests, strict=True)]
        self._reserve(counts if multi is None else counts + multi.counts(), places)
        self.look_at_the_clock()
        self.last_store_timestamp_ms = self._earliest_ms
        results = [
            self._write(rest, queue, where)
            if len(where) == 1 and not prefix and rest.batch.records is checked.batch.records
            else self._write_rest(checked.batch, rest, queue, where, prefix)
            for checked, rest, queue, where, prefix in zip(batches, rests, queues, places, stored, strict=True)
        ]
        if multi is not None:
            self._show(multi.write(places))
        return results

    def deliver(self, source: Source, deliveries: Sequence[Delivery]) -> None:
        """Store messages that waited in `source`, in this order, whatever queues they are for. Nothing is flushed.

        MessageIllegalError, StoreNotWritableError and SystemBusyError are raised before anything is written. OSError:
        the disk failed in the middle.
        """
        for item in deliveries:
            if not 0 <= item.queue_id <= QUEUE_ID_MAX:
                raise MessageIllegalError(f"queue id {item.queue_id} is negative")
        multi = None if self._multi_append is None else self._multi_append()
        if multi is not None:
            deliveries = [_dispatched_delivery(multi, item) for item in deliveries]
        queues = [self._queues.get_or_create(item.topic, item.queue_id) for item in deliveries]
        ends = np.cumsum([len(item.record) for item in deliveries])
        [places] = self._log.plan_append([ends])
        if self._fast_fail:
            self._require_buffer(int(ends[-1]))
        counts = [(queue, 1) for queue in queues]
        self._reserve(counts if multi is None else counts + multi.counts(), [places])
        self.look_at_the_clock()
        self.last_store_timestamp_ms = self._earliest_ms
        for place in places:
            part = slice(place.first, place.last)
            self._write_deliveries(deliveries[part], queues[part], place.physical_offset)
            self._deliveries.advance(source, deliveries[part][-1].epoch, deliveries[part][-1].queue_offset + 1)
        if multi is not None:
            starts = starts_of(places, np.diff(ends, prepend=0))
            self._show(multi.write([[AppendSpan(0, 1, start)] for start in starts.tolist()]))

    def _show(self, queues: Sequence[ConsumeQueue]) -> None:
        """Show the ends of these queues when all that is written now is shown."""
        for queue in queues:
            self._visibility.add(self._log.end_offset, queue, queue.next_offset)

    def _write_deliveries(
        self, deliveries: Sequence[Delivery], queues: Sequence[ConsumeQueue], physical_offset: int
    ) -> None:
        store_ms = self.last_store_timestamp_ms
        units: dict[ConsumeQueue, list[tuple[int, int, int]]] = {}
        position = physical_offset
        for item, queue in zip(deliveries, queues, strict=True):
            rows = units.setdefault(queue, [])
            stamp_one(queue.next_offset + len(rows), position, store_ms, self.store_host, item.record)
            code = item.tags_code
            if is_waiting_topic(item.topic):
                waits_in = (item.topic, item.queue_id)
                [code] = waiting_codes(waits_in, np.array([code], np.int64), store_ms, self._delay_levels_ms).tolist()
            rows.append((position, len(item.record), code))
            position += len(item.record)
        data = memoryview(b"".join([item.record for item in deliveries]))
        self._log.write(physical_offset, data, store_ms)
        self.last_record_offset = self._log.end_offset - len(deliveries[-1].record)
        for queue, rows in units.items():
            columns = np.array(rows, np.int64)
            queue.append_scattered(columns[:, 0], columns[:, 1].astype(np.int32), columns[:, 2])
        self._show(list(units))
        self.messages_appended += len(deliveries)

    def commit(self) -> None:
        """Have all records that were appended in the files, to be read. OSError: the disk failed."""
        self._log.commit()

    def look_at_the_clock(self) -> int:
        """The time now. Nothing is stored with an earlier one from here on."""
        now_ms = self._clock_ms()
        self._earliest_ms = max(self._earliest_ms, now_ms)
        return now_ms

    def appended_elsewhere(self, last_record_offset: int, store_timestamp_ms: int) -> None:
        """Records of another replica were appended, up to one at `last_record_offset`; none has a later store time.
        What is stored here from now on is not earlier."""
        self._earliest_ms = max(self._earliest_ms, store_timestamp_ms)
        self.last_store_timestamp_ms = max(self.last_store_timestamp_ms, store_timestamp_ms)
        self.last_record_offset = last_record_offset

    def _refuse_repeats_within(self, batches: Sequence[CheckedBatch]) -> None:
        if len(batches) > 1:
            keys = [
                (batch.producer.producer_id, batch.topic, batch.queue_id)
                for batch in (checked.batch for checked in batches)
                if batch.producer is not None
            ]
            if len(set(keys)) < len(keys):
                raise MessageIllegalError("one append holds two batches of the same producer for the same queue")

    def _stored_prefix(self, batch: EncodedBatch) -> list[int]:
        if batch.producer is None:
            return []
        return self._dedup.stored_prefix(batch.producer, batch.topic, batch.queue_id, len(batch))

    def _require_buffer(self, size: int) -> None:
        """Raise SystemBusyError if so many bytes, unless there are none, would have to wait for a buffer."""
        if size and not self._log.has_buffer_for(size):
            raise refusal(
                PutMessageStatus.CREATE_MAPPED_FILE_FAILED,
                "every buffer of the transient store pool holds what the disk has not taken yet; nothing was stored, "
                "send again later",
                SystemBusyError,
            ).error

    def _reserve(self, counts: Sequence[tuple[ConsumeQueue, int]], places: list[list[AppendSpan]]) -> None:
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
                f"no room for another file in {self._root}: {error}; nothing was stored, make room and send again"
            ) from error

    def _write(self, checked: CheckedBatch, queue: ConsumeQueue, places: Sequence[AppendSpan]) -> AppendResult:
        """Write a batch to its places; the result is right if there is one place."""
        batch, first_queue_offset = checked.batch, queue.next_offset
        for place in places:
            self._write_part(checked.part(place.first, place.last), queue, place.physical_offset)
        self._visibility.add(self._log.end_offset, queue, queue.next_offset)
        if batch.producer is not None:
            self._dedup.record(batch.producer, batch.topic, batch.queue_id, len(batch), first_queue_offset)
        self.messages_appended += len(batch)
        return AppendResult(
            SendStatus.SEND_OK, first_queue_offset, places[0].physical_offset, self.last_store_timestamp_ms
        )

    def _write_part(self, checked: CheckedBatch, queue: ConsumeQueue, physical_offset: int) -> None:
        batch, records, store_ms = checked.batch, checked.records, self.last_store_timestamp_ms
        values = (queue.next_offset, physical_offset, store_ms, self.store_host)
        stamp = partial(stamp_one, *values) if len(batch) == 1 else partial(stamp_many, checked.ends, *values)
        self._log.write(physical_offset, records, store_ms, stamp, whole=is_sealed(records))
        self.last_record_offset = self._log.end_offset - int(batch.sizes[-1])
        codes = batch.tag_codes
        if is_waiting_topic(batch.topic):
            codes = waiting_codes((batch.topic, batch.queue_id), codes, store_ms, self._delay_levels_ms)
        queue.append(physical_offset, batch.sizes, codes, checked.ends)

    def _write_rest(
        self,
        batch: EncodedBatch,
        rest: CheckedBatch,
        queue: ConsumeQueue,
        places: Sequence[AppendSpan],
        stored: Sequence[int],
    ) -> AppendResult:
        """Write what is left of a batch of which `stored` are the queue offsets that an earlier send got."""
        self.duplicates_dropped += len(stored)
        if not places:
            return self._result(batch, queue, stored, duplicate=True)
        first = self._write(rest, queue, places).queue_offset
        return self._result(batch, queue, [*stored, *range(first, queue.next_offset)], duplicate=False)

    def _result(
        self, batch: EncodedBatch, queue: ConsumeQueue, queue_offsets: Sequence[int], *, duplicate: bool
    ) -> AppendResult:
        """The result for messages that do not lie back to back, or were written by an earlier call."""
        pieces = [units for offset in queue_offsets if len(units := queue.units(offset, 1))]
        physical_offsets = [int(units[0]["physical_offset"]) for units in pieces]
        if len(physical_offsets) < len(queue_offsets):
            # Stored, and deleted since by age: there is nothing left to look up.
            return AppendResult(SendStatus.SEND_OK, queue_offsets[0], -1, self.last_store_timestamp_ms, duplicate)
        self.commit()
        first_record = self._reader.views(pieces[0])[0]
        back_to_back = np.array_equal(np.diff(physical_offsets), batch.sizes[:-1])
        in_sequence = [*queue_offsets] == [*range(queue_offsets[0], queue_offsets[0] + len(queue_offsets))]
        return AppendResult(
            SendStatus.SEND_OK,
            queue_offsets[0],
            physical_offsets[0],
            dispatch_view(first_record).store_timestamp_ms,
            duplicate,
            None if back_to_back else tuple(physical_offsets),
            None if in_sequence else tuple(queue_offsets),
        )
