"""Queue has the interface of `ray.util.queue.Queue`, and stores its items in a topic, so that they survive processes.

    put  ──▶ pickle ──▶ a message of the topic, whose backlog has the limit `maxsize`
    get  ──▶ lease of the oldest message (SimpleEngine) ──▶ unpickle ──▶ acknowledge ──▶ the item

A queue is a topic with one queue, and a consumer group of the same name. A pickled Queue has only the name: each
process connects at its first call. A program needs another import and no other change.

    put returned           the item is stored as durably as the cluster's settings require
    get returned           the item is removed; no other call gets it. It is lost if the caller dies, as in Ray
    a process dies in get  the item was leased and not removed: another call gets it after LEASE_S
    get is interrupted,    an item that was removed in this moment is kept in this process, and the next get here
    or cancelled           returns it. An item that was only leased goes back
    a broker fails         put and get wait for the next master. If the outcome of an acknowledgement stays unknown,
                           `get` returns the item, and another call may get it once more
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import operator
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import ray
from ray import cloudpickle
from ray.util.queue import Empty, Full

from raymq.client.client import NAMESPACE_VARIABLE
from raymq.common.errors import (
    ClientStateError,
    InvalidArgumentError,
    RaymqError,
    TopicExistsError,
    TopicFullError,
    TopicNotExistError,
)
from raymq.common.message import Message
from raymq.common.protocol.bounds import BacklogPolicy
from raymq.common.protocol.pop import RECEIVE_MESSAGES
from raymq.common.protocol.route import TopicRoute
from raymq.queue.link import LeasedItems, QueueLink, link_to

GET_WAIT_S: Final = 2.0
"""Maximum time in seconds of one wait for an item. A waiting `get` waits again."""
FRESH_S: Final = 1.0
"""Time in seconds in which the store learns of room that consumers have made. A `put` that must not wait is refused at
once only if the queue is full now."""
PUT_AGAIN_S: Final = 0.1
SEND_MIN_S: Final = 5.0
"""Minimum timeout in seconds of one send, so that a short timeout of `put` counts for room, not for a slow network."""
TOGETHER_MAX: Final = 1000
TOGETHER_MAX_BYTES: Final = 1024 * 1024
"""Maximum size in bytes of the items that one request stores together, if there are several. With TOGETHER_MAX items it
is below the limits of a request, which the store accepts or refuses as a whole."""
QUEUE_THREADS_MAX: Final = 64
"""Maximum number of threads for the asyncio gets of all queues in a process, and also for their puts."""

logger = logging.getLogger(__name__)


class Queue:
    """A first-in, first-out queue of Python objects on a topic, for any number of processes.

    `name`: the name of the topic and of the consumer group. Each Queue of the same name is the same queue, in every
    process and program, also later. The first one creates the topic. Without a name the queue gets a random name, and
    is deleted by `shutdown`, or when the process that created the queue exits normally. `maxsize`: the maximum number
    of items; 0 for no maximum. By default the queue that exists has its maximum, and a new queue has none. A number as
    the first argument is `maxsize`, as in `ray.util.queue.Queue(10)`. `actor_options`: the option `name` is the
    queue's name if there is no other. All other options have no effect, because the queue needs no actor. `namespace`:
    the namespace of `raymq.connect`.

    Items are pickled: get items only from programs that you trust. An item has at most 4 MiB. An ObjectRef in an item
    does not keep its object alive. Several threads and event loops may call the methods.

    Raises TopicExistsError if the topic exists with another `maxsize` or is no queue's topic, InvalidArgumentError if
    `maxsize` is no whole number, IllegalNameError for an illegal name, and the errors of `raymq.connect`.
    """

    def __init__(
        self,
        name: str | int | None = None,
        maxsize: int | Mapping[str, Any] | None = None,
        actor_options: Mapping[str, Any] | None = None,
        *,
        namespace: str | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            options = maxsize if isinstance(maxsize, Mapping) else actor_options
            name, maxsize, actor_options = None, name, options
        wanted = None if maxsize is None else _whole_number(maxsize)
        if name is None:
            name = (actor_options or {}).get("name")
        self._is_own = name is None
        if namespace is None:
            # Another process may have another environment, so a pickled Queue has the namespace of this process.
            namespace = os.environ.get(NAMESPACE_VARIABLE, "")
        self._begin(f"queue-{uuid.uuid4().hex}" if name is None else name, 0, namespace)
        self._open(wanted)
        if self._is_own:
            atexit.register(self._delete_at_exit)

    def _begin(self, name: str, maxsize: int, namespace: str) -> None:
        self.name, self.maxsize, self._namespace = name, maxsize, namespace
        self._link: QueueLink | None = None
        self._is_shut = False

    def _open(self, maxsize: int | None) -> None:
        """Create the group and the topic, or check the topic that exists. `maxsize`: None for the topic's own."""
        admin = self._connected().admin
        admin.create_group(self.name)
        try:
            self._check(admin.topic_route(self.name), maxsize)
        except TopicNotExistError:
            self.maxsize = maxsize or 0
            bound: dict[str, Any] = {"max_backlog": self.maxsize}
            if self.maxsize:
                bound |= {"backlog_policy": "refuse", "backlog_groups": [self.name]}
            try:
                admin.create_topic(self.name, queues=1, **bound)
            except TopicExistsError:
                # Another process created the topic, with another maximum.
                self._check(admin.topic_route(self.name), maxsize)

    def _check(self, route: TopicRoute, maxsize: int | None) -> None:
        """Take the maximum of a topic that exists. Raises TopicExistsError if it is not `maxsize`, or if the topic is
        no queue's."""
        queues, bound = sum(route.queue_counts().values()), route.attributes.bound
        if queues != 1:
            raise TopicExistsError(self.name, f"with {queues} queues, so it is no raymq.Queue")
        if bound is not None and bound.policy is not BacklogPolicy.REFUSE:
            raise TopicExistsError(self.name, f"with the backlog policy {bound.policy}, so it is no raymq.Queue")
        self.maxsize = 0 if bound is None else bound.max_messages or 0
        if maxsize not in (None, self.maxsize):
            raise TopicExistsError(self.name, f"with maxsize {self.maxsize}")

    def __reduce__(self) -> tuple[Callable[..., Queue], tuple[Any, ...]]:
        return _attached, (self.name, self.maxsize, self._namespace)

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, maxsize={self.maxsize})"

    def _connected(self) -> QueueLink:
        if self._is_shut:
            raise ClientStateError(f"queue {self.name!r} was shut down")
        if self._link is None:
            self._link = link_to(self.name, self._namespace)
        return self._link

    # Methods that tell the queue's size

    def qsize(self) -> int:
        """Return the number of items that nobody has got. For up to LEASE_S after a process died in `get`, the number
        may include items that others got. Raises RaymqError if the brokers do not answer."""
        return self._connected().size()

    def size(self) -> int:
        """Return `qsize()`."""
        return self.qsize()

    def __len__(self) -> int:
        return self.qsize()

    def empty(self) -> bool:
        """Return True if the queue has no items."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Return True if the queue has `maxsize` items."""
        return 0 < self.maxsize <= self.qsize()

    # Methods that put items

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Store an item at the queue's end.

        If the queue is full, waits until it has room, at most `timeout` seconds; without `block` it does not wait.
        Raises Full if it has no room then, ValueError if `timeout` is negative, MessageIllegalError if the item is too
        large, and the errors of `Producer.send`. After SendUnknownError the item may be stored; after each other error
        it is not stored. Waiting processes get room in no particular order.
        """
        deadline_s = _deadline(block, timeout)
        self._put([self._message(item)], deadline_s)

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Store an item as `put` does, without blocking the event loop. If the call is cancelled, the item may be
        stored."""
        deadline_s, message = _deadline(block, timeout), self._message(item)
        while not await asyncio.wrap_future(_PUT_THREADS.submit(self._put_once, [message], deadline_s)):
            await asyncio.sleep(_pause(deadline_s))

    def put_nowait(self, item: Any) -> None:
        """Store an item as `put` does, without waiting for room."""
        self.put(item, block=False)

    def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Store several items, in order. Raises Full if the queue has no room for all of them, and TypeError if `items`
        is no iterable; then it stores none. One request stores up to 1000 items and up to 1 MiB. If a batch needs
        several requests, its first items may be stored although the call raises an error, for example Full because
        other processes put at the same time."""
        if not isinstance(items, Iterable):
            raise TypeError("Argument 'items' must be an Iterable")
        messages = [self._message(item) for item in items]
        if self.maxsize and messages and len(messages) + (size := self.qsize()) > self.maxsize:
            raise Full(f"Cannot add {len(messages)} items to queue of size {size} and maxsize {self.maxsize}.")
        for together in _parts(messages):
            self._put(together, time.monotonic())

    def _message(self, item: Any) -> Message:
        return Message(self.name, cloudpickle.dumps(item))

    def _put(self, messages: list[Message], deadline_s: float) -> None:
        while not self._put_once(messages, deadline_s):
            time.sleep(_pause(deadline_s))

    def _put_once(self, messages: list[Message], deadline_s: float) -> bool:
        """Send messages once. Returns False if the store had no room, and may have some soon. Raises Full after the
        deadline if the queue is full now."""
        try:
            self._connected().send(messages, max(deadline_s - time.monotonic(), SEND_MIN_S))
        except TopicFullError as error:
            now_s = time.monotonic()
            # The store may not have learned yet that others got items: ask the broker before the call is refused.
            if now_s >= deadline_s + FRESH_S or (now_s >= deadline_s and self.qsize() + len(messages) > self.maxsize):
                raise Full(f"queue {self.name!r} has {self.maxsize} items, its maxsize") from error
            return False
        return True

    # Methods that get items

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove the oldest item, and return it.

        If the queue is empty, waits for an item, at most `timeout` seconds; without `block` it does not wait. Raises
        Empty if no item came, ValueError if `timeout` is negative, the error of the unpickling, and the errors of
        `SimpleConsumer.receive`. An item that cannot be unpickled stays in the queue, and moves to the dead letters of
        the group after ATTEMPTS_MAX attempts.
        """
        deadline_s = _deadline(block, timeout)
        while not (items := self._get_once(1, deadline_s, _NEVER)):
            pass
        return items[0]

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the oldest item as `get` does, without blocking the event loop. If the call is cancelled,
        no item is lost."""
        deadline_s = _deadline(block, timeout)
        while True:
            is_cancelled = threading.Event()
            call = _GET_THREADS.submit(self._get_once, 1, deadline_s, is_cancelled)
            try:
                items = await asyncio.wrap_future(call)
            except BaseException:
                is_cancelled.set()
                call.add_done_callback(self._keep)
                raise
            if items:
                return items[0]

    def get_nowait(self) -> Any:
        """Remove and return the oldest item as `get` does, without waiting for an item."""
        return self.get(block=False)

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Remove and return the oldest `num_items` items. Raises Empty if the queue has fewer items; then it removes
        none. Raises TypeError or ValueError if `num_items` is no number from 0 to 4096."""
        if not isinstance(num_items, int):
            raise TypeError("Argument 'num_items' must be an int")
        if num_items < 0:
            raise ValueError("'num_items' must be nonnegative")
        if num_items > RECEIVE_MESSAGES.high:
            raise InvalidArgumentError(f"num_items must be at most {RECEIVE_MESSAGES.high}, not {num_items}")
        if num_items > (size := self.qsize()):
            raise Empty(f"Cannot get {num_items} items from queue of size {size}.")
        items: list[Any] = []
        while num_items and not items:
            items = self._get_once(num_items, time.monotonic(), _NEVER)
        return items

    def _get_once(self, count: int, deadline_s: float, is_cancelled: threading.Event) -> list[Any]:
        """Remove `count` items, and return them. Waits up to GET_WAIT_S for them. Returns no item if there are too few
        and the deadline is not over; raises Empty after the deadline."""
        if is_cancelled.is_set():
            return []
        link = self._connected()
        items = link.take_kept(count)
        try:
            leases = self._lease(link, count - len(items), deadline_s) if len(items) < count else []
            if is_cancelled.is_set():
                link.give_back([message for lease in leases for message in lease.messages])
            else:
                for lease, loaded in zip(leases, link.load(leases), strict=True):
                    _remove(link, lease, loaded, items)
        except BaseException:
            link.keep(items)
            raise
        if len(items) < count:
            # The leases are too few, or another call got the items of a lease that had ended.
            link.keep(items)
            return []
        return items

    def _lease(self, link: QueueLink, count: int, deadline_s: float) -> list[LeasedItems]:
        """Lease `count` items. Waits up to GET_WAIT_S for them. Returns no lease if there are too few and the deadline
        is not over; raises Empty after the deadline."""
        leases: list[LeasedItems] = []
        until_s = min(deadline_s, time.monotonic() + GET_WAIT_S)
        may_look_again = True
        try:
            while (missing := count - sum(len(lease.messages) for lease in leases)) > 0:
                left_s = max(0.0, until_s - time.monotonic())
                lease = link.lease(missing, left_s)
                if lease.messages:
                    leases.append(lease)
                elif left_s > 0:
                    continue
                elif time.monotonic() < deadline_s:
                    break
                elif may_look_again and link.size() >= missing:
                    # The broker may not have seen the newest message yet.
                    may_look_again, until_s = False, time.monotonic() + FRESH_S
                else:
                    raise Empty(f"queue {self.name!r} is empty")
            else:
                return leases
        except (RaymqError, Empty) as error:
            link.give_back([message for lease in leases for message in lease.messages])
            if isinstance(error, RaymqError) and error.retryable and time.monotonic() < deadline_s:
                return []
            raise
        link.give_back([message for lease in leases for message in lease.messages])
        return []

    def _keep(self, call: Future[list[Any]]) -> None:
        """Keep the items of a cancelled call for the next one in this process."""
        if not call.cancelled() and call.exception() is None and self._link is not None:
            self._link.keep(call.result())

    def shutdown(self, force: bool = False, grace_period_s: int = 5) -> None:
        """Delete the queue with all its items: the topic and the consumer group. Dead letters of a queue with a name
        stay. Later calls of this object raise ClientStateError, and calls in other processes raise RaymqError.
        Idempotent. `force` and `grace_period_s` are accepted and have no effect, because the queue has no actor that
        must end."""
        if self._is_shut:
            return
        self._connected().delete(dead_letters=self._is_own)
        self._is_shut, self._link = True, None
        if self._is_own:
            atexit.unregister(self._delete_at_exit)

    def _delete_at_exit(self) -> None:
        """Delete a queue without a name when the process exits that created it."""
        if not ray.is_initialized():
            logger.warning("queue %s was not deleted, because Ray was shut down before", self.name)
            return
        try:
            self.shutdown()
        except RaymqError as error:
            logger.warning("queue %s was not deleted: %s", self.name, error)


