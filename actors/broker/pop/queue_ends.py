"""The visible ends of queues, as the broker group's own store tells them: what receives may hand out.

A change of how a broker learns that a message has arrived belongs here. One question is under way at a time, over a
lane of its own: the store answers as soon as one of the queues has something behind the end that is known. Where no
such lane can be opened, the ends are fetched every FETCH_PAUSE_S.
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
"""The time after a question's wait in which the answer must come."""
AGAIN_AFTER_S: Final = 0.3
"""The pause after a question that failed."""

logger = logging.getLogger(__name__)

TopicQueue = tuple[str, int]


class QueueEndsWatch:
    """The ends of queues of the store that `storage` returns, the master's. One thread uses it; `known` may be read by
    any."""

    def __init__(self, storage: Callable[[], StorageClient]) -> None:
        self._storage_now = storage
        self.known: dict[TopicQueue, QueueEnds] = {}
        """The ends that the store has told."""
        self._storage: StorageClient | None = None
        self._watch: EndsWatch | None = None
        self._asked: list[TopicQueue] = []
        self._deadline_s = 0.0
        self._not_before_s = 0.0

    @property
    def is_asking(self) -> bool:
        """True while an answer is to come."""
        return bool(self._asked)

    @property
    def descriptor(self) -> int:
        """The descriptor that is readable once the answer is there; -1 if there is none."""
        return self._watch.fileno() if self._watch is not None and self._asked else -1

    def next_look_s(self) -> float:
        """The time at which to go on without an answer."""
        return self._deadline_s if self._asked and self._watch is not None else self._not_before_s

    def ask(self, queues: Sequence[TopicQueue], wait_s: float) -> bool:
        """Ask for the ends of some queues, in place of what was asked before: at once with `wait_s` 0, else when one of
        them is another than known, and after `wait_s`. False if that cannot be now."""
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
        """Take the answer if the descriptor is readable. True if it was there, or is not to come any more."""
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
            return False  # the answer to a question before
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
        logger.info("the ends of queues are asked for again: %s", error)
        self.close()
        self._not_before_s = time.monotonic() + AGAIN_AFTER_S

    def _drop(self, storage: StorageClient) -> None:
        """Forget what another store said."""
        self.close()
        self.known = {}
        self._storage, self._not_before_s = storage, 0.0
