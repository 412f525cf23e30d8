"""The files of an archive: their names, their order, and the next offset of each queue.

An archive of topic `orders` in a directory:

    orders/day=2026-03-01/broker-a.3.00000000000000000000-00000000000000001700.parquet
    orders/day=2026-03-02/broker-a.3.00000000000000001700-00000000000000002034.parquet
    orders/_absent/broker-a.3.00000000000000002034-00000000000000002100.absent
    orders/_staging/…         unfinished files; no program reads them
    orders/.lock              locked while a run works on this archive

A file holds messages of one queue, all stored on one day (UTC). Its name has the first offset, and the offset after the
last one. The offset ranges of a queue's files follow each other without a gap: for offsets whose messages were already
deleted, `_absent` has an empty file. So the names alone determine where the next run continues. Only complete files
have such names: each file is written in `_staging`, flushed, checked, and renamed, in the order of its offsets. The
code calls an entry of the archive, with or without rows, a piece.

The module does no I/O except listing directories. Spark and pandas read the directory as a table with a column `day`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import DataLossError, StoreCorruptError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds

ABSENT: Final = "_absent"
STAGING: Final = "_staging"
SPLIT_MESSAGES: Final = 50_000
"""Minimum number of messages in each part if an offset range is divided between tasks."""

_NAME: Final = re.compile(r"(?P<broker>[^./]+)\.(?P<queue>\d+)\.(?P<start>\d{20})-(?P<end>\d{20})\.(?P<kind>\w+)")
_DAY: Final = re.compile(r"day=(\d{4}-\d{2}-\d{2})")

QueueKey = tuple[str, int]
"""The key of a queue in an archive: broker group and queue id."""


@dataclass(frozen=True, slots=True, order=True)
class ArchiveFile:
    """A file of an archive. `day`: the day on which its messages were stored, such as 2026-03-01; empty for a file that
    marks offsets without messages."""

    broker_name: str
    queue_id: int
    start_offset: int
    end_offset: int
    day: str

    @property
    def queue(self) -> QueueKey:
        """The queue whose messages the file contains."""
        return self.broker_name, self.queue_id

    @property
    def path(self) -> Path:
        """The path of the file below the topic's directory."""
        folder, kind = (f"day={self.day}", "parquet") if self.day else (ABSENT, "absent")
        offsets = f"{self.start_offset:020}-{self.end_offset:020}"
        return Path(folder, f"{self.broker_name}.{self.queue_id}.{offsets}.{kind}")

    @classmethod
    def parse(cls, path: Path) -> ArchiveFile:
        """Parse the path of an archive file, relative to the topic's directory. Raises StoreCorruptError if the path is
        not the path of an archive file."""
        name, day = _NAME.fullmatch(path.name), _DAY.fullmatch(path.parent.name)
        if name is not None and (day is not None or path.parent.name == ABSENT):
            piece = cls(name["broker"], int(name["queue"]), int(name["start"]), int(name["end"]), day[1] if day else "")
            if piece.path == path and piece.start_offset < piece.end_offset:
                return piece
        raise StoreCorruptError(f"file {path} is not a file of an archive; move the file elsewhere")


@dataclass(frozen=True, slots=True)
class ArchiveStep:
    """The next part of a topic to archive. `ranges`: offset ranges to read. `absent`: files that mark offsets whose
    messages were deleted."""

    ranges: tuple[OffsetRange, ...]
    absent: tuple[ArchiveFile, ...]

    def __bool__(self) -> bool:
        return bool(self.ranges or self.absent)


def find_pieces(directory: Path) -> list[ArchiveFile]:
    """Return the archive files in a topic's directory, sorted by queue and offset; empty if the directory does not
    exist.

    Raises StoreCorruptError if the directory has a file that is not part of an archive. Hidden files are ignored.
    """
    found = []
    for folder in sorted(directory.iterdir()) if directory.is_dir() else []:
        if folder.is_dir() and folder.name != STAGING:
            files = [file for file in folder.iterdir() if not file.name.startswith(".")]
            found += [ArchiveFile.parse(file.relative_to(directory)) for file in files]
    return sorted(found)


