"""The index, the compacted logs and the recovery files as sections of a store's verification.

    index files       compared with their checksums (index_sums.py); a damaged one is rebuilt from the log
    compacted logs    each record is checked, and compared with its unit; damage is overwritten from the commit log
    recovery files    the snapshot (`dedup`) and the checkpoint; a damaged one is written again from memory

An index file that still takes entries has no checksum yet and is not checked. A compacted log can outlive the records
in the commit log. Then its damage is only reported: its bytes stay, and readers get an error for the damaged record.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from raymq.common.errors import DataLossError, StoreNotWritableError
from raymq.records.format.check import check_record
from raymq.records.format.crc import crc32
from raymq.records.logfiles.own_records import is_at
from storage.append.write_gate import WriteGate
from storage.files import disk
from storage.files.page_cache import passing_read
from storage.index.index_service import IndexService
from storage.parts import StoreParts
from storage.queue.compacted_log import CompactedLog
from storage.queue.consume_queue import ConsumeQueue
from storage.scrub.log_section import PART_BYTES, Checked

ROWS_MAX: Final = 4096
"""Maximum number of records of a compacted log that one step checks."""

logger = logging.getLogger(__name__)


class IndexSection:
    """The index files that take no more entries. A position is a file's name, a byte of it, and the checksum of the
    bytes before, as JSON."""

    name = "index"

    def __init__(self, index: IndexService) -> None:
        self._index = index

    def size(self) -> int:
        return sum(length for _, length, _ in self._index.sealed())

    def step(self, position: str) -> Checked:
        """Read the next part of an index file. At its end, compare the checksum, and start the rebuild of a damaged
        file. Raises OSError if the disk fails."""
        name, begin, crc = json.loads(position) if position else ("", 0, 0)
        found = next((one for one in self._index.sealed() if one[0].name >= name), None)
        if found is None:
            return Checked(None)
        path, length, expected = found
        if path.name != name:
            name, begin, crc = path.name, 0, 0
        end = min(begin + PART_BYTES, length)
        try:
            with passing_read(path, begin, end), path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), end - begin, begin)
        except FileNotFoundError:
            return Checked(json.dumps([f"{name}~", 0, 0]))  # Retention has deleted the file.
        except OSError as error:
            text = f"index file {path} cannot be read from byte {begin} on: {error}"
            return Checked(json.dumps([f"{name}~", 0, 0]), found=1, unrepaired=(text,))
        crc = crc32(data, crc)
        if end < length:
            return Checked(json.dumps([name, end, crc]), end - begin)
        behind = json.dumps([f"{name}~", 0, 0])
        if crc == expected:
            return Checked(behind, end - begin)
        self._index.rebuild_from(path)
        return Checked(behind, end - begin, found=1, repaired=1)


class CompactedSection:
    """The compacted logs of all queues. A position is a queue and a row of its compacted log, as JSON."""

    name = "compacted"

    def __init__(self, parts: StoreParts, gate: WriteGate) -> None:
        self._parts, self._gate = parts, gate

    def size(self) -> int:
        return sum(log.used_bytes for _, log in self._logs())

    def step(self, position: str) -> Checked:
        """Check the next records of a compacted log. Raises StoreNotWritableError if the disk fails."""
        topic, queue_id, row = json.loads(position) if position else ("", -1, 0)
        at = (topic, queue_id)
        found = min((one for one in self._logs() if one[0].key >= at), key=lambda one: one[0].key, default=None)
        if found is None:
            return Checked(None)
        queue, log = found
        row = row if queue.key == at else 0
        rows = log.rows_from(row, ROWS_MAX, PART_BYTES)
        if not len(rows):
            return Checked(json.dumps([queue.topic, queue.queue_id + 1, 0]))
        behind = json.dumps([*queue.key, int(rows[-1]) + 1])
        begin, end = log.span_of(rows)
        try:
            with passing_read(log.log_path, begin, end, mapped=lambda: log.data):
                checked = self._check(queue, log, rows.tolist())
        except FileNotFoundError:
            return Checked(behind)  # A newer generation has replaced this one.
        except OSError as error:
            text = f"compacted log {log.log_path} cannot be read from byte {begin} on: {error}"
            return Checked(behind, found=1, unrepaired=(text,))
        return checked._replace(position=behind, read_bytes=end - begin)

    def _logs(self) -> list[tuple[ConsumeQueue, CompactedLog]]:
        return [(one, one.compacted) for one in self._parts.queues.plain if one.compacted is not None]

    def _check(self, queue: ConsumeQueue, log: CompactedLog, rows: list[int]) -> Checked:
        found = repaired = 0
        unrepaired: list[str] = []
        for row in rows:
            if log.is_damaged(row) or _is_intact(log, row):
                continue
            found += 1
            if self._repair(log, row):
                repaired += 1
            else:
                name = f"{queue.topic}:{queue.queue_id} at offset {log.units[row]['queue_offset']}"
                unrepaired.append(
                    f"the record of queue {name} is damaged in {log.log_path}, and lost in the commit log"
                )
        return Checked("", 0, found, repaired, (), tuple(unrepaired))

    def _repair(self, log: CompactedLog, row: int) -> bool:
        """Overwrite a damaged record of a compacted log by the intact record of the commit log, if it is still there.
        Returns True if the record is intact now."""
        unit = log.units[row]
        begin, size = int(unit["physical_offset"]), int(unit["size"])
        try:
            record = bytes(self._parts.reader.log_bytes(begin, begin + size))
        except DataLossError:
            return False
        if check_record(record) != (size, True) or not is_at(memoryview(record), begin, int(unit["queue_offset"])):
            return False
        self._gate.require_open()
        try:
            disk.overwrite(log.log_path, int(unit["position"]), record)
        except FileNotFoundError:
            return True  # A newer generation has replaced this one.
        except OSError as error:
            self._gate.fail(error)
            raise StoreNotWritableError(f"a damaged record of {log.log_path} cannot be rewritten: {error}") from error
        logger.error("%s: the damaged record at byte %d has been rewritten", log.log_path, unit["position"])
        return _is_intact(log, row)


def _is_intact(log: CompactedLog, row: int) -> bool:
    """True if a record of a compacted log passes its checks, and is the record that its unit names."""
    unit = log.units[row]
    [record] = log.records(np.array([row]))
    size = int(unit["size"])
    return check_record(record) == (size, True) and is_at(
        record, int(unit["physical_offset"]), int(unit["queue_offset"])
    )


class RecoveryFilesSection:
    """The snapshot and the checkpoint of a store. They are written again if they are damaged."""

    name = "recovery files"

    def __init__(self, damaged_files: Callable[[], list[Path]], rewrite: Callable[[], None]) -> None:
        """`damaged_files` returns the damaged ones of these files. `rewrite` writes all of them again."""
        self._damaged_files, self._rewrite = damaged_files, rewrite

    def size(self) -> int:
        return 0

    def step(self, position: str) -> Checked:
        """Check the files, and write them again if one is damaged. Raises OSError if the disk fails."""
        damaged = self._damaged_files()
        if not damaged:
            return Checked(None)
        names = ", ".join(str(path) for path in damaged)
        logger.error("damaged by the disk, and written again: %s", names)
        self._rewrite()
        left = tuple(f"file {path} is damaged" for path in self._damaged_files())
        return Checked(None, 0, len(damaged), len(damaged) - len(left), (), left)
