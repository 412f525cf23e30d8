"""Tests of damaged records and of bodies with wrong compression flags: intact messages are returned once and in order,
and each unreadable message becomes an error at its offset."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from collections.abc import Callable

import lz4.frame
import numpy as np
import pytest
import zstandard

from raymq.common.errors import BodyUnreadableError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, Message, MessageQueue
from raymq.records.format.compression import DECOMPRESSED_MAX_BYTES, CompressionType, compress
from raymq.records.format.crc import body_crc
from raymq.records.format.encode import encode_batch
from raymq.records.format.layout import BODY_CRC_OFFSET, BODY_OFFSET, SYS_FLAG_OFFSET, encode_host
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.columns import decode_columns
from raymq.records.kernels.messages import FEW_RECORDS, find_unreadable, read_messages
from raymq.records.kernels.stamp import stamp

QUEUE = MessageQueue("orders", "a", 5)
POSITION = 1 << 33
NAMES = ["topic", "broker_name", "queue_id", "queue_offset", "tags", "body", "body_size", "error", "message_id"]
ZLIB, LZ4, ZSTD = 0x301, 0x101, 0x201


def stored(bodies: list[bytes], lies: dict[int, int] | None = None, *, sealed: bool = False) -> LocatedRecords:
    """Return one record per body, at queue offsets from 40 on.

    `lies`: for uncompressed bodies that are marked as compressed, the sys flag by body index. `sealed`: whether the
    records have a property CRC.
    """
    messages = [Message("orders", body, tags=f"t{number}") for number, body in enumerate(bodies)]
    ids = [f"{index:032X}" for index in range(len(bodies))]
    born = {"born_host": ("10.0.0.1", 4711), "born_timestamp_ms": 1700000000000}
    batch = encode_batch(messages, 5, **born, message_ids=ids, append_prop_crc=sealed)
    data = bytearray(batch.records)
    stamp(
        data,
        batch.sizes,
        first_queue_offset=40,
        first_physical_offset=POSITION,
        store_timestamp_ms=1700000000123,
        store_host=encode_host("10.0.0.9", 10911),
    )
    located = LocatedRecords.read(bytes(data))
    for row, flag in (lies or {}).items():
        at = int(located.starts[row]) + SYS_FLAG_OFFSET
        data[at : at + 4] = flag.to_bytes(4, "big")
    return located._replace(data=bytes(data), position=POSITION)


def changed(located: LocatedRecords, row: int, change: Callable[[bytearray, int], None]) -> LocatedRecords:
    data = bytearray(located.data)
    change(data, int(located.starts[row]))
    return located._replace(data=bytes(data))


def flip(offset: int) -> Callable[[bytearray, int], None]:
    """Return a function that flips a bit at `offset` in a record."""

    def change(data: bytearray, start: int) -> None:
        data[start + offset] ^= 1

    return change


def check(located: LocatedRecords, bad: dict[int, bool], bodies: list[bytes]) -> None:
    """Read the records as messages and as columns, and check that exactly the rows in `bad` are unreadable.

    `bad` maps a row to True if its record is damaged, or to False if only its body is unreadable.
    """
    places = RecordPlaces.of(QUEUE, located)
    told: list[BodyUnreadableError] = []
    messages = read_messages(located.data, located.starts, broker_name="a", places=places, on_unreadable=told.append)
    assert [message.queue_offset for message in messages] == list(range(40, 40 + len(bodies)))
    assert {row: error.record_damaged for row, error in find_unreadable(messages).items()} == bad
    assert sorted(error.queue_offset for error in told) == sorted(40 + row for row in bad)
    for row, message in enumerate(messages):
        if row not in bad:
            assert (message.body, message.tags, message.queue) == (bodies[row], f"t{row}", QUEUE)
            continue
        with pytest.raises(BodyUnreadableError) as raised:
            _ = message.body
        error = raised.value
        assert (error.queue, error.queue_offset) == (str(QUEUE), 40 + row)
        assert error.physical_offset == int(located.starts[row]) + POSITION
        assert "byte" not in error.reason.replace("bytes", "")
        assert (message.queue, message.record_damaged) == (QUEUE, bad[row])
        assert message.tags == (None if bad[row] else f"t{row}")
    for body_type in ("binary", "large_binary", "binary_view"):
        batch = decode_columns(
            *(located.data, located.starts),
            broker_name="a",
            body_type=body_type,
            check_crc=True,
            columns=NAMES,
            places=places,
        )
        batch.validate(full=True)
        for row, (values, message) in enumerate(zip(batch.to_pylist(), messages, strict=True)):
            assert (values["topic"], values["broker_name"], values["queue_id"]) == ("orders", "a", 5)
            assert values["queue_offset"] == 40 + row
            assert values["body"] == (None if row in bad else bodies[row])
            assert values["body_size"] == (None if row in bad else len(bodies[row]))
            assert (values["error"] is None) == (row not in bad)
            if bad.get(row) is False:
                assert values["error"] == message.body_error.reason
            assert values["tags"] == message.tags
    if bad:
        with pytest.raises(BodyUnreadableError) as raised:
            decode_columns(
                *(located.data, located.starts), broker_name="a", check_crc=True, places=places, unreadable="raise"
            )
        first = messages[min(bad)].body_error
        assert raised.value.args[:3] == first.args[:3]
        assert raised.value.record_damaged == first.record_damaged


def stream(size: int) -> bytes:
    """Return a Zstandard frame of `size` zero bytes. The frame's header does not state the size."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return b"".join(compressor.compress(bytes(1 << 20)) for _ in range(size >> 20)) + compressor.flush()


