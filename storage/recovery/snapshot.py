"""A snapshot of the dedup table and of the half messages. It contains a physical offset at which recovery can start its
log scan, instead of at the start of a file.

On disk
    dedup           1a2b3c4d                the CRC-32 of what follows
                    {"end": 1234, "last": 1000, "tail": 0, "tail_crc": 99,
                     "queues": [[topic, queue, next offset]], "producers": [[id, topic, queue, epoch, runs]],
                     "transactions": {"open": [], "ended": [], "ops": []}}
    dedup.bak       the previous snapshot, which recovery uses if `dedup` is damaged
    dedup.new       the next snapshot, only while it is written. A crash may leave it: see `finish_write`

`end` is a physical offset up to which the log, the queues and this table are consistent and on disk. The record that
ends at `end` starts at `last`. The log's bytes from `tail` to `end` have the CRC-32 `tail_crc`. `queues` contains the
next offset of each queue. Without the file, or if the tail has changed, recovery scans whole files as RocketMQ does,
which takes a few seconds per GiB. If the tail has changed, recovery scans the tail's file too, to find the damage in
that file. Neither way finds damage before the tail; this damage shows when the records are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from raymq.common.errors import DataLossError
from raymq.records.format.crc import crc32
from raymq.records.logfiles.log_reader import LogReader
from storage.dispatch.dedup import ProducerRow
from storage.dispatch.half_messages import HalfMessages
from storage.files import disk
from storage.files.damage import DamageNotes
from storage.files.two_copies import keep_damaged

SNAPSHOT_FILE: Final = "dedup"
TAIL_BYTES: Final = 4 << 20
_NAMES: Final = ("end", "last", "tail", "tail_crc", "queues", "producers", "transactions")


class QueueRow(NamedTuple):
    """A row of a snapshot: a queue and its next offset."""

    topic: str
    queue_id: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of a snapshot file. The docstring of the module describes them."""

    end: int
    last: int
    tail: int
    tail_crc: int
    queues: list[QueueRow]
    producers: list[ProducerRow]
    # The half messages and outcomes, as HalfMessages.rows returns them. A file of an older version does not contain
    # this value.
    transactions: dict[str, Any]

    def fits(self, reader: LogReader) -> bool:
        """True if the log's bytes before `end` have not changed since the snapshot was taken."""
        try:
            return crc32(reader.log_bytes(self.tail, self.end)) == self.tail_crc
        except DataLossError:
            return False


def take_snapshot(
    reader: LogReader,
    *,
    end: int,
    last: int,
    queues: list[QueueRow],
    producers: list[ProducerRow],
    transactions: dict[str, Any],
) -> Snapshot:
    """Create a snapshot of the given state. It contains the CRC of the log's last bytes before `end`: at most 4 MiB,
    within one log file."""
    tail = max(last - last % reader.commit_log_file_size, end - TAIL_BYTES)
    return Snapshot(end, last, tail, crc32(reader.log_bytes(tail, end)), queues, producers, transactions)


def read_snapshot(path: Path, damage: DamageNotes) -> Snapshot | None:
    """Read the snapshot at `path`, or the previous snapshot if the file is damaged. Returns None if the file is missing
    or neither can be used. A damaged file is recorded; no file is changed."""
    for file in (path, previous_snapshot(path)):
        try:
            text = _checked_text(file)
            return None if text is None else _parse(text)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            damage.note(f"file {file} is damaged ({error}) and is ignored: recovery reads more of the log")
    return None


def previous_snapshot(path: Path) -> Path:
    """Return the path of the snapshot that was replaced by the snapshot at `path`."""
    return path.with_name(f"{path.name}.bak")


def _next_snapshot(path: Path) -> Path:
    """Return the path at which the next snapshot is written, before it replaces the snapshot at `path`."""
    return path.with_name(f"{path.name}.new")


def finish_write(path: Path) -> None:
    """Finish the write of a snapshot that a crash has interrupted. Called before the snapshot is read.

    A crash between the two renames of `write_snapshot` leaves the newest snapshot under the name of the next one, and
    it gets its own name here. Any other next snapshot is removed. On return the change is on disk.
    """
    following = _next_snapshot(path)
    try:
        is_whole = _checked_text(following) is not None
    except ValueError:
        is_whole = False
    if is_whole and not path.exists():
        disk.rename(following, path)
    elif following.exists():
        disk.unlink(following)
    else:
        return
    disk.sync_directory(path.parent)


def drop_snapshots(path: Path, after: int, damage: DamageNotes) -> None:
    """Remove the snapshots of the log beyond the physical offset `after`, because the log is cut there. Removes the
    snapshot at `path` and the previous one only if they reach beyond the offset. On return the removal is on disk."""
    disk.unlink(_next_snapshot(path))  # a failed write leaves it
    for file in (previous_snapshot(path), path):
        try:
            text = _checked_text(file)
            if text is None or _parse(text).end <= after:
                continue
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            damage.note(f"file {file} is damaged ({error}) and is ignored")
            continue
        disk.unlink(file)
    disk.sync_directory(path.parent)


def _checked_text(path: Path) -> bytes | None:
    """Return the text of a snapshot file; None if the file does not exist. Raises ValueError if it is damaged."""
    try:
        crc, _, text = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if crc != b"%08x" % crc32(text):
        raise ValueError("it does not match its checksum")
    return text


def _parse(text: bytes) -> Snapshot:
    values = json.loads(text)
    queues = [QueueRow(*row) for row in values.pop("queues")]
    producers = [ProducerRow(*row) for row in values.pop("producers")]
    transactions = values.pop("transactions", HalfMessages().rows())
    HalfMessages().load(transactions)
    return Snapshot(**values, queues=queues, producers=producers, transactions=transactions)


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replace the snapshot file at `path`, and keep the previous snapshot as `.bak`. On return the new file is on disk.
    A damaged file is kept under another name.

    The new file is whole and on disk before the old one loses its name. So a crash leaves a newest snapshot at each
    moment: without one, recovery may not learn the producers that have been idle for long. An OSError of the write
    leaves the old snapshot.
    """
    values = {name: getattr(snapshot, name) for name in _NAMES}
    text = json.dumps(values, separators=(",", ":")).encode()
    following = _next_snapshot(path)
    disk.write_file(following, b"%08x\n" % crc32(text) + text)
    try:
        if _checked_text(path) is not None:
            disk.rename(path, previous_snapshot(path))
    except ValueError:
        keep_damaged(path)
    disk.rename(following, path)
    disk.sync_directory(path.parent)
