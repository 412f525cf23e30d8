"""The progress of delivery in each delay queue (raymq.common.delay), in memory and on disk. Also the due times that the
delay queues' entries (units) contain as tag codes.

On disk
    config/delayOffset.json     {"offsetTable": {"3": 17}}      level 3 is delivered up to offset 17 of its queue
    config/timerOffset.json     {"offsetTable": {"5": [1700000000000, 17, 12]}}
                                timer queue 5 is delivered up to the unit with this time and offset 17 - 1, in the
                                order of (time, offset); no unit before offset 12 waits any more

The files may be older than the log. A record that the scheduler delivered has delivery data in its producer properties.
The producer is the queue in which the message waited, and the sequence is the message's offset in that queue. The epoch
(from a timer queue) is the time in the message's queue entry. Each queue is delivered in the order of (epoch,
sequence), and the log keeps that order. So the last delivered record in the log proves that everything before it is
delivered too, even if the files are older. The files are written only after the deliveries that they count are on disk,
and before the checkpoint moves past these deliveries. Hence each message is delivered once.

A failover can cut deliveries off the log of a replica whose files already count them. A replica that trusted these
files would never deliver the messages. So a replicated store also has a third file.

    config/confirmedDeliveries.json     {"end": 900, "confirmed": 700, "offsetTable": {"rmq_sys_timer/5": [17…, 3, 2]}}
                                        the first two files count the deliveries before physical offset 900, and this
                                        table those before offset 700. All replicas in sync have the log before 700

If the log ends before `end` when the store is opened, the progress is derived again, from this table and the log after
`confirmed` (storage.recovery.delivery_rewind).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.delay import (
    TIMER_RECALL_QUEUE,
    TIMER_ROLL_MS,
    TIMER_ROLL_QUEUE,
    TIMER_TOPIC,
    is_waiting_topic,
    level_delay_ms,
)
from raymq.common.errors import StoreCorruptError
from raymq.common.names import SCHEDULE_TOPIC
from storage.files.config_files import ConfigFiles, parse_fastjson
from storage.queue.consume_queue import ConsumeQueue

DELAY_OFFSETS: Final = "delayOffset.json"
TIMER_OFFSETS: Final = "timerOffset.json"
CONFIRMED_DELIVERIES: Final = "confirmedDeliveries.json"
DELIVERY_FILES: Final = (CONFIRMED_DELIVERIES, DELAY_OFFSETS, TIMER_OFFSETS)

Source = tuple[str, int]
"""The topic and queue id of a delay queue."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A due message, to be stored in its destination queue."""

    # The topic and queue id of the message's destination queue.
    topic: str
    queue_id: int
    # The record for the destination queue. Its offsets and store time are not set yet. Its producer property names the
    # delay queue in which the message waited.
    record: bytearray
    # The code in the message's queue unit in the destination queue: a tag code, or the delivery time of a message that
    # is delayed again.
    tags_code: int
    # The message's epoch and offset in its delay queue, the queue in which it waited for delivery (`SourceProgress`).
    epoch: int
    queue_offset: int


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """The progress of the delivery from one delay queue. Units (consume-queue entries) are delivered in the order of
    (time, offset). All units up to and including the unit with time `epoch` and offset `next_offset` - 1 are delivered.
    """

    # Delivery time in ms of the last delivered message, as in the message's queue entry (unit). It is 0 in a delay
    # queue whose messages are delivered in the order of their offsets.
    epoch: int = 0
    next_offset: int = 0
    # The queue offset before which no entry (unit) of the queue waits for delivery.
    low: int = 0


@dataclass(frozen=True, slots=True)
class ProgressAt:
    """The delivery progress of all delay queues, from the deliveries before a physical offset of the log."""

    physical_offset: int
    table: dict[Source, SourceProgress]


