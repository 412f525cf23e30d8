"""A client of a storage actor. Data calls use lanes (direct socket connections); `control` calls actor methods. A
process has one client object per actor.

A client keeps its lanes in a pool (raymq.remoting.lane_pool). On the actor's node the lanes are Unix sockets. There the
client requests only the end of a queue from the actor, and reads the messages from the mapped files itself. From other
nodes the lanes use TCP.

A call fails in one of two ways. If the store raised the error, the store refused the call and changed nothing.
ServiceNotAvailableError or RequestTimeoutError means that no answer arrived: the call may have run. Repeating is safe
for reads, and for appends that carry a producer sequence.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from raymq.common.config.values import CONSUME_QUEUE_EXT_FILE_BYTES
from raymq.common.errors import DataLossError, RaymqError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, PullStatus
from raymq.common.protocol.store import (
    AppendResult,
    Boundary,
    FetchRequest,
    FetchResult,
    QueryResult,
    QueueBounds,
    QueuePosition,
    QueueSpan,
    ReadsInPlace,
    RepairState,
)
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest
from raymq.records.format.compression import admit_bodies_of
from raymq.records.format.encode import EncodedBatch, LoneRecord
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.logfiles.log_reader import LogReader, StoreFiles
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.reads import NO_READS
from raymq.remoting.lane_pool import DESCRIBE_TIMEOUT_S, LANE_NOT_OPENED, LanePool
from raymq.remoting.storage_lane import EndsWatch, StorageLane

REPORT_READS_S: Final = 1.0
"""Minimum interval in seconds at which a client reports its direct reads from mapped files to the store. Only for a
client that sends no fetches: each fetch contains such a report."""
REPORT_READS_TIMEOUT_S: Final = 2.0
LONE_RECORD_MAX_BYTES: Final = 60 << 10
"""Maximum size in bytes of a single-message record that is sent in one buffer with its frame header. The server treats
a frame of this size as a small frame."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StorageDescription:
    """A storage actor's description of itself, which its method `describe` returns.

    `store_host` (IP address and port) is part of every record and message id. The store accepts bodies of up to
    `max_message_size_bytes`. The store's directory is `root`. The files of its log are in `commit_log_directories`, or
    below `root` if that field is empty. File sizes are in bytes. `light_queues`: the store adds messages to the light
    queues that the messages name. `in_place`: consumers on the store's node may read its files directly. It is false if
    the store has consume hooks, because the hooks would miss such reads.
    """

    name: str
    broker_name: str
    node_id: str
    pid: int
    root: str
    commit_log_file_size: int
    consume_queue_file_size: int
    store_host: tuple[str, int]
    lane: LaneAddress
    max_message_size_bytes: int = MAX_MESSAGE_SIZE_BYTES
    consume_queue_ext_file_size: int = CONSUME_QUEUE_EXT_FILE_BYTES
    commit_log_directories: tuple[str, ...] = ()
    light_queues: bool = True
    in_place: bool = True

    @property
    def files(self) -> StoreFiles:
        """The paths and sizes of the store's files, for other processes on the node that read its log."""
        return StoreFiles(
            self.root, self.commit_log_file_size, self.consume_queue_file_size, self.commit_log_directories
        )


_NO_FILES: Final = StoreFiles("", 0, 0)


@dataclass(frozen=True, slots=True)
class FoundInPlace(FetchResult):
    """A FetchResult that locates its records in mapped files. `mapped` locates the records in the log of the store
    whose files are `files`; `records` is empty.

    The mapped records stay readable as long as this object exists, even if their files are deleted.
    """

    mapped: tuple[LocatedRecords, ...] = ()
    files: StoreFiles = _NO_FILES


class _Reads:
    """Counts a client's direct reads from the storage actor's mapped files, until they are reported to the actor.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads = NO_READS
        self._taken_s = -math.inf

    def add(self, messages: int) -> None:
        """Count one direct read from a queue's mapped files that found `messages` messages."""
        with self._lock:
            self._reads = ReadsInPlace(self._reads.found + 1, self._reads.messages + messages)

    @property
    def pending(self) -> bool:
        """True if this client has counted reads from mapped files that are still missing in the storage actor's
        statistics."""
        return self._reads.found > 0

    def is_due(self) -> bool:
        """True if the last call of `take`, which returns the counts of direct reads for a report, was more than
        REPORT_READS_S ago."""
        with self._lock:
            return time.monotonic() - self._taken_s >= REPORT_READS_S

    def take(self) -> ReadsInPlace:
        """Return the counts of the direct reads from mapped files since the last call of `take`, and reset the
        counts."""
        with self._lock:
            reads, self._reads = self._reads, NO_READS
            self._taken_s = time.monotonic()
            return reads

    def put_back(self, reads: ReadsInPlace) -> None:
        """Add `reads`, the counts of direct reads that `take` returned, to the counts of newer reads. Called if `reads`
        could not be reported to the storage actor."""
        with self._lock:
            self._reads = ReadsInPlace(self._reads.found + reads.found, self._reads.messages + reads.messages)


