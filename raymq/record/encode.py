"""A batch: messages of one queue as finished record bytes, from the producer to the store's append.

The producer encodes a batch once, into the bytes that end up on disk. Four fields it cannot know (queue offset,
physical offset, store timestamp, store host) stay zero until the store's `stamp` fills them in place, under its append
lock, for all records at a time. Nothing here survives a crash by itself; the layout is in `raymq.record.layout`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, repeat
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from raymq.delay import DELAY_LEVELS_MAX
from raymq.errors import IllegalNameError, MessageIllegalError
from raymq.message import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_SEQUENCE,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
    Message,
)
from raymq.names import check_topic
from raymq.record import layout
from raymq.record.compression import Compression, CompressionType
from raymq.record.crc import PROPERTY_CRC_LENGTH, PROPERTY_CRC_PLACEHOLDER, PROPERTY_CRC_PREFIX, property_crc
from raymq.record.hashing import tags_code

_NO_COMPRESSION: Final = Compression()

_BIG_ENDIAN_SHORT: Final = np.dtype(">i2")
_BIG_ENDIAN_INT: Final = np.dtype(">i4")
_BIG_ENDIAN_LONG: Final = np.dtype(">i8")
_MAGIC_AND_QUEUE_ID: Final = struct.Struct(">ii")
_OFFSETS: Final = struct.Struct(">qq")
_ONE_HEAD: Final = struct.Struct(">ii4xi20xi")
"""total_size, magic, queue_id and sys_flag of one record."""


@dataclass(frozen=True, slots=True)
class ProducerSequence:
    """Who sent a batch, for the store's deduplication: message i of the batch has sequence `first_sequence + i`."""

    producer_id: str
    epoch: int
    first_sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBatch:
    """One queue's messages as final record bytes, back to back.

    `sizes` are the records' lengths in bytes, `tag_codes` what their consume-queue units hold (in a topic where
    messages wait: their `deliver_at_ms`, of which the store makes what the unit holds), `message_ids` their unique
    ids. A batch without `producer` is not deduplicated by the store. `wait_store_msg_ok`: the append returns when the
    batch is as durable as the settings promise, and not already when it is written (spec/storage.md §6, §11.1).
    """

    topic: str
    queue_id: int
    records: bytes | bytearray | memoryview
    sizes: NDArray[np.int32]
    tag_codes: NDArray[np.int64]
    producer: ProducerSequence | None
    message_ids: tuple[str, ...]
    wait_store_msg_ok: bool = True

    def __len__(self) -> int:
        return len(self.sizes)

    def without_ids(self) -> EncodedBatch:
        """This batch as it is shipped: the store reads the ids, where it needs them, from the records."""
        return replace(self, message_ids=())


@dataclass(frozen=True, slots=True)
class Waiting:
    """A batch of messages that wait in internal topic `topic` (raymq.delay); message i is for queue `real_queue_ids[i]`
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
    waiting: Waiting | None = None,
) -> EncodedBatch:
    """Encode `messages`, all of one topic, as records of its queue `queue_id`.

    Each record gets the user's properties, TAGS, KEYS, `extra_properties` (reserved names, the same for all), UNIQ_KEY
    from `message_ids` (none for an empty id), RMQ_PID/RMQ_EPOCH/RMQ_SEQ if there is a `producer`, and room for the
    property CRC with `append_prop_crc`, which `stamp` fills in. With `waiting` they are records of its topic's queue
    `queue_id`, delayed as each message says, and the messages' own topics may differ; without, a message's delay means
    nothing here. All have the same `wait_store_msg_ok`. `born_host` is an IP address and a port;
    `store_host_ipv6` leaves room for an IPv6 store host. MessageIllegalError when the batch is empty, mixes topics or
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
    shared = layout.encode_properties(extra_properties).decode() if extra_properties else ""
    sequence_text, sequences = _sequence_text(producer)
    seal = PROPERTY_CRC_PLACEHOLDER if append_prop_crc else b""
    compresses = compression.type is not CompressionType.NONE

    parts: list[bytes] = []
    sizes: list[int] = []
    codes: list[int] = []
    for index, (message, message_id, sequence) in enumerate(zip(messages, message_ids, sequences, strict=False)):
        target = "" if waiting is None else _target_text(message, waiting.real_queue_ids[index])
        body, sys_flag = message.body, host_bits
        if compresses:
            body, bits = compression.compress_body(body)
            sys_flag |= bits
        unique = f"{PROPERTY_UNIQ_KEY}\x01{message_id}\x02" if message_id else ""
        properties = f"{_user_text(message)}{target}{shared}{unique}{sequence_text}{sequence}".encode() + seal
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
    return bits, layout.HEADERS[bits >> 4], bytes(20 if store_host_ipv6 else 8)


