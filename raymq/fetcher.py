"""Long polls: one thread per storage actor that reads every queue a consumer instance wants from it.

Used by consumers of both kinds, in the user's process and in Pull actors. What is wanted and where results go are
functions of the owner, so that all state about queues is in one place, the owner's; here are only threads, and a pause
after failures.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from raymq.backoff import Backoff
from raymq.errors import RaymqError
from raymq.message import MessageQueue, PullStatus
from raymq.storage_client import StorageClient
from raymq.store_api import FetchRequest, FetchResult

LONG_POLL_S: Final = 1.0
"""Short compared with RocketMQ's 15 s: it also bounds how long a newly granted queue waits for its first read."""
PAUSED_POLL_S: Final = 0.1
"""The wait while a queue is left out because its buffer is full: it may be wanted again at any moment."""
CALL_TIMEOUT_S: Final = 10.0
FETCH_MAX_BYTES: Final = 2 * 1024 * 1024

_log = logging.getLogger(__name__)


class Fetcher:
    """Runs one loop per storage actor that has wanted queues.

    `wanted()` gives queue to next offset for the queues with room; `held()` how many queues there are in all, by
    storage name; `deliver(queue, from_offset, result)` takes one result. They are called from several threads.
    """

    def __init__(
        self,
        *,
        wanted: Callable[[], Mapping[MessageQueue, int]],
        held: Callable[[], frozenset[MessageQueue]],
        deliver: Callable[[MessageQueue, int, FetchResult], None],
        request: Callable[[MessageQueue, int], FetchRequest],
        storage_name: Callable[[MessageQueue], str],
        storage: Callable[[str], StorageClient],
    ) -> None:
        self._wanted = wanted
        self._held = held
        self._deliver = deliver
        self._request = request
        self._storage_name = storage_name
        self._storage = storage
        self._lock = threading.Lock()
        self._names: dict[MessageQueue, str] = {}
        self._loops: dict[str, threading.Event] = {}
        self._stopped = threading.Event()

    def wake(self) -> None:
        """Something may be wanted that was not before."""
        for name in {name for queue in self._held() if (name := self._name_of(queue)) is not None}:
            with self._lock:
                if name not in self._loops and not self._stopped.is_set():
                    self._loops[name] = threading.Event()
                    threading.Thread(target=self._run, args=(name,), name=f"fetch-{name}", daemon=True).start()
        for event in list(self._loops.values()):
            event.set()

    def stop(self) -> None:
        """End the loops; a long poll under way ends within its wait."""
        self._stopped.set()
        for event in list(self._loops.values()):
            event.set()

    def _run(self, name: str) -> None:
        storage = self._storage(name)
        changed = self._loops[name]
        backoff = Backoff()
        while not self._stopped.is_set():
            changed.clear()
            mine = {queue for queue in self._held() if self._name_of(queue) == name}
            wanted = [(queue, offset) for queue, offset in self._wanted().items() if queue in mine]
            if not wanted:
                changed.wait(LONG_POLL_S)
                continue
            requests = [self._request(queue, offset) for queue, offset in wanted]
            wait_s = LONG_POLL_S if len(wanted) == len(mine) else PAUSED_POLL_S
            try:
                results = storage.fetch(requests, FETCH_MAX_BYTES, wait_s, CALL_TIMEOUT_S)
                for (queue, offset), result in zip(wanted, results, strict=True):
                    self._deliver(queue, offset, result)
            except RaymqError as error:
                _log.info("reading from %s fails, trying again: %s", name, error)
                for queue in mine:
                    self._names.pop(queue, None)  # it may have moved
                self._stopped.wait(backoff.next())
                continue
            except Exception:  # records that cannot be decoded, or a bug: without this loop the consumer would hang
                _log.exception("what %s answered cannot be used, trying again", name)
                self._stopped.wait(backoff.next())
                continue
            backoff.reset()
            if any(result.status is PullStatus.OFFSET_ILLEGAL for result in results):
                self._stopped.wait(PAUSED_POLL_S)  # such an answer comes at once, also while the owner cannot jump yet

    def _name_of(self, queue: MessageQueue) -> str | None:
        """The storage actor of a queue; None while that is not known, which must not end the reading of the others."""
        name = self._names.get(queue)
        if name is None:
            try:
                name = self._names[queue] = self._storage_name(queue)
            except RaymqError as error:
                _log.info("%s is not read now: %s", queue, error)
        return name
