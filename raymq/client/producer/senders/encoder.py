"""BatchEncoder: encodes a producer's messages as batches of records, with unique ids and sequences."""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import force_setattr

from raymq.client.producer.senders.message_facts import with_more
from raymq.client.producer.senders.send_batch import QueueSends, SendBatch
from raymq.common.delay import names_real_topic
from raymq.common.errors import MessageIllegalError
from raymq.common.message import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_SEQUENCE,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
    Message,
)
from raymq.common.names import LMQ_PREFIX
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.records.format import layout
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.crc import crc32
from raymq.records.format.encode import (
    EncodedBatch,
    LoneRecord,
    ProducerSequence,
    WaitingBatch,
    encode_batch,
    own_properties,
    topic_part,
)
from raymq.records.format.hashing import tags_code
from raymq.records.format.inner_batch_encode import encode_inner_batch
from raymq.records.format.message_id import IdRange, UniqueIdGenerator
from raymq.records.kernels.encode import encode_columns
from raymq.records.kernels.message_columns import MessageColumns

FEW_MESSAGES: Final = 40
"""Largest number of messages in a batch for which encoding one record at a time is cheaper than encoding all records by
columns."""
_WAIT: Final = f"{PROPERTY_WAIT}\x01false\x02".encode()
_UNIQUE: Final = f"{PROPERTY_UNIQ_KEY}\x01".encode()
_NO_HOST: Final = bytes(8)
"""The store host field of a record that is not stored yet: eight zero bytes."""
_NO_CODES: Final = np.zeros(FEW_MESSAGES, np.int64)


@dataclass(frozen=True, slots=True)
class _QueueLayout:
    """The encoded fields that all records of one producer in one queue share."""

    topic: str
    magic: int
    topic_text: bytes
    header: struct.Struct
    sys_flag: int
    born_host: bytes
    fixed_size: int
    identity: bytes


class ProducerIdentity(NamedTuple):
    """A producer id, and the epoch that fences earlier instances of this producer."""

    producer_id: str
    epoch: int


