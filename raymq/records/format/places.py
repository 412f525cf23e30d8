"""The expected places of records, according to their consume queue: queue offset, position in the log, and size.

A reader compares each record with its place. So an error can name a damaged record ("offset 7 of orders@broker-a:0"),
and the reader detects a queue unit (entry) that points to another record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import BodyUnreadableError
from raymq.common.java_text import decode_utf8
from raymq.common.message import MessageExt, MessageQueue
from raymq.records.format.layout import Buffer, HeaderFields, RecordError
from raymq.records.format.memory_records import LocatedRecords


class RecordPlace(NamedTuple):
    """The expected place of one record: its queue, its offsets and its size in bytes. Unknown numbers are -1."""

    queue: MessageQueue
    queue_offset: int = -1
    physical_offset: int = -1
    size: int = -1

    def check(self, header: HeaderFields, topic: Buffer) -> None:
        """Raise RecordError unless the record's header and topic agree with the expected place (queue, offsets and
        size). `topic`: the topic's bytes in the record."""
        for known, found, what in (
            (self.size, header[0], "size"),
            (self.queue.queue_id, header[3], "queue id"),
            (self.queue_offset, header[5], "queue offset"),
            (self.physical_offset, header[6], "physical offset"),
        ):
            if known >= 0 and known != found:
                reason = f"the record's header has {what} {found}, and the queue has {known}"
                raise RecordError(reason)
        if self.queue.topic and not is_topic(topic, self.queue.topic):
            reason = (
                f"the record's topic is {decode_utf8(bytes(topic))!r}, and the queue's topic is {self.queue.topic!r}"
            )
            raise RecordError(reason)

    def error(self, reason: str, *, record_damaged: bool = True) -> BodyUnreadableError:
        """Return the error that is raised when the body of the message at this place (queue and queue offset) is read.
        `reason`: why the body is unreadable. `record_damaged`: True if the whole record is damaged."""
        return BodyUnreadableError(str(self.queue), self.queue_offset, self.physical_offset, reason, record_damaged)

    def damaged(self, reason: str) -> MessageExt:
        """Return the message that represents a damaged record. The message has the queue and offsets of the record's
        expected place. `reason`: the damage."""
        return MessageExt.damaged(self.error(reason), self.queue)


class RecordPlaces(NamedTuple):
    """The expected places of n records of one queue. Each array has one number per record, shape (n,); None if the
    numbers are unknown."""

    queue: MessageQueue
    offsets: NDArray[np.int64] | None = None
    physical_offsets: NDArray[np.int64] | None = None
    sizes: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, queue: MessageQueue, records: LocatedRecords) -> RecordPlaces:
        """Return the places that the given records of `queue` should have: their queue, offsets and sizes."""
        return cls(queue, records.offsets, records.physical_offsets, records.sizes)

    @classmethod
    def unknown(cls, broker_name: str) -> RecordPlaces:
        """Return the RecordPlaces of records whose queue is unknown. It contains only the name of the broker
        group."""
        return cls(MessageQueue("", broker_name, -1))

    def place(self, row: int) -> RecordPlace:
        """Return the expected place (queue, offsets and size) of the record at index `row`."""
        return RecordPlace(
            self.queue,
            -1 if self.offsets is None else int(self.offsets[row]),
            -1 if self.physical_offsets is None else int(self.physical_offsets[row]),
            -1 if self.sizes is None else int(self.sizes[row]),
        )

    def pick(self, rows: NDArray[np.int64] | slice) -> RecordPlaces:
        """Return a copy that has the expected places (queue offsets, physical offsets and sizes) only of the records at
        the indices `rows`."""
        return RecordPlaces(
            self.queue,
            None if self.offsets is None else self.offsets[rows],
            None if self.physical_offsets is None else self.physical_offsets[rows],
            None if self.sizes is None else self.sizes[rows],
        )


def is_topic(data: Buffer, topic: str) -> bool:
    """True if `data`, a topic's bytes in a record, decode to `topic`."""
    return data == topic.encode(errors="surrogatepass") or decode_utf8(bytes(data)) == topic
