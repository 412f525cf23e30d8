"""Data calls to a storage actor over one lane (direct socket connection), and a consumer's watch for new messages over
a separate lane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from raymq.common.errors import InvalidArgumentError, RaymqError, ServiceNotAvailableError
from raymq.common.message import PullStatus
from raymq.common.protocol.store import AppendResult, FetchRequest, FetchResult, QueueEnds, ReadsInPlace
from raymq.common.retry import left_s
from raymq.records.format.encode import EncodedBatch, LoneRecord
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.appends import (
    HANDLES_MAX,
    ClientHandles,
    decode_result,
    decode_results,
    encode_append,
    encode_one,
)
from raymq.remoting.lane.calls import decode_result as decode_call_result, encode_call
from raymq.remoting.lane.client import OPEN_TIMEOUT_S, Lane
from raymq.remoting.lane.frames import COUNT_MAX, FrameKind
from raymq.remoting.lane.reads import (
    NO_READS,
    QueueName,
    decode_ends,
    decode_fetched,
    encode_fetch,
    encode_queues,
    encode_wait,
)

FAREWELL_TIMEOUT_S: Final = 0.1
"""Timeout in seconds of the last report before a watch of queues is closed. The report counts the reads from mapped
files since the previous report. It is only for statistics."""
WATCH_TIMEOUT_S: Final = 5.0
"""Timeout, in seconds, for sending the request of a watch. (A watch is a connection on which the store reports new
messages.) After the first bytes of an answer have arrived, the same timeout applies to the rest of the answer."""


class StorageLane:
    """One lane (direct socket connection) to a storage actor. Only one thread at a time may use it.

    Each call raises the actor's error. It raises RequestTimeoutError if no answer arrives in time, and OSError or
    EOFError if the connection broke. After one of these three errors, the lane is closed, and the call may have run.
    """

    def __init__(self, address: LaneAddress, *, remote: bool, timeout_s: float = OPEN_TIMEOUT_S) -> None:
        """Open a lane (direct socket connection) to the storage actor at `address`, over TCP if the actor is `remote`.
        Raises the errors of `Lane`."""
        self._lane = Lane(address, remote=remote, timeout_s=timeout_s)
        self._handles = ClientHandles()

    @property
    def closed(self) -> bool:
        """True if the lane (direct socket connection) is closed: after `close`, and after a call that got no
        answer."""
        return self._lane.closed

    def close(self) -> None:
        """Close the lane (direct socket connection). Idempotent."""
        self._lane.close()

    def append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> list[AppendResult]:
        """Store batches of messages. Many batches are sent in several frames. So after an error, the batches of the
        first frames may be stored."""
        if len(batches) <= HANDLES_MAX:
            return self._append(batches, timeout_s)
        deadline_s = time.monotonic() + timeout_s
        results: list[AppendResult] = []
        for start in range(0, len(batches), HANDLES_MAX):
            results += self._append(batches[start : start + HANDLES_MAX], left_s(deadline_s))
        return results

    def _append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> list[AppendResult]:
        opens, parts = encode_append(batches, self._handles)
        before = b"".join([self._lane.pack_unanswered(FrameKind.OPEN, one) for one in opens]) if opens else b""
        answer = self._lane.call(FrameKind.APPEND, parts, timeout_s, count=len(batches), before=before)
        return decode_results(answer.payload, answer.count)

    def append_one(self, record: LoneRecord, timeout_s: float) -> AppendResult | None:
        """Store one small message. Returns None, and sends nothing, if this lane does not have a handle (a number that
        stands for a queue) for the message's queue yet."""
        handle = self._handles.known(record.topic, record.queue_id)
        if handle is None:
            return None
        parts, size = encode_one(record, handle)
        return decode_result(self._lane.call_small(FrameKind.APPEND, parts, size, timeout_s).payload)

    def fetch(
        self,
        requests: Sequence[FetchRequest],
        max_bytes: int,
        wait_s: float,
        timeout_s: float,
        reads: ReadsInPlace = NO_READS,
    ) -> list[FetchResult]:
        """Read messages from several queues. `reads`: the counts of the client's direct reads from mapped files after
        its last fetch.

        Requests for more than COUNT_MAX queues are sent in several frames, which share the wait and the byte limit.
        """
        if len(requests) <= COUNT_MAX:
            return self._fetch(requests, max_bytes, wait_s, timeout_s, reads)
        deadline_s, waits_s = time.monotonic() + timeout_s, wait_s / -(-len(requests) // COUNT_MAX)
        results: list[FetchResult] = []
        for start in range(0, len(requests), COUNT_MAX):
            portion = requests[start : start + COUNT_MAX]
            found = self._fetch(portion, max_bytes, waits_s, left_s(deadline_s), reads)
            max_bytes, reads = max(1, max_bytes - sum(len(one.records) for one in found)) if max_bytes else 0, NO_READS
            waits_s = 0.0 if any(one.status is PullStatus.FOUND for one in found) else waits_s
            results += found
        return results

    def _fetch(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float, reads: ReadsInPlace
    ) -> list[FetchResult]:
        payload = encode_fetch(requests, max_bytes, wait_s, reads)
        answer = self._lane.call(FrameKind.FETCH, (payload,), timeout_s, count=len(requests))
        return decode_fetched(answer.payload, answer.count)

    def call(self, method: str, arguments: Sequence[Any], result: Any, timeout_s: float) -> Any:
        """Call a method of the storage actor by name. Returns the method's result, decoded as type `result`."""
        answer = self._lane.call(FrameKind.CALL, (encode_call(method, arguments),), timeout_s)
        return decode_call_result(answer.payload, result)


class EndsWatch:
    """A watch of queues: a separate lane over which a storage actor reports new messages of a consumer's queues. Not
    shared between threads.

    Each method raises ServiceNotAvailableError if the connection broke; the watch is then closed. `receive` also raises
    errors of the storage actor, such as NotMasterError; after these the watch stays open.
    """

    def __init__(self, name: str, address: LaneAddress, *, remote: bool = False) -> None:
        """Open a lane to the storage actor `name`, over TCP if the actor is `remote`. Raises the errors of
        `Lane`."""
        self._name = name
        self._lane = Lane(address, remote=remote)
        self._queues: list[QueueName] = []
        """The queues whose end offsets were requested by the last call of `ask`."""
        self._encoded = encode_queues(())
        self._reads = NO_READS
        """Counts of the direct reads from mapped files since the last call of `ask`. Each call of `ask` reports these
        counts to the store."""

    def fileno(self) -> int:
        """Return the file descriptor of the lane (direct socket connection). It is readable after an answer has
        arrived."""
        return self._lane.fileno()

    @property
    def closed(self) -> bool:
        """True if this watch of queues is closed: after `close`, and after the connection broke."""
        return self._lane.closed

    def ask(self, requests: Sequence[FetchRequest], wait_s: float) -> None:
        """Request the end offsets of the queues in `requests`, without waiting for the answer.

        The storage actor answers as soon as a queue has messages at or after its requested offset, or no longer has
        that offset. It answers after `wait_s` at the latest, at most 30 s. An earlier request gets no answer after this
        call. Raises InvalidArgumentError for more than 65,535 queues.
        """
        if len(requests) > COUNT_MAX:
            raise InvalidArgumentError(f"one watch connection watches at most {COUNT_MAX} queues, not {len(requests)}")
        queues = [(one.topic, one.queue_id) for one in requests]
        if queues != self._queues:
            self._encoded = encode_queues(queues)
            self._queues = queues
        payload = encode_wait(self._encoded, [one.queue_offset for one in requests], wait_s, self._reads)
        self._reads = NO_READS
        try:
            self._lane.send(FrameKind.WAIT, (payload,), time.monotonic() + WATCH_TIMEOUT_S, count=len(requests))
        except OSError as error:
            raise self._broken(error) from error

    def receive(self) -> list[QueueEnds]:
        """Receive the answer to the last call of `ask`: the queue ends (QueueEnds) of each requested queue, in the
        order of the request. Call this method when the file descriptor is readable.

        Returns an empty list for an answer to an earlier `ask`; the caller continues to wait.
        """
        deadline_s = time.monotonic() + WATCH_TIMEOUT_S
        try:
            answer = self._lane.receive_one(deadline_s)
            while answer is None and self._lane.has_received:
                answer = self._lane.receive_one(deadline_s)
        except RaymqError:
            raise
        except (OSError, EOFError) as error:
            raise self._broken(error) from error
        return [] if answer is None else decode_ends(answer.payload, answer.count)

    def count_read(self, messages: int) -> None:
        """Count a direct read from mapped files that found `messages` messages. The next `ask` or `close` reports the
        count."""
        self._reads = ReadsInPlace(self._reads.found + 1, self._reads.messages + messages)

    def close(self) -> None:
        """Report the direct reads that are not yet reported to the storage actor, and close this watch of queues.
        Idempotent."""
        if self._reads.found and not self._lane.closed:
            last = encode_wait(encode_queues(()), (), 0.0, self._reads)
            with suppress(OSError):
                self._lane.send(FrameKind.WAIT, (last,), time.monotonic() + FAREWELL_TIMEOUT_S, count=0)
        self._reads = NO_READS
        self._lane.close()

    def _broken(self, error: Exception) -> ServiceNotAvailableError:
        return ServiceNotAvailableError(f"the connection that watches storage actor {self._name} broke: {error!r}")