@lru_cache(maxsize=1024)
def topic_part(topic: str) -> tuple[int, bytes]:
    """The magic of records of `topic`, and its length and text as they are in the record."""
    data = check_topic(topic).encode()
    if len(data) > layout.V1_TOPIC_SIZE_MAX:
        return layout.MAGIC_V2, len(data).to_bytes(2) + data
    return layout.MAGIC_V1, len(data).to_bytes(1) + data


def _user_text(message: Message) -> str:
    text = (
        "".join([f"{name}\x01{value}\x02" for name, value in message.properties.items()]) if message.properties else ""
    )
    if message.tags:
        text += f"{PROPERTY_TAGS}\x01{message.tags}\x02"
    if message.keys:
        text += f"{PROPERTY_KEYS}\x01{' '.join(message.keys)}\x02"
    return text if message.wait_store_msg_ok else f"{text}{PROPERTY_WAIT}\x01false\x02"


def _target_text(message: Message, queue_id: int) -> str:
    """When a delayed message is due, and where it goes then (spec/storage.md §1, delayed messages)."""
    if message.deliver_at_ms is None:
        when = f"{PROPERTY_DELAY}\x01{min(message.delay_level, DELAY_LEVELS_MAX)}"
    else:
        when = f"{PROPERTY_TIMER_DELIVER_MS}\x01{message.deliver_at_ms}"
    return f"{when}\x02{PROPERTY_REAL_TOPIC}\x01{message.topic}\x02{PROPERTY_REAL_QUEUE_ID}\x01{queue_id}\x02"


def _sequence_text(producer: ProducerSequence | None) -> tuple[str, Iterator[str]]:
    """The dedup properties that all messages of a batch share, and for each message the rest: its own sequence."""
    if producer is None:
        return "", repeat("")
    shared = {PROPERTY_PRODUCER_ID: producer.producer_id, PROPERTY_PRODUCER_EPOCH: str(producer.epoch)}
    text = layout.encode_properties(shared).decode()
    return f"{text}{PROPERTY_SEQUENCE}\x01", (f"{sequence}\x02" for sequence in count(producer.first_sequence))


def stamp(
    buffer: bytearray | memoryview | NDArray[np.uint8],
    sizes: NDArray[np.int32],
    *,
    first_queue_offset: int,
    first_physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
) -> None:
    """Fill in what only the store knows, in place, in all records of a valid batch in the writable `buffer`.

    Record i gets queue offset `first_queue_offset + i`, its physical offset counted from `first_physical_offset`, and
    the same time and host; then its property CRC if the encoder left room for one. `store_host` (`encode_host`) must be
    of the family the records have room for, else MessageIllegalError, raised before anything is changed.
    """
    data = memoryview(buffer).cast("B") if not isinstance(buffer, np.ndarray) else buffer.data
    host_bits = data[layout.SYS_FLAG_OFFSET + 3] & layout.SYS_FLAG_HOSTS_MASK
    if (len(store_host) == 20) != bool(host_bits & layout.SYS_FLAG_STORE_HOST_IPV6):
        raise MessageIllegalError(f"the records have no room for a store host of {len(store_host)} bytes")
    if len(sizes) == 1:
        stamp_one(first_queue_offset, first_physical_offset, store_timestamp_ms, store_host, data)
        return
    ends = record_ends(sizes)
    stamp_many(ends, first_queue_offset, first_physical_offset, store_timestamp_ms, store_host, data)


