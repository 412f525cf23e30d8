"""Calls to a storage actor: one client object per actor, over lanes where possible, else by actor methods.

A client opens lanes (raymq.remoting.lane), at most LANES_MAX at a time, and keeps those that are idle. On the actor's
node they are Unix sockets, and the client reads messages from the mapped files itself: it only asks the actor for the
end of a queue. From other nodes they are TCP. Where no lane can be opened, a call is an actor method with the same
meaning, and a lane is tried again after LANE_PAUSE_S.

Failures are of two kinds. An error that the store raised says that the call was refused and changed nothing. A
ServiceNotAvailableError or RequestTimeoutError says that there was no answer: the call may have run. Repeating is safe
for reads, and for appends that carry a producer sequence.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from raymq.config.store import CONSUME_QUEUE_EXT_FILE_BYTES
from raymq.errors import DataLossError, RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.logfiles.log_reader import LogReader
from raymq.message import MAX_MESSAGE_SIZE_BYTES, PullStatus
from raymq.protocol.store import AppendResult, Boundary, FetchRequest, FetchResult, QueryResult, QueueBounds
from raymq.record.encode import EncodedBatch
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.client import OPEN_TIMEOUT_S
from raymq.remoting.lane.handshake import LaneRefusedError
from raymq.remoting.lane.reads import can_carry
from raymq.remoting.storage_lane import EndsWatch, StorageLane
from raymq.retry import left_s

T = TypeVar("T")

logger = logging.getLogger(__name__)

LANES_MAX: Final = 16
"""The most lanes that a client has open to one actor; further calls are actor methods."""
DESCRIBE_TIMEOUT_S: Final = 5.0
"""Bounds the call that asks an actor for its description."""
LANE_PAUSE_S: Final = 1.0
"""The pause after a lane could not be opened, in which calls are actor methods."""
_LANE_LOST: Final = (EOFError, OSError)
"""Errors of a lane that broke. With LaneRefusedError: of one that could not be opened."""


@dataclass(frozen=True, slots=True)
class StorageDescription:
    """The answer of a storage actor to `describe`.

    `store_host` (IP address and port) goes into every record and message id. The store takes bodies of up to
    `max_message_size_bytes`. Its directory is `root`, and the files of its log are in `commit_log_directories`, or
    below `root` if there are none. Sizes of files are in bytes.
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


