"""Builds the records that commit, roll back or check a transaction, from the transaction's half message."""

from __future__ import annotations

from collections.abc import Mapping

from raymq.common.message import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET,
    PROPERTY_WAIT,
    Message,
)
from raymq.common.names import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from raymq.records.format.encode import encode_batch
from raymq.records.format.hashing import tags_code
from raymq.records.format.layout import SYS_FLAG_TRANSACTION_COMMIT, RecordError, decode_properties
from raymq.records.format.rewrite import RecordParts, build_record, split_record
from storage.dispatch.delivery_progress import Delivery
from storage.dispatch.half_messages import HALF_QUEUE_ID, OP_TAG, HalfMessage, op_body


class HalfRecord:
    """The parsed record of a half message. Raises RecordError if the record's fields are inconsistent, or if its real
    topic or queue is invalid."""

    def __init__(self, half: HalfMessage, record: bytes | memoryview, *, store_host_ipv6: bool) -> None:
        self._half = half
        self._parts: RecordParts = split_record(record)
        self._properties = decode_properties(self._parts.properties)
        if not {PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID} <= self._properties.keys():
            raise RecordError("the half message does not name its target queue")
        if not self._properties[PROPERTY_REAL_QUEUE_ID].isdecimal():
            raise RecordError("the target queue id of the half message is not a number")
        self._store_host_ipv6 = store_host_ipv6

    @property
    def is_intact(self) -> bool:
        """True if the body of the half message matches its CRC."""
        return self._parts.body_is_intact

    def final_message(self) -> Delivery:
        """Build the final message for its real queue, from which consumers receive it.

        The message's commit bit and transaction id mark the transaction as committed. The message is not delayed,
        whatever its properties are. Raises MessageIllegalError if the message breaks a rule, IllegalNameError if its
        topic is not a valid name.
        """
        queue_id = int(self._properties[PROPERTY_REAL_QUEUE_ID])
        kept = {PROPERTY_WAIT: "false", PROPERTY_DELAY: "", PROPERTY_TIMER_DELIVER_MS: ""}
        return self._moved(self._properties[PROPERTY_REAL_TOPIC], queue_id, kept, SYS_FLAG_TRANSACTION_COMMIT)

    def checked_copy(self) -> Delivery:
        """Copy the half message, with its number of checks increased by one. The copy stores the queue offset of the
        first record of this half message."""
        counted = {
            PROPERTY_WAIT: "false",
            PROPERTY_TRANSACTION_CHECK_TIMES: str(self._half.check_times + 1),
            PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET: str(self._half.first_queue_offset),
        }
        return self._moved(HALF_TOPIC, HALF_QUEUE_ID, counted, 0)

    def given_up(self) -> Delivery:
        """Build the copy of the half message for the system topic of transactions that were given up. A damaged body is
        marked as unreadable."""
        return self._moved(CHECK_MAX_TIME_TOPIC, 0, {PROPERTY_WAIT: "false"}, 0)

    def _moved(self, topic: str, queue_id: int, exchanged: Mapping[str, str], bits: int) -> Delivery:
        record = build_record(
            self._parts,
            topic,
            queue_id,
            exchanged,
            producer=None,
            reconsume_times=self._parts.header.reconsume_times,
            store_host_ipv6=self._store_host_ipv6,
            transaction_bits=bits,
            prepared_transaction_offset=self._half.physical_offset,
        )
        return Delivery(topic, queue_id, bytearray(record), tags_code(self._properties.get(PROPERTY_TAGS)), 0, 0)


def op_record(
    queue_offsets: list[int], now_ms: int, store_host: tuple[str, int], *, ipv6: bool, property_crc: bool
) -> Delivery:
    """Build the op record that marks the half messages at `queue_offsets` as finished."""
    message = Message(OP_HALF_TOPIC, op_body(queue_offsets), OP_TAG, wait_store_msg_ok=False)
    batch = encode_batch(
        [message],
        HALF_QUEUE_ID,
        born_host=store_host,
        born_timestamp_ms=now_ms,
        message_ids=[""],
        append_prop_crc=property_crc,
        store_host_ipv6=ipv6,
    )
    return Delivery(OP_HALF_TOPIC, HALF_QUEUE_ID, bytearray(batch.records), tags_code(OP_TAG), 0, 0)
