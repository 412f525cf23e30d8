"""Encodes a batch: messages of one queue as record bytes. The store appends these bytes unchanged except for four
fields.

The producer encodes a batch once, into the bytes that are stored on disk. Four fields are unknown to the producer and
zero: queue offset, physical offset, store timestamp and store host. The store's `stamp` sets them in place, for all
records of the batch, while it holds the append lock. The layout is in `raymq.records.format.layout`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import count, repeat
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from raymq.common.errors import MessageIllegalError
from raymq.common.message import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_DELAY,
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_KEYS,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_SEQUENCE,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
    Message,
)
from raymq.common.names import check_topic, light_queue
from raymq.records.format import layout
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.crc import PROPERTY_CRC_PLACEHOLDER, crc32
from raymq.records.format.hashing import tags_code
from raymq.records.format.message_id import IdRange

_NO_COMPRESSION: Final = Compression()


# The classes ProducerSequence and EncodedBatch are not frozen: an instance is created for each append, and creating a
# frozen dataclass takes four times as long. Do not modify the instances.
@dataclass(slots=True, unsafe_hash=True)
class ProducerSequence:
    """The identity of a producer, and the sequence numbers of a batch of its messages, by which stores recognise
    duplicates. Message i of the batch has the sequence number `first_sequence + i`."""

    producer_id: str
    epoch: int
    first_sequence: int


@dataclass(slots=True, eq=False)
class EncodedBatch:
    """Messages of one queue as encoded records, one after another.

    `sizes`: the records' lengths in bytes. `tag_codes`: the third fields of the records' consume-queue units (entries).
    In a topic of delayed messages they are the messages' `deliver_at_ms`, from which the store computes the third
    field. `message_ids`: the messages' unique ids, a tuple or an IdRange. `producer`: the sequence for deduplication;
    if None, the store does not deduplicate the batch. `wait_store_msg_ok`: if True, the append returns when the batch
    is as durable as the settings require. If False, the append returns as soon as the batch is written (spec/storage.md
    §6, §11.1).
    """

    topic: str
    queue_id: int
    records: bytes | bytearray | memoryview
    sizes: NDArray[np.int32]
    tag_codes: NDArray[np.int64]
    producer: ProducerSequence | None
    message_ids: Sequence[str]
    wait_store_msg_ok: bool = True

    def __len__(self) -> int:
        return len(self.sizes)

    def without_ids(self) -> EncodedBatch:
        """Return a copy of this batch without its message ids, for the transfer to the store. The store reads the ids
        from the records if it needs them."""
        return replace(self, message_ids=())

    def __reduce__(self) -> tuple[type[EncodedBatch], tuple[Any, ...]]:
        """Pickle a batch with its records as bytes, because a memoryview cannot be pickled."""
        records = bytes(self.records) if isinstance(self.records, memoryview) else self.records
        return EncodedBatch, tuple(records if f.name == "records" else getattr(self, f.name) for f in fields(self))


class LoneRecord(Struct, frozen=True, gc=False):
    """One message for queue `queue_id` of `topic`. Its fields are the fields of an EncodedBatch that is created only if
    needed.

    A send of one message needs the EncodedBatch only if something fails (`StorageClient.append_one`). `parts`: the
    record's bytes, `size` bytes in total. The unique id is `stem` followed by the four hex digits of `counter`.
    """

    topic: str
    queue_id: int
    parts: tuple[bytes, ...]
    size: int
    tag_code: int
    producer_id: str
    sequence: int
    stem: str
    counter: int
    wait_store_msg_ok: bool

    def batch(self) -> EncodedBatch:
        """Return an EncodedBatch that contains only this message."""
        return EncodedBatch(
            self.topic,
            self.queue_id,
            b"".join(self.parts),
            np.array((self.size,), np.int32),
            np.array((self.tag_code,), np.int64),
            ProducerSequence(self.producer_id, 0, self.sequence),
            IdRange(self.stem, self.counter, 1),
            self.wait_store_msg_ok,
        )


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """The destination of a batch whose messages wait in internal topic `topic` (raymq.common.delay) for their delivery
    time, or for the end of their transaction. Message i is for queue `real_queue_ids[i]` of the message's own topic."""

    topic: str
    real_queue_ids: Sequence[int]


