"""The ranges of a dataset, divided among read tasks so that each has about as many bytes as the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raymq.client.scan.ranges import OffsetRange


@dataclass(frozen=True, slots=True)
class SizedRange:
    """A range of a queue and the bytes of its records, at least 1. Within it, all records count as equally long."""

    range: OffsetRange
    size_bytes: int


def sized(ranges: Sequence[OffsetRange], profiles: Sequence[Sequence[int]]) -> list[SizedRange]:
    """Each range in pieces, by its profile: the bytes of equal parts of it (ScanSource.range_bytes). Those of a broker
    group come together, so that mostly one node holds all that a task reads."""
    pieces = []
    for one, profile in sorted(zip(ranges, profiles, strict=True), key=lambda item: item[0].broker_name):
        edges = [one.start_offset + one.size * index // len(profile) for index in range(len(profile) + 1)]
        for index, size_bytes in enumerate(profile):
            piece = replace(one, start_offset=edges[index], end_offset=edges[index + 1])
            if piece.size:
                pieces.append(SizedRange(piece, max(1, size_bytes)))
    return pieces


def divide(pieces: Sequence[SizedRange], tasks: int) -> list[list[SizedRange]]:
    """At most `tasks` parts, none of them empty, in the order of `pieces`; each offset is in exactly one of them.

    The pieces are laid end to end and cut into parts of the same bytes, so a long queue is many tasks, and short ones
    share one.
    """
    parts: list[list[SizedRange]] = [[] for _ in range(max(1, tasks))]
    total_bytes = sum(piece.size_bytes for piece in pieces)
    before_bytes = 0
    for piece in pieces:
        _lay(piece, before_bytes, total_bytes, parts)
        before_bytes += piece.size_bytes
    return [_joined(part) for part in parts if part]


def at_most(parts: Sequence[Sequence[SizedRange]], rows: int) -> list[list[SizedRange]]:
    """The parts in smaller ones of at most `rows` messages each."""
    smaller: list[list[SizedRange]] = []
    for part in parts:
        smaller.append([])
        left = rows
        for item in part:
            first = item.range.start_offset
            while first < item.range.end_offset:
                if not left:
                    smaller.append([])
                    left = rows
                last = min(item.range.end_offset, first + left)
                size_bytes = max(1, item.size_bytes * (last - first) // item.range.size)
                smaller[-1].append(SizedRange(replace(item.range, start_offset=first, end_offset=last), size_bytes))
                first, left = last, left - (last - first)
    return smaller


def _lay(piece: SizedRange, before_bytes: int, total_bytes: int, parts: list[list[SizedRange]]) -> None:
    """Put a piece into its part, or cut it among several; `before_bytes` are those of the pieces before it."""
    whole = piece.range
    first = whole.start_offset
    index = before_bytes * len(parts) // total_bytes
    while first < whole.end_offset:
        # The part ends this many bytes behind the piece's begin.
        edge_bytes = -(-(index + 1) * total_bytes // len(parts)) - before_bytes
        last = min(whole.end_offset, whole.start_offset + -(-whole.size * edge_bytes // piece.size_bytes))
        if last > first:
            size_bytes = max(1, piece.size_bytes * (last - first) // whole.size)
            parts[index].append(SizedRange(replace(whole, start_offset=first, end_offset=last), size_bytes))
            first = last
        index += 1


def _joined(part: Sequence[SizedRange]) -> list[SizedRange]:
    """The same, with neighbours that follow each other in a queue as one range."""
    joined: list[SizedRange] = []
    for piece in part:
        last = joined[-1] if joined else None
        if last and last.range.queue == piece.range.queue and last.range.end_offset == piece.range.start_offset:
            whole = replace(last.range, end_offset=piece.range.end_offset)
            joined[-1] = SizedRange(whole, last.size_bytes + piece.size_bytes)
        else:
            joined.append(piece)
    return joined
