"""Payloads of READ_LOG, APPEND_LOG and ACK_LOG frames, which carry chunks of a store's log from a master to a slave.

READ_LOG        | follower 4 | learner 1 | length 1 | zero 2 | epoch 8 | next offset 8 | acked offset 8 | min bytes 8
                | max bytes 8 | wait s 8 (double) | id of the follower's store |            56 bytes, then the id
answer          a chunk: | physical offset 8 | confirm offset 8 | end offset 8 | epoch 8 | start of the epoch 8 |
                | length of the hole 4 |              epoch 0: the records have none                  44 bytes
                | the hole, as JSON: {"reason": TEXT, "units": [[topic, queue id, …], …], "left": BYTES} | if length > 0
                | the log's bytes: records, or a part of the hole's bytes, of which `left` more follow |
APPEND_LOG      | epoch 8 | a chunk |

answer          | next offset 8 | acked offset 8 | copied bytes 8 |

An ACK_LOG has the payload of a READ_LOG, but requests no bytes. After an ACK_LOG, a waiting READ_LOG of the same
follower is answered as soon as one byte is available, instead of its min bytes.

A hole is a damaged range of the log that the store keeps. The thread that carries chunks between the lanes of master
and slave forwards a chunk unchanged, and decodes only the chunk's head.
"""

from __future__ import annotations

import json
import struct
from math import isnan
from typing import Final, NamedTuple

from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.protocol.store import HoleCopy, HoleUnit
from raymq.remoting.lane.frames import Buffer

_READ: Final = struct.Struct("<iBB2xqqqqqd")
_CHUNK: Final = struct.Struct("<qqqqqI")
_EPOCH: Final = struct.Struct("<q")
_COPIED: Final = struct.Struct("<qqq")


class ReadLog(NamedTuple):
    """The payload of a READ_LOG or ACK_LOG frame. Offsets are physical. The follower has everything before
    `acked_offset` on its disk.

    The master answers a READ_LOG when the log has `min_bytes` more bytes, or after `wait_s` seconds. The answer has
    about `max_bytes` of the log.
    """

    follower: int
    store_id: str
    learner: bool
    epoch: int
    next_offset: int
    acked_offset: int
    min_bytes: int = 1
    max_bytes: int = 0
    wait_s: float = 0.0


class ChunkHead(NamedTuple):
    """The head of a log chunk, before the log's bytes. `entry`: (epoch of the chunk's records, first offset of this
    epoch), or None if the records have no epoch.

    `hole`: the damaged range (hole) of the master's log to which the chunk's bytes belong; None for intact records.
    """

    physical_offset: int
    confirm_offset: int
    end_offset: int
    entry: tuple[int, int] | None
    hole: HoleCopy | None = None


def encode_read_log(request: ReadLog) -> bytes:
    """Encode a READ_LOG or an ACK_LOG frame. Raises InvalidArgumentError if a number does not fit into its
    field."""
    store_id = request.store_id.encode()
    try:
        head = _READ.pack(
            request.follower,
            request.learner,
            len(store_id),
            request.epoch,
            request.next_offset,
            request.acked_offset,
            request.min_bytes,
            request.max_bytes,
            request.wait_s,
        )
    except struct.error as error:
        raise InvalidArgumentError(f"a number in a READ_LOG request is out of range: {error}") from None
    return head + store_id


def decode_read_log(payload: memoryview) -> ReadLog:
    """Decode a READ_LOG or an ACK_LOG frame. Raises InvalidArgumentError for any other payload."""
    try:
        follower, learner, length, epoch, next_offset, acked, least, most, wait_s = _READ.unpack_from(payload)
        store_id = bytes(payload[_READ.size :]).decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot decode a READ_LOG request: {error}") from None
    if len(payload) != _READ.size + length or isnan(wait_s):
        raise InvalidArgumentError(f"a READ_LOG request of {len(payload)} bytes has an id of {length} bytes")
    return ReadLog(follower, store_id, bool(learner), epoch, next_offset, acked, least, most, wait_s)


def encode_chunk_head(head: ChunkHead) -> bytes:
    """Encode the head of a log chunk, which is the answer to a READ_LOG. The log's bytes follow the head."""
    hole = b"" if head.hole is None else _encode_hole(head.hole)
    offsets = head.physical_offset, head.confirm_offset, head.end_offset
    return _CHUNK.pack(*offsets, *(head.entry or (0, 0)), len(hole)) + hole


def decode_chunk(payload: memoryview) -> tuple[ChunkHead, memoryview]:
    """Decode a log chunk, the answer to a READ_LOG, into its head and a view of the log's bytes. Raises
    ServiceNotAvailableError if the payload is invalid."""
    try:
        physical_offset, confirm, end, epoch, start, hole_size = _CHUNK.unpack_from(payload)
        data_at = _CHUNK.size + hole_size
        hole = _decode_hole(payload[_CHUNK.size : data_at]) if hole_size else None
    except (struct.error, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ServiceNotAvailableError(f"cannot decode a chunk of a log: {error}") from None
    return ChunkHead(physical_offset, confirm, end, (epoch, start) if epoch else None, hole), payload[data_at:]


def _encode_hole(hole: HoleCopy) -> bytes:
    return json.dumps({"reason": hole.reason, "units": hole.units, "left": hole.left}).encode()


def _decode_hole(text: memoryview) -> HoleCopy:
    fields = json.loads(bytes(text))
    units = [HoleUnit(str(topic), *map(int, rest)) for topic, *rest in fields["units"]]
    return HoleCopy(str(fields["reason"]), tuple(units), int(fields["left"]))


def encode_append_log(epoch: int) -> bytes:
    """Encode the first bytes of an APPEND_LOG frame. The answer to a READ_LOG follows them unchanged."""
    return _EPOCH.pack(epoch)


def decode_append_log(payload: memoryview) -> tuple[int, ChunkHead, memoryview]:
    """Decode an APPEND_LOG frame into its epoch, the log chunk's head, and a view of the chunk's bytes. Raises
    InvalidArgumentError if the payload is invalid."""
    try:
        [epoch] = _EPOCH.unpack_from(payload)
        head, data = decode_chunk(payload[_EPOCH.size :])
    except (struct.error, ServiceNotAvailableError) as error:
        raise InvalidArgumentError(f"cannot decode an APPEND_LOG request: {error}") from None
    return epoch, head, data


def encode_copied(next_offset: int, acked_offset: int, copied_bytes: int) -> bytes:
    """Encode a slave's answer to an APPEND_LOG: next offset, acked offset, copied bytes."""
    return _COPIED.pack(next_offset, acked_offset, copied_bytes)


def decode_copied(payload: Buffer) -> tuple[int, int, int]:
    """Decode the answer to an APPEND_LOG: next offset, acked offset, copied bytes. Raises ServiceNotAvailableError if
    the payload is invalid."""
    if len(payload) != _COPIED.size:
        raise ServiceNotAvailableError(
            f"the answer to an APPEND_LOG request has a wrong length of {len(payload)} bytes"
        )
    return _COPIED.unpack(payload)
