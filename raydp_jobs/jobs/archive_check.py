"""Checks an archive: compares each file with its name, metadata and rows, and finds gaps between the files of a
queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydp_jobs.jobs.archive_files import ArchiveFile, QueueKey, find_pieces, problems_of
from raydp_jobs.jobs.archive_writer import metadata_of
from raymq.common.errors import StoreCorruptError

BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class ArchivedQueue:
    """The archived part of a queue: offsets from `start_offset` up to, not including, `end_offset`.

    `absent`: number of offsets in this part for which the archive has no message. Most of these messages were deleted
    before they could be archived.
    """

    broker_name: str
    queue_id: int
    start_offset: int
    end_offset: int
    files: int
    messages: int
    absent: int


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """The result of checking an archive: its queues, and one sentence per problem."""

    queues: tuple[ArchivedQueue, ...]
    problems: tuple[str, ...]

    @property
    def messages(self) -> int:
        """The number of messages in the archive."""
        return sum(queue.messages for queue in self.queues)


def check_file(path: Path, topic: str, piece: ArchiveFile) -> int:
    """Check an archive file's metadata, row count and offsets against its name (`piece`). Returns the number of rows.

    Raises StoreCorruptError if they differ, or if the file is incomplete. Reads only the Parquet footer, not the rows.
    """
    try:
        footer = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise StoreCorruptError(f"file {path} cannot be read: {error}") from None
    told = {key.decode(): value.decode() for key, value in (footer.metadata or {}).items() if key.startswith(b"raymq.")}
    rows = int(footer.num_rows)
    if told != metadata_of(topic, piece, rows):
        raise StoreCorruptError(f"file {path} has {rows} rows, but its metadata gives {told}")
    names = footer.schema.to_arrow_schema().names
    column = names.index("queue_offset") if "queue_offset" in names else -1
    if column < 0 or not 0 < rows <= piece.end_offset - piece.start_offset:
        raise StoreCorruptError(f"file {path} cannot contain all messages of its offset range: it has {rows} rows")
    for lowest, highest in _bounds(footer, "queue_offset"):
        if lowest < piece.start_offset or highest >= piece.end_offset:
            raise StoreCorruptError(f"file {path} has offsets {lowest} to {highest}, which do not match its name")
    return rows


def _bounds(footer: Any, name: str) -> Iterator[tuple[int, int]]:
    """Yield the minimum and maximum of a Parquet column for each row group. Skips row groups without
    statistics."""
    for group in range(footer.num_row_groups):
        columns = [footer.row_group(group).column(index) for index in range(footer.num_columns)]
        for column in columns:
            if column.path_in_schema == name and column.statistics is not None and column.statistics.has_min_max:
                yield column.statistics.min, column.statistics.max


def check_rows(path: Path, topic: str, piece: ArchiveFile) -> None:
    """Read a whole archive file and verify its checksums. Check that its rows are exactly the messages that its name
    (`piece`) states, in order.

    Raises StoreCorruptError if a check fails.
    """
    position, day = piece.start_offset, date.fromisoformat(piece.day)
    queue = {"topic": topic, "broker_name": piece.broker_name, "queue_id": piece.queue_id}
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                offsets = batch.column("queue_offset")
                ascending = len(offsets) < 2 or pc.all(pc.greater(offsets[1:], offsets[:-1])).as_py()
                if not ascending or offsets[0].as_py() < position:
                    raise StoreCorruptError(
                        f"file {path}: after offset {position - 1} the offsets are out of order, or an offset "
                        "occurs twice"
                    )
                position = offsets[-1].as_py() + 1
                for name, value in queue.items():
                    if batch.column(name).unique().to_pylist() != [value]:
                        raise StoreCorruptError(f"file {path} has messages whose {name} is not {value}")
                # Ignore messages without a store time: they were already damaged when they were archived.
                days = pc.floor_temporal(batch.column("store_timestamp").drop_null(), unit="day").cast(pa.date32())
                if days.unique().to_pylist() not in ([day], []):
                    raise StoreCorruptError(f"file {path} has messages that were not stored on {piece.day}")
    except (OSError, pa.ArrowException) as error:
        raise StoreCorruptError(f"file {path} is damaged: {error}") from None
    if position > piece.end_offset:
        raise StoreCorruptError(f"file {path} has offset {position - 1}, which does not match its name")


def verify(directory: Path, topic: str, advance: Callable[[int], None] = lambda count: None) -> ArchiveReport:
    """Check every file of a topic's archive with all its rows, and check that no queue has a gap.

    `advance` is called with 1 after each file. The returned report lists the problems; this function does not raise
    them as errors.
    """
    problems: list[str] = []
    folder = directory / topic
    try:
        pieces = find_pieces(folder)
    except StoreCorruptError as error:
        return ArchiveReport((), (str(error),))
    rows: dict[ArchiveFile, int] = {}
    for piece in pieces:
        if piece.day:
            try:
                rows[piece] = check_file(folder / piece.path, topic, piece)
                check_rows(folder / piece.path, topic, piece)
            except StoreCorruptError as error:
                problems.append(str(error))
        advance(1)
    return ArchiveReport(summary(pieces, rows), (*problems, *problems_of(pieces)))


def summary(pieces: list[ArchiveFile], rows: dict[ArchiveFile, int]) -> tuple[ArchivedQueue, ...]:
    """Summarise archive files (`pieces`) by queue. `rows`: the number of rows of each file."""
    of_queue: dict[QueueKey, list[ArchiveFile]] = {}
    for piece in sorted(pieces):
        of_queue.setdefault(piece.queue, []).append(piece)
    queues = []
    for key, some in of_queue.items():
        start, end = some[0].start_offset, some[-1].end_offset
        messages = sum(rows.get(piece, 0) for piece in some)
        unread = sum(piece.end_offset - piece.start_offset for piece in some if piece.day and piece not in rows)
        absent = sum(piece.end_offset - piece.start_offset for piece in some) - messages - unread
        files = sum(1 for piece in some if piece.day)
        queues.append(ArchivedQueue(*key, start, end, files, messages, absent))
    return tuple(queues)
