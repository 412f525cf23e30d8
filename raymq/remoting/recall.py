"""Recalls a delayed message (cancels its delivery): stores a recall in the message's broker group
(raymq.common.protocol.recall).

A recall is an append with its own producer sequence. The client repeats it until the store answers. The store
recognises a repetition, and returns the store time of the first append. That time shows if the recall was in time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

from raymq.common.delay import TIMER_RECALL_QUEUE, TIMER_TOPIC
from raymq.common.errors import RaymqError, RecallError
from raymq.common.message import PROPERTY_TIMER_DELETE_KEY, TIMER_DELAY_MAX_MS, SystemMessage
from raymq.common.protocol.recall import RECALL_BODY, RECALL_TAG, RecallHandle, delete_key
from raymq.common.retry import persist_until
from raymq.records.format.encode import EncodedBatch, ProducerSequence, WaitingBatch, encode_batch
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient

RECALL_ATTEMPT_TIMEOUT_S: Final = 5.0


def check_recall(topic: str, text: str, now_ms: int) -> RecallHandle:
    """Decode and check a recall handle, which identifies a delayed message.

    Raises RecallError if the text cannot be decoded or names another topic, or if the message's delivery time is past
    or too far ahead.
    """
    handle = RecallHandle.parse(text)
    if handle.topic != topic:
        raise RecallError(f"the recall handle names a message of topic {handle.topic!r}, not of topic {topic!r}")
    if handle.deliver_at_ms <= now_ms:
        raise RecallError(
            f"message {handle.message_id} was due {now_ms - handle.deliver_at_ms} ms ago: it is too late to "
            "recall the message"
        )
    if handle.deliver_at_ms > now_ms + TIMER_DELAY_MAX_MS:
        raise RecallError(
            f"the recall handle names an impossible delivery time, {handle.deliver_at_ms} ms since 1970: no "
            "message can be delayed for so long"
        )
    return handle


def recall_batch(handle: RecallHandle, born_host: tuple[str, int], born_ms: int, producer_id: str) -> EncodedBatch:
    """Encode a recall as a batch of one record. The record is RocketMQ's deletion record, for the timer queue that
    holds recalls."""
    message = SystemMessage(
        handle.topic,
        RECALL_BODY,
        RECALL_TAG,
        properties={PROPERTY_TIMER_DELETE_KEY: delete_key(handle.topic, handle.message_id)},
        deliver_at_ms=handle.deliver_at_ms,
    )
    return encode_batch(
        [message],
        TIMER_RECALL_QUEUE,
        born_host=born_host,
        born_timestamp_ms=born_ms,
        message_ids=[handle.message_id],
        producer=ProducerSequence(producer_id, 0, 0),
        waiting=WaitingBatch(TIMER_TOPIC, [0]),
    )


def send_recall(
    handle: RecallHandle,
    *,
    routes: RouteSource,
    storage: Callable[[str], StorageClient],
    born_host: tuple[str, int],
    timeout_s: float,
) -> None:
    """Store a recall of a delayed message. If this function returns, the message will never be delivered.

    Raises RecallError if the message was due before the recall was stored, and TopicNotExistError if the topic does not
    exist. Raises RequestTimeoutError or ServiceNotAvailableError if no answer arrives in `timeout_s` seconds: the
    message may be recalled, and another call shows if it is.
    """
    batch = recall_batch(handle, born_host, time.time_ns() // 1_000_000, secrets.token_hex(8))

    def attempt(left_s: float) -> int:
        try:
            master = storage(routes.get(handle.topic).master_storage(handle.broker_name))
            [result] = master.append([batch], min(left_s, RECALL_ATTEMPT_TIMEOUT_S))
            return result.store_timestamp_ms
        except RaymqError as error:
            if error.retryable:
                routes.invalidate(handle.topic)
            raise

    stored_ms = persist_until(time.monotonic() + timeout_s, attempt)
    if stored_ms >= handle.deliver_at_ms:
        raise RecallError(
            f"message {handle.message_id} was due {stored_ms - handle.deliver_at_ms} ms before its recall was "
            "stored: it is too late to recall the message"
        )
