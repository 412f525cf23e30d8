"""LeaseReader reads the messages of leased ranges: from mapped files if the storage actor is on this node, otherwise by
fetches.

The broker has checked that the offsets are visible, so no call requests a queue's end. The reader that finds a message
checks its tag code or the filter expression, and leaves out excluded messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from raymq.client.consumer.repair_wait import report_to_master
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError, DataLossError, ServiceNotAvailableError
from raymq.common.message import MessageExt, MessageQueue, PullStatus
from raymq.common.protocol.pop import LeasedRange
from raymq.common.protocol.store import REPORT_MAX, FetchRequest, RepairState
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.messages import find_unreadable, read_messages
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

LEASE_FETCH_MAX_BYTES: Final = 8 << 20
LEASE_FETCH_TIMEOUT_S: Final = 5.0
LEASE_READ_TIMEOUT_S: Final = 20.0
"""Timeout in s for reading one leased range, including retries while its storage actor restarts."""


class UnreadableMessage(NamedTuple):
    """A leased message that cannot be read. `record`: the bytes of the message's record, intact or damaged."""

    message: MessageExt
    error: BodyUnreadableError
    record: bytes


@dataclass(slots=True)
class LeasedMessages:
    """The messages of one leased range, up to `end`, with their records. `messages`: the readable messages.
    `unreadable`: the error, the message and the record of each unreadable message, by its queue offset."""

    messages: list[MessageExt] = field(default_factory=list)
    parts: list[tuple[LocatedRecords, list[int] | range]] = field(default_factory=list)
    """The records from which `messages` were decoded. Each entry has some records, and the indices of the messages that
    were decoded from these records."""
    end: int = 0
    """The queue offset up to which the leased range was read (exclusive)."""
    size_bytes: int = 0
    unreadable: dict[int, UnreadableMessage] = field(default_factory=dict)

    def record(self, index: int) -> bytes:
        """Return the complete record of message number `index` of this leased range."""
        for part, rows in self.parts:
            if index < len(rows):
                start = int(part.starts[rows[index]])
                return bytes(part.data[start : start + int(part.sizes[rows[index]])])
            index -= len(rows)
        raise IndexError(index)


class LeaseReader:
    """Reads the messages of leased ranges. Thread-safe."""

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        self._routes, self._storages = routes, storages
        self._read_from: dict[str, StorageClient] = {}
        """Storage actors, by name, from which messages were read since the last `report_reads`."""

    @property
    def has_reads(self) -> bool:
        """True if messages were read from mapped files since the last `report_reads`."""
        return bool(self._read_from)

    def report_reads(self) -> None:
        """Report to the stores how many messages were read from their mapped files. Blocks for a short call to each
        store."""
        read_from, self._read_from = self._read_from, {}
        for storage in read_from.values():
            storage.report_reads()

    def read(self, broker_name: str, given: LeasedRange, wanted: Subscription, max_bytes: int) -> LeasedMessages:
        """Return the wanted messages of a leased range: at most about `max_bytes` of records, but at least one message.

        Retries for LEASE_READ_TIMEOUT_S, and raises RaymqError after that. Damaged messages do not prevent the return
        of other messages.
        """
        queue = MessageQueue(given.topic, broker_name, given.queue_id)
        found = LeasedMessages(end=given.start)
        deadline_s = time.monotonic() + LEASE_READ_TIMEOUT_S

        def read(storage: StorageClient, left_s: float) -> None:
            self._read_from[storage.name] = storage
            for part, next_offset in _parts(storage, given, found.end, wanted, max_bytes - found.size_bytes):
                _add(found, part, queue, wanted, given)
                found.end = next_offset
                found.size_bytes += int(part.sizes.sum())
                if found.size_bytes >= max_bytes:
                    return

        call_master(self._routes, self._storages, queue, max(0.1, deadline_s - time.monotonic()), read)
        return found

    def report_damage(self, queue: MessageQueue, offsets: Sequence[int]) -> list[RepairState]:
        """Report messages whose records are damaged to the queue's master, and return what the master can do for each.
        Raises RaymqError if the master does not answer in time."""
        states = report_to_master(self._routes, self._storages, queue, offsets[:REPORT_MAX])
        return [*states, *[RepairState.PENDING] * len(offsets[REPORT_MAX:])]


def _parts(
    storage: StorageClient, given: LeasedRange, offset: int, wanted: Subscription, max_bytes: int
) -> Iterator[tuple[LocatedRecords, int]]:
    """Yield the records of a leased range from `offset` on, in parts. Each part comes with the queue offset after its
    last record. Raises RaymqError if the storage actor cannot be read."""
    end = given.start + given.count
    reader = storage.reader()
    while offset < end:
        request = FetchRequest(given.topic, given.queue_id, offset, end - offset, wanted.tag_codes, wanted.sql)
        try:
            if reader is None:
                raise DataLossError("the files of the store are on another node")
            located, next_offset = reader.find(request, end, max_bytes)
        except DataLossError:
            part, offset = _fetch(storage, request, min(max_bytes, LEASE_FETCH_MAX_BYTES), end)
            yield part, offset
            continue
        if located:
            storage.count_read(sum(len(part.starts) for part in located))
        for index, part in enumerate(located):
            last = index == len(located) - 1
            yield part, next_offset if last else int(part.offsets[-1]) + 1
        if not located:
            yield LocatedRecords.read(b""), next_offset
        offset = next_offset


def _fetch(storage: StorageClient, request: FetchRequest, max_bytes: int, end: int) -> tuple[LocatedRecords, int]:
    [result] = storage.fetch([request], max_bytes, 0.0, LEASE_FETCH_TIMEOUT_S)
    if result.max_offset < end:
        # The master's store does not yet show the last offset of the lease to consumers. A retry succeeds when the
        # store shows this offset, or when another store serves the queue.
        raise ServiceNotAvailableError(
            f"storage actor {storage.name} does not serve offset {end - 1} of topic {request.topic!r} yet; retry later"
        )
    if result.status is PullStatus.NO_NEW_MESSAGE or result.next_offset <= request.queue_offset:
        raise ServiceNotAvailableError(
            f"storage actor {storage.name} does not serve offset {request.queue_offset} of topic "
            f"{request.topic!r} now; retry later"
        )
    records = LocatedRecords.of_fetch(result.records, result.count, request.queue_offset, result.next_offset)
    return records, min(end, result.next_offset)


def _add(
    found: LeasedMessages, part: LocatedRecords, queue: MessageQueue, wanted: Subscription, given: LeasedRange
) -> None:
    """Decode the records of `part`. Add a message to `found` if the leased range `given` includes its offset and the
    subscription `wanted` selects the message. A damaged record in the leased range is always added, because its tags
    are unknown."""
    if not len(part.starts):
        return
    without = int(given.without, 16)
    rows: list[int] | range = range(len(part.starts))
    if without:
        places = (part.offsets - given.start).tolist()
        rows = [row for row, place in enumerate(places) if not without >> place & 1]
        part = part.pick(np.array(rows, np.int64))
    messages = read_messages(part.data, part.starts, broker_name=queue.broker_name, places=RecordPlaces.of(queue, part))
    errors = find_unreadable(messages)
    chosen = []
    for index, message in enumerate(messages):
        if not wanted.matches(message.tags) and not message.record_damaged:
            continue
        if index in errors:
            record = part.part(index, index + 1).joined()
            found.unreadable[int(part.offsets[index])] = UnreadableMessage(message, errors[index], record)
        else:
            chosen.append(index)
    found.messages += [messages[index] for index in chosen]
    found.parts.append((part, chosen))
