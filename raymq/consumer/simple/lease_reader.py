"""Reads the messages of leased ranges from the storage actors: in the mapped files on the same node, else by fetches.

A change of how leased offsets become messages belongs here. The broker has seen that the offsets are visible, so nobody
is asked for a queue's end. What a subscription excludes is skipped where it lies, by its tag code or by the filter
expression.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from raymq.consumer.subscription import Subscription
from raymq.errors import DataLossError, ServiceNotAvailableError, StoreCorruptError
from raymq.kernels.messages import read_messages
from raymq.message import MessageExt, MessageQueue, PullStatus
from raymq.protocol.pop import LeasedRange
from raymq.protocol.store import FetchRequest
from raymq.record.layout import RecordError
from raymq.record.memory_records import LocatedRecords
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

LEASE_FETCH_MAX_BYTES: Final = 8 << 20
LEASE_FETCH_TIMEOUT_S: Final = 5.0
LEASE_READ_TIMEOUT_S: Final = 20.0
"""Bounds the reading of one range, over a restart of its storage actor."""


@dataclass(slots=True)
class LeasedMessages:
    """The messages of one leased range, up to `end`, with the records that they are in."""

    messages: list[MessageExt] = field(default_factory=list)
    parts: list[tuple[LocatedRecords, list[int] | range]] = field(default_factory=list)
    """The records that they were read with, and the places of the messages among them."""
    end: int = 0
    """Everything before this offset was looked at."""
    size_bytes: int = 0

    def record(self, index: int) -> bytes:
        """The whole record of a message."""
        for part, rows in self.parts:
            if index < len(rows):
                start = int(part.starts[rows[index]])
                return bytes(part.data[start : start + int(part.sizes[rows[index]])])
            index -= len(rows)
        raise IndexError(index)


class LeaseReader:
    """Reads leased ranges. Thread-safe."""

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        self._routes, self._storages = routes, storages

    def read(self, broker_name: str, given: LeasedRange, wanted: Subscription, max_bytes: int) -> LeasedMessages:
        """The wanted messages of a range, at most about `max_bytes` of records, but one at least.

        Retried for LEASE_READ_TIMEOUT_S, and raises RaymqError then; StoreCorruptError for a damaged record.
        """
        queue = MessageQueue(given.topic, broker_name, given.queue_id)
        found = LeasedMessages(end=given.start)
        deadline_s = time.monotonic() + LEASE_READ_TIMEOUT_S

        def read(storage: StorageClient, left_s: float) -> None:
            for part, next_offset in _parts(storage, given, found.end, wanted, max_bytes - found.size_bytes):
                _add(found, part, queue, wanted, given)
                found.end = next_offset
                found.size_bytes += int(part.sizes.sum())
                if found.size_bytes >= max_bytes:
                    return

        call_master(self._routes, self._storages, queue, max(0.1, deadline_s - time.monotonic()), read)
        return found


def _parts(
    storage: StorageClient, given: LeasedRange, offset: int, wanted: Subscription, max_bytes: int
) -> Iterator[tuple[LocatedRecords, int]]:
    """The records of a range from `offset` on, in parts, each with the offset to go on at. RaymqError."""
    end = given.start + given.count
    reader = storage.reader()
    while offset < end:
        request = FetchRequest(given.topic, given.queue_id, offset, end - offset, wanted.tag_codes, wanted.sql)
        try:
            if reader is None:
                raise DataLossError("the files are on another node")
            located, next_offset = reader.find(request, end, max_bytes)
        except DataLossError:
            part, offset = _fetch(storage, request, min(max_bytes, LEASE_FETCH_MAX_BYTES), end)
            yield part, offset
            continue
        for index, part in enumerate(located):
            last = index == len(located) - 1
            yield part, next_offset if last else int(part.offsets[-1]) + 1
        if not located:
            yield LocatedRecords.read(b""), next_offset
        offset = next_offset


def _fetch(storage: StorageClient, request: FetchRequest, max_bytes: int, end: int) -> tuple[LocatedRecords, int]:
    [result] = storage.fetch([request], max_bytes, 0.0, LEASE_FETCH_TIMEOUT_S)
    if result.max_offset < end:
        # It was visible in another store, or will be in a moment: this one leads, and has not shown it yet.
        raise ServiceNotAvailableError(f"{storage.name} does not show offset {end - 1} of {request.topic} yet")
    if result.status is PullStatus.NO_NEW_MESSAGE or result.next_offset <= request.queue_offset:
        raise ServiceNotAvailableError(f"{storage.name} does not show offset {request.queue_offset} now")
    records = LocatedRecords.read(result.records) if result.count else LocatedRecords.read(b"")
    return records, min(end, result.next_offset)


def _add(
    found: LeasedMessages, part: LocatedRecords, queue: MessageQueue, wanted: Subscription, given: LeasedRange
) -> None:
    """Decode the wanted messages of a part that are handed out."""
    if not len(part.starts):
        return
    starts, without = part.starts, int(given.without, 16)
    rows: list[int] | range = range(len(starts))
    if without:
        places = (part.offsets - given.start).tolist()
        rows = [row for row, place in enumerate(places) if not without >> place & 1]
        starts = starts[rows]
    try:
        messages = read_messages(part.data, starts, broker_name=queue.broker_name)
    except RecordError as error:
        raise StoreCorruptError(
            f"{queue}: a record at or behind queue offset {int(part.offsets[0])} is damaged ({error}); "
            "admin.reset_offsets goes past it"
        ) from error
    if wanted.tags:
        chosen = [index for index, message in enumerate(messages) if wanted.matches(message.tags)]
        messages, rows = [messages[index] for index in chosen], [rows[index] for index in chosen]
    found.messages += messages
    found.parts.append((part, rows))
