"""InstanceState is the state that the threads of a Pull actor share about one instance: its ProcessQueues, their lock,
and callbacks.

A change belongs here if several parts of the actor (GroupMember, OffsetCommitter, ListenerFeed, Fetcher) need it;
decisions about queues belong into actors.core.consume.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from actors.core.consume.consume_stats import ConsumeStats
from actors.core.consume.process_queues import ProcessQueues
from raymq.consumer.push.settings import PushSettings
from raymq.message import MessageQueue


class InstanceState:
    """One push-consumer instance. Use `core` and `stats` with `lock` held only, and call nothing that waits then."""

    def __init__(self, name: str, settings: PushSettings) -> None:
        self.name = name
        """The instance's name, which is the member's name in its group."""
        self.settings = settings
        self.lock = threading.Lock()
        """Guards `core` and `stats`."""
        self.core = ProcessQueues(settings)
        self.stats = ConsumeStats()
        self.stopping = threading.Event()
        """Set once the instance is to end."""
        self.on_work: Callable[[], None] = lambda: None
        """Called when something may be delivered that could not be before."""
        self.on_fetchable: Callable[[], None] = lambda: None
        """Called when something may be fetched that could not be before."""
        self.on_committable: Callable[[], None] = lambda: None
        """Called when something may be committed that could not be before."""
        self.on_released: Callable[[], None] = lambda: None
        """Called when a queue was released that another member waits for."""

    def holding(self) -> frozenset[MessageQueue]:
        """The queues that the group must not grant to others."""
        with self.lock:
            return self.core.holding

    def hold(self, queues: Collection[MessageQueue]) -> None:
        """Hold exactly these queues, without a group."""
        with self.lock:
            self.core.hold(queues, time.monotonic())
        self.on_committable()

    def stop(self) -> None:
        """Take no further queue, and deliver nothing more of those held; `release` gives them up once their messages
        are finished and committed."""
        self.stopping.set()
        with self.lock:
            self.core.stop(time.monotonic())
        self.on_committable()

    def release(self) -> None:
        """Give up the revoked queues that may go."""
        with self.lock:
            released = self.core.release(time.monotonic())
        if released:
            self.on_released()

    def lose_all(self) -> None:
        """Deliver and commit nothing more of any queue."""
        with self.lock:
            self.core.lose_all()