class BatchEncoder:
    """Encodes a producer's messages. The sequence numbers of each queue grow, and no sequence number is used twice.

    Thread-safe for different queues. Only one thread at a time may encode messages of a queue: the thread that sends to
    the queue.
    """

    def __init__(
        self,
        born_host: tuple[str, int],
        compression: Compression,
        identity: ProducerIdentity | None = None,
        names: Namespace = NO_NAMESPACE,
    ) -> None:
        """`born_host`: the producer's IP address and port. `identity`: the producer id and epoch; by default a unique
        producer id. `names`: the namespace that is added to topic names."""
        self._names = names
        self._born_host = born_host
        self._compression = compression
        self._ids = UniqueIdGenerator(born_host[0])
        self._producer_id, self._epoch = identity or ProducerIdentity(secrets.token_hex(8), 0)
        self._compresses_from = compression.threshold_bytes if compression.type is not CompressionType.NONE else 1 << 62

    def encode(self, sends: QueueSends, batches: Sequence[SendBatch]) -> EncodedBatch:
        """Encode the messages of `batches` as one batch for one queue; `sends` is the queue's send state. If a message
        is not legal, raises MessageIllegalError and uses no sequence number."""
        messages = _all_messages(batches)
        if batches[0].numbered:
            sends.next_sequence = batches[0].first_sequence
        ids = self._message_ids(batches, len(messages))
        waits = batches[0].waits
        if batches[0].inner:
            encoded = self._encode_inner(sends, messages, ids)
        elif isinstance(messages, MessageColumns):
            encoded = self._encode_columns(sends, messages, ids)
        elif names_real_topic(sends.queue.topic):
            encoded = self._encode_waiting(sends, batches, messages, ids)
        elif len(messages) <= FEW_MESSAGES and isinstance(ids, IdRange):
            encoded = self._encode_few(sends, messages, ids, waits)
        else:
            encoded = self._encode_many(sends, messages, ids, waits, all(batch.plain for batch in batches))
        sends.next_sequence += len(messages)
        return encoded

    def stored_topic(self, topic: str) -> str:
        """Return the full name under which the store keeps a topic: the topic's name with the namespace."""
        return self._names.wrap(topic)

    def check_sizes(self, messages: Sequence[Message], max_body_bytes: int) -> None:
        """Raise MessageIllegalError if the body of any message is longer than `max_body_bytes`. The limit applies to
        the body as it is stored, after any compression."""
        if isinstance(messages, MessageColumns):
            long = messages.bodies.take(np.flatnonzero(messages.bodies.sizes > max_body_bytes))
            for body in long.tolist():
                self._check_body(body, max_body_bytes)
            return
        for message in messages:
            self.check_size(message, max_body_bytes)

    def check_light_queues(self, messages: Iterable[Message]) -> None:
        """Raise MessageIllegalError if a message names light queues. Called if the store has no light queues."""
        for message in messages:
            if message.light_queues:
                raise MessageIllegalError(
                    f"a message of topic {message.topic!r} names light queues, which its broker group does not "
                    "support: set enable_lmq and enable_multi_dispatch to true"
                )

    def check_size(self, message: Message, max_body_bytes: int) -> None:
        """Raise MessageIllegalError if the message's body is longer than `max_body_bytes`. The limit applies to the
        body as it is stored, after any compression."""
        self._check_body(message.body, max_body_bytes)

    def _check_body(self, body: bytes, max_body_bytes: int) -> None:
        if len(body) > max_body_bytes:
            stored, _ = self._compression.compress_body(body)
            if len(stored) > max_body_bytes:
                raise MessageIllegalError(
                    f"a message body of {len(stored)} bytes exceeds the store's limit of {max_body_bytes} "
                    "(max_message_size_bytes): send a reference to the data, or split it"
                )

    def _message_ids(self, batches: Sequence[SendBatch], count: int) -> Sequence[str]:
        """Return an id for each message. A message keeps its id if an earlier attempt has already encoded it; other
        messages get new ids."""
        if len(batches) == 1 and batches[0].message_ids:
            return batches[0].message_ids
        ids = self._ids.next_range(count)
        if not any(batch.message_ids for batch in batches):
            return ids
        mixed: list[str] = []
        for batch in batches:
            mixed += batch.message_ids or ids[len(mixed) : len(mixed) + len(batch.messages)]
        return mixed

    def _encode_waiting(
        self, sends: QueueSends, batches: Sequence[SendBatch], messages: Sequence[Message], ids: Sequence[str]
    ) -> EncodedBatch:
        targets = [batch.queue.queue_id for batch in batches for _ in batch.messages]
        return encode_batch(
            self._stored(messages),
            sends.queue.queue_id,
            born_host=self._born_host,
            born_timestamp_ms=time.time_ns() // 1_000_000,
            message_ids=ids,
            producer=ProducerSequence(self._producer_id, self._epoch, sends.next_sequence),
            compression=self._compression,
            waiting=WaitingBatch(sends.queue.topic, targets),
        )

    def _encode_inner(self, sends: QueueSends, messages: Sequence[Message], ids: Sequence[str]) -> EncodedBatch:
        """Encode the messages as one record that contains all of them (an inner batch)."""
        return encode_inner_batch(
            self._stored(messages),
            sends.queue.queue_id,
            born_host=self._born_host,
            born_timestamp_ms=time.time_ns() // 1_000_000,
            message_ids=ids,
            producer=ProducerSequence(self._producer_id, self._epoch, sends.next_sequence),
            compression=self._compression,
        )

    def _encode_columns(self, sends: QueueSends, messages: MessageColumns, ids: Sequence[str]) -> EncodedBatch:
        """Encode a batch whose messages are already columns."""
        return encode_columns(
            self._names.wrap(sends.queue.topic),
            sends.queue.queue_id,
            messages.bodies,
            born_host=self._born_host,
            born_timestamp_ms=time.time_ns() // 1_000_000,
            message_ids=ids,
            producer=ProducerSequence(self._producer_id, self._epoch, sends.next_sequence),
            properties=messages.properties,
            tag_codes=messages.tag_codes,
            compression=self._compression,
        )

    def _encode_many(
        self, sends: QueueSends, messages: Sequence[Message], ids: Sequence[str], waits: bool, plain: bool
    ) -> EncodedBatch:
        """Convert a batch of many messages to columns, and encode the columns."""
        rich = not plain and bool(with_more(messages))
        queue = sends.queue
        return encode_columns(
            self._names.wrap(queue.topic),
            queue.queue_id,
            [message.body for message in messages],
            born_host=self._born_host,
            born_timestamp_ms=time.time_ns() // 1_000_000,
            message_ids=ids,
            producer=ProducerSequence(self._producer_id, self._epoch, sends.next_sequence),
            properties=[self._own_properties(message).encode() for message in messages] if rich else None,
            tag_codes=np.array([tags_code(message.tags) for message in messages], np.int64) if rich else None,
            flags=np.array([message.flag for message in messages], np.int32) if rich else 0,
            compression=self._compression,
            wait_store_msg_ok=waits,
        )

    def _encode_few(self, sends: QueueSends, messages: Sequence[Message], ids: IdRange, waits: bool) -> EncodedBatch:
        """Encode a batch of few messages record by record."""
        shared: _QueueLayout = sends.layout or self._layout(sends)
        queue_id, sequence = sends.queue.queue_id, sends.next_sequence
        born_ms, stem, counter = time.time_ns() // 1_000_000, ids.stem.encode(), ids.first
        parts: list[bytes] = []
        sizes: list[int] = []
        codes = _NO_CODES[: len(messages)]
        for index, message in enumerate(messages):
            number = counter + index & 0xFFFF
            record, size = self._record(shared, queue_id, message, waits, stem, number, sequence + index, born_ms)
            parts += record
            sizes.append(size)
            if message.tags:
                codes = codes.copy()
                codes[index] = tags_code(message.tags)
        producer = ProducerSequence(self._producer_id, self._epoch, sequence)
        records = b"".join(parts)
        return EncodedBatch(shared.topic, queue_id, records, np.array(sizes, np.int32), codes, producer, ids, waits)

    def encode_one(self, sends: QueueSends, message: Message) -> LoneRecord:
        """Encode one message that is not delayed, without making a batch. The result equals the result of `encode`, in
        fewer steps. If the message is not legal, raises MessageIllegalError and uses up no sequence number."""
        shared: _QueueLayout = sends.layout or self._layout(sends)
        (stem, number), sequence, queue = self._ids.next_parts(), sends.next_sequence, sends.queue
        waits, born_ms = message.wait_store_msg_ok, time.time_ns() // 1_000_000
        parts, size = self._record(shared, queue.queue_id, message, waits, stem.encode(), number, sequence, born_ms)
        code = tags_code(message.tags) if message.tags else 0
        sends.next_sequence = sequence + 1
        return LoneRecord(
            shared.topic, queue.queue_id, parts, size, code, self._producer_id, sequence, stem, number, waits
        )

    def _record(
        self,
        shared: _QueueLayout,
        queue_id: int,
        message: Message,
        waits: bool,
        stem: bytes,
        number: int,
        sequence: int,
        born_ms: int,
    ) -> tuple[tuple[bytes, bytes, bytes, bytes, bytes], int]:
        """Encode a message's record. Returns the record as consecutive byte strings, and its total size. The message's
        unique id is `stem` followed by the hexadecimal digits of `number`."""
        body, sys_flag, own = message.body, shared.sys_flag, b""
        if len(body) >= self._compresses_from:
            body, bits = self._compression.compress_body(body)
            sys_flag |= bits
        if message.tags or message.keys or message.properties or message.light_queues:
            own = self._own_properties(message).encode()
        if not waits:
            own += _WAIT
        properties = b"%b%b%b%04X\x02%b%d\x02" % (own, _UNIQUE, stem, number, shared.identity, sequence)
        if len(properties) > MAX_PROPERTIES_BYTES:
            raise MessageIllegalError(
                f"a message's properties, tags and keys take {len(properties)} bytes; at most "
                f"{MAX_PROPERTIES_BYTES} are allowed"
            )
        size = shared.fixed_size + len(body) + len(properties)
        head = shared.header.pack(
            size, shared.magic, crc32(body) & 0x7FFFFFFF, queue_id, message.flag, 0, 0, sys_flag, born_ms,
            shared.born_host, 0, _NO_HOST, 0, 0, len(body),
        )  # fmt: skip
        return (head, body, shared.topic_text, len(properties).to_bytes(2), properties), size

    def _own_properties(self, message: Message) -> str:
        return own_properties(self._stored((message,))[0] if message.light_queues else message)

    def _stored(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with the names under which the store keeps them: the namespace is added to topics and
        light queues."""
        if not self._names:
            return messages
        stored = []
        for message in messages:
            copied = copy(message)
            force_setattr(copied, "topic", self._names.wrap(message.topic))
            light = [self._names.wrap(LMQ_PREFIX + name).removeprefix(LMQ_PREFIX) for name in message.light_queues]
            force_setattr(copied, "light_queues", tuple(light))
            stored.append(copied)
        return stored

    def _layout(self, sends: QueueSends) -> _QueueLayout:
        topic = self._names.wrap(sends.queue.topic)
        magic, topic_text = topic_part(topic)
        born = layout.encode_host(*self._born_host)
        sys_flag = layout.SYS_FLAG_BORN_HOST_IPV6 if len(born) == layout.IPV6_HOST_BYTES else 0
        header = layout.header_struct(sys_flag)
        properties = {PROPERTY_PRODUCER_ID: self._producer_id, PROPERTY_PRODUCER_EPOCH: str(self._epoch)}
        identity = layout.encode_properties(properties)
        identity += f"{PROPERTY_SEQUENCE}\x01".encode()
        fixed_size = header.size + len(topic_text) + 2
        made = _QueueLayout(topic, magic, topic_text, header, sys_flag, born, fixed_size, identity)
        sends.layout = made
        return made


def _all_messages(batches: Sequence[SendBatch]) -> Sequence[Message]:
    """Return the messages of all batches, in the order of the batches. The messages are returned as columns if all
    batches are columns."""
    if len(batches) == 1:
        return batches[0].messages
    columns = [batch.messages for batch in batches if isinstance(batch.messages, MessageColumns)]
    if len(columns) == len(batches):
        return MessageColumns.chained(columns)
    return list(chain(*[batch.messages for batch in batches]))
