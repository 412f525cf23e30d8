"""Payloads of FETCH and WAIT frames: queues with offsets in the request, and records or the queues' ends in the answer.

FETCH           | max bytes 8 | wait s 8 (double) | reads 4 | messages 4 | topics 4 |, then the topics, the requests,
                their tag codes, and their filter expressions:
    | length 2 | topic |
    | topic 4 | queue id 4 | queue offset 8 | max messages 8 | tag codes 4, -1 for all messages |
    | expression 4, its number from 1, 0 for all messages |                                                 32 bytes
    | tag codes 8 × their number |
    | length 4 | text |
                an end that does not know expressions refuses such a frame as too long
answer          the results, then the storage actors to go on at, then the records:
    | status 1 | zero 1 | actor's length 2 | count 4 | next offset 8 | first offset 8 | end 8 | records length 8 |
WAIT            | wait s 8 (double) | reads 4 | messages 4 | topics 4 |, then the topics, the queues, and their offsets:
    | topic 4 | queue id 4 |                                                                                 8 bytes
    | queue offset 8 |
                a client mostly waits for the same queues again: the queues' part of the payload is then unchanged
answer          the ends, then the storage actors to go on at:
    | first offset 8 | end 8 | actor's length 2 | zero 6 |                                                  24 bytes

`reads` and `messages` count what the client has read in the mapped files since its last report (ReadsInPlace). A
storage actor to go on at is the replica from which the client should read the queue next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from math import isnan
from typing import Final, NamedTuple

from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult, QueueEnds, ReadsInPlace
from raymq.remoting.lane.frames import Buffer

_FETCH: Final = struct.Struct("<qdIII")
_WAIT: Final = struct.Struct("<dII")
_TOPICS: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<H")
_REQUEST: Final = struct.Struct("<IiqqiI")
_TEXT_LENGTH: Final = struct.Struct("<I")
_RESULT: Final = struct.Struct("<BxHIqqqQ")
_QUEUE: Final = struct.Struct("<Ii")
_ENDS: Final = struct.Struct("<qqH6x")
NO_READS: Final = ReadsInPlace()
_COUNT_MAX: Final = (1 << 32) - 1
_STATUSES: Final = tuple(PullStatus)
_STATUS_NUMBERS: Final = {status: number for number, status in enumerate(_STATUSES)}


QueueName = tuple[str, int]
"""The name of a queue: its topic and queue id."""


class Fetch(NamedTuple):
    """The decoded payload of a FETCH frame."""

    requests: list[FetchRequest]
    max_bytes: int
    wait_s: float
    reads: ReadsInPlace = NO_READS


def _topics(names: Iterable[str]) -> tuple[dict[str, int], list[bytes]]:
    """Assign a number to each topic of a frame. Returns each topic's number, and the topics as the frame
    encodes them."""
    numbers: dict[str, int] = {}
    for name in names:
        numbers.setdefault(name, len(numbers))
    parts = []
    for name in numbers:
        data = name.encode()
        parts += [_LENGTH.pack(len(data)), data]
    return numbers, parts


def _read_topics(payload: memoryview, at: int, count: int) -> tuple[list[str], int]:
    """Decode `count` topics of a frame's payload from offset `at` on. Returns the topics and the offset after
    them."""
    topics = []
    for _ in range(count):
        [length] = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        topics.append(bytes(payload[at : at + length]).decode())
        at += length
    return topics, at


def _fitting(reads: ReadsInPlace) -> ReadsInPlace:
    return ReadsInPlace(min(reads.found, _COUNT_MAX), min(reads.messages, _COUNT_MAX))


def encode_fetch(
    requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, reads: ReadsInPlace = NO_READS
) -> bytes:
    """Encode the payload of a FETCH frame. Raises InvalidArgumentError if a number does not fit into its field."""
    numbers, parts = _topics([request.topic for request in requests])
    codes: list[bytes] = []
    expressions: dict[str, int] = {}
    try:
        parts.insert(0, _FETCH.pack(max_bytes, wait_s, *_fitting(reads), len(numbers)))
        for request in requests:
            tags = request.tag_codes
            parts.append(
                _REQUEST.pack(
                    numbers[request.topic],
                    request.queue_id,
                    request.queue_offset,
                    request.max_messages,
                    -1 if tags is None else len(tags),
                    0 if request.sql is None else expressions.setdefault(request.sql, len(expressions) + 1),
                )
            )
            if tags:
                codes.append(struct.pack(f"<{len(tags)}q", *tags))
    except struct.error as error:
        raise InvalidArgumentError(f"a number in a FETCH request is out of range: {error}") from None
    for expression in expressions:
        data = expression.encode()
        codes += [_TEXT_LENGTH.pack(len(data)), data]
    return b"".join(parts + codes)


def decode_fetch(payload: memoryview, count: int) -> Fetch:
    """Decode a FETCH frame of `count` requests. Raises InvalidArgumentError if the payload is not a FETCH."""
    try:
        max_bytes, wait_s, found, messages, topic_count = _FETCH.unpack_from(payload)
        topics, at = _read_topics(payload, _FETCH.size, topic_count)
        rows = list(_REQUEST.iter_unpack(payload[at : at + count * _REQUEST.size]))
        if len(rows) != count:
            raise ValueError("the list of queues is incomplete")
        at += count * _REQUEST.size
        tag_codes = []
        for *_, tags, _ in rows:
            tag_codes.append(None if tags < 0 else frozenset(struct.unpack_from(f"<{tags}q", payload, at)))
            at += 8 * max(tags, 0)
        expressions, at = _read_expressions(payload, at, max((row[-1] for row in rows), default=0))
        requests = [
            FetchRequest(topics[topic], queue_id, offset, max_messages, codes, expressions[expression])
            for (topic, queue_id, offset, max_messages, _, expression), codes in zip(rows, tag_codes, strict=True)
        ]
    except (struct.error, ValueError, IndexError) as error:
        raise InvalidArgumentError(f"cannot decode a FETCH request: {error}") from None
    if at != len(payload) or isnan(wait_s):
        raise InvalidArgumentError(f"a FETCH request has {len(payload)} bytes, but its fields end at byte {at}")
    return Fetch(requests, max_bytes, wait_s, ReadsInPlace(found, messages))


def _read_expressions(payload: memoryview, at: int, count: int) -> tuple[list[str | None], int]:
    """Decode the filter expressions of a FETCH frame. Returns a list in which expression i has index i, with None at
    index 0, and the payload offset after the expressions."""
    expressions: list[str | None] = [None]
    while len(expressions) <= count:
        [length] = _TEXT_LENGTH.unpack_from(payload, at)
        at += _TEXT_LENGTH.size
        expressions.append(bytes(payload[at : at + length]).decode())
        at += length
    return expressions, at


def encode_fetched(results: Sequence[FetchResult]) -> list[Buffer]:
    """Encode the answer to a FETCH frame as a list of payload parts."""
    names = [result.pull_from.encode() for result in results]
    heads = [
        _RESULT.pack(
            _STATUS_NUMBERS[result.status],
            len(name),
            result.count,
            result.next_offset,
            result.min_offset,
            result.max_offset,
            len(result.records),
        )
        for result, name in zip(results, names, strict=True)
    ]
    return [b"".join(heads + names), *[result.records for result in results if result.records]]


def decode_fetched(payload: memoryview, count: int) -> list[FetchResult]:
    """Decode the results in the answer to a FETCH, with copies of their records. Raises ServiceNotAvailableError if the
    payload is invalid."""
    try:
        rows = list(_RESULT.iter_unpack(payload[: count * _RESULT.size]))
        at = count * _RESULT.size
        names = []
        for row in rows:
            names.append(bytes(payload[at : at + row[1]]).decode())
            at += row[1]
        results = []
        for (status, _, number, next_offset, first, end, length), name in zip(rows, names, strict=True):
            records = bytes(payload[at : at + length])
            at += length
            results.append(FetchResult(_STATUSES[status], next_offset, first, end, records, number, name))
    except (struct.error, ValueError, IndexError) as error:
        raise ServiceNotAvailableError(f"cannot decode the answer to a FETCH request: {error}") from None
    if at != len(payload) or len(results) != count:
        raise ServiceNotAvailableError(
            f"the answer to a FETCH request has {len(payload)} bytes, but its fields end at byte {at}"
        )
    return results


def encode_queues(queues: Sequence[QueueName]) -> bytes:
    """Encode the part of a WAIT frame that contains the queues, by topic and queue id. Raises InvalidArgumentError if a
    queue id does not fit into its field."""
    numbers, parts = _topics([topic for topic, _ in queues])
    try:
        parts.insert(0, _TOPICS.pack(len(numbers)))
        parts += [_QUEUE.pack(numbers[topic], queue_id) for topic, queue_id in queues]
    except struct.error as error:
        raise InvalidArgumentError(f"a queue id in a WAIT request is out of range: {error}") from None
    return b"".join(parts)


def encode_wait(queues: bytes, offsets: Sequence[int], wait_s: float, reads: ReadsInPlace = NO_READS) -> bytes:
    """Encode the payload of a WAIT frame. `queues` is the result of `encode_queues`, and `offsets` has the offset of
    each queue.

    Raises InvalidArgumentError if a number does not fit into its field.
    """
    try:
        return _WAIT.pack(wait_s, *_fitting(reads)) + queues + struct.pack(f"<{len(offsets)}q", *offsets)
    except struct.error as error:
        raise InvalidArgumentError(f"a number in a WAIT request is out of range: {error}") from None


def decode_queues(part: bytes, count: int) -> list[QueueName]:
    """Decode the part of a WAIT frame that contains `count` queues. Raises InvalidArgumentError if the part is
    invalid."""
    try:
        [topic_count] = _TOPICS.unpack_from(part)
        topics, at = _read_topics(memoryview(part), _TOPICS.size, topic_count)
        queues = [(topics[topic], queue_id) for topic, queue_id in _QUEUE.iter_unpack(part[at:])]
    except (struct.error, ValueError, IndexError) as error:
        raise InvalidArgumentError(f"cannot decode a WAIT request: {error}") from None
    if len(queues) != count:
        raise InvalidArgumentError(f"a WAIT request for {count} queues lists {len(queues)} queues")
    return queues


def decode_wait(payload: memoryview, count: int) -> tuple[bytes, tuple[int, ...], float, ReadsInPlace]:
    """Decode a WAIT frame. Returns the part that contains its queues (for `decode_queues`), the queues' offsets and the
    maximum wait in s. Also returns the counts of the client's direct reads from mapped files.

    Raises InvalidArgumentError if the payload is not a WAIT.
    """
    offsets_at = len(payload) - 8 * count
    if offsets_at < _WAIT.size:
        raise InvalidArgumentError(f"a WAIT request for {count} queues has a wrong length of {len(payload)} bytes")
    wait_s, found, messages = _WAIT.unpack_from(payload)
    if isnan(wait_s):
        raise InvalidArgumentError("a WAIT request has no time limit")
    offsets = struct.unpack_from(f"<{count}q", payload, offsets_at)
    return bytes(payload[_WAIT.size : offsets_at]), offsets, wait_s, ReadsInPlace(found, messages)


def encode_ends(ends: Sequence[QueueEnds]) -> bytes:
    """Encode the first and end offsets of queues as the answer to a WAIT frame."""
    names = [one.pull_from.encode() if one.pull_from else b"" for one in ends]
    heads = [_ENDS.pack(one.min_offset, one.max_offset, len(name)) for one, name in zip(ends, names, strict=True)]
    return b"".join(heads + names)


def decode_ends(payload: memoryview, count: int) -> list[QueueEnds]:
    """Decode the first and end offsets of queues in the answer to a WAIT frame. Raises ServiceNotAvailableError if the
    payload is invalid."""
    try:
        at, ends = count * _ENDS.size, []
        for first, end, length in _ENDS.iter_unpack(payload[:at]):
            name = bytes(payload[at : at + length]).decode() if length else ""
            ends.append(QueueEnds(first, end, name))
            at += length
    except (struct.error, ValueError) as error:
        raise ServiceNotAvailableError(f"cannot decode the answer to a WAIT request: {error}") from None
    if at != len(payload) or len(ends) != count:
        raise ServiceNotAvailableError(
            f"the answer to a WAIT request has {len(payload)} bytes, but its fields end at byte {at}"
        )
    return ends