def encode_batch(
    messages: Sequence[Message],
    queue_id: int,
    *,
    born_host: tuple[str, int],
    born_timestamp_ms: int,
    message_ids: Sequence[str],
    producer: ProducerSequence | None = None,
    compression: Compression = _NO_COMPRESSION,
    extra_properties: Mapping[str, str] | None = None,
    append_prop_crc: bool = False,
    reconsume_times: int = 0,
    store_host_ipv6: bool = False,
    waiting: WaitingBatch | None = None,
) -> EncodedBatch:
    """Encode `messages`, all of one topic, as records of the topic's queue `queue_id`.

    Each record has the user's properties, TAGS, KEYS, `extra_properties` (reserved names, equal for all records) and
    UNIQ_KEY from `message_ids` (no UNIQ_KEY if the id is empty). If `producer` is given, a record also has RMQ_PID,
    RMQ_EPOCH and RMQ_SEQ. With `append_prop_crc` a record has space for the property CRC, which `stamp` sets.

    With `waiting`, the records belong to queue `queue_id` of topic `waiting.topic`. Each message keeps the delay that
    it requests, and the messages' own topics may differ. Without `waiting`, a message's delay is ignored. All messages
    must have the same `wait_store_msg_ok`. `born_host`: an IP address and a port. `store_host_ipv6`: reserve 20 bytes
    for the store host.

    Raises MessageIllegalError if the batch is empty, mixes topics or `wait_store_msg_ok`, or has a message whose
    properties exceed 32767 bytes.
    """
    if not messages or len(messages) != len(message_ids):
        raise MessageIllegalError(f"a batch of {len(messages)} messages with {len(message_ids)} ids cannot be encoded")
    topic = messages[0].topic if waiting is None else waiting.topic
    waits = messages[0].wait_store_msg_ok
    _require_alike(messages, None if waiting is not None else topic, waits)
    magic, topic_text = topic_part(topic)
    born = layout.encode_host(*born_host)
    host_bits, header, store = _host_fields(born, store_host_ipv6)
    fixed_size = header.size + len(topic_text) + 2
    extra = layout.encode_properties(extra_properties).decode() if extra_properties else ""
    sequence_text, sequences = _sequence_text(producer)
    seal = PROPERTY_CRC_PLACEHOLDER if append_prop_crc else b""
    compresses = compression.type is not CompressionType.NONE

    parts: list[bytes] = []
    sizes: list[int] = []
    codes: list[int] = []
    for index, (message, message_id, sequence) in enumerate(zip(messages, message_ids, sequences, strict=False)):
        target = "" if waiting is None else _target_text(message, waiting.real_queue_ids[index], message_id)
        body, sys_flag = message.body, host_bits
        if compresses:
            body, bits = compression.compress_body(body)
            sys_flag |= bits
        unique = f"{PROPERTY_UNIQ_KEY}\x01{message_id}\x02" if message_id else ""
        properties = f"{_user_text(message)}{target}{extra}{unique}{sequence_text}{sequence}".encode() + seal
        if len(properties) > MAX_PROPERTIES_BYTES:
            raise MessageIllegalError(
                f"a message's properties, tags and keys take {len(properties)} bytes; at most "
                f"{MAX_PROPERTIES_BYTES} are allowed"
            )
        size = fixed_size + len(body) + len(properties)
        fields = (size, magic, crc32(body) & 0x7FFFFFFF, queue_id, message.flag, 0, 0, sys_flag, born_timestamp_ms)
        parts += (
            header.pack(*fields, born, 0, store, reconsume_times, 0, len(body)),
            body,
            topic_text,
            len(properties).to_bytes(2),
            properties,
        )
        sizes.append(size)
        codes.append(tags_code(message.tags) if waiting is None else message.deliver_at_ms or 0)
    columns = np.array(sizes, np.int32), np.array(codes, np.int64)
    return EncodedBatch(topic, queue_id, b"".join(parts), *columns, producer, tuple(message_ids), waits)


