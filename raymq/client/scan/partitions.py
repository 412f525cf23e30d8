"""Partitions of a read, one for each task. Offset ranges are cut and joined until each partition has about the same
number of bytes.

The functions have no side effects. A partition has ranges of one broker group only, so one node has the whole partition
on its disk.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from raymq.client.scan.ranges import OffsetRange, RangeSizes, check_count

PARTITION_BYTES: Final = 128 * 1024 * 1024
"""Default target size of one partition, in bytes of records; equal to the default of Spark's file sources."""
PARTITION_MIN_BYTES: Final = 4 * 1024 * 1024
"""Minimum size of a partition, in bytes of records. A smaller partition would not be worth a separate task."""


@dataclass(frozen=True, slots=True)
class ScanPartition:
    """A partition of a read, for one task: offset ranges of one broker group, in the order in which they are read.
    `size_bytes`: the approximate bytes of their records."""

    ranges: tuple[OffsetRange, ...]
    size_bytes: int

    @property
    def broker_name(self) -> str:
        """The broker group to which all ranges of this partition belong."""
        return self.ranges[0].broker_name

    @property
    def size(self) -> int:
        """Number of queue offsets in the partition."""
        return sum(one.size for one in self.ranges)


def plan_partitions(
    sizes: RangeSizes,
    ranges: Sequence[OffsetRange],
    *,
    partition_bytes: int | None = None,
    min_partitions: int | None = None,
    parallelism: int = 1,
    message_bytes_max: int | None = None,
) -> list[ScanPartition]:
    """Divide a read of `ranges` into partitions. Each offset is in exactly one partition, and each queue keeps its
    order.

    Partitions have about `partition_bytes`: large ranges are divided, and small ranges of a broker group are joined.
    The default is PARTITION_BYTES, or less if some of `parallelism` tasks would otherwise be idle. There are at least
    `min_partitions` partitions if the ranges have that many offsets. `message_bytes_max`: a larger message counts as a
    message of this size, for reads that omit large columns. Raises InvalidArgumentError for numbers below 1.
    """
    partition_bytes = check_count("partition_bytes", partition_bytes)
    min_partitions = check_count("min_partitions", min_partitions)
    if not ranges:
        return []
    profiles = [
        _capped(one, profile, message_bytes_max) for one, profile in zip(ranges, sizes.range_bytes(ranges), strict=True)
    ]
    total = sum(map(sum, profiles))
    if partition_bytes is None:
        partition_bytes = min(PARTITION_BYTES, max(PARTITION_MIN_BYTES, -(-total // parallelism)))
    wanted = min_partitions or 1
    target = max(1, min(partition_bytes, -(-total // wanted)))
    counts = _piece_counts(ranges, profiles, target, wanted)
    pieces = [
        piece
        for one, profile, count in zip(ranges, profiles, counts, strict=True)
        for piece in _cut_by_bytes(one, profile, count)
    ]
    return _merge(pieces, target, wanted)


def _capped(item: OffsetRange, profile: Sequence[int], message_bytes_max: int | None) -> Sequence[int]:
    if message_bytes_max is None:
        return profile
    most = -(-item.size * message_bytes_max // len(profile))
    return [min(size, most) for size in profile]


def _piece_counts(
    ranges: Sequence[OffsetRange], profiles: Sequence[Sequence[int]], target: int, wanted: int
) -> list[int]:
    """Return, for each offset range, the number of pieces into which it is cut. A piece has about `target` bytes of
    records. The numbers add up to at least `wanted`, unless the ranges contain fewer offsets."""
    sizes = [max(1, sum(profile)) for profile in profiles]
    counts = [min(one.size, max(1, round(size / target))) for one, size in zip(ranges, sizes, strict=True)]
    return _share_pieces(counts, sizes, [one.size for one in ranges], wanted)


def _share_pieces(counts: list[int], weights: Sequence[int], most: Sequence[int], wanted: int) -> list[int]:
    """Return into how many pieces each range is divided, so that there are `wanted` pieces in total. `counts`: the
    number of pieces of each range so far. One after another, each additional piece goes to the range with the largest
    weight per piece. `most`: the maximum number of pieces of each range."""
    counts = list(counts)
    heaviest = [(-weights[index] / counts[index], index) for index in range(len(counts)) if counts[index] < most[index]]
    heapq.heapify(heaviest)
    for _ in range(wanted - sum(counts)):
        if not heaviest:
            break
        index = heaviest[0][1]
        counts[index] += 1
        if counts[index] < most[index]:
            heapq.heapreplace(heaviest, (-weights[index] / counts[index], index))
        else:
            heapq.heappop(heaviest)
    return counts


def _cut(item: OffsetRange, count: int) -> Iterable[OffsetRange]:
    edges = [item.start_offset + item.size * index // count for index in range(count + 1)]
    for start, end in pairwise(edges):
        yield replace(item, start_offset=start, end_offset=end)


def _cut_by_bytes(item: OffsetRange, profile: Sequence[int], count: int) -> Iterable[tuple[OffsetRange, int]]:
    """Cut an offset range into `count` pieces of about equal size in bytes, and yield each piece with its size.
    `profile`: the sizes in bytes of several parts of the range; all parts have equally many offsets."""
    total = sum(profile)
    if not total:
        yield from ((piece, 0) for piece in _cut(item, count))
        return
    # Compute, by interpolation, the offsets at which the range is divided. The interpolation assumes that all records
    # within one part of the profile have the same size.
    bytes_at = [0, *accumulate(profile)]
    offsets_at = np.linspace(0, item.size, len(bytes_at))
    wanted = [total * index / count for index in range(1, count)]
    inner = np.interp(wanted, bytes_at, offsets_at).round().astype(int).tolist()
    # Move the boundaries of the pieces if necessary, so that each piece of the offset range has at least one offset.
    edges = [0]
    for index, edge in enumerate(inner):
        edges.append(min(max(edge, edges[-1] + 1), item.size - (count - 1 - index)))
    edges.append(item.size)
    sizes = np.diff(np.interp(edges, offsets_at, bytes_at)).round().astype(int).tolist()
    for (start, end), size in zip(pairwise(edges), sizes, strict=True):
        yield replace(item, start_offset=item.start_offset + start, end_offset=item.start_offset + end), size


def _merge(pieces: Sequence[tuple[OffsetRange, int]], target: int, wanted: int) -> list[ScanPartition]:
    """Join neighbouring offset ranges (pieces) of the same broker group to partitions of up to `target` bytes. Joining
    stops when only `wanted` partitions remain."""
    spare = len(pieces) - wanted
    parts: list[ScanPartition] = []
    # Sort the pieces by broker group, so that pieces of different topics can be joined.
    for piece, size in sorted(pieces, key=lambda found: found[0].broker_name):
        last = parts[-1] if parts else None
        fits = last is not None and last.broker_name == piece.broker_name and last.size_bytes + size <= target
        if last is not None and fits and spare > 0:
            parts[-1] = ScanPartition((*last.ranges, piece), last.size_bytes + size)
            spare -= 1
        else:
            parts.append(ScanPartition((piece,), size))
    return parts