def header_of_4_gib() -> bytes:
    """Return a Zstandard frame that states a content of 4 GiB in its header, but has less content."""
    frame = zstandard.ZstdCompressor(level=19).compressobj(size=4 << 30)
    return frame.compress(bytes(1 << 20)) + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


BOMB = bytes(MAX_MESSAGE_SIZE_BYTES + 1)
LIES = {
    "no zlib": (b"garbage", ZLIB),
    "no lz4": (b"garbage", LZ4),
    "no zstd": (b"\x28\xb5\x2f\xfdgarbage", ZSTD),
    "unknown type": (b"garbage", 0x701),
    "zlib bomb": (zlib.compress(BOMB), ZLIB),
    "lz4 bomb": (lz4.frame.compress(BOMB), LZ4),
    "zstd bomb": (compress(BOMB, CompressionType.ZSTD), ZSTD),
    "zstd stream": (stream(64 << 20), ZSTD),
    "zstd header": (header_of_4_gib(), ZSTD),
    "zlib with more behind": (zlib.compress(b"x") + b"more", ZLIB),
    "zlib that is cut": (zlib.compress(b"x" * 100)[:-5], ZLIB),
}


@pytest.mark.parametrize("count", [FEW_RECORDS, 6 * FEW_RECORDS])
@pytest.mark.parametrize("lie", LIES)
def test_a_body_that_lies_is_its_own_message_s_trouble(count: int, lie: str) -> None:
    body, flag = LIES[lie]
    bodies = [b"body %d" % number for number in range(count)]
    bodies[3] = body
    check(stored(bodies, {3: flag}), {3: False}, bodies)


@pytest.mark.parametrize("type", [CompressionType.ZLIB, CompressionType.LZ4, CompressionType.ZSTD])
def test_the_largest_legal_body_is_read(type: CompressionType) -> None:
    largest = bytes(MAX_MESSAGE_SIZE_BYTES)
    bodies = [b"before", compress(largest, type), b"after"]
    check(stored(bodies, {1: 1 | type}), {}, [b"before", largest, b"after"])


