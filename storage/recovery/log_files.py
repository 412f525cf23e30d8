"""Reads the files of a log during recovery: their bytes, and their records in blocks."""

from __future__ import annotations

from raymq.records.format.dispatch import DispatchView
from storage.dispatch.record_blocks import BLOCK_BYTES, Block, read_block
from storage.parts import StoreParts


class LogFiles:
    """The files of one log, for recovery."""

    def __init__(self, parts: StoreParts) -> None:
        self.log, self._reader = parts.log, parts.reader
        self._after_crash, settings = parts.after_crash, parts.settings
        self.delay_levels_ms = settings.delay_levels_ms
        # The property CRC covers the whole record, so with it the body's own CRC adds nothing.
        check_property_crc = settings.force_verify_prop_crc
        check_crc = settings.check_crc_on_recover and not check_property_crc
        self.checks = {"check_crc": check_crc, "check_property_crc": check_property_crc}
        """Arguments of `check_record` for the records of this log."""

    def data(self, start: int) -> memoryview:
        """Return the bytes of the file that starts at a physical offset."""
        return self._reader.maps.get(str(self.log.path(start))).data

    def bytes_at(self, physical_offset: int, size: int) -> memoryview:
        """Return `size` bytes from a physical offset on; all of them are in one file."""
        start = physical_offset - physical_offset % self.log.file_size
        return self.data(start)[physical_offset - start : physical_offset - start + size]

    def checked_block(self, start: int, position: int) -> Block | None:
        """Return a block of the records from a position of a file on that pass all checks. None if they must be checked
        one at a time."""
        if self.checks["check_property_crc"]:
            return None
        return self.block(start, position, check_crc=self.checks["check_crc"])

    def block(self, start: int, position: int, *, check_crc: bool) -> Block | None:
        """Return a block of the records from a position of a file on. None if they must be read one at a time."""
        return read_block(
            self.data(start),
            position,
            start + position,
            check_crc=check_crc,
            delay_levels_ms=self.delay_levels_ms,
            may_be_torn=self._after_crash,
        )

    def singles_end(self, position: int) -> int:
        """Return the position up to which records are read one at a time after `position` gave no block."""
        return position + BLOCK_BYTES


def placed_view(view: DispatchView, physical_offset: int) -> DispatchView:
    """Return a record's view with the record's actual physical offset, whatever offset the record contains."""
    return view if view.physical_offset == physical_offset else view._replace(physical_offset=physical_offset)
