"""Tests of decoding records that RocketMQ 4.9 itself wrote (tests/fixtures/README.md), row by row and as
columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raymq.common.message import MessageExt
from raymq.records.format.check import check_record
from raymq.records.format.crc import body_crc
from raymq.records.format.decode import decode_record
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.layout import UNIT_DTYPE
from raymq.records.kernels.columns import decode_columns

FIXTURES = Path(__file__).parents[4] / "fixtures"
STORES = ["rocketmq-4.9-store-clean", "rocketmq-4.9-store-crash"]


def records(file: bytes) -> list[int]:
    """Return the positions of the records in a commit-log file, as recovery finds them."""
    starts = []
    position = 0
    while (check := check_record(file, position)).ok and not check.is_blank:
        starts.append(position)
        position += check.size
    return starts


def messages(store: str) -> list[MessageExt]:
    files = [path.read_bytes() for path in sorted((FIXTURES / store / "commitlog").iterdir())]
    return [decode_record(file, start) for file in files for start in records(file)]


@pytest.mark.parametrize("store", STORES)
def test_every_decoded_message_equals_the_sent_message(store: str) -> None:
    found = {message.offset_message_id: message for message in messages(store)}
    lines = (FIXTURES / store / "manifest.tsv").read_text().splitlines()
    assert len(found) == len(lines) == 600
    for line in lines:
        number, topic, queue_id, tag, keys, _, physical_offset, queue_offset, identifier, crc = line.split("\t")
        message = found[identifier]
        assert body_crc(message.body) == int(crc)
        assert (message.physical_offset, message.queue_offset) == (int(physical_offset), int(queue_offset))
        assert (message.tags or "null", " ".join(message.keys) or "null") == (tag, keys)
        sent_to = message.system_properties.get("REAL_TOPIC", message.topic)
        assert sent_to == topic, number
        assert message.system_properties.get("REAL_QID", str(message.queue_id)) == queue_id


@pytest.mark.parametrize("store", STORES)
def test_every_unit_matches_the_dispatch_of_its_record(store: str) -> None:
    units = {}
    for path in (FIXTURES / store / "consumequeue").glob("*/*/*"):
        first = int(path.name) // UNIT_DTYPE.itemsize
        for index, unit in enumerate(np.frombuffer(path.read_bytes(), UNIT_DTYPE).tolist()):
            if unit[1]:
                units[unit[0]] = (path.parts[-3], int(path.parts[-2]), first + index, *unit)
    for path in sorted((FIXTURES / store / "commitlog").iterdir()):
        file = path.read_bytes()
        for start in records(file):
            view = dispatch_view(file, start)
            queue_entry = (view.topic, view.queue_id, view.queue_offset)
            assert units.pop(int(path.name) + start) == (*queue_entry, view.physical_offset, view.size, view.tags_code)
    assert units == {}


@pytest.mark.parametrize("store", STORES)
def test_columns_agree_with_rows(store: str) -> None:
    for path in sorted((FIXTURES / store / "commitlog").iterdir()):
        file = path.read_bytes()
        starts = records(file)
        rows = decode_columns(file, np.array(starts, np.int64), broker_name="b", check_crc=True).to_pylist()
        for row, start in zip(rows, starts, strict=True):
            message = decode_record(file, start)
            assert (row["topic"], row["body"], row["tags"]) == (message.topic, message.body, message.tags)
            assert (tuple(row["keys"]), dict(row["properties"])) == (message.keys, message.properties)
            assert (row["message_id"], row["queue_offset"]) == (message.message_id, message.queue_offset)