def stamp_one(
    queue_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    record: bytearray | memoryview,
) -> None:
    """`stamp` for one record, whose store host has the right family, without what numpy costs. Its first 8 bytes are
    not touched, and read only for a property CRC."""
    _OFFSETS.pack_into(record, layout.QUEUE_OFFSET_OFFSET, queue_offset, physical_offset)
    place = _store_timestamp_at(record)
    record[place : place + 8 + len(store_host)] = store_timestamp_ms.to_bytes(8, signed=True) + store_host
    if is_sealed(record):
        record[-PROPERTY_CRC_LENGTH:] = property_crc(record)


def stamp_many(
    ends: NDArray[np.int64],
    first_queue_offset: int,
    first_physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    data: bytearray | memoryview,
) -> None:
    """`stamp_one` for records that end at `ends` of `data`, back to back."""
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1]
    offsets = np.empty((len(starts), 2), _BIG_ENDIAN_LONG)
    offsets[:, 0] = np.arange(first_queue_offset, first_queue_offset + len(starts))
    offsets[:, 1] = starts + first_physical_offset
    windows(data, 16)[starts + layout.QUEUE_OFFSET_OFFSET] = offsets.view(_void(16))[:, 0]
    stored = store_timestamp_ms.to_bytes(8, signed=True) + store_host
    starts += _store_timestamp_at(data)
    windows(data, len(stored))[starts] = np.void(stored)
    if is_sealed(data):
        start = 0
        for end in ends.tolist():
            data[end - PROPERTY_CRC_LENGTH : end] = property_crc(data[start:end])
            start = end


def is_sealed(data: bytes | bytearray | memoryview) -> bool:
    """Whether the last record in `data` carries a property CRC; all records of a batch do, or none."""
    tail = data[-PROPERTY_CRC_LENGTH:]
    return tail[: len(PROPERTY_CRC_PREFIX)] == PROPERTY_CRC_PREFIX


def _store_timestamp_at(record: bytes | bytearray | memoryview) -> int:
    wide = record[layout.SYS_FLAG_OFFSET + 3] & layout.SYS_FLAG_BORN_HOST_IPV6
    return layout.STORE_TIMESTAMP_OFFSET + (layout.IPV6_EXTRA if wide else 0)


