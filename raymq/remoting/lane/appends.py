"""Payloads of OPEN and APPEND frames: batches of records, and the offsets that the store assigns to them.

OPEN gives a queue a handle, which later APPENDs of the same connection use. Opening a handle again changes its queue.
OPEN is sent ahead of the first APPEND that uses the handle, and has no answer.

    OPEN            | handle 4 | queue id 8 | topic |
    APPEND          the batches, one after another:
        | handle 4 | records length 4 | count 4 | epoch 8 | first sequence 8 | first counter 2 | flags 1 |
        | producer length 1 | stem length 1 | zero 7 |                                          40 bytes
        | tag codes 8 × count, if flag 4 | sizes 4 × count, if flag 2 | producer id | id stem | records |
    flags           1 wait_store_msg_ok, 2 has sizes (else there is one record), 4 has tag codes (else all are zero),
                    8 has an id stem: id i is the stem and four hex digits of first counter + i, 16 has a producer
    answer          the results, one after another, and behind them the offsets of those with flags:
        | status 1 | flags 1 | zero 2 | count 4 | queue offset 8 | physical offset 8 | store time 8 |  32 bytes
    flags           1 duplicate, 2 physical offsets 8 × count, 4 queue offsets 8 × count
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from raymq.common.errors import InvalidArgumentError, MessageIllegalError, ServiceNotAvailableError
from raymq.common.message import SendStatus
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch, LoneRecord, ProducerSequence
from raymq.records.format.message_id import IdRange
from raymq.remoting.lane.frames import PAYLOAD_MAX, Buffer, ProtocolError

HANDLES_MAX: Final = 1024
"""Maximum number of queue handles of one connection."""

_OPEN: Final = struct.Struct("<Iq")
_BATCH: Final = struct.Struct("<IIIqqHBBB7x")
_RESULT: Final = struct.Struct("<BBxxIqqq")
_WAITS, _HAS_SIZES, _HAS_CODES, _HAS_STEM, _HAS_PRODUCER = 1, 2, 4, 8, 16
_ONE: Final = _HAS_STEM | _HAS_PRODUCER
"""The flags that every APPEND of a single-message record (LoneRecord) has."""
_DUPLICATE, _PHYSICAL_OFFSETS, _QUEUE_OFFSETS = 1, 2, 4
_SIZE: Final = np.dtype("<i4")
_CODE: Final = np.dtype("<i8")
_NO_CODE: Final = np.zeros(1, np.int64)
_STATUSES: Final = tuple(SendStatus)
_STATUS_NUMBERS: Final = {status: number for number, status in enumerate(_STATUSES)}

QueueName = tuple[str, int]


class ClientHandles:
    """The queue handles (numbers) of one client's connection. Beyond HANDLES_MAX, the least recently used handle is
    reused.

    So an APPEND of up to HANDLES_MAX queues never reuses a handle that it needs itself.
    """

    def __init__(self) -> None:
        self._handles: dict[QueueName, int] = {}

    def get(self, topic: str, queue_id: int) -> tuple[int, bytes]:
        """Return a queue's handle (a number), and the payload of the OPEN frame that must be sent before the handle is
        used. The payload is empty if no OPEN is needed."""
        name = topic, queue_id
        handle = self._handles.pop(name, None)
        if handle is not None:
            self._handles[name] = handle
            return handle, b""
        if len(self._handles) < HANDLES_MAX:
            handle = len(self._handles)
        else:
            oldest = next(iter(self._handles))
            handle = self._handles.pop(oldest)
        self._handles[name] = handle
        return handle, _OPEN.pack(handle, queue_id) + topic.encode()

    def known(self, topic: str, queue_id: int) -> int | None:
        """Return a queue's handle (a number), or None if the queue has no handle. This call does not count as a use of
        the handle, so the handle may be reused earlier."""
        return self._handles.get((topic, queue_id))

    def forget(self) -> None:
        """Drop the handles (numbers) of all queues. Some OPEN frames were not sent, so the server does not have all
        handles."""
        self._handles.clear()


class ServerHandles:
    """The server's map from the queue handles of one connection to queues."""

    def __init__(self) -> None:
        self._names: dict[int, QueueName] = {}

    def open(self, payload: Buffer) -> None:
        """Register the queue handle of an OPEN frame. Raises ProtocolError if the payload is not an OPEN."""
        try:
            handle, queue_id = _OPEN.unpack_from(payload)
            topic = bytes(payload[_OPEN.size :]).decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError(f"cannot decode a client's request to open a queue: {error}") from None
        if handle >= HANDLES_MAX:
            raise ProtocolError(f"a client opened handle {handle}; at most {HANDLES_MAX} handles are allowed")
        self._names[handle] = topic, queue_id

    def get(self, handle: int) -> QueueName:
        """Return the queue for which the client opened this handle (a number). Raises ProtocolError if the handle was
        not opened."""
        try:
            return self._names[handle]
        except KeyError:
            raise ProtocolError(f"a client used handle {handle}, which it did not open") from None


