"""Tests of decoding records to Arrow columns. The values equal the values that are decoded row by row, on the fast path
and on the general path."""

from __future__ import annotations

import pickle
import struct
from datetime import UTC, datetime
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

import raymq.records.kernels.column_bodies
import raymq.records.kernels.columns
import raymq.records.kernels.templates
from raymq.common.errors import BodyUnreadableError, InvalidArgumentError
from raymq.common.message import Message
from raymq.records.format.check import record_starts
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.crc import body_crc
from raymq.records.format.decode import decode_record
from raymq.records.format.encode import ProducerSequence, encode_batch
from raymq.records.format.layout import BODY_OFFSET, RECONSUME_TIMES_OFFSET, RecordError, encode_host
from raymq.records.kernels.columns import SCHEMA, BodyType, decode_columns
from raymq.records.kernels.stamp import stamp
from tests.support.cases import check_all


def stored(
    messages: list[Message],
    *,
    ids: list[str] | None = None,
    born_ip: str = "10.0.0.1",
    store_ip: str = "10.0.0.9",
    producer: ProducerSequence | None = None,
    compression: CompressionType = CompressionType.NONE,
) -> bytes:
    batch = encode_batch(
        messages,
        5,
        born_host=(born_ip, 4711),
        born_timestamp_ms=1700000000000,
        message_ids=ids or [f"{index:032X}" for index in range(len(messages))],
        producer=producer,
        compression=Compression(compression, threshold_bytes=64),
        store_host_ipv6=":" in store_ip,
    )
    records = bytearray(batch.records)
    stamp(
        records,
        batch.sizes,
        first_queue_offset=40,
        first_physical_offset=1 << 33,
        store_timestamp_ms=1700000000123,
        store_host=encode_host(store_ip, 10911),
    )
    return bytes(records)


def foreign(properties: bytes, *, topic: bytes = b"orders", body: bytes = b"a body of some length") -> bytes:
    """Return a record with the given property bytes, as software other than raymq may write it."""
    head = struct.pack(">iiiiqqiq8sq8siq", -626843481, body_crc(body), 5, 0, 1, 2, 0, 3, b"\1" * 8, 4, b"\2" * 8, 0, 0)
    rest = struct.pack(">i", len(body)) + body + bytes([len(topic)]) + topic + struct.pack(">h", len(properties))
    return struct.pack(">i", 4 + len(head) + len(rest) + len(properties)) + head + rest + properties


def assert_columns_are_the_rows(data: bytes, starts: NDArray[np.int64] | None = None) -> pa.RecordBatch:
    """Check that decoding records as columns gives the values of decoding them row by row, for all body types. Returns
    the columns."""
    starts = record_starts(data) if starts is None else starts
    types: tuple[BodyType, ...] = ("binary", "large_binary", "binary_view")
    for body_type in types:
        batch = decode_columns(data, starts, broker_name="broker-a", body_type=body_type)
        batch.validate(full=True)
        assert batch.schema.names == SCHEMA.names
        assert str(batch.schema.field("body").type) == body_type
        rows = batch.to_pylist()
        messages = [decode_record(data, start, broker_name="broker-a") for start in starts.tolist()]
        for row, message in zip(rows, messages, strict=True):
            assert row == {
                "topic": message.topic,
                "broker_name": "broker-a",
                "queue_id": message.queue_id,
                "queue_offset": message.queue_offset,
                "tags": message.tags,
                "keys": list(message.keys),
                "body": message.body,
                "properties": row["properties"],
                "born_timestamp": datetime.fromtimestamp(message.born_timestamp_ms / 1000, UTC),
                "store_timestamp": datetime.fromtimestamp(message.store_timestamp_ms / 1000, UTC),
                "message_id": message.message_id,
            }
            assert dict(row["properties"]) == message.properties
            assert len(row["properties"]) == len(message.properties)
    sizes = decode_columns(data, starts, broker_name="broker-a", columns=["body_size"])
    assert sizes["body_size"].to_pylist() == [len(message.body) for message in messages]
    return batch


@pytest.fixture(autouse=True, params=[1, 1 << 40], ids=["templates", "rows"])
def rows_per_template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test twice. The first run uses record templates (shared layouts) even if few records have the same
    layout; the second run uses none."""
    monkeypatch.setattr(raymq.records.kernels.templates, "_ROWS_PER_TEMPLATE", request.param)


@pytest.fixture
def fast_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test fail if rows are decoded one at a time, outside of the fast path."""

    def refuse(*args: object) -> None:
        raise AssertionError("went row by row")

    monkeypatch.setattr(raymq.records.kernels.columns, "_decode_rows", refuse)


