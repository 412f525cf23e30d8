"""Encodes columns as the records of a batch, without a Python object per message.

`encode_columns` writes the same bytes as `raymq.records.format.encode.encode_batch`. Each part of the records is a
matrix of bytes, if it has the same length in all rows, or else a column of byte strings. All rows are joined at once:

    | header | body | topic, size of the properties | the row's own properties | UNIQ_KEY, identity, sequence |
      matrix   column            matrix                      column                         matrix
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.common.message import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_SEQUENCE,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
)
from raymq.records.format import layout
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.crc import PROPERTY_CRC_PLACEHOLDER, body_crcs, crc32
from raymq.records.format.encode import EncodedBatch, ProducerSequence, topic_part
from raymq.records.format.message_id import IDS_PER_MS, IdRange
from raymq.records.kernels.byte_column import ByteColumn
from raymq.records.kernels.fields import Bytes, Ints

_NO_COMPRESSION: Final = Compression()
_WAIT: Final = f"{PROPERTY_WAIT}\x01false\x02".encode()
_DIGITS: Final = 4
"""Number of digits per row in a table of all four-digit numbers. The encoder copies the digits of counters and the last
digits of sequence numbers from this table."""
_INT32_MAX: Final = 2**31 - 1


def encode_columns(
    topic: str,
    queue_id: int,
    bodies: pa.Array | Sequence[bytes] | ByteColumn,
    *,
    born_host: tuple[str, int],
    born_timestamp_ms: int,
    message_ids: Sequence[str],
    producer: ProducerSequence | None = None,
    properties: pa.Array | Sequence[bytes] | ByteColumn | None = None,
    tag_codes: NDArray[np.int64] | None = None,
    flags: int | NDArray[np.int32] = 0,
    compression: Compression = _NO_COMPRESSION,
    extra_properties: Mapping[str, str] | None = None,
    wait_store_msg_ok: bool = True,
    append_prop_crc: bool = False,
    reconsume_times: int = 0,
    store_host_ipv6: bool = False,
) -> EncodedBatch:
    """Encode rows as records of queue `queue_id` of `topic`. The bytes equal the result of `encode_batch` for equal
    messages.

    `bodies` and `properties` have a byte string per row, as Arrow columns of bytes or text (of any kind) or as lists;
    Arrow's buffers are read without a copy. `properties`: the row's own properties as on disk (name 0x01 value 0x02):
    the user's properties, TAGS, KEYS in this order. The caller has checked them. None if no row has properties.
    `tag_codes`: the hashes of the rows' TAGS, shape (n,); None if no row has tags. `flags`: one number for all rows, or
    one per row. If `wait_store_msg_ok` is False, each record has the property WAIT after its own properties.
    `message_ids`: encoding is fastest with an IdRange. Other arguments are as in `encode_batch`.

    The call needs several times the memory of the records, which must be less than 2 GiB: pass long columns in slices.
    Raises MessageIllegalError if the batch is empty, the number of ids differs from the number of rows, or a row's
    properties exceed 32767 bytes. Raises InvalidArgumentError if a column does not have byte strings, has nulls, or is
    too long.
    """
    bodies, own = ByteColumn.of(bodies), None if properties is None else ByteColumn.of(properties)
    rows = len(bodies)
    if not rows or rows != len(message_ids):
        raise MessageIllegalError(f"a batch of {rows} messages with {len(message_ids)} ids cannot be encoded")
    magic, topic_text = topic_part(topic)
    born, store = layout.encode_host(*born_host), bytes(layout.IPV6_HOST_BYTES if store_host_ipv6 else 8)
    host_bits = layout.SYS_FLAG_BORN_HOST_IPV6 if len(born) == layout.IPV6_HOST_BYTES else 0
    host_bits |= layout.SYS_FLAG_STORE_HOST_IPV6 if store_host_ipv6 else 0
    bodies, sys_flags = _compress(bodies, compression, host_bits)
    same = 0, magic, 0, queue_id, 0, 0, 0, host_bits, born_timestamp_ms, born, 0, store, reconsume_times, 0, 0
    header = layout.RecordHeader(*same).encode()
    shared = b"" if wait_store_msg_ok else _WAIT
    shared += layout.encode_properties(extra_properties) if extra_properties else b""
    unique = _unique_ids(message_ids)
    if unique is None:
        own, shared, unique = _with_ids(own, rows, shared, message_ids), b"", _UniqueIds(b"", 0, _no_columns(rows))
    endings = _endings(rows, shared, unique, producer, PROPERTY_CRC_PLACEHOLDER if append_prop_crc else b"")
    properties_sizes = _ending_sizes(endings) if own is None else _ending_sizes(endings) + own.sizes
    _check_properties(properties_sizes)
    body_sizes = bodies.sizes
    sizes = body_sizes + properties_sizes
    sizes += len(header) + len(topic_text) + 2
    if (total := int(sizes.sum())) > _INT32_MAX:
        raise InvalidArgumentError(f"records of {total} bytes are too many for one batch: encode fewer rows at a time")
    head = _Head(header, sizes, body_sizes, _crcs(bodies), flags, sys_flags)
    if own is None and len(endings) == 1 and (sizes == sizes[0]).all():
        records = _assemble_matrix(head, bodies, topic_text, endings[0])
    else:
        records = _join(head, bodies, topic_text, properties_sizes, own, endings)
    codes = np.zeros(rows, np.int64) if tag_codes is None else np.asarray(tag_codes, np.int64)
    ids = message_ids if isinstance(message_ids, IdRange) else tuple(message_ids)
    return EncodedBatch(topic, queue_id, records, sizes.astype(np.int32), codes, producer, ids, wait_store_msg_ok)


@dataclass(frozen=True, slots=True)
class _Head:
    """The headers of n records. `text`: the bytes that all headers share. The other fields are the header fields that
    differ, each of shape (n,), or one number for all records."""

    text: bytes
    sizes: Ints
    body_sizes: Ints
    crcs: NDArray[np.int32]
    flags: int | NDArray[np.int32]
    sys_flags: int | NDArray[np.int32]

    def write(self, target: Bytes) -> None:
        """Write the headers of the records into `target`, which has shape (n, len(text)) and may be a slice of a wider
        matrix."""
        target[:] = np.frombuffer(self.text, np.uint8)
        _put_ints(target, layout.TOTAL_SIZE_OFFSET, self.sizes)
        _put_ints(target, layout.BODY_CRC_OFFSET, self.crcs)
        _put_ints(target, len(self.text) - 4, self.body_sizes)
        if not isinstance(self.flags, int) or self.flags:
            _put_ints(target, layout.FLAG_OFFSET, self.flags)
        if not isinstance(self.sys_flags, int):
            _put_ints(target, layout.SYS_FLAG_OFFSET, self.sys_flags)


def _put_ints(target: Bytes, column: int, values: int | NDArray[np.signedinteger[Any]]) -> None:
    """Write a 4-byte big-endian number into each record's header. Row i of `target` is a header; the number begins at
    byte `column`."""
    target[:, column : column + 4].view(">i4")[:, 0] = values


@dataclass(frozen=True, slots=True)
class _UniqueIds:
    """The property UNIQ_KEY of n records. `text`: the property of one record. `digits`: the bytes that differ between
    the records, from column `at` on."""

    text: bytes
    at: int
    digits: Bytes


def _no_columns(rows: int) -> Bytes:
    return np.empty((rows, 0), np.uint8)


def _unique_ids(ids: Sequence[str]) -> _UniqueIds | None:
    """Return the unique ids as columns of bytes; None if the ids have different lengths."""
    name = f"{PROPERTY_UNIQ_KEY}\x01".encode()
    if isinstance(ids, IdRange):
        stem = ids.stem.encode()
        counters = _number_table("X")
        last = ids.first + len(ids)
        digits = counters[ids.first : last]
        if last > IDS_PER_MS:
            digits = np.concatenate((digits, counters[: last - IDS_PER_MS]))
        return _UniqueIds(name + stem + b"0000\x02", len(name) + len(stem), digits)
    if not any(ids):
        return _UniqueIds(b"", 0, _no_columns(len(ids)))
    text = "".join(ids).encode()
    width = len(ids[0])
    if len(text) != width * len(ids) or any(len(id) != width for id in ids):
        return None
    return _UniqueIds(name + bytes(width) + b"\x02", len(name), np.frombuffer(text, np.uint8).reshape(-1, width))


def _with_ids(own: ByteColumn | None, rows: int, shared: bytes, ids: Sequence[str]) -> ByteColumn:
    """Return the properties text of each row: the row's own properties, the `shared` properties, and the row's id as
    UNIQ_KEY. The lengths of the ids may differ. A row with an empty id gets no UNIQ_KEY."""
    texts = [f"{PROPERTY_UNIQ_KEY}\x01{id}\x02".encode() if id else b"" for id in ids]
    before = [b""] * rows if own is None else own.tolist()
    return ByteColumn.of([first + shared + text for first, text in zip(before, texts, strict=True)])


@dataclass(frozen=True, slots=True)
class _Ending:
    """The ending (last part) of the property texts of `count` consecutive records. `text`: the ending of one of these
    records. All endings have the same length. They differ only in the digits of unique ids and of sequence numbers."""

    count: int
    text: bytes
    ids_at: int
    id_digits: Bytes
    sequence_at: int
    sequence_digits: int
    first_sequence: int

    def write(self, target: Bytes) -> None:
        """Write the ending (last part) of each record's property text into `target`, one record per row. `target` has
        shape (count, len(text)) and may be a slice of a wider matrix."""
        target[:] = np.frombuffer(self.text, np.uint8)
        target[:, self.ids_at : self.ids_at + self.id_digits.shape[1]] = self.id_digits
        if self.sequence_digits:
            _put_decimals(target[:, self.sequence_at :][:, : self.sequence_digits], self.first_sequence)


def _endings(
    rows: int, shared: bytes, unique: _UniqueIds, producer: ProducerSequence | None, seal: bytes
) -> list[_Ending]:
    """Return the last parts (endings) of the rows' property texts, grouped into runs of equal length. A new run starts
    at the row whose sequence number has one more digit."""
    before = shared + unique.text
    ids_at = len(shared) + unique.at
    if producer is None:
        return [_Ending(rows, before + seal, ids_at, unique.digits, 0, 0, 0)]
    identity = {PROPERTY_PRODUCER_ID: producer.producer_id, PROPERTY_PRODUCER_EPOCH: str(producer.epoch)}
    before += layout.encode_properties(identity) + f"{PROPERTY_SEQUENCE}\x01".encode()
    endings: list[_Ending] = []
    done = 0
    while done < rows:
        first = producer.first_sequence + done
        width = len(str(first))
        count = min(rows - done, 10**width - first)
        text = before + b"0" * width + b"\x02" + seal
        digits = unique.digits[done : done + count]
        endings.append(_Ending(count, text, ids_at, digits, len(before), width, first))
        done += count
    return endings


@lru_cache(maxsize=2)
def _number_table(kind: str) -> Bytes:
    """Return a table with the digits of all four-digit numbers with leading zeros, shape (n, 4). `kind`: hexadecimal
    ("X", numbers below 16**4) or decimal ("d", numbers below 10**4)."""
    base = 16 if kind == "X" else 10
    symbols = np.frombuffer(b"0123456789ABCDEF", np.uint8)[:base]
    powers = base ** np.arange(_DIGITS - 1, -1, -1)
    table: Bytes = symbols[np.arange(base**_DIGITS)[:, None] // powers % base]
    return table


def _put_decimals(target: Bytes, first: int) -> None:
    """Write the decimal digits of `first`, `first` + 1 and so on into the rows of `target`. Each number must have
    exactly as many digits as `target` has columns."""
    rows, width = target.shape
    table = _number_table("d")
    done = 0
    # Copy the last four digits of each number from the table of digits. Up to 10,000 consecutive numbers have the same
    # digits before the last four. So one assignment writes these digits into the rows of all these numbers.
    while done < rows:
        upper, lower = divmod(first + done, len(table))
        count = min(rows - done, len(table) - lower)
        part = target[done : done + count]
        part[:, -_DIGITS:] = table[lower : lower + count, max(_DIGITS - width, 0) :]
        if width > _DIGITS:
            part[:, :-_DIGITS] = np.frombuffer(str(upper).encode(), np.uint8)
        done += count


def _compress(
    bodies: ByteColumn, compression: Compression, sys_flag: int
) -> tuple[ByteColumn, int | NDArray[np.int32]]:
    """Compress the bodies. Returns the bodies as they will be stored, and the records' sys flags: one number for all
    rows, or one per row."""
    if compression.type is CompressionType.NONE or not (bodies.sizes >= compression.threshold_bytes).any():
        return bodies, sys_flag
    stored = [compression.compress_body(body) for body in bodies.views()]
    if not any(bits for _, bits in stored):
        return bodies, sys_flag
    return ByteColumn.of_buffers([body for body, _ in stored]), np.array([sys_flag | b for _, b in stored], np.int32)


def _crcs(bodies: ByteColumn) -> NDArray[np.int32]:
    if bodies.values is None:
        return body_crcs(bodies.data.data, bodies.offsets[:-1], bodies.offsets[1:])
    crcs = np.fromiter(map(crc32, bodies.values), np.uint32, len(bodies))
    return (crcs & 0x7FFFFFFF).view(np.int32)


def _check_properties(sizes: Ints) -> None:
    if sizes.max() > MAX_PROPERTIES_BYTES:
        first = int(sizes[int(np.argmax(sizes > MAX_PROPERTIES_BYTES))])
        raise MessageIllegalError(
            f"a message's properties, tags and keys take {first} bytes; at most {MAX_PROPERTIES_BYTES} are allowed"
        )


def _assemble_matrix(head: _Head, bodies: ByteColumn, topic_text: bytes, ending: _Ending) -> memoryview:
    """Encode records of equal length: each record is a row of one byte matrix, and its parts are ranges of
    columns."""
    rows, size, body_size = len(bodies), int(head.sizes[0]), int(head.body_sizes[0])
    # Allocate the records' bytes with Arrow's allocator. It reuses memory, and so avoids page faults of new memory.
    buffer = pa.allocate_buffer(rows * size)
    matrix = np.frombuffer(buffer, np.uint8).reshape(rows, size)
    body_at = len(head.text)
    middle_at = body_at + body_size
    ending_at = size - len(ending.text)
    head.write(matrix[:, :body_at])
    matrix[:, body_at:middle_at] = bodies.data[bodies.offsets[0] : bodies.offsets[-1]].reshape(rows, body_size)
    matrix[:, middle_at:ending_at] = np.frombuffer(topic_text + len(ending.text).to_bytes(2), np.uint8)
    ending.write(matrix[:, ending_at:])
    return memoryview(buffer).cast("B")  # an Arrow buffer's memoryview has signed bytes, so cast it to unsigned bytes


def _join(
    head: _Head,
    bodies: ByteColumn,
    topic_text: bytes,
    properties_sizes: Ints,
    own: ByteColumn | None,
    endings: Sequence[_Ending],
) -> memoryview:
    """Encode records of different lengths. Each part of the records is a column of byte strings; the columns are joined
    row by row."""
    rows, width = len(bodies), len(topic_text) + 2
    heads = np.empty((rows, len(head.text)), np.uint8)
    head.write(heads)
    middles = np.empty((rows, width), np.uint8)
    middles[:] = np.frombuffer(topic_text + b"\0\0", np.uint8)
    middles[:, -2:] = properties_sizes.astype(">u2").view(np.uint8).reshape(-1, 2)
    columns = [ByteColumn.of_matrix(heads), bodies, ByteColumn.of_matrix(middles)]
    columns += [] if own is None else [own]
    columns.append(_ending_column(endings))
    return ByteColumn.joined(columns).data.data


def _ending_sizes(endings: Sequence[_Ending]) -> Ints:
    """Return the length in bytes of the ending (last part) of each row's property text. The result has shape (n,), or
    shape (1,) if all rows have the same ending length."""
    if len(endings) == 1:
        return np.array([len(endings[0].text)])
    return np.repeat([len(ending.text) for ending in endings], [ending.count for ending in endings])


def _ending_column(endings: Sequence[_Ending]) -> ByteColumn:
    """Return one column that holds, for each record, the ending (last part) of the record's property text."""
    if len(endings) == 1:
        matrix = np.empty((endings[0].count, len(endings[0].text)), np.uint8)
        endings[0].write(matrix)
        return ByteColumn.of_matrix(matrix)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(_ending_sizes(endings))))
    data = np.empty(int(offsets[-1]), np.uint8)
    at = 0
    for ending in endings:
        end = at + ending.count * len(ending.text)
        ending.write(data[at:end].reshape(ending.count, len(ending.text)))
        at = end
    return ByteColumn(data, offsets)
