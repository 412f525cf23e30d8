"""pull_messages reads once from one queue, for `Broker.pull` and `Admin`: a fetch, decoded and filtered by tag text."""

from __future__ import annotations

from typing import Final

from raymq.consumer.subscription import Subscription
from raymq.errors import InvalidArgumentError, OffsetOutOfRangeError
from raymq.message import MessageQueue, PullResult, PullStatus
from raymq.protocol.store import FetchRequest
from raymq.record.decode import decode_records
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
    messages = decode_records(result.records, broker_name=queue.broker_name) if result.count else []
    wanted = tuple(message for message in messages if subscription.matches(message.tags))
    return PullResult(result.status, wanted, result.next_offset, result.min_offset, result.max_offset)
