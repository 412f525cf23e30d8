"""Messages of a queue for the tests of what holds them: made-up records that are cut by offset."""

from __future__ import annotations

from collections.abc import Sequence

from actors.core.consume.message_run import MessageRun
from raymq.record.layout import RecordHeader, header_size

RECORD_BYTES = header_size(0) + 12


def run_of(offsets: Sequence[int], *, reconsume_times: int = 0) -> MessageRun:
    """A run with a record per offset, all of one size; a record has a header and nothing that can be decoded."""
    records = b"".join(_record(offset, reconsume_times) for offset in offsets)
    return MessageRun.read(records)


def _record(offset: int, reconsume_times: int) -> bytes:
    header = RecordHeader(RECORD_BYTES, 0, 0, 0, 0, offset, 0, 0, 0, bytes(8), 0, bytes(8), reconsume_times, 0, 0)
    return header.encode().ljust(RECORD_BYTES, b".")
