"""The messages that a replay reads from Parquet files, divided into lines: sequences of rows whose order never changes.

    an archive            one line per queue: its files, in the order of their offsets
    any other directory   one line per file, in the order of their names

A replay can continue a line, because each row has a number and is stored once under this number. So rows may be added
at a line's end between two runs. If the beginning of a line changes, its identity changes, and the replay treats it as
a new line.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydp_jobs.jobs.archive_files import ArchiveFile, find_pieces, next_offsets
from raydp_jobs.jobs.times import ALWAYS, Period
from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from raymq.records.kernels.byte_column import text_array

SENT_COLUMNS: Final = ("body", "tags", "keys", "properties", "sharding_key")
"""The columns that become part of a replayed message, if the files have them. Other columns are ignored."""
READ_ROWS: Final = 4096

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Line:
    """A sequence of exported rows with a fixed order, in one or more files; called a line. `name`: identifies the line,
    together with its first row, within the replay's source. `place`: a number that chooses the line's target queue;
    consecutive lines have consecutive numbers. `is_queue`: True if the rows were the messages of one queue."""

    name: str
    files: tuple[Path, ...]
    place: int
    is_queue: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter for the messages to replay: stored in `period`, from one of `queues` (broker group and queue id), with
    one of `tags`. Empty `queues` mean all queues, and empty `tags` mean all tags."""

    period: Period = ALWAYS
    queues: frozenset[tuple[str, int]] = frozenset()
    tags: frozenset[str] = frozenset()

    @property
    def columns(self) -> list[str]:
        """The Parquet columns that the selection needs: a replay may select rows by store time, by queue and by
        tag."""
        wanted = ["store_timestamp"] if self.period != ALWAYS else []
        wanted += ["broker_name", "queue_id"] if self.queues else []
        return wanted + (["tags"] if self.tags else [])

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch that match the selection, in order."""
        masks = []
        if self.period != ALWAYS:
            stored_ms = batch.column("store_timestamp").cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
            if self.period.start_ms is not None:
                masks.append(pc.greater_equal(stored_ms, self.period.start_ms))
            if self.period.end_ms is not None:
                masks.append(pc.less(stored_ms, self.period.end_ms))
        if self.tags:
            masks.append(pc.is_in(batch.column("tags"), value_set=text_array(sorted(self.tags))))
        if self.queues:
            of_queues = [
                pc.and_(pc.equal(batch.column("broker_name"), broker), pc.equal(batch.column("queue_id"), queue_id))
                for broker, queue_id in sorted(self.queues)
            ]
            masks.append(_combined(pc.or_, of_queues))
        return batch.filter(_combined(pc.and_, masks)) if masks else batch

    def text(self) -> str:
        """The replay's message filter, encoded as text for the replay's producer id."""
        queues = ",".join(f"{broker}:{queue_id}" for broker, queue_id in sorted(self.queues))
        return f"{self.period.start_ms} {self.period.end_ms} [{queues}] [{','.join(sorted(self.tags))}]"


EVERYTHING: Final = Selection()
"""The message filter without conditions: it selects every row."""


def _combined(combine: pc.Function, masks: list[pa.Array]) -> pa.Array:
    result = masks[0]
    for mask in masks[1:]:
        result = combine(result, mask)
    return result


def lines_of(source: Path) -> list[Line]:
    """Divide the source of a replay into lines (sequences of rows). The source is an archive of one topic, a directory
    with Parquet files, or one Parquet file.

    Raises InvalidArgumentError for any other path, and StoreCorruptError for an archive with a gap.
    """
    if source.is_file():
        return [_file_line(source, source.name)]
    if not source.is_dir():
        raise InvalidArgumentError(f"source {source} does not exist: name a Parquet file or a directory")
    if any(_is_piece(path.relative_to(source)) for path in source.glob("day=*/*.parquet")):
        return _archive_lines(source)
    topics = sorted({path.parent.parent.name for path in source.glob("*/day=*/*.parquet")})
    if topics:
        raise InvalidArgumentError(
            f"directory {source} has archives of several topics: name one archive, such as {source / topics[0]}"
        )
    files = sorted(path for path in source.rglob("*.parquet") if not _is_hidden(path.relative_to(source)))
    if not files:
        raise InvalidArgumentError(f"directory {source} has no Parquet file")
    return [_file_line(path, str(path.relative_to(source))) for path in files]


def _archive_lines(source: Path) -> list[Line]:
    pieces = find_pieces(source)
    # only a check: `next_offsets` raises StoreCorruptError if the offset ranges of the archive's files have a gap or
    # overlap
    next_offsets(pieces)
    lines = []
    for (broker_name, queue_id), group in groupby(pieces, key=lambda piece: piece.queue):
        files = [piece for piece in group if piece.day]
        if files:
            # The name of a queue's line (sequence of rows) contains the start offset of the line's first file. If the
            # oldest archive files of a queue are deleted, all later rows of the queue get other row numbers. With the
            # new name, the line then counts as a new line.
            name = f"{broker_name}:{queue_id} from {files[0].start_offset}"
            place = crc32(broker_name.encode()) + queue_id
            lines.append(Line(name, tuple(source / piece.path for piece in files), place, True))
    return lines


def _file_line(path: Path, name: str) -> Line:
    footer = metadata_of_file(path)
    text = f"{name} with {footer.num_rows} rows in {path.stat().st_size} bytes"
    return Line(text, (path,), crc32(text.encode()), False)


def _is_piece(path: Path) -> bool:
    try:
        ArchiveFile.parse(path)
    except StoreCorruptError:
        return False
    return True


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def metadata_of_file(path: Path) -> pq.FileMetaData:
    """Return a Parquet file's footer. Raises StoreCorruptError if the file has no valid footer."""
    try:
        return pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise StoreCorruptError(f"file {path} cannot be read: {error}") from None


def read_line(line: Line, selection: Selection) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Read the rows of a line (a sequence of rows) in order. Yields the number of rows read, and a batch with the rows
    that match the selection, in the columns of a message.

    Raises InvalidArgumentError if a file lacks bodies or a column that the selection needs, and StoreCorruptError if a
    file is damaged.
    """
    for path in line.files:
        names = metadata_of_file(path).schema.to_arrow_schema().names
        missing = [name for name in ("body", *selection.columns) if name not in names]
        if missing:
            raise InvalidArgumentError(
                f"file {path} has no column {', '.join(missing)}; its columns are {', '.join(names)}"
            )
        sent = [name for name in SENT_COLUMNS if name in names]
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                for batch in file.iter_batches(READ_ROWS, columns=list(dict.fromkeys([*sent, *selection.columns]))):
                    chosen = selection.of(batch).select(sent)
                    yield batch.num_rows, _readable(chosen, path) if line.is_queue else chosen
        except (OSError, pa.ArrowException) as error:
            raise StoreCorruptError(f"file {path} is damaged: {error}") from None


def _readable(batch: pa.RecordBatch, path: Path) -> pa.RecordBatch:
    """Return the rows of an archive's batch that have a body. A message that was already damaged when it was archived
    has no body, and is omitted."""
    body = batch.column("body")
    if not body.null_count:
        return batch
    logger.warning("file %s: %d unreadable messages are not replayed", path, body.null_count)
    return batch.filter(body.is_valid())


def producer_id(name: str, line: Line, selection: Selection) -> str:
    """Return the producer id (64 characters) under which the rows of a line (a sequence of rows) are stored. The id is
    different for each replay, line and selection."""
    text = f"{name}\n{line.name}\n{selection.text()}"
    return f"replay/{hashlib.sha256(text.encode()).hexdigest()[:48]}"