MIXED = [
    Message("orders", b"x"),
    Message("orders", b"y" * 12, tags="paid"),
    Message("orders", b"z" * 13, keys=("k",)),
    Message("orders", b"w" * 500, tags="消息", keys=("a", "b"), properties={"region": "eu"}),
    Message("orders", b"v" * 90, properties={"region": "us", "name": "größe", "tag": "x" * 40}),
]


@pytest.mark.usefixtures("fast_only")
@pytest.mark.parametrize("born_ip", ["10.0.0.1", "::1"])
@pytest.mark.parametrize("store_ip", ["10.0.0.9", "::9"])
@pytest.mark.parametrize("producer", [None, ProducerSequence("p", 1, 7)])
def test_columns_are_the_rows(born_ip: str, store_ip: str, producer: ProducerSequence | None) -> None:
    assert_columns_are_the_rows(stored(MIXED, born_ip=born_ip, store_ip=store_ip, producer=producer))


@pytest.mark.usefixtures("fast_only")
def test_records_of_both_host_families_stand_side_by_side() -> None:
    assert_columns_are_the_rows(stored(MIXED, born_ip="::1") + stored(MIXED) + stored(MIXED, store_ip="::1"))


@pytest.mark.parametrize("born_ip", ["10.0.0.1", "::1"])
@pytest.mark.parametrize("store_ip", ["10.0.0.9", "::9"])
@pytest.mark.parametrize("more", [b"", foreign(b"\xff\x01x\x02")], ids=["fast", "odd"])
def test_reconsume_times_are_an_optional_column(born_ip: str, store_ip: str, more: bytes) -> None:
    data = bytearray(stored(MIXED, born_ip=born_ip, store_ip=store_ip))
    for number, start in enumerate(record_starts(data).tolist()):
        longer = 12 * (":" in born_ip) + 12 * (":" in store_ip)
        struct.pack_into(">i", data, start + RECONSUME_TIMES_OFFSET + longer, number + 1)
    records = bytes(data) + more
    starts = record_starts(records)
    batch = decode_columns(records, starts, broker_name="b", columns=["reconsume_times", "topic"])
    assert batch.schema.names == ["reconsume_times", "topic"]
    assert batch["reconsume_times"].to_pylist() == [1, 2, 3, 4, 5, 0][: len(starts)]
    assert decode_record(records, int(starts[4]), broker_name="b", check_crc=False).reconsume_times == 5


@pytest.mark.usefixtures("fast_only")
def test_topics_may_differ_from_row_to_row() -> None:
    data = b"".join(stored([Message(topic, b"x")]) for topic in ("orders", "refund", "r", "%RETRY%" + "g" * 200))
    assert_columns_are_the_rows(data)


@pytest.mark.usefixtures("fast_only")
@pytest.mark.parametrize("compression", [CompressionType.LZ4, CompressionType.ZSTD, CompressionType.ZLIB])
def test_compressed_bodies_stand_beside_plain_ones(compression: CompressionType) -> None:
    batch = assert_columns_are_the_rows(stored(MIXED, compression=compression))
    assert batch.column("body")[3].as_py() == b"w" * 500


@pytest.mark.usefixtures("fast_only")
def test_values_of_equal_and_different_lengths_are_distinguished() -> None:
    rows = [
        b"TAGS\x01aa\x02UNIQ_KEY\x01bb\x02n\x01cc\x02",
        b"TAGS\x01ddd\x02UNIQ_KEY\x01e\x02n\x01ff\x02",
        b"TAGS\x01g\x02UNIQ_KEY\x01hhh\x02n\x01ii\x02",
        b"TAGS\x01jj\x02UNIQ_KEY\x01kk\x02m\x01ll\x02",
        b"UNIQ_KEY\x01kk\x02TAGS\x01jj\x02m\x01ll\x02",
        b"TAGS\x01\x00\x03\x02UNIQ_KEY\x01\xc3\xbc\x02n\x01\x7f\x7f\x02",
    ]
    data = b"".join(foreign(row, topic=topic) for row in rows * 3 for topic in (b"orders", b"refund", b"r"))
    assert_columns_are_the_rows(data)


