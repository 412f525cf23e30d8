"""Tests of converting a batch of a scan to a block of a Ray dataset."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from ray.data._internal.arrow_block import _BATCH_SIZE_PRESERVING_STUB_COL_NAME as STUB
from ray.data._internal.datasource.kafka_datasource import KAFKA_MSG_SCHEMA
from ray.data.block import BlockAccessor

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import Message, MessageQueue
from raymq.data.columns import SCHEMA, needed_of, schema_of, to_block
from raymq.records.format.check import record_starts
from raymq.records.format.encode import encode_batch
from raymq.records.format.layout import MAGIC_OFFSET
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.columns import SCHEMA as SCAN_SCHEMA, decode_columns
from raymq.records.kernels.stamp import stamp

BORN_MS, STORED_MS = 1_600_000_000_123, 1_700_000_000_456
MESSAGES = [
    Message("orders", b"one", tags="paid", keys=("k1", "k2"), properties={"colour": "blue", "size": "9"}),
    Message("orders", b"2", keys=("k3",)),
    Message("orders", b"\x00\xff", tags="late"),
]


@pytest.fixture
def batch() -> pa.RecordBatch:
    encoded = encode_batch(
        MESSAGES,
        7,
        born_host=("127.0.0.1", 0),
        born_timestamp_ms=BORN_MS,
        message_ids=[f"{offset:032X}" for offset in range(len(MESSAGES))],
    )
    records = np.frombuffer(bytearray(encoded.records), np.uint8)
    stamp(
        records,
        encoded.sizes,
        first_queue_offset=40,
        first_physical_offset=0,
        store_timestamp_ms=STORED_MS,
        store_host=bytes(8),
    )
    buffer = records.tobytes()
    return decode_columns(
        buffer,
        record_starts(buffer),
        broker_name="broker-b",
        body_type="binary",
        columns=[*SCAN_SCHEMA.names, "reconsume_times"],
    )


def test_the_first_columns_match_read_kafka() -> None:
    assert pa.schema(list(SCHEMA)[: len(KAFKA_MSG_SCHEMA)]) == KAFKA_MSG_SCHEMA


def test_a_block_has_the_values_of_the_messages(batch: pa.RecordBatch) -> None:
    block = to_block(batch, SCHEMA.names)
    assert block.schema == SCHEMA
    assert block.to_pydict() == {
        "offset": [40, 41, 42],
        "key": [b"k1", b"k3", None],
        "value": [b"one", b"2", b"\x00\xff"],
        "topic": ["orders"] * 3,
        "partition": [7] * 3,
        "timestamp": [BORN_MS] * 3,
        "timestamp_type": [1] * 3,
        "headers": [[("colour", b"blue"), ("size", b"9")], [], []],
        "broker_name": ["broker-b"] * 3,
        "tags": ["paid", None, "late"],
        "keys": [["k1", "k2"], ["k3"], []],
        "message_id": [f"{offset:032X}" for offset in range(3)],
        "store_timestamp": [STORED_MS] * 3,
        "reconsume_times": [0] * 3,
    }


def test_a_block_of_filtered_rows_has_their_keys(batch: pa.RecordBatch) -> None:
    chosen = batch.filter(pa.array([False, True, True]))
    assert to_block(chosen, ["key", "keys"]).to_pydict() == {"key": [b"k3", None], "keys": [["k3"], []]}


def test_a_block_has_the_wanted_columns_in_their_order(batch: pa.RecordBatch) -> None:
    for name in SCHEMA.names:
        assert to_block(batch, [name]).schema == schema_of([name])
    assert to_block(batch, ["tags", "offset"]).schema.names == ["tags", "offset"]


def test_a_column_needs_only_itself_of_a_scan(batch: pa.RecordBatch) -> None:
    assert set(needed_of(SCHEMA.names)) <= set(batch.schema.names)
    for name in SCHEMA.names:
        needed = needed_of([name])
        assert to_block(batch.select(needed), [name]).num_rows == 3
        assert ("body" in needed) == (name == "value")


def test_rows_without_columns_are_counted_as_ray_data_counts_them(batch: pa.RecordBatch) -> None:
    block = pa.Table.from_batches([to_block(batch.select(needed_of([])), [])])
    assert (BlockAccessor.for_block(block).num_rows(), block.column_names) == (3, [STUB])


def test_columns_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="unknown column 'body'"):
        schema_of(["offset", "body"])
    with pytest.raises(InvalidArgumentError, match="twice"):
        schema_of(["offset", "offset"])


def test_a_damaged_message_is_a_row_with_a_null_value_and_an_error() -> None:
    """A damaged message becomes a row with only the message's queue and offset, and an error. All other columns are
    null."""
    records = bytearray(encode_batch(MESSAGES, 7, born_host=("127.0.0.1", 0), born_timestamp_ms=BORN_MS,
                                     message_ids=["A", "B", "C"]).records)  # fmt: skip
    starts = record_starts(bytes(records))
    records[int(starts[1]) + MAGIC_OFFSET] ^= 1
    columns = [*SCHEMA.names, "error"]
    places = RecordPlaces(MessageQueue("orders", "broker-b", 7), np.array([40, 41, 42]))
    batch = decode_columns(bytes(records), starts, broker_name="broker-b", body_type="binary", places=places,
                           columns=needed_of(columns))  # fmt: skip
    rows = to_block(batch, columns).to_pylist()
    # The queue offsets in `places` differ from the offsets in the intact records, because no store has set the offsets
    # in the records. So even the intact records' rows have an error.
    assert all(row["error"] for row in rows)
    batch = decode_columns(bytes(records), starts, broker_name="broker-b", body_type="binary",
                           columns=needed_of(columns))  # fmt: skip
    rows = to_block(batch, columns).to_pylist()
    assert [row["value"] for row in rows] == [b"one", None, b"\x00\xff"]
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert [row["key"] for row in rows] == [b"k1", None, None]
    assert (rows[1]["timestamp"], rows[1]["headers"], rows[1]["keys"]) == (None, None, None)
    with pytest.raises(InvalidArgumentError, match="error"):
        schema_of(["errors"])
