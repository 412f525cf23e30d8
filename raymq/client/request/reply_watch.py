"""ReplyWatch reads the replies to one client from the reply topic, beginning at the topic's end.

    the store's node    one thread waits for new records, and reads them in the mapped files
    elsewhere           each broker group has a long poll, whose thread also passes on the replies

ReplyWatch manages its queues like a pull consumer without a group, and commits nothing. The code of a reply's tag
excludes most replies to other clients before they are read; the rest is excluded during decoding. ReplyWatch reads
nothing if no request has waited for IDLE_AFTER_S.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from raymq.client.consumer.pull.fetched_records import decode_messages
from raymq.client.consumer.pull.poll_turn import Wakeup
from raymq.client.consumer.pull.queue_reader import QueueReader
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.queue_lookup import QueueLookup
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import RaymqError
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.parallel import require_daemon
from raymq.common.protocol.group import QueueOffset
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

REPLIES_MAX: Final = 512
"""Maximum number of replies that are read and decoded in one step."""
IDLE_AFTER_S: Final = 10.0
"""Time in seconds. If no request has waited for a reply during this time, ReplyWatch stops reading replies."""
_FAILED_PAUSE_S: Final = 0.3
_CLOSE_WITHIN_S: Final = 5.0

logger = logging.getLogger(__name__)


class ReplyWatch:
    """Reads the replies to the client `client_id`.

    `take`: called with each reply, in a reader thread. `idle_s`: returns the number of seconds since the last request
    began; 0 while a request waits for its reply.
    """

    def __init__(
        self,
        client_id: str,
        routes: RouteCache,
        storages: StorageClients,
        *,
        take: Callable[[MessageExt], None],
        idle_s: Callable[[], float],
    ) -> None:
        self._client_id = client_id
        self._take, self._idle_s = take, idle_s
        self._lookup = QueueLookup(routes, storages)
        self._lock = threading.Lock()
        """Lock that guards the state of the reply queues (`_core`, `_starts`). No thread holds it during a
        remote call."""
        self._core = SubscriptionState(PullSettings("replies", auto_commit=False), time.monotonic())
        self._starts: dict[MessageQueue, QueueOffset] = {}
        """For each reply queue, the offset at which reading starts."""
        self._taking = threading.Lock()
        """Lock of the thread that processes buffered replies. The thread holds it until no buffered reply is
        left."""
        self._closing = threading.Event()
        self._wakeup = Wakeup()
        self._reader = QueueReader(
            self._core,
            self._lock,
            routes,
            storages,
            wake=self._wakeup.set,
            fetched=self._take_found,
            lost=self._lose,
            rests=lambda: self._idle_s() >= IDLE_AFTER_S,
        )
        self._thread: threading.Thread | None = None

    def watches(self, queue: MessageQueue) -> bool:
        """Return True if a reply queue is already being read."""
        return queue in self._starts

    def begin(self, queue: MessageQueue) -> None:
        """Start to read a reply queue, from its current end on. Raises RaymqError if the broker does not return the
        queue's end. Raises ClientStateError if this is the first queue and is begun at the interpreter's exit, when
        Python 3.12 starts no thread. Only one thread at a time may call this method, and not after `close`."""
        subscription = Subscription.parse(queue.topic, self._client_id)
        end = self._lookup.bounds(queue).max_offset
        if self._thread is None:
            self._thread = require_daemon(self._run, name="replies", what="the first request of a client")
        with self._lock:
            self._starts[queue] = QueueOffset(end)
            self._core.assign({queue.topic: subscription}, self._starts, time.monotonic())

    def wake(self) -> None:
        """Continue to read the reply queues. Reading stops when no request has waited for a reply for
        IDLE_AFTER_S."""
        self._reader.read_more()

    def close(self) -> None:
        """Stop the reader threads. Idempotent."""
        self._closing.set()
        self._wakeup.set()
        self._reader.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_WITHIN_S)
        self._reader.close_files()

    # Methods of the thread that reads mapped files, on the store's node

    def _run(self) -> None:
        while not self._closing.is_set():
            # Clear the wakeup before the queues are read. A reply that arrives during the read then sets the wakeup
            # again, so the next wait ends at once.
            self._wakeup.clear()
            idle_s = self._idle_s()
            if idle_s >= IDLE_AFTER_S:
                self._wakeup.wait((), IDLE_AFTER_S)
                continue
            try:
                self._reader.look(REPLIES_MAX)
                if self._take_found():
                    continue  # This read found replies, so more may follow. Read again without waiting.
                self._wakeup.wait(self._reader.descriptors(), min(self._reader.wait_max_s(), IDLE_AFTER_S))
            except Exception:  # a bug must not stop this thread, because no other thread reads the replies
                logger.exception("cannot read replies to requests, retrying")
                self._closing.wait(_FAILED_PAUSE_S)

    # Methods that serve both sources of replies: mapped files and long polls

    def _lose(self, queue: MessageQueue, offset: int, error: RaymqError) -> None:
        logger.error("queue %s: the reply at offset %d is lost: %s", queue, offset, error)
        with self._lock:
            self._core.out_of_range(queue, offset, offset + 1)

    def _take_found(self) -> bool:
        """Decode the buffered replies, and call `take` once with each reply that is for this client. Returns True if
        any record was buffered."""
        any_found = False
        with self._taking:
            while True:
                with self._lock:
                    slices = self._core.peek(REPLIES_MAX)
                if not slices:
                    return any_found
                any_found = True
                for part, messages in decode_messages(slices):
                    with self._lock:
                        self._core.taken(part)
                    for message in messages:
                        if message.body_error is not None:
                            logger.error("a reply to a request is lost: %s", message.body_error)
                        else:
                            self._take(message)
