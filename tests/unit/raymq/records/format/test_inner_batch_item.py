"""Tests of the items (single messages) of a RocketMQ batch."""

from __future__ import annotations

import pytest

from raymq.records.format.inner_batch import BatchItem, decode_batch_items, encode_batch_item
from raymq.records.format.layout import RecordError

ITEMS = [BatchItem(b"hi", {"TAGS": "A"}), BatchItem(b"", {}, flag=-7), BatchItem(b"x" * 300, {"k": "v", "n": "消息"})]


def test_items_come_back_in_order() -> None:
    assert decode_batch_items(b"".join(map(encode_batch_item, ITEMS))) == ITEMS


def test_an_empty_batch_has_no_items() -> None:
    assert decode_batch_items(b"") == []


def test_every_cut_inside_an_item_is_found() -> None:
    data = encode_batch_item(ITEMS[2])
    for length in range(1, len(data)):
        with pytest.raises(RecordError):
            decode_batch_items(data[:length])


@pytest.mark.parametrize("body_size", [-1, -30, 1, 3, 2**31 - 1])
def test_a_body_size_that_does_not_fit_is_found(body_size: int) -> None:
    data = bytearray(encode_batch_item(ITEMS[0]))
    data[16:20] = body_size.to_bytes(4, signed=True)
    with pytest.raises(RecordError):
        decode_batch_items(bytes(data))