def store_timestamps_at(data: memoryview, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """When the records were stored that start at `starts` of `data`."""
    wide = windows(data, 1)[starts + layout.SYS_FLAG_OFFSET + 3].view(np.uint8) & layout.SYS_FLAG_BORN_HOST_IPV6
    places = starts + layout.STORE_TIMESTAMP_OFFSET + np.where(wide, layout.IPV6_EXTRA, 0)
    times: NDArray[np.int64] = windows(data, 8)[places].view(_BIG_ENDIAN_LONG).astype(np.int64)
    return times


def record_ends(sizes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where each of the records of these sizes ends that lie back to back from 0 on."""
    ends = sizes.astype(np.int64)
    return ends.cumsum() if len(ends) > 1 else ends


def windows(data: bytes | bytearray | memoryview | NDArray[np.uint8], width: int) -> NDArray[np.void]:
    """All `width`-byte windows of `data`, element i starting at byte i, without a copy. Indexing it with an array of
    positions reads or writes one field of many records at a time; a position too near the end is an IndexError."""
    return np.ndarray((max(len(data) - width + 1, 0),), _void(width), data, 0, (1,))


@lru_cache(maxsize=1024)
def _void(width: int) -> np.dtype[np.void]:
    return np.dtype(f"V{width}")


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What is in a batch, as far as it decides whether a store takes it: lengths in bytes, the sys flags of all records
    or'ed together, and the first record's properties, whose reserved names all records of a batch share."""

    count: int
    longest_record: int
    longest_body: int
    longest_properties: int
    sys_flags: int
    first_properties: bytes


def validate_batch(batch: EncodedBatch, ends: NDArray[np.int64] | None = None) -> BatchFacts:
    """Check that `batch` is what `encode_batch` makes, so that its records can be stamped and stored.

    Sizes add up, each record's length fields agree with its size, magic and topic are those of `batch.topic`, queue ids
    are `batch.queue_id`, host families are the same. MessageIllegalError otherwise. Bodies and properties are not read.
    Returns what further checks need. `ends`: `record_ends` of the sizes, from a caller that needs them too.
    """
    sizes = batch.sizes
    if not len(sizes) or len(batch.tag_codes) != len(sizes):
        raise MessageIllegalError(f"a batch of {len(sizes)} sizes and {len(batch.tag_codes)} tag codes is not legal")
    try:
        magic, topic_text = topic_part(batch.topic)
    except IllegalNameError as error:
        raise MessageIllegalError(str(error)) from None
    if len(sizes) == 1 and sizes[0] == len(batch.records):
        facts = _facts_of_one(memoryview(batch.records), batch.queue_id, magic, topic_text)
        if facts is not None:
            return facts
    try:
        return _facts_of_many(batch, record_ends(sizes) if ends is None else ends, magic, topic_text)
    except IndexError:
        raise MessageIllegalError("a record is too short for its fields") from None
    except struct.error:
        raise MessageIllegalError(f"queue id {batch.queue_id} does not fit in a record") from None


def _facts_of_many(batch: EncodedBatch, ends: NDArray[np.int64], magic: int, topic_text: bytes) -> BatchFacts:
    """`validate_batch` with two gathers: the records' heads, and what lies between body and properties.

    Columns of them that are known beforehand are compared as bytes. IndexError: a place lies outside the batch.
    """
    sizes, data, count, width = batch.sizes, batch.records, len(batch.sizes), len(topic_text)
    if int(ends[-1]) != len(data):
        raise MessageIllegalError(f"the records' sizes do not add up to the batch's {len(data)} bytes")
    host_bits = data[layout.SYS_FLAG_OFFSET + 3] & layout.SYS_FLAG_HOSTS_MASK
    fixed_size = layout.HEADERS[host_bits >> 4].size
    body_starts = ends - sizes
    head = windows(data, fixed_size)[body_starts].view(_BIG_ENDIAN_INT).reshape(count, fixed_size // 4)
    same = _MAGIC_AND_QUEUE_ID.pack(magic, batch.queue_id)
    if head[:, 0].tobytes() != sizes.astype(_BIG_ENDIAN_INT).tobytes():
        raise MessageIllegalError("a record's total size differs from the size given for it")
    if head[:, 1:4:2].tobytes() != same * count:
        raise MessageIllegalError(f"a record is not one of topic {batch.topic!r}, queue id {batch.queue_id}")
    sys_flags = _common_flags(head[:, layout.SYS_FLAG_OFFSET // 4])
    # Unsigned: what is negative, is then too long.
    bodies = head[:, -1].astype(np.uint32).astype(np.int64)
    properties = sizes - bodies
    properties -= fixed_size + width + 2
    longest_properties = int(np.maximum.reduce(properties.view(np.uint64)))
    if longest_properties > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(f"a record's body size leaves no room, or too much, for up to {MAX_PROPERTIES_BYTES}")
    body_starts += bodies
    body_starts += fixed_size
    middle = windows(data, width + 2)[body_starts].view(np.uint8).reshape(count, width + 2)
    if middle[:, :-2].tobytes() != topic_text * count:
        raise MessageIllegalError(f"a record's topic is not {batch.topic!r}")
    if middle[:, -2:].tobytes() != properties.astype(_BIG_ENDIAN_SHORT).tobytes():
        raise MessageIllegalError("a record's length fields do not add up to its size")
    first_end = int(ends[0])
    return BatchFacts(
        count,
        int(np.maximum.reduce(sizes)),
        int(np.maximum.reduce(bodies)),
        longest_properties,
        sys_flags,
        bytes(data[first_end - int(properties[0]) : first_end]),
    )


def _common_flags(column: NDArray[np.int32]) -> int:
    """The sys flags of all records or'ed together. MessageIllegalError unless their hosts are of the same families."""
    first = int(column[0])
    if column.tobytes() == first.to_bytes(4, signed=True) * len(column):
        return first
    together, shared = int(np.bitwise_or.reduce(column)), int(np.bitwise_and.reduce(column))
    if (together ^ shared) & layout.SYS_FLAG_HOSTS_MASK:
        raise MessageIllegalError("records have hosts of different families")
    return together


def _facts_of_one(record: memoryview, queue_id: int, magic: int, topic_text: bytes) -> BatchFacts | None:
    """`validate_batch` for a single record, without what numpy costs. None: it is not legal; the checks for many say
    why."""
    size = len(record)
    if size < layout.MIN_RECORD_SIZE:
        return None
    total, found_magic, found_queue_id, sys_flag = _ONE_HEAD.unpack_from(record)
    fixed_size = layout.HEADERS[(sys_flag & layout.SYS_FLAG_HOSTS_MASK) >> 4].size
    room = size - (fixed_size + len(topic_text) + 2)
    if (total, found_magic, found_queue_id) != (size, magic, queue_id) or room < 0:
        return None
    body_size = int.from_bytes(record[fixed_size - 4 : fixed_size], signed=True)
    if not 0 <= body_size <= room:
        return None
    properties_at = fixed_size + body_size + len(topic_text) + 2
    properties_size = int.from_bytes(record[properties_at - 2 : properties_at], signed=True)
    if properties_size != room - body_size or record[fixed_size + body_size : properties_at - 2] != topic_text:
        return None
    return BatchFacts(1, size, body_size, properties_size, sys_flag, bytes(record[properties_at:]))


def with_property_crc(batch: EncodedBatch) -> EncodedBatch:
    """`batch` with room for a property CRC in every record, which `stamp` fills in; itself if it has that already.

    A CRC that a record carries under that name elsewhere is taken out. `batch` must be valid; MessageIllegalError when
    the properties then exceed 32767 bytes.
    """
    if is_sealed(batch.records):
        return batch
    _, topic_text = topic_part(batch.topic)
    parts: list[bytes] = []
    sizes: list[int] = []
    end = 0
    for size in batch.sizes.tolist():
        record = bytes(batch.records[end : end + size])
        end += size
        header = layout.HEADERS[(record[layout.SYS_FLAG_OFFSET + 3] & layout.SYS_FLAG_HOSTS_MASK) >> 4].size
        at = header + int.from_bytes(record[header - 4 : header]) + len(topic_text)
        kept = [piece for piece in record[at + 2 :].split(b"\x02") if piece]
        name = PROPERTY_CRC_PREFIX
        properties = (
            b"".join(piece + b"\x02" for piece in kept if not piece.startswith(name)) + PROPERTY_CRC_PLACEHOLDER
        )
        if len(properties) > MAX_PROPERTIES_BYTES:
            raise MessageIllegalError(f"properties of {len(properties)} bytes, with their CRC, exceed the limit")
        sizes.append(at + 2 + len(properties))
        parts += (sizes[-1].to_bytes(4), record[4:at], len(properties).to_bytes(2), properties)
    return replace(batch, records=b"".join(parts), sizes=np.array(sizes, np.int32))


def _require(holds: np.bool_ | bool, otherwise: str) -> None:
    if not holds:
        raise MessageIllegalError(otherwise)