def encode_append(batches: Sequence[EncodedBatch], handles: ClientHandles) -> tuple[list[bytes], list[Buffer]]:
    """Encode up to HANDLES_MAX batches. Returns the payloads of the OPEN frames to send first, and the parts of the
    APPEND frame's payload.

    Raises MessageIllegalError if a frame cannot hold the batches, because they are too long or a number exceeds its
    field.
    """
    assert len(batches) <= HANDLES_MAX
    size = sum([len(batch.records) for batch in batches])
    if size > PAYLOAD_MAX // 2:
        raise MessageIllegalError(f"an append of {size} bytes is longer than {PAYLOAD_MAX // 2}: send it in parts")
    opens: list[bytes] = []
    parts: list[Buffer] = []
    try:
        for batch in batches:
            _encode_batch(batch, handles, opens, parts)
    except struct.error as error:
        handles.forget()
        queues = ", ".join(sorted({f"{batch.topic}:{batch.queue_id}" for batch in batches[:5]}))
        raise MessageIllegalError(
            f"a batch for queue {queues} contains a number that is too large for a lane request: {error}"
        ) from error
    return opens, parts


def _encode_batch(batch: EncodedBatch, handles: ClientHandles, opens: list[bytes], parts: list[Buffer]) -> None:
    handle, opening = handles.get(batch.topic, batch.queue_id)
    if opening:
        opens.append(opening)
    count, flags, epoch, first, first_id = len(batch.sizes), 0, 0, 0, 0
    pieces: list[bytes] = []
    if batch.wait_store_msg_ok:
        flags = _WAITS
    codes = batch.tag_codes
    if codes.item(0) if count == 1 else (count and codes.any()):
        flags |= _HAS_CODES
        pieces.append(codes.astype(_CODE, copy=False).tobytes())
    if count != 1 or batch.sizes.item(0) != len(batch.records):
        flags |= _HAS_SIZES
        pieces.append(batch.sizes.astype(_SIZE, copy=False).tobytes())
    producer_id = stem = b""
    if (producer := batch.producer) is not None:
        flags |= _HAS_PRODUCER
        producer_id, epoch, first = producer.producer_id.encode(), producer.epoch, producer.first_sequence
        pieces.append(producer_id)
    if isinstance(ids := batch.message_ids, IdRange):
        flags |= _HAS_STEM
        stem, first_id = ids.stem.encode(), ids.first
        pieces.append(stem)
    head = _BATCH.pack(handle, len(batch.records), count, epoch, first, first_id, flags, len(producer_id), len(stem))
    parts.append(head + b"".join(pieces))
    parts.append(batch.records)


def encode_one(record: LoneRecord, handle: int) -> tuple[list[bytes], int]:
    """Encode an APPEND frame with one message. The bytes equal the result of `encode_append`. Returns the payload's
    parts and its size in bytes."""
    producer_id, stem = record.producer_id.encode(), record.stem.encode()
    flags, codes = _ONE, b""
    if record.wait_store_msg_ok:
        flags |= _WAITS
    if record.tag_code:
        flags |= _HAS_CODES
        codes = record.tag_code.to_bytes(8, "little", signed=True)
    head = _BATCH.pack(handle, record.size, 1, 0, record.sequence, record.counter, flags, len(producer_id), len(stem))
    size = _BATCH.size + len(codes) + len(producer_id) + len(stem) + record.size
    return [head, codes, producer_id, stem, *record.parts], size


def decode_append(payload: memoryview, count: int, handles: ServerHandles) -> list[EncodedBatch]:
    """Decode the batches of an APPEND frame. The batches' records are views of `payload`; everything else is copied.

    Raises ProtocolError if a handle is not open, and InvalidArgumentError if the payload is not an APPEND. The store
    later checks that records and sizes agree.
    """
    batches, at = [], 0
    if count == 1 and (one := _decode_one(payload, handles)) is not None:
        return [one]
    try:
        for _ in range(count):
            handle, length, records, epoch, first, first_id, flags, pid, stem = _BATCH.unpack_from(payload, at)
            at += _BATCH.size
            topic, queue_id = handles.get(handle)
            codes = _NO_CODE
            if flags & _HAS_CODES:
                codes = np.frombuffer(payload, _CODE, records, at).copy()
                at += 8 * records
            elif records != 1:
                if records > len(payload):
                    raise ValueError("the request has more records than bytes")
                codes = np.zeros(records, np.int64)
            if flags & _HAS_SIZES:
                sizes = np.frombuffer(payload, _SIZE, records, at).copy()
                at += 4 * records
            else:
                sizes = np.array((length,), np.int32)
            producer = None
            if flags & _HAS_PRODUCER:
                producer = ProducerSequence(bytes(payload[at : at + pid]).decode(), epoch, first)
            at += pid
            ids: Sequence[str] = ()
            if flags & _HAS_STEM:
                ids = IdRange(bytes(payload[at : at + stem]).decode(), first_id, records)
            at += stem
            end = at + length
            batches.append(
                EncodedBatch(topic, queue_id, payload[at:end], sizes, codes, producer, ids, bool(flags & _WAITS))
            )
            at = end
    except (struct.error, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"cannot decode an APPEND request: {error}") from None
    if at != len(payload):
        raise InvalidArgumentError(f"an APPEND request has {len(payload)} bytes, but its fields end at byte {at}")
    return batches


