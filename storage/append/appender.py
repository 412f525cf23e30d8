"""The append path of a store: writes batches to the log, and queue units to the consume queues, under the append lock.

Before anything is written, every batch of the call has passed its checks. The append then knows which messages are new,
and that the disk has space. Steps that only some settings need are objects, which the store chooses when it opens
(`space_checks`, MultiDispatchAppender, FittedWrite). So an append does not test the settings. An inner batch is one
record of many messages. It has its own queues and its own write path: inner_batches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from raymq.common.delay import TIMER_RECALL_QUEUE, TIMER_TOPIC, is_waiting_topic
from raymq.common.errors import DataLossError, MessageIllegalError, StoreNotWritableError, SystemBusyError
from raymq.common.message import SendStatus
from raymq.common.names import DLQ_PREFIX, HALF_TOPIC, STATE_TOPIC, TRANSACTION_TOPICS
from raymq.common.protocol.store import AppendResult
from raymq.records.format.crc import PROPERTY_CRC_LENGTH, PROPERTY_CRC_PREFIX, is_sealed
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.layout import (
    BLANK_LENGTH,
    IPV6_HOST_BYTES,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_STORE_HOST_IPV6,
    Buffer,
    RecordError,
    decode_host,
    record_ends,
    store_timestamp_at,
)
from raymq.records.kernels.check import BatchFacts, split_record, validate_batch
from raymq.records.kernels.fields import Ints
from raymq.records.kernels.stamp import begins_of, stamp_alike, stamp_many, stamp_mixed, stamp_one
from storage.append.checked_batch import CheckedBatch
from storage.append.inner_batches import InnerBatchWriter, count_inner
from storage.append.put_check import (
    RECORD_OVERHEAD_MAX_BYTES,
    HalfFacts,
    Refusal,
    may_be_special,
    refuse_batch,
    refuse_bodies,
    refuse_transactional,
    space_checks,
)
from storage.dispatch.delivery_progress import Delivery, Source, waiting_codes
from storage.files.disk_usage import is_want_of_space, no_space_text
from storage.log.append_plan import AppendSpan
from storage.parts import StoreParts
from storage.queue.batch_consume_queue import BatchConsumeQueue
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import AnyQueue
from storage.recovery.recovery import Recovered

RECALLS_MAX: Final = 1_000_000
"""Maximum number of recalls (cancellations of delayed messages) in force at one time: about as many as one day produces
(storage.schedule.recalls). Limits the scheduler's memory."""
QUEUE_ID_MAX: Final = 2**31 - 1


Q = TypeVar("Q", ConsumeQueue, AnyQueue)


class AppendPlan(NamedTuple, Generic[Q]):
    """The queues and the log ranges (spans) that one append will write to. Every file that the append needs exists
    already."""

    # The destination queue of each batch, or of each due delayed message (delivery).
    queues: list[Q]
    # The log ranges (spans) of each batch; empty for a batch without new messages. An append of due delayed messages
    # (deliveries) has one list of spans for all of them.
    spans: list[list[AppendSpan]]
    # Pairs of a consume queue and the number of entries (units) that the append adds to the queue. The same queue may
    # occur in several pairs.
    units: list[tuple[Q, int]]
    # The physical offset at which the last record of the append will end.
    log_end: int


class Delivered(NamedTuple):
    """The queue offset and physical offset of a record that `Appender.deliver` stored."""

    queue_offset: int
    physical_offset: int


