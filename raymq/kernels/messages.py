"""Messages of many records, found and checked in one pass and decoded field by field when they are asked for.

`read_messages` says the same as `raymq.record.decode.decode_records`: the same messages, RecordError for the same
damage. All checks are made at once, for all records together; a field is then decoded each time it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.kernels.fields import FieldOffsets, find_fields
from raymq.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY, MessageExt
from raymq.record.compression import decompress
from raymq.record.crc import body_crcs
from raymq.record.decode import decode_record, split_keys, split_properties, store_host_of, topic_text
from raymq.record.layout import (
    SYS_FLAG_COMPRESSED,
    Buffer,
    HeaderFields,
    RecordError,
    decode_host,
    find_sections,
    unpack_header,
)

FEW_RECORDS: Final = 8
"""Up to so many records are decoded one by one: that is quicker than one pass of numpy over them."""


def read_messages(
    buffer: Buffer, starts: NDArray[np.int64], *, broker_name: str, check_crc: bool = True
) -> list[MessageExt]:
    """The messages whose records start at `starts` (in any order) of `buffer`, which they keep alive and which must not
    change. RecordError when a record is damaged or does not lie inside `buffer`."""
    if len(starts) <= FEW_RECORDS:
        return [decode_record(buffer, start, broker_name=broker_name, check_crc=check_crc) for start in starts.tolist()]
    view = memoryview(buffer)
    fields = find_fields(np.frombuffer(view, np.uint8), starts)
    body_ends = fields.body_at + fields.body_size
    if check_crc:
        _check_crcs(view, fields, body_ends)
    compressed = np.flatnonzero(fields.sys_flag & SYS_FLAG_COMPRESSED).tolist()
    if not compressed:
        source = StoredMessages(view, fields, body_ends, broker_name)
    else:
        bodies = {
            row: decompress(bytes(view[fields.body_at[row] : body_ends[row]]), int(fields.sys_flag[row]))
            for row in compressed
        }
        source = _CompressedMessages(view, fields, body_ends, broker_name, bodies)
    return MessageExt.of_source(source, range(len(starts)))


def _check_crcs(view: memoryview, fields: FieldOffsets, body_ends: NDArray[np.int64]) -> None:
    """RecordError if the CRC of a body, which is not checked if empty, is not the one in its header."""
    holds = body_crcs(view, fields.body_at, body_ends) == fields.head["body_crc"]
    if not holds.all():
        holds |= fields.body_size == 0
        if not holds.all():
            raise RecordError(f"the body's CRC is wrong in the record at byte {fields.starts[int(np.argmin(holds))]}")


class StoredMessages:
    """The source of the messages whose records lie at `fields` in `view`. No body is compressed."""

    __slots__ = ("_body_at", "_body_ends", "_broker_name", "_queue_offsets", "_split", "_starts", "_view")

    def __init__(self, view: memoryview, fields: FieldOffsets, body_ends: NDArray[np.int64], broker_name: str) -> None:
        self._view = view
        self._broker_name = broker_name
        self._starts: list[int] = fields.starts.tolist()
        self._body_at: list[int] = fields.body_at.tolist()
        self._body_ends: list[int] = body_ends.tolist()
        self._queue_offsets = fields.head["queue_offset"].astype(np.int64)
        self._split: tuple[int, dict[str, str], dict[str, str]] = (-1, {}, {})
        """The properties that were read last, with their message's index: a program mostly reads several fields of one
        message before it goes on to the next."""

    def body(self, index: int) -> bytes:
        return self._view[self._body_at[index] : self._body_ends[index]].tobytes()

    def queue_offset(self, index: int) -> int:
        return int(self._queue_offsets[index])

    def topic(self, index: int) -> str:
        _, _, topic_at, properties_at, _ = self._sections(index)
        return topic_text(bytes(self._view[topic_at : properties_at - 2]))

    def broker_name(self, index: int) -> str:
        return self._broker_name

    def queue_id(self, index: int) -> int:
        return self._header(index)[3]

    def flag(self, index: int) -> int:
        return self._header(index)[4]

    def physical_offset(self, index: int) -> int:
        return self._header(index)[6]

    def sys_flag(self, index: int) -> int:
        return self._header(index)[7]

    def born_timestamp_ms(self, index: int) -> int:
        return self._header(index)[8]

    def born_host(self, index: int) -> str:
        return decode_host(self._header(index)[9])

    def store_timestamp_ms(self, index: int) -> int:
        return self._header(index)[10]

    def store_host(self, index: int) -> str:
        return store_host_of(self._header(index)[11])[1]

    def reconsume_times(self, index: int) -> int:
        return self._header(index)[12]

    def offset_message_id(self, index: int) -> str:
        header = self._header(index)
        return f"{store_host_of(header[11])[0]}{header[6] & 0xFFFFFFFFFFFFFFFF:016X}"

    def tags(self, index: int) -> str | None:
        return self._properties(index)[1].get(PROPERTY_TAGS)

    def keys(self, index: int) -> tuple[str, ...]:
        return split_keys(self._properties(index)[1].get(PROPERTY_KEYS))

    def message_id(self, index: int) -> str:
        return self._properties(index)[1].get(PROPERTY_UNIQ_KEY) or self.offset_message_id(index)

    def properties(self, index: int) -> Mapping[str, str]:
        return self._properties(index)[0].copy()

    def system_properties(self, index: int) -> Mapping[str, str]:
        return self._properties(index)[1].copy()

    def _header(self, index: int) -> HeaderFields:
        return unpack_header(self._view, self._starts[index])

    def _sections(self, index: int) -> tuple[int, int, int, int, int]:
        return find_sections(self._view, self._starts[index], self._header(index))

    def _properties(self, index: int) -> tuple[dict[str, str], dict[str, str]]:
        """The user's and the reserved properties of a message."""
        known, user, system = self._split
        if known != index:
            _, _, _, properties_at, end = self._sections(index)
            user, system = split_properties(bytes(self._view[properties_at:end]))
            self._split = (index, user, system)
        return user, system


class _CompressedMessages(StoredMessages):
    """The source of messages of which some have compressed bodies: `bodies` are these decompressed, by index."""

    __slots__ = ("_bodies",)

    def __init__(
        self,
        view: memoryview,
        fields: FieldOffsets,
        body_ends: NDArray[np.int64],
        broker_name: str,
        bodies: dict[int, bytes],
    ) -> None:
        super().__init__(view, fields, body_ends, broker_name)
        self._bodies = bodies

    def body(self, index: int) -> bytes:
        body = self._bodies.get(index)
        return super().body(index) if body is None else body
