"""The log as a section of a store's verification, and the interface of all sections.

The scrubber (scrubber.py) reads one section after another, in steps of at most about PART_BYTES. A step loads its range
in passing (page_cache.py), checks it, and repairs what it can. The log's records are checked by the LogInspector
(inspector.py), together with the queue units that the records name.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from raymq.common.errors import DataLossError
from raymq.common.protocol.store import Hole
from storage.files.page_cache import passing_read
from storage.parts import StoreParts
from storage.scrub.inspector import LogInspector

PART_BYTES: Final = 512 << 10
"""Number of bytes that one step reads. Between two steps the scrubber waits, so that no message waits long."""
_RECORD_REACH_MAX: Final = 8 << 20
"""Maximum number of bytes after a part that belong to a record which begins in the part. A longer record leaves pages
in the page cache."""
_RECORD_REACH_EXTRA: Final = 128 << 10


class Checked(NamedTuple):
    """The result of one step of a section."""

    position: str | None
    """The position at which the next step begins. None if the section is complete."""
    read_bytes: int = 0
    found: int = 0
    """Number of damaged places that are not holes (damaged ranges of the log)."""
    repaired: int = 0
    holes: tuple[Hole, ...] = ()
    """The new holes of the log. Another replica's bytes repair them later."""
    unrepaired: tuple[str, ...] = ()
    """Descriptions of damage outside of the log that was found and not repaired."""


class Section(Protocol):
    """One kind of files of a store. `step` is called by one thread. It holds no lock while it reads the disk."""

    name: str

    def size(self) -> int:
        """Return the number of bytes that a verification of the section reads."""
        ...

    def step(self, position: str) -> Checked:
        """Check the next part of the section, from `position` on; "" is the section's beginning."""
        ...


class LogSection:
    """The files of the commit log, from the oldest record to the end of the written log."""

    name = "log"

    def __init__(self, parts: StoreParts, inspector: LogInspector) -> None:
        self._log, self._reader, self._inspector = parts.log, parts.reader, inspector
        record_max = parts.settings.max_message_size_bytes + _RECORD_REACH_EXTRA
        self._reach = min(record_max, _RECORD_REACH_MAX)

    def size(self) -> int:
        return max(self._log.committed_offset - self._log.min_offset, 0)

    def step(self, position: str) -> Checked:
        """Check the log's records from the physical offset `position` on. Raises StoreNotWritableError if damage cannot
        be recorded."""
        log = self._log
        begin, end = max(int(position or 0), log.min_offset), log.committed_offset
        if begin >= end:
            return Checked(None)
        file_start = begin - begin % log.file_size
        until = min(begin + PART_BYTES, file_start + log.file_size, end)
        path = log.path(file_start)
        try:
            with passing_read(
                path,
                begin - file_start,
                until - file_start,
                reach=self._reach,
                mapped=lambda: self._reader.log_bytes(file_start, file_start + log.file_size),
            ):
                done = self._inspector.inspect(begin, until)
        except (FileNotFoundError, DataLossError):
            if file_start >= log.min_offset:
                raise
            return Checked(str(log.min_offset))  # Retention has deleted the file.
        except OSError as error:
            # Skip the rest of the file: the search for its next intact record would read the same sector through a map.
            text = (
                f"log file {path} cannot be read from byte {begin - file_start} on, and the rest of it is not checked: "
                f"{error}"
            )
            return Checked(str(file_start + log.file_size), found=1, unrepaired=(text,))
        found = done.mended_units + done.rewritten_blanks
        behind = max(done.end_offset, log.min_offset)
        return Checked(str(behind) if behind > begin else None, behind - begin, found, found, done.holes)
