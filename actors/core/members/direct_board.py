"""DirectBoard pairs direct requests, which are never stored, with threads of listeners that wait for them.

    request, and a thread waits      the thread that is chosen gets the request
    request, and all threads work    the request waits for a thread, until its deadline (bounded)
    request, and no listener         NoListenerError; also if the last listener leaves while the request waits

A thread of a listener's process is called a worker here. A worker has its own connection to the broker, and works on
one request at a time. The instances of push consumers get requests in turn. Of an instance's waiting workers, the
worker that has waited for the shortest time gets the request, because its caches are warm. A request goes to one worker
only, and is never handed over again. The methods get no time: the caller ends what waits too long. No request survives
the broker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from raymq.common.errors import NoListenerError, SystemBusyError

DIRECT_REQUESTS_MAX: Final = 10_000
"""Maximum number of direct requests at one broker, waiting or running."""
DIRECT_WAITING_MAX_BYTES: Final = 64 << 20
"""Maximum total size, in bytes, of the direct requests that wait for a listener's thread at one broker."""

_NO_TOPICS: Final[Mapping[str, tuple[str, ...]]] = {}

OwnerT = TypeVar("OwnerT")


@dataclass(eq=False, slots=True)
class DirectRequest(Generic[OwnerT]):
    """A direct request at the broker. `owner`: the caller's object for this request. `request`: the encoded request;
    empty after a worker has got it."""

    ticket: int
    topic: str
    tags: str | None
    request: bytes
    owner: OwnerT
    is_waiting: bool = False


@dataclass(eq=False, slots=True)
class Worker(Generic[OwnerT]):
    """A thread of a listener's process: the instance to which it belongs, and the tags that it wants, by topic. No tags
    means all messages. `running`: the request on which it works."""

    instance: tuple[str, str] = ("", "")
    topics: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _NO_TOPICS)
    is_idle: bool = False
    running: DirectRequest[OwnerT] | None = None


@dataclass(eq=False, slots=True)
class _Instance(Generic[OwnerT]):
    """The workers of one push-consumer instance for one topic. `idle`: the workers that wait, the last one first to
    get a request."""

    tags: frozenset[str]
    workers: dict[Worker[OwnerT], None] = field(default_factory=dict)
    idle: list[Worker[OwnerT]] = field(default_factory=list)

    def wants(self, tags: str | None) -> bool:
        return not self.tags or tags in self.tags


