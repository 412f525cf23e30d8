"""Tests of messages that are decoded only when a field is read: their fields, the operations that they refuse, and the
effect of damage."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import weakref

import cloudpickle
import numpy as np
import pytest

from raymq.common.errors import BodyUnreadableError
from raymq.common.message import Message, MessageExt
from raymq.records.format.check import record_starts
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import encode_batch
from raymq.records.kernels.messages import FEW_RECORDS, read_messages

MANY = 3 * FEW_RECORDS


def stored(count: int = MANY, compression: CompressionType = CompressionType.NONE) -> bytes:
    messages = [
        Message("orders", b"%03d" % number + b"." * number, tags=f"t{number}", keys=("a", "b"), properties={"n": "1"})
        for number in range(count)
    ]
    batch = encode_batch(
        messages,
        5,
        born_host=("10.0.0.1", 4711),
        born_timestamp_ms=1700000000000,
        message_ids=[f"{index:032X}" for index in range(count)],
        compression=Compression(compression, threshold_bytes=10),
    )
    return bytes(batch.records)


def read(data: bytes) -> list[MessageExt]:
    return read_messages(data, record_starts(data), broker_name="a")


@pytest.mark.parametrize("count", [1, FEW_RECORDS, FEW_RECORDS + 1])
@pytest.mark.parametrize("compression", [CompressionType.NONE, CompressionType.ZLIB])
def test_few_and_many_are_the_messages_of_the_records(count: int, compression: CompressionType) -> None:
    data = stored(count, compression)
    assert read(data) == decode_records(data, broker_name="a")


def test_no_records_are_no_messages() -> None:
    assert read_messages(b"", np.zeros(0, np.int64), broker_name="a") == []


def test_a_message_stays_a_frozen_dataclass() -> None:
    message = read(stored())[3]
    assert type(message) is MessageExt
    assert type(message.body) is bytes
    assert dataclasses.replace(message, queue_id=6).queue_id == 6
    assert dataclasses.asdict(message)["tags"] == "t3"
    for change in ("body", "_source", "new"):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
            setattr(message, change, b"other")
    with pytest.raises(TypeError, match="unhashable"):
        hash(message)
    assert message != "another thing"


def test_the_garbage_collector_does_not_count_messages() -> None:
    many = read(stored() * 20)
    assert len(many) > 50
    assert not any(map(gc.is_tracked, many))
    assert not gc.is_tracked(copy.copy(many[0]))


def test_a_message_is_made_and_matched_by_its_fields() -> None:
    message = read(stored())[3]
    values = [getattr(message, field.name) for field in dataclasses.fields(message)]
    assert MessageExt(*values) == copy.copy(message) == message
    assert list(inspect.signature(MessageExt).parameters) == [field.name for field in dataclasses.fields(message)]
    match message:
        case MessageExt(topic, body):
            assert (topic, body) == (message.topic, message.body)
        case _:
            raise AssertionError("a message is not matched")


def test_properties_of_a_message_are_the_readers_own() -> None:
    message = read(stored())[3]
    properties = message.properties
    assert isinstance(properties, dict)
    properties["n"] = "2"
    assert message.properties == {"n": "1"}


class Buffer(np.ndarray):
    """NumPy array class whose objects support weak references."""


@pytest.mark.parametrize("keep", [copy.copy, copy.deepcopy, lambda m: pickle.loads(cloudpickle.dumps(m))])
def test_a_copy_keeps_no_buffer_alive(keep) -> None:
    data = stored()
    buffer = np.frombuffer(data, np.uint8).view(Buffer)
    alive = weakref.ref(buffer)
    message = read_messages(memoryview(buffer), record_starts(data), broker_name="a")[7]
    del buffer
    gc.collect()
    assert alive() is not None
    kept = keep(message)
    assert kept == message
    del message
    gc.collect()
    assert alive() is None
    assert kept.body == b"007......."


@pytest.mark.parametrize("count", [FEW_RECORDS, MANY])
def test_a_body_that_was_damaged_raises_when_it_is_asked_for(count: int) -> None:
    data = stored(count).replace(b"005.....", b"005....X")
    damaged = read(data)[5]
    with pytest.raises(BodyUnreadableError, match="CRC"):
        _ = damaged.body
    assert (damaged.tags, damaged.record_damaged) == ("t5", False)
    [message] = [
        message
        for message in read_messages(data, record_starts(data), broker_name="a", check_crc=False)
        if message.body == b"005....X"
    ]
    assert message.tags == "t5"


@pytest.mark.parametrize("count", [1, MANY])
def test_a_record_that_is_cut_is_damaged(count: int) -> None:
    data = stored(count)
    *before, last = read_messages(data[:-1], record_starts(data), broker_name="a")
    assert before == read(data)[:-1]
    assert last.record_damaged
