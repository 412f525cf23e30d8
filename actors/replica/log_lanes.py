"""The storage actor's side of transferring the log between replicas over lanes (direct socket connections).

This module handles the frames READ_LOG, ACK_LOG and APPEND_LOG. raymq.remoting.lane.log_chunks defines their bytes, and
actors.replica.replica their meaning.

    READ_LOG     at a master: records what the follower has; the answer is the next chunk, as soon as the log has more.
                 The lane's thread reads the newest chunks; another thread reads for a follower that is far behind
    ACK_LOG      at a master: records what the follower has, which may now be ready for a small chunk
    APPEND_LOG   at a slave: the lane's thread writes the chunk; the answers are sent in order, when chunks are on disk

A waiting frame occupies no thread. No state of this module survives the process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from actors.core.replica.orders import LogRequest
from actors.replica.replica import Replica
from raymq.common.errors import NotMasterError, RaymqError, ServiceNotAvailableError, SystemBusyError
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.log_chunks import (
    ChunkHead,
    ReadLog,
    decode_append_log,
    decode_read_log,
    encode_chunk_head,
    encode_copied,
)
from raymq.remoting.lane.loop import Timer
from raymq.remoting.lane.server import Handler, LaneServer
from storage.replication.epochs import EpochEntry, LogChunk

NEAR_BYTES: Final = 16 << 20
"""Number of bytes at the end of the log that are certainly in memory. The thread that serves the lanes (direct socket
connections) may read these bytes without delay."""
READ_LOG_WAIT_MAX_S: Final = 30.0
"""Maximum time, in seconds, that a READ_LOG waits for the log to grow."""
APPEND_LOG_TIMEOUT_S: Final = 10.0
"""Timeout, in seconds, for a slave's disk to write the chunk of an APPEND_LOG."""


class Plane(Protocol):
    """The methods of a storage actor's data plane (actors.replica.data_plane) that this module uses."""

    @property
    def server(self) -> LaneServer: ...
    def submit(self, call: Callable[[], None], fail: Callable[[RaymqError], None]) -> None: ...


@dataclass(eq=False)
class _Read:
    """A READ_LOG frame that waits for the master's log to grow."""

    request: LaneRequest
    asked: ReadLog
    min_bytes: int
    timer: Timer | None = None


@dataclass(frozen=True, eq=False)
class _Copy:
    """An APPEND_LOG frame that waits for the slave's disk: its epoch, and the end offset and size of its chunk."""

    request: LaneRequest
    epoch: int
    end_offset: int
    copied_bytes: int
    deadline_s: float