class DirectBoard(Generic[OwnerT]):
    """The direct requests and the workers of one broker. Not thread-safe."""

    def __init__(self, most: int = DIRECT_REQUESTS_MAX, most_bytes: int = DIRECT_WAITING_MAX_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._instances: dict[str, dict[tuple[str, str], _Instance[OwnerT]]] = {}
        """The instances that answer requests, by topic. The instance that got a request last comes last."""
        self._waiting: dict[str, dict[int, DirectRequest[OwnerT]]] = {}
        """The requests that wait for a worker, by topic and ticket, the oldest first."""
        self._open = self._waiting_bytes = self._tickets = self._workers = 0

    @property
    def open(self) -> int:
        """Number of requests that wait for a worker or that a worker has."""
        return self._open

    @property
    def waiting_bytes(self) -> int:
        """Total size in bytes of the requests that wait for a worker."""
        return self._waiting_bytes

    @property
    def workers(self) -> int:
        """Number of workers, waiting or working."""
        return self._workers

    def put(
        self, topic: str, tags: str | None, request: bytes, owner: OwnerT
    ) -> tuple[DirectRequest[OwnerT], Worker[OwnerT] | None]:
        """Add a request. Returns the request, and the worker that must get it now; None if the request waits.

        Raises NoListenerError if no instance answers requests with this topic and tag. Raises SystemBusyError if too
        many requests are open, or too many bytes wait. After an error the board is unchanged.
        """
        chosen = self._choose(topic, tags)
        if self._open >= self._most:
            raise SystemBusyError(f"{self._open} requests with durable=False are open at this broker; try again later")
        self._tickets += 1
        one = DirectRequest(self._tickets, topic, tags, request, owner)
        if chosen is not None:
            self._give(one, chosen)
        elif self._waiting_bytes + len(request) > self._most_bytes and self._waiting_bytes:
            raise SystemBusyError(
                f"{self._waiting_bytes} bytes of requests with durable=False wait for a listener at this broker; "
                "start more listeners, or try again later"
            )
        else:
            self._waiting.setdefault(topic, {})[one.ticket] = one
            self._waiting_bytes += len(request)
            one.is_waiting = True
        self._open += 1
        return one, chosen

    def wait(
        self, worker: Worker[OwnerT], instance: tuple[str, str], topics: Mapping[str, tuple[str, ...]]
    ) -> DirectRequest[OwnerT] | None:
        """Note that a worker waits for a request. Returns the oldest request that has waited for such a worker, which
        the worker must get now; None if the worker waits.

        The worker's last request must have ended. `instance`: the group and the name of its instance.
        """
        if worker.instance != instance or worker.topics != topics:
            self._forget(worker)
            worker.instance, worker.topics = instance, topics
            self._workers += 1
            for topic, tags in topics.items():
                found = self._instances.setdefault(topic, {}).setdefault(instance, _Instance(frozenset(tags)))
                found.tags = frozenset(tags)
                found.workers[worker] = None
        one = min((one for one in self._oldest(topics)), key=lambda one: one.ticket, default=None)
        if one is not None:
            self._remove_waiting(one)
            self._give(one, worker)
            return one
        if not worker.is_idle:
            worker.is_idle = True
            for topic in topics:
                self._instances[topic][instance].idle.append(worker)
        return None

    def stop_waiting(self, worker: Worker[OwnerT]) -> bool:
        """Note that a worker waits no longer; requests still wait for it. Returns False if it did not wait."""
        if not worker.is_idle:
            return False
        worker.is_idle = False
        for topic in worker.topics:
            self._instances[topic][worker.instance].idle.remove(worker)
        return True

    def finish(self, worker: Worker[OwnerT], ticket: int) -> DirectRequest[OwnerT] | None:
        """Return the request that a worker has answered, and close it. Returns None if the worker does not have this
        request, for example because nobody waits for the answer any more."""
        one = worker.running
        if one is None or one.ticket != ticket:
            return None
        worker.running = None
        self._open -= 1
        return one

    def withdraw(self, one: DirectRequest[OwnerT]) -> bool:
        """Drop a request for which nobody waits any more. Returns True if no worker has got it. A worker that works on
        the request continues."""
        was_waiting = one.is_waiting
        if was_waiting:
            self._remove_waiting(one)
            self._open -= 1
        return was_waiting

    def leave(self, worker: Worker[OwnerT]) -> tuple[DirectRequest[OwnerT] | None, list[DirectRequest[OwnerT]]]:
        """Remove a worker that takes no further requests. Returns the request on which it worked, if any, and the
        waiting requests that no other worker wants. All of them are closed."""
        topics = worker.topics
        self._forget(worker)
        one, worker.running = worker.running, None
        left = [other for topic in topics for other in self._waiting.get(topic, {}).values() if not self._wants(other)]
        for other in left:
            self._remove_waiting(other)
        self._open -= len(left) + (one is not None)
        return one, left

    def _wants(self, one: DirectRequest[OwnerT]) -> bool:
        """True if a worker may get a request, now or later."""
        return any(instance.wants(one.tags) for instance in self._instances.get(one.topic, {}).values())

    def _choose(self, topic: str, tags: str | None) -> Worker[OwnerT] | None:
        """Return the worker that gets the next request; None if all of them work. Raises NoListenerError if no
        instance wants the request."""
        known = False
        for instance in self._instances.get(topic, {}).values():
            if instance.wants(tags):
                known = True
                if instance.idle:
                    return instance.idle[-1]
        if not known:
            raise NoListenerError(topic, tags or "")
        return None

    def _give(self, one: DirectRequest[OwnerT], worker: Worker[OwnerT]) -> None:
        """Make a request the running request of a worker, and move the worker's instance behind the other instances."""
        self.stop_waiting(worker)
        worker.running, one.is_waiting = one, False
        instances = self._instances[one.topic]
        instances[worker.instance] = instances.pop(worker.instance)

    def _oldest(self, topics: Mapping[str, tuple[str, ...]]) -> Iterator[DirectRequest[OwnerT]]:
        """Yield the oldest waiting request of each topic that has one of the topic's tags."""
        if not self._waiting:
            return
        for topic, tags in topics.items():
            for one in self._waiting.get(topic, {}).values():
                if not tags or one.tags in tags:
                    yield one
                    break

    def _remove_waiting(self, one: DirectRequest[OwnerT]) -> None:
        requests = self._waiting[one.topic]
        del requests[one.ticket]
        if not requests:
            del self._waiting[one.topic]
        self._waiting_bytes -= len(one.request)
        one.is_waiting = False

    def _forget(self, worker: Worker[OwnerT]) -> None:
        """Remove a worker from the instances of its topics, and instances without workers."""
        if not worker.topics:
            return
        self.stop_waiting(worker)
        for topic in worker.topics:
            instances = self._instances[topic]
            instance = instances[worker.instance]
            instance.workers.pop(worker, None)
            if not instance.workers:
                del instances[worker.instance]
            if not instances:
                del self._instances[topic]
        worker.topics = _NO_TOPICS
        self._workers -= 1
