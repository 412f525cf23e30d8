"""Carries a master's log to a slave over two lanes (direct socket connections), in one thread.

This module transfers chunks between the lanes; actors.core.replica.copy_window limits the number of chunks in flight.

    master ── READ_LOG's answer ──▶ carrier ── APPEND_LOG ──▶ slave
       ▲                               │ ◀── once it is on disk ──┘
       └── ACK_LOG, or next READ_LOG ──┘

A chunk is forwarded from the memory into which it was received. The offset on the slave's disk is sent to the master at
once: with the next READ_LOG or, while a READ_LOG waits at the master, with an ACK_LOG. An empty chunk is forwarded,
too: it shows the slave that the master is alive, and which messages consumers may see.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Final

from actors.core.replica.copy_window import CopyWindow
from actors.core.replica.orders import Copied, Following
from raymq.common.errors import RaymqError, RecordsDamagedError, RequestTimeoutError, ServiceNotAvailableError
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.log_chunks import (
    ReadLog,
    decode_chunk,
    decode_copied,
    encode_append_log,
    encode_read_log,
)
from storage.replication.log_chunks import CHUNK_MAX_BYTES

REPLICATE_CALL_TIMEOUT_S: Final = 10.0
REPLICATE_LONG_POLL_S: Final = 2.0
LATE_S: Final = 0.5
"""If an answer of the master is this many seconds late, the LogCarrier checks if the slave still follows this master.
Also the interval, in seconds, of these checks."""


class LogCarrier:
    """Carries chunks of the log from `master` to `slave`, from the offset `position` on, in the epoch of `following`.
    `replica`: the number of the slave.

    `is_followed` returns whether the slave still follows this master. `on_copied` is called with the size of each chunk
    that is on the slave's disk. `on_refused` is called before `run` raises the error of a chunk that the slave refused
    because records in it are damaged. `flow_bytes_s`: the maximum number of bytes per second; None for no limit.
    """

    def __init__(
        self,
        master: Lane,
        slave: Lane,
        following: Following,
        replica: int,
        position: int,
        *,
        is_followed: Callable[[], bool],
        on_copied: Callable[[int], None],
        stopping: threading.Event,
        on_refused: Callable[[RecordsDamagedError], None] = lambda error: None,
        flow_bytes_s: int | None = None,
        chunk_max_bytes: int = CHUNK_MAX_BYTES,
        wait_s: float = REPLICATE_LONG_POLL_S,
    ) -> None:
        """`chunk_max_bytes`: the maximum size of a chunk in bytes. `wait_s`: the longest time that one READ_LOG waits
        for records."""
        self._master, self._slave = master, slave
        self._following, self._replica = following, replica
        self._is_followed, self._on_copied, self._stopping = is_followed, on_copied, stopping
        self._on_refused = on_refused
        self._flow_bytes_s, self._chunk_max_bytes, self._wait_s = flow_bytes_s, chunk_max_bytes, wait_s
        self._window = CopyWindow(position)
        self._append_head = encode_append_log(following.epoch)
        self._asked_s = 0.0
        """The time at which the last READ_LOG was sent to the master."""
        self._sent_s = 0.0
        """The time at which the slave began to work on a chunk: the oldest of the chunks whose answer has not arrived
        yet."""

    def run(self) -> None:
        """Copy log chunks from the master to the slave until the slave follows another master, or `stopping` is set.

        Raises RaymqError if a call failed, for example after a change of roles, or if a connection broke. The next
        LogCarrier can continue, because the slave has the end offset of its log.
        """
        poll = select.poll()
        lanes = {
            lane.fileno(): take for lane, take in ((self._master, self._take_chunk), (self._slave, self._take_copied))
        }
        for descriptor in lanes:
            poll.register(descriptor, select.POLLIN)
        try:
            self._tell()
            while not self._stopping.is_set():
                ready = poll.poll(LATE_S * 1000)
                for descriptor, _ in ready:
                    lanes[descriptor]()
                if not ready and not self._check_late():
                    return
        except RecordsDamagedError as error:
            self._on_refused(error)
            raise
        except (EOFError, OSError) as error:
            if isinstance(error, RaymqError):
                # Raise this error unchanged, because no connection has broken: RequestTimeoutError is a RaymqError, but
                # also an OSError (through TimeoutError).
                raise
            raise ServiceNotAvailableError(
                f"a connection (lane) of the replicator of replica {self._replica} broke: {error!r}"
            ) from error

    def _tell(self) -> None:
        """Send the end of the slave's log to the master, and request the next chunk if the number of chunks in flight
        allows it."""
        window, following = self._window, self._following
        asks = window.may_ask
        if not asks and not window.must_tell:
            return
        request = ReadLog(
            self._replica,
            following.store_id,
            following.learner,
            following.epoch,
            window.next_offset,
            window.acked_offset,
            window.min_bytes,
            self._chunk_max_bytes,
            self._wait_s,
        )
        now_s = time.monotonic()
        if asks:
            self._asked_s = now_s
            self._master.send(FrameKind.READ_LOG, (encode_read_log(request),), now_s + REPLICATE_CALL_TIMEOUT_S)
        else:
            self._master.send_unanswered(FrameKind.ACK_LOG, encode_read_log(request), now_s + REPLICATE_CALL_TIMEOUT_S)
        window.told(asked=asks)

    def _take_chunk(self) -> None:
        """Receive a chunk from the master, and forward it to the slave."""
        now_s = time.monotonic()
        answer = self._master.receive_next(now_s + REPLICATE_CALL_TIMEOUT_S)
        _, data = decode_chunk(answer.payload)
        self._slave.send(FrameKind.APPEND_LOG, (self._append_head, answer.payload), now_s + REPLICATE_CALL_TIMEOUT_S)
        if not self._window.under_way:
            self._sent_s = now_s
        self._window.read(len(data))
        self._tell()

    def _take_copied(self) -> None:
        """Receive the slave's answers, and record the end of the log on the slave's disk."""
        now_s = time.monotonic()
        while True:
            answer = self._slave.receive_next(now_s + REPLICATE_CALL_TIMEOUT_S)
            copied = Copied(*decode_copied(answer.payload))
            self._window.copied(copied)
            self._on_copied(copied.copied_bytes)
            if self._flow_bytes_s:
                self._stopping.wait(max(copied.copied_bytes / self._flow_bytes_s - (now_s - self._sent_s), 0.0))
            self._sent_s = now_s
            if not self._slave.has_received:
                break
        self._tell()

    def _check_late(self) -> bool:
        """Check why an answer of the master or the slave is late. Returns False if the slave now follows another
        master.

        Raises RequestTimeoutError if the master or the slave hangs.
        """
        now_s, window = time.monotonic(), self._window
        if window.under_way and now_s - self._sent_s >= REPLICATE_CALL_TIMEOUT_S:
            raise RequestTimeoutError(f"appending a chunk at replica {self._replica}", REPLICATE_CALL_TIMEOUT_S)
        if not window.is_asked or now_s - self._asked_s < REPLICATE_LONG_POLL_S + LATE_S:
            return True
        longest_s = REPLICATE_LONG_POLL_S + REPLICATE_CALL_TIMEOUT_S
        if now_s - self._asked_s >= longest_s:
            raise RequestTimeoutError(f"reading the log of replica {self._following.master}", longest_s)
        return self._is_followed()
