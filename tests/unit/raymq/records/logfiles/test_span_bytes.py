"""Tests of the size of an offset range in bytes: exact for short ranges, and estimated for long ranges from few
consume-queue entries (units)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from raymq.records.format.layout import UNIT_DTYPE
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from raymq.records.logfiles.span_bytes import SPAN_PARTS, span_bytes

FILE_UNITS = 1000


class Units:
    """Fake reader of one queue whose records have the given sizes. A queue file has FILE_UNITS entries. `first`: first
    offset that is not deleted."""

    def __init__(self, sizes: NDArray[np.int64], first: int = 0) -> None:
        self._units = np.zeros(len(sizes), UNIT_DTYPE)
        self._units["size"] = sizes
        self._first, self.read = first, 0

    def units(self, topic: str, queue_id: int, start: int, count: int) -> NDArray[np.void]:
        if start < self._first:
            return self._units[:0]
        found = self._units[start : min(start + count, (start // FILE_UNITS + 1) * FILE_UNITS)]
        self.read += len(found)
        return found


def reported_bytes(reader: Any, start: int, end: int) -> list[int]:
    return span_bytes(reader, "orders", 0, start, end)


def test_a_short_span_is_exact_over_the_edges_of_files() -> None:
    sizes = np.arange(100, 20_100)
    parts = reported_bytes(Units(sizes), 700, 12_345)
    assert len(parts) == SPAN_PARTS
    assert sum(parts) == int(sizes[700:12_345].sum())
    assert parts[0] == int(sizes[700 : 700 + (12_345 - 700) // SPAN_PARTS].sum())


@pytest.mark.parametrize("count", [1, 5, 31])
def test_a_span_of_few_offsets_has_as_many_parts(count: int) -> None:
    assert reported_bytes(Units(np.full(100, 7)), 3, 3 + count) == [7] * count


def test_a_long_span_is_estimated_from_few_units() -> None:
    sizes = np.concatenate((np.full(500_000, 200), np.full(500_000, 2000)))
    reader = Units(sizes)
    parts = reported_bytes(reader, 0, len(sizes))
    assert sum(parts) == pytest.approx(int(sizes.sum()), rel=0.02)
    assert sum(parts[:16]) * 9 < sum(parts[16:])
    assert reader.read <= SPAN_PARTS * 8 * 128


def test_offsets_without_a_record_and_offsets_that_are_gone() -> None:
    sizes = np.full(64, 100)
    sizes[::2] = PRE_BLANK_SIZE
    assert sum(reported_bytes(Units(sizes), 0, 64)) == 3200
    assert reported_bytes(Units(np.full(100, 7), first=50), 0, 10) == [1024] * 10
