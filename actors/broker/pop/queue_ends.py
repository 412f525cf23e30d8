"""The visible ends of queues, as reported by the broker group's own store: what receives may lease.

How a broker learns that a message has arrived belongs here. One long poll is open at a time, over a lane of its own:
the store answers as soon as one of the queues has messages after the known end. If no such lane can be opened, the ends
are fetched every FETCH_PAUSE_S.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from raymq.common.errors import RaymqError
from raymq.common.protocol.store import FetchRequest, QueueEnds
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_lane import EndsWatch

FETCH_PAUSE_S: Final = 0.2
ASK_TIMEOUT_S: Final = 5.0
"""The time, after a long poll's wait, in which the answer must arrive."""
AGAIN_AFTER_S: Final = 0.3
"""The pause after a failed long poll."""

logger = logging.getLogger(__name__)

TopicQueue = tuple[str, int]


class QueueEndsWatch:
    """The ends of queues of the master's store, which `storage` returns. One thread uses it; any thread may read
    `known`.
    """

    def __init__(self, storage: Callable[[], StorageClient]) -> None:
        self._storage_now = storage
        self.known: dict[TopicQueue, QueueEnds] = {}
        """The ends that the store has reported."""
        self._storage: StorageClient | None = None
        self._watch: EndsWatch | None = None
        self._asked: list[TopicQueue] = []
        self._deadline_s = 0.0
        self._not_before_s = 0.0

    @property
    def is_asking(self) -> bool:
        """True while a long poll waits for its answer."""
        return bool(self._asked)

    @property
    def descriptor(self) -> int:
        """The descriptor that becomes readable when the answer arrives; -1 if there is none."""
        return self._watch.fileno() if self._watch is not None and self._asked else -1

    def next_look_s(self) -> float:
        """The time at which to continue without an answer."""
        return self._deadline_s if self._asked and self._watch is not None else self._not_before_s

    def ask(self, queues: Sequence[TopicQueue], wait_s: float) -> bool:
        """Start a long poll for the ends of some queues, in place of the previous one.

        The store answers at once with `wait_s` 0; otherwise when an end differs from the known one, or after `wait_s`.
        Returns False if the poll cannot start now.
        """
        storage = self._storage_now()
        if storage is not self._storage:
            self._drop(storage)
        if time.monotonic() < self._not_before_s:
            return False
        ends = [self.known.get(queue) for queue in queues]
        requests = [
            FetchRequest(*queue, 0 if known is None else known.max_offset, 1)
            for queue, known in zip(queues, ends, strict=True)
        ]
        try:
            if self._watch is None:
                self._watch = storage.open_watch(anywhere=True)
            if self._watch is None:
                self._fetch(storage, queues, requests)
                return True
            self._watch.ask(requests, wait_s)
        except RaymqError as error:
            self._fail(error)
            return False
        self._asked, self._deadline_s = list(queues), time.monotonic() + wait_s + ASK_TIMEOUT_S
        return True

    def take_answer(self, *, readable: bool) -> bool:
        """Read the answer if the descriptor is readable. Returns True if it arrived, or will not arrive any more."""
        if not self._asked or self._watch is None:
            return bool(self._asked)
        if not readable:
            if time.monotonic() < self._deadline_s:
                return False
            self._fail(TimeoutError("no answer in time"))
            return False
        try:
            ends = self._watch.receive()
        except RaymqError as error:
            self._fail(error)
            return False
        if len(ends) != len(self._asked):
            return False  # the answer to an earlier long poll
        self.known.update(zip(self._asked, ends, strict=True))
        self._asked = []
        return True

    def close(self) -> None:
        """Close the lane. Idempotent."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._asked = []

    def _fetch(self, storage: StorageClient, queues: Sequence[TopicQueue], requests: list[FetchRequest]) -> None:
        self._not_before_s = time.monotonic() + FETCH_PAUSE_S
        results = storage.fetch(requests, 0, 0.0, ASK_TIMEOUT_S)
        for queue, result in zip(queues, results, strict=True):
            self.known[queue] = QueueEnds(result.min_offset, result.max_offset)

    def _fail(self, error: Exception) -> None:
        logger.info("asking the store for the ends of queues failed, and is retried: %s", error)
        self.close()
        self._not_before_s = time.monotonic() + AGAIN_AFTER_S

    def _drop(self, storage: StorageClient) -> None:
        """Forget the ends that another store reported."""
        self.close()
        self.known = {}
        self._storage, self._not_before_s = storage, 0.0