class StorageClient:
    """Calls to one storage actor. Thread-safe. `node_id`: the Ray node this process runs on."""

    def __init__(self, name: str, node_id: str) -> None:
        self.name = name
        self._node_id = node_id
        self._actor = ActorRef(name)
        self._lock = threading.Lock()
        self._description: StorageDescription | None = None
        self._idle: list[StorageLane] = []
        self._is_closed = False
        self._lanes = threading.BoundedSemaphore(LANES_MAX)
        self._closed_lane: tuple[LaneAddress, float] | None = None
        """The address at which no lane could be opened, and when to try again."""
        self._reader: LogReader | None = None
        self._files_at: tuple[str, tuple[str, ...]] | None = None

    def append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> list[AppendResult]:
        """Store batches; each carries its producer sequence, so that a repeat stores nothing twice."""
        return self._call(
            "append",
            lambda lane, left_s: lane.append(batches, left_s),
            lambda left_s: self._actor.call("append", list(batches), timeout_s=left_s),
            timeout_s,
        )

    def fetch(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        """Read from several queues, at most about `max_bytes` in all, waiting up to `wait_s` for the first message.

        Returns one result per request, in order. `timeout_s` is for the call itself, beside the wait.
        """
        reader = self._local_reader()
        if reader is None or max_bytes < 0:  # which the store refuses
            return self._fetch(requests, max_bytes, wait_s, timeout_s)
        ends = self._fetch(requests, 0, wait_s, timeout_s)
        results = []
        for request, end in zip(requests, ends, strict=True):
            if end.status is not PullStatus.FOUND:
                results.append(end)
                continue
            try:
                # The store has skipped records before this offset; they are not looked at again.
                rest = replace(request, queue_offset=end.next_offset)
                result = reader.fetch(rest, end.min_offset, end.max_offset, max_bytes)
            except DataLossError:
                # A file went away between the two steps (retention): the store knows what is left.
                [result] = self._fetch([request], max_bytes, 0.0, timeout_s)
            max_bytes = max(1, max_bytes - len(result.records))
            results.append(replace(result, pull_from=end.pull_from))
        return results

    def _fetch(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        def over_lane(lane: StorageLane, left_s: float) -> list[FetchResult] | None:
            return lane.fetch(requests, max_bytes, wait_s, left_s) if can_carry(requests) else None

        return self._call(
            "fetch",
            over_lane,
            lambda left_s: self._actor.call("fetch", list(requests), max_bytes, wait_s, timeout_s=left_s),
            wait_s + timeout_s,
        )

    def open_watch(self) -> EndsWatch | None:
        """A watch of this actor's queues, for a consumer on its node that reads the files itself; None if this client
        is elsewhere, or no lane can be opened. ServiceNotAvailableError if the actor does not run."""
        if self._local_reader() is None:
            return None
        description = self.describe()
        try:
            return EndsWatch(self.name, description.lane)
        except (*_LANE_LOST, LaneRefusedError):
            self._drop_lanes()
            return None

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> QueueBounds:
        """The first offset held and the offset the next visible message will get."""
        bounds: QueueBounds = self._control_call("queue_bounds", (topic, queue_id), QueueBounds, timeout_s)
        return bounds

    def bounds_of_queues(self, queues: Sequence[tuple[str, int]], timeout_s: float) -> list[QueueBounds]:
        """The bounds of several queues, by topic and queue id, in order."""
        bounds: list[QueueBounds] = self._control_call("bounds_of_queues", (queues,), list[QueueBounds], timeout_s)
        return bounds

    def offset_by_time(
        self, topic: str, queue_id: int, timestamp_ms: int, timeout_s: float, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """The first offset stored at or after a time (UPPER: the last at or before), within what the queue holds."""
        offset: int = self._control_call("offset_by_time", (topic, queue_id, timestamp_ms, boundary), int, timeout_s)
        return offset

    def query_by_key(
        self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int, timeout_s: float
    ) -> QueryResult:
        """The newest messages with a key, stored in a range of times."""
        result: QueryResult = self.control("query_by_key", topic, key, max_num, begin_ms, end_ms, timeout_s=timeout_s)
        return result

    def query_by_unique_id(self, topic: str, message_id: str, timeout_s: float) -> QueryResult:
        """The messages with a unique id."""
        result: QueryResult = self.control("query_by_unique_id", topic, message_id, timeout_s=timeout_s)
        return result

    def record_at(self, physical_offset: int, timeout_s: float) -> bytes:
        """The record at an offset of this store's log; InvalidArgumentError if none starts there."""
        record: bytes = self.control("record_at", physical_offset, timeout_s=timeout_s)
        return record

    def control(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method that is not on the data plane: always as an actor method."""
        return self._actor.call(method, *args, timeout_s=timeout_s)

    def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> StorageDescription:
        """The actor's description. It is kept until a call gets no answer."""
        with self._lock:
            known = self._description
        if known is not None:
            return known
        description: StorageDescription = self._actor.call("describe", timeout_s=timeout_s)
        with self._lock:
            self._description = description
        return description

    def reader(self) -> LogReader | None:
        """The reader of the actor's mapped files; None if they are on another node or not readable."""
        return self._local_reader()

    def close(self) -> None:
        """End idle lanes and unmap files. Calls under way end by themselves."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            reader, self._reader = self._reader, None
        for lane in idle:
            lane.close()
        if reader is not None:
            reader.close()

    def _local_reader(self) -> LogReader | None:
        description = self.describe()
        if description.node_id != self._node_id or not _may_read(description.root):
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
        return self._call(
            method,
            lambda lane, left_s: lane.call(method, arguments, result, left_s),
            lambda left_s: self._actor.call(method, *arguments, timeout_s=left_s),
            timeout_s,
        )

    def _call(
        self,
        what: str,
        over_lane: Callable[[StorageLane, float], T | None],
        by_actor: Callable[[float], T],
        timeout_s: float,
    ) -> T:
        """Make a call over a lane or, where there is none or it returns None, as an actor method. Both get the time
        that is left."""
        # The steps share one deadline: if the actor stands still, each would otherwise wait for the whole timeout.
        deadline_s = time.monotonic() + timeout_s
        description = self._description or self.describe(min(timeout_s, DESCRIBE_TIMEOUT_S))
        if self._lanes.acquire(blocking=False):
            lane = None
            try:
                lane = self._take_lane(description, timeout_s)
                if lane is not None:
                    result = over_lane(lane, left_s(deadline_s))
                    if result is not None:
                        return result
            except _LANE_LOST as error:
                if isinstance(error, RaymqError):
                    raise  # RequestTimeoutError is an OSError by way of TimeoutError
                self._drop_lanes()
                raise ServiceNotAvailableError(f"the lane to {self.name} broke during {what} ({error!r})") from error
            finally:
                if lane is not None:
                    self._put_back(lane)
                self._lanes.release()
        try:
            return by_actor(left_s(deadline_s))
        except (ServiceNotAvailableError, RequestTimeoutError):
            self._drop_lanes()
            raise

    def _put_back(self, lane: StorageLane) -> None:
        """Keep a lane for the next call, unless the client was closed meanwhile."""
        with self._lock:
            if not self._is_closed and not lane.closed:
                self._idle.append(lane)
                return
        lane.close()

    def _take_lane(self, description: StorageDescription, timeout_s: float) -> StorageLane | None:
        """A lane for one call, or None where none can be opened."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            closed = self._closed_lane
        address, remote = description.lane, description.node_id != self._node_id
        if remote and not address.port:
            return None
        if closed is not None and closed[0] == address and time.monotonic() < closed[1]:
            return None
        try:
            return StorageLane(address, remote=remote, timeout_s=min(timeout_s, OPEN_TIMEOUT_S))
        except (*_LANE_LOST, LaneRefusedError) as error:
            logger.info("no lane to %s can be opened, so calls are actor methods: %r", self.name, error)
            with self._lock:
                self._closed_lane = address, time.monotonic() + LANE_PAUSE_S
            self._drop_lanes()
            return None

    def _drop_lanes(self) -> None:
        """Drop the description and the idle lanes: the actor was restarted or is gone, and has another lane address."""
        with self._lock:
            self._description = None
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()


def _may_read(root: str) -> bool:
    """True if this process may read the files of a store, which only the store's user may; also true for a directory
    that does not exist."""
    return os.access(root, os.R_OK | os.X_OK) or not os.path.exists(root)