def _require_alike(messages: Iterable[Message], topic: str | None, waits: bool) -> None:
    """Raise MessageIllegalError if a message does not belong to `topic` (None: any topic), or if its
    `wait_store_msg_ok` differs from `waits`."""
    for message in messages:
        if topic is not None and message.topic != topic:
            raise MessageIllegalError(
                f"all messages of a batch must have one topic, not {topic!r} and {message.topic!r}; send a "
                "separate batch for each topic"
            )
        if message.wait_store_msg_ok is not waits:
            raise MessageIllegalError(
                "all messages of a batch must have the same wait_store_msg_ok; send a separate batch for each value"
            )


def _host_fields(born_host: bytes, store_host_ipv6: bool) -> tuple[int, struct.Struct, bytes]:
    """Return the sys flag's host bits, the header struct for records with these bits, and zero bytes for the store
    host. The store later replaces these zero bytes with its address."""
    born_bit = layout.SYS_FLAG_BORN_HOST_IPV6 if len(born_host) == 20 else 0
    bits = born_bit | (layout.SYS_FLAG_STORE_HOST_IPV6 if store_host_ipv6 else 0)
    return bits, layout.header_struct(bits), bytes(20 if store_host_ipv6 else 8)


@lru_cache(maxsize=1024)
def topic_part(topic: str) -> tuple[int, bytes]:
    """Return the two topic-dependent values of a record: the magic number, and the topic's length and text as
    bytes."""
    data = check_topic(topic).encode()
    if len(data) > layout.V1_TOPIC_SIZE_MAX:
        return layout.MAGIC_V2, len(data).to_bytes(2) + data
    return layout.MAGIC_V1, len(data).to_bytes(1) + data


def own_properties(message: Message) -> str:
    """Return a message's own properties, encoded as text in a record's property string: the user's properties, TAGS,
    KEYS and the names of its light queues."""
    text = (
        "".join([f"{name}\x01{value}\x02" for name, value in message.properties.items()]) if message.properties else ""
    )
    if message.tags:
        text += f"{PROPERTY_TAGS}\x01{message.tags}\x02"
    if message.keys:
        text += f"{PROPERTY_KEYS}\x01{' '.join(message.keys)}\x02"
    if message.light_queues:
        text += f"{PROPERTY_INNER_MULTI_DISPATCH}\x01{','.join(map(light_queue, message.light_queues))}\x02"
    return text


def _user_text(message: Message) -> str:
    """Return a message's own properties, and WAIT if `wait_store_msg_ok` is False, as text in a record's property
    string."""
    text = own_properties(message)
    return text if message.wait_store_msg_ok else f"{text}{PROPERTY_WAIT}\x01false\x02"


def _target_text(message: Message, queue_id: int, message_id: str) -> str:
    """Return the properties that name a message's target queue (spec/storage.md §1). For a delayed message, they follow
    a property with its delay or delivery time; for a half message, a property with its transaction id."""
    if PROPERTY_TRANSACTION_PREPARED in message.properties:
        when = f"{PROPERTY_TRANSACTION_ID}\x01{message_id}"
    elif message.deliver_at_ms is None:
        when = f"{PROPERTY_DELAY}\x01{message.delay_level}"
    else:
        when = f"{PROPERTY_TIMER_DELIVER_MS}\x01{message.deliver_at_ms}"
    return f"{when}\x02{PROPERTY_REAL_TOPIC}\x01{message.topic}\x02{PROPERTY_REAL_QUEUE_ID}\x01{queue_id}\x02"


def _sequence_text(producer: ProducerSequence | None) -> tuple[str, Iterator[str]]:
    """Return the text of the deduplication properties that all messages of a batch share, up to the sequence number.
    Also returns an iterator over the rest of the text, which is each message's sequence number."""
    if producer is None:
        return "", repeat("")
    identity = {PROPERTY_PRODUCER_ID: producer.producer_id, PROPERTY_PRODUCER_EPOCH: str(producer.epoch)}
    text = layout.encode_properties(identity).decode()
    return f"{text}{PROPERTY_SEQUENCE}\x01", (f"{sequence}\x02" for sequence in count(producer.first_sequence))