def problems_of(pieces: Iterable[ArchiveFile]) -> list[str]:
    """Return the gaps and overlaps between the archive files of each queue, one sentence each."""
    problems = []
    for queue, group in groupby(sorted(pieces), key=lambda piece: piece.queue):
        for one, other in pairwise(group):
            name = f"{queue[0]}:{queue[1]}"
            if one.end_offset < other.start_offset:
                problems.append(f"queue {name}: no file has offsets {one.end_offset} to {other.start_offset - 1}")
            elif one.end_offset > other.start_offset:
                problems.append(
                    f"queue {name}: offsets from {other.start_offset} on are both in file {one.path} and in file "
                    f"{other.path}"
                )
    return problems


def next_offsets(pieces: Iterable[ArchiveFile]) -> dict[QueueKey, int]:
    """Return the offset after the last archived message of each queue. Raises StoreCorruptError if the files of a queue
    have a gap or overlap."""
    pieces = list(pieces)
    for problem in problems_of(pieces):
        raise StoreCorruptError(
            f"the archive is damaged: {problem}; restore the file, or archive the topic again in another directory"
        )
    return {piece.queue: piece.end_offset for piece in sorted(pieces)}


def plan_round(
    queues: Mapping[MessageQueue, QueueBounds],
    done: Mapping[QueueKey, int],
    *,
    most: int,
    parallelism: int = 1,
    skip_lost: bool = False,
) -> ArchiveStep:
    """Plan the next archive round: at most `most` messages after the offsets in `done`, divided between the queues that
    have messages.

    The archive of a new queue begins with the queue's first message. Raises DataLossError if a queue no longer holds
    the offsets after `done`; with `skip_lost`, the round records these offsets as missing instead. Raises
    StoreCorruptError if a queue ends before its offset in `done`.
    """
    ranges, absent = [], []
    waiting = {queue: bounds for queue, bounds in queues.items() if _start(queue, bounds, done) < bounds.max_offset}
    each = max(most // max(len(waiting), 1), 1)
    for queue, bounds in sorted(queues.items()):
        key = queue.broker_name, queue.queue_id
        start = _start(queue, bounds, done)
        if bounds.max_offset < start:
            raise StoreCorruptError(
                f"queue {queue} ends at offset {bounds.max_offset}, but the archive has its offsets up to "
                f"{start}: the topic was deleted and created again; archive the topic in another directory"
            )
        if start < bounds.min_offset:
            lost = f"queue {queue}: offsets {start} to {bounds.min_offset - 1} were deleted before they were archived"
            if not skip_lost:
                raise DataLossError(f"{lost}; to continue without these messages: --skip-lost")
            absent.append(ArchiveFile(*key, start, bounds.min_offset, ""))
            start = bounds.min_offset
        end = min(bounds.max_offset, start + each)
        if start < end:
            ranges.append(OffsetRange(queue.topic, *key, start, end))
    total = sum(item.size for item in ranges)
    size = max(-(-total // parallelism), SPLIT_MESSAGES)
    return ArchiveStep(tuple(part for item in ranges for part in _cut(item, size)), tuple(absent))


def _cut(item: OffsetRange, size: int) -> Iterator[OffsetRange]:
    """Cut an offset range into parts of `size` offsets; the last part may be smaller."""
    for start in range(item.start_offset, item.end_offset, size):
        yield replace(item, start_offset=start, end_offset=min(start + size, item.end_offset))


def _start(queue: MessageQueue, bounds: QueueBounds, done: Mapping[QueueKey, int]) -> int:
    return done.get((queue.broker_name, queue.queue_id), bounds.min_offset)


def check_cover(ranges: Iterable[OffsetRange], pieces: Iterable[ArchiveFile]) -> None:
    """Raise StoreCorruptError unless the archive files (`pieces`) cover every offset of each range. Several files may
    cover one range, if there is no gap between them."""
    left = sorted(pieces)
    for item in sorted(ranges, key=lambda one: (one.broker_name, one.queue_id, one.start_offset)):
        position = item.start_offset
        while position < item.end_offset and left and left[0].queue == (item.broker_name, item.queue_id):
            if left[0].start_offset != position:
                break
            position = left.pop(0).end_offset
        if position != item.end_offset:
            raise StoreCorruptError(
                f"offsets {position} to {item.end_offset - 1} of queue {item.queue} were not written"
            )
    if left:
        raise StoreCorruptError(f"file {left[0].path} was written, but does not belong to the plan")
