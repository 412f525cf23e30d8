"""One-time reads from a queue, for `Broker.pull` and `Admin`. Each read makes one fetch, decodes its messages, and
selects messages by the text of their tags.

A damaged record becomes a damaged message (`raymq.records.format.decode`); all other records are decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from raymq.client.consumer.repair_wait import REPORT_TIMEOUT_S, is_damage
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError, InvalidArgumentError, OffsetOutOfRangeError, RaymqError
from raymq.common.message import MessageExt, MessageQueue, PullResult, PullStatus
from raymq.common.protocol.store import REPORT_MAX, FetchRequest, FetchResult, QueryResult, QueuePosition
from raymq.records.format.check import find_starts
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.messages import OnUnreadable, ignore, read_messages
from raymq.remoting.storage_client import StorageClient

PULL_MAX_BYTES: Final = 4 * 1024 * 1024
PULL_MAX_MESSAGES: Final = 1024
PULL_MAX_WAIT_S: Final = 15.0
PULL_CALL_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


def pull_messages(
    storage: StorageClient,
    queue: MessageQueue,
    read_queue_nums: int,
    subscription: Subscription,
    offset: int,
    max_messages: int,
    wait_s: float,
    on_damage: Callable[[list[int]], object] | None = None,
) -> PullResult:
    """Return up to `max_messages` messages of `queue` from `offset`. Waits up to `wait_s` for the first message.

    `on_damage` gets the offsets of damaged messages. By default they are reported to the store, and not waited for.

    Raises InvalidArgumentError if the topic does not have the queue, if `offset` is negative, or if a number is out of
    bounds. Raises OffsetOutOfRangeError if the queue does not hold `offset`.
    """
    if not 0 <= queue.queue_id < read_queue_nums:
        raise InvalidArgumentError(
            f"topic {queue.topic!r} has queues 0 to {read_queue_nums - 1} in broker group "
            f"{queue.broker_name!r}, not queue {queue.queue_id}"
        )
    if not 1 <= max_messages <= PULL_MAX_MESSAGES:
        raise InvalidArgumentError(f"max_messages must be 1 to {PULL_MAX_MESSAGES}, not {max_messages}")
    if not 0 <= wait_s <= PULL_MAX_WAIT_S:
        raise InvalidArgumentError(f"wait_s must be 0 to {PULL_MAX_WAIT_S:g}, not {wait_s}")
    request = FetchRequest(queue.topic, queue.queue_id, offset, max_messages, subscription.tag_codes, subscription.sql)
    [result] = storage.fetch([request], PULL_MAX_BYTES, wait_s, PULL_CALL_TIMEOUT_S)
    if result.status is PullStatus.OFFSET_ILLEGAL:
        raise OffsetOutOfRangeError(str(queue), offset, result.min_offset, result.max_offset)
    checked = read_checked(result, queue, offset)
    if checked.damaged and on_damage is not None:
        on_damage(checked.damaged)
    elif checked.damaged:
        _report(storage, queue, checked.damaged)
    messages = [one.message for one in checked.found]
    wanted = tuple(message for message in messages if is_wanted(message, subscription))
    return PullResult(result.status, wanted, result.next_offset, result.min_offset, result.max_offset)


def read_checked(result: FetchResult, queue: MessageQueue, offset: int) -> CheckedFetch:
    """Decode the messages of a fetch of `queue` from `offset`, and find the damaged ones."""
    errors: list[BodyUnreadableError] = []
    found = read_fetched(result.records, queue, offset, result.next_offset, on_unreadable=errors.append)
    damaged = {error.queue_offset for error in errors if is_damage(error)}
    damaged.update(one.message.queue_offset for one in found if one.message.record_damaged)
    return CheckedFetch(result, found, sorted(damaged - {-1}))


def read_query(result: QueryResult, queue: MessageQueue) -> CheckedQuery:
    """Decode the messages that a query has found, and find the damaged ones. `queue`: the topic and the broker group. A
    topic of "" means that the records may be of any topic."""
    errors: list[BodyUnreadableError] = []
    found = read_fetched(result.records, queue, on_unreadable=errors.append)
    damaged = [*result.damaged, *(error.physical_offset for error in errors if is_damage(error))]
    return CheckedQuery(result, found, damaged)


def _report(storage: StorageClient, queue: MessageQueue, offsets: Sequence[int]) -> None:
    """Report damaged messages to the storage actor, which checks and repairs them. Does not wait for the repair. A
    failure is only logged."""
    positions = [QueuePosition(queue.topic, queue.queue_id, at) for at in offsets[:REPORT_MAX]]
    try:
        storage.report_damage(positions, REPORT_TIMEOUT_S)
    except RaymqError as error:
        logger.info("cannot report damaged messages of queue %s now: %s", queue, error)


class FetchedRecord(NamedTuple):
    """One message of a fetch, with the bytes of its record."""

    message: MessageExt
    record: memoryview

    def alone(self) -> MessageExt:
        """Return the message decoded from a copy of its own record, so that it does not keep the whole fetch in memory.
        The body is not decompressed yet."""
        return self.message if self.message.record_damaged else read_alone(bytes(self.record), self.message.queue)


class CheckedFetch(NamedTuple):
    """The result of one fetch, its messages, and the queue offsets of the damaged ones."""

    result: FetchResult
    found: list[FetchedRecord]
    damaged: list[int]


class CheckedQuery(NamedTuple):
    """The result of one query, its messages, and the physical offsets of the damaged records. A record that the store
    could not parse has no message. An offset of -1 is unknown."""

    result: QueryResult
    found: list[FetchedRecord]
    damaged: list[int]


_FIRST: Final = np.zeros(1, np.int64)


def read_alone(
    record: bytes, queue: MessageQueue, queue_offset: int = -1, *, on_unreadable: OnUnreadable = ignore
) -> MessageExt:
    """Decode the message of one record of `queue`, damaged or not. The body is decompressed at each access. A queue id
    of -1 means that the record may be in any queue. A `queue_offset` of -1 is unknown. `on_unreadable` gets the error
    of a message that is found unreadable here."""
    [message] = read_messages(
        record,
        _FIRST,
        broker_name=queue.broker_name,
        places=RecordPlaces(queue, None if queue_offset < 0 else np.array([queue_offset])),
        on_unreadable=on_unreadable,
        keeps_bodies=False,
    )
    return message


def read_fetched(
    records: bytes,
    queue: MessageQueue,
    first_offset: int = -1,
    next_offset: int = -1,
    *,
    on_unreadable: OnUnreadable = ignore,
) -> list[FetchedRecord]:
    """Decode the messages of `records`, in order. The records were fetched from `queue` from offset `first_offset` on.

    A damaged record becomes a damaged message; adjacent damaged records may become one message. The offset of a damaged
    message is derived from its neighbours, or from the offsets of the fetch if each offset has a record. `next_offset`
    is the offset after the last record. A queue id of -1 means that the records are from several queues. Bodies are
    decompressed at each access. `on_unreadable` gets the error of each message that is found unreadable here.
    """
    if not records:
        return []
    starts, places = find_starts(records), RecordPlaces(queue)
    if len(starts) == next_offset - first_offset:
        places = places._replace(offsets=np.arange(first_offset, next_offset))
    messages = read_messages(
        records,
        starts,
        broker_name=queue.broker_name,
        places=places,
        on_unreadable=on_unreadable,
        keeps_bodies=False,
    )
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
    """Return the queue offset of the damaged message `messages[row]`. `following`: the lowest offset that the message
    can have; -1 if unknown."""
    if following >= 0:
        return following
    behind = next((at for at in range(row + 1, len(messages)) if not messages[at].record_damaged), None)
    return -1 if behind is None else max(messages[behind].queue_offset - (behind - row), -1)


def _placed(message: MessageExt, queue: MessageQueue, queue_offset: int) -> MessageExt:
    """Return a damaged message with `queue_offset` as its queue offset. A message whose queue offset is already known
    is returned unchanged."""
    error = message.body_error
    assert error is not None
    if message.queue_offset >= 0:
        return message
    return MessageExt.damaged(BodyUnreadableError(str(queue), queue_offset, -1, error.reason, True), queue)


def is_wanted(message: MessageExt, subscription: Subscription) -> bool:
    """True if a subscription wants the message. A damaged message is wanted, because its tags are unknown."""
    return subscription.matches(message.tags) or message.record_damaged


def has_text(message: MessageExt, text: bytes) -> bool:
    """True if the message's body contains the text. Also True if the body cannot be read, so that a search shows the
    message."""
    if not text:
        return True
    try:
        return text in message.body
    except BodyUnreadableError:
        return True


def stored_times(messages: Sequence[MessageExt]) -> list[int]:
    """Return the store times of messages of one store, in ms since 1970, in the order of the messages. A damaged
    message gets the time of the message before it, or, without such a message, of the first intact message after it."""
    last = next((message.store_timestamp_ms for message in messages if not message.record_damaged), 0)
    times = []
    for message in messages:
        if not message.record_damaged:
            last = message.store_timestamp_ms
        times.append(last)
    return times
