"""The messages of many records. The records are checked in one pass, and each field is decoded when it is read.

`read_messages` returns messages that equal the results of `raymq.records.format.decode.read_record` for each record.
All records are checked together. A field is decoded each time it is read, and a compressed body is decompressed when it
is read. So the messages of one poll hold at most CACHED_BYTES of decompressed bodies, in addition to the bodies that
the program keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import BodyUnreadableError
from raymq.common.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY, MessageExt, MessageQueue
from raymq.records.format.compression import decompress, decompress_prefix
from raymq.records.format.crc import body_crcs
from raymq.records.format.decode import CRC_WRONG, read_record, split_keys, split_properties, store_host_of, topic_text
from raymq.records.format.layout import (
    SYS_FLAG_COMPRESSED,
    Buffer,
    HeaderFields,
    RecordError,
    decode_host,
    find_sections,
    unpack_header,
)
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.fields import FieldOffsets, find_intact

FEW_RECORDS: Final = 8
"""Maximum number of records that are decoded one by one. For so few records, this is faster than one pass with
numpy."""
CACHED_BYTES: Final = 8 << 20
"""Maximum size, in bytes, of the decompressed bodies that the messages of one `read_messages` call cache. The cache
exists because programs often read a body twice."""

OnUnreadable = Callable[[BodyUnreadableError], None]
"""A function that receives the error of each unreadable message, once for each message."""


def ignore(error: BodyUnreadableError) -> None:
    """Do nothing with the error of an unreadable message. This is the OnUnreadable function of callers that need no
    report."""


_CACHE_LOCK: Final = threading.Lock()
"""Guards the cached bodies of all DoubtfulMessages objects. Each thread holds the lock only for a few
statements."""


def read_messages(
    buffer: Buffer,
    starts: NDArray[np.int64],
    *,
    broker_name: str,
    check_crc: bool = True,
    places: RecordPlaces | None = None,
    on_unreadable: OnUnreadable = ignore,
    keeps_bodies: bool = True,
) -> list[MessageExt]:
    """Return the messages of the records at positions `starts` (in any order) of `buffer`. The messages keep `buffer`
    alive, and its bytes must not change.

    Each start has a message, even if its record is damaged. If the body or the whole record is unreadable
    (`raymq.records.format.decode`), the message's `body_error` has the reason. `places`: the expected places of the
    records, with the same indices as `starts`. A record that does not agree with its place counts as damaged.
    `on_unreadable` is called once for each unreadable message when the damage is detected; for a compressed body, this
    is when the body is read.

    Without `keeps_bodies`, the messages never cache a decompressed body. This option is for programs that keep the
    messages of many calls.
    """
    known = RecordPlaces.unknown(broker_name) if places is None else places
    if len(starts) <= FEW_RECORDS and (keeps_bodies or not len(starts)):
        few = [
            read_record(buffer, start, known.place(row), check_crc=check_crc)
            for row, start in enumerate(starts.tolist())
        ]
        for message in few:
            if (error := message.body_error) is not None:
                on_unreadable(error)
        return few
    view = memoryview(buffer)
    fields, rows, damaged = find_intact(np.frombuffer(view, np.uint8), starts, places, check_crc=check_crc)
    body_ends = fields.body_at + fields.body_size
    wrong = _wrong_crcs(view, fields, body_ends) if check_crc else ()
    compressed = np.flatnonzero(fields.sys_flag & SYS_FLAG_COMPRESSED)
    if len(compressed) or len(wrong):
        reasons = dict.fromkeys(wrong, CRC_WRONG)
        doubtful = DoubtfulMessages(
            view, fields, body_ends, known.queue, compressed, reasons, on_unreadable, keeps_bodies
        )
        for index in wrong:
            doubtful.note(index)
        source: StoredMessages = doubtful
    else:
        source = StoredMessages(view, fields, body_ends, broker_name)
    messages = MessageExt.of_source(source, range(len(rows)))
    if not damaged:
        return messages
    for row, reason in sorted(damaged.items()):
        on_unreadable(known.place(row).error(reason))
    intact = iter(messages)
    return [known.place(row).damaged(damaged[row]) if row in damaged else next(intact) for row in range(len(starts))]


def find_unreadable(messages: Sequence[MessageExt]) -> dict[int, BodyUnreadableError]:
    """Return the errors of unreadable messages, by index, in ascending order.

    Reads only bodies that may be unreadable: compressed bodies are decompressed one after another.
    """
    errors: dict[int, BodyUnreadableError] = {}
    for index, message in enumerate(messages):
        if message._source.__class__ is not StoredMessages:
            error = message.body_error
            if error is not None:
                errors[index] = error
    return errors


def _wrong_crcs(view: memoryview, fields: FieldOffsets, body_ends: NDArray[np.int64]) -> Sequence[int]:
    """Return the indices of the records whose body does not match the CRC in the header. The CRC of an empty body is
    not checked."""
    holds = body_crcs(view, fields.body_at, body_ends) == fields.head["body_crc"]
    if holds.all():
        return ()
    wrong: list[int] = np.flatnonzero(~holds & (fields.body_size > 0)).tolist()
    return wrong


class StoredMessages:
    """Decodes the fields of messages from their records in `view`. MessageExt objects read their fields from this
    object. `fields`: the positions of the records' fields. No body is compressed or damaged."""

    __slots__ = ("_body_at", "_body_ends", "_broker_name", "_queue_offsets", "_split", "_starts", "_view")

    def __init__(self, view: memoryview, fields: FieldOffsets, body_ends: NDArray[np.int64], broker_name: str) -> None:
        self._view = view
        self._broker_name = broker_name
        self._starts: list[int] = fields.starts.tolist()
        self._body_at: list[int] = fields.body_at.tolist()
        self._body_ends: list[int] = body_ends.tolist()
        self._queue_offsets = fields.head["queue_offset"].astype(np.int64)
        self._split: tuple[int, dict[str, str], dict[str, str]] = (-1, {}, {})
        """The properties that were read last, with the index of their message. They are cached because most programs
        read several fields of one message before the next message."""

    def body(self, index: int) -> bytes:
        return self._view[self._body_at[index] : self._body_ends[index]].tobytes()

    def body_error(self, index: int) -> BodyUnreadableError | None:
        return None

    def body_prefix(self, index: int, max_bytes: int) -> bytes:
        start = self._body_at[index]
        return self._view[start : min(self._body_ends[index], start + max_bytes)].tobytes()

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
        """Return two maps: the user's properties and the reserved properties of a message."""
        known, user, system = self._split
        if known != index:
            _, _, _, properties_at, end = self._sections(index)
            user, system = split_properties(bytes(self._view[properties_at:end]))
            self._split = (index, user, system)
        return user, system