@pytest.mark.parametrize(
    "odd", [b"TAGS\x01a\x01\x02n\x01bb\x02", b"TAGS\x01\x02\x02\x02n\x01bb\x02", b"TAGS\x01\xff\xfe\x02n\x01bb\x02"]
)
def test_one_odd_record_among_many_of_its_size_is_read_right(odd: bytes) -> None:
    plain = foreign(b"TAGS\x01aa\x02n\x01bb\x02")
    assert len(plain) == len(foreign(odd))
    assert_columns_are_the_rows(plain * 5 + foreign(odd) + plain * 5)


@pytest.mark.usefixtures("fast_only")
def test_starts_may_be_a_selection_in_any_order() -> None:
    data = stored(MIXED)
    assert_columns_are_the_rows(data, record_starts(data)[[4, 0, 0, 2]])


@pytest.mark.usefixtures("fast_only")
def test_no_rows_are_an_empty_batch() -> None:
    for data in (b"", stored(MIXED)):
        batch = assert_columns_are_the_rows(data, np.zeros(0, dtype=np.int64))
        assert batch.num_rows == 0
    assert decode_columns(b"", np.zeros(0, dtype=np.int64), broker_name="a").schema == SCHEMA


@pytest.mark.usefixtures("fast_only")
def test_rows_without_a_unique_id_are_known_by_their_place() -> None:
    for store_ip in ("10.0.0.9", "::9"):
        batch = assert_columns_are_the_rows(stored(MIXED, ids=["A" * 32, "", "B" * 32, "", ""], store_ip=store_ip))
        assert len(batch.column("message_id")[1].as_py()) == (56 if ":" in store_ip else 32)


@pytest.mark.usefixtures("fast_only")
def test_the_last_separator_of_a_row_may_be_missing() -> None:
    """A record's properties may lack the last separator, as in records of RocketMQ 4.9."""
    rows = [b"TAGS\x01a\x02n\x01v", b"", b"n\x01w\x02", b"KEYS\x01k1 k2", b"n\x01u"]
    assert_columns_are_the_rows(b"".join(map(foreign, rows)))


@pytest.mark.usefixtures("fast_only")
def test_spaces_too_many_between_keys_make_no_keys() -> None:
    rows = [b"KEYS\x01 a  b \x02", b"KEYS\x01 \x02", b"KEYS\x01c\x02", b""]
    batch = assert_columns_are_the_rows(b"".join(map(foreign, rows)))
    assert batch.column("keys").to_pylist() == [["a", "b"], [], ["c"], []]


@pytest.mark.parametrize(
    "properties",
    [
        b"n\x01\x02m\x01v\x02",
        b"\x01v\x02m\x01v\x02",
        b"n\x02m\x01v\x02",
        b"\x02\x02m\x01v\x02",
        b"n\x01v\x01w\x02",
        b"n\x01a\x02m\x01b\x02n\x01c\x02",
        b"TAGS\x01a\x02TAGS\x01b\x02",
        b"n\x01\xff\xfe\x02",
        b"\x02",
        b"\x01",
        b"n\x01v\x02m",
    ],
)
def test_odd_properties_of_other_writers_are_read_as_row_by_row(properties: bytes) -> None:
    plain = foreign(b"m\x01b\x02n\x01a\x02")
    assert_columns_are_the_rows(plain + foreign(properties) + plain)
    assert_columns_are_the_rows(foreign(properties))


@pytest.mark.parametrize("topics", [(b"\xff\xfe",), (b"\xff\xfe", b"orders"), (b"", b"orders"), (b"",)])
def test_odd_topics_of_other_writers_are_read_as_row_by_row(topics: tuple[bytes, ...]) -> None:
    assert_columns_are_the_rows(b"".join(foreign(b"n\x01v\x02", topic=topic) for topic in topics))


@pytest.mark.parametrize("body", [b"", b"x", b"x" * 11, b"x" * 12, b"x" * 13])
def test_the_last_record_of_a_buffer_is_not_read_past(body: bytes) -> None:
    assert_columns_are_the_rows(foreign(b"", topic=b"", body=body))
    assert_columns_are_the_rows(foreign(b"a\x01b\x02", topic=b"t", body=body))


def test_a_binary_view_refers_to_the_buffer() -> None:
    data = stored([Message("orders", b"body" * 50)])
    view = decode_columns(data, record_starts(data), broker_name="a", body_type="binary_view").column("body")
    body_at = pa.py_buffer(data).address + BODY_OFFSET
    assert any(buffer and buffer.address == body_at for buffer in view.buffers())


