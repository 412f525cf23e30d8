"""Consume-queue units (raymq.record.layout.UNIT_DTYPE) of many records at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymq.record.layout import UNIT_DTYPE, record_ends


def fill_units(
    units: NDArray[np.void],
    physical_offsets: NDArray[np.int64],
    sizes: NDArray[np.int32],
    tags_codes: NDArray[np.int64],
) -> None:
    """Overwrite `units`, of UNIT_DTYPE, with those of records at these physical offsets, of these sizes in bytes and
    with these codes. All have shape (n,)."""
    units["physical_offset"] = physical_offsets
    units["size"] = sizes
    units["tags_code"] = tags_codes


def units_of(
    physical_offsets: NDArray[np.int64], sizes: NDArray[np.int32], tags_codes: NDArray[np.int64]
) -> NDArray[np.void]:
    """New units, shape (n,), as `fill_units` makes them."""
    units = np.empty(len(sizes), UNIT_DTYPE)
    fill_units(units, physical_offsets, sizes, tags_codes)
    return units


def begins_of(physical_offset: int, sizes: NDArray[np.int32], ends: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The physical offsets of records of these sizes that lie back to back from `physical_offset` on. `ends`:
    `record_ends` of the sizes, from a caller that has them."""
    begins = (record_ends(sizes) if ends is None else ends) - sizes
    begins += physical_offset
    return begins
