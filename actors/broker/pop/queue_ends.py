"""Watches the visible end offsets of queues, as the broker group's own store reports them. A receive may lease messages
before these end offsets.

One long poll is open at a time, over its own lane (direct socket connection). The store answers as soon as a queue has
messages after the end offset that the store last reported. If no such lane can be opened, the end offsets are fetched
every FETCH_PAUSE_S.
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
"""Time limit, in seconds, for the answer of a long poll, counted from the end of its wait."""
AGAIN_AFTER_S: Final = 0.3
"""Pause, in seconds, after a failed long poll."""

logger = logging.getLogger(__name__)

TopicQueue = tuple[str, int]


class QueueEndsWatch:
    """Watches the end offsets of queues in the master's store. `storage` returns the master's storage actor.

    Only one thread may use a QueueEndsWatch, but any thread may read `known`.
    """

    def __init__(self, storage: Callable[[], StorageClient]) -> None:
        self._storage_now = storage
        self.known: dict[TopicQueue, QueueEnds] = {}
        """The end offsets that the store has reported, by topic and queue."""
        self._storage: StorageClient | None = None
        self._watch: EndsWatch | None = None
        self._asked: list[TopicQueue] = []
        self._deadline_s = 0.0
        self._not_before_s = 0.0

    @property
    def is_asking(self) -> bool:
        """True while a long poll of the queue ends waits for the storage actor's answer."""
        return bool(self._asked)

    @property
    def descriptor(self) -> int:
        """The file descriptor that becomes readable when the store's answer to the long poll arrives; -1 if no long
        poll uses a socket."""
        return self._watch.fileno() if self._watch is not None and self._asked else -1

    def next_look_s(self) -> float:
        """Return the time at which the caller must look at the long poll again if the store has not answered
        before."""
        return self._deadline_s if self._asked and self._watch is not None else self._not_before_s

    def ask(self, queues: Sequence[TopicQueue], wait_s: float) -> bool:
        """Start a long poll for the end offsets of `queues`. It replaces the previous long poll.

        With `wait_s` 0 the store answers at once. Otherwise it answers when an end offset differs from the known end
        offset, or after `wait_s`. Returns False if the long poll cannot start now.
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
        """Read the store's answer to the long poll if the poll's file descriptor is readable. Returns True if the
        answer was received. If the answer is too late, or the read fails, end the long poll."""
        if not self._asked or self._watch is None:
            return bool(self._asked)
        if not readable:
            if time.monotonic() < self._deadline_s:
                return False
            self._fail(TimeoutError("the storage actor did not answer in time"))
            return False
        try:
            ends = self._watch.receive()
        except RaymqError as error:
            self._fail(error)
            return False
        if len(ends) != len(self._asked):
            return False  # this is a late answer to an earlier long poll, so ignore it
        self.known.update(zip(self._asked, ends, strict=True))
        self._asked = []
        return True

    def close(self) -> None:
        """Close the lane (direct socket connection) of the long polls. Idempotent."""
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
        logger.info("cannot read the ends of queues from the store, retrying: %s", error)
        self.close()
        self._not_before_s = time.monotonic() + AGAIN_AFTER_S

    def _drop(self, storage: StorageClient) -> None:
        """Forget the end offsets that the previous store reported, and watch `storage` from now on."""
        self.close()
        self.known = {}
        self._storage, self._not_before_s = storage, 0.0