class DoubtfulMessages(StoredMessages):
    """Decodes the fields of messages from their records, if some bodies are compressed or unreadable. `compressed`: the
    indices of messages with compressed bodies. `reasons`: by message index, the reason why a body is unreadable.
    Thread-safe."""

    __slots__ = (
        "_bodies",
        "_cached_bytes",
        "_compressed",
        "_keeps_bodies",
        "_on_unreadable",
        "_queue",
        "_reasons",
    )

    def __init__(
        self,
        view: memoryview,
        fields: FieldOffsets,
        body_ends: NDArray[np.int64],
        queue: MessageQueue,
        compressed: NDArray[np.int64],
        reasons: dict[int, str],
        on_unreadable: OnUnreadable,
        keeps_bodies: bool,
    ) -> None:
        super().__init__(view, fields, body_ends, queue.broker_name)
        self._queue = queue
        self._compressed = dict(zip(compressed.tolist(), fields.sys_flag[compressed].tolist(), strict=True))
        """The sys flag of each message with a compressed body, by the message's index."""
        self._reasons = reasons
        self._on_unreadable = on_unreadable
        self._keeps_bodies = keeps_bodies
        self._bodies: dict[int, bytes] = {}
        """The most recently decompressed bodies, by message index: up to CACHED_BYTES in total, or one larger
        body."""
        self._cached_bytes = 0

    def note(self, index: int) -> None:
        """Pass the error of the unreadable message `index` to the callback `on_unreadable`."""
        self._on_unreadable(self._error(index, self._reasons[index]))

    def body(self, index: int) -> bytes:
        body = self._read(index)
        if isinstance(body, str):
            raise self._error(index, body)
        return body

    def body_error(self, index: int) -> BodyUnreadableError | None:
        body = self._read(index)
        return self._error(index, body) if isinstance(body, str) else None

    def body_prefix(self, index: int, max_bytes: int) -> bytes:
        reason = self._reasons.get(index)
        if reason is None and index not in self._compressed:
            return super().body_prefix(index, max_bytes)
        if reason is None:
            try:
                return decompress_prefix(super().body(index), self.sys_flag(index), max_bytes=max_bytes)
            except RecordError as error:
                reason = self._reasons[index] = error.reason
        raise self._error(index, reason)

    def _read(self, index: int) -> bytes | str:
        """Return the body of a message. If the body is unreadable, returns the reason as a str."""
        reason = self._reasons.get(index) if self._reasons else None
        if reason is not None:
            return reason
        sys_flag = self._compressed.get(index)
        if sys_flag is None:
            return super().body(index)
        body = self._bodies.get(index)
        if body is None:
            try:
                body = decompress(self._view[self._body_at[index] : self._body_ends[index]].tobytes(), sys_flag)
            except RecordError as error:
                if self._reasons.setdefault(index, error.reason) is error.reason:
                    self.note(index)
                return error.reason
            if not self._keeps_bodies:
                return body
            with _CACHE_LOCK:
                if self._cached_bytes + len(body) > CACHED_BYTES:
                    self._bodies, self._cached_bytes = {}, 0
                if index not in self._bodies:
                    self._bodies[index] = body
                    self._cached_bytes += len(body)
        return body

    def _error(self, index: int, reason: str) -> BodyUnreadableError:
        header, queue = self._header(index), self._queue
        if not queue.topic:
            queue = MessageQueue(self.topic(index), queue.broker_name, header[3])
        return BodyUnreadableError(str(queue), header[5], header[6], reason)
