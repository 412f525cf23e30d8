"""Builds records and logs in the format of RocketMQ 4.9, which writes no separator after the last property."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from raymq.records.format.crc import body_crc
from raymq.records.format.layout import MAGIC_V1, encode_blank, encode_host
from raymq.records.logfiles.directory import file_name
from tests.support.stores.stores import LOG_FILE_BYTES

STORED_MS = 1_700_000_000_000


class Row(NamedTuple):
    """A message of `topic`:`queue_id` at `queue_offset`, with its properties as stored on disk."""

    topic: str
    queue_id: int
    queue_offset: int
    properties: bytes
    body: bytes = b"x" * 10


def encode_row(row: Row, physical_offset: int, store_timestamp_ms: int = STORED_MS) -> bytes:
    topic, host = row.topic.encode(), encode_host("127.0.0.1", 10911)
    head = struct.pack(
        ">iiiiiqqiq8sq8siqi",
        91 + len(row.body) + len(topic) + len(row.properties),
        MAGIC_V1, body_crc(row.body), row.queue_id, 0, row.queue_offset, physical_offset, 0, STORED_MS,
        host, store_timestamp_ms, host, 0, 0, len(row.body),
    )  # fmt: skip
    tail = struct.pack(">h", len(row.properties)) + row.properties
    return head + row.body + bytes([len(topic)]) + topic + tail


def write_log(root: Path, rows: Sequence[Row], *, file_size: int = LOG_FILE_BYTES, crashed: bool = False) -> int:
    """Write a store directory that has only a commit log. Returns the log's end offset."""
    (root / "commitlog").mkdir(parents=True)
    files = [bytearray()]
    for row in rows:
        record = encode_row(row, len(files) * file_size - file_size + len(files[-1]))
        if len(files[-1]) + len(record) + 8 > file_size:
            files[-1] += encode_blank(file_size - len(files[-1]))
            files.append(bytearray())
            record = encode_row(row, len(files) * file_size - file_size)
        files[-1] += record
    for index, data in enumerate(files):
        (root / "commitlog" / file_name(index * file_size)).write_bytes(data.ljust(file_size, b"\0"))
    if crashed:
        (root / "abort").write_text("1")
    return len(files) * file_size - file_size + len(files[-1])
