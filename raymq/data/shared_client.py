"""The raymq client that all Ray tasks of a worker process share. The first task creates the client, and later tasks use
the same client.

Ray uses a worker process for many tasks and may keep the process as long as the job runs. A client keeps lanes (direct
socket connections) to storage actors, and maps log files, whose disk space is not freed while they are mapped. So the
client is closed if no task has used it for some time.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import ray

from raymq.client.client import Client, connect
from raymq.client.cluster.attach import attach_ray
from raymq.common.closing import closed_on_error, in_forked_child
from raymq.common.errors import ClientStateError
from raymq.common.identity import Identity, acting_as

IDLE_S: Final = 10.0
"""Time in seconds after which an unused client is closed."""

logger = logging.getLogger(__name__)


class SharedClient:
    """One client for all tasks of a process. At any time, all tasks must belong to one user and namespace. Thread-safe.
    `make`: function that connects a new client.

    A forked child process starts without a client and without users, even if the parent's tasks use a client. The next
    `use` connects again. It raises ClientStateError if the parent process is connected to Ray.
    """

    def __init__(self, make: Callable[[str], Client], idle_s: float = IDLE_S) -> None:
        self._make, self._idle_s = make, idle_s
        self._begin()
        owner = weakref.ref(self)
        in_forked_child(lambda: None if (shared := owner()) is None else shared._begin())

    def _begin(self) -> None:
        """Reset the shared client of the tasks to its first state: no client is connected, and no task uses one. Called
        by the constructor, and in a forked child."""
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._whose: tuple[Identity | None, str] = (None, "")
        """The user and the namespace for which the shared client was created."""
        self._users = 0
        self._idle: threading.Timer | None = None

    @contextmanager
    def use(self, identity: Identity | None = None, namespace: str = "") -> Iterator[Client]:
        """Return the client for a user and a namespace. The client stays open at least until the `with` block ends. An
        open client of another user or namespace is closed first.

        Raises the errors of `raymq.connect`, and ClientStateError while tasks of another user or namespace use the
        client.
        """
        whose = identity, namespace
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None
            if self._client is not None and self._whose != whose:
                if self._users:
                    raise ClientStateError(
                        "this Ray worker is running a task of another raymq user or namespace; try again "
                        "after that task has ended"
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
            # Release the client only in the process that took it. A child process that was forked inside the `with`
            # block does not use the parent's client.
            if user_of == self._process_id:
                self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                # The timer's thread is a daemon thread, so that the worker process can exit without waiting for the
                # timer.
                self._idle = threading.Timer(self._idle_s, self._close)
                self._idle.daemon = True
                self._idle.start()

    def _close(self) -> None:
        with self._lock:
            if self._users or self._client is None:
                return  # after the timer had fired, a task started to use the client, so do not close it
            client, self._client, self._idle = self._client, None, None
            try:
                client.close()
            except Exception:  # the timer's thread runs this, so an error would be lost if it were not logged here
                logger.warning("cannot close the raymq client of this Ray worker", exc_info=True)


@contextmanager
def driver_client(address: str | None, namespace: str | None = None) -> Iterator[Client]:
    """Return a client that plans a read or write. Connects this process to Ray if it is not connected. The process
    stays connected, because the dataset is executed later. Raises the errors of `raymq.connect`; the process is
    then not connected, if it was not connected before."""
    release: Callable[[], None] = ray.shutdown if attach_ray(address) else lambda: None
    with closed_on_error(release, "the connection to Ray"):
        client = connect(namespace=namespace)
    with client:
        yield client


def worker_client() -> SharedClient:
    """Return the SharedClient of this process."""
    return _SHARED


_SHARED: Final = SharedClient(lambda namespace: connect(namespace=namespace))