def test_a_damaged_header_makes_a_row_of_nulls_or_is_read_as_row_by_row() -> None:
    good = stored([Message("orders", b"x" * 20, tags="t")])

    def check(place: tuple[int, int]) -> None:
        position, value = place
        damaged = bytearray(good)
        damaged[position] = value
        data = bytes(damaged)
        try:
            expected = decode_record(data, check_crc=False)
        except RecordError:
            assert_unreadable(data, 0)
            return
        batch = decode_columns(data, np.array([0]), broker_name="a")
        assert batch.column("body")[0].as_py() == expected.body
        assert batch.column("queue_offset")[0].as_py() == expected.queue_offset

    check_all(product(range(91), (0x00, 0x7F, 0x80, 0xFF)), check)


def assert_unreadable(data: bytes, start: int) -> str:
    """Check that the unreadable record at `start` becomes a row without a body. Returns the row's `error`, which
    contains the reason."""
    starts = np.array([start])
    [row] = decode_columns(data, starts, broker_name="a", columns=["body", "error", "broker_name"]).to_pylist()
    assert (row["body"], row["broker_name"]) == (None, "a")
    with pytest.raises(BodyUnreadableError) as raised:
        decode_columns(data, starts, broker_name="a", unreadable="raise")
    assert raised.value.reason == row["error"]
    return str(row["error"])


@pytest.mark.parametrize("start", [-1, 1, 100_000])
def test_starts_outside_the_buffer_are_damaged_records(start: int) -> None:
    reason = assert_unreadable(stored([Message("orders", b"x")]), start)
    assert "outside the buffer" in reason or "does not begin with the magic of a record" in reason


def test_every_cut_is_a_damaged_record() -> None:
    data = stored([Message("orders", b"x" * 20)])
    for length in range(len(data)):
        assert_unreadable(data[:length], 0)


def test_crcs_are_compared_when_asked_for() -> None:
    data = bytearray(stored(MIXED))
    decode_columns(data, record_starts(data), broker_name="a", check_crc=True)
    data[int(record_starts(data)[3]) + 88] ^= 1
    assert decode_columns(data, record_starts(data), broker_name="a").column("body").null_count == 0
    names = ["queue_offset", "body", "body_size", "error", "topic"]
    batch = decode_columns(data, record_starts(data), broker_name="a", check_crc=True, columns=names)
    assert [batch.column(name).null_count for name in names] == [0, 1, 1, batch.num_rows - 1, 0]
    assert batch.column("error")[3].as_py() == "the body's CRC is wrong"
    with pytest.raises(BodyUnreadableError, match=r"offset 43 of queue orders@a:5 .*CRC is wrong"):
        decode_columns(data, record_starts(data), broker_name="a", check_crc=True, unreadable="raise")


def test_buffers_arrow_s_views_cannot_address_are_refused() -> None:
    huge = np.broadcast_to(np.zeros(1, dtype=np.uint8), (2**31,))
    with pytest.raises(InvalidArgumentError, match="decode it in parts"):
        decode_columns(huge, np.array([0]), broker_name="a")  # type: ignore[arg-type]


@pytest.mark.parametrize("own_buffer_bytes", [1, 100, 1 << 30])
def test_decompressed_bodies_are_in_one_buffer_or_several(
    own_buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raymq.records.kernels.column_bodies, "_OWN_BUFFER_BYTES", own_buffer_bytes)
    bodies = [b"%03d" % number * (number % 50 + 1) for number in range(70)]
    data = stored([Message("orders", body) for body in bodies], compression=CompressionType.ZSTD)
    assert assert_columns_are_the_rows(data).column("body").to_pylist() == bodies


def test_a_pickled_batch_takes_along_its_own_records_only() -> None:
    data = stored([Message("orders", b"%04d" % number * 25) for number in range(1000)])
    starts = record_starts(data)
    batch = decode_columns(data, starts[500:510], broker_name="broker-a")
    assert batch.column("body").to_pylist() == [b"%04d" % number * 25 for number in range(500, 510)]
    assert len(pickle.dumps(batch)) < len(data) // 10


def test_a_type_that_bodies_cannot_have_is_refused() -> None:
    data = stored([Message("orders", b"x")])
    with pytest.raises(InvalidArgumentError, match="body_type='string' must be one of binary, large_binary"):
        decode_columns(data, record_starts(data), broker_name="a", body_type="string")  # type: ignore[arg-type]