def _decode_one(payload: memoryview, handles: ServerHandles) -> EncodedBatch | None:
    """Decode an APPEND frame of one message with a producer sequence, an id stem (the message id without its last four
    digits) and no tag. This is the fast path for most single sends.

    Returns None for any other APPEND, and for an invalid payload.
    """
    if len(payload) < _BATCH.size:
        return None
    handle, length, records, epoch, first, first_id, flags, pid, stem = _BATCH.unpack_from(payload)
    at = _BATCH.size + pid
    start = at + stem
    if records != 1 or flags & ~_WAITS != _ONE or start + length != len(payload):
        return None
    topic, queue_id = handles.get(handle)
    try:
        producer_id, text = str(payload[_BATCH.size : at], "utf-8"), str(payload[at:start], "utf-8")
    except UnicodeDecodeError:
        return None
    sizes = np.empty(1, np.int32)
    sizes[0] = length
    return EncodedBatch(
        topic, queue_id, payload[start:], sizes, _NO_CODE, ProducerSequence(producer_id, epoch, first),
        IdRange(text, first_id, 1), bool(flags & _WAITS),
    )  # fmt: skip


def encode_results(results: Sequence[AppendResult]) -> list[bytes]:
    """Encode the answer to an APPEND frame as a list of payload parts."""
    if len(results) == 1:
        [result] = results
        if not result.duplicate and result.physical_offsets is None and result.queue_offsets is None:
            status = _STATUS_NUMBERS[result.status]
            return [_RESULT.pack(status, 0, 0, result.queue_offset, result.physical_offset, result.store_timestamp_ms)]
    heads, lists = [], []
    for result in results:
        flags, count = _DUPLICATE if result.duplicate else 0, 0
        for flag, offsets in ((_PHYSICAL_OFFSETS, result.physical_offsets), (_QUEUE_OFFSETS, result.queue_offsets)):
            if offsets is not None:
                flags, count = flags | flag, len(offsets)
                lists.append(np.array(offsets, _CODE).tobytes())
        heads.append(
            _RESULT.pack(
                _STATUS_NUMBERS[result.status],
                flags,
                count,
                result.queue_offset,
                result.physical_offset,
                result.store_timestamp_ms,
            )
        )
    return [b"".join(heads + lists)] if len(heads) + len(lists) > 1 else heads


def decode_result(payload: Buffer) -> AppendResult:
    """Decode the answer to an APPEND frame of one batch. The result equals the result of `decode_results`. This
    function is faster if the result has no flags."""
    if len(payload) == _RESULT.size:
        status, flags, _, queue_offset, physical_offset, store_ms = _RESULT.unpack(payload)
        if not flags and status < len(_STATUSES):
            return AppendResult(_STATUSES[status], queue_offset, physical_offset, store_ms)
    [result] = decode_results(payload, 1)
    return result


def decode_results(payload: Buffer, count: int) -> list[AppendResult]:
    """Decode the append results in the answer to an APPEND frame. Raises ServiceNotAvailableError if the payload is
    invalid."""
    try:
        rows = [_RESULT.unpack_from(payload, index * _RESULT.size) for index in range(count)]
        results, at = [], count * _RESULT.size
        for status, flags, number, queue_offset, physical_offset, store_ms in rows:
            if not flags:
                results.append(AppendResult(_STATUSES[status], queue_offset, physical_offset, store_ms))
                continue
            lists: list[tuple[int, ...] | None] = []
            for flag in (_PHYSICAL_OFFSETS, _QUEUE_OFFSETS):
                offsets = None
                if flags & flag:
                    offsets = tuple(np.frombuffer(payload, _CODE, number, at).tolist())
                    at += 8 * number
                lists.append(offsets)
            duplicate = bool(flags & _DUPLICATE)
            results.append(AppendResult(_STATUSES[status], queue_offset, physical_offset, store_ms, duplicate, *lists))
        return results
    except (struct.error, ValueError, IndexError) as error:
        raise ServiceNotAvailableError(f"cannot decode the answer to an APPEND request: {error}") from None
