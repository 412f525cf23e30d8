"""The connection of a process in which Ray runs tasks: made by the first task that needs it, and used by the next ones.

Ray uses a worker for many tasks and may keep it for as long as the job lasts. A client keeps lanes to storage actors,
and log files mapped, whose space is not free before they are unmapped; so it is closed when no task has used it for a
while.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from raymq.client.client import Client, connect
from raymq.client.cluster.attach import attach_ray
from raymq.common.closing import in_forked_child
from raymq.common.errors import ClientStateError
from raymq.common.identity import Identity, acting_as

IDLE_S: Final = 10.0
"""A client that is not used for so long is closed."""

logger = logging.getLogger(__name__)


class SharedClient:
    """One client for all tasks of a process, of one user at a time. Thread-safe. `make` connects.

    In a forked child it has no client and no users, whatever the parent's tasks do. The next `use` connects again. It
    raises ClientStateError in the child of a process that is connected to Ray.
    """

    def __init__(self, make: Callable[[str], Client], idle_s: float = IDLE_S) -> None:
        self._make, self._idle_s = make, idle_s
        self._begin()
        owner = weakref.ref(self)
        in_forked_child(lambda: None if (shared := owner()) is None else shared._begin())

    def _begin(self) -> None:
        """Have no client and no users."""
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._whose: tuple[Identity | None, str] = (None, "")
        """The user and the namespace of the client."""
        self._users = 0
        self._idle: threading.Timer | None = None

    @contextmanager
    def use(self, identity: Identity | None = None, namespace: str = "") -> Iterator[Client]:
        """The client of a user in a namespace, which stays open until the block has ended; one of another user or
        namespace is closed first.

        Raises as `raymq.connect` does; ClientStateError while tasks of another user or namespace use it.
        """
        whose = identity, namespace
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None
            if self._client is not None and self._whose != whose:
                if self._users:
                    raise ClientStateError(
                        "this worker runs a task of another user or namespace of raymq; try again after it"
                    )
                stale, self._client = self._client, None
                stale.close()
            if self._client is None:
                with acting_as(identity):
                    self._client = self._make(namespace)
                self._whose = whose
            client = self._client
            self._users += 1
            user_of = self._process_id
        try:
            yield client
        finally:
            if user_of == self._process_id:  # a child forked in this block uses nothing
                self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                # A daemon: the worker's end does not wait for it.
                self._idle = threading.Timer(self._idle_s, self._close)
                self._idle.daemon = True
                self._idle.start()

    def _close(self) -> None:
        with self._lock:
            if self._users or self._client is None:
                return  # a task came between the timer's end and this
            client, self._client, self._idle = self._client, None, None
            try:
                client.close()
            except Exception:  # in a separate thread nobody would see the error
                logger.warning("the client of this worker could not be closed", exc_info=True)


@contextmanager
def driver_client(address: str | None, namespace: str | None = None) -> Iterator[Client]:
    """A client to plan with. Connects this process to Ray if it is not, and leaves it connected, for a dataset is
    executed later. Raises as `raymq.connect` does."""
    attach_ray(address)
    with connect(namespace=namespace) as client:
        yield client


def worker_client() -> SharedClient:
    """The SharedClient of this process."""
    return _SHARED


_SHARED: Final = SharedClient(lambda namespace: connect(namespace=namespace))
