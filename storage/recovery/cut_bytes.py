"""Keeps a copy of the bytes that recovery cuts off the end of a log, so that an operator can inspect them.

On disk
    lost+cut/00000000000000184232       the bytes from that physical offset on; not read by the store

For each cut, at most CUT_KEPT_MAX_BYTES are kept. The copies of the last KEPT_FILES_MAX cuts are kept. Operators can
delete the copies at any time.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from raymq.records.logfiles.directory import file_name
from storage.files import disk
from storage.log.commit_log import CommitLog

CUT_DIR: Final = "lost+cut"
CUT_KEPT_MAX_BYTES: Final = 64 << 20
KEPT_FILES_MAX: Final = 8

logger = logging.getLogger(__name__)


def keep_cut_bytes(root: Path, log: CommitLog, end_offset: int) -> None:
    """Copy the bytes of a log from `end_offset` up to the last byte that is not zero, before the log is cut at
    `end_offset`. If the disk cannot store the copy, this is logged, and the log is cut all the same."""
    left_bytes = CUT_KEPT_MAX_BYTES
    try:
        for start in log.starts:
            position = max(end_offset - start, 0)
            if position >= log.file_size or left_bytes <= 0:
                continue
            size = min(log.used_end(start, position) - position, left_bytes)
            if size > 0:
                with log.path(start).open("rb") as file:
                    file.seek(position)
                    _write(root / CUT_DIR, start + position, file.read(size))
                left_bytes -= size
    except OSError as error:
        logger.warning(
            "%s: cannot keep a copy of the bytes that are cut after physical offset %d: %s", root, end_offset, error
        )


def _write(directory: Path, physical_offset: int, data: bytes) -> None:
    disk.make_directory(directory)
    before = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in before[: max(len(before) - KEPT_FILES_MAX + 1, 0)]:
        disk.unlink(path)
    disk.write_file(directory / file_name(physical_offset), data)
    disk.sync_directory(directory)