FLIPS = {
    "size": (3, True),
    "magic": (5, True),
    "queue id": (15, True),
    "queue offset": (27, True),
    "physical offset": (35, True),
    "body's size": (87, True),
    "body": (88, False),
    "topic's length": (88 + 6, True),
    "topic": (88 + 6 + 1 + 3, True),
    "properties' length": (88 + 6 + 1 + 6 + 1, True),
}


@pytest.mark.parametrize("count", [FEW_RECORDS, 200])
@pytest.mark.parametrize("field", FLIPS)
@pytest.mark.parametrize("row", [0, 3, -1])
def test_a_flipped_bit_is_its_own_message_s_trouble(count: int, field: str, row: int) -> None:
    offset, damaged = FLIPS[field]
    bodies = [b"%06d" % number for number in range(count)]
    row %= count
    check(changed(stored(bodies), row, flip(offset)), {row: damaged}, bodies)


@pytest.mark.parametrize("count", [FEW_RECORDS, 70])
def test_a_property_crc_finds_a_flipped_bit_of_any_byte(count: int) -> None:
    """A property CRC detects a flipped bit in any byte of a record. Damage to the body alone is recognised by the
    body's own CRC, so the message keeps its other fields."""
    bodies = [b"%06d" % number for number in range(count)]
    located = stored(bodies, sealed=True)
    check(located, {}, bodies)
    for offset in range(int(located.sizes[3])):
        in_body = BODY_OFFSET <= offset < BODY_OFFSET + 6
        of_crc = BODY_CRC_OFFSET <= offset < BODY_CRC_OFFSET + 4
        check(changed(located, 3, flip(offset)), {3: not (in_body or of_crc)}, bodies)


@pytest.mark.parametrize("count", [1, FEW_RECORDS, 200])
def test_all_messages_may_be_unreadable(count: int) -> None:
    bodies = [b"%06d" % number for number in range(count)]
    located = stored(bodies)
    for row in range(count):
        located = changed(located, row, flip((5, 88)[row % 2]))
    check(located, {row: row % 2 == 0 for row in range(count)}, bodies)