class DeliveryProgress:
    """The delivery progress of all delay queues. Callers hold the store's append lock to change or read it."""

    def __init__(self) -> None:
        # `_table`: the current delivery progress of each delay queue. `_saved`: the delivery progress that the store's
        # files contain.
        self._table: dict[Source, SourceProgress] = {}
        self._saved: dict[Source, SourceProgress] = {}
        self.saved_end = 0
        """Physical offset of the log before which the deliveries lie that the files count; 0 if it is unknown."""
        self.confirmed: ProgressAt | None = None
        """The progress at a confirmed offset of the log, after which the other replicas' logs may differ. None in a
        store without other replicas."""
        # The progress at the time of an earlier flush, which may not be confirmed yet.
        self._unconfirmed: ProgressAt | None = None

    def get(self, source: Source) -> SourceProgress:
        """Return the delivery progress of a delay queue. If no progress is recorded, return the progress of a new
        queue."""
        return self._table.get(source, SourceProgress())

    def advance(self, source: Source, epoch: int, next_offset: int) -> None:
        """Record that the scheduler delivered or gave up the message before `next_offset` of a delay queue. `epoch`:
        the time in the message's queue entry (unit). The progress never moves backwards."""
        now = self.get(source)
        if (epoch, next_offset) > (now.epoch, now.next_offset):
            low = now.low if epoch else next_offset
            self._table[source] = SourceProgress(epoch, next_offset, low)

    def raise_low(self, source: Source, low: int) -> None:
        """Record that no unit before offset `low` of a timer queue waits for delivery."""
        now = self.get(source)
        if low > now.low:
            self._table[source] = replace(now, low=low)

    def load(self, config: ConfigFiles) -> None:
        """Read the delivery progress from the files. Raises StoreCorruptError if a file is damaged."""
        for level, offset in _offset_table(config, DELAY_OFFSETS).items():
            self._table[SCHEDULE_TOPIC, level - 1] = SourceProgress(0, *_numbers(DELAY_OFFSETS, [offset, offset], 2))
        for queue_id, values in _offset_table(config, TIMER_OFFSETS).items():
            self._table[TIMER_TOPIC, queue_id] = SourceProgress(*_numbers(TIMER_OFFSETS, values, 3))
        text = config.read(CONFIRMED_DELIVERIES)
        if text is not None:
            self.saved_end, self.confirmed = _parse_confirmed(json.loads(text))
        self._saved = dict(self._table)

    def begin_confirmed(self) -> None:
        """Record that nothing is delivered yet in an empty log."""
        self.confirmed = ProgressAt(0, {})

    def note_end(self, end_offset: int, confirmed_offset: int) -> None:
        """Record that the progress counts the deliveries before the log's end `end_offset`. All replicas in sync have
        the log before `confirmed_offset`."""
        earlier = self._unconfirmed
        if earlier is not None and earlier.physical_offset > confirmed_offset:
            return
        self.confirmed = earlier or self.confirmed
        self._unconfirmed = ProgressAt(end_offset, dict(self._table))

    def start_from(self, known: ProgressAt) -> None:
        """Begin with the progress `known`, in an object without any progress."""
        self._table = dict(known.table)

    def table(self) -> dict[Source, SourceProgress]:
        """Return a copy of the progress of all delay queues."""
        return dict(self._table)

    def rewind(self, table: dict[Source, SourceProgress], config: ConfigFiles, end_offset: int) -> None:
        """Replace the progress, in memory and in the files, by an earlier one: the log now ends at `end_offset`, before
        some of the deliveries that the files count."""
        self._table = table
        # If the process dies after this write, the file of the confirmed progress still has the old end of the log. So
        # the next start of the store repeats the change.
        self._write_tables(dict(table), config)
        self.save(dict(table), config, end_offset)

    def clamp_to_queues(self, queues: Iterable[ConsumeQueue]) -> None:
        """After recovery, correct the delivery progress of the delay queues. An offset beyond the end of its delay
        queue becomes that end (spec §12: out of range → min or max)."""
        ends = {(queue.topic, queue.queue_id): queue.next_offset for queue in queues}
        for source, known in list(self._table.items()):
            end = ends.get(source, 0)
            self._table[source] = SourceProgress(known.epoch, min(known.next_offset, end), min(known.low, end))

    def unsaved(self) -> dict[Source, SourceProgress] | None:
        """Return a copy of the progress table for `save`. Call `save` only after the log, up to its present end, is on
        disk. Returns None if nothing changed since the last save."""
        return dict(self._table) if self._table != self._saved else None

    def save(self, table: dict[Source, SourceProgress], config: ConfigFiles, end_offset: int) -> None:
        """Write the delivery progress, which counts the deliveries before the log's end `end_offset`, to the files. The
        progress is on disk on return."""
        if self.confirmed is not None:
            # Write this file first: the other files must never count a delivery at or after its `end`.
            content = {
                "end": end_offset,
                "confirmed": self.confirmed.physical_offset,
                "offsetTable": {
                    f"{topic}/{queue_id}": [value.epoch, value.next_offset, value.low]
                    for (topic, queue_id), value in sorted(self.confirmed.table.items())
                },
            }
            config.write(CONFIRMED_DELIVERIES, json.dumps(content, indent=1))
            self.saved_end = end_offset
        self._write_tables(table, config)

    def _write_tables(self, table: dict[Source, SourceProgress], config: ConfigFiles) -> None:
        for name, topic in ((DELAY_OFFSETS, SCHEDULE_TOPIC), (TIMER_OFFSETS, TIMER_TOPIC)):
            rows = {queue_id: value for (row_topic, queue_id), value in sorted(table.items()) if row_topic == topic}
            if rows == {queue_id: value for (row_topic, queue_id), value in self._saved.items() if row_topic == topic}:
                continue
            offsets = (
                {str(queue_id + 1): value.next_offset for queue_id, value in rows.items()}
                if topic == SCHEDULE_TOPIC
                else {str(queue_id): [value.epoch, value.next_offset, value.low] for queue_id, value in rows.items()}
            )
            config.write(name, json.dumps({"offsetTable": offsets}, indent=1))
        self._saved = table

    def pinned_physical_offset(self, queues: Iterable[ConsumeQueue]) -> int | None:
        """Return the physical offset of the first record that waits for delivery, according to the progress on disk and
        to the confirmed progress. Return None if no record waits.

        A cut of the log may return the progress to the confirmed one. So retention must keep these records, too.
        """
        first = None
        for queue in queues:
            if is_waiting_topic(queue.topic):
                source = queue.topic, queue.queue_id
                low = self._saved.get(source, SourceProgress()).low
                if self.confirmed is not None:
                    low = min(low, self.confirmed.table.get(source, SourceProgress()).low)
                units = queue.next_unit(max(low, queue.min_offset), queue.next_offset)
                if len(units):
                    physical_offset = int(units[0]["physical_offset"])
                    first = physical_offset if first is None else min(first, physical_offset)
        return first


