"""The fields of a record that dispatch uses: the fields of its consume-queue unit (entry), its index keys, and its
producer's sequence number.

Dispatch does not read the record's body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from raymq.common.delay import DELAY_LEVELS_MS, is_waiting_topic, waiting_code
from raymq.common.message import (
    PROPERTY_KEYS,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_SEQUENCE,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
)
from raymq.records.format.decode import topic_text
from raymq.records.format.encode import ProducerSequence
from raymq.records.format.hashing import tags_code
from raymq.records.format.layout import Buffer, RecordError, decode_properties, find_sections, unpack_header


class DispatchView(NamedTuple):
    """The fields of one record that dispatch uses.

    `tags_code`: the tag code in the consume-queue unit (entry); for a delayed message the delivery time
    (spec/storage.md §2). `properties`: includes reserved properties. The body is not read.
    """

    size: int
    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    store_timestamp_ms: int
    prepared_transaction_offset: int
    tags_code: int
    properties: Mapping[str, str]

    @property
    def message_id(self) -> str | None:
        """The message's unique id, which the producer created; None if the record has no unique id."""
        return self.properties.get(PROPERTY_UNIQ_KEY)

    @property
    def keys(self) -> list[str]:
        """The index keys of the record, in order: the unique id, then each business key."""
        keys = [key for key in self.properties.get(PROPERTY_KEYS, "").split(" ") if key]
        message_id = self.message_id
        return [message_id, *keys] if message_id else keys

    @property
    def producer(self) -> ProducerSequence | None:
        """The producer id, epoch and sequence number by which the store detects duplicates of this record. None if one
        of these properties is missing or not a number, as in a record that other software wrote."""
        properties = self.properties
        producer_id = properties.get(PROPERTY_PRODUCER_ID)
        if producer_id is None:
            return None
        try:
            epoch, sequence = int(properties[PROPERTY_PRODUCER_EPOCH]), int(properties[PROPERTY_SEQUENCE])
        except (KeyError, ValueError):
            return None
        return ProducerSequence(producer_id, epoch, sequence)


def dispatch_view(
    buffer: Buffer, position: int = 0, *, delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
) -> DispatchView:
    """Return the DispatchView of the record at `position`. Raises RecordError if the record's length fields contradict
    each other. No CRC is checked.

    `delay_levels_ms`: the store's delay levels, from which the `tags_code` of a delayed message is computed.
    """
    if position < 0:
        raise RecordError(f"no record at byte {position}")
    header = unpack_header(buffer, position)
    # Assign each header field to a name, which is faster than creating a RecordHeader. A replica runs this code for
    # every record that it copies.
    (
        size,
        _,
        _,
        queue_id,
        _,
        queue_offset,
        physical_offset,
        sys_flag,
        _,
        _,
        store_timestamp_ms,
        _,
        _,
        prepared_transaction_offset,
        _,
    ) = header
    # fmt: on
    _, _, topic_at, properties_at, end = find_sections(buffer, position, header)
    topic = topic_text(bytes(buffer[topic_at : properties_at - 2]))
    properties = decode_properties(bytes(buffer[properties_at:end]))
    code = None
    if is_waiting_topic(topic):
        code = waiting_code(topic, queue_id, properties, store_timestamp_ms, delay_levels_ms)
    if code is None:
        code = tags_code(properties.get(PROPERTY_TAGS))
    return DispatchView(
        size,
        topic,
        queue_id,
        queue_offset,
        physical_offset,
        sys_flag,
        store_timestamp_ms,
        prepared_transaction_offset,
        code,
        properties,
    )
