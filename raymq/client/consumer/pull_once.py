"""Reads once from one queue, for `Broker.pull` and `Admin`: a fetch, decoded and filtered by tag text.

A damaged record becomes a damaged message (`raymq.records.format.decode`); all other records are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError, InvalidArgumentError, OffsetOutOfRangeError
from raymq.common.message import MessageExt, MessageQueue, PullResult, PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.check import find_starts
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.messages import read_messages
from raymq.remoting.storage_client import StorageClient

PULL_MAX_BYTES: Final = 4 * 1024 * 1024
PULL_MAX_MESSAGES: Final = 1024
PULL_MAX_WAIT_S: Final = 15.0
PULL_CALL_TIMEOUT_S: Final = 10.0


def pull_messages(
    storage: StorageClient,
    queue: MessageQueue,
    read_queue_nums: int,
    subscription: Subscription,
    offset: int,
    max_messages: int,
    wait_s: float,
) -> PullResult:
    """Up to `max_messages` messages of `queue` from `offset`; waits up to `wait_s` for the first.

    InvalidArgumentError for a queue the topic does not have, a negative offset or numbers out of bounds;
    OffsetOutOfRangeError for an offset the queue does not hold.
    """
    if not 0 <= queue.queue_id < read_queue_nums:
        raise InvalidArgumentError(
            f"topic {queue.topic!r} has queues 0 to {read_queue_nums - 1} in {queue.broker_name}, not {queue.queue_id}"
        )
    if not 1 <= max_messages <= PULL_MAX_MESSAGES:
        raise InvalidArgumentError(f"max_messages must be 1 to {PULL_MAX_MESSAGES}, not {max_messages}")
    if not 0 <= wait_s <= PULL_MAX_WAIT_S:
        raise InvalidArgumentError(f"wait_s must be 0 to {PULL_MAX_WAIT_S:g}, not {wait_s}")
    request = FetchRequest(queue.topic, queue.queue_id, offset, max_messages, subscription.tag_codes, subscription.sql)
    [result] = storage.fetch([request], PULL_MAX_BYTES, wait_s, PULL_CALL_TIMEOUT_S)
    if result.status is PullStatus.OFFSET_ILLEGAL:
        raise OffsetOutOfRangeError(str(queue), offset, result.min_offset, result.max_offset)
    messages = [one.message for one in read_fetched(result.records, queue, offset, result.next_offset)]
    wanted = tuple(message for message in messages if is_wanted(message, subscription))
    return PullResult(result.status, wanted, result.next_offset, result.min_offset, result.max_offset)


class FetchedRecord(NamedTuple):
    """A message of a fetch, and the bytes of its record."""

    message: MessageExt
    record: memoryview

    def alone(self) -> MessageExt:
        """The message, without the rest of the fetch in memory, nor its body decompressed."""
        return self.message if self.message.record_damaged else read_alone(bytes(self.record), self.message.queue)


_FIRST: Final = np.zeros(1, np.int64)


def read_alone(record: bytes, queue: MessageQueue) -> MessageExt:
    """The message of one record of `queue`, damaged or not. Its body is decompressed each time it is read. A queue id
    of -1 stands for several queues."""
    [message] = read_messages(
        record, _FIRST, broker_name=queue.broker_name, places=RecordPlaces(queue), keeps_bodies=False
    )
    return message


def read_fetched(
    records: bytes, queue: MessageQueue, first_offset: int = -1, next_offset: int = -1
) -> list[FetchedRecord]:
    """Decode the messages of `records`, which were fetched from `queue` from offset `first_offset` on, in order.

    A damaged record becomes a damaged message; adjacent damaged records may become one. The offset of a damaged message
    follows from its neighbours, or from the offsets of the fetch if each offset has a record; `next_offset` is the
    offset after the last record. A queue id of -1 stands for several queues. Bodies are decompressed each time they are
    read.
    """
    if not records:
        return []
    starts, places = find_starts(records), RecordPlaces(queue)
    if len(starts) == next_offset - first_offset:
        places = places._replace(offsets=np.arange(first_offset, next_offset))
    messages = read_messages(records, starts, broker_name=queue.broker_name, places=places, keeps_bodies=False)
    view, ends = memoryview(records), [*starts.tolist()[1:], len(records)]
    following, found = max(first_offset, -1), []
    for row, message in enumerate(messages):
        shown = message
        if message.record_damaged:
            shown = _placed(message, queue, _offset_of(messages, row, following))
            following += following >= 0
        else:
            following = message.queue_offset + 1
        found.append(FetchedRecord(shown, view[starts[row] : ends[row]]))
    return found


def _offset_of(messages: Sequence[MessageExt], row: int, following: int) -> int:
    """The queue offset of a damaged record; `following`: the first that it may have, -1 if that is unknown."""
    if following >= 0:
        return following
    behind = next((at for at in range(row + 1, len(messages)) if not messages[at].record_damaged), None)
    return -1 if behind is None else max(messages[behind].queue_offset - (behind - row), -1)


def _placed(message: MessageExt, queue: MessageQueue, queue_offset: int) -> MessageExt:
    """A damaged message with this offset, unless it has one."""
    error = message.body_error
    assert error is not None
    if message.queue_offset >= 0:
        return message
    return MessageExt.damaged(BodyUnreadableError(str(queue), queue_offset, -1, error.reason, True), queue)


def is_wanted(message: MessageExt, subscription: Subscription) -> bool:
    """True if a subscription wants the message. The tags of a damaged one are unknown: it counts as wanted."""
    return subscription.matches(message.tags) or message.record_damaged


def has_text(message: MessageExt, text: bytes) -> bool:
    """True if the text is in the message's body, and for a body that cannot be read: who asks is to see it."""
    if not text:
        return True
    try:
        return text in message.body
    except BodyUnreadableError:
        return True


def stored_times(messages: Sequence[MessageExt]) -> list[int]:
    """Return the times at which messages of one store were stored, in ms since 1970, in order. A damaged message has
    the time of the message before it, or else of the first intact message after it."""
    last = next((message.store_timestamp_ms for message in messages if not message.record_damaged), 0)
    times = []
    for message in messages:
        if not message.record_damaged:
            last = message.store_timestamp_ms
        times.append(last)
    return times