_NEVER: Final = threading.Event()
"""An event that nobody sets."""
_GET_THREADS: Final = ThreadPoolExecutor(QUEUE_THREADS_MAX, thread_name_prefix="raymq-queue-get")
_PUT_THREADS: Final = ThreadPoolExecutor(QUEUE_THREADS_MAX, thread_name_prefix="raymq-queue-put")
"""Threads of their own for puts, so that waiting gets do not delay a put."""


def _attached(name: str, maxsize: int, namespace: str) -> Queue:
    """Return a queue that exists: the queue that another process has pickled."""
    queue = Queue.__new__(Queue)
    queue._is_own = False
    queue._begin(name, maxsize, namespace)
    return queue


def _whole_number(maxsize: Any) -> int:
    """Return a maximum as in Ray: no maximum if it is negative. Raises InvalidArgumentError if it is no whole
    number."""
    try:
        return max(operator.index(maxsize), 0)
    except TypeError:
        raise InvalidArgumentError(f"maxsize must be a whole number, not {maxsize!r}") from None


def _remove(link: QueueLink, lease: LeasedItems, loaded: list[Any], items: list[Any]) -> None:
    """Remove the items of a lease from the queue, and add them to `items`. Adds nothing if another call got them."""
    try:
        is_removed = link.remove(lease)
    except RaymqError:
        raise
    except BaseException:  # ctrl-C: the items may be removed already
        items += loaded
        raise
    if is_removed:
        items += loaded


def _parts(messages: list[Message]) -> Iterator[list[Message]]:
    """Divide messages into parts that one request stores."""
    part: list[Message] = []
    size_bytes = 0
    for message in messages:
        if part and (len(part) == TOGETHER_MAX or size_bytes + len(message.body) > TOGETHER_MAX_BYTES):
            yield part
            part, size_bytes = [], 0
        part.append(message)
        size_bytes += len(message.body)
    if part:
        yield part


def _deadline(block: bool, timeout: float | None) -> float:
    """Return the monotonic time in seconds at which a call stops to wait. Raises ValueError for a negative timeout."""
    if not block:
        return time.monotonic()
    if timeout is not None and not timeout >= 0:
        raise ValueError("'timeout' must be a non-negative number")
    return float("inf") if timeout is None else time.monotonic() + timeout


def _pause(deadline_s: float) -> float:
    """Return the time in seconds before the next attempt to put. It is random, so that waiting processes spread."""
    pause_s = PUT_AGAIN_S * random.uniform(0.5, 1.0)
    return min(pause_s, max(0.0, deadline_s - time.monotonic())) or pause_s