def test_intact_messages_are_always_delivered_in_order_and_once() -> None:
    """Intact messages are always delivered once and in order, even if random bits of other records are flipped. No flip
    changes the positions of the records."""
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(60):
        count = chance.choice([2, FEW_RECORDS, 30, 100])
        bodies = [b"%06d" % number * chance.randint(1, 9) for number in range(count)]
        located = stored(bodies)
        touched = set(chance.sample(range(count), chance.randint(1, max(1, count // 4))))
        data = bytearray(located.data)
        for row in touched:
            start, size = int(located.starts[row]), int(located.sizes[row])
            for _ in range(chance.randint(1, 3)):
                data[start + chance.randrange(size)] ^= 1 << chance.randrange(8)
        located = located._replace(data=bytes(data))
        places = RecordPlaces.of(QUEUE, located)
        messages = read_messages(located.data, located.starts, broker_name="a", places=places)
        batch = decode_columns(
            *(located.data, located.starts),
            broker_name="a",
            check_crc=True,
            places=places,
            columns=["queue_offset", "body"],
        )
        offsets = list(range(40, 40 + count))
        assert [message.queue_offset for message in messages] == batch.column("queue_offset").to_pylist() == offsets
        found = batch.column("body").to_pylist()
        for row in set(range(count)) - touched:
            assert messages[row].body == found[row] == bodies[row]
        for row in touched:
            assert found[row] in (None, bodies[row])
            assert (messages[row].body_error is None) == (found[row] is not None)


def test_a_batch_ends_before_its_decompressed_bodies_exceed_the_budget() -> None:
    mib = compress(bytes(1 << 20), CompressionType.ZSTD)
    bodies = [b"plain", mib, b"\x28\xb5\x2f\xfdno", mib, mib, b"last"]
    located = stored(bodies, dict.fromkeys((1, 2, 3, 4), ZSTD))
    located = changed(located, 5, flip(5))
    places, rows, first = RecordPlaces.of(QUEUE, located), [], 0
    while first < len(bodies):
        batch = decode_columns(
            located.data,
            located.starts[first:],
            broker_name="a",
            check_crc=True,
            places=places.pick(slice(first, None)),
            columns=["queue_offset", "body"],
            max_decompressed_bytes=(2 << 20) + 1,
        )
        rows.append(batch.column("queue_offset").to_pylist())
        first += batch.num_rows
    assert rows == [[40, 41, 42, 43], [44, 45]]
    one = decode_columns(located.data, located.starts[1:], broker_name="a", max_decompressed_bytes=1)
    assert one.num_rows == 2, "one that exceeds the budget comes alone, with those that need nothing of it"
    sizes = decode_columns(
        located.data, located.starts, broker_name="a", columns=["body_size"], max_decompressed_bytes=1
    )
    assert sizes.num_rows == 6, "no body is kept for its size"


MEMORY = """
import resource
from raymq.records.kernels.columns import decode_columns
from raymq.records.kernels.messages import find_unreadable, read_messages
from raymq.records.format.compression import DECOMPRESSED_MAX_BYTES, CompressionType, compress
from tests.unit.raymq.records.kernels.test_unreadable import stored, ZSTD

bomb, largest = compress(bytes(60 << 20), CompressionType.ZSTD), compress(bytes(4 << 20), CompressionType.ZSTD)
located = stored([bomb, largest] * 60, dict.fromkeys(range(120), ZSTD))
decode_columns(located.data, located.starts[:1], broker_name="a")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for body_type in ("binary_view", "binary"):
    first = 0
    while first < 120:
        batch = decode_columns(located.data, located.starts[first:], broker_name="a", body_type=body_type,
                               max_decompressed_bytes=DECOMPRESSED_MAX_BYTES)
        first += batch.num_rows
        assert batch.column("body").null_count >= batch.num_rows // 2
messages = read_messages(located.data, located.starts, broker_name="a")
assert sum(len(message.body) for message in messages if message.body_error is None) == 60 * (4 << 20)
assert len(find_unreadable(messages)) == 60
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_sixty_bombs_and_sixty_largest_bodies_take_bounded_memory() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    grown_mib = int(done.stdout) >> 10
    assert grown_mib <= 3 * (DECOMPRESSED_MAX_BYTES >> 20) + 8


def test_a_message_that_cannot_be_read_is_shown_compared_copied_and_pickled() -> None:
    import copy
    import pickle

    bodies = [b"%06d" % number for number in range(20)]
    located = changed(changed(stored(bodies), 3, flip(88)), 4, flip(5))
    messages = read_messages(located.data, located.starts, broker_name="a", places=RecordPlaces.of(QUEUE, located))
    for message in messages[3:5]:
        for same in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
            assert same == message
            assert repr(same) == repr(message)
            assert same.body_error == message.body_error
            with pytest.raises(BodyUnreadableError):
                _ = same.body
    assert messages[3] != messages[4]
    assert messages[3] != messages[2]


def test_a_wrong_crc_in_the_header_is_a_wrong_body() -> None:
    located = stored([b"abcdef"] * 30)
    wrong = changed(located, 2, flip(BODY_CRC_OFFSET + 3))
    assert body_crc(b"abcdef") != 0
    check(wrong, {2: False}, [b"abcdef"] * 30)


def test_starts_may_be_in_any_order() -> None:
    bodies = [b"%06d" % number for number in range(100)]
    located = changed(stored(bodies), 7, flip(5))
    rows = np.random.default_rng(5).permutation(100)
    places = RecordPlaces.of(QUEUE, located).pick(rows)
    messages = read_messages(located.data, located.starts[rows], broker_name="a", places=places)
    assert [message.queue_offset - 40 for message in messages] == rows.tolist()
    assert [message.queue_offset for message in messages if message.record_damaged] == [47]