class Appender:
    """Writes batches and due delayed messages to the log and to the consume queues.

    Call `prepare` outside the append lock, and every other method under the lock. A store with multi-dispatch has a
    MultiDispatchAppender instead.
    """

    def __init__(
        self, parts: StoreParts, recovered: Recovered, *, store_host: bytes, clock_ms: Callable[[], int]
    ) -> None:
        """`store_host`: the store's address in the form of `encode_host`; it is written into each record. `clock_ms`:
        returns the wall clock in ms since 1970."""
        settings = parts.settings
        self._root = settings.store_path_root_dir
        self._log, self._queues, self._dedup = parts.log, parts.queues, parts.dedup
        self._deliveries, self._delay_levels_ms = parts.deliveries, settings.delay_levels_ms
        self._visibility, self._reader, self._appended = parts.visibility, parts.reader, parts.appended
        self._inner_batches = InnerBatchWriter(parts, store_host)
        self._halves, self._settings = parts.halves, settings
        # Reserved disk space. The store releases it if the disk is full and the broker must store its state.
        self._space = parts.space
        # Size limits in bytes of one body, of one record, and of one append of several messages.
        self._max_message_size_bytes = settings.max_message_size_bytes
        self.record_max_bytes = min(
            settings.max_message_size_bytes + RECORD_OVERHEAD_MAX_BYTES, parts.log.file_size - BLANK_LENGTH
        )
        self._append_max_bytes = settings.max_append_bytes
        # Error text of the last failed attempt to create a log or queue file on a full disk. Empty if the last attempt
        # succeeded.
        self.no_space = ""
        # The sys flag of records whose bodies the store decompresses and checks before it stores them. 0: the store
        # checks no body.
        self._checked_flag = SYS_FLAG_COMPRESSED if settings.check_compressed_body else 0
        # Maximum size, in bytes, of a record for the fast path. A record of this size is certainly within the limits
        # for whole records and for bodies.
        self._plain_max_bytes = min(self.record_max_bytes, self._max_message_size_bytes)
        # The checks of free disk space that the settings require. Before each append, each check is called with the
        # number of bytes to write. A check raises an error if the append must be refused.
        self._space_checks = space_checks(settings, parts.log)
        self.store_host = store_host
        # The store-host sys flag of records that this store accepts: the IPv6 bit if this store's host is IPv6, else 0.
        self._host_flag = SYS_FLAG_STORE_HOST_IPV6 if len(store_host) == IPV6_HOST_BYTES else 0
        self._clock_ms = clock_ms
        # `last_store_timestamp_ms`: the store time of the newest record. `_earliest_ms`: the earliest store time that
        # the next record may have. At first, both are the store time of the newest record that recovery has found.
        self.last_store_timestamp_ms = self._earliest_ms = recovered.last_store_timestamp_ms
        # The physical offset of the newest record; -1 in an empty log.
        self.last_record_offset = recovered.last_record_offset
        # Numbers of messages appended, and of duplicate messages dropped, since the store was opened.
        self.messages_appended = self.duplicates_dropped = 0

    def prepare(self, batches: Sequence[EncodedBatch]) -> Callable[[], list[AppendResult]]:
        """Check `batches` and return a function that appends them. Call that function under the append lock.

        Raises MessageIllegalError if a batch fails a check (`check`).
        """
        if len(batches) == 1 and self._is_plain(batches[0]):
            return partial(self._append_record, batches[0])
        return partial(self.append, self.check(batches))

    def _is_plain(self, batch: EncodedBatch) -> bool:
        """Return True if `batch` is one message that passes every check, needs no property CRC and is not delayed.

        The store only stamps this kind of message (writes the queue offset, physical offset, store time and store
        host). If the result is False, the batch may still pass all checks; the store then takes the slower path.
        """
        record, sizes, queue_id, topic = batch.records, batch.sizes, batch.queue_id, batch.topic
        size = len(record)
        if size > self._plain_max_bytes or len(sizes) != 1 or sizes.item() != size or len(batch.tag_codes) != 1:
            return False
        found = split_record(record, queue_id, topic)
        if found is None or queue_id < 0 or is_waiting_topic(topic) or topic in TRANSACTION_TOPICS:
            return False
        sys_flag, _, properties = found
        return (
            sys_flag & SYS_FLAG_STORE_HOST_IPV6 == self._host_flag
            and not may_be_special(sys_flag, properties)
            and not properties.startswith(PROPERTY_CRC_PREFIX, -PROPERTY_CRC_LENGTH)
            and not (sys_flag & self._checked_flag and self._refuse_bodies(record, [0], 0))
        )

    def check(self, batches: Sequence[EncodedBatch]) -> list[CheckedBatch]:
        """Check that one append can store all `batches`. Raises MessageIllegalError if a batch fails a check, or if the
        append exceeds max_append_bytes.

        The records are not copied: the caller must not change the records until that append has returned.
        """
        if len(batches) > 1 or (batches and len(batches[0]) > 1):
            total = sum([len(batch.records) for batch in batches])
            if total > self._append_max_bytes:
                raise MessageIllegalError(
                    f"one append of {total} bytes exceeds max_append_bytes ({self._append_max_bytes}); send the "
                    "messages in several batches"
                )
        return [self._check(batch) for batch in batches]

    def _check(self, batch: EncodedBatch) -> CheckedBatch:
        ends = record_ends(batch.sizes)
        facts = self._check_facts(batch, ends)
        inner = count_inner(facts)
        # Bodies of dead letters are not checked. The broker writes a dead letter as a copy of a message. The message
        # may have become a dead letter because its body is damaged.
        if facts.sys_flags & self._checked_flag and not batch.topic.startswith(DLQ_PREFIX):
            refused = self._refuse_bodies(batch.records, (ends - batch.sizes).tolist(), inner)
            if refused is not None:
                raise refused.error
        if batch.topic in TRANSACTION_TOPICS:
            halves = [HalfFacts(view.properties, batch.queue_id) for view, _ in _views(batch.records, ends)]
            waiting = len(self._halves.open)
            refuse_transactional(batch.topic, halves, waiting=waiting, settings=self._settings)
        return CheckedBatch(batch, memoryview(batch.records), ends, facts.stride, inner)

    def _refuse_bodies(self, records: Buffer, starts: Sequence[int], inner: int) -> Refusal | None:
        return refuse_bodies(records, starts, inner=inner, max_message_size_bytes=self._max_message_size_bytes)

    def _check_facts(self, batch: EncodedBatch, ends: Ints | None) -> BatchFacts:
        """Run the checks that a batch must pass before it is stored. Returns facts about the batch (BatchFacts). Raises
        MessageIllegalError if a check fails. `ends`: the end of each record, as `record_ends` computes it from the
        batch's sizes."""
        if not 0 <= batch.queue_id <= QUEUE_ID_MAX:
            raise _negative_queue_id(batch.queue_id)
        facts = validate_batch(batch, ends)
        refused = refuse_batch(
            facts,
            max_message_size_bytes=self._max_message_size_bytes,
            record_max_bytes=self.record_max_bytes,
        )
        if refused is not None:
            raise refused.error
        if facts.sys_flags & SYS_FLAG_STORE_HOST_IPV6 != self._host_flag:
            raise MessageIllegalError(
                "the records have a store host of another address family than this store, whose host is "
                f"{decode_host(self.store_host)}"
            )
        return facts

    def append(self, batches: Sequence[CheckedBatch]) -> list[AppendResult]:
        """Store `batches` without a flush. Each result has the status SEND_OK.

        Before anything is written, raises MessageIllegalError if a batch is refused, and ClientStateError if the
        producer's sequence is refused (see `DedupTable`). Raises StoreNotWritableError if the disk has no free space,
        and SystemBusyError if the pool has no free buffer. Raises OSError if the disk failed in the middle of the
        write.
        """
        stored = self._stored_before(batches)
        rests = [
            checked.without(len(prefix)) if prefix else checked for checked, prefix in zip(batches, stored, strict=True)
        ]
        plan = self._plan(rests)
        self._reserve(plan.units, plan.log_end)
        return self._write_batches(batches, rests, stored, plan)

    def _append_record(self, batch: EncodedBatch) -> list[AppendResult]:
        """Append one plain message (`_is_plain`) on a fast path; or call `append` if the fast path cannot be used.

        The fast path requires a message that is not stored already. The queue's current file and the log's mapped file
        must have room for it.
        """
        topic, queue_id, producer, record = batch.topic, batch.queue_id, batch.producer, batch.records
        is_repeat = producer is not None and self._dedup.stored_prefix(producer, topic, queue_id, 1)
        queue = self._queues.get_or_create(topic, queue_id)
        if not is_repeat and queue.has_room_for(1) and self._log.has_room_for(len(record)):
            self.read_clock()
            queue_offset, physical_offset, store_ms = queue.next_offset, self._log.end_offset, self._earliest_ms
            if self._log.write_record(record, queue_offset, store_ms, self.store_host):
                self.last_store_timestamp_ms, self.last_record_offset = store_ms, physical_offset
                queue.append_unit(physical_offset, len(record), batch.tag_codes.item())
                self._visibility.add(self._log.end_offset, queue, queue_offset + 1)
                if producer is not None:
                    self._dedup.record_messages(producer, topic, queue_id, 1, queue_offset)
                self.messages_appended += 1
                return [AppendResult(SendStatus.SEND_OK, queue_offset, physical_offset, store_ms)]
        return self.append([CheckedBatch(batch, memoryview(record), record_ends(batch.sizes))])

    def deliver(self, source: Source | None, deliveries: Sequence[Delivery]) -> list[Delivered]:
        """Store due messages in their destination queues, in the order of `deliveries`. `source`: the delay queue in
        which the messages waited; None if the messages are records of transactions. Nothing is flushed. Returns the
        offsets of the stored records.

        Raises MessageIllegalError, StoreNotWritableError or SystemBusyError before anything is written. Raises OSError
        if the disk failed in the middle of the write.
        """
        plan, _ = self._plan_deliveries(deliveries)
        self._reserve(plan.units, plan.log_end)
        return self._write_planned_deliveries(source, deliveries, plan)

    def _stored_before(self, batches: Sequence[CheckedBatch]) -> list[list[int]]:
        """For each batch, return the queue offsets of the messages at the batch's start that the store already has from
        an earlier send."""
        if len(batches) > 1:
            self._refuse_repeats_within(batches)
        return [self._stored_prefix(checked) for checked in batches]

    def _plan(self, rests: Sequence[CheckedBatch]) -> AppendPlan[AnyQueue]:
        """Plan the log ranges (spans) and the queues of new messages. Also check that the disk has space for the
        planned bytes. Raises SystemBusyError if the messages are recalls (cancellations of delayed messages) and
        RECALLS_MAX recalls are already in force."""
        queues = [self._queue_of(rest) for rest in rests]
        for queue in queues:
            if queue.topic == TIMER_TOPIC and queue.queue_id == TIMER_RECALL_QUEUE:
                self._refuse_too_many_recalls(queue.next_offset)
        spans, log_end = self._log.plan_append([rest.ends for rest in rests])
        for check in self._space_checks:
            check(sum([len(rest.records) for rest in rests]))
        units = [(queue, len(rest.ends)) for queue, rest in zip(queues, rests, strict=True)]
        return AppendPlan(queues, spans, units, log_end)

    def _refuse_too_many_recalls(self, next_offset: int) -> None:
        """Raise SystemBusyError if RECALLS_MAX recalls of delayed messages are in force. The scheduler keeps every
        recall in memory."""
        if next_offset - self._deliveries.get((TIMER_TOPIC, TIMER_RECALL_QUEUE)).next_offset >= RECALLS_MAX:
            raise SystemBusyError(
                f"the store already keeps {RECALLS_MAX} recalls of messages, the maximum; recall the message "
                "again later"
            )

    def _queue_of(self, checked: CheckedBatch) -> AnyQueue:
        """Return the queue to which a checked batch is appended. Raises MessageIllegalError if the batch and the queue
        have different types (single messages or inner batches)."""
        topic, queue_id = checked.batch.topic, checked.batch.queue_id
        if not checked.inner:
            return self._queues.get_or_create(topic, queue_id)
        return self._inner_batches.queue(topic, queue_id)

    def _write_batches(
        self,
        batches: Sequence[CheckedBatch],
        rests: Sequence[CheckedBatch],
        stored: Sequence[Sequence[int]],
        plan: AppendPlan[AnyQueue],
    ) -> list[AppendResult]:
        """Write `rests`, the messages of `batches` that are not stored yet, to the log files that `plan` has reserved.
        `stored`: for each batch, the queue offsets of its messages that an earlier send stored. Returns one result for
        each batch."""
        self.read_clock()
        self.last_store_timestamp_ms = self._earliest_ms
        return [
            self._write_batch(checked, rest, queue, spans, prefix)
            for checked, rest, queue, spans, prefix in zip(batches, rests, *plan[:2], stored, strict=True)
        ]

    def _write_batch(
        self,
        checked: CheckedBatch,
        rest: CheckedBatch,
        queue: AnyQueue,
        spans: Sequence[AppendSpan],
        stored: Sequence[int],
    ) -> AppendResult:
        """Write `rest`, the new messages of a batch. `stored`: the queue offsets of the batch's other messages, which
        an earlier send stored."""
        if isinstance(queue, BatchConsumeQueue):
            return self._write_inner(rest, queue, spans, stored)
        if len(spans) == 1 and not stored and rest.batch.records is checked.batch.records:
            return self._write(rest, queue, spans)
        return self._write_rest(checked.batch, rest, queue, spans, stored)

    def _write_inner(
        self, rest: CheckedBatch, queue: BatchConsumeQueue, spans: Sequence[AppendSpan], stored: Sequence[int]
    ) -> AppendResult:
        """Write an inner batch and return its result. If an earlier send stored the batch, return the earlier result.
        An earlier send stored either all messages of the batch or none."""
        if not spans:
            self.duplicates_dropped += len(stored)
            self.commit()
            return self._inner_batches.stored(queue, stored[0], self.last_store_timestamp_ms)
        [(_, _, physical_offset)] = spans
        result = self._inner_batches.write(rest, queue, physical_offset, self.last_store_timestamp_ms)
        self.last_record_offset = physical_offset
        self.messages_appended += rest.inner
        return result

    def _plan_deliveries(self, deliveries: Sequence[Delivery]) -> tuple[AppendPlan[ConsumeQueue], Ints]:
        """Plan the log ranges (spans) and the queues of due delayed messages. Also check that the disk has space for
        the planned bytes.

        Also returns the end of each record, counted from the start of the first record.
        """
        for item in deliveries:
            if not 0 <= item.queue_id <= QUEUE_ID_MAX:
                raise _negative_queue_id(item.queue_id)
        queues = [self._queues.get_or_create(item.topic, item.queue_id) for item in deliveries]
        ends = np.cumsum([len(item.record) for item in deliveries])
        spans, log_end = self._log.plan_append([ends])
        for check in self._space_checks:
            check(int(ends[-1]))
        return AppendPlan(queues, spans, [(queue, 1) for queue in queues], log_end), ends

    def _write_planned_deliveries(
        self, source: Source | None, deliveries: Sequence[Delivery], plan: AppendPlan[ConsumeQueue]
    ) -> list[Delivered]:
        """Write due delayed messages at the log and queue positions that `plan` has reserved. Advance the delivery
        progress of `source` to the last message."""
        self.read_clock()
        self.last_store_timestamp_ms = self._earliest_ms
        delivered: list[Delivered] = []
        for span in plan.spans[0]:
            part = slice(span.first, span.last)
            places = self._write_deliveries(deliveries[part], plan.queues[part], span.physical_offset)
            delivered += places
            if source is not None:
                self._deliveries.advance(source, deliveries[part][-1].epoch, deliveries[part][-1].queue_offset + 1)
                continue
            for item, (queue_offset, physical_offset) in zip(deliveries[part], places, strict=True):
                view = _stored(dispatch_view(item.record), queue_offset, physical_offset, self.last_store_timestamp_ms)
                self._halves.note(view, item.record)
        return delivered

    def _show_with_log(self, queues: Sequence[ConsumeQueue]) -> None:
        """Register the new end of each queue in `queues`, with the log's current end. Consumers see the new messages
        once the log is visible up to this log end."""
        for queue in queues:
            self._visibility.add(self._log.end_offset, queue, queue.next_offset)

    def _write_deliveries(
        self, deliveries: Sequence[Delivery], queues: Sequence[ConsumeQueue], physical_offset: int
    ) -> list[Delivered]:
        """Write due delayed messages back to back into one log file, from `physical_offset` on, and write their
        consume-queue entries (units). Before that, set the queue offset, physical offset and store time in each record.

        Returns the offsets of the written records.
        """
        store_ms = self.last_store_timestamp_ms
        sizes = np.array([len(item.record) for item in deliveries], np.int32)
        codes = np.array([item.tags_code for item in deliveries], np.int64)
        rows_of: dict[ConsumeQueue, list[int]] = {}
        for row, queue in enumerate(queues):
            rows_of.setdefault(queue, []).append(row)
        queue_offsets = np.empty(len(deliveries), np.int64)
        for queue, rows in rows_of.items():
            queue_offsets[rows] = np.arange(queue.next_offset, queue.next_offset + len(rows))
            if is_waiting_topic(queue.topic):
                codes[rows] = waiting_codes(queue.key, codes[rows], store_ms, self._delay_levels_ms)
        data, ends = bytearray().join([item.record for item in deliveries]), record_ends(sizes)
        stamp_mixed(ends, queue_offsets, physical_offset, store_ms, self.store_host, data)
        self._log.write(physical_offset, memoryview(data), store_ms)
        begins = begins_of(physical_offset, sizes, ends)
        self.last_record_offset = int(begins[-1])
        for queue, rows in rows_of.items():
            queue.append_scattered(begins[rows], sizes[rows], codes[rows])
        self._show_with_log(list(rows_of))
        self.messages_appended += len(deliveries)
        return list(map(Delivered, queue_offsets.tolist(), begins.tolist()))

    def commit(self) -> None:
        """Write all appended records from the write buffers to the files, so that they can be read. Raises OSError if
        the disk failed."""
        self._log.commit()

    def read_clock(self) -> int:
        """Return the current time in ms since 1970. No record written after this call gets an earlier store
        time."""
        now_ms = self._clock_ms()
        self._earliest_ms = max(self._earliest_ms, now_ms)
        return now_ms

    def appended_elsewhere(self, last_record_offset: int, store_timestamp_ms: int) -> None:
        """Update the appender's state after records of another replica were appended to this log.

        The last of these records is at `last_record_offset`, and none of their store times exceeds
        `store_timestamp_ms`. No later record of this store gets an earlier store time.
        """
        self._earliest_ms = max(self._earliest_ms, store_timestamp_ms)
        self.last_store_timestamp_ms = max(self.last_store_timestamp_ms, store_timestamp_ms)
        self.last_record_offset = last_record_offset

    def _refuse_repeats_within(self, batches: Sequence[CheckedBatch]) -> None:
        """Raise MessageIllegalError if two batches of one append have the same producer and the same queue.

        The dedup table records a batch only when the batch is written, so it could not detect repeats between two
        batches of one append.
        """
        keys = [
            (batch.producer.producer_id, batch.topic, batch.queue_id)
            for batch in (checked.batch for checked in batches)
            if batch.producer is not None
        ]
        if len(set(keys)) < len(keys):
            raise MessageIllegalError(
                "one append contains two batches of the same producer for the same queue; send them one after another"
            )

    def _stored_prefix(self, checked: CheckedBatch) -> list[int]:
        """Return the queue offsets of the first messages of a batch, if an earlier send has already stored these
        messages. The list is empty if no message is stored yet.

        Raises MessageIllegalError if an earlier send stored some messages of an inner batch, but not all.
        """
        batch = checked.batch
        if batch.producer is None:
            return []
        count = checked.inner or len(batch)
        stored = self._dedup.stored_prefix(batch.producer, batch.topic, batch.queue_id, count)
        if checked.inner and 0 < len(stored) < count:
            raise MessageIllegalError(
                f"{len(stored)} of the {count} messages of an inner batch are already stored: the producer has "
                "used their sequence numbers for other messages"
            )
        return stored

    def _reserve(self, units: Sequence[tuple[Q, int]], log_end: int) -> None:
        """Create every file that the append needs. `units`: the number of new entries (units) for each consume queue.
        `log_end`: the end of the log after the append.

        Raises StoreNotWritableError if the disk has no space, and OSError if the disk failed. After an error nothing
        has changed.
        """
        needed: dict[Q, int] = {}
        for queue, count in units:
            needed[queue] = needed.get(queue, 0) + count
        for_state = all(queue.topic == STATE_TOPIC for queue in needed)

        def make_files() -> None:
            if log_end > self._log.end_offset:
                self._log.reserve(log_end, for_state=for_state)
            for queue, count in needed.items():
                queue.reserve(count)

        try:
            if for_state:
                self._space.write(make_files)
            else:
                make_files()
        except OSError as error:
            if not is_want_of_space(error):
                raise
            self.no_space = no_space_text(self._root, self._log.file_size, error)
            raise StoreNotWritableError(self.no_space) from error
        self.no_space = ""

    def _write(self, checked: CheckedBatch, queue: ConsumeQueue, spans: Sequence[AppendSpan]) -> AppendResult:
        """Write a batch to its log ranges (spans), and return its append result. The result assumes one span: if there
        are more, the caller must replace the physical offsets of the messages in the other spans."""
        batch, first_queue_offset = checked.batch, queue.next_offset
        for span in spans:
            self._write_part(checked.part(span.first, span.last), queue, span.physical_offset)
        self._visibility.add(self._log.end_offset, queue, queue.next_offset)
        if batch.producer is not None:
            self._dedup.record_messages(batch.producer, batch.topic, batch.queue_id, len(batch), first_queue_offset)
        self.messages_appended += len(batch)
        return AppendResult(
            SendStatus.SEND_OK, first_queue_offset, spans[0].physical_offset, self.last_store_timestamp_ms
        )

    def _write_part(self, checked: CheckedBatch, queue: ConsumeQueue, physical_offset: int) -> None:
        """Write a batch's messages back to back into one log file from `physical_offset` on, and write their
        consume-queue entries (units). Sets the queue offset, physical offset and store time of each record before
        writing it."""
        batch, records, store_ms = checked.batch, checked.records, self.last_store_timestamp_ms
        values = (queue.next_offset, physical_offset, store_ms, self.store_host)
        sealed = is_sealed(records)
        if len(batch) == 1:
            stamp = partial(stamp_one, *values)
        elif checked.stride and not sealed:
            stamp = partial(stamp_alike, checked.stride, *values)
        else:
            stamp = partial(stamp_many, checked.ends, *values)
        self._log.write(physical_offset, records, store_ms, stamp, whole=sealed)
        self.last_record_offset = self._log.end_offset - int(batch.sizes[-1])
        codes = batch.tag_codes
        if is_waiting_topic(batch.topic):
            codes = waiting_codes((batch.topic, batch.queue_id), codes, store_ms, self._delay_levels_ms)
        queue.append_units(physical_offset, batch.sizes, codes, checked.ends)
        self._appended.add(physical_offset, checked.ends, batch, store_ms)
        if batch.topic == HALF_TOPIC:
            first = queue.next_offset - len(batch)
            for row, (view, record) in enumerate(_views(records, checked.ends)):
                place = physical_offset + int(checked.ends[row]) - view.size
                self._halves.note(_stored(view, first + row, place, store_ms), record)

    def _write_rest(
        self,
        batch: EncodedBatch,
        rest: CheckedBatch,
        queue: ConsumeQueue,
        spans: Sequence[AppendSpan],
        stored: Sequence[int],
    ) -> AppendResult:
        """Write `rest`, the new messages of `batch`. `stored`: the queue offsets of the batch's other messages, which
        an earlier send stored."""
        self.duplicates_dropped += len(stored)
        if not spans:
            return self._result(batch, queue, stored, duplicate=True)
        first = self._write(rest, queue, spans).queue_offset
        return self._result(batch, queue, [*stored, *range(first, queue.next_offset)], duplicate=False)

    def _result(
        self, batch: EncodedBatch, queue: ConsumeQueue, queue_offsets: Sequence[int], *, duplicate: bool
    ) -> AppendResult:
        """Build the result of appending a batch from the entries (units) that the messages have in `queue`. Needed if
        the batch's messages are not back to back in the log, or if an earlier send has already stored the batch
        (`duplicate`)."""
        pieces = [units for offset in queue_offsets if len(units := queue.units(offset, 1))]
        physical_offsets = [int(units[0]["physical_offset"]) for units in pieces]
        if len(physical_offsets) < len(queue_offsets):
            # Return -1 as the physical offset, because retention has deleted some of the messages that the earlier send
            # stored.
            return AppendResult(SendStatus.SEND_OK, queue_offsets[0], -1, self.last_store_timestamp_ms, duplicate)
        self.commit()
        back_to_back = np.array_equal(np.diff(physical_offsets), batch.sizes[:-1])
        in_sequence = [*queue_offsets] == [*range(queue_offsets[0], queue_offsets[0] + len(queue_offsets))]
        return AppendResult(
            SendStatus.SEND_OK,
            queue_offsets[0],
            physical_offsets[0],
            self._store_time_of(pieces[0]),
            duplicate,
            None if back_to_back else tuple(physical_offsets),
            None if in_sequence else tuple(queue_offsets),
        )

    def _store_time_of(self, units: NDArray[np.void]) -> int:
        """Return the store time of the record to which the first of these consume-queue entries (`units`) points. If
        this record is damaged, return the store time of the log's newest record."""
        try:
            return store_timestamp_at(self._reader.views(units)[0], 0)
        except (DataLossError, RecordError):
            return self.last_store_timestamp_ms


def _views(records: bytes | bytearray | memoryview, ends: Ints | None) -> Iterator[tuple[DispatchView, memoryview]]:
    """Yield each record of a batch as a DispatchView, together with the bytes of the record."""
    data, start = memoryview(records), 0
    for end in [len(data)] if ends is None else ends.tolist():
        yield dispatch_view(data[start:end]), data[start:end]
        start = end


def _stored(view: DispatchView, queue_offset: int, physical_offset: int, store_ms: int) -> DispatchView:
    """Return the view of a record with the offsets and the store time that the store assigned."""
    return view._replace(queue_offset=queue_offset, physical_offset=physical_offset, store_timestamp_ms=store_ms)


def _negative_queue_id(queue_id: int) -> MessageIllegalError:
    return MessageIllegalError(f"queue id {queue_id} is negative")
