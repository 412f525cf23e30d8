"""PredicateScan reads queues of one store, and returns only the messages that match a predicate.

It answers fetches as a storage actor does (raymq.remoting.storage_client.StorageClient.fetch). So a consumer's fetcher
can fetch from it. It may check many messages for each match, so records stay in the store's mapped files until they
match.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from raymq.client.predicates.evaluation import Evaluated
from raymq.client.predicates.frames import EVALUATED_MAX
from raymq.client.predicates.matching_records import keep
from raymq.common.errors import PredicateFailedError
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.protocol.consume_result import StoreLog
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.records.format.memory_records import LocatedRecords
from raymq.remoting.storage_client import FoundInPlace

SCAN_S: Final = 0.5
"""Maximum time in s for which one fetch calls the predicate function and skips messages that do not match."""
SCAN_MAX_BYTES: Final = 256 << 20
"""Maximum bytes of records in mapped files that are checked together. Such records are not copied."""
SCAN_COPIED_MAX_BYTES: Final = 8 << 20
"""Maximum bytes of records that are checked together if the records are not in mapped files, and so are copied."""
FAILURE_KEPT_S: Final = 30.0
"""Time in s for which a message is not retried if the predicate function hung on it or ended its process. Each attempt
costs a process."""
FAILURES_KEPT: Final = 1024
"""Maximum number of messages that are remembered as failed. The predicate function hung on such a message, or the
message ended the function's process."""


