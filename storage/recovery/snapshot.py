"""A snapshot of the dedup table and of the half messages. It contains a physical offset at which recovery can start its
log scan, instead of at the start of a file.

On disk
    dedup           1a2b3c4d                the CRC-32 of what follows
                    {"end": 1234, "last": 1000, "tail": 0, "tail_crc": 99,
                     "queues": [[topic, queue, next offset]], "producers": [[id, topic, queue, epoch, runs]],
                     "transactions": {"open": [], "ended": [], "ops": []}}

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
    """Read the snapshot at `path`. Returns None if the file does not exist or is unusable; an unusable file is recorded
    as damage."""
    try:
        crc, _, text = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if crc != b"%08x" % crc32(text):
        damage.note(f"file {path} is damaged and is ignored: recovery reads its content from the log")
        return None
    try:
        return _parse(text)
    except (AttributeError, KeyError, TypeError, ValueError):
        damage.note(f"file {path} has another format and is ignored: recovery reads its content from the log")
        return None


def _parse(text: bytes) -> Snapshot:
    values = json.loads(text)
    queues = [QueueRow(*row) for row in values.pop("queues")]
    producers = [ProducerRow(*row) for row in values.pop("producers")]
    transactions = values.pop("transactions", HalfMessages().rows())
    HalfMessages().load(transactions)
    return Snapshot(**values, queues=queues, producers=producers, transactions=transactions)


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replace the snapshot file at `path`; on return the new file is on disk."""
    values = {name: getattr(snapshot, name) for name in _NAMES}
    text = json.dumps(values, separators=(",", ":")).encode()
    disk.replace_file(path, b"%08x\n" % crc32(text) + text)