class LogLanes:
    """Handles the frames by which replicas transfer the log (READ_LOG, ACK_LOG, APPEND_LOG), at one replica. Only the
    thread that serves the lanes (direct socket connections) may call the methods, except `_note_move`."""

    def __init__(self, plane: Plane, replica: Replica) -> None:
        self._plane, self._replica = plane, replica
        self._reads: dict[int, _Read] = {}
        """By the follower's number: the follower's READ_LOG frame that waits for the log to grow."""
        self._copies: deque[_Copy] = deque()
        """The APPEND_LOG frames that wait until their chunks are on disk, in order."""
        self._deadline: Timer | None = None
        self._is_looking = False
        """True if a check of the waiting frames (`_look`) is scheduled."""
        self.handlers: Mapping[int, Handler] = {
            FrameKind.READ_LOG: self._read_log,
            FrameKind.ACK_LOG: self._ack_log,
            FrameKind.APPEND_LOG: self._append_log,
        }
        replica.add_progress_listener(self._note_move)
        replica.call_on_log(self._note_move)

    def _note_move(self) -> None:
        """Schedule a check of the waiting frames (READ_LOG or APPEND_LOG), because the log, the disk, or the role may
        have changed. Any thread may call this method."""
        if (self._reads or self._copies) and not self._is_looking:
            self._is_looking = True
            self._plane.server.loop.call_soon(self._look)

    def _look(self) -> None:
        """Answer every waiting frame (READ_LOG or APPEND_LOG) that need not wait any longer."""
        # Reset `_is_looking` before the waiting frames (READ_LOG or APPEND_LOG) are checked. A change of the log, the
        # disk or the role during the check then schedules another check.
        self._is_looking = False
        for read in list(self._reads.values()):
            self._try_read(read, last=False)
        self._answer_copies()

    # Handlers of the frames that a master receives

    def _read_log(self, request: LaneRequest) -> None:
        asked = decode_read_log(request.payload)
        self._replica.note_request(_request_of(asked))
        earlier = self._reads.pop(asked.follower, None)
        if earlier is not None:
            self._cancel(earlier)
            earlier.request.drop()
        read = _Read(request, asked, max(asked.min_bytes, 1))
        # Register the READ_LOG request before checking the log. Otherwise records that are written between check and
        # registration would not answer it.
        self._reads[asked.follower] = read
        self._try_read(read, last=asked.wait_s <= 0)
        if self._reads.get(asked.follower) is read:
            deadline_s = time.monotonic() + min(asked.wait_s, READ_LOG_WAIT_MAX_S)
            read.timer = self._plane.server.loop.call_at(deadline_s, partial(self._try_read, read, last=True))

    def _ack_log(self, request: LaneRequest) -> None:
        try:
            acked = decode_read_log(request.payload)
            self._replica.note_request(_request_of(acked))
        except NotMasterError:
            # Return without an answer: the server never answers an ACK_LOG frame. The follower's READ_LOG frame fails
            # with the same error, and its answer contains the error.
            return
        finally:
            request.drop()
        read = self._reads.get(acked.follower)
        if read is not None:
            read.min_bytes = 1
            self._try_read(read, last=False)

    def _try_read(self, read: _Read, *, last: bool) -> None:
        """Answer a READ_LOG request if the log has grown enough, if this replica is no longer the master, or if its
        disk has failed. If `last` is true (the request's wait is over), answer in any case."""
        asked = read.asked
        try:
            beyond = self._replica.log_beyond(asked.epoch, asked.next_offset)
        except RaymqError as error:
            self._end(read)
            read.request.fail(error)
            return
        if beyond < read.min_bytes and not last:
            failure = self._replica.disk_failure
            if not failure:
                return
            if beyond <= 0:
                # The disk has failed, so another replica soon becomes the master. Fail the READ_LOG, so that the
                # follower looks for the new master at once. A late follower could leave the new master with too few
                # copies to acknowledge messages.
                self._end(read)
                read.request.fail(ServiceNotAvailableError(f"the log no longer grows: {failure}"))
                return
        self._end(read)
        if beyond <= NEAR_BYTES:
            self._answer_read(read)
        else:
            try:
                self._plane.submit(partial(self._answer_read, read), read.request.fail)
            except SystemBusyError as error:
                read.request.fail(error)

    def _answer_read(self, read: _Read) -> None:
        """Read a chunk of the log, and send it to the follower."""
        asked = read.asked
        try:
            chunk = self._replica.chunk_at(asked.epoch, asked.next_offset, asked.max_bytes)
        except Exception as error:
            read.request.fail(read.request.told(error, "reading a chunk of the log"))
            return
        head = ChunkHead(chunk.physical_offset, chunk.confirm_offset, chunk.end_offset, chunk.entry, chunk.hole)
        read.request.answer(encode_chunk_head(head), chunk.data)

    def _end(self, read: _Read) -> None:
        """Stop waiting for a READ_LOG, and cancel its timer."""
        if self._reads.get(read.asked.follower) is read:
            del self._reads[read.asked.follower]
        self._cancel(read)

    def _cancel(self, read: _Read) -> None:
        if read.timer is not None:
            self._plane.server.loop.cancel(read.timer)

    # Handlers of the frames that a slave receives

    def _append_log(self, request: LaneRequest) -> None:
        epoch, head, data = decode_append_log(request.payload)
        entry = None if head.entry is None else EpochEntry(*head.entry)
        chunk = LogChunk(head.physical_offset, data, entry, head.confirm_offset, head.end_offset, head.hole)
        copied = self._replica.start_append_log(epoch, chunk)
        deadline_s = time.monotonic() + APPEND_LOG_TIMEOUT_S
        self._copies.append(_Copy(request, epoch, copied.next_offset, copied.copied_bytes, deadline_s))
        self._answer_copies()

    def _answer_copies(self) -> None:
        """Answer the APPEND_LOG frames whose chunks are on disk, in order."""
        while self._copies:
            copy = self._copies[0]
            try:
                acked = self._replica.copied(copy.epoch, copy.end_offset)
                if acked is None and time.monotonic() >= copy.deadline_s:
                    raise ServiceNotAvailableError(
                        f"the disk of a replica needed more than {APPEND_LOG_TIMEOUT_S:g} s to flush a written "
                        "chunk; read the replica's position again"
                    )
            except RaymqError as error:
                copy.request.fail(error)
            else:
                if acked is None:
                    break
                copy.request.answer(encode_copied(copy.end_offset, acked, copy.copied_bytes))
            self._copies.popleft()
        if self._copies and self._deadline is None:
            self._deadline = self._plane.server.loop.call_at(self._copies[0].deadline_s, self._meet_deadline)

    def _meet_deadline(self) -> None:
        self._deadline = None
        self._answer_copies()


def _request_of(asked: ReadLog) -> LogRequest:
    return LogRequest(asked.follower, asked.store_id, asked.learner, asked.epoch, asked.next_offset, asked.acked_offset)