def _offset_table(config: ConfigFiles, name: str) -> dict[int, Any]:
    content = parse_fastjson(config.read(name) or "{}")
    table = content.get("offsetTable") if isinstance(content, dict) else content
    if not isinstance(table, dict | None) or not all(key.isdecimal() for key in table or ()):
        raise _damaged(name)
    return {int(key): value for key, value in (table or {}).items()}


def _parse_confirmed(content: object) -> tuple[int, ProgressAt]:
    rows = content.get("offsetTable") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(rows, dict):
        raise _damaged(CONFIRMED_DELIVERIES)
    end, confirmed = _numbers(CONFIRMED_DELIVERIES, [content.get("end"), content.get("confirmed")], 2)
    table = {}
    for name, values in rows.items():
        topic, _, queue_id = name.rpartition("/")
        if not is_waiting_topic(topic) or not queue_id.isdecimal():
            raise _damaged(CONFIRMED_DELIVERIES)
        table[topic, int(queue_id)] = SourceProgress(*_numbers(CONFIRMED_DELIVERIES, values, 3))
    return end, ProgressAt(confirmed, table)


def _numbers(name: str, values: object, count: int) -> list[int]:
    if not isinstance(values, list) or len(values) != count or not all(type(v) is int and v >= 0 for v in values):
        raise _damaged(name)
    return values


def _damaged(name: str) -> StoreCorruptError:
    return StoreCorruptError(
        f"file config/{name} is not a table of offsets; restore or delete the file. After a deletion the log "
        "shows recent deliveries, but messages that were delivered long ago may be delivered again"
    )


def waiting_codes(
    source: Source, deliver_at_ms: NDArray[np.int64], store_timestamp_ms: int, levels_ms: tuple[int, ...]
) -> NDArray[np.int64]:
    """Return the delivery times in ms that the consume-queue entries (units) of delayed records store in place of tags
    codes. The records are being appended to the delay queue `source`.

    `deliver_at_ms` is used only for timer queues. raymq.common.delay.waiting_code computes the value for a single
    record.
    """
    topic, queue_id = source
    if topic == TIMER_TOPIC and queue_id not in (TIMER_ROLL_QUEUE, TIMER_RECALL_QUEUE):
        return np.maximum(deliver_at_ms, store_timestamp_ms + 1)
    delay_ms = TIMER_ROLL_MS if topic == TIMER_TOPIC else level_delay_ms(queue_id + 1, levels_ms)
    return np.full(len(deliver_at_ms), store_timestamp_ms + delay_ms, np.int64)
