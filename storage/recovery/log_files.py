"""Reads the files of a log during recovery: their bytes, and their records in blocks."""

from __future__ import annotations

from raymq.records.format.dispatch import DispatchView
from storage.dispatch.record_blocks import BLOCK_BYTES, Block, read_block
from storage.parts import StoreParts


class LogFiles:
    """Reads the files of one log during recovery."""

    def __init__(self, parts: StoreParts) -> None:
        self.log, self._reader = parts.log, parts.reader
        self._after_crash, settings = parts.after_crash, parts.settings
        self.delay_levels_ms = settings.delay_levels_ms
        # The property CRC covers the whole record. If recovery checks the property CRC, it need not check the body's
        # CRC, too.
        check_property_crc = settings.force_verify_prop_crc
        check_crc = settings.check_crc_on_recover and not check_property_crc
        self.checks = {"check_crc": check_crc, "check_property_crc": check_property_crc}
        """Keyword arguments for `check_record`, which checks each record of this log."""

    def data(self, start: int) -> memoryview:
        """Return the bytes of the log file that starts at a physical offset."""
        return self._reader.maps.get(str(self.log.path(start))).data

    def bytes_at(self, physical_offset: int, size: int) -> memoryview:
        """Return `size` bytes of the log from a physical offset on. All of them must be in one log file."""
        start = physical_offset - physical_offset % self.log.file_size
        return self.data(start)[physical_offset - start : physical_offset - start + size]

    def checked_block(self, start: int, position: int) -> Block | None:
        """Return a block of log records that pass all checks, from a position of a log file on. Return None if the
        caller must check the records one at a time."""
        if self.checks["check_property_crc"]:
            return None
        return self.block(start, position, check_crc=self.checks["check_crc"])

    def block(self, start: int, position: int, *, check_crc: bool) -> Block | None:
        """Return a block of log records from a position of a log file on. Return None if the caller must read the
        records one at a time."""
        return read_block(
            self.data(start),
            position,
            start + position,
            check_crc=check_crc,
            delay_levels_ms=self.delay_levels_ms,
            may_be_torn=self._after_crash,
        )

    def singles_end(self, position: int) -> int:
        """Return the position up to which records are read one at a time, because no block of records could be read at
        `position`."""
        return position + BLOCK_BYTES


def placed_view(view: DispatchView, physical_offset: int) -> DispatchView:
    """Return a record's view with the physical offset at which the record really is, whatever offset the record
    contains."""
    return view if view.physical_offset == physical_offset else view._replace(physical_offset=physical_offset)
