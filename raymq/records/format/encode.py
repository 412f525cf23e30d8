"""A batch: messages of one queue as finished record bytes, from the producer to the store's append.

The producer encodes a batch once, into the bytes that end up on disk. Four fields it cannot know (queue offset,
physical offset, store timestamp, store host) stay zero until the store's `stamp` fills them in place, under its append
lock, for all records at a time. Nothing here survives a crash by itself; the layout is in
`raymq.records.format.layout`.
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

from raymq.common.delay import DELAY_LEVELS_MAX
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


# These two are made for each append, and a frozen dataclass takes four times as long to make. They are not changed.
@dataclass(slots=True, unsafe_hash=True)
class ProducerSequence:
    """The identity under which a store deduplicates a batch: message i of it has sequence `first_sequence + i`."""

    producer_id: str
    epoch: int
    first_sequence: int


@dataclass(slots=True, eq=False)
class EncodedBatch:
    """One queue's messages as final record bytes, back to back.

    `sizes` are the records' lengths in bytes, `tag_codes` the third fields of their consume-queue units (in a topic of
    delayed messages: their `deliver_at_ms`, from which the store makes that field), `message_ids` their unique ids, a
    tuple or an IdRange. A batch without `producer` is not deduplicated by the store. `wait_store_msg_ok`: the append
    returns when the batch is as durable as the settings promise, and not already when it is written (spec/storage.md
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
        """This batch as it is shipped: the store reads the ids, where it needs them, from the records."""
        return replace(self, message_ids=())

    def __reduce__(self) -> tuple[type[EncodedBatch], tuple[Any, ...]]:
        """A pickle of a batch holds its records as bytes, for a view cannot be pickled."""
        records = bytes(self.records) if isinstance(self.records, memoryview) else self.records
        return EncodedBatch, tuple(records if f.name == "records" else getattr(self, f.name) for f in fields(self))


class LoneRecord(Struct, frozen=True, gc=False):
    """One message for queue `queue_id` of `topic`, as the pieces that an EncodedBatch of it is made from.

    A send of one message goes without that batch as long as nothing goes wrong (`StorageClient.append_one`). `parts`
    are the record's bytes, `size` of them in all. Its unique id is `stem` and the four hex digits of `counter`.
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
        """The batch of this message."""
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
    """A batch of messages that wait in internal topic `topic` (raymq.common.delay), for their time or for the end of
    their transaction; message i is for queue `real_queue_ids[i]`
    of its own topic."""

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
    """Encode `messages`, all of one topic, as records of its queue `queue_id`.

    Each record gets the user's properties, TAGS, KEYS, `extra_properties` (reserved names, the same for all), UNIQ_KEY
    from `message_ids` (none for an empty id), RMQ_PID/RMQ_EPOCH/RMQ_SEQ if there is a `producer`, and space for the
    property CRC with `append_prop_crc`, which `stamp` fills in. With `waiting` they are records of its topic's queue
    `queue_id`, delayed as each message says, and the messages' own topics may differ; without, a message's delay means
    nothing here. All have the same `wait_store_msg_ok`. `born_host` is an IP address and a port;
    `store_host_ipv6` leaves 20 bytes for the store host. MessageIllegalError when the batch is empty, mixes topics or
    `wait_store_msg_ok`, or has a message whose properties exceed 32767 bytes; nothing is kept then.
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
                f"a message's properties, tags and keys take {len(properties)} bytes; {MAX_PROPERTIES_BYTES} fit"
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
    """Raise MessageIllegalError unless all messages are of `topic`, where one is given, and wait alike."""
    for message in messages:
        if topic is not None and message.topic != topic:
            raise MessageIllegalError(f"a batch has one topic: found {message.topic!r} beside {topic!r}")
        if message.wait_store_msg_ok is not waits:
            raise MessageIllegalError("all messages of a batch must have the same wait_store_msg_ok")


def _host_fields(born_host: bytes, store_host_ipv6: bool) -> tuple[int, struct.Struct, bytes]:
    """The sys flag's host bits, the header that goes with them, and the store host as the producer leaves it."""
    born_bit = layout.SYS_FLAG_BORN_HOST_IPV6 if len(born_host) == 20 else 0
    bits = born_bit | (layout.SYS_FLAG_STORE_HOST_IPV6 if store_host_ipv6 else 0)
    return bits, layout.header_struct(bits), bytes(20 if store_host_ipv6 else 8)


@lru_cache(maxsize=1024)
def topic_part(topic: str) -> tuple[int, bytes]:
    """The magic of records of `topic`, and its length and text as they are in the record."""
    data = check_topic(topic).encode()
    if len(data) > layout.V1_TOPIC_SIZE_MAX:
        return layout.MAGIC_V2, len(data).to_bytes(2) + data
    return layout.MAGIC_V1, len(data).to_bytes(1) + data


def own_properties(message: Message) -> str:
    """The properties that the message itself has, as text on disk: the user's, TAGS, KEYS and its light queues."""
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
    """The message's own properties and WAIT, as text on disk."""
    text = own_properties(message)
    return text if message.wait_store_msg_ok else f"{text}{PROPERTY_WAIT}\x01false\x02"


def _target_text(message: Message, queue_id: int, message_id: str) -> str:
    """The properties that tell for which queue a message is (spec/storage.md §1), and when a delayed one is due, or
    which transaction a half message belongs to."""
    if PROPERTY_TRANSACTION_PREPARED in message.properties:
        when = f"{PROPERTY_TRANSACTION_ID}\x01{message_id}"
    elif message.deliver_at_ms is None:
        when = f"{PROPERTY_DELAY}\x01{min(message.delay_level, DELAY_LEVELS_MAX)}"
    else:
        when = f"{PROPERTY_TIMER_DELIVER_MS}\x01{message.deliver_at_ms}"
    return f"{when}\x02{PROPERTY_REAL_TOPIC}\x01{message.topic}\x02{PROPERTY_REAL_QUEUE_ID}\x01{queue_id}\x02"


def _sequence_text(producer: ProducerSequence | None) -> tuple[str, Iterator[str]]:
    """The dedup properties that all messages of a batch share, and for each message the rest: its own sequence."""
    if producer is None:
        return "", repeat("")
    identity = {PROPERTY_PRODUCER_ID: producer.producer_id, PROPERTY_PRODUCER_EPOCH: str(producer.epoch)}
    text = layout.encode_properties(identity).decode()
    return f"{text}{PROPERTY_SEQUENCE}\x01", (f"{sequence}\x02" for sequence in count(producer.first_sequence))