class StorageClient:
    """A client of one storage actor. Thread-safe. `node_id`: the Ray node of this process."""

    def __init__(self, name: str, node_id: str) -> None:
        self.name = name
        self._node_id = node_id
        self._actor = ActorRef(name)
        self._lanes: LanePool[StorageDescription, StorageLane] = LanePool(
            self._actor, name, self._open_lane, lambda found: admit_bodies_of(found.max_message_size_bytes)
        )
        self._lock = threading.Lock()
        self._reader: LogReader | None = None
        self._files_at: tuple[str, tuple[str, ...]] | None = None
        self._reads = _Reads()

    def append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> list[AppendResult]:
        """Store batches of messages, and return one result per batch, in order.

        Each batch carries its producer sequence, so that a repetition stores nothing twice. After an error some batches
        may be stored. Raises MessageIllegalError, and does not send the batch, if a frame cannot hold a batch.
        """
        return self._lanes.call("append", lambda lane, left_s: lane.append(batches, left_s), timeout_s)

    def append_one(self, record: LoneRecord, timeout_s: float) -> AppendResult:
        """Store one message, like `append`. This method is faster for a small message, if an idle lane (direct socket
        connection) already has a handle for the message's queue. A handle is a number that stands for the queue on one
        connection."""
        if record.size <= LONE_RECORD_MAX_BYTES:
            result = self._lanes.call_idle("append", StorageLane.append_one, record, timeout_s)
            if result is not None:
                return result
        [result] = self.append([record.batch()], timeout_s)
        return result

    def end_transaction(self, end: EndTransactionRequest, timeout_s: float) -> EndResult:
        """Commit or roll back a transaction. A repeated call changes nothing."""
        result: EndResult = self._control_call("end_transaction", (end,), EndResult, timeout_s)
        return result

    def fetch(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        """Read messages from several queues, about `max_bytes` in total. Waits up to `wait_s` for the first message.

        Returns one result per request, in order. `timeout_s` limits the call itself, in addition to the wait.
        """
        reader = self._local_reader()
        if reader is None:
            return self._fetch(requests, max_bytes, wait_s, timeout_s)

        def read(request: FetchRequest, end: FetchResult, left_bytes: int) -> tuple[FetchResult, int]:
            result = reader.fetch(request, end.min_offset, end.max_offset, left_bytes)
            return result, len(result.records)

        return self._fetch_ends(requests, max_bytes, wait_s, timeout_s, read)

    def find(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        """Read messages from several queues, like `fetch`. On the actor's node, records in mapped files are returned as
        FoundInPlace objects, without bytes."""
        reader = self._local_reader()
        if reader is None or max_bytes <= 0:
            return self.fetch(requests, max_bytes, wait_s, timeout_s)
        files = self.describe().files

        def read(request: FetchRequest, end: FetchResult, left_bytes: int) -> tuple[FetchResult, int]:
            mapped, next_offset = reader.find(request, end.max_offset, left_bytes)
            status = PullStatus.FOUND if mapped else PullStatus.NO_MATCHED_MESSAGE
            count = sum(len(part.starts) for part in mapped)
            size_bytes = sum(int(part.sizes.sum()) for part in mapped)
            places = (end.min_offset, end.max_offset, b"", count)
            return FoundInPlace(status, next_offset, *places, mapped=tuple(mapped), files=files), size_bytes

        return self._fetch_ends(requests, max_bytes, wait_s, timeout_s, read)

    def _fetch_ends(
        self,
        requests: Sequence[FetchRequest],
        max_bytes: int,
        wait_s: float,
        timeout_s: float,
        read: Callable[[FetchRequest, FetchResult, int], tuple[FetchResult, int]],
    ) -> list[FetchResult]:
        """Fetch in two steps: request only the queues' end offsets from the store, then read the records in this
        process.

        `read` reads the records of one queue. Its first argument is the fetch request, starting at the queue offset of
        the first matching message. Its second argument is the store's answer to the request. Its third argument is the
        number of bytes that may still be read. `read` returns the result of the request and the result's size in bytes.
        """
        # Send a negative `max_bytes` to the store unchanged, because the store refuses it with an error.
        if max_bytes < 0:
            return self._fetch(requests, max_bytes, wait_s, timeout_s)
        ends = self._fetch(requests, 0, wait_s, timeout_s)
        results = []
        for request, end in zip(requests, ends, strict=True):
            if end.status is not PullStatus.FOUND:
                results.append(end)
                continue
            by_store = None
            try:
                # Read from `end.next_offset` on, because the records before it do not match the filter. The store has
                # skipped them.
                result, size_bytes = read(replace(request, queue_offset=end.next_offset), end, max_bytes)
            except DataLossError:
                # Retention deleted a log file after the store's answer. Only the store can now return the remaining
                # messages.
                [by_store] = self._fetch([request], max_bytes, 0.0, timeout_s)
                result = by_store
                size_bytes = len(result.records)
            max_bytes = max(1, max_bytes - size_bytes)
            results.append(replace(result, pull_from=end.pull_from))
            if result.count and result is not by_store:
                self._reads.add(result.count)
        return results

    def count_read(self, messages: int) -> None:
        """Count a direct read from the mapped files that found `messages` messages, for the store's statistics.

        The next fetch reports the count to the store. If no fetch follows, an empty fetch reports it, at most once per
        REPORT_READS_S.
        """
        self._reads.add(messages)
        if self._reads.is_due():
            self.report_reads()

    def report_reads(self) -> None:
        """Report the direct reads from mapped files to the store. A failure is only logged, because the counts are only
        statistics."""
        if not self._reads.pending:
            return
        try:
            self._fetch((), 0, 0.0, REPORT_READS_TIMEOUT_S)
        except RaymqError as error:
            logger.info(
                "cannot report the messages that were read from the files of storage actor %s: %s", self.name, error
            )

    def _fetch(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        def over_lane(lane: StorageLane, left_s: float) -> list[FetchResult]:
            reads = self._reads.take()
            try:
                return lane.fetch(requests, max_bytes, wait_s, left_s, reads)
            except BaseException:
                self._reads.put_back(reads)
                raise

        return self._lanes.call("fetch", over_lane, wait_s + timeout_s)

    def open_watch(self, *, anywhere: bool = False) -> EndsWatch | None:
        """Open a watch: a lane (direct socket connection) that reports new messages in this actor's queues. It is for a
        consumer on the actor's node that reads the files directly.

        Returns None if this client is on another node, or if no lane can be opened; a fetch reports the reason. If
        `anywhere` is true, the watch may also be on another node, but not over TLS: `poll` does not report the bytes
        that a TLS socket has already decrypted. Raises ServiceNotAvailableError if the actor does not run.
        """
        if not anywhere and self._local_reader() is None:
            return None
        description = self.describe()
        remote = description.node_id != self._node_id
        if remote and (description.lane.tls or not description.lane.port):
            return None
        try:
            return EndsWatch(self.name, description.lane, remote=remote)
        except LANE_NOT_OPENED:
            self._lanes.drop()
            return None

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> QueueBounds:
        """Return the queue's first offset, and the offset of the next visible message."""
        bounds: QueueBounds = self._control_call("queue_bounds", (topic, queue_id), QueueBounds, timeout_s)
        return bounds

    def bounds_of_queues(self, queues: Sequence[tuple[str, int]], timeout_s: float) -> list[QueueBounds]:
        """Return the first offset and the next visible offset of each queue, in the given order. A queue is given by
        topic and queue id."""
        bounds: list[QueueBounds] = self._control_call("bounds_of_queues", (queues,), list[QueueBounds], timeout_s)
        return bounds

    def queue_bounds_many(self, topics: Sequence[tuple[str, int]], timeout_s: float) -> list[list[tuple[int, int]]]:
        """Return the first and the next visible offset of the queues 0, 1, … of several topics.

        `topics` has each topic with its number of queues. For a queue that does not exist, both offsets are 0.
        """
        bounds: list[list[tuple[int, int]]] = self._control_call(
            "queue_bounds_many", (topics,), list[list[tuple[int, int]]], timeout_s
        )
        return bounds

    def stored_times(self, positions: Sequence[QueuePosition], timeout_s: float) -> list[int]:
        """Return the store times of the messages at queue positions, in ms since 1970; 0 for a position without a
        message."""
        times: list[int] = self._control_call("stored_times", (positions,), list[int], timeout_s)
        return times

    def bytes_of_spans(self, spans: Sequence[QueueSpan], timeout_s: float) -> list[list[int]]:
        """Return the sizes of the records in several offset ranges, in bytes. Each range is divided into equal parts,
        and the result has, for each range, the total size of the records in each part
        (raymq.records.logfiles.span_bytes)."""
        parts: list[list[int]] = self._control_call("bytes_of_spans", (spans,), list[list[int]], timeout_s)
        return parts

    def next_sequences(
        self, producer_id: str, epoch: int, queues: Sequence[tuple[str, int]], timeout_s: float
    ) -> list[int]:
        """Return the next sequence number of a producer in each queue; 0 if the producer has stored nothing in the
        queue.

        Queues are given by topic and queue id. The producer's sequences in `epoch` must have no gaps. Raises
        ClientStateError if a newer epoch of the producer has written.
        """
        sequences: list[int] = self._control_call("next_sequences", (producer_id, epoch, queues), list[int], timeout_s)
        return sequences

    def report_damage(self, positions: Sequence[QueuePosition], timeout_s: float) -> list[RepairState]:
        """Report records that fail their checks, and return what the store can do for each of them. At most REPORT_MAX
        records per call.

        The store checks the records itself. A repeated call returns the new states.
        """
        states: list[RepairState] = self._control_call("report_damage", (positions,), list[RepairState], timeout_s)
        return states

    def offset_by_time(
        self, topic: str, queue_id: int, timestamp_ms: int, timeout_s: float, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """Return the first offset of a queue whose message was stored at or after `timestamp_ms`. With
        `Boundary.UPPER`, return the last offset whose message was stored at or before this time.

        The result is within the queue's first and end offset.
        """
        offset: int = self._control_call("offset_by_time", (topic, queue_id, timestamp_ms, boundary), int, timeout_s)
        return offset

    def query_by_key(
        self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int, timeout_s: float
    ) -> QueryResult:
        """Return the newest messages that have a key and whose store time is within a range, at most `max_num`
        messages."""
        result: QueryResult = self.control("query_by_key", topic, key, max_num, begin_ms, end_ms, timeout_s=timeout_s)
        return result

    def query_by_unique_id(self, topic: str, message_id: str, timeout_s: float) -> QueryResult:
        """Return the messages of a topic that have this unique message id."""
        result: QueryResult = self.control("query_by_unique_id", topic, message_id, timeout_s=timeout_s)
        return result

    def query_by_unique_ids(
        self, topic: str, message_ids: Sequence[str], since_ms: int, timeout_s: float
    ) -> QueryResult:
        """Return the messages of a topic that have one of these unique ids, that were stored at or after `since_ms` (ms
        since 1970), and that the log had when the call began. If the result is complete, no failover loses them.

        The call goes over a lane, whose thread writes the appends that arrived before the call first. A call of the
        actor could overtake the appends of a process that has just died.
        """
        arguments = topic, list(message_ids), since_ms
        result: QueryResult = self._control_call("query_by_unique_ids", arguments, QueryResult, timeout_s)
        return result

    def record_at(self, physical_offset: int, timeout_s: float) -> bytes:
        """Return the record at a physical offset of this store's log. Raises InvalidArgumentError if no record starts
        at the offset."""
        record: bytes = self.control("record_at", physical_offset, timeout_s=timeout_s)
        return record

    def control(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call an actor method, for requests that are too rare to need a lane (direct socket connection).

        Raises the errors of ActorRef.call.
        """
        return self._actor.call(method, *args, timeout_s=timeout_s)

    def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> StorageDescription:
        """Return the storage actor's description: its lane address, its node and its store's settings. Raises the
        errors of LanePool.describe."""
        return self._lanes.describe(timeout_s)

    def reader(self) -> LogReader | None:
        """Return a reader that reads the storage actor's files in mapped memory. Returns None if the files are on
        another node or cannot be read by this process."""
        return self._local_reader()

    def close(self) -> None:
        """Close the client's idle lanes (direct socket connections) and unmap the store's files. Running calls finish
        normally."""
        self._lanes.close()
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _local_reader(self) -> LogReader | None:
        description = self.describe()
        if description.node_id != self._node_id or not description.in_place or not _may_read(description.root):
            return None
        with self._lock:
            files_at = description.root, description.commit_log_directories
            if self._reader is None or self._files_at != files_at:
                self._files_at = files_at
                self._reader = LogReader(
                    description.root,
                    commit_log_file_size=description.commit_log_file_size,
                    consume_queue_file_size=description.consume_queue_file_size,
                    consume_queue_ext_file_size=description.consume_queue_ext_file_size,
                    commit_log_directories=description.commit_log_directories,
                )
            return self._reader

    def _control_call(self, method: str, arguments: tuple[Any, ...], result: Any, timeout_s: float) -> Any:
        return self._lanes.call(method, lambda lane, left_s: lane.call(method, arguments, result, left_s), timeout_s)

    def _open_lane(self, description: StorageDescription, timeout_s: float) -> StorageLane:
        return StorageLane(description.lane, remote=description.node_id != self._node_id, timeout_s=timeout_s)


def _may_read(root: str) -> bool:
    """True if this process may read the files of the store at `root`. Only processes of the store's user may read them.

    Also true if the directory does not exist.
    """
    return os.access(root, os.R_OK | os.X_OK) or not os.path.exists(root)