class RecordSource(Protocol):
    """Interface of a source of records; StorageClient implements it."""

    def find(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        """Read records from several queues. Records that are in mapped files are not copied."""


Evaluate = Callable[[LocatedRecords, float, StoreLog | None], Evaluated]
"""Function that evaluates a predicate on records and stops at a deadline, a time on `time.monotonic`'s clock. Its last
argument is the log in whose mapped files the records lie, or None."""


@dataclass(frozen=True, slots=True)
class FetchFailed(FetchResult):
    """Result of a fetch from a queue if the predicate has failed: it gave no decision about the queue's next
    message."""

    error: PredicateFailedError | None = None


class PredicateScan:
    """Reads the store of one broker group for one predicate. Thread-safe.

    `name`: the predicate's name, for error messages. `in_place`: True if the source finds records without copying them.
    """

    def __init__(
        self,
        source: RecordSource,
        evaluate: Evaluate,
        *,
        name: str,
        broker_name: str,
        in_place: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._evaluate = source, evaluate
        self._name, self._broker_name, self._clock = name, broker_name, clock
        self._find_max_bytes = SCAN_MAX_BYTES if in_place else SCAN_COPIED_MAX_BYTES
        self._lock = threading.Lock()
        """Lock that guards the attributes of this PredicateScan that change, such as `_turn` and `_endings`."""
        self._turn = 0
        """Number of fetches so far. Each fetch begins with another queue, so that all queues are read even if the
        predicate function is slow."""
        self._endings: dict[MessageQueue, dict[int, tuple[str, float]]] = {}
        """Messages at which the predicate's child process ended. For each queue and offset: the reason of the end, and
        the time until which the predicate is not called for this message again."""

    def fetch(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        """Read the messages that match the predicate from several queues. Returns up to each request's `max_messages`,
        and `max_bytes` in all, but at least one message. Waits up to `wait_s` for messages to check.

        NO_MATCHED_MESSAGE means that no message before `next_offset` matches. A queue gets FetchFailed if the predicate
        failed to decide on its next message; earlier matches are returned first.
        """
        with self._lock:
            self._turn += 1
            turn = self._turn
        answers: dict[int, FetchResult] = {}
        asked = dict(enumerate(requests))
        until_s = None
        while asked:
            found = dict(zip(asked, self._find(list(asked.values()), wait_s, timeout_s), strict=True))
            wait_s = 0.0
            until_s = until_s or self._clock() + SCAN_S  # the time limit SCAN_S starts after the wait for messages
            for row in sorted(found, key=lambda row: (row - turn) % len(requests)):
                answers[row] = self._keep(asked[row], found[row], max(1, max_bytes), until_s)
                max_bytes -= len(answers[row].records)
            if self._clock() >= until_s or any(answer.count for answer in answers.values()):
                break
            asked = {
                row: replace(request, queue_offset=answers[row].next_offset)
                for row, request in asked.items()
                if _has_more(answers[row])
            }
        return [answers[row] for row in range(len(requests))]

    def _find(self, requests: Sequence[FetchRequest], wait_s: float, timeout_s: float) -> list[FetchResult]:
        wanted = [replace(request, max_messages=EVALUATED_MAX) for request in requests]
        return self._source.find(wanted, self._find_max_bytes, wait_s, timeout_s)

    def _keep(self, request: FetchRequest, result: FetchResult, max_bytes: int, until_s: float) -> FetchResult:
        """Return the fetch result with only the records that match the predicate."""
        if result.status is not PullStatus.FOUND:
            return result
        queue = MessageQueue(request.topic, self._broker_name, request.queue_id)
        found, log = _records_of(request, result)
        kept = keep(
            found,
            result.next_offset,
            lambda records, until_s: self._decide(queue, records, until_s, log),
            max_messages=request.max_messages,
            max_bytes=max_bytes,
            until_s=until_s,
            clock=self._clock,
        )
        bounds = (kept.next_offset, result.min_offset, result.max_offset)
        if kept.failure and not kept.looked:
            error = PredicateFailedError(self._name, str(queue), kept.next_offset, kept.failure)
            return FetchFailed(PullStatus.NO_MATCHED_MESSAGE, *bounds, b"", 0, error=error)
        status = PullStatus.FOUND if kept.count else PullStatus.NO_MATCHED_MESSAGE
        records = b"".join(part.joined() for part in kept.records)
        return FetchResult(status, *bounds, records, kept.count, result.pull_from)

    def _decide(self, queue: MessageQueue, records: LocatedRecords, until_s: float, log: StoreLog | None) -> Evaluated:
        """Call the predicate function for a queue's records. If the function's process recently ended while it checked
        one of these messages, stop before the first such message."""
        endings = self._lately(queue)
        for row in np.flatnonzero(np.isin(records.offsets, list(endings))).tolist()[:1]:
            if not row:
                return Evaluated(np.empty(0, np.bool_), endings[int(records.offsets[0])])
            records = records.part(0, row)
        evaluated = self._evaluate(records, until_s, log)
        if evaluated.ended and evaluated.failure:
            self._remember(queue, int(records.offsets[len(evaluated.matches)]), evaluated.failure)
        return evaluated

    def _lately(self, queue: MessageQueue) -> dict[int, str]:
        """Return the messages of a queue that recently ended the process of the predicate function. The result maps
        each message's offset to the reason why the process ended."""
        with self._lock:
            endings, now_s = self._endings.get(queue), self._clock()
            return {} if not endings else {at: why for at, (why, until_s) in endings.items() if until_s > now_s}

    def _remember(self, queue: MessageQueue, offset: int, why: str) -> None:
        with self._lock:
            if sum(map(len, self._endings.values())) >= FAILURES_KEPT:
                self._endings.clear()
            self._endings.setdefault(queue, {})[offset] = (why, self._clock() + FAILURE_KEPT_S)


def _has_more(answer: FetchResult) -> bool:
    """Return True if a fetch answer without matching messages ended before the queue's end, so that the queue has
    messages that were not checked."""
    excluded = answer.status is PullStatus.NO_MATCHED_MESSAGE and not isinstance(answer, FetchFailed)
    return excluded and answer.next_offset < answer.max_offset


def _records_of(request: FetchRequest, result: FetchResult) -> tuple[Sequence[LocatedRecords], StoreLog | None]:
    """Return the records of a fetch. Also returns the store's log files if the records are in mapped files."""
    if isinstance(result, FoundInPlace):
        files = result.files
        return result.mapped, StoreLog(
            files.root, files.commit_log_file_size, files.consume_queue_file_size, files.commit_log_directories
        )
    places = (result.count, request.queue_offset, result.next_offset)
    return [LocatedRecords.of_fetch(result.records, *places)], None
